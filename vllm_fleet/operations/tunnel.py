"""A port of a host, reached through the SSH connection that pyinfra has already."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pyinfra.api import Host

from vllm_fleet.rollout.hosts import Failed

CHUNK = 1 << 16
BACKLOG = 256


@contextmanager
def tunnel(host: Host, port: int) -> Iterator[str]:
    """``127.0.0.1:PORT`` here that leads to a port of the host's own loopback. Raises Failed.

    On a host without SSH (this machine itself) it is the port.
    """
    client = getattr(host.connector, "client", None)
    if client is None:
        yield f"127.0.0.1:{port}"
        return
    transport = client.get_transport()
    if transport is None or not transport.is_active():
        raise Failed(f"{host.name}: its connection is gone")
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    thread = threading.Thread(target=_serve, args=(listener, transport, port), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def _serve(listener: socket.socket, transport: Any, port: int) -> None:
    while True:
        try:
            near, address = listener.accept()
        except OSError:
            return
        threading.Thread(target=_carry, args=(near, transport, port, address), daemon=True).start()


def _carry(near: socket.socket, transport: Any, port: int, address: Any) -> None:
    """Bytes from one end to the other and back, until either has closed."""
    with near:
        try:
            far = transport.open_channel("direct-tcpip", ("127.0.0.1", port), address)
        except Exception:  # paramiko's own and the socket's: the client sees a closed connection
            return
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with far, suppress(OSError):
            while True:
                ready, _, _ = select.select([near, far], [], [])
                for one, other in ((near, far), (far, near)):
                    if one in ready:
                        data = one.recv(CHUNK)
                        if not data:
                            return
                        other.sendall(data)
