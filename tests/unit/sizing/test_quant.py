"""Quantisation configs, and the bytes they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_fleet.sizing.errors import SizingError
from vllm_fleet.sizing.quant import Scheme, quantisation


def quant(**data: Any) -> Any:
    return quantisation({"quantization_config": data})


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Scheme(), 256 * 512 * 2),
        (Scheme("fp8", 8), 256 * 512 + 4),
        (Scheme("fp8", 8, per_row=True), 256 * 512 + 4 * 256),
        (Scheme("fp8", 8, block=(128, 128)), 256 * 512 + 4 * 2 * 4),
        (Scheme("int", 4, 128), 256 * 512 / 2 + 4 * 256 * 2),
        (Scheme("int", 4, 128, zeros=True), 256 * 512 / 2 + 4 * 256 * 2 + 4 * 256 / 2),
        (Scheme("int8", 8), 256 * 512 + 4 * 256),
        (Scheme("nvfp4", 4, 16), 256 * 512 / 2 + 256 * 32 + 8),
        (Scheme("mxfp4", 4, 32), 256 * 512 / 2 + 256 * 16),
    ],
)
def test_bytes_of_a_matrix(scheme: Scheme, expected: float) -> None:
    assert scheme.weight_bytes(256, 512, 2) == expected


def test_awq_by_either_names_of_its_keys() -> None:
    old = quant(quant_method="awq", w_bit=4, q_group_size=128, zero_point=True)
    new = quant(quant_method="awq", bits=4, group_size=128, zero_point=True)
    assert old == new
    assert old.scheme("model.layers.0.mlp.up_proj", "linear").zeros


def test_gptq_keeps_no_zero_points_when_symmetric() -> None:
    scheme = quant(quant_method="gptq", bits=4, group_size=128, sym=True).default
    assert scheme == Scheme("int", 4, 128)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("lm_head", "lm_head"),
        ("model.layers.0.self_attn", "model.layers.0.self_attn.o_proj"),
        ("model.layers.0.self_attn.indexer*", "model.layers.0.self_attn.indexer.wq_b"),
        ("re:.*self_attn.*", "model.language_model.layers.3.self_attn.q_proj"),
        ("model.language_model.layers.1.mlp.gate_proj", "model.layers.1.mlp.gate_proj"),
        ("shared_expert", "model.layers.1.mlp.shared_expert.up_proj"),
    ],
)
def test_ignored_modules_stay_plain(pattern: str, name: str) -> None:
    found = quant(quant_method="fp8", modules_to_not_convert=[pattern])
    assert found.scheme(name, "linear").kind == "none"
    assert found.scheme("model.layers.7.mlp.down_proj", "linear").kind == "fp8"


def test_mixed_precision_by_layer(config: Callable[..., dict[str, Any]]) -> None:
    found = quantisation(config("qwen3.6-35b-a3b-nvfp4"))
    kinds = {
        found.scheme("model.language_model.layers.0.mlp.experts", "expert").kind,
        found.scheme("model.language_model.layers.0.linear_attn.out_proj", "linear").kind,
        found.scheme("model.language_model.layers.0.linear_attn.in_proj_ba", "linear").kind,
    }
    assert kinds == {"nvfp4", "fp8", "none"}


def test_kv_cache_follows_a_modelopt_checkpoint() -> None:
    assert (
        quant(
            quant_method="modelopt",
            quant_algo="NVFP4",
            kv_cache_quant_algo="FP8",
            exclude_modules=["lm_head"],
        ).kv_cache
        == "fp8"
    )


def test_compressed_tensors_groups() -> None:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
    }
    found = quant(
        quant_method="compressed-tensors",
        format="pack-quantized",
        ignore=["lm_head"],
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
    )
    assert found.scheme("model.layers.0.mlp.experts", "expert") == Scheme("int", 4, 32)


@pytest.mark.parametrize(
    ("data", "override", "text"),
    [
        ({"quant_method": "bitsandbytes"}, None, "'bitsandbytes' is not known"),
        ({"quant_method": "gptq", "bits": 4}, None, "group_size .* is missing"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, None, "two whole numbers"),
        ({"quant_method": "modelopt", "quant_algo": "W9"}, None, "'W9' is not known"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "gptq", "vLLM refuses that"),
        (None, "awq", "weights are not quantised"),
        ("fp8", None, "a mapping is wanted"),
    ],
)
def test_what_is_not_known_is_refused(data: Any, override: str | None, text: str) -> None:
    config = {} if data is None else {"quantization_config": data}
    with pytest.raises(SizingError, match=text):
        quantisation(config, override)
