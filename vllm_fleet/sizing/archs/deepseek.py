"""DeepSeek V2, V3 and V3.2, and who builds as they do: Kimi-K2, GLM-4.7-Flash, GLM-5."""

from __future__ import annotations

from collections.abc import Callable

from ..arch import Latent, Model, Weight
from ..errors import SizingError
from ..reader import Keys
from .decoder import Experts, Mixer, decoder
from .parts import rotary, rotary_positions


def deepseek(c: Keys, top: Keys) -> Model:
    """deepseek_v2.py, glm4_moe_lite.py: MLA; with index_topk a DSA indexer"""
    hidden = c.number("hidden_size")
    heads = c.number("num_attention_heads")
    rank = c.number("kv_lora_rank")
    nope = c.number("qk_nope_head_dim")
    rope = c.number("qk_rope_head_dim")
    value = c.number("v_head_dim")
    q_rank = c.maybe("q_lora_rank")
    width = c.number("intermediate_size")
    bias = c.flag("attention_bias", default=False)
    routed = c.number("n_routed_experts", default=0, least=0)
    expert_width = c.number("moe_intermediate_size") if routed else 0
    experts = Experts(
        hidden,
        count=routed,
        top_k=c.number("num_experts_per_tok") if routed else 0,
        width=expert_width,
        shared_width=c.number("n_shared_experts", default=0, least=0) * expert_width,
        gate_element=4 if c.get("model_type") == "glm4_moe_lite" else None,
        correction=c.get("topk_method") == "noaux_tc",
    )
    is_routed = _routed_layers(c, routed)

    shares = _sharing_layers(c)
    indexer: int | None = None
    if c.get("index_topk") is not None:
        key = c.number("index_head_dim")
        indexer = key + key // 128 * 4
        if q_rank is None:
            raise SizingError(f"{c.where}: index_topk without q_lora_rank is not a known layout.")

    def mixer(i: int, p: str) -> Mixer:
        p = f"{p}.self_attn"
        weights = []
        if q_rank is None:
            weights.append(Weight(f"{p}.q_proj", heads * (nope + rope), hidden, "out", "linear"))
        else:
            weights += [
                Weight(f"{p}.q_a_proj", q_rank, hidden, "whole", "linear", bias=bias),
                Weight(f"{p}.q_a_layernorm", q_rank),
                Weight(f"{p}.q_b_proj", heads * (nope + rope), q_rank, "out", "linear"),
            ]
        weights += [
            Weight(
                f"{p}.kv_a_proj_with_mqa",
                rank + rope,
                hidden,
                "whole",
                "linear",
                bias=bias,
            ),
            Weight(f"{p}.kv_a_layernorm", rank),
            Weight(f"{p}.kv_b_proj", heads * (nope + value), rank, "out", "linear"),
            Weight(f"{p}.o_proj", hidden, heads * value, "in", "linear", bias=bias),
        ]
        if indexer is not None and q_rank is not None:
            n = c.number("index_n_heads")
            key = c.number("index_head_dim")
            weights += [
                Weight(f"{p}.indexer.wq_b", n * key, q_rank, "whole", "linear"),
                # wk is dequantised on loading and joined with weights_proj.
                Weight(f"{p}.indexer.wk_weights_proj", key + n, hidden),
                Weight(f"{p}.indexer.k_norm", 2 * key, element=4),
            ]
        qkv = heads * (nope + rope) + (rank + rope)
        cache = Latent(
            rank + rope, indexer, shares=indexer is not None and shares(i), query=q_rank or 0
        )
        return Mixer(cache, weights, qkv, out=heads * value)

    return decoder(
        c,
        top,
        "deepseek",
        hidden=hidden,
        heads=heads,
        mixer=mixer,
        mlp=lambda i, p: experts.mlp(f"{p}.mlp", routed=is_routed(i), width=width),
        rotary=[rotary(rotary_positions(c), rope)],
        divide=[("MLP width", width), *([("expert width", expert_width)] if routed else [])],
        mtp=True,
        latent_heads=heads,
        latent_up=(nope + value) * rank,
        latent_rank=rank,
        index_topk=c.number("index_topk") if indexer is not None else 0,
    )


def _sharing_layers(c: Keys) -> Callable[[int], bool]:
    """Whether a layer uses the indices of one before it: deepseek_v2.py, IndexCache."""
    count = c.number("num_hidden_layers")
    every = c.number("index_topk_freq", default=1)
    offset = c.number("index_skip_topk_offset", default=2, least=0)
    pattern = c.get("index_topk_pattern")
    if pattern is not None and not isinstance(pattern, str | list):
        raise SizingError(f"{c.where}: index_topk_pattern: F and S are wanted, not {pattern!r}.")

    def shares(i: int) -> bool:
        if i >= count:
            return False  # MTP layers choose for themselves
        if pattern is not None:
            return i < len(pattern) and pattern[i] == "S"
        return max(i - offset + 1, 0) % every != 0

    return shares


def _routed_layers(c: Keys, experts: int) -> Callable[[int], bool]:
    """Whether a layer is routed: by mlp_layer_types, else from first_k_dense_replace on."""
    first = c.number("first_k_dense_replace", default=0, least=0)
    every = c.number("moe_layer_freq", default=1)
    types = c.names("mlp_layer_types") or []

    def routed(i: int) -> bool:
        if i >= len(types):
            return experts > 0 and i >= first and i % every == 0
        if types[i] not in ("dense", "sparse"):
            raise SizingError(
                f"{c.where}: mlp_layer_types: {types[i]!r} is a kind of layer that is not "
                "known here."
            )
        return types[i] == "sparse"

    return routed
