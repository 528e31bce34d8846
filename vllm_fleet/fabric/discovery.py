"""What of a host can carry a model that spans hosts: interfaces, RDMA devices, distances. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm_fleet.smi import CardsError
from vllm_fleet.state import HostState
from vllm_fleet.topo import parse_topo

Layer = Literal["InfiniBand", "RoCE"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Addresses of these are for containers and guests of the host itself; nobody comes from them.
INNER = ("docker", "br-", "veth", "virbr", "cni", "cali", "flannel", "lxc", "lxd", "podman")
# As nvidia-smi prints them, the nearest first.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Link:
    """A network interface that others can reach."""

    name: str
    addresses: tuple[str, ...]  # with the length of their networks
    speed_mbit: int | None
    mtu: int
    numa: int | None
    driver: str
    infiniband: bool  # IP over InfiniBand

    @property
    def networks(self) -> frozenset[Network]:
        """The networks that it is in."""
        return frozenset(ipaddress.ip_interface(a).network for a in self.addresses)

    def address_in(self, networks: frozenset[Network] | None = None) -> str:
        """Its address, IPv4 first; of those in some network, where any are given."""
        own = [ipaddress.ip_interface(a) for a in self.addresses]
        fit = [a for a in own if networks is None or a.network in networks] or own
        return str(sorted(fit, key=lambda a: a.version)[0].ip)


@dataclass(frozen=True)
class Gid:
    """One address of an RDMA port."""

    index: int
    address: str | None  # the IP address in it; None: a link-local one, or none of IP
    version: Literal[1, 2] | None  # of RoCE; says nothing on InfiniBand


@dataclass(frozen=True)
class Device:
    """A port of an RDMA device that has a link."""

    name: str  # mlx5_0
    port: int
    layer: Layer
    gbit: float
    interface: str
    numa: int | None
    gids: tuple[Gid, ...]

    @property
    def hca(self) -> str:
        """As NCCL_IB_HCA names it."""
        return f"{self.name}:{self.port}"


@dataclass(frozen=True)
class HostFabric:
    """What a host has, and what was left out and why."""

    links: Mapping[str, Link]
    devices: tuple[Device, ...]
    # By card and device, in nvidia-smi's words; empty where it does not say.
    distances: Mapping[tuple[int, str], str]
    left_out: Mapping[str, str] = field(default_factory=dict)
    all_links: frozenset[str] = frozenset()  # names of every interface, the left-out ones too
    all_devices: frozenset[str] = frozenset()


def discover(state: HostState) -> HostFabric:
    """What the fact of a host says of its fabric."""
    left_out: dict[str, str] = {}
    links: dict[str, Link] = {}
    for name, nic in state.nics.items():
        if name.startswith(INNER):
            left_out[name] = "is for containers of this host"
        elif nic.get("state") not in ("up", "unknown"):
            left_out[name] = "has no link"
        elif not nic.get("addresses"):
            left_out[name] = "has no address"
        else:
            links[name] = Link(
                name,
                tuple(nic["addresses"]),
                nic.get("speed_mbit"),
                int(nic.get("mtu") or 0),
                nic.get("numa"),
                str(nic.get("driver") or ""),
                bool(nic.get("infiniband")),
            )
    devices = []
    for name, port in state.rdma.items():
        if port.get("state") != "ACTIVE":
            left_out[name] = f"is {port.get('state') or 'in an unknown state'}"
            continue
        device, _, number = name.partition(":")
        devices.append(
            Device(
                device,
                int(number),
                "InfiniBand" if port.get("layer") == "InfiniBand" else "RoCE",
                _gbit(str(port.get("rate") or "")),
                str(port.get("interface") or ""),
                port.get("numa"),
                tuple(_gid(one) for one in port.get("gids") or ()),
            )
        )
    return HostFabric(
        links,
        tuple(sorted(devices, key=lambda d: natural(d.name))),
        _distances(str(state.cards.get("topo") or ""), [d.name for d in devices]),
        left_out,
        frozenset(state.nics),
        frozenset(name.partition(":")[0] for name in state.rdma),
    )


def natural(name: str) -> list[tuple[int, str]]:
    """A key by which mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _gbit(rate: str) -> float:
    """Of "400 Gb/sec (4X NDR)"."""
    match = re.match(r"[\d.]+", rate)
    return float(match[0]) if match else 0.0


def _gid(one: Mapping[str, object]) -> Gid:
    address: ipaddress.IPv6Address | ipaddress.IPv4Address | None
    try:
        found = ipaddress.IPv6Address(str(one.get("gid")))
        address = found.ipv4_mapped or (None if found.is_link_local else found)
    except ValueError:
        address = None
    kind = str(one.get("type") or "")
    version: Literal[1, 2] | None = 2 if "v2" in kind else 1 if "RoCE" in kind else None
    return Gid(int(str(one.get("index"))), str(address) if address else None, version)


def _distances(topo: str, devices: Sequence[str]) -> dict[tuple[int, str], str]:
    try:
        found = parse_topo(topo).to_nics
    except CardsError:
        return {}  # no cards, or a text that the exam tells of
    return {key: d for key, d in found.items() if key[1] in devices and d in DISTANCES}
