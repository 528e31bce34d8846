"""Free ports for servers that tests start.

Below the range that the kernel takes for outgoing connections: what bind(0) gives may be the
local end of somebody's connection by the time that a server wants it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Different ports, free on every address a moment ago."""
    first = int(_RANGE.read_text().split()[0])
    candidates = random.sample(range(max(1024, first - 15000), first), 50 + count)
    found: list[int] = []
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports among {len(candidates)} tried")


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
