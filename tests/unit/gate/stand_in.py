"""A stand-in with vLLM's HTTP surface, as far as warm-up and stop use it. Not the real engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]


class StandIn:
    """Answers by a table of path -> function of the body; remembers what it was asked."""

    def __init__(self, routes: dict[str, Callable[[Any], Reply | list[str]]]) -> None:
        self.routes = routes
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                self._answer(json.loads(self.rfile.read(length)))

            def _answer(self, body: Any) -> None:
                headers = {k.lower(): v for k, v in self.headers.items()}
                outer.asked.append((self.path, body, headers))
                route = outer.routes.get(self.path, lambda body: (404, {"error": "not found"}))
                reply = route(body)
                if isinstance(reply, list):
                    content = "".join(reply).encode()
                    status, kind = 200, "text/event-stream"
                else:
                    status, kind = reply[0], "application/json"
                    content = json.dumps(reply[1]).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
