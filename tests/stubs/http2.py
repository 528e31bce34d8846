"""A small HTTP/2 client that can also misbehave, frame by frame; RFC 9113.

It knows of headers only what nginx sends: of an answer's first field, the status.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    *(0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8, 0x9),
)
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
CANCEL = 0x8
LARGEST = 16384  # of a frame, as long as nobody asked for more
_STATUS = {0x88: 200, 0x89: 204, 0x8A: 206, 0x8B: 304, 0x8C: 400, 0x8D: 404, 0x8E: 500}


@dataclass
class Stream:
    """One request's answer as far as it came."""

    status: int | None = None
    body: bytes = b""
    ended: bool = False
    reset: int | None = None  # the error code


@dataclass
class Http2:
    """A connection by TLS to 127.0.0.1; nothing is verified."""

    port: int
    timeout: float = 20
    streams: dict[int, Stream] = field(default_factory=dict)
    gone: int | None = None  # error code of GOAWAY
    closed: bool = False
    _next: int = 1

    def __enter__(self) -> Self:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", self.port), self.timeout)
        self.socket = context.wrap_socket(plain)
        assert self.socket.selected_alpn_protocol() == "h2"
        self._frames = self._read()
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.send(SETTINGS, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        """One frame."""
        head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
        self.socket.sendall(head + payload)

    def request(
        self,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        method: str = "POST",
        length: int | None = None,
    ) -> int:
        """Begin a request; its number. ``length`` is what it claims, where not the body's."""
        number, self._next = self._next, self._next + 2
        self.streams[number] = Stream()
        fields = {":method": method, ":scheme": "https", ":authority": "gw", ":path": path}
        if body is not None:
            fields["content-length"] = str(len(body) if length is None else length)
        block = b"".join(_field(k, v) for k, v in {**fields, **(headers or {})}.items())
        pieces = [block[at : at + LARGEST] for at in range(0, len(block), LARGEST)]
        for index, piece in enumerate(pieces):
            flags = END_HEADERS if index == len(pieces) - 1 else 0
            if index == 0 and body is None:
                flags |= END_STREAM
            self.send(CONTINUATION if index else HEADERS, flags, number, piece)
        if body is not None:
            self.send(DATA, END_STREAM, number, body)
        return number

    def reset(self, number: int, code: int = CANCEL) -> None:
        """Give a request up."""
        self.send(RST_STREAM, 0, number, struct.pack(">I", code))

    def wait(self, number: int) -> Stream:
        """The answer, once it has ended or the connection has."""
        stream = self.streams[number]
        while not (stream.ended or stream.reset is not None or self.closed):
            self.step()
        return stream

    def step(self) -> None:
        """Read one frame and book it."""
        try:
            kind, flags, number, payload = next(self._frames)
        except (StopIteration, ConnectionError, ssl.SSLEOFError):
            self.closed = True
            return
        if kind == SETTINGS and not flags & ACK:
            self.send(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self.send(PING, ACK, 0, payload)
        elif kind == GOAWAY:
            self.gone = struct.unpack(">I", payload[4:8])[0]
        elif number in self.streams:
            stream = self.streams[number]
            if kind == HEADERS and stream.status is None:
                stream.status = _status(payload)
            elif kind == DATA:
                stream.body += payload
                if payload:
                    for where in (0, number):
                        self.send(WINDOW_UPDATE, 0, where, struct.pack(">I", len(payload)))
            elif kind == RST_STREAM:
                stream.reset = struct.unpack(">I", payload)[0]
            if kind in (HEADERS, DATA) and flags & END_STREAM:
                stream.ended = True

    def _read(self) -> Iterator[tuple[int, int, int, bytes]]:
        data = b""
        while True:
            while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
                kind, flags, number = struct.unpack(">BBI", data[3:9])
                yield kind, flags, number & 0x7FFFFFFF, data[9 : 9 + size]
                data = data[9 + size :]
            more = self.socket.recv(65536)
            if not more:
                return
            data += more


def _field(name: str, value: str) -> bytes:
    """A header without compression; RFC 7541, 6.2.2."""
    return b"\0" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    data = text.encode()
    size = len(data)
    if size < 127:
        return bytes([size]) + data
    size -= 127
    head = [127]
    while size >= 128:
        head.append(size % 128 + 128)
        size //= 128
    return bytes([*head, size]) + data


def _status(block: bytes) -> int:
    """The status, which comes first; nginx writes it out where it has no number of its own."""
    while block[0] & 0xE0 == 0x20:  # a change of the table's size
        block = block[1:]
    if block[0] in _STATUS:
        return _STATUS[block[0]]
    assert block[:2] in (b"\x48\x03", b"\x08\x03"), block[:8]
    return int(block[2:5])
