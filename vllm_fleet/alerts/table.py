"""What an alert is, and what its expressions share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info", "none"]  # none: only to hold back others

RUNBOOK = "docs/runbook.md"
DISKS = 'fstype!~"tmpfs|ramfs|overlay|squashfs|iso9660"'
EACH = "host, instance, pool"  # labels that tell one vLLM server from all others
# A host is away where nothing on it answers; of one thing that is silent, the others still tell.
# What Debian's own configuration watches until ours is there has no label `host`.
HOST_AWAY = 'max by (host) (up{host!=""}) == 0'
# A host that is away is one message, not one for each thing that ran on it.
HOST_UP = f"unless on (host) {HOST_AWAY}"
# systemd says that the unit is on its way up or down: planned, and its own timeout bounds it.
MOVING = (
    'label_replace(node_systemd_unit_state{name=~"vllm@.+",state=~"activating|deactivating"}'
    ' == 1, "instance", "$1", "name", "vllm@(.+)[.]service")'
)


@dataclass(frozen=True)
class Alert:
    """One alert. ``wait`` is Prometheus' `for`; ``why`` and ``remedy`` are its runbook entry."""

    name: str
    expr: str
    wait: str
    severity: Severity
    summary: str  # names host and instance; Go template over $labels and $value
    why: str
    remedy: str

    @property
    def anchor(self) -> str:
        """Heading of its runbook entry, as a link target: PoolDown is pool-down."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", self.name).lower()


def window(scrape_interval_seconds: int) -> str:
    """Shortest range in which a rate sees at least four scrapes, and no less than two minutes."""
    return f"{max(2, -(-scrape_interval_seconds * 4 // 60))}m"
