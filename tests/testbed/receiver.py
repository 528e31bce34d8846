"""Where a monitoring host of the bed sends its alerts to: writes down whatever is posted.

``python -m tests.testbed.receiver --root DIR --listen ADDRESS:PORT`` appends one JSON line for
each request to DIR/posts.jsonl: when it came, its path and its body. Robots' answers are those
of DingTalk and WeCom.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

POSTS = "posts.jsonl"


def posts(folder: Path, path: str = "") -> list[dict[str, Any]]:
    """What was posted so far, to this path or to all."""
    file = folder / POSTS
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [one for one in found if not path or one["path"].partition("?")[0] == path]


def serve(root: Path, address: str, port: int) -> None:
    """Until ended."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            line = {"at": time.time(), "path": self.path, "body": json.loads(body)}
            with lock, (root / POSTS).open("a") as file:
                file.write(json.dumps(line) + "\n")
            answer = b'{"errcode":0,"errmsg":"ok"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((address, port), Handler).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes down what is posted to it.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--listen", required=True, metavar="ADDRESS:PORT")
    given = parser.parse_args()
    address, _, port = given.listen.rpartition(":")
    serve(given.root, address, int(port))


if __name__ == "__main__":
    main()
