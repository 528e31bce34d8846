"""A headless Chromium, told what to do over its debugging protocol; standard library only.

What a page logs, refuses or throws is kept, so that a test can ask that there was nothing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """Where a browser is; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """One page of one browser with a profile of its own; ``with Browser() as browser``."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._number = 0

    def __enter__(self) -> Self:
        name = program()
        assert name, "no browser here"
        self._profile = Path(tempfile.mkdtemp(prefix="fleet-browser-"))
        self._process = subprocess.Popen(
            [
                name,
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-background-networking", "--hide-scrollbars"),
                *("--remote-debugging-port=0", f"--user-data-dir={self._profile}", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 15)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _open(self) -> None:
        told = self._profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not told.exists() or len(told.read_text().split()) < 2:
            assert time.monotonic() < deadline, "the browser did not start within 60 s"
            assert self._process.poll() is None, "the browser has ended"
            time.sleep(0.05)
        port = int(told.read_text().split()[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
            page = next(p for p in json.load(answer) if p["type"] == "page")
        path = page["webSocketDebuggerUrl"].partition(f":{port}")[2]
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._stream = self._socket.makefile("rb")
        while self._stream.readline() not in (b"\r\n", b""):
            pass
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            got = self._receive()
            if got.get("id") == self._number:
                assert "error" not in got, f"{method}: {got['error']}"
                result: dict[str, Any] = got["result"]
                return result

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        size = len(data)
        head = b"\x81" + (bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack(">H", size))
        assert size < 65536
        mask = secrets.token_bytes(4)
        body = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self._socket.sendall(head + mask + body)

    def _receive(self) -> dict[str, Any]:
        data = b""
        final = False
        while not final:
            first, size = self._stream.read(2)
            final = bool(first & 0x80)
            if size == 126:
                (size,) = struct.unpack(">H", self._stream.read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._stream.read(8))
            data += self._stream.read(size)
        message: dict[str, Any] = json.loads(data)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded":
            self.complaints.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(params["args"])[:500])

    # What tests ask

    def go(self, url: str) -> None:
        """Open an address; returns when the page is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def value(self, script: str) -> Any:
        """What an expression is in the page."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> Any:
        """The first true value of an expression."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # the page is just being changed
                if value := self.value(script):
                    return value
            assert time.monotonic() < deadline, f"waited {seconds} s for {script}"
            time.sleep(0.05)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def without_script(self, off: bool) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=off)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        got = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(got["data"]))
