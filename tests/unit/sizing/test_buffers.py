"""Memory that is neither weights of the checkpoint nor activations, summed up by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_fleet.sizing import Sizing, find_gpu, size

from .conftest import DATA

GIB = 1 << 30
MIB = 1 << 20


def sized(config: str, card: str = "H200", **given: Any) -> Sizing:
    text = (DATA / "configs" / f"{config}.json").read_text("utf-8")
    settings = {
        "vllm_version": "0.21.0",
        "max_model_len": 32768,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enforce_eager": True,
        **given,
    }
    return size(json.loads(text), gpu=find_gpu(card), **settings)


def test_sparse_attention_takes_its_queries_and_an_fp8_cache_its_latents_with_the_model() -> None:
    found = sized("glm-5-fp8-11layers")
    packed = sized("glm-5-fp8-11layers", kv_cache_dtype="fp8")
    latents = 5 * 32768 * (512 + 64) * 2
    assert packed.weights_gib - found.weights_gib == pytest.approx(latents / GIB, abs=1e-6)
    more = sized("glm-5-fp8-11layers", max_num_batched_tokens=16384)
    queries, chosen = 8192 * 64 * (512 + 64) * 2, 8192 * 2048 * 4
    assert more.weights_gib - found.weights_gib == pytest.approx((queries + chosen) / GIB, abs=1e-6)


def test_dense_mla_takes_neither() -> None:
    found = sized("glm-4.7-flash-8layers")
    packed = sized("glm-4.7-flash-8layers", kv_cache_dtype="fp8", max_num_batched_tokens=16384)
    assert packed.weights_gib == found.weights_gib


@pytest.mark.parametrize(
    ("dtype", "tp", "taken"), [("fp8", 2, 0), ("auto", 4, 0), ("auto", 2, 8192 * 32 * 576 * 2)]
)
def test_on_blackwell_only_one_of_two_sparse_backends_takes_them(
    dtype: str, tp: int, taken: int
) -> None:
    few, many = (
        sized("glm-5-fp8-11layers", "B200", tp=tp, kv_cache_dtype=dtype, max_num_batched_tokens=n)
        for n in (8192, 16384)
    )
    chosen = 8192 * 2048 * 4
    assert many.weights_gib - few.weights_gib == pytest.approx((taken + chosen) / GIB, abs=1e-6)


def test_a_module_that_allocates_when_it_is_imported() -> None:
    before, after = (sized("deepseek-v2-lite", vllm_version=v) for v in ("0.24.0", "0.25.0"))
    assert before.weights_gib - after.weights_gib == pytest.approx(128 / 1024, abs=1e-6)


def test_a_workspace_that_layers_keep_a_view_of_is_not_freed_when_it_grows() -> None:
    kept, freed = (sized("glm-5-fp8-11layers", vllm_version=v) for v in ("0.30.0", "0.31.0"))
    queries = 8192 * 64 * (512 + 64) * 2
    # The workspace's share of activations is given with 5 % to either side, not its middle.
    assert kept.activation_gib - freed.activation_gib == pytest.approx(queries / GIB, abs=1e-6)


def test_what_is_alive_in_sparse_attention() -> None:
    """Per token: residual, normed input, joined projection, its two norms, queries, results."""
    found = sized("glm-5-fp8-11layers")
    heads = 64 * (192 + 64) + 64 * 256
    alive = 2 * 6144 + (2048 + 512 + 64) + 2048 + 512 + heads
    context = 65536 * 64 * (192 + 256) * 2  # of a chunked prefill
    experts = 8192 * 8 * (6144 + 6144) * 2  # by Triton, which does not align
    cublas = 32 * MIB
    expected = (8192 * alive * 2 + context + experts + cublas) / GIB
    assert found.activation_gib == pytest.approx(expected, abs=1e-6)


def test_deepgemm_aligns_rows_on_blackwell_alone() -> None:
    hopper, blackwell = (sized("qwen3-235b-a22b-fp8", card, tp=2) for card in ("H200", "B200"))
    aligned = -(-(8192 * 8 + 128 * 127) // 128) * 128 - 8192 * 8
    more = aligned * (4096 + 4096) * 2 / GIB
    # B200 has 16 multiprocessors more, each with a row of logits for the sampler.
    rows = (find_gpu("B200").sms - find_gpu("H200").sms) * 151936 * 4 / GIB
    assert blackwell.activation_gib - hopper.activation_gib == pytest.approx(more + rows, abs=1e-3)


@pytest.mark.parametrize(
    ("card", "version", "tp", "mib"),
    [
        ("H200", "0.21.0", 2, 3 * 512),  # 128, some flags, 384: each a step of 512
        ("H200", "0.21.0", 4, 3 * 512),
        ("H200", "0.21.0", 8, 3 * 512),
        ("H200", "0.26.0", 2, 3 * 512),
        ("H200", "0.27.0", 2, 4 * 2 * 64 + 2),
        ("H200", "0.27.0", 4, 4 * 4 * 2 + 2),
        ("B200", "0.21.0", 4, 3 * 512),
        ("A100", "0.21.0", 2, 0),
        ("L40S", "0.21.0", 2, 0),
    ],
)
def test_buffers_of_a_fused_all_reduce(card: str, version: str, tp: int, mib: int) -> None:
    """glm-4.5-air: 4096 wide, so that 64 MiB are 8192 tokens."""
    eager, compiled = (
        sized("glm-4.5-air", card, tp=tp, vllm_version=version, enforce_eager=eager)
        for eager in (True, False)
    )
    assert compiled.non_torch_gib - eager.non_torch_gib == pytest.approx(mib / 1024, abs=1e-6)


def test_a_small_batch_needs_smaller_buffers() -> None:
    eager, compiled = (
        sized(
            "glm-4.5-air",
            tp=2,
            vllm_version="0.27.0",
            enforce_eager=eager,
            max_num_batched_tokens=2048,
        )
        for eager in (True, False)
    )
    buffers = 4 * 2 * 2048 * 4096 * 2 + 2 * MIB
    assert compiled.non_torch_gib - eager.non_torch_gib == pytest.approx(buffers / GIB, abs=1e-6)
