"""Sixteen hosts, three fabrics; the environment of each is written by hand."""

from __future__ import annotations

import pytest

from tests.unit.fabric.listings import ib, nic, node, roce, topo, v1, v2
from vllm_fleet.fabric.environment import Node, environments

PAIRS = [
    "PIX PIX NODE NODE SYS SYS SYS SYS",
    "PIX PIX NODE NODE SYS SYS SYS SYS",
    "NODE NODE PIX PIX SYS SYS SYS SYS",
    "NODE NODE PIX PIX SYS SYS SYS SYS",
    "SYS SYS SYS SYS PIX PIX NODE NODE",
    "SYS SYS SYS SYS PIX PIX NODE NODE",
    "SYS SYS SYS SYS NODE NODE PIX PIX",
    "SYS SYS SYS SYS NODE NODE PIX PIX",
]
EIGHT = [f"mlx5_{i}" for i in range(8)]
ONE_EACH = ["PIX SYS SYS SYS", "SYS PIX SYS SYS", "SYS SYS PIX SYS", "SYS SYS SYS PIX"]
STORAGE = [
    "PXB NODE SYS SYS SYS",
    "NODE PXB SYS SYS SYS",
    "SYS SYS PXB NODE NODE",
    "SYS SYS NODE PXB NODE",
]
NAMED = ["ibp12s0", "ibp76s0", "ibp141s0", "ibp204s0"]

INFINIBAND = [
    # Eight cards, eight devices, two of each at a switch; one port for management.
    node(
        "ib-1",
        "10.1.0.1",
        {"eno1": nic("10.1.0.1/24"), "eno2": nic(up=False)},
        {name: ib() for name in EIGHT},
        topo(PAIRS, EIGHT),
    ),
    # The same, and a bond of two ports that can do RoCE between them.
    node(
        "ib-2",
        "10.1.0.2",
        {"bond0": nic("10.1.0.2/24", speed=25000), "ens1f0np0": nic(speed=25000)},
        {
            **{f"mlx5_{i}": ib() for i in (0, 1, 2, 3, 6, 7, 8, 9)},
            "mlx5_bond_0": roce("bond0", v2(3, "10.1.0.2"), gbit=25),
        },
        topo(
            [f"{' '.join(p.split()[:4])} SYS {' '.join(p.split()[4:])}" for p in PAIRS],
            [*EIGHT[:4], "mlx5_bond_0", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9"],
        ),
    ),
    # Four cards with a device each, named by their place.
    node(
        "ib-3",
        "10.1.0.3",
        {"ens3f0np0": nic("10.1.0.3/24", "fd01::3/64")},
        {name: ib() for name in NAMED},
        topo(ONE_EACH, NAMED, "NV6"),
    ),
    # One device for all, on one socket; an old driver with its name in the header.
    node(
        "ib-4",
        "10.1.0.4",
        {"em1": nic("10.1.0.4/24", speed=1000)},
        {"mlx5_0": ib(100)},
        topo(["NODE", "NODE", "SYS", "SYS"], ["mlx5_0"], "old"),
    ),
    # Names beyond nine, and a device for storage that is near to no card.
    node(
        "ib-5",
        "10.1.0.5",
        {"eth0": nic("10.1.0.5/24"), "eth1": nic("172.30.0.5/16", speed=100000)},
        {f"mlx5_{i}": ib() for i in (2, 9, 10, 11, 12)},
        topo(
            STORAGE,
            ["mlx5_2", "mlx5_9", "mlx5_10", "mlx5_11", "mlx5_12"],
        ),
    ),
    # One port down, IP over InfiniBand, containers.
    node(
        "ib-6",
        "10.1.0.6",
        {
            "eno1np0": nic("10.1.0.6/24"),
            "ibs1": nic("10.9.0.6/24", speed=400000, mtu=2044, ib=True),
            "docker0": nic("172.17.0.1/16", speed=None),
            "br-5f2a": nic("10.1.0.200/24", speed=None),
        },
        {"mlx5_0": ib(), "mlx5_1": ib(up=False), "mlx5_2": ib(), "mlx5_3": ib()},
        topo(ONE_EACH, ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"], "NV6"),
    ),
]
INFINIBAND_EXPECTED = {
    "ib-1": {
        "NCCL_SOCKET_IFNAME": "=eno1",
        "GLOO_SOCKET_IFNAME": "eno1",
        "VLLM_HOST_IP": "10.1.0.1",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1",
        "NCCL_NET_GDR_LEVEL": "PIX",
    },
    "ib-2": {
        "NCCL_SOCKET_IFNAME": "=bond0",
        "GLOO_SOCKET_IFNAME": "bond0",
        "VLLM_HOST_IP": "10.1.0.2",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_6:1,mlx5_7:1,mlx5_8:1,mlx5_9:1",
        "NCCL_NET_GDR_LEVEL": "PIX",
    },
    "ib-3": {
        "NCCL_SOCKET_IFNAME": "=ens3f0np0",
        "GLOO_SOCKET_IFNAME": "ens3f0np0",
        "VLLM_HOST_IP": "10.1.0.3",
        "NCCL_IB_HCA": "=ibp12s0:1,ibp76s0:1,ibp141s0:1,ibp204s0:1",
        "NCCL_NET_GDR_LEVEL": "PIX",
    },
    "ib-4": {
        "NCCL_SOCKET_IFNAME": "=em1",
        "GLOO_SOCKET_IFNAME": "em1",
        "VLLM_HOST_IP": "10.1.0.4",
        "NCCL_IB_HCA": "=mlx5_0:1",
    },
    "ib-5": {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "VLLM_HOST_IP": "10.1.0.5",
        "NCCL_IB_HCA": "=mlx5_2:1,mlx5_9:1,mlx5_10:1,mlx5_11:1",
        "NCCL_NET_GDR_LEVEL": "PXB",
    },
    "ib-6": {
        "NCCL_SOCKET_IFNAME": "=eno1np0",
        "GLOO_SOCKET_IFNAME": "eno1np0",
        "VLLM_HOST_IP": "10.1.0.6",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_2:1,mlx5_3:1",
    },
}

ROCE = [
    # Two rails, each in a network of its own.
    node(
        "ro-1",
        "10.2.0.1",
        {
            "eno1": nic("10.2.0.1/24"),
            "ens6f0np0": nic("10.20.0.1/24", speed=400000, mtu=9000),
            "ens6f1np1": nic("10.20.1.1/24", speed=400000, mtu=9000),
        },
        {
            "mlx5_0": roce("ens6f0np0", v1(2, "10.20.0.1"), v2(3, "10.20.0.1")),
            "mlx5_1": roce("ens6f1np1", v1(2, "10.20.1.1"), v2(3, "10.20.1.1")),
        },
        topo(["PIX NODE", "NODE PIX"], ["mlx5_0", "mlx5_1"]),
    ),
    # Names by place, and the port for management can do RoCE, too.
    node(
        "ro-2",
        "10.2.0.2",
        {
            "enp1s0": nic("10.2.0.2/24", speed=25000),
            "enp65s0np0": nic("10.20.0.2/24", speed=400000, mtu=9000),
            "enp66s0np0": nic("10.20.1.2/24", speed=400000, mtu=9000),
        },
        {
            "rocep1s0": roce("enp1s0", v2(3, "10.2.0.2"), gbit=25),
            "rocep65s0": roce("enp65s0np0", v2(3, "10.20.0.2")),
            "rocep66s0": roce("enp66s0np0", v2(3, "10.20.1.2")),
        },
        topo(["PIX PXB NODE", "NODE NODE PXB"], ["rocep1s0", "rocep65s0", "rocep66s0"]),
    ),
    # The first GID of IPv4 is in a network that the others do not have.
    node(
        "ro-3",
        "10.2.0.3",
        {
            "eno1": nic("10.2.0.3/24"),
            "ens1np0": nic("192.168.50.3/24", "10.20.0.3/24", speed=400000),
            "ens2np0": nic("192.168.51.3/24", "10.20.1.3/24", speed=400000),
        },
        {
            "mlx5_0": roce(
                "ens1np0", v2(3, "192.168.50.3"), v1(4, "10.20.0.3"), v2(5, "10.20.0.3")
            ),
            "mlx5_1": roce(
                "ens2np0", v2(3, "192.168.51.3"), v1(4, "10.20.1.3"), v2(5, "10.20.1.3")
            ),
        },
        topo(["PIX NODE", "NODE PIX"], ["mlx5_0", "mlx5_1"]),
    ),
    # A driver that says nothing of NICs.
    node(
        "ro-4",
        "10.2.0.4",
        {
            "eno1": nic("10.2.0.4/24"),
            "ens1np0": nic("10.20.0.4/24", speed=400000),
            "ens2np0": nic("10.20.1.4/24", speed=400000),
        },
        {
            "bnxt_re0": roce("ens1np0", v2(3, "10.20.0.4")),
            "bnxt_re1": roce("ens2np0", v2(3, "10.20.1.4")),
            "bnxt_re2": roce("ens3np0", v2(3, "10.20.2.4"), up=False),
        },
        topo(["", ""], []),
    ),
    # A card that reaches its device through the processor's bridge.
    node(
        "ro-5",
        "10.2.0.5",
        {
            "eno1": nic("10.2.0.5/24"),
            "ens1np0": nic("10.20.0.5/24", speed=400000),
            "ens2np0": nic("10.20.1.5/24", speed=400000),
        },
        {
            "mlx5_0": roce("ens1np0", v2(3, "10.20.0.5")),
            "mlx5_1": roce("ens2np0", v2(3, "10.20.1.5")),
        },
        topo(["PHB SYS", "SYS PIX"], ["mlx5_0", "mlx5_1"]),
    ),
]
ROCE_EXPECTED = {
    "ro-1": {
        "NCCL_SOCKET_IFNAME": "=eno1",
        "GLOO_SOCKET_IFNAME": "eno1",
        "VLLM_HOST_IP": "10.2.0.1",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_NET_GDR_LEVEL": "PIX",
    },
    "ro-2": {
        "NCCL_SOCKET_IFNAME": "=enp1s0",
        "GLOO_SOCKET_IFNAME": "enp1s0",
        "VLLM_HOST_IP": "10.2.0.2",
        "NCCL_IB_HCA": "=rocep65s0:1,rocep66s0:1",
        "NCCL_NET_GDR_LEVEL": "PXB",
    },
    "ro-3": {
        "NCCL_SOCKET_IFNAME": "=eno1",
        "GLOO_SOCKET_IFNAME": "eno1",
        "VLLM_HOST_IP": "10.2.0.3",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_IB_GID_INDEX": "5",
        "NCCL_NET_GDR_LEVEL": "PIX",
    },
    "ro-4": {
        "NCCL_SOCKET_IFNAME": "=eno1",
        "GLOO_SOCKET_IFNAME": "eno1",
        "VLLM_HOST_IP": "10.2.0.4",
        "NCCL_IB_HCA": "=bnxt_re0:1,bnxt_re1:1",
    },
    "ro-5": {
        "NCCL_SOCKET_IFNAME": "=eno1",
        "GLOO_SOCKET_IFNAME": "eno1",
        "VLLM_HOST_IP": "10.2.0.5",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_NET_GDR_LEVEL": "PHB",
    },
}

ETHERNET = [
    # A fast network beside that of the inventory.
    node(
        "et-1",
        "10.3.0.1",
        {"eth0": nic("10.3.0.1/24"), "eth1": nic("10.30.0.1/24", speed=100000, mtu=9000)},
        text=topo(["", ""], [], "PHB"),
    ),
    # The fast one is a VLAN on a bond, whose name the bond's is a prefix of.
    node(
        "et-2",
        "10.3.0.2",
        {
            "bond0": nic("10.3.0.2/24", speed=100000),
            "bond0.30": nic("10.30.0.2/24", speed=100000, mtu=9000),
        },
    ),
    # Containers, and a cable that is out.
    node(
        "et-3",
        "10.3.0.3",
        {
            "enp1s0f0np0": nic("10.3.0.3/24"),
            "enp1s0f1np1": nic("10.30.0.3/24", speed=100000),
            "enp2s0": nic("10.30.0.33/24", speed=200000, up=False),
            "docker0": nic("172.17.0.1/16", speed=None),
            "cni0": nic("10.30.0.133/24", speed=None),
        },
    ),
    # Two addresses of which one is in the shared network, and IPv6.
    node(
        "et-4",
        "10.3.0.4",
        {
            "eno1": nic("10.3.0.4/24"),
            "eno2": nic("192.168.9.4/24", "10.30.0.4/24", "fd03::4/64", speed=100000),
        },
    ),
    # The only one with RoCE: it must not take it while the others cannot.
    node(
        "et-5",
        "10.3.0.5",
        {"ens1": nic("10.3.0.5/24"), "ens2": nic("10.30.0.5/24", speed=100000)},
        {"mlx5_0": roce("ens2", v2(3, "10.30.0.5"), gbit=100)},
        topo(["NODE", "SYS"], ["mlx5_0"]),
    ),
]
ETHERNET_EXPECTED = {
    "et-1": {
        "NCCL_SOCKET_IFNAME": "=eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "VLLM_HOST_IP": "10.30.0.1",
        "NCCL_IB_DISABLE": "1",
    },
    "et-2": {
        "NCCL_SOCKET_IFNAME": "=bond0.30",
        "GLOO_SOCKET_IFNAME": "bond0.30",
        "VLLM_HOST_IP": "10.30.0.2",
        "NCCL_IB_DISABLE": "1",
    },
    "et-3": {
        "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "VLLM_HOST_IP": "10.30.0.3",
        "NCCL_IB_DISABLE": "1",
    },
    "et-4": {
        "NCCL_SOCKET_IFNAME": "=eno2",
        "GLOO_SOCKET_IFNAME": "eno2",
        "VLLM_HOST_IP": "10.30.0.4",
        "NCCL_IB_DISABLE": "1",
    },
    "et-5": {
        "NCCL_SOCKET_IFNAME": "=ens2",
        "GLOO_SOCKET_IFNAME": "ens2",
        "VLLM_HOST_IP": "10.30.0.5",
        "NCCL_IB_DISABLE": "1",
    },
}


def found(nodes: list[Node]) -> dict[str, dict[str, str]]:
    """The environment of each host; none of them is refused."""
    choices, complaints = environments(nodes)
    assert complaints == []
    return {name: choice.environment for name, choice in choices.items()}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param(INFINIBAND, INFINIBAND_EXPECTED, id="infiniband"),
        pytest.param(ROCE, ROCE_EXPECTED, id="roce"),
        pytest.param(ETHERNET, ETHERNET_EXPECTED, id="ethernet"),
    ],
)
def test_the_environment_of_every_host(
    nodes: list[Node], expected: dict[str, dict[str, str]]
) -> None:
    assert found(nodes) == expected


def test_one_host_without_rdma_takes_all_of_them_to_sockets() -> None:
    joined = [
        *INFINIBAND[:2],
        node("late", "10.1.0.9", {"eno1": nic("10.1.0.9/24"), "eno4": nic("10.1.0.99/24")}),
    ]
    assert {e["NCCL_IB_DISABLE"] for e in found(joined).values()} == {"1"}
    assert not any("NCCL_IB_HCA" in e for e in found(joined).values())


def test_infiniband_and_roce_have_no_rdma_in_common() -> None:
    nodes = [
        INFINIBAND[0],
        node(
            "other",
            "10.1.0.8",
            {"eno1": nic("10.1.0.8/24")},
            {"mlx5_0": roce("eno1", v2(3, "10.1.0.8"))},
        ),
    ]
    assert {e.get("NCCL_IB_DISABLE") for e in found(nodes).values()} == {"1"}


def test_every_host_is_counted() -> None:
    assert len(INFINIBAND) + len(ROCE) + len(ETHERNET) == 16
