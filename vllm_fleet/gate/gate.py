"""The gate inside vLLM: no client request reaches a cold, draining or dead engine.

A pure ASGI middleware (``vllm serve --middleware gate.Gate``). It answers from three facts:
the ready file, which only the warm-up makes and only a stop removes; whether vLLM's engine
client says that the engine died; and a list of allowed paths. Refusals carry
``X-Fleet-Gate: not-ready``, by which a gateway knows that nothing was begun and that another
instance may be asked.

Environment: FLEET_RUN, the folder of ``ready``, ``token`` and the counters.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import re
import struct
from typing import Any, Awaitable, Callable, Dict, List, Optional, Tuple

Scope = Dict[str, Any]
Message = Dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

READY_PATH = "/fleet/ready"
# For monitors, at any time. /health says only that the process lives.
OPEN_PATHS = frozenset({"/health", "/metrics"})
CLIENT_PATHS = frozenset(
    {
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
    }
)
CLIENT_PATTERN = re.compile(r"/v1/responses/[A-Za-z0-9_-]+(/cancel)?")
TOKEN_PATHS = frozenset({"/version"})  # for the warm-up alone


class Gate:
    """Middleware around vLLM's app; one object in each API server process."""

    def __init__(self, app: App) -> None:
        """Read the token that was made before this start.

        Raises RuntimeError where FLEET_RUN is not set: without it nothing could ever be ready.
        """
        run = os.environ.get("FLEET_RUN")
        if not run:
            raise RuntimeError(
                "gate: FLEET_RUN is not set; start vLLM by its unit (vllm@<instance>.service), "
                "whose environment file sets it"
            )
        self._app = app
        self._ready_file = os.path.join(run, "ready")
        self._token = _read_token(os.path.join(run, "token"))
        self._in_flight = InFlight(run)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass, refuse or answer one ASGI connection."""
        if scope["type"] == "websocket":
            await _refuse_websocket(receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif path == READY_PATH:
            await self._answer_ready(scope, send)
        elif self._is_warm_up(scope):
            if path not in TOKEN_PATHS and not _is_client_path(path):
                await _send_error(send, 404, *_not_found(path))
            elif engine_is_dead(scope):
                await _send_not_ready(send, "the engine of this instance has died")
            else:
                await self._app(scope, receive, send)
        elif not _is_client_path(path):
            await _send_error(send, 404, *_not_found(path))
        elif engine_is_dead(scope):
            await _send_not_ready(send, "the engine of this instance has died")
        elif not self._is_ready():
            await _send_not_ready(send, "this instance is starting or stopping")
        else:
            # No await between the look at the ready file and the count: whoever removes the
            # file and then reads 0 knows that nothing is on its way.
            self._in_flight.add(1)
            try:
                await _Exchange(self._app, scope, send).run(receive)
            finally:
                self._in_flight.add(-1)

    def _is_ready(self) -> bool:
        try:
            os.stat(self._ready_file)
        except OSError:
            return False
        return True

    def _is_warm_up(self, scope: Scope) -> bool:
        if self._token is None:
            return False
        for name, value in scope["headers"]:
            if name == b"x-fleet-token":
                return hmac.compare_digest(value, self._token)
        return False

    async def _answer_ready(self, scope: Scope, send: Send) -> None:
        ready = self._is_ready() and not engine_is_dead(scope)
        body = {"ready": ready, "in_flight": self._in_flight.total()}
        await _send_json(send, 200 if ready else 503, body, [])


class InFlight:
    """Client requests in flight, over all API server processes of this instance.

    Each process keeps its own count in ``in-flight.<pid>``, eight bytes mapped into memory, so
    that counting costs no system call and any process can tell the sum.
    """

    _PREFIX = "in-flight."

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._count = 0
        path = os.path.join(folder, "%s%d" % (self._PREFIX, os.getpid()))
        with open(path, "w+b") as file:
            file.write(struct.pack("q", 0))
            file.flush()
            self._shared = mmap.mmap(file.fileno(), 8)

    def add(self, change: int) -> None:
        """Count a request that came (1) or ended (-1)."""
        self._count += change
        struct.pack_into("q", self._shared, 0, self._count)

    def total(self) -> int:
        """The sum over the processes that live."""
        total = 0
        for name in os.listdir(self._folder):
            if not name.startswith(self._PREFIX):
                continue
            if not os.path.exists("/proc/" + name[len(self._PREFIX) :]):
                continue  # a server that was killed took its requests along
            try:
                with open(os.path.join(self._folder, name), "rb") as file:
                    total += struct.unpack("q", file.read(8))[0]
            except (OSError, struct.error):
                continue  # just being made by its process, which has no request yet
        return total


class _Exchange:
    """One client request: holds the head of the answer back until its first byte of body.

    When the engine dies before that byte, nothing has been sent, and the answer (a 500, or a
    stream that begins with an error) is replaced by the marked 503: safe to ask elsewhere.
    """

    def __init__(self, app: App, scope: Scope, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._send_on = send
        self._head: Optional[Message] = None
        self._begun = False
        self._replaced = False

    async def run(self, receive: Receive) -> None:
        """Let the app answer. Raises what the app raises, unless the engine's death explains it."""
        try:
            await self._app(self._scope, receive, self._send)
        except Exception:
            if self._begun or not engine_is_dead(self._scope):
                raise
        if self._begun:
            return
        if engine_is_dead(self._scope):
            await self._replace()
        elif self._head is not None:
            await self._begin()

    async def _send(self, message: Message) -> None:
        if self._replaced:
            return
        if self._begun:
            await self._send_on(message)
        elif message["type"] == "http.response.start":
            self._head = message
        elif self._head is not None and self._is_death(message):
            await self._replace()
        else:
            await self._begin()
            await self._send_on(message)

    def _is_death(self, message: Message) -> bool:
        assert self._head is not None
        failed = self._head["status"] >= 500 or b'"error"' in message.get("body", b"")[:200]
        return failed and engine_is_dead(self._scope)

    async def _begin(self) -> None:
        self._begun = True
        if self._head is not None:
            await self._send_on(self._head)

    async def _replace(self) -> None:
        self._begun = self._replaced = True
        await _send_not_ready(self._send_on, "the engine died before it began to answer")


def engine_is_dead(scope: Scope) -> bool:
    """What vLLM's own client of the engine says; False while there is none yet.

    ``app.state.engine_client.errored`` is part of vLLM's EngineClient from 0.18 to 0.33.
    """
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    return bool(getattr(client, "errored", False))


def _is_client_path(path: str) -> bool:
    return path in CLIENT_PATHS or CLIENT_PATTERN.fullmatch(path) is not None


def _read_token(path: str) -> Optional[bytes]:
    """The token of this start; None, and so no warm-up gets through, where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read().strip() or None
    except FileNotFoundError:
        return None


def _not_found(path: str) -> Tuple[str, str]:
    return "NotFoundError", "There is nothing at %s." % path[:200]


async def _send_not_ready(send: Send, why: str) -> None:
    message = "Not ready: %s. Try again." % why
    headers = [(b"x-fleet-gate", b"not-ready"), (b"retry-after", b"1")]
    await _send_error(send, 503, "ServiceUnavailableError", message, headers)


async def _send_error(
    send: Send,
    status: int,
    kind: str,
    message: str,
    headers: Optional[List[Tuple[bytes, bytes]]] = None,
) -> None:
    error = {"message": message, "type": kind, "param": None, "code": status}
    await _send_json(send, status, {"error": error}, headers or [])


async def _send_json(
    send: Send, status: int, body: Dict[str, Any], headers: List[Tuple[bytes, bytes]]
) -> None:
    content = json.dumps(body).encode()
    fixed = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
    ]
    await send({"type": "http.response.start", "status": status, "headers": fixed + headers})
    await send({"type": "http.response.body", "body": content})


async def _refuse_websocket(receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect
    await send({"type": "websocket.close", "code": 1008})
