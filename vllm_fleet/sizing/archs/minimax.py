"""MiniMax-M2."""

from __future__ import annotations

from ..arch import Model, Weight
from ..reader import Keys
from .decoder import Experts, Heads, Mixer, decoder
from .parts import max_len, rotary


def minimax_m2(c: Keys, top: Keys) -> Model:
    """minimax_m2.py: fp32 gate, q and k norms over all heads of a card"""
    a = Heads.read(c, bias=c.flag("attention_bias", default=False))
    experts = Experts(
        a.hidden,
        count=c.number("num_local_experts"),
        width=c.number("intermediate_size"),
        top_k=c.number("num_experts_per_tok"),
        gate_element=4,
        correction=c.flag("use_routing_bias", default=False),
    )

    def mixer(i: int, p: str) -> Mixer:
        return a.mixer(
            f"{p}.self_attn",
            Weight(f"{p}.self_attn.q_norm", a.heads * a.head, 1, "out"),
            Weight(f"{p}.self_attn.k_norm", a.kv * a.head, 1, "kv", heads=a.kv),
        )

    ignored = "MTP modules of MiniMax-M2 are not loaded by vLLM"
    return decoder(
        c,
        top,
        "minimax_m2",
        hidden=a.hidden,
        heads=a.heads,
        mixer=mixer,
        mlp=lambda i, p: experts.mlp(f"{p}.block_sparse_moe"),
        rotary=[rotary(max_len(c), c.number("rotary_dim", default=a.head))],
        divide=[("expert width", experts.width)],
        warnings=(ignored,) if c.get("use_mtp") else (),
    )
