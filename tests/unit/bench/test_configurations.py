"""The file that bench.py compares from."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_fleet.bench.configurations import ConfigurationError, applied, parse
from vllm_fleet.bench.load import Length
from vllm_fleet.spec.load import load_fleet

FILE = """\
load: {input: 1024~256, output: 64, streams: 8, prefix: 500x2, turns: 2}
targets: [ttft-p95=1s]
configurations:
  as it is: {}
  cache in FP8: {vllm_args: {kv-cache-dtype: fp8}}
  two cards: {cards: [2, 3], env: {NCCL_DEBUG: INFO}}
"""
VARS = """\
vllm_version: "0.32.0"
models: {glm: {repo: ZhipuAI/GLM-4-9B-0414, revision: v1, vllm_args: {dtype: half}}}
instances:
  - {name: a, hosts: [gpu-1, gpu-2], model: glm, cards: [0, 1], port: 8001,
     vllm_args: {max-num-seqs: 8}}
"""


def test_a_file_is_read() -> None:
    found = parse(FILE, "glm")
    assert found.load.model == "glm"
    assert (found.load.input, found.load.output) == (Length(1024, 256), Length(64))
    assert found.load.streams == (1, 2, 4, 8)
    assert (found.load.prefix_tokens, found.load.prefixes, found.load.turns) == (500, 2, 2)
    assert str(found.targets[0]) == "time to first token p95 1 s"
    assert [*found.configurations] == ["as it is", "cache in FP8", "two cards"]
    assert parse("load: {streams: [3, 9]}\nconfigurations: {a: {}}", "m").load.streams == (3, 9)


def test_the_example_of_the_docs_is_one() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/bench-example.yml").read_text()
    assert len(parse(text, "glm").configurations) == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "a mapping is expected, with load, targets, configurations"),
        ("load: {}", "configurations: a mapping of names"),
        ("configurations: {a: {dtype: half}}", "a: dtype: unknown; there is vllm_args, env, cards"),
        ("configurations: {a: {}}\nload: {speed: 1}", "load: speed: unknown"),
        ("configurations: {a: {}}\nload: {input: many}", "load: 'many' is no length"),
        ("configurations: {a: {}}\nload: {path: embeddings}", "one of chat, completions"),
        ("configurations: {a: {}}\ntargets: [fast]", "targets: 'fast' is no target"),
        ("a: [", "no YAML"),
    ],
)
def test_a_wrong_file_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse(text, "m")
    assert told in str(refused.value)


def test_a_configuration_changes_one_instance_on_one_host(tmp_path: Path) -> None:
    for folder in ("inventory", "group_vars"):
        (tmp_path / folder).mkdir()
    (tmp_path / "inventory/prod.py").write_text('gpu = ["gpu-1", "gpu-2"]\n')
    (tmp_path / "group_vars/all.yml").write_text(VARS)
    fleet = load_fleet(str(tmp_path / "inventory/prod.py"))
    change = {"vllm_args": {"kv-cache-dtype": "fp8"}, "cards": [2, 3], "env": {"A": "1"}}
    changed = applied(fleet, "gpu-2", "a", change)
    (one,) = changed.host("gpu-2").instances
    assert one.vllm_args == {"max-num-seqs": 8, "kv-cache-dtype": "fp8"}
    assert (one.cards, one.env) == ((2, 3), {"A": "1"})
    assert changed.host("gpu-1") == fleet.host("gpu-1")
    assert applied(fleet, "gpu-2", "a", {}) == fleet
    with pytest.raises(ConfigurationError, match="cards"):
        applied(fleet, "gpu-2", "a", {"cards": [1, 1]})
