"""Engine data against what the real parsers and servers of two versions said."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from tests.unit.shared_data import HERE, needs_shared_data

pytestmark = needs_shared_data

DUMPS = [("0.21.0", "args_v021.json"), ("0.32.0", "args_v032.json")]

# Our name of a converter -> the name it has in the dump.
CONVERTERS = {
    "json": "_parse_type",
    "human_int": "human_readable_int",
    "human_int_or_auto": "human_readable_int_or_auto",
    "dict_or_str": "union_dict_and_str",
    "config": "parse_dataclass",
    "lower": "<lambda>",
    "call": "<lambda>",
}
ACTIONS = {
    "store": "_StoreAction",
    "store_true": "_StoreTrueAction",
    "append": "_AppendAction",
    "help": "_HelpAction",
}
# Where the dump was made on a machine without a GPU, which the data is not about.
WITHOUT_GPU = {("mm_processor_device", "choices")}


def ours(version: str) -> dict[str, Any]:
    text = (files("vllm_fleet") / "data" / "vllm" / f"{version}.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def as_dumped(option: dict[str, Any]) -> dict[str, Any]:
    """An option of ours in the words of the dump."""
    action = option.get("action", "store")
    kind = option.get("type")
    flag = action in {"store_true", "BooleanOptionalAction", "help"}
    if option.get("optional"):
        kind = "_optional_type"
    default = option.get("default")
    return {
        "opts": option["opts"],
        "dest": option["dest"],
        "group": option["group"],
        "action": ACTIONS.get(action, action),
        "nargs": 0 if flag else option.get("nargs"),
        "choices": option.get("choices"),
        "type": CONVERTERS.get(kind, kind) if kind else None,
        "default": default,
    }


def comparable(option: dict[str, Any]) -> dict[str, Any]:
    """A dumped option without what is not data: help texts, printed objects."""
    kept = {k: v for k, v in option.items() if k not in {"help", "deprecated"}}
    default = kept["default"]
    if isinstance(default, str) and option["type"] == "parse_dataclass":
        kept["default"] = {} if default != "==SUPPRESS==" else default
    if default == "set()":
        kept["default"] = []
    if isinstance(default, str) and default.startswith("<"):  # an enumeration: <X.Y: 'y'>
        kept["default"] = default.split("'")[1]
    return kept


@pytest.mark.parametrize(("version", "dump"), DUMPS)
def test_options_equal_the_dump_of_the_real_parser(version: str, dump: str) -> None:
    expected = [comparable(o) for o in json.loads((HERE / "vllm" / dump).read_text())]
    found = [as_dumped(o) for o in ours(version)["options"]]
    assert len(found) == len(expected)
    by_dest = {o["dest"]: o for o in found}
    differences = []
    for option in expected:
        for key, value in option.items():
            if (option["dest"], key) in WITHOUT_GPU:
                continue
            if by_dest[option["dest"]][key] != value:
                differences.append((option["dest"], key, by_dest[option["dest"]][key], value))
    assert differences == []


@pytest.mark.parametrize("version", [v for v, _ in DUMPS])
def test_metrics_equal_what_a_server_exposed(version: str) -> None:
    lines = (HERE / "vllm" / f"metrics_v{version}.tsv").read_text().splitlines()
    expected = dict(line.split() for line in lines if line.strip())
    assert ours(version)["metrics"] == expected


def test_options_that_came_and_went_between_the_two() -> None:
    told: dict[str, list[str]] = {}
    section = ""
    for line in (HERE / "vllm" / "flags_diff_021_032.txt").read_text().splitlines():
        if line.startswith("--"):
            told[section].append(line.strip())
        elif line.strip():
            section = line.strip()
            told[section] = []

    def names(version: str) -> set[str]:
        return {o for x in ours(version)["options"] for o in x["opts"] if o.startswith("--")}

    assert sorted(names("0.21.0") - names("0.32.0")) == sorted(told["REMOVED"])
    assert sorted(names("0.32.0") - names("0.21.0")) == sorted(told["ADDED"])
