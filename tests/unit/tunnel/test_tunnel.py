"""A port carried through a transport: bytes both ways, many at once, and its end."""

from __future__ import annotations

import http.client
import http.server
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fleet.operations.tunnel import tunnel
from vllm_fleet.rollout.hosts import Failed


class Transport:
    """Channels of it are plain sockets to this machine."""

    active = True
    opened = 0

    def is_active(self) -> bool:
        return self.active

    def open_channel(self, kind: str, to: tuple[str, int], source: Any) -> socket.socket:
        assert kind == "direct-tcpip"
        self.opened += 1
        return socket.create_connection(to)


def host(client: object) -> Any:
    return SimpleNamespace(name="gpu-1", connector=SimpleNamespace(client=client))


@pytest.fixture
def port() -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_large_and_many_requests_come_through_unchanged(port: int) -> None:
    transport = Transport()
    client = SimpleNamespace(get_transport=lambda: transport)
    wrong: list[object] = []

    def ask(number: int) -> None:
        body = bytes([number]) * (1 << 20) + b"end"
        connection = http.client.HTTPConnection(address, timeout=60)
        for _ in range(2):  # kept alive
            connection.request("POST", "/", body)
            if connection.getresponse().read() != body:
                wrong.append(number)
        connection.close()

    with tunnel(host(client), port) as address:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (wrong, transport.opened) == ([], 8)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(tuple(address.split(":")), timeout=5)


def test_without_ssh_it_is_the_port_itself() -> None:
    with tunnel(host(None), 8001) as address:
        assert address == "127.0.0.1:8001"


def test_a_lost_connection_is_told() -> None:
    transport = Transport()
    transport.active = False
    with (
        pytest.raises(Failed, match="gpu-1: its connection is gone"),
        tunnel(host(SimpleNamespace(get_transport=lambda: transport)), 1),
    ):
        pass
