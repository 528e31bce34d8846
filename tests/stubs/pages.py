"""A server of one page, as an exporter of metrics is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def served(page: Callable[[int], bytes]) -> Iterator[int]:
    """Port of a server that answers everything with `page`, given how often it was asked."""

    class Handler(BaseHTTPRequestHandler):
        count = 0

        def do_GET(self) -> None:
            type(self).count += 1
            body = page(self.count)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
