"""The instances' ports, closed to all but those who need them. Pure: hosts in, files out.

vLLM listens on every address and asks for no key. On a GPU host a table of nftables of our own
admits gateways, monitoring and the host itself to the ports of its instances; every other port,
table and firewall is left as it is. A unit of ours loads it at boot, and a timer puts it back
where somebody emptied the ruleset.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Mapping, Sequence

from vllm_fleet import fanout, paths
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

# Groups whose hosts talk to instances.
PEERS = ("gateway", "monitoring")
# Addresses of these are for containers and guests of the host itself; nobody comes from them.
_INNER = ("docker", "br-", "veth", "virbr", "cni", "cali", "flannel", "lxc", "lxd", "podman")
_TOLD = "# Peers: "


def peers(
    fleet: Fleet, states: Mapping[str, HostState], present: str | None
) -> dict[str, list[str]]:
    """Addresses from which gateways and monitors may come, by host.

    A host of several networks opens connections from the address on the way to the target, which
    need not be the one in the inventory: so all of its own count. Of hosts that take no part in
    this run nothing is seen; ``present``, the file as it is on the host, remembers theirs.
    """
    remembered = _remembered(present)
    found = {}
    for host in fleet.hosts:
        if not set(PEERS) & set(host.groups):
            continue
        own = (
            _addresses(states[host.name]) if host.name in states else remembered.get(host.name, [])
        )
        found[host.name] = sorted({host.address, *own})
    return found


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
    span: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ssh_ports: Sequence[int] = (),
) -> list[ManagedFile]:
    """The table of a GPU host and the units that keep it; none where nothing is to be closed.

    ``sharing``: the hosts that may ask this one for weights. ``span``: ports of spans, and the
    addresses of the hosts that have ranks of them: what listens there runs whatever it is sent.
    ``ssh_ports``: never closed, also where they are among those.

    Raises ValueError, naming the host, for a peer that is no address.
    """
    ports = sorted({one.port for one in spec.instances})
    span_ports, ranks = span
    if not ports or not spec.settings.firewall:
        return []
    allowed = [*(a for listed in peers.values() for a in listed), *spec.settings.firewall_allow]
    values = {
        "mark": paths.MARK,
        "table": TABLE,
        "file": FILE,
        "unit": UNIT,
        "told": _TOLD + json.dumps(peers, sort_keys=True),
        "ports": ports,
        "sharing": _networks(spec, sharing, 4),
        "sharing_port": spec.settings.fanout.port,
        "span_ports": span_ports,
        "ssh_ports": ssh_ports,
        "span_ipv4": _networks(spec, [*ranks, *spec.settings.firewall_allow], 4),
        "span_ipv6": _networks(spec, [*ranks, *spec.settings.firewall_allow], 6),
        "ipv4": _networks(spec, allowed, 4),
        "ipv6": _networks(spec, allowed, 6),
    }
    return [
        ManagedFile(FILE, render("firewall/firewall.nft.j2", **values)),
        ManagedFile(f"{UNITS}/{UNIT}", render("firewall/firewall.service.j2", **values)),
        ManagedFile(f"{UNITS}/{GUARD}.service", render("firewall/guard.service.j2", **values)),
        ManagedFile(f"{UNITS}/{GUARD}.timer", render("firewall/guard.timer.j2", **values)),
    ]


def _addresses(state: HostState) -> list[str]:
    return [
        address.partition("/")[0]
        for name, nic in state.nics.items()
        if not name.startswith(_INNER)
        for address in nic.get("addresses", ())
    ]


def _remembered(present: str | None) -> dict[str, list[str]]:
    """What the file on the host says of its peers; nothing where somebody spoilt it."""
    for line in (present or "").splitlines():
        if line.startswith(_TOLD):
            try:
                found: dict[str, list[str]] = json.loads(line[len(_TOLD) :])
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
