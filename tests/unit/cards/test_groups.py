"""Groups made of cards and links, and cards chosen from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.cards.made import gpus, matrix, uniform, with_lost
from vllm_fleet.cards import (
    Card,
    CardsError,
    Groups,
    Process,
    groups,
    parse_gpus,
    parse_p2p,
    parse_topo,
    resolve,
)

QUADS = [["NODE" if a // 4 == b // 4 else "SYS" for b in range(8)] for a in range(8)]
PAIRS = [
    ["PIX" if a // 2 == b // 2 else "NODE" if a // 4 == b // 4 else "SYS" for b in range(8)]
    for a in range(8)
]
NODES = ["0", "0", "0", "0", "1", "1", "1", "1"]


def made(links: list[list[str]], csv: str | None = None, numa: list[str] | None = None) -> Groups:
    listing = parse_gpus(csv or gpus(len(links)))
    return groups(listing.cards, parse_topo(matrix(links, numa)))


def shape(found: Groups) -> list[tuple[tuple[int, ...], str]]:
    return [(g.gpus, g.link) for g in found.groups]


def test_nvswitch_island_is_one_group() -> None:
    (group,) = made(uniform(8, "NV18")).groups
    assert group.gpus == tuple(range(8))
    assert (group.name, group.memory_mib, group.link) == ("NVIDIA A100-SXM4-80GB", 81920, "NV18")


def test_best_links_come_first() -> None:
    assert shape(made(PAIRS, numa=NODES)) == [
        ((0, 1), "PIX"),
        ((2, 3), "PIX"),
        ((4, 5), "PIX"),
        ((6, 7), "PIX"),
    ]
    assert shape(made(QUADS, numa=NODES)) == [((0, 1, 2, 3), "NODE"), ((4, 5, 6, 7), "NODE")]


def test_sys_is_bound_only_within_a_numa_node() -> None:
    assert shape(made(uniform(8, "SYS"), numa=NODES)) == [
        ((0, 1, 2, 3), "SYS"),
        ((4, 5, 6, 7), "SYS"),
    ]
    unknown = made(uniform(2, "SYS"), numa=["N/A", "N/A"])
    assert shape(unknown) == [((0,), "single"), ((1,), "single")]


@pytest.mark.parametrize(
    ("count", "sizes"), [(3, [2, 1]), (6, [4, 2]), (7, [4, 2, 1]), (5, [4, 1])]
)
def test_sizes_are_powers_of_two(count: int, sizes: list[int]) -> None:
    assert [len(g.gpus) for g in made(uniform(count, "NV12")).groups] == sizes


def test_a_size_that_is_told_holds() -> None:
    listing = parse_gpus(gpus(8))
    found = groups(listing.cards, parse_topo(matrix(uniform(8, "NV18"))), size=3)
    assert [g.gpus for g in found.groups] == [(0, 1, 2), (3, 4, 5)]
    assert any("GPU6, GPU7 make no group of 3" in w for w in found.warnings)


@pytest.mark.parametrize("lost", [0, 3, 7])
@pytest.mark.parametrize("word", ["SYS", "NODE", "PHB"])
def test_a_card_without_its_nvlinks_is_left_out_and_said(lost: int, word: str) -> None:
    found = made(with_lost(8, "NV18", lost, word), numa=NODES)
    assert [o.gpu for o in found.left_out] == [lost]
    assert sorted(i for g in found.groups for i in g.gpus) == [i for i in range(8) if i != lost]
    assert any(f"GPU{lost} is left out" in w and "NVLink is broken" in w for w in found.warnings)


def test_a_bridged_pair_beside_a_single_card_is_no_fault() -> None:
    links = [["X", "NV4", "NODE"], ["NV4", "X", "NODE"], ["NODE", "NODE", "X"]]
    found = made(links)
    assert shape(found) == [((0, 1), "NV4"), ((2,), "single")]
    assert found.left_out == ()


def test_a_card_with_fewer_nvlinks_is_kept_and_said() -> None:
    found = made(with_lost(4, "NV18", 2, "NV16"))
    assert shape(found) == [((0, 1, 2, 3), "NV16")]
    assert any("GPU2 has lost NVLinks" in w for w in found.warnings)


def test_cards_of_two_kinds_are_never_together() -> None:
    csv = gpus(2) + "\n".join(gpus(2, "NVIDIA L40S", 46068, start=2).splitlines()[1:])
    found = made(uniform(4, "PIX"), csv)
    assert [(g.gpus, g.name) for g in found.groups] == [
        ((0, 1), "NVIDIA A100-SXM4-80GB"),
        ((2, 3), "NVIDIA L40S"),
    ]
    forty = gpus(2) + "\n".join(gpus(2, memory=40960, start=2).splitlines()[1:])
    assert [g.gpus for g in made(uniform(4, "NV12"), forty).groups] == [(0, 1), (2, 3)]


def test_makers_are_never_together() -> None:
    cards = [Card(0, "X", "nvidia", 81920), Card(1, "X", "amd", 81920)]
    found = groups(cards, parse_topo(matrix(uniform(2, "PIX"))))
    assert sorted((g.gpus, g.vendor) for g in found.groups) == [((0,), "nvidia"), ((1,), "amd")]
    assert any("not been run on hardware" in w for w in found.warnings)


def test_cards_of_one_of_two_makers_are_chosen_by_name() -> None:
    cards = [
        *(Card(i, "NVIDIA L40S", "nvidia", 46068) for i in range(2)),
        *(Card(i, "AMD Instinct MI210", "amd", 65520) for i in range(2)),
    ]
    found = groups(cards, parse_topo(matrix(uniform(2, "PIX"))))
    assert resolve("2 x L40S", found).vendor == "nvidia"
    assert resolve("1 x MI210", found, taken={0}).gpus == (1,)
    assert resolve("1 x MI210", found, taken={0}).vendor == "amd"


def test_busy_cards_are_left_out_unless_they_are_ours() -> None:
    listing = parse_gpus(gpus(4, used={1: 40000}))
    topology = parse_topo(matrix(uniform(4, "NV12")))
    found = groups(listing.cards, topology)
    assert [o.gpu for o in found.left_out] == [1]
    assert "in use: 40000 MiB held by another process" in found.left_out[0].why
    assert [g.gpus for g in groups(listing.cards, topology, own={1}).groups] == [(0, 1, 2, 3)]


def test_a_desktop_does_not_make_a_card_busy_and_a_process_of_unknown_size_does() -> None:
    (card,) = parse_gpus(gpus(1, "NVIDIA L4", 23034, used={0: 600})).cards
    assert groups([card], None).left_out == ()
    held = replace(card, processes=(Process(9, "trainer", None, "0"),))
    assert "trainer (pid 9)" in groups([held], None).left_out[0].why


def test_mig_and_faulty_cards_are_left_out() -> None:
    cards = list(parse_gpus(gpus(4)).cards)
    cards[0] = replace(cards[0], mig=True, slices=("1g.10gb",))
    cards[2] = replace(cards[2], faults=("3 uncorrected memory errors",))
    found = groups(cards, parse_topo(matrix(uniform(4, "NV12"))))
    assert shape(found) == [((1, 3), "NV12")]
    assert [o.gpu for o in found.left_out] == [0, 2]
    assert "-mig 0" in found.left_out[0].why


def test_lists_that_do_not_belong_together() -> None:
    topology = parse_topo(matrix(uniform(4, "NV12")))
    more = groups(parse_gpus(gpus(6)).cards, topology)
    assert [o.gpu for o in more.left_out] == [4, 5]
    fewer = groups(parse_gpus(gpus(2)).cards, topology)
    assert shape(fewer) == [((0, 1), "NV12")]
    assert any("GPU2, GPU3 stand in the matrix" in w for w in fewer.warnings)


def test_without_links_every_card_is_alone() -> None:
    found = groups(parse_gpus(gpus(2)).cards, None)
    assert shape(found) == [((0,), "single"), ((1,), "single")]
    assert any("no matrix of links" in w for w in found.warnings)


def test_peers_that_cannot_reach_each_other_are_said() -> None:
    pairs = parse_p2p(" \tGPU0\tGPU1\t\n GPU0\tX\tCNS\t\n GPU1\tOK\tX\t\n")
    assert pairs == {(0, 1): "CNS"}
    listing = parse_gpus(gpus(2))
    found = groups(listing.cards, parse_topo(matrix(uniform(2, "PHB"))), p2p=pairs)
    assert any("cannot reach each other directly (CNS)" in w for w in found.warnings)


def test_pcie_width_and_not_idle_generation() -> None:
    card = Card(0, "X", memory_mib=81920, pcie=(1, 4, 16, 16))
    assert groups([card], None).warnings == ()
    narrow = replace(card, pcie=(4, 4, 8, 16))
    assert "8 of 16 PCIe lanes" in groups([narrow], None).warnings[0]


# -- choosing


def test_resolve_takes_a_whole_free_group_first() -> None:
    found = made(QUADS, numa=NODES)
    assert resolve("4 x A100-SXM4-80GB", found).gpus == (0, 1, 2, 3)
    assert resolve("4 x A100-SXM4-80GB", found, taken={1}).gpus == (4, 5, 6, 7)


def test_resolve_takes_part_of_a_group_on_its_best_links() -> None:
    found = made(QUADS, numa=NODES)
    # What is broken into already is used up before a whole group is touched.
    assert resolve("2 x A100", found, taken={0}).gpus == (1, 2)
    assert resolve("1 x A100", found, taken={5, 6}).gpus == (4,)
    mesh = made(uniform(8, "NV18"))
    assert resolve("3 x NVIDIA A100-SXM4-80GB", mesh, taken={0}).gpus == (1, 2, 3)


def test_resolve_joins_groups_by_their_best_links() -> None:
    found = made(PAIRS, numa=NODES)
    group = resolve("4 x A100", found)
    assert (group.gpus, group.link) == ((0, 1, 2, 3), "NODE")
    across = resolve("4 x A100", found, taken={0, 4})
    assert across.link == "SYS"


@pytest.mark.parametrize(
    ("wanted", "taken", "sentence"),
    [
        ("four A100", (), "COUNT x KIND"),
        ("0 x A100", (), "COUNT x KIND"),
        ("2 x H100", (), "no card here is a H100; this host has: A100-SXM4-80GB"),
        ("16 x A100", (), "8 usable, 0 of them taken"),
        ("8 x A100", (3,), "8 usable, 1 of them taken"),
    ],
)
def test_resolve_says_why_not(wanted: str, taken: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(CardsError) as refused:
        resolve(wanted, made(uniform(8, "NV18")), taken)
    assert sentence in str(refused.value)


def test_resolve_names_the_cards_left_out() -> None:
    found = made(with_lost(8, "NV18", 3, "SYS"))
    with pytest.raises(CardsError, match=r"left out: GPU3, its NVLink is broken"):
        resolve("8 x A100", found)


def test_resolve_asks_when_a_kind_could_be_two() -> None:
    csv = gpus(1) + gpus(1, "NVIDIA A100-PCIE-40GB", 40960, start=1).splitlines()[1]
    found = made(uniform(2, "PIX"), csv)
    with pytest.raises(CardsError, match="write the whole name"):
        resolve("1 x A100", found)
    assert resolve("1 x A100-PCIE-40GB", found).gpus == (1,)


def test_resolve_prefers_the_exact_name() -> None:
    csv = (
        gpus(1, "NVIDIA GeForce RTX 4080", 16376)
        + gpus(1, "NVIDIA GeForce RTX 4080 SUPER", 16376, start=1).splitlines()[1]
    )
    found = made(uniform(2, "PHB"), csv)
    assert resolve("1 x RTX 4080", found).gpus == (0,)
    assert resolve("1 x rtx 4080 super", found).gpus == (1,)
