"""Hosts as the fact lists them: interfaces, RDMA devices, and `nvidia-smi topo -m`.

The shapes are those of real machines: eight cards with a switch for two cards and two NICs, four
cards with a NIC each, one NIC for all of them with its name in the header, a card on another
socket than any NIC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.unit.fleets import state
from vllm_fleet.fabric.discovery import discover
from vllm_fleet.fabric.environment import Node
from vllm_fleet.spec.model import Nccl

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection across the sockets
  PIX  = Connection across one PCIe bridge at most
"""
RATES = {
    400: "400 Gb/sec (4X NDR)",
    200: "200 Gb/sec (4X HDR)",
    100: "100 Gb/sec (4X EDR)",
    25: "25 Gb/sec (1X EDR)",
}


def topo(to_nics: Sequence[str], devices: Sequence[str], link: str = "NV18") -> str:
    """``topo -m`` of cards by their distances to NICs, one line a card: ``"PIX NODE SYS"``.

    With devices a legend tells which NIC is which, as new drivers have it; old ones have the
    names in the header, where ``link`` is given as "old".
    """
    old = link == "old"
    nics = list(devices) if old else [f"NIC{i}" for i in range(len(devices))]
    cards = [f"GPU{i}" for i in range(len(to_nics))]
    tail = ["CPU Affinity", "NUMA Affinity", *([] if old else ["GPU NUMA ID"])]
    lines = ["\t" + "\t".join([*cards, *nics, *tail])]
    for number, distances in enumerate(to_nics):
        words = [" X " if i == number else ("NV4" if old else link) for i in range(len(cards))]
        numa = "0" if number < max(1, len(cards) // 2) else "1"
        cells = [*words, *distances.split(), "0-55,112-167", numa, *([] if old else ["", "N/A"])]
        lines.append("\t".join([cards[number], *cells]))
    for number, nic in enumerate(nics):
        words = [distances.split()[number] for distances in to_nics]
        rest = [" X " if i == number else "SYS" for i in range(len(nics))]
        lines.append("\t".join([nic, *words, *rest]))
    text = "\n".join(lines) + "\n" + LEGEND
    if not old:
        text += "\nNIC Legend:\n\n"
        text += "".join(f"  NIC{i}: {name}\n" for i, name in enumerate(devices))
    return text


def nic(
    *addresses: str, speed: int | None = 10000, mtu: int = 1500, up: bool = True, ib: bool = False
) -> dict[str, Any]:
    """An interface."""
    return {
        "state": "up" if up else "down",
        "speed_mbit": speed,
        "mtu": mtu,
        "driver": "mlx5_core",
        "hardware": True,
        "numa": 0,
        "infiniband": ib,
        "addresses": list(addresses),
    }


def ib(gbit: int = 400, up: bool = True) -> dict[str, Any]:
    """A port of InfiniBand."""
    return {
        "state": "ACTIVE" if up else "DOWN",
        "physical": "LinkUp" if up else "Polling",
        "rate": RATES[gbit],
        "layer": "InfiniBand",
        "interface": "",
        "driver": "mlx5_core",
        "numa": 0,
        "gids": [{"index": 0, "gid": "fe80::b83f:d203:f4", "type": "IB/RoCE v1", "interface": ""}],
    }


def roce(
    interface: str, *gids: tuple[int, str, str], gbit: int = 400, up: bool = True
) -> dict[str, Any]:
    """A port of RoCE with GIDs of its own beside the link-local ones: (index, version, address).

    An address of IPv4 is written into its GID as the kernel does.
    """
    local = "fe80:0000:0000:0000:0e42:a1ff:fe1e:2b3a"
    listed = [(0, "IB/RoCE v1", local), (1, "RoCE v2", local), *gids]
    return {
        **ib(gbit, up),
        "layer": "Ethernet",
        "interface": interface,
        "gids": [
            {"index": i, "gid": gid(a), "type": version, "interface": interface}
            for i, version, a in listed
        ],
    }


def gid(address: str) -> str:
    """As the kernel prints a GID."""
    if ":" in address:
        return address
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def v2(index: int, address: str) -> tuple[int, str, str]:
    """A GID of RoCE v2."""
    return index, "RoCE v2", address


def v1(index: int, address: str) -> tuple[int, str, str]:
    """A GID of RoCE v1."""
    return index, "IB/RoCE v1", address


def node(
    name: str,
    address: str,
    nics: Mapping[str, Mapping[str, Any]],
    devices: Mapping[str, Mapping[str, Any]] | None = None,
    text: str = "",
    *,
    cuda: bool = True,
    **settings: Any,
) -> Node:
    """A host of the fabric, through the fact's shape."""
    looked_at = state(
        hostname=name,
        nics=dict(nics),
        rdma={k if ":" in k else f"{k}:1": v for k, v in (devices or {}).items()},
        cards={"present": True, "error": None, "csv": "", "topo": text},
    )
    return Node(name, address, Nccl(**settings), cuda, discover(looked_at))
