"""Settings with reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_fleet.sizing import RefusedError, SizingError, Traffic, choose, find_gpu
from vllm_fleet.sizing.choose import parsers, refusals, splits

Config = Callable[..., dict[str, Any]]


def test_every_choice_has_a_reason_and_what_is_chosen_fits(config: Config) -> None:
    found = choose(
        config("glm-5.1-fp8"), find_gpu("H200"), 8, links="nvswitch", repo="zai-org/GLM-5.1-FP8"
    )
    assert found.refusals == ()
    assert found["tensor-parallel-size"] == 8
    assert found.sizing is not None
    assert found.sizing.fits
    assert found.sizing.max_concurrency >= 16
    assert found.sizing.max_model_len == found["max-model-len"]
    assert all(c.reason for c in found.settings)
    assert found["reasoning-parser"] == "glm45"
    assert found["tool-call-parser"] == "glm47"
    assert "quantization" not in found.vllm_args()


def test_operators_values_win(config: Config) -> None:
    given = {
        "gpu-memory-utilization": 0.8,
        "max-model-len": 8192,
        "max-num-seqs": 32,
        "swap-space": 4,
    }
    found = choose(config("qwen3-8b"), find_gpu("H100"), 1, given=given)
    for name, value in given.items():
        assert found[name] == value
    assert {c.name for c in found.settings if c.by == "operator"} == set(given)
    assert found.sizing is not None
    assert found.sizing.settings["gpu_memory_utilization"] == 0.8


def test_operators_values_are_checked(config: Config) -> None:
    with pytest.raises(SizingError, match="does not divide"):
        choose(config("qwen3-8b"), find_gpu("H100"), 3, given={"tensor-parallel-size": 3})
    found = choose(config("qwen3-32b"), find_gpu("RTX 4090"), 1, given={"max-model-len": 4096})
    assert any("no memory is left" in r for r in found.refusals)


@pytest.mark.parametrize(
    ("given", "tp", "pp"),
    [
        ({"data-parallel-size": 2}, 2, None),
        ({"data-parallel-size": 4}, 1, None),
        ({"pipeline-parallel-size": 2}, 2, 2),
        ({"tensor-parallel-size": 2}, 2, 2),
        ({"tensor-parallel-size": 2, "data-parallel-size": 2}, 2, None),
    ],
)
def test_an_operators_layout_leaves_the_other_cards_to_the_rest(
    config: Config, given: dict[str, int], tp: int, pp: int | None
) -> None:
    found = choose(config("qwen3-30b-a3b"), find_gpu("H100"), 4, given=given)
    assert (found["tensor-parallel-size"], found["pipeline-parallel-size"]) == (tp, pp)


@pytest.mark.parametrize(
    "given",
    [
        {"data-parallel-size": 3},
        {"tensor-parallel-size": 8},
        {"tensor-parallel-size": 2, "pipeline-parallel-size": 1},
        {"tensor-parallel-size": 0},
    ],
)
def test_layouts_of_other_numbers_of_cards_are_refused(
    config: Config, given: dict[str, int]
) -> None:
    with pytest.raises(RefusedError, match="does not divide the 4 cards"):
        choose(config("qwen3-8b"), find_gpu("H100"), 4, given=given)


def test_options_are_read_as_vllm_reads_them(config: Config) -> None:
    plain = {"max-model-len": 16384, "max-num-seqs": 64, "max-num-batched-tokens": 4096}
    human = {"max-model-len": "16K", "max-num-seqs": "64", "max-num-batched-tokens": "4K"}
    first, second = (
        choose(config("qwen3-8b"), find_gpu("H100"), 1, given=given) for given in (plain, human)
    )
    assert first.sizing == second.sizing
    auto = choose(config("qwen3-8b"), find_gpu("H100"), 1, given={"max-model-len": "auto"})
    assert auto.refusals == ()
    with pytest.raises(SizingError, match="max-num-seqs: 'many' is no whole number"):
        choose(config("qwen3-8b"), find_gpu("H100"), 1, given={"max-num-seqs": "many"})


@pytest.mark.parametrize(
    "given",
    [
        {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}},
        {"speculative-config": {"method": "glm4_moe_lite_mtp", "num_speculative_tokens": 1}},
        {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 1}'},
        {"speculative-config.method": "mtp", "speculative-config.num_speculative_tokens": 1},
        {"spec-method": "mtp", "spec-tokens": 1},
    ],
)
def test_mtp_layers_are_counted_however_they_are_asked_for(
    config: Config, given: dict[str, Any]
) -> None:
    card = find_gpu("H200")
    plain = choose(config("glm-4.7-flash"), card, 1).sizing
    found = choose(config("glm-4.7-flash"), card, 1, given=given).sizing
    assert plain is not None
    assert found is not None
    assert found.weights_gib > plain.weights_gib + 0.5


def test_other_drafts_are_said_not_to_be_counted(config: Config) -> None:
    given = {"speculative-config": {"method": "eagle3", "model": "x", "num_speculative_tokens": 3}}
    found = choose(config("qwen3-8b"), find_gpu("H100"), 1, given=given)
    assert any("eagle3" in w for w in found.warnings)
    assert not choose(config("qwen3-8b"), find_gpu("H100"), 1).warnings


def test_slow_links_take_pipeline(config: Config) -> None:
    slow = choose(config("qwen3-30b-a3b"), find_gpu("RTX 4090"), 4, links="host-bridge")
    assert (slow["tensor-parallel-size"], slow["pipeline-parallel-size"]) == (1, 4)
    fast = choose(config("qwen3-30b-a3b"), find_gpu("A100"), 4, links="nvlink")
    assert fast["tensor-parallel-size"] == 4
    assert fast["pipeline-parallel-size"] is None


def test_heads_limit_the_split(config: Config) -> None:
    layouts = splits(config("qwen2.5-7b-instruct"), 8, "nvswitch")
    assert layouts[0][:2] == (4, 2)
    assert "TP 8 does not divide the heads" in layouts[0][2]


def test_length_from_traffic(config: Config) -> None:
    longest = choose(config("qwen3-8b"), find_gpu("H100"), 1, traffic=Traffic(longest=20000))
    assert longest["max-model-len"] == 20480
    mean = choose(
        config("qwen3-8b"), find_gpu("H100"), 1, traffic=Traffic(mean_in=3000, mean_out=500)
    )
    assert mean["max-model-len"] == 11264


def test_fp8_cache_only_where_the_traffic_needs_it_and_the_card_can(config: Config) -> None:
    light = choose(
        config("qwen3-8b"), find_gpu("L40S"), 1, traffic=Traffic(longest=32000, concurrent=2)
    )
    assert light["kv-cache-dtype"] is None
    tight = choose(
        config("qwen3-8b"), find_gpu("L4"), 1, traffic=Traffic(longest=32000, concurrent=1)
    )
    assert tight["kv-cache-dtype"] == "fp8"
    ampere = choose(
        config("qwen3-8b"), find_gpu("A10"), 1, traffic=Traffic(longest=32000, concurrent=1)
    )
    assert ampere["kv-cache-dtype"] is None


def test_others_on_the_card_lower_the_share(config: Config) -> None:
    found = choose(config("qwen3-0.6b"), find_gpu("H100"), 1, used_gib=40)
    assert found["gpu-memory-utilization"] < 0.5
    assert found.refusals == ()


def test_cards_without_bfloat16_get_half(config: Config) -> None:
    assert choose(config("qwen3-0.6b"), find_gpu("T4"), 1)["dtype"] == "half"


@pytest.mark.parametrize(
    ("gpu", "name", "arguments", "text"),
    [
        ("V100", "qwen3-8b", {}, "no kernels for it since vLLM 0.20"),
        ("H100", "qwen3-8b", {"driver": "570.86.15"}, "needs 580 or later"),
        ("H100", "qwen3-8b", {"driver": "beta"}, "not a version"),
        ("H100", "qwen3-8b", {"vllm_version": "0.20.1", "glibc": (2, 31)}, "needs 2.35"),
        ("A100", "glm-5.1-fp8", {}, "needs Hopper or Blackwell"),
        ("RTX PRO 6000", "glm-5.1-fp8", {"vllm_version": "0.23.0"}, "from vLLM 0.24 on"),
        ("V100", "glm-5.1-fp8", {}, "FP8 weights need sm_75"),
        ("T4", "gpt-oss-20b", {}, "MXFP4 weights need sm_80"),
    ],
)
def test_refusals(
    config: Config, gpu: str, name: str, arguments: dict[str, Any], text: str
) -> None:
    assert any(text in r for r in refusals(config(name), find_gpu(gpu), **arguments))


def test_no_refusal_where_all_is_well(config: Config) -> None:
    assert (
        refusals(config("glm-5.1-fp8"), find_gpu("H200"), driver="580.95.05", glibc=(2, 36)) == []
    )


@pytest.mark.parametrize(
    ("repo", "version", "expected"),
    [
        ("ZhipuAI/GLM-4.5-Air", "0.21.0", ("glm45", "glm45")),
        ("zai-org/GLM-4.7-Flash", "0.21.0", ("glm45", "glm47")),
        ("zai-org/GLM-4.7-Flash", "0.32.0", ("glm47", "glm47")),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "0.21.0", (None, "qwen3_coder")),
        ("Qwen/Qwen3-8B", "0.21.0", ("qwen3", "hermes")),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "0.21.0", (None, "hermes")),
        ("Qwen/Qwen3.5-27B", "0.21.0", ("qwen3", "qwen3_coder")),
        ("someone/model", "0.21.0", (None, None)),
    ],
)
def test_parsers(repo: str, version: str, expected: tuple[str | None, str | None]) -> None:
    assert parsers(repo, "X", version) == expected
