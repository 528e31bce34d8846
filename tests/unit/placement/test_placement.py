"""The placement file: written once, kept to, and never followed blindly."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.unit.cards.made import gpus, matrix, uniform
from tests.unit.fleets import ALL, fleet
from vllm_fleet.cards import Groups, groups, parse_gpus, parse_topo
from vllm_fleet.placement import (
    Decided,
    Placed,
    Placement,
    decide,
    path_of,
    read_placement,
    stale,
    text_of,
    write_placement,
)
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.model import HostSpec

PATH = "placement/prod.yml"
UUIDS = {i: f"GPU-0000000{i}" for i in range(8)}


def host(root: Path, glm: str, qwen: str = "[7]") -> HostSpec:
    text = ALL.replace("cards: [0, 1]", f"cards: {glm}").replace("cards: [2]", f"cards: {qwen}")
    return fleet(root, all=text).host("gpu-1")


def island(count: int = 8) -> Groups:
    """A100s, four by four on NVLink."""
    links = [["NV12" if a // 4 == b // 4 else "SYS" for b in range(count)] for a in range(count)]
    return groups(parse_gpus(gpus(count)).cards, parse_topo(matrix(links)))


def decided(spec: HostSpec, *lines: tuple[str, Placed], found: Groups | None = None) -> Decided:
    written = {(spec.name, name): placed for name, placed in lines}
    return decide(spec, Placement(PATH, written), found or island(), UUIDS)


def test_a_whole_group_is_chosen_and_taken_cards_are_respected(tmp_path: Path) -> None:
    found = decided(host(tmp_path, "4 x A100", "[1]"))
    assert found.lines["glm-a"].cards == (4, 5, 6, 7)
    assert found.lines["glm-a"].uuids == tuple(UUIDS[i] for i in (4, 5, 6, 7))
    assert found.new == {"glm-a"}
    assert not found.reasons


def test_what_is_written_stays_though_other_cards_would_be_chosen_today(tmp_path: Path) -> None:
    line = Placed("4 x A100", (2, 3, 4, 5), tuple(UUIDS[i] for i in (2, 3, 4, 5)))
    found = decided(host(tmp_path, "4 x  a100"), ("glm-a", line))
    assert found == Decided({"glm-a": line})


def test_a_host_without_facts_keeps_what_is_written_and_chooses_nothing(tmp_path: Path) -> None:
    spec = host(tmp_path, "4 x A100", "2 x A100")
    line = Placed("2 x A100", (0, 1))
    placement = Placement(PATH, {(spec.name, "qwen-a"): line})
    assert decide(spec, placement, None, {}) == Decided({"qwen-a": line})


def test_a_second_instance_gets_other_cards_than_the_written_ones(tmp_path: Path) -> None:
    line = Placed("4 x A100", (0, 1, 2, 3), tuple(UUIDS[i] for i in range(4)))
    found = decided(host(tmp_path, "4 x A100", "2 x A100"), ("glm-a", line))
    assert found.lines["qwen-a"].cards == (4, 5)
    assert found.new == {"qwen-a"}


def test_a_changed_wish_is_decided_anew_among_its_present_cards_first(tmp_path: Path) -> None:
    line = Placed("4 x A100", (4, 5, 6, 7), tuple(UUIDS[i] for i in (4, 5, 6, 7)))
    found = decided(host(tmp_path, "2 x A100", "[0]"), ("glm-a", line))
    assert found.lines["glm-a"].cards == (4, 5)
    assert "changed from '4 x A100' to '2 x A100'" in found.notices[0]
    assert "cards 4, 5, 6, 7 become 4, 5" in found.notices[0]


@pytest.mark.parametrize(
    ("glm", "qwen", "words"),
    [
        ("4 x H100", "[7]", ("glm-a", "'4 x H100'", "no card here is a H100", "A100")),
        ("16 x A100", "[7]", ("glm-a", "16 free cards", "8 usable, 1 of them taken")),
        ("8 x A100", "1 x A100", ("qwen-a", "8 usable, 8 of them taken")),
    ],
)
def test_what_cannot_be_resolved_says_why(
    tmp_path: Path, glm: str, qwen: str, words: tuple[str, ...]
) -> None:
    (reason,) = decided(host(tmp_path, glm, qwen)).reasons
    assert reason.startswith("gpu-1: instance ")
    for word in words:
        assert word in reason


def test_cards_that_are_left_out_are_said(tmp_path: Path) -> None:
    listing = parse_gpus(gpus(4, used={1: 60000})).cards
    found = groups(listing, parse_topo(matrix(uniform(4, "NV12"))))
    (reason,) = decided(host(tmp_path, "4 x A100"), found=found).reasons
    assert "left out: GPU1, it is in use: 60000 MiB" in reason


def test_a_card_that_is_written_for_one_and_named_by_another_is_refused(tmp_path: Path) -> None:
    line = Placed("1 x A100", (7,), (UUIDS[7],))
    (reason,) = decided(host(tmp_path, "1 x A100", "[7]"), ("glm-a", line)).reasons
    assert reason.startswith(f"{PATH}: gpu-1: glm-a: card 7 is taken by instance qwen-a")


def test_a_replaced_card_is_refused_with_what_to_do(tmp_path: Path) -> None:
    line = Placed("1 x A100", (3,), ("GPU-gone",))
    (reason,) = decided(host(tmp_path, "1 x A100"), ("glm-a", line)).reasons
    assert "card 3 (GPU-gone), which is gone; 3 is now GPU-00000003" in reason
    assert f"delete the line of glm-a in {PATH}" in reason


def test_lines_that_nobody_uses_are_named(tmp_path: Path) -> None:
    spec = host(tmp_path, "1 x A100")
    lines = {
        ("gpu-1", "glm-a"): Placed("1 x A100", (3,)),
        ("gpu-1", "qwen-a"): Placed("1 x A100", (4,)),  # names its cards itself by now
        ("gone", "old"): Placed("2 x A100", (0, 1)),
    }
    assert [
        line.partition(": no instance")[0] for line in stale(Placement(PATH, lines), [spec])
    ] == [
        f"{PATH}: gone: old",
        f"{PATH}: gpu-1: qwen-a",
    ]


LINES = {
    ("@ssh/gpu-1", "air-a"): Placed("4 x A100-SXM4-80GB", (0, 1, 2, 3), ("GPU-a", "", "", "")),
    ("gpu-2", "no"): Placed("1 x L4: big", (7,), ()),
    ("gpu-2", "1.5"): Placed("1 x L4", (6,), ()),
}


def test_the_file_reads_back_and_does_not_depend_on_order(tmp_path: Path) -> None:
    write_placement(tmp_path, PATH, LINES)
    assert read_placement(tmp_path, "inventory/prod.py") == Placement(PATH, LINES)
    text = (tmp_path / PATH).read_text()
    assert text == text_of(dict(reversed(LINES.items())))
    assert text.startswith("# ")
    assert len(text.splitlines()) == 2 + 2 + 3
    assert yaml.safe_load(text)["gpu-2"]["no"]["cards"] == [7]
    assert [p.name for p in (tmp_path / "placement").iterdir()] == ["prod.yml"]
    assert (tmp_path / PATH).stat().st_mode & 0o777 == 0o644


def test_an_absent_file_is_an_empty_one(tmp_path: Path) -> None:
    assert read_placement(tmp_path, "x/lab.py") == Placement("placement/lab.yml")
    assert path_of("inventory/prod.py") == PATH


@pytest.mark.parametrize(
    "text",
    [
        "gpu-1: {air-a: [0, 1]}",
        "gpu-1: [air-a]",
        "- gpu-1",
        "gpu-1: {air-a: {asked: 1 x L4, cards: [-1]}}",
        "gpu-1: {air-a: {asked: 1 x L4, cards: [true]}}",
        "gpu-1: {air-a: {asked: 1 x L4, cards: []}}",
        "gpu-1: {air-a: {cards: [1]}}",
        "gpu-1: {air-a: {asked: 1 x L4, cards: [1], uuids: GPU-1}}",
        "gpu-1: {",
        "\x00",
    ],
)
def test_a_damaged_file_is_refused_since_guessing_would_move_cards(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "placement").mkdir()
    (tmp_path / PATH).write_text(text)
    with pytest.raises(SpecError, match=f"^{PATH}.*restore it from version control"):
        read_placement(tmp_path, "inventory/prod.py")
