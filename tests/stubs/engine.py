"""A stand-in for one vLLM instance: its HTTP surface and the gate's contract, nothing computed.

For many instances, faults and timing. It runs in a thread of the test's process, counts what
reaches it, and can be told to misbehave::

    with Engine(name="a") as engine:
        engine.ready = False          # GET /fleet/ready and the gate answer a marked 503
        engine.answer = "close"       # read the request, then close the connection
        engine.stop(); engine.start() # same port
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tests.ports import free_port
from tests.stubs import answers

Answer = Literal["serve", "close", "gate", "busy", "bad", "hang"]

GATED = (
    '{"error":{"message":"This instance is not ready.","type":"ServiceUnavailableError",'
    '"param":null,"code":503}}'
)


@dataclass
class Hit:
    """One client request that got past the gate."""

    path: str
    headers: dict[str, str]
    body: bytes
    began: float
    connection: int = 0  # which of those to this stand-in
    ended: float | None = None
    aborted: bool = False  # the client left before the answer's end

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Engine:
    """One instance on a loopback port; ``port`` 0 takes a free one."""

    name: str = "engine"
    host: str = "127.0.0.1"
    port: int = 0
    ready: bool = True
    silent: int = 0  # how many further questions for the ready state stay without an answer
    answer: Answer = "serve"
    first_byte: float = 0.0  # seconds before an answer begins
    chunk_gap: float = 0.01  # seconds between chunks of a stream
    chunks: int = 5
    padding: int = 0  # further bytes of each chunk
    prompt_tokens: int = 1  # what an answer's usage says; a stream's also has one a chunk
    completion_tokens: int = 1
    hits: list[Hit] = field(default_factory=list)
    gated: int = 0  # client requests that the gate refused
    in_flight: int = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen and serve, in a thread of its own; returns once the port is open."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port or free_port()))
        listener.listen(1024)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener, up), daemon=True)
        self._thread.start()
        up.wait()

    def stop(self) -> None:
        """As a killed process: the port closes and every connection is reset."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._kill)
            self._thread.join()

    def _run(self, listener: socket.socket, up: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._stopped = asyncio.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._connection, sock=listener)
            up.set()
            await self._stopped.wait()
            server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.run_until_complete(serve())
        self._loop.close()

    def _kill(self) -> None:
        self._stopped.set()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        method, path, _ = line.decode().split()
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            key, _, value = line.decode().partition(":")
            headers[key.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/fleet/ready" and self.silent:
            self.silent -= 1
            await asyncio.sleep(30)
        elif path == "/fleet/ready":
            state = json.dumps({"ready": self.ready, "in_flight": self.in_flight})
            self._send(writer, 200 if self.ready else 503, state)
        elif not self.ready or self.answer == "gate":
            self.gated += 1
            self._send(writer, 503, GATED, {"X-Fleet-Gate": "not-ready", "Retry-After": "1"})
        else:
            return await self._client(method, path, headers, body, reader, writer)
        return True

    async def _client(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        hit = Hit(path, headers, body, time.monotonic(), id(writer))
        self.hits.append(hit)
        self.in_flight += 1
        work = asyncio.ensure_future(self._work(path, hit, writer))
        left = asyncio.ensure_future(self._left(reader))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            # A client that leaves while much is on its way to it breaks the writing.
            if not work.done() or isinstance(work.exception(), ConnectionError):
                hit.aborted = True
                return False
            return work.result() and not left.done()
        finally:
            for task in (work, left):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            hit.ended = time.monotonic()
            self.in_flight -= 1

    @staticmethod
    async def _left(reader: asyncio.StreamReader) -> None:
        """Ends when the client has closed the connection; its next request is left alone."""
        while not reader.at_eof() and reader.exception() is None:
            await asyncio.sleep(0.005)

    async def _work(self, path: str, hit: Hit, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(self.first_byte)
        if self.answer == "hang":
            await asyncio.sleep(3600)
        if self.answer == "close":
            return False
        if self.answer == "busy":
            self._send(writer, 503, '{"error":"queue full"}', {"Retry-After": "7"})
            return True
        if self.answer == "bad":
            self._send(writer, 400, '{"error":{"message":"engine says no","code":400}}')
            return True
        asked = json.loads(hit.body or b"{}")
        if asked.get("stream"):
            texts = [f"{self.name}-{n} " + "x" * self.padding for n in range(self.chunks)]
            tokens = answers.Tokens(self.prompt_tokens, self.chunks)
            await self._stream(writer, answers.events(path, asked, texts, tokens))
            return True
        tokens = answers.Tokens(self.prompt_tokens, self.completion_tokens)
        answer = answers.answer(path, asked, f"from {self.name}", tokens)
        answer |= {"engine": self.name, "body_bytes": len(hit.body)}
        self._send(writer, 200, json.dumps(answer))
        return True

    async def _stream(self, writer: asyncio.StreamWriter, events: Iterator[str]) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for event in events:
            self._chunk(writer, event)
            await writer.drain()
            if self.name + "-" in event:  # a piece of the text
                await asyncio.sleep(self.chunk_gap)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
        writer.write(f"{len(text):x}\r\n{text}\r\n".encode())

    @staticmethod
    def _send(
        writer: asyncio.StreamWriter, status: int, body: str, more: dict[str, str] | None = None
    ) -> None:
        head = [f"HTTP/1.1 {status} X", "Content-Type: application/json"]
        head += [f"Content-Length: {len(body.encode())}"]
        head += [f"{key}: {value}" for key, value in (more or {}).items()]
        writer.write(("\r\n".join(head) + "\r\n\r\n" + body).encode())


def main() -> None:
    """Serve one stand-in until interrupted: ``python -m tests.stubs.engine --port 8001``."""
    parser = argparse.ArgumentParser(description="a stand-in for one vLLM instance")
    parser.add_argument("--name", default="engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--first-byte", type=float, default=0.0, help="seconds")
    parser.add_argument("--chunk-gap", type=float, default=0.01, help="seconds")
    parser.add_argument("--chunks", type=int, default=5)
    args = parser.parse_args()
    engine = Engine(**vars(args))
    engine.start()
    print(f"{engine.name} on {engine.host}:{engine.port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    engine.stop()


if __name__ == "__main__":
    main()
