"""Whatever an operator writes, the answer is complaints or a fleet, never a traceback."""

from __future__ import annotations

import random

import pytest

from tests.unit.spec.conftest import GOOD, Project

PIECES = [
    *("null", "~", "yes", "0.20", "08001", "1:30", "[]", "{}", "[[1]]", "{a: 1}", "x", '"x"'),
    *("2026-01-01", ".inf", "-1", "999999999999999999999", '"a\\nb"', "!x y", "&a [*a]", "*b"),
    *("\t", ":", "- ", "  ", "\n", "<<", "é", "'", "{", "]", "#", "@", "models", "instances:"),
]


@pytest.mark.parametrize("seed", range(300))
def test_mutated_files(project: Project, seed: int) -> None:
    rng = random.Random(seed)
    text = GOOD
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        upto = min(len(text), at + rng.choice([0, 1, 3, 8]))
        text = text[:at] + rng.choice(PIECES) + text[upto:]
    project.write("group_vars/prod.yml", text)
    result = project.check()
    assert (result.fleet is None) == bool(result.complaints)
    assert len(set(map(str, result.complaints))) == len(result.complaints)
    lines = text.count("\n") + 2
    for complaint in result.complaints:
        assert complaint.file == "group_vars/prod.yml"
        assert 1 <= complaint.line <= lines
        assert "Input should" not in complaint.text


@pytest.mark.parametrize("value", PIECES[:20])
@pytest.mark.parametrize("key", ["models", "instances", "hub", "proxy", "gateway", "api_keys"])
def test_any_value_under_any_key(project: Project, key: str, value: str) -> None:
    project.write("group_vars/all.yml", f"{key}: {value}\n")
    for complaint in project.check().complaints:
        assert "Input should" not in complaint.text
