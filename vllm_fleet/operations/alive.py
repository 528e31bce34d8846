"""How long a host that says nothing is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gevent
from pyinfra.api import Host

# A host is asked for a sign of life so often, and given up where none comes: the others wait for
# it no longer than both together, however long its command may take while it lives.
PULSE_SECONDS = 10
ANSWER_SECONDS = 20
LOOK_SECONDS = 120  # what a host that answers may take to tell its state
# Why each host was given up that was lost in this run, by name.
LOST: dict[str, str] = {}


@contextmanager
def while_alive(host: Host) -> Iterator[None]:
    """End the connection of a host that stops answering while a command runs on it.

    Raises ConnectionError then. The question is that of OpenSSH's ServerAliveInterval, so a host
    whose kernel answers for a frozen sshd is found as well as one that lost its network.
    """
    client = getattr(host.connector, "client", None)
    transport = client.get_transport() if client else None
    if transport is None:
        yield  # not by SSH
        return
    pulse = gevent.spawn(_pulse, host.name, transport)
    try:
        yield
    finally:
        pulse.kill()
        if not transport.is_active():
            raise ConnectionError(LOST.setdefault(host.name, "connection lost"))


def _pulse(name: str, transport: Any) -> None:
    while transport.is_active():
        gevent.sleep(PULSE_SECONDS)
        with gevent.Timeout(ANSWER_SECONDS, False):
            transport.global_request("keepalive@openssh.com", wait=True)
            continue
        LOST[name] = f"connection lost, no answer for {PULSE_SECONDS + ANSWER_SECONDS} s"
        transport.close()
