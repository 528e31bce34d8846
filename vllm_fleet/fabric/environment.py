"""The variables by which NCCL, gloo and vLLM reach other hosts: chosen, or checked. Pure.

What the hosts have in common decides: one network that all of them are in, one kind of RDMA
that all of them have. Names differ from host to host, so every host has values of its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_fleet.fabric.discovery import (
    DISTANCES,
    Device,
    HostFabric,
    Layer,
    Link,
    Network,
    natural,
)
from vllm_fleet.spec.model import Nccl

SOCKET = "NCCL_SOCKET_IFNAME"
GLOO = "GLOO_SOCKET_IFNAME"
HOST_IP = "VLLM_HOST_IP"
HCA = "NCCL_IB_HCA"
IB_DISABLE = "NCCL_IB_DISABLE"
GID_INDEX = "NCCL_IB_GID_INDEX"
ADDR_FAMILY = "NCCL_IB_ADDR_FAMILY"
GDR_LEVEL = "NCCL_NET_GDR_LEVEL"
GDR_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", *"012345")

# For a search, not for keeps: they cost speed or fill the journal (NCCL's documentation,
# "Environment Variables", has them below "Debugging").
DEBUGGING = {
    **dict.fromkeys(
        ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_DISTRIBUTED_DEBUG"),
        "it writes a log for a search",
    ),
    **dict.fromkeys(
        ("NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"), "it writes what NCCL found to a file"
    ),
    **dict.fromkeys(
        ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "it takes a fast path away to find a cause"
    ),
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO", "NCCL_LAUNCH_MODE"), "it forces NCCL's choice"),
}
PREFIXES = ("NCCL_", "UCX_")
KNOWN = (GLOO, HOST_IP)


@dataclass(frozen=True)
class Node:
    """One host of the fabric, as it was looked at."""

    name: str
    address: str  # by which the inventory knows it
    settings: Nccl
    cuda: bool  # else gloo alone carries it, which knows no RDMA
    has: HostFabric


@dataclass(frozen=True)
class Choice:
    """The environment of one host, and why."""

    environment: dict[str, str]
    reasons: dict[str, str] = field(default_factory=dict)  # by variable
    interface: str = ""
    address: str = ""
    mtu: int = 0
    layer: Layer | None = None  # of RDMA; None: sockets
    gbit: float | None = None  # of its slowest link; None where none tells


def environments(nodes: Sequence[Node]) -> tuple[dict[str, Choice], list[str]]:
    """The choice of every host; or complaints, each with host, setting and remedy."""
    complaints = [c for node in nodes for c in _allowed(node)]
    explicit: dict[str, Link] = {}
    for node in nodes:
        try:
            link = _asked(node)
        except ValueError as error:
            complaints.append(str(error))
        else:
            if link is not None:
                explicit[node.name] = link
    if complaints:
        return {}, complaints
    layer, complaints = common_layer(nodes)
    network, told = common_network(nodes, explicit, layer)
    complaints += told
    if complaints:
        return {}, complaints
    found = {
        node.name: environment(node, layer, network, _shared(nodes), explicit.get(node.name))
        for node in nodes
    }
    complaints = [c for node in nodes for c in _fits(node, found[node.name])]
    return ({}, complaints) if complaints else (found, [])


def environment(
    node: Node,
    layer: Layer | None,
    network: Network | None,
    shared: frozenset[Network] = frozenset(),
    link: Link | None = None,
) -> Choice:
    """The variables of one host.

    ``layer``: of RDMA, None for sockets; ``network``: that all hosts share, None where they are
    joined by routers and each has its ``link`` named; ``shared``: networks of RDMA devices that
    other hosts have too.
    """
    if link is None:
        assert network is not None, "without a common network every interface is named"
        link = _in(node, network)
    networks = frozenset({network}) if network else None
    own = link.address_in(networks)
    where = f"in {network}, which all hosts share" if network else "named by nccl.interface"
    found = {SOCKET: f"={link.name}", GLOO: link.name, HOST_IP: own}
    reasons = {SOCKET: where, GLOO: "the same; gloo takes one exact name", HOST_IP: "its address"}
    gbit: float | None = link.speed_mbit / 1000 if link.speed_mbit else None
    if layer is None:
        found[IB_DISABLE] = "1"
        reasons[IB_DISABLE] = (
            "no RDMA that all hosts have: none may take it by itself"
            if node.settings.rdma != "off"
            else "nccl.rdma is off"
        )
    else:
        devices = usable(node.has, layer)
        found[HCA] = "=" + ",".join(device.hca for device in devices)
        reasons[HCA] = _why(node.has, layer, devices)
        gbit = min(device.gbit for device in devices)
        if layer == "RoCE":
            family, index = gid_index(devices, shared)
            if family:
                found[ADDR_FAMILY], reasons[ADDR_FAMILY] = family, "its GIDs of RoCE v2 are IPv6"
            if index is not None:
                found[GID_INDEX] = str(index)
                reasons[GID_INDEX] = "its first GID is in a network that others are not in"
        if level := gdr_level(node.has, devices):
            found[GDR_LEVEL] = level
            reasons[GDR_LEVEL] = f"every card has a device within {level}"
    for key, value in node.settings.env.items():
        found[key], reasons[key] = value, "nccl.env"
    return Choice(found, reasons, link.name, found[HOST_IP], link.mtu, layer, gbit or None)


# --- what all hosts have in common ---------------------------------------------------------


def common_layer(nodes: Sequence[Node]) -> tuple[Layer | None, list[str]]:
    """The RDMA that every host has, InfiniBand first; complaints where it is required."""
    required = [n for n in nodes if n.settings.rdma == "required"]
    off = [n for n in nodes if n.settings.rdma == "off"]
    if required and off:
        return None, [
            f"nccl.rdma is required on {required[0].name} and off on {off[0].name}: one model "
            "takes one way between its hosts; set it alike"
        ]
    layers: tuple[Layer, ...] = ("InfiniBand", "RoCE")
    if not off and all(node.cuda for node in nodes):
        for layer in layers:
            if all(usable(node.has, layer) for node in nodes):
                return layer, []
    complaints = []
    for node in required:
        if not node.cuda:
            complaints.append(
                f"{node.name}: nccl.rdma is required, and only cards use it: `device` is not cuda"
            )
        elif not any(usable(node.has, layer) for layer in layers):
            ports = [f"{d}" for d in sorted(node.has.all_devices, key=natural)]
            why = f"{', '.join(ports)} without a usable link" if ports else "no RDMA device"
            complaints.append(
                f"{node.name}: nccl.rdma is required, and it has {why}: see its cable, the "
                "switch's port and the driver, or set nccl.rdma to auto"
            )
    if required and not complaints:
        kinds = {n.name: [layer for layer in layers if usable(n.has, layer)] for n in nodes}
        told = ", ".join(f"{name} {'/'.join(has) or 'none'}" for name, has in kinds.items())
        complaints.append(f"nccl.rdma is required, and hosts have none in common: {told}")
    return None, complaints


def common_network(
    nodes: Sequence[Node], explicit: Mapping[str, Link], layer: Layer | None
) -> tuple[Network | None, list[str]]:
    """The network that all hosts meet in; None where all of them have their interface named."""
    links = {
        n.name: [explicit[n.name]] if n.name in explicit else [*n.has.links.values()] for n in nodes
    }
    shared = frozenset[Network].intersection(
        *(frozenset(w for one in own for w in one.networks) for own in links.values())
    )
    if not shared:
        if len(explicit) == len(nodes):
            return None, []
        told = "; ".join(
            f"{name} has "
            + (", ".join(f"{one.name} {' '.join(one.addresses)}" for one in own) or "none")
            for name, own in links.items()
        )
        return None, [
            f"the hosts have no network in common ({told}): give them one, or name the interface "
            "of each host in nccl.interface where routers join them"
        ]

    def worth(network: Network) -> tuple[int, int, int, str]:
        slowest = min(
            max((one.speed_mbit or 0) for one in own if network in one.networks)
            for own in links.values()
        )
        known = sum(_within(n.address, network) for n in nodes)
        # RDMA carries the data: then the network that the fleet is known by is the safer one.
        first, second = (known, slowest) if layer else (slowest, known)
        return first, second, -network.version, str(network)

    return max(shared, key=worth), []


def _shared(nodes: Sequence[Node]) -> frozenset[Network]:
    """Networks that interfaces of every host are in: of RDMA devices, too."""
    return frozenset[Network].intersection(
        *(frozenset(w for link in n.has.links.values() for w in link.networks) for n in nodes)
    )


def _in(node: Node, network: Network) -> Link:
    """The interface of a host in a network; of several the fastest."""
    fit = [one for one in node.has.links.values() if network in one.networks]
    return max(fit, key=lambda one: (one.speed_mbit or 0, _holds(one, node.address)))


def _holds(link: Link, address: str) -> bool:
    return any(a.partition("/")[0] == address for a in link.addresses)


def _within(address: str, network: Network) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False


# --- RDMA ----------------------------------------------------------------------------------


def usable(has: HostFabric, layer: Layer) -> tuple[Device, ...]:
    """The devices of a host for the data: the fastest of that layer, those nearest to cards.

    Slower ones (a port for management) and those that no card is nearest to (for storage) would
    be taken by NCCL too, and the slowest sets the pace.
    """
    found = [
        d
        for d in has.devices
        if d.layer == layer
        and (layer == "InfiniBand" or any(g.version == 2 and g.address for g in d.gids))
    ]
    fastest = max((d.gbit for d in found), default=0)
    found = [d for d in found if d.gbit == fastest]
    near: set[str] = set()
    for card in {card for card, _ in has.distances}:
        near |= _nearest(has, card, found)[1]
    return tuple(d for d in found if d.name in near) if near else tuple(found)


def _nearest(has: HostFabric, card: int, devices: Sequence[Device]) -> tuple[str, set[str]]:
    """The smallest distance from a card to a device, and the devices at it."""
    known = {
        d.name: has.distances[card, d.name] for d in devices if (card, d.name) in has.distances
    }
    if not known:
        return "", set()
    best = min(known.values(), key=DISTANCES.index)
    return best, {name for name, distance in known.items() if distance == best}


def gdr_level(has: HostFabric, devices: Sequence[Device]) -> str:
    """How far from a card its device may be for NICs to read cards' memory themselves.

    The farthest of the nearest ones, so that every card has one; "" where that leads through the
    processor's own links, which NCCL is left to judge.
    """
    cards = {card for card, _ in has.distances}
    worst = max(
        (_nearest(has, card, devices)[0] for card in cards),
        key=lambda d: DISTANCES.index(d) if d else len(DISTANCES),
        default="",
    )
    return worst if worst in ("PIX", "PXB", "PHB") else ""


def gid_index(
    devices: Sequence[Device], shared: frozenset[Network]
) -> tuple[str | None, int | None]:
    """(address family, GID index) to set; None for what NCCL finds by itself since 2.21.

    NCCL takes a device's first GID of RoCE v2 and IPv4. It needs help where there is none of
    IPv4, and where a later one is in a network that other hosts are in and the first is not.
    """
    second = {d.name: [g for g in d.gids if g.version == 2 and g.address] for d in devices}
    fourth = {name: [g for g in gids if ":" not in str(g.address)] for name, gids in second.items()}
    family = None if all(fourth.values()) else "AF_INET6"
    wanted = set()
    needed = False
    for gids in (second if family else fourth).values():
        own = [g for g in gids if family is None or ":" in str(g.address)] or gids
        fit = [g for g in own if any(_within(str(g.address), network) for network in shared)]
        best = fit[0] if fit else own[0]
        wanted.add(best.index)
        needed |= best is not own[0]
    # One number holds for all devices of a process.
    return family, wanted.pop() if needed and len(wanted) == 1 else None


def _why(has: HostFabric, layer: Layer, devices: Sequence[Device]) -> str:
    others = [d.hca for d in has.devices if d not in devices]
    text = f"{layer}, {devices[0].gbit:g} Gbit/s"
    if others:
        text += f"; not {', '.join(others)}: slower, of another kind, or near to no card"
    return text


# --- what an operator wrote ----------------------------------------------------------------


def matching(words: str, names: frozenset[str]) -> dict[str, list[str]]:
    """By item of a list as NCCL reads it (`=eth0,eth1`, `^docker`): the names it stands for.

    Without `=` an item is a prefix; a port behind a device's name does not count.
    """
    text = words.removeprefix("^")
    exact = text.startswith("=")
    found = {}
    for item in text.removeprefix("=").split(","):
        name = item.partition(":")[0]
        found[item] = sorted(n for n in names if (n == name if exact else n.startswith(name)))
    return found


def _asked(node: Node) -> Link | None:
    """The interface that an operator names, by setting or variable. Raises ValueError."""
    name, where = node.settings.interface, "nccl.interface"
    given = node.settings.env.get(SOCKET)
    if given is not None and not given.startswith("^"):
        words = matching(given, node.has.all_links)
        if len(words) == 1 and len(hits := next(iter(words.values()))) == 1:
            if name is not None and name != hits[0]:
                raise ValueError(
                    f"{node.name}: nccl.interface is {name} and nccl.env {SOCKET} is {given}: "
                    "take one of them out"
                )
            name, where = hits[0], f"nccl.env: {SOCKET}"
    if name is None:
        return None
    if name in node.has.links:
        return node.has.links[name]
    why = node.has.left_out.get(name)
    has = ", ".join(sorted(node.has.links, key=natural)) or "none"
    raise ValueError(f"{node.name}: {where}: {name} {why or 'does not exist there'}; it has {has}")


def _allowed(node: Node) -> list[str]:
    """Variables that are no business of the fabric, or not for keeps."""
    found = []
    for key in node.settings.env:
        if key in DEBUGGING:
            found.append(
                f"{node.name}: nccl.env: {key} is for debugging ({DEBUGGING[key]}) and not kept; "
                "for a search put it into `env` of one instance"
            )
        elif not key.startswith(PREFIXES) and key not in KNOWN:
            found.append(
                f"{node.name}: nccl.env: {key} does not belong to the fabric; put it into `env` "
                "of the model or instance"
            )
        elif set(node.settings.env[key]) & set('"\\$`'):
            found.append(
                f"{node.name}: nccl.env: {key}: quotes, `$` and backslashes are not passed on; "
                "leave them out"
            )
    return found


def _fits(node: Node, choice: Choice) -> list[str]:
    """What is wrong with an operator's values on this host."""
    env, has, found = node.settings.env, node.has, []

    def say(key: str, text: str) -> None:
        found.append(f"{node.name}: nccl.env: {key}={env[key]}: {text}")

    for key, names, what in (
        (SOCKET, has.all_links, "interface"),
        (HCA, has.all_devices, "RDMA device"),
    ):
        if key not in env:
            continue
        listed = ", ".join(sorted(names, key=natural)) or "none"
        for item, hits in matching(env[key], names).items():
            if not hits and not env[key].startswith("^"):
                say(key, f"no {what} is called so; it has {listed}")
            elif len(hits) > 1 and not env[key].startswith("^"):
                say(key, f"{item} is a prefix of {' and '.join(hits)}; one alone is ={hits[0]}")
    if GLOO in env and env[GLOO] not in has.links:
        why = has.left_out.get(env[GLOO], "gloo takes one exact name, and no interface has it")
        say(GLOO, f"{why}; it has {', '.join(sorted(has.links, key=natural)) or 'none'}")
    addresses = [a.partition("/")[0] for link in has.links.values() for a in link.addresses]
    if HOST_IP in env and env[HOST_IP] not in addresses:
        say(HOST_IP, f"no address of this host; it has {', '.join(addresses) or 'none'}")
    if GID_INDEX in env and choice.layer == "RoCE":
        for device in usable(has, "RoCE"):
            if env[GID_INDEX] not in {str(g.index) for g in device.gids} | {"-1"}:
                told = ", ".join(f"{g.index} {g.address or 'link-local'}" for g in device.gids)
                say(GID_INDEX, f"{device.hca} has no such GID; it has {told or 'none'}")
    if GDR_LEVEL in env and env[GDR_LEVEL] not in GDR_LEVELS:
        say(GDR_LEVEL, f"must be one of {', '.join(GDR_LEVELS)}")
    if env.get(IB_DISABLE, "0") != "0" and node.settings.rdma == "required":
        say(IB_DISABLE, "takes away what nccl.rdma requires")
    return found
