"""What is refused before anything is written, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.fabric.listings import ib, nic, node, roce, topo, v1, v2
from tests.unit.fleets import state
from vllm_fleet.fabric.environment import Node, environments, matching
from vllm_fleet.fabric.nodes import Clock, Versions, clocks_apart, differences, versions_of


def pair(**second: Any) -> list[Node]:
    """Two hosts of Ethernet; the second one with settings."""
    return [
        node("gpu-1", "10.0.0.1", {"eno1": nic("10.0.0.1/24")}),
        node(
            "gpu-2",
            "10.0.0.2",
            {
                "eno1": nic("10.0.0.2/24"),
                "eno10": nic("10.5.0.2/24"),
                "eno3": nic(up=False),
                "docker0": nic("172.17.0.1/16"),
            },
            **second,
        ),
    ]


def refused(nodes: list[Node]) -> str:
    """The complaints about hosts that are refused."""
    choices, complaints = environments(nodes)
    assert choices == {}
    assert complaints
    return "\n".join(complaints)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("eth0", "eth0 does not exist there; it has eno1, eno10"),
        ("eno3", "eno3 has no link"),
        ("docker0", "docker0 is for containers of this host"),
    ],
)
def test_an_interface_that_cannot_carry_it(name: str, why: str) -> None:
    assert refused(pair(interface=name)) == f"gpu-2: nccl.interface: {why}" + (
        "" if "it has" in why else "; it has eno1, eno10"
    )


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "no interface is called so; it has"),
        ({"NCCL_SOCKET_IFNAME": "eno1"}, "eno1 is a prefix of eno1 and eno10; one alone is =eno1"),
        ({"GLOO_SOCKET_IFNAME": "eno"}, "gloo takes one exact name, and no interface has it"),
        ({"GLOO_SOCKET_IFNAME": "eno3"}, "has no link"),
        ({"VLLM_HOST_IP": "10.0.0.1"}, "no address of this host; it has 10.0.0.2, 10.5.0.2"),
        ({"NCCL_IB_HCA": "=mlx5_0"}, "no RDMA device is called so; it has none"),
        ({"NCCL_NET_GDR_LEVEL": "NEAR"}, "must be one of LOC, PIX, PXB, PHB, SYS"),
        ({"NCCL_DEBUG": "INFO"}, "NCCL_DEBUG is for debugging (it writes a log for a search)"),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE is for debugging"),
        ({"NCCL_ALGO": "Ring"}, "NCCL_ALGO is for debugging"),
        ({"OMP_NUM_THREADS": "1"}, "does not belong to the fabric; put it into `env`"),
        ({"NCCL_IB_TC": 'a"b'}, "quotes, `$` and backslashes are not passed on"),
        ({"NCCL_IB_TC": "$HOME"}, "quotes, `$` and backslashes are not passed on"),
    ],
)
def test_an_operators_value_is_checked_against_the_host(env: dict[str, str], told: str) -> None:
    assert told in refused(pair(env=env))
    assert refused(pair(env=env)).startswith("gpu-2: nccl.env: ")


def test_an_operators_values_win() -> None:
    env = {"NCCL_SOCKET_IFNAME": "=eno1", "NCCL_IB_DISABLE": "0", "NCCL_IB_TC": "106"}
    found = environments(pair(env=env))[0]["gpu-2"].environment
    assert found == {**env, "GLOO_SOCKET_IFNAME": "eno1", "VLLM_HOST_IP": "10.0.0.2"}


def test_prefixes_of_devices() -> None:
    devices = {f"mlx5_{i}": ib() for i in (1, 10, 11)}
    nodes = [
        node(
            f"gpu-{i}",
            f"10.0.0.{i}",
            {"eno1": nic(f"10.0.0.{i}/24")},
            devices,
            env={"NCCL_IB_HCA": "mlx5_1"},
        )
        for i in (1, 2)
    ]
    assert "mlx5_1 is a prefix of mlx5_1 and mlx5_10 and mlx5_11; one alone is =mlx5_1" in refused(
        nodes
    )


def test_a_list_as_nccl_reads_it() -> None:
    names = frozenset({"mlx5_1", "mlx5_10", "mlx5_2"})
    assert matching("=mlx5_1:1,mlx5_2:1", names) == {
        "mlx5_1:1": ["mlx5_1"],
        "mlx5_2:1": ["mlx5_2"],
    }
    assert matching("^mlx5_1", names) == {"mlx5_1": ["mlx5_1", "mlx5_10"]}


def test_two_values_for_one_interface() -> None:
    told = refused(pair(interface="eno10", env={"NCCL_SOCKET_IFNAME": "=eno1"}))
    assert "nccl.interface is eno10 and nccl.env NCCL_SOCKET_IFNAME is =eno1" in told


def test_hosts_in_two_networks_are_refused_unless_every_interface_is_named() -> None:
    def nodes(**settings: Any) -> list[Node]:
        return [
            node(f"gpu-{i}", f"10.0.{i}.1", {"eno1": nic(f"10.0.{i}.1/24")}, **settings)
            for i in (1, 2)
        ]

    assert refused(nodes()) == (
        "the hosts have no network in common (gpu-1 has eno1 10.0.1.1/24; gpu-2 has eno1 "
        "10.0.2.1/24): give them one, or name the interface of each host in nccl.interface where "
        "routers join them"
    )
    choices, complaints = environments(nodes(interface="eno1"))
    assert complaints == []
    assert [c.address for c in choices.values()] == ["10.0.1.1", "10.0.2.1"]


def rdma(*ports: dict[str, Any], **settings: Any) -> list[Node]:
    """Hosts with one RDMA port each."""
    return [
        node(
            f"gpu-{i}",
            f"10.0.0.{i}",
            {"eno1": nic(f"10.0.0.{i}/24")},
            {"mlx5_0": port} if port else None,
            **settings,
        )
        for i, port in enumerate(ports, 1)
    ]


def test_rdma_that_is_required_and_missing() -> None:
    told = refused(rdma(ib(), {}, rdma="required"))
    assert "gpu-2: nccl.rdma is required, and it has no RDMA device" in told
    told = refused(rdma(ib(), ib(up=False), rdma="required"))
    assert "gpu-2: nccl.rdma is required, and it has mlx5_0 without a usable link" in told


def test_rdma_that_is_required_and_of_two_kinds() -> None:
    told = refused(rdma(ib(), roce("eno1", v2(3, "10.0.0.2")), rdma="required"))
    assert told == (
        "nccl.rdma is required, and hosts have none in common: gpu-1 InfiniBand, gpu-2 RoCE"
    )


def test_roce_without_version_two_is_none() -> None:
    old = roce("eno1", v1(2, "10.0.0.2"))
    told = refused(rdma(roce("eno1", v2(3, "10.0.0.1")), old, rdma="required"))
    assert "gpu-2: nccl.rdma is required, and it has mlx5_0 without a usable link" in told


def test_rdma_that_is_off_stays_off() -> None:
    choices, _ = environments(rdma(ib(), ib(), rdma="off"))
    assert {c.environment["NCCL_IB_DISABLE"] for c in choices.values()} == {"1"}
    assert choices["gpu-1"].reasons["NCCL_IB_DISABLE"] == "nccl.rdma is off"


def test_gloo_knows_no_rdma() -> None:
    choices, _ = environments(rdma(ib(), ib(), cuda=False))
    assert choices["gpu-1"].layer is None
    assert "only cards use it" in refused(rdma(ib(), ib(), cuda=False, rdma="required"))


def test_gids_of_ipv6_alone() -> None:
    ports = [roce("eno1", (3, "RoCE v2", f"fd00::{i}")) for i in (1, 2)]
    choices, complaints = environments(rdma(*ports))
    assert complaints == []
    assert {c.environment["NCCL_IB_ADDR_FAMILY"] for c in choices.values()} == {"AF_INET6"}


def test_a_gid_index_that_a_device_lacks() -> None:
    ports = [roce("eno1", v2(3, f"10.0.0.{i}")) for i in (1, 2)]
    told = refused(rdma(*ports, env={"NCCL_IB_GID_INDEX": "5"}))
    assert "NCCL_IB_GID_INDEX=5: mlx5_0:1 has no such GID; it has 0 link-local" in told


def test_bytes_of_a_matrix_that_is_no_matrix_say_nothing() -> None:
    nodes = [
        node(f"gpu-{i}", f"10.0.0.{i}", {"eno1": nic(f"10.0.0.{i}/24")}, {"mlx5_0": ib()}, text)
        for i, text in ((1, "Failed to run topology matrix"), (2, topo(["PIX"], ["mlx5_0"])))
    ]
    found = environments(nodes)[0]
    assert "NCCL_NET_GDR_LEVEL" not in found["gpu-1"].environment
    assert found["gpu-2"].environment["NCCL_NET_GDR_LEVEL"] == "PIX"


# --- versions and clocks


def test_versions_that_differ_are_told_with_who_has_them() -> None:
    alike = Versions("r1", {"torch": "2.11.0", "nccl": "2.28.9", "vllm": "0.21.0"}, "580.95.05")
    other = Versions("r1", {"torch": "2.11.0", "nccl": "2.27.5", "vllm": "0.21.0"}, "580.95.05")
    assert differences({"gpu-1": alike, "gpu-2": alike}) == []
    assert differences({"gpu-1": alike, "gpu-2": other, "gpu-3": alike}) == [
        "nccl differs between the nodes of one model: 2.28.9 on gpu-1, gpu-3; 2.27.5 on gpu-2: "
        "have one `vllm_version` and one lock for all of them, then deploy.py"
    ]
    driver = Versions("r1", alike.libraries, "570.86.15")
    assert "570.86.15 on gpu-2: install one driver on all of them" in "".join(
        differences({"gpu-1": alike, "gpu-2": driver})
    )


def test_versions_as_the_fact_has_them() -> None:
    looked_at = state(libraries={"r1": {"torch": "2.11.0", "nccl": "2.28.9"}})
    found = versions_of(looked_at, "r1")
    assert found.all() == {
        "release": "r1",
        "torch": "2.11.0",
        "nccl": "2.28.9",
        "driver": "580.95.05",
    }


def test_the_clock_that_stands_alone_is_named() -> None:
    seen = [
        Clock(a, b, {"gpu-1": 0.0, "gpu-2": 90.0, "gpu-3": 0.1}[b] - {"gpu-2": 90.0}.get(a, 0), 0.1)
        for a in ("gpu-1", "gpu-2", "gpu-3")
        for b in ("gpu-1", "gpu-2", "gpu-3")
        if a != b
    ]
    told = clocks_apart(seen)
    assert len(told) == 1
    assert told[0].startswith("gpu-2: its clock is 9")
    assert "ahead of gpu-1, gpu-3" in told[0]
    assert clocks_apart([Clock("gpu-1", "gpu-2", 4.0, 0.1)]) == []
    assert clocks_apart([Clock("gpu-1", "gpu-2", 90.0, 100.0)]) == []
