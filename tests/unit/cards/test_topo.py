"""Matrices of links in every shape, in texts of our own."""

from __future__ import annotations

import pytest

from tests.unit.cards.made import gpus, matrix, uniform
from vllm_fleet.cards import CardsError, parse_p2p, parse_topo
from vllm_fleet.topo import numa_nodes

SPACES = """\
        GPU0    GPU1    NIC0    mlx5_1  CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV12    PXB     SYS     48-63,176-191   3               N/A
GPU1    NV12     X      PXB     SYS     48-63,176-191   3               N/A
NIC0    PXB     PXB      X      SYS
"""


def test_tabs_and_terminal_codes() -> None:
    topology = parse_topo(matrix(uniform(4, "NV4"), ["0", "0", "1", "1"], nics=2))
    assert topology.cards == (0, 1, 2, 3)
    assert topology.link(3, 0) == "NV4"
    assert topology.nics == ("NIC0", "NIC1")
    assert topology.numa[2] == {1}
    assert topology.cpus[0] == "0-31"
    assert topology.warnings == ()


def test_spaces_and_old_names_of_network_cards() -> None:
    topology = parse_topo(SPACES)
    assert topology.link(0, 1) == "NV12"
    assert topology.nics == ("NIC0", "mlx5_1")
    assert (topology.cpus[1], topology.numa[1]) == ("48-63,176-191", {3})


def test_header_without_its_tab() -> None:
    text = (
        "GPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tNV2\tSYS\t0-15\nGPU1\tNV2\t X \tSYS\t0-15\n"
    )
    topology = parse_topo(text)
    assert topology.links == {(0, 1): "NV2"}
    assert topology.numa == {}


def test_glued_columns() -> None:
    text = (
        "GPU0    GPU1    GPU2    NIC0NIC1    CPU Affinity    NUMA Affinity\n"
        "GPU0     X      NV18    NV18    SYSSYS      0-47,96-143     0\n"
        "GPU1    NV18     X      NV18    SYSSYS      0-47,96-143     0\n"
        "GPU2    NV18NV18     X    SYSSYS      0-47,96-143     0\n"
    )
    topology = parse_topo(text)
    assert set(topology.links.values()) == {"NV18"}
    assert len(topology.links) == 3
    assert topology.nics == ("NIC0", "NIC1")
    assert topology.warnings == ()


def test_blank_affinity() -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n" + "".join(
        f"GPU{i}\t{a}\t{b}\t\t{i}\t\tN/A\n" for i, a, b in ((0, " X ", "PHB"), (1, "PHB", " X "))
    )
    topology = parse_topo(text)
    assert topology.cpus == {}
    assert topology.numa == {0: {0}, 1: {1}}


def test_a_missing_header_is_said() -> None:
    whole = matrix(uniform(4, "NV18"), ansi=False)
    topology = parse_topo(whole.split("\n", 1)[1])
    assert topology.cards == (0, 1, 2, 3)
    assert "no header line" in topology.warnings[0]


def test_missing_rows_are_filled_from_the_others_and_said() -> None:
    lines = matrix(uniform(4, "NV18")).splitlines()
    without_last = parse_topo("\n".join(lines[:4]))
    assert without_last.unknown() == ()
    assert "GPU3" in without_last.warnings[0]
    only_first = parse_topo("\n".join(lines[:2]))
    assert only_first.unknown() == ((1, 2), (1, 3), (2, 3))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("something\n", "no matrix of links"),
        (gpus(2), "no matrix of links"),
        (" \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n", "peer-to-peer"),
        ("The -i command line argument must be used in conjunction with -n or -p.\n", "without it"),
        (matrix(uniform(2, "NV4")) + matrix(uniform(2, "PHB")), "two rows GPU0"),
        (matrix([["X", "NV4"], ["PHB", "X"]]), "in one row and"),
        (matrix(uniform(3, "NV4")).replace("\tGPU1", "", 1), "no such column"),
        ("======== ROCm System Management Interface ========\n", "names no card"),
    ],
)
def test_what_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(CardsError) as refused:
        parse_topo(text)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rocm_hives() -> None:
    rows = [
        "GPU{}   {}".format(
            r,
            "  ".join("0" if r == c else "XGMI" if r // 2 == c // 2 else "PCIE" for c in range(4)),
        )
        for r in range(4)
    ]
    text = (
        "===== ROCm System Management Interface =====\n"
        "===== Link Type between two GPUs =====\n"
        "       GPU0  GPU1  GPU2  GPU3\n" + "\n".join(rows) + "\n\n===== Numa Nodes =====\n"
        "GPU[0]\t\t: (Topology) Numa Node: 0\nGPU 1          : (Topology) Numa Node: 0\n"
    )  # fmt: skip
    topology = parse_topo(text)
    assert topology.vendor == "amd"
    assert topology.link(0, 1) == "XGMI"
    assert topology.link(1, 2) == "PCIE"
    assert topology.numa == {0: {0}, 1: {0}}


def test_p2p_takes_the_worse_direction_and_refuses_other_matrices() -> None:
    text = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tGNS\n GPU1\tNS\tX\tOK\n GPU2\tGNS\tOK\tX\n"
    assert parse_p2p(text) == {(0, 1): "NS", (0, 2): "GNS", (1, 2): "OK"}
    with pytest.raises(CardsError, match="no peer-to-peer matrix"):
        parse_p2p(matrix(uniform(2, "SYS")))
    with pytest.raises(CardsError, match="no peer-to-peer matrix"):
        parse_p2p("")


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("1,19-21", {1, 19, 20, 21}), ("N/A", None), ("", None)],
)
def test_numa_lists(text: str, nodes: set[int] | None) -> None:
    assert numa_nodes(text) == (None if nodes is None else frozenset(nodes))
