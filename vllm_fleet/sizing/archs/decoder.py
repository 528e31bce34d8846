"""A decoder put together: what mixes tokens, the MLP after it, the layer, the whole model.

A builder reads its config, says which Mixer and which Mlp each layer has, and calls ``decoder``.
``dense`` is the whole of it for llama and what derives from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..arch import Attention, Latent, Layer, Model, State, Weight
from ..errors import SizingError
from ..reader import Keys
from .parts import max_len, norms, rotary, rotary_positions, rotary_width, tied


@dataclass(frozen=True)
class Mixer:
    """What mixes tokens in a layer. Widths are per token and before TP, as in Layer."""

    cache: Attention | Latent | State | None
    weights: Sequence[Weight]
    qkv: int
    out: int


@dataclass(frozen=True)
class Heads:
    """Attention with a K and a V: heads, KV heads, width of a head, width of the model."""

    heads: int
    kv: int
    head: int
    hidden: int
    bias: bool = False  # of q, k and v
    out_bias: bool = False
    qk_norm: bool = False  # over the width of a head
    q_factor: int = 1  # 2: q carries a gate of its own size

    @classmethod
    def read(
        cls,
        c: Keys,
        *,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        q_factor: int = 1,
    ) -> Heads:
        """From the usual keys; head_dim may be missing."""
        hidden = c.number("hidden_size")
        heads = c.number("num_attention_heads")
        kv = c.number("num_key_value_heads", default=heads)
        head = c.maybe("head_dim")
        if head is None:
            if hidden % heads:
                raise SizingError(
                    f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads "
                    f"{heads} and head_dim is missing."
                )
            head = hidden // heads
        return cls(heads, kv, head, hidden, bias, out_bias, qk_norm, q_factor)

    def mixer(self, p: str, *extra: Weight, window: int | None = None) -> Mixer:
        """Attention of one layer, with ``extra`` weights beside the projections."""
        heads, kv, head, hidden = self.heads, self.kv, self.head, self.hidden
        q = heads * head * self.q_factor
        weights = [
            Weight(f"{p}.q_proj", q, hidden, "out", "linear", bias=self.bias),
            Weight(f"{p}.k_proj", kv * head, hidden, "kv", "linear", bias=self.bias, heads=kv),
            Weight(f"{p}.v_proj", kv * head, hidden, "kv", "linear", bias=self.bias, heads=kv),
            Weight(f"{p}.o_proj", hidden, heads * head, "in", "linear", bias=self.out_bias),
        ]
        if self.qk_norm:
            weights.append(Weight(f"{p}.qk_norm", 2 * head))
        return Mixer(
            Attention(kv, head, head, window),
            (*weights, *extra),
            qkv=q + 2 * kv * head,
            out=heads * head,
        )


@dataclass(frozen=True)
class Mlp:
    """The MLP of one layer, dense or routed. Widths as in Layer."""

    weights: Sequence[Weight]
    width: int = 0
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    shared_width: int = 0


def gated_mlp(p: str, hidden: int, width: int, *, bias: bool = False) -> Mlp:
    """A dense MLP, whose gate is as wide as it."""
    weights = (
        Weight(f"{p}.gate_proj", width, hidden, "out", "linear", bias=bias),
        Weight(f"{p}.up_proj", width, hidden, "out", "linear", bias=bias),
        Weight(f"{p}.down_proj", hidden, width, "in", "linear", bias=bias),
    )
    return Mlp(weights, width)


@dataclass(frozen=True)
class Experts:
    """The MLPs of a model with experts; ``width`` is that of one expert."""

    hidden: int
    count: int
    top_k: int
    width: int
    shared_width: int = 0  # of the expert that every token goes through, 0 without one
    shared: str = "shared_experts"  # its name
    shared_gate: bool = False  # whether it is weighed by a gate of its own
    gate: str = "gate"  # the router's name
    gate_element: float | None = None  # bytes of an element, when not the model's dtype
    correction: bool = False  # the fp32 bias of noaux_tc routing
    biases: bool = False  # of the router and of the experts

    def mlp(self, p: str, *, routed: bool = True, width: int = 0) -> Mlp:
        """The MLP of a routed layer, or a dense one of ``width`` in a model with experts."""
        hidden = self.hidden
        if not routed:
            dense_one = gated_mlp(p, hidden, width)
            return Mlp(dense_one.weights, width, top_k=self.top_k, expert_width=self.width)
        n, b = self.count, self.biases
        weights = [
            Weight(f"{p}.{self.gate}", n, hidden, element=self.gate_element, bias=b),
            Weight(f"{p}.experts", 2 * self.width, hidden, "out", "expert", n, bias=b),
            Weight(f"{p}.experts", hidden, self.width, "in", "expert", n, bias=b),
        ]
        if self.correction:
            weights.append(Weight(f"{p}.correction", n, element=4))
        if self.shared_width:
            weights += gated_mlp(f"{p}.{self.shared}", hidden, self.shared_width).weights
            if self.shared_gate:
                weights.append(Weight(f"{p}.{self.shared}_gate", 1, hidden))
        return Mlp(
            weights,
            experts=n,
            top_k=self.top_k,
            expert_width=self.width,
            shared_width=self.shared_width,
        )


def decoder_layer(i: int, mixer: Mixer, mlp: Mlp, *extra: Weight) -> Layer:
    """Layer ``i``; ``extra``: its norms and whatever else it holds."""
    return Layer(
        i,
        mixer.cache,
        (*mixer.weights, *mlp.weights, *extra),
        mlp=mlp.width,
        qkv=mixer.qkv,
        attention_out=mixer.out,
        experts=mlp.experts,
        top_k=mlp.top_k,
        expert_width=mlp.expert_width,
        shared_width=mlp.shared_width,
    )


def decoder(
    c: Keys,
    top: Keys,
    family: str,
    *,
    hidden: int,
    heads: int,
    mixer: Callable[[int, str], Mixer],
    mlp: Callable[[int, str], Mlp],
    rotary: Sequence[Weight],
    divide: Sequence[tuple[str, int]],
    count: int | None = None,
    norms_each: int = 2,
    mtp: bool = False,
    vocab: int | None = None,
    positions: int | None = None,
    prefix: str = "model",
    layers: str | None = None,
    embedding: str = "embed_tokens",
    head: str = "lm_head",
    tie: bool = False,
    **more: Any,
) -> Model:
    """A model of layers, with embedding, final norm, and a head where that is not tied.

    ``mixer`` and ``mlp`` give those of a layer from its number and the prefix of its weights.
    ``count``, ``vocab`` and ``positions`` are read from the usual keys where not given.
    ``divide`` is what TP must divide besides the attention heads. ``mtp``: the config counts MTP
    layers too. ``tie`` is the model class's default; ``more`` are fields of Model.
    """
    if count is None:
        count = c.number("num_hidden_layers")
    if vocab is None:
        vocab = c.number("vocab_size")
    if positions is None:
        positions = max_len(c)
    at = layers or f"{prefix}.layers"

    def layer(i: int, *extra: Weight) -> Layer:
        p = f"{at}.{i}"
        return decoder_layer(i, mixer(i, p), mlp(i, p), norms(p, hidden, norms_each), *extra)

    if mtp:
        # deepseek_mtp.py, glm4_moe_mtp.py: norms and a joining projection more; embedding and
        # head are the target model's.
        drafts = c.number("num_nextn_predict_layers", default=0, least=0)
        more["draft"] = tuple(
            layer(
                i,
                Weight(f"{at}.{i}.eh_proj", hidden, 2 * hidden),
                norms(f"{at}.{i}.mtp", hidden, 3),
            )
            for i in range(count, count + drafts)
        )
    return Model(
        architecture="",
        family=family,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layer(i) for i in range(count)),
        embedding=Weight(f"{prefix}.{embedding}", vocab, hidden, "vocab", "embedding"),
        head=None if tied(c, top, tie) else Weight(head, vocab, hidden, "vocab", "head"),
        others=(norms(prefix, hidden, 1),),
        every=tuple(rotary),
        max_len=positions,
        divide=(("attention heads", heads), *divide),
        **more,
    )


def dense(
    c: Keys,
    top: Keys,
    family: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    norms_each: int = 2,
    windows: Sequence[int | None] | None = None,
    tie: bool = False,
    rotary_share: float = 1.0,
) -> Model:
    """Attention and a gated MLP: llama.py and what derives from it."""
    a = Heads.read(c, bias=bias, out_bias=out_bias, qk_norm=qk_norm)
    width = c.number("intermediate_size")
    return decoder(
        c,
        top,
        family,
        hidden=a.hidden,
        heads=a.heads,
        mixer=lambda i, p: a.mixer(f"{p}.self_attn", window=windows[i] if windows else None),
        mlp=lambda i, p: gated_mlp(f"{p}.mlp", a.hidden, width, bias=mlp_bias),
        rotary=[rotary(rotary_positions(c), rotary_width(c, a.head, rotary_share))],
        divide=[("MLP width", width)],
        norms_each=norms_each,
        tie=tie,
    )
