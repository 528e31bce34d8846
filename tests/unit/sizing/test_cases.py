"""What vLLM printed, for every case whose inputs are complete."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_fleet.sizing import Sizing, find_gpu, size

from .conftest import DATA

CASES = json.loads((DATA / "cases.json").read_text("utf-8"))
COMPLETE = [c for c in CASES if c["complete"]]


def sized(case: dict[str, Any], **changes: Any) -> Sizing:
    config = json.loads((DATA / "configs" / f"{case['config']}.json").read_text("utf-8"))
    return size(
        config,
        gpu=find_gpu(case["card"]),
        gpu_memory_gib=case["card_gib"],
        tp=case["tp"],
        pp=case["pp"],
        vllm_version=case["vllm"] or "0.19.0",
        **{**case["given"], **changes},
    )


@pytest.mark.parametrize("case", COMPLETE, ids=lambda c: c["id"])
def test_weights_and_kv_cache_are_as_printed(case: dict[str, Any]) -> None:
    found = sized(case)
    printed = case["printed"]
    # Two decimals are printed, which is much for models of a few layers.
    assert found.weights_gib == pytest.approx(printed["weights_gib"], rel=0.01, abs=0.05)
    for name in ("kv_cache_gib", "kv_cache_tokens", "max_concurrency"):
        if name in printed:
            assert getattr(found, name) == pytest.approx(printed[name], rel=0.02), name
    if "kv_bytes_per_token" in printed:
        assert found.kv_bytes_per_token == printed["kv_bytes_per_token"]


@pytest.mark.parametrize(
    "case", [c for c in COMPLETE if "activation_gib" in c["printed"]], ids=lambda c: c["id"]
)
def test_activations_are_as_printed(case: dict[str, Any]) -> None:
    rank = sized(case).ranks[0]
    assert rank.activation_gib == pytest.approx(case["printed"]["activation_gib"], rel=0.04)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c["config"] and "kv_bytes_per_token" in c["printed"]],
    ids=lambda c: c["id"],
)
def test_bytes_per_token_are_exact(case: dict[str, Any]) -> None:
    assert sized(case).kv_bytes_per_token == case["printed"]["kv_bytes_per_token"]


def test_printed_figure_lies_in_the_spread() -> None:
    inside = 0
    judged = [c for c in COMPLETE if "kv_cache_tokens" in c["printed"]]
    for case in judged:
        spread = sized(case).spread["kv_cache_tokens"]
        inside += spread.low <= case["printed"]["kv_cache_tokens"] <= spread.high
    assert inside >= len(judged) - 1


def test_hybrid_with_prefix_caching_is_as_printed() -> None:
    # The log does not say that prefix caching was on; the figures do.
    case = next(c for c in CASES if c["id"] == "qwen36-35b-nvfp4-5090")
    found = sized(case, prefix_caching=True, kv_cache_memory_gib=5.98)
    assert found.kv_cache_tokens == 567978
    assert round(found.max_concurrency, 2) == 4.33
    assert found.block_size == 2096
