"""The bed's network: one namespace that is switch, router and server of all hosts.

The outer machine reaches the hosts through a veth pair; the way out, to package registries,
is optional. Nothing outside the bed can open a connection to a host.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.testbed import outer
from tests.testbed.shell import BedError, run

BRIDGE = "br0"
_SAVED = Path("/run/vllm-fleet-testbed.json")  # outer settings as they were; gone at a reboot


class OuterSettings:
    """Kernel settings of the outer machine that beds change.

    The first bed that changes one saves its value; the last bed to go puts it back. Beds whose
    namespace is gone (a killed run) do not count.
    """

    def __init__(self, file: Path = _SAVED, proc: Path = Path("/proc/sys")) -> None:
        self._file = file
        self._proc = proc

    def raise_to(self, name: str, value: int, bed: str) -> None:
        """Set ``name`` (``net.ipv4.ip_forward``) to ``value`` unless it is that high already."""
        path = self._proc / name.replace(".", "/")
        with self._record() as record:
            record["beds"] = sorted({*record["beds"], bed})
            now = int(path.read_text())
            if now >= value:
                return
            record["saved"].setdefault(name, now)
            self._write(record)  # saved before it is changed
            path.write_text(f"{value}\n")

    def release(self, bed: str, alive: list[str]) -> None:
        """This bed needs nothing any more; the last of those ``alive`` restores."""
        with self._record() as record:
            record["beds"] = [b for b in record["beds"] if b != bed and b in alive]
            if record["beds"]:
                return
            for name, value in record["saved"].items():
                (self._proc / name.replace(".", "/")).write_text(f"{value}\n")
            record["saved"] = {}

    def _write(self, record: dict[str, Any]) -> None:
        if record["beds"] or record["saved"]:
            self._file.write_text(json.dumps(record))
        else:
            self._file.unlink(missing_ok=True)

    @contextmanager
    def _record(self) -> Iterator[dict[str, Any]]:
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = self._file.read_text() if self._file.exists() else ""
            record = json.loads(text) if text else {"beds": [], "saved": {}}
            yield record
            self._write(record)


def namespaces() -> list[str]:
    """Names of all network namespaces."""
    listed = run(["ip", "netns", "list"], check=False).stdout.splitlines()
    return [line.split()[0] for line in listed if line.strip()]


@dataclass(frozen=True)
class Fabric:
    """The network of the bed called ``tag`` (also the name of everything it makes outside)."""

    tag: str
    net: outer.Net

    @property
    def outer_link(self) -> str:
        return f"{self.tag}o"

    @property
    def inner_link(self) -> str:
        return f"{self.tag}i"

    def inside(self, *argv: str) -> list[str]:
        """The command line that runs ``argv`` in the fabric's namespace."""
        return ["ip", "netns", "exec", self.tag, *argv]

    def exists(self) -> bool:
        """Whether the namespace is there."""
        return self.tag in namespaces()

    def up(self) -> None:
        """Namespace, bridge and the link to the outer machine; harmless when they are there."""
        net, tag = self.net, self.tag
        if not self.exists():
            run(["ip", "netns", "add", tag])
        run(["ip", "-n", tag, "link", "set", "lo", "up"])
        if run(["ip", "-n", tag, "link", "show", BRIDGE], check=False).returncode:
            # an address of its own: else the bridge's changes whenever a host comes or goes
            mac = f"02:00:0a:{net.second:02x}:00:01"
            run(["ip", "-n", tag, "link", "add", BRIDGE, "address", mac, "type", "bridge"])
        run(["ip", "-n", tag, "addr", "replace", f"{net.fabric}/24", "dev", BRIDGE])
        run(["ip", "-n", tag, "link", "set", BRIDGE, "up"])
        run(self.inside("sysctl", "-qw", "net.ipv4.ip_forward=1"))
        if run(["ip", "link", "show", self.outer_link], check=False).returncode:
            pair = ["type", "veth", "peer", "name", self.inner_link, "netns", tag]
            run(["ip", "link", "add", self.outer_link, *pair])
        run(["ip", "addr", "replace", f"{net.outer_end}/30", "dev", self.outer_link])
        run(["ip", "link", "set", self.outer_link, "up"])
        run(["ip", "-n", tag, "addr", "replace", f"{net.fabric_end}/30", "dev", self.inner_link])
        run(["ip", "-n", tag, "link", "set", self.inner_link, "up"])
        run(["ip", "-n", tag, "route", "replace", "default", "via", net.outer_end])
        run(["ip", "route", "replace", net.hosts, "via", net.fabric_end])

    def uplink_up(self, settings: OuterSettings) -> str | None:
        """The way out for hosts, by NAT. Returns why there is none, or None when there is."""
        wan = outer.default_interface(run(["ip", "-4", "route"]).stdout)
        if wan is None:
            return "this machine has no default route"
        if not shutil.which("nft"):
            return "nft is not installed"
        try:
            # nothing from outside may open a connection to a host, whatever is forwarded
            rules = f"""
                table ip {self.tag} {{}}
                delete table ip {self.tag}
                table ip {self.tag} {{
                    chain post {{
                        type nat hook postrouting priority srcnat;
                        ip saddr {self.net.hosts} oifname "{wan}" masquerade
                    }}
                    chain forward {{
                        type filter hook forward priority -10;
                        oifname "{self.outer_link}" ct state established,related accept
                        oifname "{self.outer_link}" drop
                    }}
                }}"""
            run(["nft", "-f", "-"], stdin=rules)
            settings.raise_to("net.ipv4.ip_forward", 1, self.tag)
            self._pass_docker()
        except (BedError, OSError) as error:
            self.uplink_down()
            return str(error).splitlines()[0]
        return None

    def uplink_down(self) -> None:
        """Take the way out away."""
        if shutil.which("nft"):
            run(["nft", "delete", "table", "ip", self.tag], check=False)
        for rule in self._docker_rules():
            for _ in range(10):  # a killed run may have left it twice
                if run(["iptables", "-w", "-D", *rule], check=False).returncode:
                    break

    def _docker_rules(self) -> list[list[str]]:
        if not shutil.which("iptables"):
            return []
        link = self.outer_link
        return [
            [chain, *match, "-j", "ACCEPT"]
            for chain in ("DOCKER-USER", "FORWARD")
            for match in (["-i", link], ["-o", link])
        ]

    def _pass_docker(self) -> None:
        """Where Docker drops what it does not know, let the bed's packets pass."""
        if not shutil.which("iptables"):
            return
        rules = run(["iptables", "-w", "-S", "FORWARD"], check=False).stdout
        if not outer.forward_is_dropped(rules):
            return
        chain = "DOCKER-USER" if "-j DOCKER-USER" in rules else "FORWARD"
        for rule in self._docker_rules():
            if rule[0] == chain and run(["iptables", "-w", "-C", *rule], check=False).returncode:
                run(["iptables", "-w", "-I", *rule])

    def down(self) -> None:
        """Remove everything that ``up`` and ``uplink_up`` made, and end what runs inside."""
        self.uplink_down()
        if self.exists():
            for pid in run(["ip", "netns", "pids", self.tag], check=False).stdout.split():
                try:
                    os.kill(int(pid), 9)
                except ProcessLookupError:
                    continue  # ended by itself meanwhile
            run(["ip", "netns", "del", self.tag])
        # The pair goes with the namespace, a little later; a second deletion may find nothing.
        run(["ip", "link", "del", self.outer_link], check=False)
