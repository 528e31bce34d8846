"""Models that no log is at hand for, against sums from their config.json alone.

The sums are written out here, tensor by tensor, and share nothing with the package. GiB a card.
"""

from __future__ import annotations

from typing import Any

import pytest

from vllm_fleet.sizing import Sizing, SizingError, find_gpu, size
from vllm_fleet.sizing.models import build

GIB = 1 << 30

AIR = {  # GLM-4.5-Air
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_hidden_layers": 46,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GLM_46 = {
    **AIR,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 202752,
    "use_qk_norm": True,
}
NEXT = {  # Qwen3-Next-80B-A3B
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "decoder_sparse_step": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mlp_only_layers": [],
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
VL_MOE: dict[str, Any] = {  # Qwen3-VL-30B-A3B
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
VL_AWQ: dict[str, Any] = {  # Qwen2.5-VL-7B-Instruct-AWQ
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "max_position_embeddings": 128000,
    "use_sliding_window": False,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_heads": 16,
    },
    "quantization_config": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["visual"],
    },
}
H200 = find_gpu("H200")


def sized(config: dict[str, Any], **settings: Any) -> Sizing:
    return size(config, gpu=settings.pop("gpu", H200), max_model_len=8192, **settings)


def attention(c: dict[str, Any], tp: int, *, gate: int = 1) -> int:
    """Parameters of q, k, v, o on one card; KV heads are replicated where there are too few."""
    hidden, heads, head = c["hidden_size"], c["num_attention_heads"] // tp, c["head_dim"]
    rows = (heads * gate + 2 * max(c["num_key_value_heads"] // tp, 1)) * head
    return rows * hidden + hidden * heads * head


def glm_moe(c: dict[str, Any], tp: int, layers: range, *, ends: int) -> float:
    """Bytes of some layers of GLM-4.5 and 4.6, and of ``ends`` embeddings and heads."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    qkv = (heads // tp + 2 * c["num_key_value_heads"] // tp) * 128
    total = 0.0
    for i in layers:
        total += 2 * (attention(c, tp) + qkv + 2 * hidden)
        total += 2 * 2 * 128 if c["use_qk_norm"] else 0
        if i < c["first_k_dense_replace"]:
            total += 2 * 3 * hidden * c["intermediate_size"] / tp
            continue
        experts = c["n_routed_experts"] + c["n_shared_experts"]
        total += 2 * 3 * hidden * c["moe_intermediate_size"] / tp * experts
        total += 4 * c["n_routed_experts"] * (hidden + 1)  # router and its correction in fp32
    rotary = 2 * c["max_position_embeddings"] * 64
    return total + rotary + ends * 2 * c["vocab_size"] * hidden / tp


@pytest.mark.parametrize("config", [AIR, GLM_46])
def test_glm_4_5_air_and_4_6_on_eight_cards(config: dict[str, Any]) -> None:
    found = sized(config, tp=8)
    layers = config["num_hidden_layers"]
    by_hand = glm_moe(config, 8, range(layers), ends=2)
    assert found.weights_gib * GIB == pytest.approx(by_hand, rel=0.003)
    assert found.kv_bytes_per_token == layers * 2 * 128 * 2  # one KV head, K and V, 16 bit


def test_an_uneven_pipeline_with_mtp_on_its_last_rank() -> None:
    found = sized(AIR, tp=2, pp=3, speculative_tokens=1)
    assert [r.layers for r in found.ranks] == [15, 16, 15]
    first, middle, last = (r.weights_gib * GIB for r in found.ranks)
    assert first == pytest.approx(glm_moe(AIR, 2, range(15), ends=1), rel=0.003)
    assert middle == pytest.approx(glm_moe(AIR, 2, range(15, 31), ends=0), rel=0.003)
    # The MTP layer, its joining projection, and an embedding of its own: the target's is on
    # another rank (llm_base_proposer.py: _maybe_share_embeddings).
    mtp = 2 * 2 * 4096 * 4096
    assert last == pytest.approx(glm_moe(AIR, 2, range(31, 47), ends=2) + mtp, rel=0.003)
    assert found.kv_bytes_per_token == 16 * 4 * 2 * 128 * 2


def test_qwen3_next_on_four_cards() -> None:
    found = sized(NEXT, tp=4)
    hidden, tp = 2048, 4
    keys, values = 16 * 128, 32 * 128
    total = 0.0
    for i in range(48):
        total += 2 * 2 * hidden
        if i % 4 == 3:
            total += 2 * (attention(NEXT, tp, gate=2) + 2 * 256)
        else:
            projections = (2 * keys + 2 * values + 2 * 32) * hidden + values * hidden
            total += 2 * (projections + 4 * (2 * keys + values) + 32) / tp + 4 * 32 / tp + 2 * 128
        total += 2 * (512 * hidden + hidden)  # router, gate of the shared expert
        total += 2 * 513 * 3 * hidden * 512 / tp
    total += 2 * 2 * 151936 * hidden / tp + 2 * 262144 * 64
    assert found.weights_gib * GIB == pytest.approx(total, rel=0.003)
    assert found.kv_bytes_per_token == 12 * 1 * 2 * 256 * 2
    # A state: 3 rows of the convolution and a matrix for each value head, both in 16 bit.
    state = 3 * (2 * keys + values) // tp * 2 + 32 // tp * 128 * 128 * 2
    assert found.block_size == -(-state // (16 * 1024)) * 16


def test_qwen3_next_has_an_mtp_layer_that_its_config_does_not_count() -> None:
    assert len(build(NEXT).draft) == 1
    plain, with_mtp = (sized(NEXT, tp=4, speculative_tokens=n) for n in (0, 2))
    layer = 2 * (513 * 3 * 2048 * 512 + 2 * 2048 * 2048 * 4) / 4
    assert (with_mtp.weights_gib - plain.weights_gib) * GIB == pytest.approx(layer, rel=0.03)
    with pytest.raises(SizingError, match="no MTP layer"):
        sized({**NEXT, "num_nextn_predict_layers": 0}, speculative_tokens=1)


def test_qwen3_vl_moe_on_two_cards() -> None:
    found = sized(VL_MOE, tp=2)
    text, hidden, tp = VL_MOE["text_config"], 2048, 2
    layer = 2 * (attention(text, tp) + 256 + 2 * hidden + 128 * hidden)
    layer += 2 * 128 * 3 * hidden * 768 / tp
    language = 48 * layer + 2 * 2 * 151936 * hidden / tp + 2 * 262144 * 128
    h, width, wide = 1152, 4304, 4 * 1152
    block = (4 * h * h + 3 * h + 2 * width * h + width) / tp + 6 * h
    merger = (wide * wide + wide + wide * hidden) / tp + hidden
    eye = 27 * block + 4 * merger + 2 * h + 3 * 2 * wide + 2304 * h + (3 * 2 * 256 + 1) * h
    assert found.weights_gib * GIB == pytest.approx(language + 2 * eye, rel=0.005)
    blind = sized(VL_MOE, tp=2, vision=False)
    assert (found.weights_gib - blind.weights_gib) * GIB == pytest.approx(2 * eye, rel=0.05)
    assert found.kv_bytes_per_token == 48 * 2 * 2 * 128 * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_qwen2_5_vl_in_awq(tp: int) -> None:
    found = sized(VL_AWQ, tp=tp, gpu=find_gpu("L40S"))
    hidden, width = 3584, 18944

    def packed(out: float, inner: float) -> float:
        """4 bits each; a scale of 16 and a zero of 4 bits for each 128."""
        return out * inner / 2 + out * inner / 128 * 2.5

    rows = (28 + 8) * 128 / tp
    layer = packed(rows, hidden) + 2 * rows + packed(hidden, hidden / tp) + 2 * 2 * hidden
    layer += packed(2 * width / tp, hidden) + packed(hidden, width / tp)
    h, up, wide = 1280, 3420, 4 * 1280
    block = (4 * h * h + 3 * h + 3 * up * h + 2 * up) / tp + 4 * h
    eye = 32 * block + 3 * 2 * 196 * h + (wide * wide + wide + wide * hidden) / tp + hidden
    total = 28 * layer + 2 * 2 * 152064 * hidden / tp + 2 * 128000 * 128 + 2 * eye
    assert found.weights_gib * GIB == pytest.approx(total, rel=0.01)
    assert found.kv_bytes_per_token == 28 * 4 // tp * 2 * 128 * 2


# -- DSA: GLM-5 with indices that layers share

DSA = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_hidden_layers": 78,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
LATENT, KEY = 576 * 2, 128 + 4


@pytest.mark.parametrize(
    ("changes", "version", "indexers"),
    [
        ({}, "0.33.0", 78),
        ({"index_topk_freq": 4}, "0.23.0", 78),  # made everywhere, used where needed
        # From 0.24 on: layers 0, 1, 5, 9 ... 77 choose for themselves.
        ({"index_topk_freq": 4}, "0.24.0", 21),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "0.32.0", 21),
        ({"index_topk_pattern": "F" + "S" * 77}, "0.32.0", 1),
        ({"index_topk_pattern": "FS"}, "0.32.0", 77),
    ],
)
def test_layers_that_share_indices(changes: dict[str, Any], version: str, indexers: int) -> None:
    whole = sized(DSA, tp=8, vllm_version=version)
    found = sized({**DSA, **changes}, tp=8, vllm_version=version)
    assert found.kv_bytes_per_token == 78 * LATENT + indexers * KEY
    # wq_b in fp8 with its scales; wk and weights_proj in 16 bit; k_norm in fp32; and what
    # torch's allocator rounds up.
    indexer = 32 * 128 * 2048 * (1 + 4 / 128**2) + 2 * (128 + 32) * 6144 + 4 * 256
    saved = (whole.weights_gib - found.weights_gib) * GIB
    assert saved == pytest.approx((78 - indexers) * indexer, rel=0.15, abs=1)


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(SizingError, match="index_topk_pattern: F and S are wanted"):
        sized({**DSA, "index_topk_pattern": 3}, tp=8)


@pytest.mark.parametrize(
    ("card", "dtype", "version", "token"),
    [
        ("H200", "fp8", "0.21.0", 656),
        ("H200", "fp8_ds_mla", "0.33.0", 656),
        ("B200", "fp8", "0.21.0", 576),
        ("B200", "auto", "0.33.0", 1152),
        ("RTX PRO 6000", "auto", "0.24.0", 656),  # packed by itself
        ("RTX PRO 6000", "bfloat16", "0.24.0", 1152),
    ],
)
def test_keys_of_sparse_attention(card: str, dtype: str, version: str, token: int) -> None:
    found = sized(DSA, tp=8, gpu=find_gpu(card), kv_cache_dtype=dtype, vllm_version=version)
    assert found.kv_bytes_per_token == 78 * (token + KEY)


@pytest.mark.parametrize(("dtype", "words"), [("auto", "becomes float16"), ("bfloat16", "refuses")])
def test_a_card_without_bfloat16(dtype: str, words: str) -> None:
    """config/model.py: _resolve_auto_dtype falls back, an asked one is refused."""
    found = sized(NEXT, gpu=find_gpu("T4"), dtype=dtype, vllm_version="0.21.0")
    assert any(words in w for w in found.warnings)
    assert sum("bfloat16" in w for w in found.warnings) == 1
