"""A small package index over a folder of wheels, as PEP 700 JSON with upload times or plain HTML.

``/json/<package>/`` tells upload times, ``/html/<package>/`` is the same without; wheels are at
``/files/``. Times are by file name; a file without one has none in either.
"""

from __future__ import annotations

import hashlib
import json
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        """A page of a package, or a wheel."""
        parts = unquote(self.path).strip("/").split("/")
        if len(parts) == 2 and parts[0] == "files":
            self._file(parts[1])
        elif len(parts) == 2 and parts[0] in ("json", "html"):
            self._page(*parts)
        else:
            self._answer(404, "text/plain", b"no such page")

    do_HEAD = do_GET

    def _file(self, name: str) -> None:
        path = self.server.folder / name
        if path.parent != self.server.folder or not path.is_file():
            return self._answer(404, "text/plain", b"no such file")
        return self._answer(200, "application/octet-stream", path.read_bytes())

    def _page(self, kind: str, package: str) -> None:
        prefix = package.replace("-", "_") + "-"
        paths = [p for p in sorted(self.server.folder.glob("*.whl")) if p.name.startswith(prefix)]
        if not paths:
            return self._answer(404, "text/plain", b"no such package")
        sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}
        if kind == "html":
            links = [f'<a href="/files/{quote(n)}#sha256={s}">{n}</a><br>' for n, s in sums.items()]
            text = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"
            return self._answer(200, "text/html", text.encode())
        files = []
        for name, sha256 in sums.items():
            entry = {"filename": name, "url": f"/files/{quote(name)}", "hashes": {"sha256": sha256}}
            if name in self.server.times:
                entry["upload-time"] = self.server.times[name]
            files.append(entry)
        page = {"meta": {"api-version": "1.1"}, "name": package, "versions": [], "files": files}
        kind = "application/vnd.pypi.simple.v1+json"
        return self._answer(200, kind, json.dumps(page).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, times: Mapping[str, str], address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.folder, self.times = folder, times

    def server_bind(self) -> None:
        """Without the look-up of its own name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "index", self.server_address[1]


@contextmanager
def running(folder: Path, times: Mapping[str, str], address: str = "127.0.0.1") -> Iterator[str]:
    """Serve a folder from a thread of this process; the address above json/ and html/.

    ``times`` may be changed while it runs.
    """
    server = _Server(folder, times, address)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
