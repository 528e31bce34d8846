"""Qwen 2 to 3.5: dense, routed, with gated delta nets, and those with eyes."""

from __future__ import annotations

from collections.abc import Callable

from ..arch import Layer, Model, State, Weight
from ..errors import SizingError
from ..reader import Keys
from .decoder import Experts, Heads, Mixer, decoder, decoder_layer, dense
from .parts import (
    layer_types,
    max_len,
    norms,
    rotary,
    rotary_positions,
    rotary_width,
    windows,
)
from .vision import qwen2_5_vl_tower, qwen2_vl_tower, qwen3_vl_tower, seeing

# Dense


def qwen2(c: Keys, top: Keys) -> Model:
    """qwen2.py: biases on q, k and v"""
    return dense(c, top, "qwen2", bias=True, windows=_windows(c))


def qwen2_vl(c: Keys, top: Keys) -> Model:
    """qwen2_vl.py"""
    return seeing(qwen2(c, top), top, qwen2_vl_tower)


def qwen2_5_vl(c: Keys, top: Keys) -> Model:
    """qwen2_5_vl.py"""
    return seeing(qwen2(c, top), top, qwen2_5_vl_tower)


def qwen3(c: Keys, top: Keys) -> Model:
    """qwen3.py: norms on q and k"""
    bias = c.flag("attention_bias", default=False)
    return dense(c, top, "qwen3", bias=bias, qk_norm=True, windows=_windows(c))


def qwen3_vl(c: Keys, top: Keys) -> Model:
    """qwen3_vl.py"""
    return seeing(qwen3(c, top), top, qwen3_vl_tower)


def _windows(c: Keys) -> list[int | None]:
    count = c.number("num_hidden_layers")
    if not c.flag("use_sliding_window", default=False) or c.get("sliding_window") is None:
        return [None] * count
    if c.names("layer_types") is not None:
        return windows(c, count)
    first = c.number("max_window_layers", default=count, least=0)
    if first != count:
        raise SizingError(
            f"{c.where}: a sliding window for some but not all layers (max_window_layers "
            f"{first} of {count}) is not served by vLLM for this model. Set "
            "use_sliding_window to false."
        )
    return [c.number("sliding_window")] * count


# Routed


def qwen2_moe(c: Keys, top: Keys) -> Model:
    """qwen2_moe.py"""
    return _moe(c, top, "qwen2_moe", bias=True, qk_norm=False, shared=True)


def qwen3_moe(c: Keys, top: Keys) -> Model:
    """qwen3_moe.py"""
    bias = c.flag("attention_bias", default=False)
    return _moe(c, top, "qwen3_moe", bias=bias, qk_norm=True, shared=False)


def qwen3_vl_moe(c: Keys, top: Keys) -> Model:
    """qwen3_vl_moe.py"""
    return seeing(qwen3_moe(c, top), top, qwen3_vl_tower)


def _moe(c: Keys, top: Keys, family: str, *, bias: bool, qk_norm: bool, shared: bool) -> Model:
    a = Heads.read(c, bias=bias, qk_norm=qk_norm)
    count = c.number("num_hidden_layers")
    experts = _experts(c, a.hidden, shared=shared)
    routed = _routed_layers(c, count, experts.count)
    width = 0 if all(routed) else c.number("intermediate_size")
    return decoder(
        c,
        top,
        family,
        hidden=a.hidden,
        heads=a.heads,
        mixer=lambda i, p: a.mixer(f"{p}.self_attn"),
        mlp=lambda i, p: experts.mlp(f"{p}.mlp", routed=routed[i], width=width),
        rotary=[rotary(rotary_positions(c), a.head)],
        divide=[("expert width", experts.width)],
    )


def _experts(c: Keys, hidden: int, *, shared: bool) -> Experts:
    return Experts(
        hidden,
        count=c.number("num_experts"),
        width=c.number("moe_intermediate_size"),
        top_k=c.number("num_experts_per_tok"),
        shared_width=c.number("shared_expert_intermediate_size", default=0, least=0)
        if shared
        else 0,
        shared="shared_expert",
        shared_gate=True,
    )


def _routed_layers(c: Keys, count: int, experts: int) -> list[bool]:
    """Which layers are routed: qwen3_moe.py (mlp_only_layers, decoder_sparse_step)."""
    dense_ones = c.get("mlp_only_layers", default=[])
    step = c.number("decoder_sparse_step", default=1)
    if not isinstance(dense_ones, list):
        raise SizingError(f"{c.where}: mlp_only_layers: a list is wanted, not {dense_ones!r}.")
    return [i not in dense_ones and experts > 0 and (i + 1) % step == 0 for i in range(count)]


# With gated delta nets


def qwen3_next(c: Keys, top: Keys) -> Model:
    """qwen3_next.py"""
    return _hybrid(c, top, "qwen3_next", routed=True)


def qwen3_5(c: Keys, top: Keys) -> Model:
    """qwen3_5.py"""
    return seeing(_hybrid(c, top, "qwen3_5", routed=False), top, qwen3_vl_tower)


def qwen3_5_moe(c: Keys, top: Keys) -> Model:
    """qwen3_5.py"""
    return seeing(_hybrid(c, top, "qwen3_5", routed=True), top, qwen3_vl_tower)


def _hybrid(c: Keys, top: Keys, family: str, *, routed: bool) -> Model:
    """qwen3_next.py, qwen3_5.py: three gated delta nets to one gated full attention"""
    a = Heads.read(
        c,
        bias=c.flag("attention_bias", default=False),
        qk_norm=True,
        q_factor=2 if c.flag("attn_output_gate", default=True) else 1,
    )
    hidden = a.hidden
    count = c.number("num_hidden_layers")
    types = layer_types(c, count)
    if types is None:
        every = c.number("full_attention_interval", default=4)
        types = [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)
        ]
    state, delta_net = _delta_net(c, hidden)
    experts = _experts(c, hidden, shared=True) if routed else Experts(hidden, 0, 0, 0)
    sparse = _routed_layers(c, count, experts.count)
    width = 0 if all(sparse) else c.number("intermediate_size")
    prefix = "model.language_model" if "text_config" in top.data else "model"
    # qwen3_next_mtp.py and qwen3_5_mtp.py make one MTP layer where the config counts none;
    # the config.json of Qwen3-Next does not.
    key = "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"
    drafts = c.number(key, default=1, least=0)

    def mixer(i: int, p: str) -> Mixer:
        if types[i] == "full_attention":
            return a.mixer(f"{p}.self_attn")
        if types[i] == "linear_attention":
            return delta_net(f"{p}.linear_attn")
        raise SizingError(
            f"{c.where}: layer_types: {types[i]!r} is a kind of layer that is not known here."
        )

    def draft(i: int) -> Layer:
        """An MTP layer: full attention, routed where the model is."""
        p = f"mtp.layers.{i}"
        return decoder_layer(
            count + i,
            a.mixer(f"{p}.self_attn"),
            experts.mlp(f"{p}.mlp", routed=routed, width=width),
            norms(p, hidden, 2),
            Weight("mtp.fc", hidden, 2 * hidden),
            norms("mtp", hidden, 3),
        )

    return decoder(
        c,
        top,
        family,
        hidden=hidden,
        heads=a.heads,
        mixer=mixer,
        mlp=lambda i, p: experts.mlp(f"{p}.mlp", routed=sparse[i], width=width),
        rotary=[rotary(max_len(c), rotary_width(c, a.head, 0.25))],
        divide=[
            ("linear key heads", state.key_heads),
            ("linear value heads", state.value_heads),
            ("expert width", experts.width) if routed else ("MLP width", width),
        ],
        prefix=prefix,
        draft=tuple(map(draft, range(drafts))),
    )


def _delta_net(c: Keys, hidden: int) -> tuple[State, Callable[[str], Mixer]]:
    """mamba/gdn_linear_attn.py: GatedDeltaNetAttention"""
    state = State(
        key_heads=c.number("linear_num_key_heads"),
        value_heads=c.number("linear_num_value_heads"),
        key_head=c.number("linear_key_head_dim"),
        value_head=c.number("linear_value_head_dim"),
        kernel=c.number("linear_conv_kernel_dim"),
        # Qwen3.5 configs ask for a float32 state; else it follows the model's dtype.
        float32=c.get("mamba_ssm_dtype") == "float32",
    )
    keys = state.key_heads * state.key_head
    values = state.value_heads * state.value_head

    def mixer(p: str) -> Mixer:
        weights = [
            Weight(f"{p}.in_proj_qkv", 2 * keys + values, hidden, "out", "linear"),
            Weight(f"{p}.in_proj_z", values, hidden, "out", "linear"),
            Weight(f"{p}.in_proj_ba", 2 * state.value_heads, hidden, "out", "linear"),
            Weight(f"{p}.conv1d", 2 * keys + values, state.kernel, "out"),
            Weight(f"{p}.dt_bias", state.value_heads, 1, "out"),
            Weight(f"{p}.A_log", state.value_heads, 1, "out", element=4),
            Weight(f"{p}.norm", state.value_head),
            Weight(f"{p}.out_proj", hidden, values, "in", "linear"),
        ]
        return Mixer(state, weights, qkv=2 * keys + 2 * values, out=values)

    return state, mixer
