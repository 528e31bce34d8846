"""Grouping, blocks and concurrency, against sums done by hand."""

from __future__ import annotations

import pytest

from vllm_fleet.sizing.errors import SizingError
from vllm_fleet.sizing.kvcache import (
    Limits,
    Spec,
    align_hybrid_block,
    capacity,
    group_layers,
    longest,
    pool,
)
from vllm_fleet.sizing.rules import rules

FULL = Spec("full", 16, 4096)
WINDOW = Spec("window", 16, 4096, window=1024)


def layers(*specs: Spec) -> dict[str, Spec]:
    return {f"layers.{i}": s for i, s in enumerate(specs)}


def test_like_layers_are_one_group() -> None:
    groups = group_layers(layers(*[FULL] * 36), rules("0.21.0"))
    assert len(groups) == 1
    shared = pool(groups)
    assert shared.block_bytes == 36 * 16 * 4096
    assert shared.blocks(10 * shared.block_bytes + 5) == 10


def test_five_windows_to_one_full_layer() -> None:
    # Gemma 3: 48 layers, every sixth is full: 8 full and 40 windowed, six groups of 8.
    specs = layers(*[FULL if i % 6 == 5 else WINDOW for i in range(48)])
    groups = group_layers(specs, rules("0.21.0"))
    assert [len(g.layers) for g in groups] == [8] * 6
    limits = Limits(32768, 8192)
    # Full: 2048 blocks. A window keeps 1023 + 8192 tokens: 576 blocks and one for the edge.
    assert pool(groups).request_blocks(limits) == 2048 + 5 * 577


def test_nearly_equal_counts_are_padded_instead_of_split() -> None:
    # GPT-OSS with a draft layer: 12 windows, 13 full; two groups, the pool as wide as 13.
    specs = layers(*[WINDOW, FULL] * 12, FULL)
    groups = group_layers(specs, rules("0.21.0"))
    assert sorted(len(g.layers) for g in groups) == [12, 13]
    assert pool(groups).block_bytes == 13 * 16 * 4096


def test_small_pages_get_larger_blocks() -> None:
    # Gemma 4: global layers keep half the bytes a token, so their blocks hold twice the tokens.
    specs = layers(Spec("full", 16, 2048), *[WINDOW] * 5)
    groups = group_layers(specs, rules("0.21.0"))
    assert [g.spec.block for g in groups] == [32, 16, 16, 16, 16, 16]


def test_pages_that_do_not_divide_are_refused_before_0_27() -> None:
    specs = layers(Spec("full", 16, 3000), WINDOW)
    with pytest.raises(SizingError, match="does not divide"):
        group_layers(specs, rules("0.21.0"))
    assert {g.spec.page for g in group_layers(specs, rules("0.28.0"))} == {16 * 4096}


def test_sparse_attention_keeps_keys_beside_latents_in_one_group() -> None:
    specs = {"a": Spec("mla", 64, 1152), "a.indexer": Spec("mla", 64, 132)}
    (group,) = group_layers(specs, rules("0.21.0"))
    assert group.per_layer
    assert pool((group,)).block_bytes == 64 * (1152 + 132)


def test_a_state_is_padded_to_the_attention_page() -> None:
    # Qwen3.6-35B with an FP8 cache: 2 heads x 256 x 2 bytes a token, states of 2146304 bytes.
    assert align_hybrid_block(16, 16, 1024, 2146304) == (2096, 2146304)
    assert align_hybrid_block(16, 16, 1000, 999) == (16, 16000)


def test_pipeline_ranks_share_the_groups_and_hold_their_layers() -> None:
    specs = layers(*[FULL] * 5)
    groups = group_layers(specs, rules("0.21.0"))
    first = pool(groups, {k: specs[k] for k in ("layers.0", "layers.1", "layers.2")})
    assert first.block_bytes == 3 * 16 * 4096


def test_tokens_are_printed_by_version() -> None:
    specs = layers(FULL, WINDOW)
    shared = pool(group_layers(specs, rules("0.19.0")))
    limits = Limits(8192, 2048)
    old = capacity(shared, 1001, limits, rules("0.19.0"))
    new = capacity(shared, 1001, limits, rules("0.21.0"))
    assert old.concurrency == new.concurrency == 1001 / (512 + 193)
    assert old.tokens == 1001 // 2 * 16
    assert new.tokens == int(1001 / 705 * 8192)


def test_context_split_over_ranks_needs_fewer_blocks() -> None:
    assert FULL.request_pages(Limits(8192, 2048, dcp=4)) == 128


def test_the_null_block_is_not_planned_with_from_0_29() -> None:
    shared = pool(group_layers(layers(FULL), rules("0.21.0")))
    room = 4 * shared.block_bytes
    assert longest(shared, room, Limits(1, 1), rules("0.28.0"), 1000) == 64
    assert longest(shared, room, Limits(1, 1), rules("0.29.0"), 1000) == 48
    assert longest(shared, 0, Limits(1, 1), rules("0.28.0"), 1000) == 0


def test_windows_hold_every_batch_in_flight() -> None:
    one = WINDOW.request_pages(Limits(131072, 2048))
    two = WINDOW.request_pages(Limits(131072, 2048, in_flight_batches=2))
    assert (one, two) == (193, 321)
