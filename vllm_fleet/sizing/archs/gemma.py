"""Gemma 2, 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..arch import Model, Weight
from ..reader import Keys
from .decoder import Experts, Heads, Mixer, Mlp, decoder, dense, gated_mlp
from .parts import max_len, norms, rotary, windows
from .vision import gemma4_tower, seeing, siglip_tower

#: Class defaults that published config.json files leave out (Gemma 3's do).
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
}


def gemma2(c: Keys, top: Keys) -> Model:
    """gemma2.py: four norms a layer, every second layer windowed"""
    count = c.number("num_hidden_layers")
    width = c.number("sliding_window")
    each: list[int | None] = (
        windows(c, count)
        if c.names("layer_types") is not None
        else [width if i % 2 == 0 else None for i in range(count)]
    )
    return dense(c, top, "gemma2", norms_each=4, windows=each, tie=True)


def gemma3(c: Keys, top: Keys) -> Model:
    """gemma3.py: four norms a layer, norms on q and k, five windows to one full layer"""
    count = c.number("num_hidden_layers")
    pattern = c.maybe("sliding_window_pattern", "_sliding_window_pattern")
    each = windows(c, count, pattern=pattern)
    bias = c.flag("attention_bias", default=False)
    model = dense(c, top, "gemma3", bias=bias, qk_norm=True, norms_each=4, windows=each, tie=True)
    # Two tables: one for local, one for global layers.
    table = rotary(model.max_len, Heads.read(c).head)
    eye = top.inner("vision_config")
    return replace(
        model,
        every=(table, table),
        vision=siglip_tower(eye, model.hidden)
        if eye is not None and "text_config" in top.data
        else None,
    )


def gemma4(c: Keys, top: Keys) -> Model:
    """gemma4.py: wide global heads, K reused as V, a dense and a routed MLP side by side"""
    hidden = c.number("hidden_size")
    heads = c.number("num_attention_heads")
    kv = c.number("num_key_value_heads")
    head = c.number("head_dim")
    count = c.number("num_hidden_layers")
    width = c.number("intermediate_size")
    vocab = c.number("vocab_size")
    each = windows(c, count)
    wide = c.number("global_head_dim", default=head)
    bias = c.flag("attention_bias", default=False)
    experts = _gemma4_experts(c, hidden)
    shared = c.number("num_kv_shared_layers", default=0, least=0)
    per_layer = c.number("hidden_size_per_layer_input", default=0, least=0)
    narrow = Heads(heads, kv, head, hidden, bias=bias, out_bias=bias, qk_norm=True)
    kv_of_wide = (
        c.number("num_global_key_value_heads", default=kv)
        if c.flag("attention_k_eq_v", default=False)
        else kv
    )
    whole = replace(narrow, kv=kv_of_wide, head=wide)

    def borrowed(i: int) -> bool:
        return i >= count - shared

    def mixer(i: int, p: str) -> Mixer:
        window = each[i]
        attention = whole if window is None else narrow
        found = attention.mixer(f"{p}.self_attn", window=window)
        return replace(found, cache=None) if borrowed(i) else found

    def mlp(i: int, p: str) -> Mlp:
        double = borrowed(i) and c.flag("use_double_wide_mlp", default=False)
        found = gated_mlp(f"{p}.mlp", hidden, width * (2 if double else 1))
        weights = [*found.weights]
        if experts:
            routed = experts.mlp(f"{p}.moe")
            weights += routed.weights
            weights.append(Weight(f"{p}.router.scale", hidden + experts.count))
            found = replace(routed, width=found.width)
        if per_layer:
            weights += [
                Weight(f"{p}.per_layer_input_gate", per_layer, hidden, "whole", "linear"),
                Weight(f"{p}.per_layer_projection", hidden, per_layer, "whole", "linear"),
                norms(f"{p}.per_layer", hidden, 1),
            ]
        return replace(found, weights=weights)

    first = []
    if per_layer:
        rows = c.number("vocab_size_per_layer_input", default=vocab)
        first = [
            Weight("model.embed_tokens_per_layer", rows, per_layer * count, "vocab", "embedding"),
            Weight("model.per_layer_model_projection", per_layer * count, hidden, "out", "linear"),
        ]
    positions = max_len(c)
    model = decoder(
        c,
        top,
        "gemma4",
        hidden=hidden,
        heads=heads,
        mixer=mixer,
        mlp=mlp,
        rotary=[rotary(positions, head), rotary(positions, wide)],
        divide=[("MLP width", width)],
        norms_each=7 if experts else 4,
        tie=True,
        first=tuple(first),
    )
    return seeing(model, top, gemma4_tower) if "text_config" in top.data else model


def _gemma4_experts(c: Keys, hidden: int) -> Experts | None:
    """The routed MLP beside the dense one, in the models that have it."""
    if not c.flag("enable_moe_block", default=False) and not c.flag(
        "use_second_mlp_block", default=False
    ):
        return None
    return Experts(
        hidden,
        count=c.number("num_experts"),
        top_k=c.number("top_k_experts", "num_experts_per_tok"),
        width=c.number("moe_intermediate_size", "expert_intermediate_size"),
        gate="router.proj",
    )
