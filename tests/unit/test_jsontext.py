"""JSON of ours, for files."""

from __future__ import annotations

import json

import pytest

from vllm_fleet.jsontext import lines


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"a": 1},
        {"a": [], "b": {}, "c": None, 'qu"ote': "x\ny"},
        {
            "instances": [{"name": "a", "cards": [0, 1]}, {"name": "b"}],
            "gateways": ["10.0.0.1:9145"],
        },
    ],
)
def test_lines_are_json_of_the_same_value(data: dict[str, object]) -> None:
    assert json.loads(lines(data)) == data


def test_a_line_for_each_item() -> None:
    assert lines({"a": [1, 2], "b": "x"}) == '{\n "a": [\n  1,\n  2\n ],\n "b": "x"\n}\n'
