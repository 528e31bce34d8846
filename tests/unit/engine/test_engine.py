"""The command line of `vllm serve`."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import pytest

from tests.unit.planned import planned
from vllm_fleet import engine


def lines(args: dict[str, Any] | None = None, **changes: Any) -> list[list[str]]:
    return engine.command(planned(args=args or {}, **changes))


def test_one_option_a_line_in_a_fixed_order() -> None:
    command = lines(model={"max_model_len": 32768, "aliases": ("glm", "air")})
    assert command == [
        ["/opt/vllm/releases/0.21.0-abc/bin/vllm", "serve", "/opt/vllm/models/glm-4.5-air/v1.0"],
        ["--host", "0.0.0.0"],
        ["--port", "8001"],
        ["--served-model-name", "glm-4.5-air", "glm", "air"],
        ["--max-model-len", "32768"],
        ["--tensor-parallel-size", "2"],
        ["--disable-uvicorn-access-log"],
        ["--middleware", "gate.Gate"],
    ]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"enable-prefix-caching": True}, [["--enable-prefix-caching"]]),
        ({"enable-prefix-caching": False}, [["--no-enable-prefix-caching"]]),
        ({"no-enable-log-requests": True}, [["--no-enable-log-requests"]]),
        ({"no-enable-log-requests": False}, [["--enable-log-requests"]]),
        ({"disable-log-stats": True}, [["--disable-log-stats"]]),
        ({"disable-log-stats": False}, []),
        ({"max-num-seqs": None}, []),
        ({"max_num_seqs": 64}, [["--max-num-seqs", "64"]]),
        ({"gpu-memory-utilization": 0.9}, [["--gpu-memory-utilization", "0.9"]]),
        ({"cudagraph-capture-sizes": [1, 2, 4]}, [["--cudagraph-capture-sizes", "1", "2", "4"]]),
        ({"cudagraph-capture-sizes": []}, []),
        ({"middleware": ["a.B", "c.D"]}, [["--middleware", "a.B"], ["--middleware", "c.D"]]),
        ({"seed": -1}, [["--seed=-1"]]),
        ({"compilation-config": {"level": 3}}, [["--compilation-config", '{"level": 3}']]),
        ({"hf-overrides.num_layers": 2}, [["--hf-overrides.num_layers", "2"]]),
    ],
)
def test_how_a_value_is_passed(args: dict[str, Any], expected: list[list[str]]) -> None:
    command = lines(args)
    assert command[5:-2] == expected
    assert command[-2] == ["--disable-uvicorn-access-log"]
    assert command[-1] == ["--middleware", "gate.Gate"], "the gate is around all others"


def test_the_access_log_of_the_engine_can_be_asked_for() -> None:
    assert ["--no-disable-uvicorn-access-log"] in lines({"disable-uvicorn-access-log": False})


@pytest.mark.parametrize(
    ("args", "cards", "size"),
    [
        ({}, (0, 1, 2, 3), "4"),
        ({"pipeline-parallel-size": 2}, (0, 1, 2, 3), "2"),
        ({"data_parallel_size": 4}, (0, 1, 2, 3), "1"),
        ({"tensor-parallel-size": 2}, (0, 1, 2, 3), "2"),
    ],
)
def test_tensor_parallel_size(args: dict[str, Any], cards: tuple[int, ...], size: str) -> None:
    command = lines(args, cards=cards, uuids=tuple("abcd"))
    assert [line for line in command if line[0] == "--tensor-parallel-size"] == [
        ["--tensor-parallel-size", size]
    ]


def test_cards_that_cannot_be_divided() -> None:
    with pytest.raises(engine.EngineError, match="air-a on gpu-01: 2 cards cannot be divided"):
        lines({"pipeline-parallel-size": 3})


@pytest.mark.parametrize(
    "args",
    [
        {"tensor-parallel-size": 8},
        {"tensor-parallel-size": "4"},
        {"tensor-parallel-size": 2, "pipeline-parallel-size": 2},
        {"tensor-parallel-size": 2, "data-parallel-size": 2},
    ],
)
def test_more_ranks_than_cards(args: dict[str, object]) -> None:
    with pytest.raises(engine.EngineError, match="is more than its 2 cards"):
        lines(args)
    lines({**args, "nnodes": 4})  # of several hosts


def test_no_cards_no_tensor_parallel() -> None:
    flat = [word for line in lines(device="cpu", cards=(), uuids=()) for word in line]
    assert "--tensor-parallel-size" not in flat


def test_length_of_the_plan_wins() -> None:
    command = lines({"max-model-len": 4096}, model={"max_model_len": 8192})
    assert [line for line in command if line[0] == "--max-model-len"] == [
        ["--max-model-len", "4096"]
    ]


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_pooling_tasks_name_their_runner(task: str) -> None:
    assert ["--runner", "pooling"] in lines(model={"task": task})
    given = lines({"runner": "generate"}, model={"task": task})
    assert ["--runner", "pooling"] not in given


def test_remote_code_only_when_asked() -> None:
    assert ["--trust-remote-code"] in lines(model={"trust_remote_code": True})
    assert ["--trust-remote-code"] not in lines()


@pytest.mark.parametrize("name", sorted(engine.RESERVED))
def test_reserved_options_are_refused_with_a_remedy(name: str) -> None:
    for spelling in (name, name.replace("-", "_"), f"no-{name}"):
        with pytest.raises(engine.EngineError) as refusal:
            engine.options({spelling: "x"})
        assert engine.RESERVED[name] in str(refusal.value)


@pytest.mark.parametrize("name", ["--max-num-seqs", "-O", "", "a b", "x;y", "a=b", "x\n"])
def test_names_that_are_no_options(name: str) -> None:
    with pytest.raises(engine.EngineError, match="is no option name"):
        engine.options({name: 1})


def test_one_option_in_two_spellings() -> None:
    with pytest.raises(engine.EngineError, match="given twice"):
        engine.options({"max-num-seqs": 1, "max_num_seqs": 2})


def test_shell_text_survives_a_real_shell() -> None:
    nasty = {"a": "it's", "b": ['"', "$HOME", "`id`", "\\", "ü", "*", "new\nline"], "c": None}
    weights = "/data/my models/$x 'y' \"z\"/w"
    command = lines({"hf-overrides": nasty, "chat-template": "-{{ x }}"}, weights=weights)
    text = engine.shell(command)
    words = [word for line in command for word in line]
    assert shlex.split(text.replace(" \\\n", " ")) == words
    printed = subprocess.run(
        ["sh", "-c", "printf '%s\\0' " + text], capture_output=True, check=True
    ).stdout.decode()
    assert printed.split("\0")[:-1] == words
    assert json.loads(words[words.index("--hf-overrides") + 1]) == nasty


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"enable-auto-tool-choice": True, "tool-call-parser": "glm45"}, True),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "glm45"}, True),
        ({"tool-call-parser": "glm45"}, False),
        ({}, False),
    ],
)
def test_has_tools(args: dict[str, Any], expected: bool) -> None:
    assert engine.has_tools(args) is expected
