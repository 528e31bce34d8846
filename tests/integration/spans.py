"""Spans on the test hosts: two over two hosts each, one of them with another copy beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.integration.rolling import GATEWAY, HOSTS, MANY, ONE, RollingFleet
from tests.testbed.bed import Bed

# Of the pool of many: a span, whose rank 0 is on roll-3, and an instance. Of the other a span.
BIG = {"roll-3": "big-r0", "roll-1": "big-r1"}
LONE = {"roll-1": "lone-r0", "roll-2": "lone-r1"}
SERVERS = ("roll-3/big-r0", "roll-2/copy", "roll-1/lone-r0")  # as the gateway knows them
SILENT = 6  # seconds


def spanned(values: dict[str, Any]) -> None:
    """Have two spans and an instance on the hosts of :mod:`tests.integration.rolling`."""
    span = {"silent_seconds": SILENT, "join_seconds": 20}
    values["instances"] = [
        {"name": "big", "hosts": [*BIG], "model": MANY, "port": 8001, "span": span},
        {"name": "copy", "hosts": ["roll-2"], "model": MANY, "port": 8002},
        {"name": "lone", "hosts": [*LONE], "model": ONE, "port": 8003, "span": span},
    ]
    values["rollout"]["canaries"] = 0


@dataclass
class Row:
    """A fault, and how long it took until it was seen, named, and over."""

    fault: str
    detected: float
    recovered: float
    named: str


@dataclass
class Spans:
    """The fleet, as tests of spans look at it."""

    fleet: RollingFleet
    rows: list[Row] = field(default_factory=list)

    @property
    def bed(self) -> Bed:
        return self.fleet.bed

    def sh(self, host: str, command: str) -> str:
        return self.bed.host(host).sh(command, check=False).stdout

    def ready(self, server: str) -> bool:
        """Whether the gateway finds a server ready."""
        text = self.sh(GATEWAY, "curl -s -m 5 http://127.0.0.1:9145/status")
        found = {
            f"{one['host']}/{one['name']}": bool(one["ready"])
            for pool in json.loads(text or '{"pools": []}')["pools"]
            for one in pool["instances"]
        }
        return found.get(server, False)

    def state(self, host: str, name: str) -> dict[str, Any]:
        """How far a rank says that it is."""
        text = self.sh(host, f"cat /run/vllm/{name}/span.json")
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    def engines(self, host: str, name: str) -> list[str]:
        """Processes of vLLM in the unit of a rank: none where it only waits."""
        unit = f"vllm@{name}.service"
        command = (
            f"cat $(systemctl show -P ControlGroup {unit} | "
            "sed 's,^,/sys/fs/cgroup,;s,$,/cgroup.procs,') 2>/dev/null | "
            "while read -r p; do tr '\\0' ' ' </proc/$p/cmdline | cut -c1-200; echo; done"
        )
        listed = self.sh(host, command).splitlines()
        ours = ("span.py", "warmup.py", "before_start", "bootlog", "stop.py", "/bin/sh")
        return [one for one in listed if one.strip() and not any(word in one for word in ours)]

    def command(self, host: str, name: str) -> str:
        """The command line of the main process of a rank."""
        main = self.sh(host, f"systemctl show -P MainPID vllm@{name}").strip()
        return self.sh(host, f"tr '\\0' ' ' </proc/{main}/cmdline")

    def journal(self, host: str, name: str, since: float, until: float | None = None) -> str:
        span = f"--since=@{int(since)}" + (f" --until=@{int(until)}" if until else "")
        return self.sh(host, f"journalctl -u vllm@{name} {span} -o cat --no-pager")

    def until(self, condition: Callable[[], Any], what: str, seconds: float) -> float:
        """Seconds until something is so."""
        began = time.monotonic()
        while True:
            try:
                found = condition()
            except (OSError, ValueError):
                found = False
            took = time.monotonic() - began
            if found:
                return took
            if took > seconds:
                told = "\n".join(
                    f"--- {host}/{name}: {self.state(host, name)}\n"
                    + self.sh(host, f"journalctl -u vllm@{name} -n 25 -o cat --no-pager")
                    for host, name in (*BIG.items(), *LONE.items())
                    if self.bed.host(host).running()
                )
                raise AssertionError(f"{what}: not within {seconds:.0f} s\n{told}")
            time.sleep(0.3)

    def all_ready(self, seconds: float = 120) -> float:
        return self.until(
            lambda: all(self.ready(one) for one in SERVERS), "every server is ready", seconds
        )

    def table(self) -> str:
        """The faults, as a table of docs."""
        lines = ["| fault | seen and named after (s) | ready again after (s) | said |"]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| {r.fault} | {r.detected:.1f} | {r.recovered:.1f} | {r.named} |" for r in self.rows
        ]
        return "\n".join(lines)


__all__ = ["BIG", "HOSTS", "LONE", "SERVERS", "SILENT", "Row", "Spans", "spanned"]
