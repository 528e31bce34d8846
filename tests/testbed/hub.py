"""A small model hub that speaks ModelScope's and Hugging Face's download protocols, with faults.

    python -m tests.testbed.hub --root DIR --listen 127.0.0.1:9000 [--log FILE]

DIR/<owner>/<name>/ holds one repository. Its revisions are either directories named by
`revisions.json` ({"master": ".", "v1.0": "v1"}: revision to directory) or, without that file,
the repository itself as `master`. What the hub answers is what modelscope 1.40 asks for:

    GET /api/v1/models/<id>                                   the repository
    GET /api/v1/models/<id>/repo/files?Revision=&Recursive=   listing with sizes and sha256
    GET /api/v1/models/<id>/repo?Revision=&FilePath=          a file, whole or by Range

and what Hugging Face's clients do, where `main` is another name of `master`:

    GET /api/models/<id>/revision/<revision>                  its commit
    GET /api/models/<id>/tree/<revision>?recursive=true       listing, PAGE entries a page
    GET /<id>/resolve/<revision>/<path>                       a small file, or 302 to /cdn/...

Each answer of a file or listing becomes one JSON line of the log: time, path, file, range,
status, bytes sent, and whether a token came with it. Faults are read from DIR/faults.json before
every answer, so that a test switches them at run time by writing that file (see :class:`Fault`),
or by PUT /faults.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BLOCK = 64 << 10
PAGE = 4
FAULTS = "faults.json"
REVISIONS = "revisions.json"


@dataclass(frozen=True)
class Fault:
    """One thing that the hub does wrong. ``kind`` is one of:

    short         answers with the first `bytes` bytes, as if they were all
    cut           ends the connection after `bytes` of each answer
    wrong_bytes   flips the byte at position `bytes`
    wrong_size    lists the file `bytes` longer than it is
    no_range      answers 200 and the whole file to a Range
    no_sha256     lists the file without its sha256
    slow          sends `bytes` a second
    hang          accepts the request and answers nothing for `bytes` seconds
    dead          closes every connection at once
    error         answers 500

    ``path`` is a glob over the file's path in its repository; listings have the path ``""``,
    which only `*` matches. ``times``: how many answers it spoils; None: every one.
    """

    kind: str
    path: str = "*"
    bytes: int = 0
    times: int | None = None


@dataclass
class Hub:
    """The hub's state: where repositories are, the log, and known checksums."""

    root: Path
    log: Path
    checksums: dict[tuple[str, int, int], str] = field(default_factory=dict)
    used: dict[Fault, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, path: str, *kinds: str) -> Fault | None:
        """The first fault of these kinds for this path; counts as used."""
        with self.lock:
            for fault in self.faults():
                if fault.kind not in kinds or not fnmatch.fnmatchcase(path, fault.path):
                    continue
                if fault.times is not None and self.used.get(fault, 0) >= fault.times:
                    continue
                self.used[fault] = self.used.get(fault, 0) + 1
                return fault
        return None

    def faults(self) -> list[Fault]:
        """The faults that are switched on."""
        try:
            return [Fault(**entry) for entry in json.loads((self.root / FAULTS).read_text())]
        except FileNotFoundError:
            return []

    def directory(self, repo: str, revision: str) -> Path | None:
        """Where a repository's revision lies; None where there is none."""
        base = self.root / repo
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or ".." in repo or not base.is_dir():
            return None
        try:
            known = json.loads((base / REVISIONS).read_text())
        except FileNotFoundError:
            known = {"master": "."}
        if revision == "main" and revision not in known:
            revision = "master"
        by_commit = {_commit(repo, name): name for name in known}
        revision = by_commit.get(revision, revision)
        return base / known[revision] if revision in known else None

    def sha256(self, path: Path) -> str:
        """Checksum of a file, hashed once for each content."""
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        if key not in self.checksums:
            with path.open("rb") as file:
                self.checksums[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self.checksums[key]

    def record(self, **entry: Any) -> None:
        """Append one line to the log."""
        line = json.dumps({"time": round(time.time(), 3), **entry}) + "\n"
        with self.lock, self.log.open("a") as file:
            file.write(line)


def _commit(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        path = unquote(url.path)
        model = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)(/repo(?:/files)?)?", path)
        file = query.get("FilePath", "") if model and model[2] == "/repo" else ""
        resolve = re.fullmatch(r"(/cdn)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        other = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        file = resolve[4] if resolve else file
        if self.hub.fault(file, "dead"):
            self.hub.record(path=path, file=file, range=None, status=0, bytes=0)
            self._hang_up()
            return
        hang = self.hub.fault(file, "hang")
        if hang is not None:
            time.sleep(hang.bytes)
            self._hang_up()
            return
        if self.hub.fault(file, "error"):
            self._json(500, {"Code": 500, "Success": False, "Message": "internal error"})
        elif path == "/api/v1/repos/internalAccelerationInfo":
            self._json(200, {"Code": 200, "Success": True, "Data": {}})
        elif path == "/health":
            self._json(200, {"Code": 200, "Success": True})
        elif resolve is not None:
            self._resolve(resolve[2], resolve[3], resolve[4], moved=bool(resolve[1]))
        elif other is not None:
            self._huggingface(other[1], other[2], other[3], query)
        elif model is None:
            self._json(404, _not_found(f"no such page: {path}"))
        else:
            self._model(model[1], model[2] or "", query)

    def do_PUT(self) -> None:
        if self.path != "/faults":
            self._json(404, _not_found(self.path))
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        switch(self.hub.root, *(Fault(**entry) for entry in json.loads(body)))
        self._json(200, {"Code": 200, "Success": True})

    def _model(self, repo: str, what: str, query: dict[str, str]) -> None:
        revision = query.get("Revision", "master")
        directory = self.hub.directory(repo, revision)
        if directory is None:
            self._json(404, _not_found(f"record not found: {repo}@{revision}"))
        elif what == "":
            owner, name = repo.split("/")
            self._json(200, {"Code": 200, "Success": True, "Data": {"Path": owner, "Name": name}})
        elif what == "/repo/files":
            files = self._listing(directory, query.get("Root", ""))
            self._json(200, {"Code": 200, "Success": True, "Data": {"Files": files}})
        else:
            wanted = directory / query.get("FilePath", "")
            inside = wanted.resolve().is_relative_to(directory.resolve())
            if inside and wanted.is_file():
                self._file(wanted, query["FilePath"])
            else:
                self._json(404, _not_found(f"no such file: {query.get('FilePath')}"))

    def _huggingface(self, repo: str, what: str, revision: str, query: dict[str, str]) -> None:
        directory = self.hub.directory(repo, revision)
        if directory is None:
            self._json(404, {"error": "Revision Not Found"})
            return
        if what == "revision":
            name = "master" if revision == "main" else revision
            self._json(200, {"id": repo, "sha": _commit(repo, name)})
            return
        entries: list[dict[str, Any]] = []
        for one in self._listing(directory, ""):
            if one["Type"] == "tree":
                entries.append({"type": "directory", "path": one["Path"], "size": 0, "oid": "0"})
                continue
            if _large(one["Path"]):  # in git there is a pointer to it
                data = b"version https://git-lfs.github.com/spec/v1\n"
                data += f"oid sha256:{one['Sha256']}\nsize {one['Size']}\n".encode()
            else:
                data = (directory / one["Path"]).read_bytes()
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry = {"type": "file", "path": one["Path"], "size": one["Size"], "oid": git}
            if _large(one["Path"]):
                entry["lfs"] = {"oid": one["Sha256"], "size": one["Size"], "pointerSize": 134}
            entries.append(entry)
        first = int(query.get("cursor", "0"))
        more = first + PAGE < len(entries)
        path = urlsplit(self.path).path
        link = f'<{path}?recursive=true&cursor={first + PAGE}>; rel="next"' if more else None
        self._json(200, entries[first : first + PAGE], link)

    def _resolve(self, repo: str, revision: str, name: str, *, moved: bool) -> None:
        directory = self.hub.directory(repo, revision)
        wanted = (directory or self.hub.root) / name
        inside = directory is not None and wanted.resolve().is_relative_to(directory.resolve())
        if not inside or not wanted.is_file():
            self._json(404, {"error": "Entry not found"})
        elif _large(name) and not moved:
            self.send_response(302)
            self.send_header("Location", f"/cdn{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._file(wanted, name)

    def _listing(self, directory: Path, below: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for path in sorted((directory / below).rglob("*")):
            name = path.relative_to(directory).as_posix()
            if name == REVISIONS:
                continue
            entry: dict[str, Any] = {"Path": name, "Name": path.name, "Revision": "", "Sha256": ""}
            if path.is_dir():
                entries.append({**entry, "Type": "tree", "Size": 0})
                continue
            more = self.hub.fault(name, "wrong_size")
            hidden = self.hub.fault(name, "no_sha256")
            entries.append(
                {
                    **entry,
                    "Type": "blob",
                    "Size": path.stat().st_size + (more.bytes if more else 0),
                    "Sha256": "" if hidden else self.hub.sha256(path),
                }
            )
        return entries

    def _file(self, path: Path, name: str) -> None:
        size = path.stat().st_size
        asked = self.headers.get("Range")
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
        start, end = 0, size
        if match and self.hub.fault(name, "no_range"):
            match = None
        if match:
            start = int(match[1])
            end = min(size, int(match[2]) + 1) if match[2] else size
            if start >= size:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                self._log(name, asked, 416, 0)
                return
        status = 206 if match else 200
        short = self.hub.fault(name, "short")
        if short is not None:
            start, end, status = 0, min(size, short.bytes), 200
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        sent = 0
        try:
            sent = self._send(path, name, start, end)
        finally:
            self._log(name, asked, status, sent)

    def _send(self, path: Path, name: str, start: int, end: int) -> int:
        cut = self.hub.fault(name, "cut")
        flip = self.hub.fault(name, "wrong_bytes")
        slow = self.hub.fault(name, "slow")
        sent, began = 0, time.monotonic()
        block = min(BLOCK, max(1, slow.bytes // 20)) if slow else BLOCK
        with path.open("rb") as file:
            file.seek(start)
            while start + sent < end:
                data = bytearray(file.read(min(block, end - start - sent)))
                if not data:
                    break
                at = start + sent
                if flip is not None and at <= flip.bytes < at + len(data):
                    data[flip.bytes - at] ^= 0xFF
                if cut is not None and sent + len(data) > cut.bytes:
                    self.wfile.write(data[: cut.bytes - sent])
                    self.wfile.flush()
                    self._hang_up(hard=False)
                    return cut.bytes
                try:
                    self.wfile.write(data)
                except OSError:  # the client is gone
                    self.close_connection = True
                    return sent
                sent += len(data)
                if slow is not None:
                    time.sleep(max(0.0, began + sent / slow.bytes - time.monotonic()))
        return sent

    def _hang_up(self, *, hard: bool = True) -> None:
        """End the connection: with a reset, or after what was sent arrived."""
        self.close_connection = True
        if hard:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def _json(self, status: int, value: Any, link: str | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        if link is not None:
            self.send_header("Link", link)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self._log("", None, status, len(body))

    def _log(self, file: str, asked: str | None, status: int, sent: int) -> None:
        path = urlsplit(self.path).path
        token = "Authorization" in self.headers or "m_session_id" in self.headers.get("Cookie", "")
        self.hub.record(path=path, file=file, range=asked, status=status, bytes=sent, token=token)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the log file says it."""


def _large(name: str) -> bool:
    """Whether a file is an LFS object at Hugging Face."""
    return name.endswith((".safetensors", "tokenizer.json"))


def _not_found(text: str) -> dict[str, Any]:
    return {"Code": 10010205001, "Success": False, "Message": text, "RequestId": "", "Data": None}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], hub: Hub) -> None:
        super().__init__(address, _Handler)
        self.hub = hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away in the middle are what the tests are about."""


def server(root: Path, listen: str, log: Path | None = None) -> _Server:
    """A hub bound to IP:PORT (port 0: any), not yet serving."""
    host, _, port = listen.rpartition(":")
    return _Server((host, int(port)), Hub(root, log or root / "requests.jsonl"))


@contextmanager
def running(root: Path, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve a directory from a thread of this process; the endpoint's address."""
    hub = server(root, listen)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://{hub.server_address[0]!s}:{hub.server_address[1]}"
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def switch(root: Path, *faults: Fault) -> None:
    """Switch these faults on at the hub of a directory, and all others off."""
    fresh = root / f".{FAULTS}.new"
    fresh.write_text(json.dumps([asdict(fault) for fault in faults]))
    fresh.replace(root / FAULTS)


def requests(root: Path) -> list[dict[str, Any]]:
    """What the hub of a directory was asked so far, oldest first."""
    try:
        return [json.loads(line) for line in (root / "requests.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="holds <owner>/<name>/")
    parser.add_argument("--listen", default="127.0.0.1:9000", help="IP:PORT")
    parser.add_argument("--log", type=Path, help="JSON lines; default: requests.jsonl in root")
    options = parser.parse_args()
    if not options.root.is_dir():
        print(f"hub: {options.root} is not a directory", file=sys.stderr)
        return 2
    hub = server(options.root, options.listen, options.log)
    print(f"hub: serving {options.root} at {options.listen}, process {os.getpid()}", flush=True)
    with suppress(KeyboardInterrupt):
        hub.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
