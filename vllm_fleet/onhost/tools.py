"""Builds the tools venv of a host: /opt/vllm/tools/<id>/, with `current` linking to it.

It holds what our own scripts need (modelscope, uv, prometheus-client), never vLLM: a download
or a build must not depend on the release that it is for. Installed by pip from a lock with
hashes, beside its final path, and switched in by rename.

    tools.py build --settings FILE

FILE is JSON: {"lock": text or null (the lock beside this script), "python": "python3",
"tools": "/opt/vllm/tools", "index": {"index_url", "extra_index_urls", "find_links",
"no_index"}, "proxy": {"http", "https", "no_proxy"}, "cache": directory}. Every index setting
null or empty means: the host's own pip configuration. Exit 0 when the venv stands, else 1.

Runs with the system's Python; standard library alone. release.py and weights.py share the
helpers here.
"""

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

STAMP = "tools.json"
LOCK = "tools-requirements.lock"
OLDEST_PYTHON = (3, 10)
ROOM = 400 << 20  # bytes that venv and pip's downloads take, rounded up
# File systems that several hosts have in common.
SHARED = frozenset(
    ("nfs", "nfs4", "lustre", "ceph", "fuse.ceph", "fuse.ceph-fuse", "beegfs", "gpfs", "cifs",
     "smb3", "9p", "virtiofs", "afs", "orangefs", "glusterfs", "fuse.glusterfs", "wekafs",
     "fuse.juicefs", "fuse.JuiceFS", "fuse.sshfs", "panfs", "ocfs2", "gfs2")
)  # fmt: skip
TICK_SECONDS = 5.0  # between two lines of progress
# sudo and pyinfra give different PATHs, and root's may begin with a private Python.
SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Texts of pip and uv, and what they mean for an operator. The first that matches counts.
CAUSES: Tuple[Tuple[str, str, str], ...] = (
    (
        r"No space left on device|os error 28|Errno 28",
        "the disk became full",
        "make room and run again; what was downloaded is kept",
    ),
    (
        r"(?i)do not match the hashes|hash mismatch",
        "a package is not the one that the lock names",
        "the mirror serves another build, or the download was altered: clear the mirror's copy, "
        "or make the lock again from an index that you trust",
    ),
    (
        r"(?i)no matching (?:platform|python|abi) tag|has no wheels with a matching|"
        r"current Python version .*does not satisfy|requires? (?:a different )?Python|"
        r"Requires-Python",
        "a package has no build for this Python or platform",
        "set `python` to one that the lock was made for, or make the lock for this host's Python",
    ),
    (
        r"(?i)error sending request|Could not connect|Connection refused|timed out|"
        r"Temporary failure in name resolution|dns error|failed to lookup|NewConnectionError|"
        r"ConnectTimeout|Network is unreachable|ProxyError|tunnel error|certificate",
        "the package index cannot be reached",
        "check package_index, proxy and name resolution on this host",
    ),
    (
        r"(?i)ensurepip is not available|No module named '?(?:ensurepip|venv)",
        "this Python cannot make a virtual environment",
        "apt-get install python3-venv (of the same version as the interpreter)",
    ),
    (
        r"(?i)no version of|there are no versions|No matching distribution|was not found in the "
        r"package registry|not found in the package|no solution found",
        "no such version at the package index",
        "check vllm_version and vllm_package; a mirror may not hold it yet",
    ),
)


class Refusal(Exception):
    """What, where, why and what to do, for the operator. Ends the script with exit 1."""


def say(text: str) -> None:
    """One line of progress, at once also through a pipe.

    Where the operator is gone (a lost connection), the work goes on unheard: what is done by
    then need not be done again.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, sys.stdout.fileno())
        os.close(silent)


def ticks(settings: Mapping[str, Any]) -> float:
    """Seconds between two lines of progress; 0 where nobody watches."""
    return float(settings.get("progress", TICK_SECONDS))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["build"])
    parser.add_argument("--settings", required=True, help="JSON file, or - for standard input")
    options = parser.parse_args()
    return guarded("tools", lambda: build(read_settings(options.settings)))


def guarded(what: str, work: Any) -> int:
    """Run `work`; a refusal, a full disk or an interrupt ends as one plain line and exit 1."""
    os.umask(0o022)  # the engine's user reads what root writes here
    try:
        work()
    except Refusal as refusal:
        print(f"{what}: {refusal}", file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        print(
            f"{what}: {error.strerror or error}: {error.filename or ''}; nothing was switched",
            file=sys.stderr,
            flush=True,
        )
        return 1
    except KeyboardInterrupt:
        print(f"{what}: interrupted; run again to go on", file=sys.stderr, flush=True)
        return 1
    return 0


def read_settings(path: str) -> Dict[str, Any]:
    """The JSON object in a file (`-`: standard input). Refuses anything else."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        settings = json.loads(text)
    except (OSError, ValueError) as error:
        raise Refusal(f"settings {path}: {error}") from None
    if not isinstance(settings, dict):
        raise Refusal(f"settings {path}: not a JSON object")
    return settings


def build(settings: Mapping[str, Any]) -> Path:
    """Have the venv of these settings, and `current` link to it. Returns its directory."""
    root = Path(settings.get("tools") or "/opt/vllm/tools")
    lock = settings.get("lock") or (Path(__file__).parent / LOCK).read_text(encoding="utf-8")
    python, version = find_python(str(settings.get("python") or "python3"))
    final = root / tools_id(lock, version)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / ".build.lock", "tools"):
        if (final / STAMP).is_file():
            say(f"tools: {final} stands")
        else:
            _make(settings, lock, python, version, final)
        link = root / "current"
        if not link.is_symlink() or os.readlink(link) != final.name:
            fresh = root / ".current.new"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(final.name)
            fresh.replace(link)
    return final


def tools_id(lock: str, python_version: str) -> str:
    """Id of a tools venv: of its lock and of the Python that it was made with."""
    return hashlib.sha256(f"{python_version}\n{lock}".encode()).hexdigest()[:12]


def _make(settings: Mapping[str, Any], lock: str, python: str, version: str, final: Path) -> None:
    started = time.monotonic()
    check_room({"tools venv": (final.parent, ROOM)})
    part = final.parent / f".{final.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    say(f"tools: making {final} with {python} {version}")
    env = base_env(settings.get("proxy") or {})
    run([python, "-m", "venv", str(part)], env, "tools: making the virtual environment")
    requirements = part / LOCK
    requirements.write_text(lock, encoding="utf-8")
    arguments = ["install", "--require-hashes", "--no-deps", "--only-binary", ":all:", "--quiet"]
    if settings.get("cache"):
        arguments += ["--cache-dir", str(Path(settings["cache"]) / "pip")]
    pip = [str(part / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    index = settings.get("index") or {}
    if given(index):
        pip.append("--isolated")  # what is set replaces the host's pip configuration
        arguments += pip_arguments(index)
        # Plain HTTP that the operator names: pip would leave it out, and hashes decide anyway.
        places = [index.get("index_url"), *(index.get("extra_index_urls") or [])]
        for place in filter(None, [*places, *(index.get("find_links") or [])]):
            url = urllib.parse.urlsplit(str(place))
            if url.scheme == "http":
                arguments += ["--trusted-host", url.netloc.rpartition("@")[2]]
    run(
        [*pip, *arguments, "-r", str(requirements)],
        env,
        f"tools: installing packages into {final}",
        where=index_words(index, {}),
    )
    _move_scripts(part, final)
    run([str(part / "bin/python"), "-c", "import modelscope_hub, prometheus_client, requests"],
        env, "tools: importing what was installed")  # fmt: skip
    stamp = {
        "id": final.name,
        "lock_sha256": hashlib.sha256(lock.encode()).hexdigest(),
        "python": version,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(part / STAMP, stamp)
    shutil.rmtree(final, ignore_errors=True)  # without a stamp: not ours to trust, nor in use
    part.rename(final)
    sync_directory(final.parent)
    say(f"tools: {final} ready after {stamp['seconds']} s")


def _move_scripts(part: Path, final: Path) -> None:
    """Write the final path where `python -m venv` and pip wrote the present one."""
    for script in [*(part / "bin").iterdir(), part / "pyvenv.cfg"]:
        if script.is_symlink() or not script.is_file():
            continue
        data = script.read_bytes()
        if str(part).encode() in data and b"\0" not in data[:512]:
            script.write_bytes(data.replace(str(part).encode(), str(final).encode()))


# Shared with release.py and weights.py.


def find_python(wanted: str) -> Tuple[str, str]:
    """(path, version) of an interpreter. Refuses what is missing, too old or out of reach."""
    path = shutil.which(wanted, path=SEARCH)
    if path is None:
        raise Refusal(f"python: {wanted!r} is not on this host; install it or correct `python`")
    code = "import os,sys;print(sys.version.split()[0]);print(os.path.realpath(sys.executable))"
    answer = subprocess.run(
        [path, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    lines = answer.stdout.split("\n")
    if answer.returncode or len(lines) < 2:
        raise Refusal(f"python: {path} does not run: {answer.stderr.strip()[-300:]}")
    version, real = lines[0], lines[1]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise Refusal(f"python: {path} is {version}, needed is {oldest} or later; set `python`")
    if real.startswith(("/root/", "/home/")):
        raise Refusal(
            f"python: {path} is {real}, which the engine's user cannot reach; "
            "set `python` to one under /usr or /opt"
        )
    return path, version


def base_env(proxy: Mapping[str, Optional[str]]) -> Dict[str, str]:
    """Environment of pip and uv: this process's, less what would change their result."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "VIRTUAL_ENV", "UV_"))
    }
    env["PATH"] = SEARCH
    env.setdefault("HOME", "/root")
    for key, name in (("http", "http_proxy"), ("https", "https_proxy"), ("no_proxy", "no_proxy")):
        if proxy.get(key):
            env[name] = env[name.upper()] = str(proxy[key])
    return env


def given(index: Mapping[str, Any]) -> bool:
    """Whether the operator set anything of the index."""
    return any(
        index.get(key) for key in ("index_url", "extra_index_urls", "find_links", "no_index")
    )


def pip_arguments(index: Mapping[str, Any]) -> List[str]:
    """Index settings as arguments; pip and uv spell these alike."""
    arguments: List[str] = []
    if index.get("no_index"):
        arguments.append("--no-index")
    elif index.get("index_url"):
        arguments += ["--index-url", str(index["index_url"])]
    for url in [] if index.get("no_index") else index.get("extra_index_urls") or []:
        arguments += ["--extra-index-url", str(url)]
    for links in index.get("find_links") or []:
        arguments += ["--find-links", str(links)]
    return arguments


def index_words(index: Mapping[str, Any], config: Mapping[str, Sequence[str]]) -> str:
    """Where packages are looked for, for messages; credentials in addresses are left out."""
    if given(index):
        places = [index.get("index_url"), *(index.get("extra_index_urls") or [])]
        places = [] if index.get("no_index") else places
        places += index.get("find_links") or []
    else:
        places = [*config.get("index-url", []), *config.get("extra-index-url", [])]
        places += config.get("find-links", [])
    named = [re.sub(r"//[^/@]*@", "//", str(place)) for place in places if place]
    return ", ".join(named) or "the default index"


def pip_config(python: str) -> Dict[str, List[str]]:
    """The host's own pip configuration, as `pip install` would take it: option to values.

    uv does not read it, so that a mirror set for pip would be missed. Empty without pip.
    """
    answer = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: Dict[str, Dict[str, List[str]]] = {"global": {}, "install": {}, ":env:": {}}
    for line in answer.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in found:
            with contextlib.suppress(ValueError, SyntaxError):
                found[section][option] = str(ast.literal_eval(value)).split()
    return {**found["global"], **found["install"], **found[":env:"]}


def uv_arguments(
    index: Mapping[str, Any], config: Mapping[str, Sequence[str]]
) -> Tuple[List[str], Dict[str, str]]:
    """(arguments, environment) that make uv look where the operator, or the host's pip, says."""
    env: Dict[str, str] = {}
    if os.path.exists("/etc/ssl/certs/ca-certificates.crt"):
        env["UV_SYSTEM_CERTS"] = "1"  # an own certificate authority of the site is there
    if given(index):
        several = bool(index.get("extra_index_urls"))
        arguments = ["--no-config", *pip_arguments(index)]
    else:
        taken = {
            "no_index": config.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"),
            "index_url": (config.get("index-url") or [None])[0],  # type: ignore[list-item]
            "extra_index_urls": config.get("extra-index-url"),
            "find_links": config.get("find-links"),
        }
        several = bool(taken["extra_index_urls"])
        arguments = pip_arguments(taken)
        if config.get("cert"):
            env["SSL_CERT_FILE"] = config["cert"][0]
        for host in config.get("trusted-host", []):
            arguments += ["--allow-insecure-host", host]
        if config.get("proxy"):
            env["ALL_PROXY"] = config["proxy"][0]
    if several:
        # As pip does. uv alone would stop at the first index that knows a name, and an extra
        # index often holds a few versions only. Hashes decide what is installed either way.
        arguments += ["--index-strategy", "unsafe-best-match"]
    return arguments, env


def run(
    argv: Sequence[str], env: Mapping[str, str], doing: str, *, where: str = "", stdin: str = ""
) -> str:
    """Run a command; its output. A failure is a Refusal with cause and remedy."""
    try:
        done = subprocess.run(
            list(argv), env=dict(env), input=stdin, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    except OSError as error:
        raise Refusal(f"{doing}: {argv[0]}: {error.strerror}") from None
    if done.returncode:
        raise Refusal(explain(done.stdout, doing, where, done.returncode))
    return done.stdout


def explain(output: str, doing: str, where: str, code: int) -> str:
    """The failure of pip, uv or vllm in an operator's words, its last lines below."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    tail = "\n".join(f"    {line[:400]}" for line in lines[-12:])
    for pattern, cause, remedy in CAUSES:
        if re.search(pattern, output):
            package = _package_of(output) if "lock names" in cause or "build for" in cause else ""
            named = f" ({package})" if package else ""
            at = f" [{where}]" if where else ""
            return f"{doing}: {cause}{named}{at}; {remedy}\n{tail}"
    return f"{doing}: failed with exit {code}\n{tail}"


def _package_of(output: str) -> str:
    """The package that pip's or uv's complaint is about, or nothing."""
    for pattern in (
        r"Hash mismatch for [`'\"]?([A-Za-z0-9._+=-]+)",
        r"(?m)^\s*([A-Za-z0-9._-]+(?:==\S+)?) from \S+.*:\s*$",  # pip's hash complaint
        r"Because ([A-Za-z0-9._-]+==\S+) has no",
        r"(?:distribution|wheel|download|read) [`'\"]?([A-Za-z0-9._-]+==[^\s`'\"]+)",
        r"Failed to (?:download|install|fetch)[: ]+[`'\"]?([A-Za-z0-9._+-]+(?:==[^\s`'\"]+)?)",
    ):
        match = re.search(pattern, output)
        if match:
            return match.group(1)
    return ""


def check_room(wants: Mapping[str, Tuple[Path, int]]) -> None:
    """Refuse unless every file system holds what is about to be written, all of it together.

    ``wants``: what it is for -> (a directory there or to be, bytes).
    """
    by_device: Dict[int, List[Tuple[str, Path, int]]] = {}
    for what, (path, size) in wants.items():
        place = existing(path)
        by_device.setdefault(os.stat(place).st_dev, []).append((what, place, size))
    for group in by_device.values():
        needed = sum(size for _, _, size in group)
        status = os.statvfs(group[0][1])
        free = status.f_bavail * status.f_frsize
        if free < needed:
            parts = ", ".join(f"{what} {gib(size)}" for what, _, size in group)
            raise Refusal(
                f"no space at {group[0][1]}: needed {gib(needed)} ({parts}), available {gib(free)};"
                f" make {gib(needed - free)} of room; nothing was changed"
            )


def existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def gib(size: float) -> str:
    """Bytes as people read them."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{int(size)} B"


def shared_kind(path: Path, mounts: Optional[str] = None) -> str:
    """The kind of a file system that other hosts write to as well; "" for a host's own.

    ``mounts``: text of mountinfo; this process's where not given.
    """
    if mounts is None:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    found, longest = "", -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        place = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), before.split()[4])
        below = place if place.endswith("/") else f"{place}/"
        if f"{path}/".startswith(below) and len(place) >= longest:  # a later mount hides one
            found, longest = after.split()[0], len(place)
    return found if found in SHARED else ""


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file, so that two runs do not collide; the kernel frees it with the process.

    On shared storage two hosts do not collide either: NFS and Lustre carry such locks.
    """
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(f"{what}: {file.read().strip() or 'another run'} is at it; waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            kind = shared_kind(path.resolve())
            raise Refusal(
                f"{what}: {path.parent} takes no locks ({error.strerror}), and without them two "
                f"hosts would write the same files: mount {kind or 'it'} with locks (Lustre: "
                "-o flock; NFS: not nolock, and the lock manager reachable)"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} of {os.uname().nodename}")
        file.flush()
        yield


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all, and have it on the disk."""
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
