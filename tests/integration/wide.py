"""A fleet without engines, as wide as is asked for: every host gets files, units and services."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.integration.operators import Operator
from tests.testbed.bed import Bed
from tests.testbed.hosts import OPS_USER, Host, HostSpec

GATEWAY = "wide-gw"
# What sshd says of a connection and of what is run on it, and when.
SAYS_MORE = "printf 'LogLevel VERBOSE\\n' >/etc/ssh/sshd_config.d/loud.conf; systemctl reload ssh"
CONNECTION = re.compile(r"Accepted \w+ for")
COMMAND = re.compile(r"Starting session: (command|shell)")
UPLOAD = re.compile(r"Starting session: subsystem 'sftp'")


@dataclass(frozen=True)
class Heard:
    """What sshd of one host was asked for."""

    connections: int
    commands: int
    uploads: int


@dataclass
class WideFleet:
    """Hosts of group gpu, one gateway that is also the monitor, and their operator."""

    bed: Bed
    operator: Operator
    names: tuple[str, ...]  # the gateway last
    wanted: dict[str, Any] = field(default_factory=dict)  # by host, as benchmarks look it up

    @property
    def hosts(self) -> list[Host]:
        """In declared order."""
        return [self.bed.host(name) for name in self.names]

    def take(self, count: int) -> None:
        """Have the inventory name so many of the hosts, the gateway among them."""
        data = json.loads((self.bed.root / "state.json").read_text())["inventory"]
        kept = ("ssh_", "_sudo")
        known = {
            name: {key: value for key, value in data[name].items() if key.startswith(kept)}
            for name in self.names
        }
        gpus = [(name, known[name]) for name in self.names[: count - 1]]
        gateway = [(GATEWAY, known[GATEWAY])]
        (self.operator.root / "inventory" / "wide.py").write_text(
            f"gpu = {gpus!r}\ngateway = {gateway!r}\nmonitoring = {gateway!r}\n"
        )

    def deploy(self, *flags: str) -> tuple[subprocess.CompletedProcess[str], float]:
        """deploy.py to its end, and the seconds it took."""
        began = time.monotonic()
        done = self.operator.deploy(*flags, inventory="wide")
        return done, time.monotonic() - began

    def listen(self) -> None:
        """Have sshd of every host log what it is asked for."""
        for host in self.hosts:
            host.sh(SAYS_MORE)

    def heard(self, host: Host, since: float) -> Heard:
        """What sshd of a host was asked for since a moment (of ``time.time()``)."""
        until = time.time()
        # By name, not by unit: a session's own lines belong to the scope of that session.
        look = f"journalctl -t sshd -o cat --no-pager --since @{since:.6f} --until @{until:.6f}"
        text = host.sh(f"journalctl --sync; {look}").stdout
        return Heard(
            len(CONNECTION.findall(text)), len(COMMAND.findall(text)), len(UPLOAD.findall(text))
        )


def specs(count: int, *, ops: bool = True) -> list[HostSpec]:
    """So many hosts; one of them is reached as somebody who needs sudo with a password."""
    found = [
        HostSpec(f"wide-{n}", 101 + n, OPS_USER if ops and n == 1 else "root")
        for n in range(count - 1)
    ]
    return [*found, HostSpec(GATEWAY, 100)]


def make(bed: Bed, folder: Path, count: int, *, ops: bool = True) -> WideFleet:
    """Boot so many hosts side by side, and write an operator's directory for them."""
    wanted = specs(count, ops=ops)
    bed.up(wanted, serve=(), uplink=False)
    operator = Operator(folder / "operator", bed.cache)
    (operator.root / "group_vars" / "wide.yml").write_text(
        yaml.safe_dump(settings(), sort_keys=False)
    )
    fleet = WideFleet(bed, operator, tuple(one.name for one in wanted))
    fleet.take(count)
    return fleet


def settings() -> dict[str, Any]:
    """group_vars of the fleet: nothing is fetched, nothing is built."""
    return {
        "device": "cpu",
        "python": "python3",
        "vllm_version": "0.32.0",
        "models": {},
        "instances": [],
        "gateway": {"listen": 80},
        "api_keys": {"file": ".testbed/demo-keys.yml"},
        "monitoring": {"listen": 9090, "retention_days": 1, "retention_gib": 1},
    }
