"""Weights by rank, against parameter counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_fleet.sizing.allocator import MIB, Allocator
from vllm_fleet.sizing.arch import Weight
from vllm_fleet.sizing.errors import SizingError
from vllm_fleet.sizing.models import build
from vllm_fleet.sizing.quant import Quantisation, quantisation
from vllm_fleet.sizing.weights import (
    Card,
    Parallel,
    check_split,
    rank_layers,
    rank_weights,
    shard,
    weight_bytes,
)

Config = Callable[..., dict[str, Any]]
GIB = 1 << 30


def test_leftover_layers_go_before_the_last_rank() -> None:
    assert [len(r) for r in rank_layers(61, 4)] == [15, 15, 16, 15]
    assert [len(r) for r in rank_layers(62, 4)] == [15, 16, 16, 15]
    assert [len(r) for r in rank_layers(36, 3)] == [12, 12, 12]


def test_kv_heads_are_replicated_when_there_are_fewer_than_cards() -> None:
    key = Weight("k_proj", 2 * 128, 4096, "kv", "linear", heads=2)
    assert shard(key, Parallel(tp=1))[0] == 256
    assert shard(key, Parallel(tp=2))[0] == 128
    assert shard(key, Parallel(tp=8))[0] == 128


def test_vocabulary_is_padded() -> None:
    head = Weight("lm_head", 50257, 8, "vocab", "head")
    assert shard(head, Parallel(tp=2))[0] == 50304 / 2


def test_experts_are_divided_whole_with_expert_parallel() -> None:
    experts = Weight("e", 1024, 2048, "out", "expert", count=128)
    assert shard(experts, Parallel(tp=4)) == (256, 2048, 128)
    assert shard(experts, Parallel(tp=4, expert_parallel=True)) == (1024, 2048, 32)
    assert shard(experts, Parallel(tp=4, dp=2, expert_parallel=True)) == (1024, 2048, 16)


def test_experts_are_split_over_data_parallel_ranks_too() -> None:
    experts = Weight("e", 1024, 2048, "out", "expert", count=128)
    assert shard(experts, Parallel(tp=2, dp=4)) == (128, 2048, 128)
    other = Weight("o", 1024, 2048, "out", "linear")
    assert shard(other, Parallel(tp=2, dp=4)) == (512, 2048, 1)


def test_allocator_rounds_as_torch_does() -> None:
    allocator = Allocator()
    allocator.allocate(107 * MIB)  # a segment of 108 MiB, the rest is too small to split off
    assert allocator.allocated == 108 * MIB
    allocator.allocate(112.5 * MIB)  # 1.5 MiB are split off and stay free
    assert allocator.allocated == 108 * MIB + 112.5 * MIB
    allocator.allocate(100)
    assert allocator.allocated == 220.5 * MIB + 512


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama-3.1-8b", 8.030),
        ("qwen3-8b", 8.191),
        ("qwen3-0.6b", 0.596),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3.5-27b", 27.36),
        ("glm-4.7-flash", 29.94),
        ("deepseek-v2-lite", 15.71),
        ("kimi-k2-instruct", 1026.4),
    ],
)
def test_parameters_are_those_of_the_model_cards(
    config: Config, name: str, billions: float
) -> None:
    model = build(config(name))
    total = sum(
        w.out * w.inner * w.count + (w.out if w.bias else 0)
        for layer in model.layers
        for w in layer.weights
    )
    for weight in (model.embedding, model.head, *model.others):
        if weight is not None:
            total += weight.out * weight.inner
    if model.vision is not None:
        total += sum(w.out * w.inner for w in model.vision.weights)
    assert total / 1e9 == pytest.approx(billions, rel=0.003)


def test_fp8_blocks_keep_a_scale_each(config: Config) -> None:
    quant = quantisation(config("glm-5.1-fp8"))
    weight = Weight("model.layers.5.self_attn.o_proj", 6144, 16384, "whole", "linear")
    expected = 6144 * 16384 + 4 * 48 * 128
    assert weight_bytes(weight, Parallel(), quant, 2, Card((9, 0))) == expected
    # Without FP8 arithmetic Marlin widens the scales to one for each row.
    marlin = 6144 * 16384 + 2 * 6144 * 128
    assert weight_bytes(weight, Parallel(), quant, 2, Card((8, 0))) == marlin


def test_quantised_latents_are_copied_and_plain_ones_are_not(config: Config) -> None:
    plain = build(config("glm-4.7-flash"))
    card = Card((9, 0))
    (bf16,) = rank_weights(plain, Parallel(), Quantisation(), dtype="bfloat16", card=card)
    (fp8,) = rank_weights(plain, Parallel(), quantisation({}, "fp8"), dtype="bfloat16", card=card)
    copies = 47 * 20 * (192 + 256) * 512 * 2
    assert fp8.layers > bf16.layers / 2 + copies * 0.9


def test_draft_layers_are_loaded_only_when_asked(config: Config) -> None:
    model = build(config("glm-4.7-flash"))
    without, with_draft = (
        rank_weights(model, Parallel(), Quantisation(), dtype="bfloat16", card=Card(), draft=d)[0]
        for d in (False, True)
    )
    assert without.draft == 0
    assert with_draft.draft == pytest.approx(without.layers / 47, rel=0.1)


def test_a_draft_on_the_last_of_several_ranks_has_an_embedding_of_its_own(config: Config) -> None:
    model = build(config("glm-4.7-flash"))
    alone, split = (
        rank_weights(
            model, Parallel(pp=pp), Quantisation(), dtype="bfloat16", card=Card(), draft=True
        )
        for pp in (1, 2)
    )
    assert split[-1].draft - alone[0].draft == pytest.approx(154880 * 2048 * 2, rel=0.01)
    assert split[0].draft == 0


@pytest.mark.parametrize(
    ("name", "parallel", "text"),
    [
        ("qwen2.5-7b-instruct", Parallel(tp=8), "does not divide the 28 attention heads"),
        ("qwen3-8b", Parallel(tp=3), "does not divide"),
        ("qwen3-0.6b", Parallel(pp=64), "more than the 28 layers"),
        ("qwen3-8b", Parallel(tp=8, dcp=2), "KV heads that are replicated"),
    ],
)
def test_impossible_splits_are_refused(
    config: Config, name: str, parallel: Parallel, text: str
) -> None:
    with pytest.raises(SizingError, match=text):
        check_split(build(config(name)), parallel)


def test_latents_may_be_split_over_all_ranks(config: Config) -> None:
    check_split(build(config("kimi-k2-instruct")), Parallel(tp=8, dcp=8))
