"""Llama, Mistral and Mixtral."""

from __future__ import annotations

from ..arch import Model
from ..reader import Keys
from .decoder import Experts, Heads, decoder, dense
from .parts import max_len, rotary


def llama(c: Keys, top: Keys) -> Model:
    """llama.py"""
    bias = c.flag("attention_bias", default=False) or c.flag("bias", default=False)
    mlp_bias = c.flag("mlp_bias", default=False)
    return dense(c, top, "llama", bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def mistral(c: Keys, top: Keys) -> Model:
    """mistral.py: every layer has the window, where the config has one"""
    count = c.number("num_hidden_layers")
    return dense(c, top, "mistral", windows=[c.maybe("sliding_window")] * count)


def mixtral(c: Keys, top: Keys) -> Model:
    """mixtral.py"""
    a = Heads.read(c)
    experts = Experts(
        a.hidden,
        count=c.number("num_local_experts"),
        width=c.number("intermediate_size"),
        top_k=c.number("num_experts_per_tok"),
    )
    window = c.maybe("sliding_window")
    return decoder(
        c,
        top,
        "mixtral",
        hidden=a.hidden,
        heads=a.heads,
        mixer=lambda i, p: a.mixer(f"{p}.self_attn", window=window),
        mlp=lambda i, p: experts.mlp(f"{p}.block_sparse_moe"),
        rotary=[rotary(max_len(c), a.head)],
        divide=[("expert width", experts.width)],
    )
