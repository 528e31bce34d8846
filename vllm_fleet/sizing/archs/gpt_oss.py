"""gpt-oss."""

from __future__ import annotations

from ..arch import Model, Weight
from ..reader import Keys
from .decoder import Experts, Heads, Mixer, decoder
from .parts import rotary, rotary_positions


def gpt_oss(c: Keys, top: Keys) -> Model:
    """gpt_oss.py: biases everywhere, sinks, a window on every second layer"""
    a = Heads.read(c, bias=True, out_bias=True)
    experts = Experts(
        a.hidden,
        count=c.number("num_local_experts"),
        top_k=c.number("num_experts_per_tok", "experts_per_token"),
        width=c.number("intermediate_size"),
        gate="router",
        biases=True,
    )
    window = c.number("sliding_window")

    def mixer(i: int, p: str) -> Mixer:
        sinks = Weight(f"{p}.sinks", a.heads, 1, "out")
        return a.mixer(f"{p}.self_attn", sinks, window=window if i % 2 == 0 else None)

    return decoder(
        c,
        top,
        "gpt_oss",
        hidden=a.hidden,
        heads=a.heads,
        mixer=mixer,
        mlp=lambda i, p: experts.mlp(f"{p}.mlp"),
        rotary=[rotary(rotary_positions(c), a.head, 4)],
        divide=[("KV heads or more", a.kv), ("expert width", experts.width)],
    )
