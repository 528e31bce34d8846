"""The instances' ports, closed to all but those who need them. Pure: hosts in, files out.

vLLM listens on every address and asks for no key. On a GPU host a table of nftables of our own
admits gateways, monitoring and the host itself to the ports of its instances, and on hosts of a
fabric (`nccl`) its hosts alone to the ports of ranks; every other port, table and firewall is
left as it is. A unit of ours loads it at boot, and a timer puts it back
where somebody emptied the ruleset.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_fleet import fabric, fanout, paths
from vllm_fleet.fabric.discovery import INNER
from vllm_fleet.files import ManagedFile
from vllm_fleet.render import render
from vllm_fleet.spec.model import Fleet, HostSpec
from vllm_fleet.state import HostState

PACKAGES = ("nftables",)
TABLE = "vllm_fleet"
FILE = f"{paths.ETC}/firewall.nft"
UNIT = "vllm-fleet-firewall.service"
GUARD = "vllm-fleet-firewall-guard"
UNITS = "/etc/systemd/system"

LOCAL_PORTS = (32768, 60999)  # Linux's own, where the host's fact does not tell
# Groups whose hosts talk to instances.
PEERS = ("gateway", "monitoring")
_TOLD, _NODES = "# Peers: ", "# Nodes: "


@dataclass(frozen=True)
class Ranks:
    """Where the ranks of spans on a host listen, and the hosts that have others of them."""

    ports: tuple[int, ...] = ()
    addresses: Mapping[str, Sequence[str]] = field(default_factory=dict)  # given ones, by host


@dataclass(frozen=True)
class Nodes:
    """What a host of the fabric opens to the others alone: ranks ask for no key, and run what
    they are sent."""

    ports: tuple[str, ...] = ()  # "29400", "32768-60999"
    addresses: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by host
    ssh_ports: tuple[int, ...] = ()  # never closed, also where they are among those


def peers(
    fleet: Fleet, states: Mapping[str, HostState], present: str | None
) -> dict[str, list[str]]:
    """Addresses from which gateways and monitors may come, by host.

    A host of several networks opens connections from the address on the way to the target, which
    need not be the one in the inventory: so all of its own count. Of hosts that take no part in
    this run nothing is seen; ``present``, the file as it is on the host, remembers theirs.
    """
    asking = {host.name for group in PEERS for host in fleet.group(group)}
    hosts = [host for host in fleet.hosts if host.name in asking]
    return _seen(hosts, states, _remembered(present, _TOLD))


def nodes(
    fleet: Fleet,
    spec: HostSpec,
    states: Mapping[str, HostState],
    present: str | None,
    ranks: Ranks | None = None,
) -> Nodes:
    """What a host opens to the others of its fabric and spans; nothing where it is in none.

    Engines, NCCL and gloo listen on ports that the kernel gives, all of its range; ``ranks``: where
    those of spans meet, and Ray's.
    """
    settings, ranks = fabric.taken_part(spec), ranks or Ranks()
    if (settings is None and not ranks.ports) or spec.name not in states:
        return Nodes()
    given = states[spec.name].transfers.get("ports") or LOCAL_PORTS
    own = {settings.port} if settings else set()
    single = sorted({*own, *ranks.ports} - {*range(given[0], given[1] + 1)})
    hosts = [
        host
        for host in fleet.hosts
        if host.name in ranks.addresses or (settings and fabric.taken_part(host) is not None)
    ]
    seen = _seen(hosts, states, _remembered(present, _NODES))
    return Nodes(
        (*map(str, single), f"{given[0]}-{given[1]}"),
        {name: sorted({*found, *ranks.addresses.get(name, ())}) for name, found in seen.items()},
        tuple(ssh_ports(states[spec.name])),
    )


def all_addresses(host: HostSpec, state: HostState | None) -> list[str]:
    """The addresses from which a host may come: the inventory's, and those seen on it."""
    return sorted({host.address, *(_addresses(state) if state else [])})


def ssh_ports(state: HostState) -> list[int]:
    """Ports of a host at which sshd listens."""
    units = ("ssh.service", "sshd.service", "ssh.socket", "sshd.socket")
    return sorted(
        int(port) for port, holder in state.listening.items() if holder.get("unit") in units
    )


def sharers(fleet: Fleet) -> dict[int, list[str]]:
    """Addresses of the hosts that give each other weights, by their port.

    They come from the inventory's address alone, and are asked at it.
    """
    found: dict[int, list[str]] = {}
    for host in fleet.group("gpu"):
        settings = host.settings.fanout
        if settings.enabled and fanout.is_ipv4(host.address):
            found.setdefault(settings.port, []).append(host.address)
    return found


def files(
    spec: HostSpec,
    peers: Mapping[str, Sequence[str]],
    sharing: Sequence[str] = (),
    nodes: Nodes | None = None,
) -> list[ManagedFile]:
    """The table of a GPU host and the units that keep it; none where nothing is to be closed.

    ``sharing``: the hosts that may ask this one for weights; ``nodes``: those of its fabric.

    Raises ValueError, naming the host, for a peer that is no address.
    """
    ports = sorted({one.port for one in spec.instances})
    nodes = nodes or Nodes()
    if not (ports or nodes.ports) or not spec.settings.firewall:
        return []
    others = [a for listed in nodes.addresses.values() for a in listed]
    allowed = [*(a for listed in peers.values() for a in listed), *spec.settings.firewall_allow]
    values = {
        "mark": paths.MARK,
        "table": TABLE,
        "file": FILE,
        "unit": UNIT,
        "told": _TOLD + json.dumps(peers, sort_keys=True),
        "ports": ports,
        "node_ports": nodes.ports,
        "ssh_ports": nodes.ssh_ports,
        "told_nodes": _NODES + json.dumps(nodes.addresses, sort_keys=True) if nodes.ports else "",
        "nodes4": _networks(spec, others, 4),
        "nodes6": _networks(spec, others, 6),
        "sharing": _networks(spec, sharing, 4),
        "sharing_port": spec.settings.fanout.port,
        "ipv4": _networks(spec, allowed, 4),
        "ipv6": _networks(spec, allowed, 6),
    }
    return [
        ManagedFile(FILE, render("firewall/firewall.nft.j2", **values)),
        ManagedFile(f"{UNITS}/{UNIT}", render("firewall/firewall.service.j2", **values)),
        ManagedFile(f"{UNITS}/{GUARD}.service", render("firewall/guard.service.j2", **values)),
        ManagedFile(f"{UNITS}/{GUARD}.timer", render("firewall/guard.timer.j2", **values)),
    ]


def _seen(
    hosts: Iterable[HostSpec],
    states: Mapping[str, HostState],
    remembered: Mapping[str, list[str]],
) -> dict[str, list[str]]:
    """The addresses of hosts, those that are not looked at as they were remembered."""
    found = {}
    for host in hosts:
        own = (
            _addresses(states[host.name]) if host.name in states else remembered.get(host.name, [])
        )
        found[host.name] = sorted({host.address, *own})
    return found


def _addresses(state: HostState) -> list[str]:
    return [
        address.partition("/")[0]
        for name, nic in state.nics.items()
        if not name.startswith(INNER)
        for address in nic.get("addresses", ())
    ]


def _remembered(present: str | None, mark: str) -> dict[str, list[str]]:
    """What the file on the host says of its peers; nothing where somebody spoilt it."""
    for line in (present or "").splitlines():
        if line.startswith(mark):
            try:
                found: dict[str, list[str]] = json.loads(line[len(mark) :])
                return {name: [str(ipaddress.ip_address(a)) for a in found[name]] for name in found}
            except (ValueError, TypeError, LookupError):
                break
    return {}


def _networks(spec: HostSpec, allowed: Iterable[str], version: int) -> list[str]:
    """One family's addresses and networks; none inside another, which nft refuses in one set."""
    found: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
    for each in allowed:
        try:
            found.append(ipaddress.ip_network(each, strict=False))
        except ValueError:
            raise ValueError(
                f"{spec.name}: the firewall admits addresses alone, and {each!r} is none; set "
                "`address` for that host"
            ) from None
    ours = [one for one in found if one.version == version]
    return [
        str(one.network_address) if one.num_addresses == 1 else str(one)
        for one in ipaddress.collapse_addresses(ours)  # type: ignore[type-var]
    ]
