"""Has a bundle for hosts without internet on this host, and serves it to the fleet.

    bundle.py take --settings FILE       bundle.py serve --settings FILE

A bundle is a directory that `fleet bundle` made: manifest.json, wheels/, python/, apt/<system>/,
weights/<model>@<revision>/. `take` is told, as JSON, {"source": where it was carried to, "root":
where ours are kept, "needs": {"locks": {checksum: name}, "listings": {key: name}, "archives":
{checksum: name}, "packages": {checksum of a list: name}, "systems": {name: [packages]}}}. Every
file is compared with the manifest, linked or copied beside its place, and the whole is switched
in by rename; a later run compares sizes and times alone. Exit 1: nothing was switched, what is
right is kept.

`serve` is told {"root", "address", "port", "allow": [addresses]} and answers GET until ended:

    /simple/<package>/, /wheels/<file>    a package index with hashes
    /python/<file>                        archives of Python
    /apt/<system>/                        a flat repository of Debian packages
    /api/v1/models/..., /api/models/...   the weights, as ModelScope and Hugging Face give them

Only files of the manifest are read, only the fleet's addresses are answered.

Runs with the system's Python; standard library alone.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import html
import http.server
import json
import os
import posixpath
import re
import shutil
import socket
import socketserver
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

if __package__:
    from vllm_fleet.onhost import tools
else:  # on a host: a flat directory of scripts
    import tools  # type: ignore[no-redef]

Refusal = tools.Refusal
say = tools.say

MANIFEST = "manifest.json"
STAMP = "bundle.json"
PROGRESS = ".progress.json"
CURRENT = "current"
FORMAT = 2  # 1: without archives
BLOCK = 8 << 20
SPARE = 256 << 20
SHOWN = 5
WORDS = {"locks": "lock", "listings": "listing", "archives": "archive", "packages": "packages"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (("take", "have a bundle"), ("serve", "serve it until ended")):
        one = commands.add_parser(name, help=about)
        one.add_argument("--settings", required=True, help="JSON file, or - for standard input")
    options = parser.parse_args()
    work = take if options.command == "take" else serve
    return int(tools.guarded("bundle", lambda: work(tools.read_settings(options.settings))))


# -- the manifest


def read_manifest(folder: Path) -> Tuple[Dict[str, Any], str]:
    """(manifest, its sha256) of a bundle. Refuses what is none."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
        manifest = json.loads(data)
    except FileNotFoundError:
        raise Refusal(
            f"{folder} holds no bundle (no {MANIFEST}); carry what `fleet bundle` made there, "
            "whole, or correct air_gapped.bundle"
        ) from None
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: cannot be read ({error}); carry the bundle again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Refusal(f"{path}: is of another version of vllm-fleet; make the bundle again")
    for name in manifest["files"]:
        parts = name.split("/")
        if not all(parts) or {".", ".."} & set(parts) or re.search(r"[\0-\x1f\\]", name):
            raise Refusal(f"{path}: names a file {name!r}; refused as a path")
    return manifest, hashlib.sha256(data).hexdigest()


def _held(manifest: Mapping[str, Any]) -> Dict[str, List[str]]:
    """What a bundle holds, by kind, as it is asked for."""
    lists = [manifest["files"].get(f"apt/{system}/Packages") for system in manifest["systems"]]
    return {
        "locks": sorted(one["sha256"] for one in manifest["locks"]),
        "listings": sorted(one["key"] for one in manifest["models"]),
        "archives": sorted(one["sha256"] for one in manifest["archives"]),
        "packages": sorted(one["sha256"] for one in lists if one),
    }


def lacking(manifest: Mapping[str, Any], needs: Mapping[str, Any]) -> List[str]:
    """What this fleet needs and a bundle does not hold, in words."""
    held = _held(manifest)
    missing = [
        f"{WORDS[kind]} {name}"
        for kind in WORDS
        for digest, name in sorted((needs.get(kind) or {}).items())
        if digest not in held[kind]
    ]
    systems = manifest["systems"]
    for system, packages in sorted((needs.get("systems") or {}).items()):
        if system not in systems:
            held_for = ", ".join(sorted(systems)) or "no system"
            missing.append(
                f"Debian packages for {system} (it has those for {held_for}; add "
                f"--system {system}=FILE, apt's sources of that system)"
            )
            continue
        absent = sorted(set(packages) - set(systems[system]))
        missing += [f"Debian package {name} for {system}" for name in absent]
    return missing


# -- take


def take(settings: Mapping[str, Any]) -> None:
    """Have the bundle that was carried here, verified, as `current`."""
    source, root = Path(settings["source"]), Path(settings["root"])
    manifest, digest = read_manifest(source)
    missing = lacking(manifest, settings.get("needs") or {})
    if missing:
        raise Refusal(
            f"the bundle in {source} was made without {', '.join(missing)}; on the connected "
            "machine run `fleet bundle` with these settings again (what it has is kept), and "
            "carry the result here"
        )
    root.mkdir(parents=True, exist_ok=True)
    final = root / digest[:16]
    with tools.locked(root / ".lock", "bundle"):
        if _stands(final, manifest):
            say(f"bundle: {final} stands, {len(manifest['files'])} files")
        else:
            _Taking(source, root, final, manifest, settings).run()
        _point(root, final)
        _remove_others(root, final)
    stamp = {
        "source": str(source),
        "id": final.name,
        **_held(manifest),
        "systems": manifest["systems"],
    }
    tools.write_json(root / STAMP, stamp)


def _stands(final: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether a bundle is complete by its stamp; no data is read."""
    noted = _read_json(final / STAMP)
    return noted is not None and set(noted) == set(manifest["files"]) and not _changed(final, noted)


def _read_json(path: Path) -> Optional[Dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _noted(path: Path) -> List[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _changed(folder: Path, noted: Mapping[str, Any]) -> List[str]:
    """Files that are missing, or of another size or time than noted."""
    found = []
    for name, note in noted.items():
        try:
            if _noted(folder / name) != list(note)[:2]:
                found.append(name)
        except OSError:
            found.append(name)
    return found


class _Taking:
    """One bundle on its way into its place."""

    def __init__(
        self,
        source: Path,
        root: Path,
        final: Path,
        manifest: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        self.source, self.final = source, final
        self.every = tools.ticks(settings)
        self.later = int(settings.get("later") or 0)
        self.manifest = manifest
        self.files: Mapping[str, Mapping[str, Any]] = manifest["files"]
        self.part = root / f".{final.name}.part"
        self.lock = threading.Lock()
        self.done: Dict[str, List[Any]] = {}
        self.bytes = 0

    def run(self) -> None:
        if self.final.exists():  # spoilt: what is right in it goes into the new one
            shutil.rmtree(self.part, ignore_errors=True)
            self.final.rename(self.part)
            with contextlib.suppress(FileNotFoundError):
                (self.part / STAMP).replace(self.part / PROGRESS)
        self.part.mkdir(exist_ok=True)
        known = _read_json(self.part / PROGRESS) or {}
        changed = set(_changed(self.part, known))
        self.done = {
            name: note
            for name, note in known.items()
            if name not in changed and name in self.files and note[2] == self.files[name]["sha256"]
        }
        todo = sorted(set(self.files) - set(self.done), key=lambda n: -self.files[n]["size"])
        total = sum(self.files[name]["size"] for name in todo)
        same = os.stat(self.source).st_dev == os.stat(self.part).st_dev
        if not same:
            wants = {"the bundle": (self.part, total + SPARE)}
            if self.later:
                wants["releases and weights"] = (self.part, self.later)
            tools.check_room(wants)
        say(
            f"bundle: {self.source} to {self.final}: {len(todo)} of {len(self.files)} files, "
            f"{tools.gib(total)} to verify" + ("" if same else " and copy")
        )
        bad: Dict[str, str] = {}
        ended = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(ended, total), daemon=True)
        if self.every:
            ticker.start()
        try:
            with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                for name, problem in zip(todo, pool.map(self._one, todo), strict=True):
                    if problem:
                        bad[name] = problem
        finally:
            ended.set()
            tools.write_json(self.part / PROGRESS, self.done)
        if bad:
            shown = "; ".join(f"{name}: {why}" for name, why in list(bad.items())[:SHOWN])
            more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            raise Refusal(
                f"{self.source} is not what its manifest says: {shown}{more}; carry these files "
                "again (rsync -c) and look at the disk between; nothing was switched, what is "
                "right is kept"
            )
        self._finish()

    def _one(self, name: str) -> str:
        """Have one file, verified; what is wrong with it, or nothing."""
        wanted = self.files[name]
        origin, target = self.source / name, self.part / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            if origin.is_symlink() or not origin.is_file():
                return "is missing"
            size = origin.stat().st_size
            if size != wanted["size"]:
                return f"has {size} bytes, not {wanted['size']}"
            try:
                os.link(origin, target)
                found = self._hash(origin, None)
            except OSError:
                found = self._hash(origin, target)  # another file system
        except OSError as error:
            target.unlink(missing_ok=True)
            return str(error.strerror)
        if found != wanted["sha256"]:
            target.unlink(missing_ok=True)
            return f"sha256 {found}, not {wanted['sha256']}"
        with self.lock:
            self.done[name] = [*_noted(target), found]
        return ""

    def _hash(self, origin: Path, target: Optional[Path]) -> str:
        """Checksum of a file, copied on the way where there is a target."""
        digest = hashlib.sha256()
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(origin.open("rb"))
            copy = stack.enter_context(target.open("wb")) if target else None
            while data := file.read(BLOCK):
                digest.update(data)
                if copy is not None:
                    copy.write(data)
                with self.lock:
                    self.bytes += len(data)
            if copy is not None:
                copy.flush()
                os.fsync(copy.fileno())
        return digest.hexdigest()

    def _tick(self, ended: threading.Event, total: int) -> None:
        before = 0
        while not ended.wait(self.every):
            rate = (self.bytes - before) / self.every
            before = self.bytes
            left = f"{(total - before) / rate:.0f} s left" if rate else "waiting"
            say(
                f"bundle: {tools.gib(before)} of {tools.gib(total)} verified, "
                f"{tools.gib(rate)}/s, {left}"
            )

    def _finish(self) -> None:
        for folder, _, names in os.walk(self.part):
            for name in names:
                path = Path(folder) / name
                if path.relative_to(self.part).as_posix() not in self.files:
                    path.unlink()
        shutil.copyfile(self.source / MANIFEST, self.part / MANIFEST)
        tools.write_json(self.part / STAMP, self.done)
        for folder, _, names in os.walk(self.part):
            os.chmod(folder, 0o755)
            for name in names:
                os.chmod(Path(folder) / name, 0o644)
            tools.sync_directory(Path(folder))
        self.part.rename(self.final)
        tools.sync_directory(self.final.parent)
        size = sum(one["size"] for one in self.files.values())
        say(f"bundle: {self.final} verified, {len(self.files)} files, {tools.gib(size)}")


def _point(root: Path, final: Path) -> None:
    link = root / CURRENT
    if not link.is_symlink() or os.readlink(link) != final.name:
        fresh = root / f".{CURRENT}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(final.name)
        fresh.replace(link)


def _remove_others(root: Path, final: Path) -> None:
    """Older bundles: directories with our stamp, never a link."""
    for path in root.iterdir():
        ours = path != final and not path.is_symlink() and path.is_dir()
        if ours and ((path / STAMP).is_file() or re.fullmatch(r"\.[0-9a-f]{16}\.part", path.name)):
            shutil.rmtree(path)
            say(f"bundle: {path} removed")


# -- serve


class Shelf:
    """One bundle, as it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest, _ = read_manifest(folder)
        self.files: Dict[str, Dict[str, Any]] = manifest["files"]
        self.models: List[Dict[str, Any]] = manifest["models"]
        self.packages: Dict[str, List[str]] = {}
        for name in sorted(self.files):
            folder_name, _, wheel = name.partition("/")
            if folder_name == "wheels":
                package = re.sub(r"[-_.]+", "-", wheel.partition("-")[0]).lower()
                self.packages.setdefault(package, []).append(wheel)

    def model(self, repo: str, revision: str) -> Optional[Dict[str, Any]]:
        """A model by its repository and its revision or checksum."""
        for one in self.models:
            if one["repo"] == repo and revision in (one["revision"], one["digest"]):
                return one
        return None

    def static(self, path: str) -> Optional[Path]:
        """A wheel, an archive of Python, or a file of the Debian repository."""
        name = posixpath.normpath(path).lstrip("/")  # apt asks for /apt/<system>/./Packages
        shown = name in self.files and name.startswith(("wheels/", "python/", "apt/"))
        return self.folder / name if shown else None

    def weight(self, model: Mapping[str, Any], path: str) -> Optional[Path]:
        """A file of a model."""
        listed = any(one["path"] == path for one in model["files"])
        return self.folder / model["directory"] / path if listed else None


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"
    timeout = 60

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
        path = urllib.parse.unquote(url.path)
        if self.client_address[0] not in self.server.allow:
            self.close_connection = True
            return self._json(403, {"Message": "not of this fleet"})
        shelf = self.server.shelf()
        if shelf is None:
            return self._json(503, {"Message": "no bundle here yet"})
        found = shelf.static(path)
        if found is not None:
            return self._file(found)
        index = re.fullmatch(r"/simple/(?:([^/]+)/?)?", path)
        if index is not None:
            return self._index(shelf, index[1])
        return self._hub(shelf, path, query)

    do_HEAD = do_GET

    def _index(self, shelf: Shelf, package: Optional[str]) -> None:
        """A page of the package index; every link with its checksum."""
        if package is None:
            links = [f'<a href="{name}/">{name}</a>' for name in sorted(shelf.packages)]
        elif package in shelf.packages:
            links = [
                f'<a href="../../wheels/{urllib.parse.quote(name)}#sha256='
                f'{shelf.files[f"wheels/{name}"]["sha256"]}">{html.escape(name)}</a>'
                for name in shelf.packages[package]
            ]
        else:
            return self._json(404, {"Message": "no such package"})
        text = f"<!DOCTYPE html><html><body>{'<br>'.join(links)}</body></html>"
        return self._answer(200, "text/html; charset=utf-8", text.encode())

    def _hub(self, shelf: Shelf, path: str, query: Mapping[str, str]) -> None:
        """ModelScope's and Hugging Face's own addresses."""
        if path in ("/health", "/api/v1/repos/internalAccelerationInfo"):
            return self._json(200, {"Code": 200, "Success": True, "Data": {}})
        own = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)(/repo(?:/files)?)?", path)
        other = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        plain = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+)", path)
        if own is not None:
            return self._modelscope(shelf, own[1], own[2] or "", query)
        if other is not None:
            model = shelf.model(other[1], other[3])
            if model is None:
                return self._json(404, {"error": "Revision Not Found"})
            if other[2] == "revision":
                return self._json(200, {"id": other[1], "sha": model["digest"]})
            return self._json(200, [_huggingface(one) for one in model["files"]])
        if plain is not None:
            for model in shelf.models:
                for revision in (model["digest"], model["revision"]):
                    if model["repo"] == plain[1] and plain[2].startswith(f"{revision}/"):
                        found = shelf.weight(model, plain[2][len(revision) + 1 :])
                        if found is not None:
                            return self._file(found)
        return self._json(404, {"error": "not in this bundle"})

    def _modelscope(self, shelf: Shelf, repo: str, what: str, query: Mapping[str, str]) -> None:
        owner, _, name = repo.partition("/")
        if not what and any(one["repo"] == repo for one in shelf.models):
            about = {"Path": owner, "Name": name}
            return self._json(200, {"Code": 200, "Success": True, "Data": about})
        model = shelf.model(repo, query.get("Revision", "master"))
        if model is None:
            return self._json(404, {"Code": 404, "Success": False, "Message": "not in this bundle"})
        if what == "/repo/files":
            files = [
                {"Path": one["path"], "Name": one["path"].rpartition("/")[2], "Type": "blob",
                 "Size": one["size"], "Sha256": one["sha256"], "Revision": ""}
                for one in model["files"]
            ]  # fmt: skip
            return self._json(200, {"Code": 200, "Success": True, "Data": {"Files": files}})
        found = shelf.weight(model, query.get("FilePath", ""))
        if found is None:
            return self._json(404, {"Code": 404, "Success": False, "Message": "no such file"})
        return self._file(found)

    def _file(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError:
            return self._json(404, {"Message": "no such file"})
        with file:
            size = os.fstat(file.fileno()).st_size
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            start = int(match[1]) if match else 0
            end = min(size, int(match[2]) + 1) if match and match[2] else size
            if match and (start >= size or end <= start):
                return self._answer(416, "text/plain", b"", {"Content-Range": f"bytes */{size}"})
            self.send_response(206 if match else 200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(end - start))
            self.send_header("Accept-Ranges", "bytes")
            if match:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            if self.command == "HEAD" or end <= start:
                return None
            try:
                self.wfile.flush()
                self.connection.sendfile(file, start, end - start)  # the kernel moves the bytes
            except OSError:
                self.close_connection = True
        return None

    def _json(self, status: int, value: Any) -> None:
        self._answer(status, "application/json", json.dumps(value).encode())

    def _answer(
        self, status: int, kind: str, body: bytes, more: Optional[Mapping[str, str]] = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Only what was refused: the rest is no news."""
        if len(args) > 1 and str(args[1]) in ("403", "404", "503"):
            say(f"{self.client_address[0]}: {args[0]} {args[1]}")


def _huggingface(one: Mapping[str, Any]) -> Dict[str, Any]:
    entry: Dict[str, Any] = {"type": "file", "path": one["path"], "size": one["size"]}
    if one["listed"] == "git":  # as it was listed: a file that is no LFS object
        return {**entry, "oid": one["git"]}
    return {**entry, "oid": "", "lfs": {"oid": one["sha256"], "size": one["size"]}}


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """The bundle that `current` leads to, to these addresses alone."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: Tuple[str, int], root: Path, allow: Iterable[str]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.root, self.allow = root, set(allow)
        self.loaded: Tuple[str, Optional[Shelf]] = ("", None)
        self.lock = threading.Lock()
        super().__init__(address, _Handler)

    def shelf(self) -> Optional[Shelf]:
        """The present bundle; read anew when another was switched in."""
        with self.lock:
            try:
                target = os.readlink(self.root / CURRENT)
                if target != self.loaded[0]:
                    self.loaded = (target, Shelf(self.root / target))
            except (OSError, Refusal):
                return None
            return self.loaded[1]

    def server_bind(self) -> None:
        """Without the look-up of its own name, which takes long without a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of ours."""


def serve(settings: Mapping[str, Any]) -> None:
    """Serve until ended."""
    address = (str(settings["address"]), int(settings["port"]))
    with Server(address, Path(settings["root"]), settings["allow"]) as server:
        say(f"bundle: {settings['root']} at {address[0]}:{address[1]}")
        _tell_systemd()
        server.serve_forever(poll_interval=0.5)


def _tell_systemd() -> None:
    """That connections are taken: whoever started the unit goes on then."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            out.send(b"READY=1")


if __name__ == "__main__":
    sys.exit(main())
