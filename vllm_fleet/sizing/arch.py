"""Parts a model is made of: weights, attention layers, recurrent states. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Weight:
    """One parameter matrix (or ``count`` like ones), whole, before it is split over cards.

    ``split``: "out" and "in" are column and row parallel, "kv" is out by KV heads (replicated
    when there are fewer heads than cards), "vocab" is padded to 64 rows and split, "whole" is
    on every card, "experts" are split inside each expert (or by expert, with EP).
    ``role``: linear (quantised where the model says so), expert, head, embedding, plain
    (never quantised).
    """

    name: str
    out: int
    inner: int = 1
    split: str = "whole"
    role: str = "plain"
    count: int = 1
    bias: bool = False
    heads: int = 0  # KV heads, for split "kv"
    element: float | None = None  # bytes of one element, when not the model's dtype


@dataclass(frozen=True)
class Attention:
    """Full or windowed attention with a K and a V of its own."""

    kv_heads: int
    head: int
    head_v: int
    window: int | None = None


@dataclass(frozen=True)
class Latent:
    """MLA: one latent vector a token; ``indexer``: bytes of a DSA key, when the layer has one.

    ``query``: rank of the query's own compression, 0 where it has none. ``shares``: it uses the
    choice of a layer before it (IndexCache), and from vLLM 0.24 on has no indexer of its own.
    """

    width: int
    indexer: int | None = None
    shares: bool = False
    query: int = 0


@dataclass(frozen=True)
class State:
    """Gated delta net: a convolution window and a matrix per value head."""

    key_heads: int
    value_heads: int
    key_head: int
    value_head: int
    kernel: int
    float32: bool  # the matrix; the window is kept in the model's dtype


@dataclass(frozen=True)
class Layer:
    """One decoder layer. ``cache`` is None where it reuses another layer's."""

    index: int
    cache: Attention | Latent | State | None
    weights: tuple[Weight, ...]
    #: widths (per token, before TP) of what is alive at once in this layer's MLP and attention
    mlp: int = 0
    qkv: int = 0
    attention_out: int = 0
    experts: int = 0  # routed experts, 0 when dense
    top_k: int = 0
    expert_width: int = 0
    shared_width: int = 0


@dataclass(frozen=True)
class Vision:
    """A vision tower: its weights, and widths for the encoder's own profile run."""

    weights: tuple[Weight, ...]
    hidden: int
    alive: int  # widths alive at once in a block's MLP, before TP
    merge: int  # patches (one side) that become one token
    item: int  # tokens of the largest image
    split: bool = True  # over TP; a tower run by transformers is whole on every card
    levels: int = 1  # feature levels handed to the language model (deepstack)


@dataclass(frozen=True)
class Model:
    """A model as vLLM would build it."""

    architecture: str
    family: str
    hidden: int
    vocab: int
    heads: int
    layers: tuple[Layer, ...]
    embedding: Weight
    head: Weight | None  # None: tied to the embedding
    others: tuple[Weight, ...] = ()  # on the last rank: final norm
    every: tuple[Weight, ...] = ()  # on every rank: rotary tables and the like
    first: tuple[Weight, ...] = ()  # on the first rank: per-layer embeddings
    vision: Vision | None = None
    draft: tuple[Layer, ...] = ()  # MTP layers, loaded only for speculative decoding
    max_len: int = 0
    dtype: str = "bfloat16"
    #: places that must divide by TP: (what, number)
    divide: tuple[tuple[str, int], ...] = ()
    latent_heads: int = 0  # MLA: heads * (nope + v) * rank is copied when kv_b is quantised
    latent_up: int = 0  # (nope + v) * rank
    latent_rank: int = 0
    index_topk: int = 0  # DSA: keys chosen for a token
    warnings: tuple[str, ...] = field(default=())
    generates: bool = True

    @property
    def moe(self) -> bool:
        """Whether any layer has routed experts."""
        return any(layer.experts for layer in self.layers)

    @property
    def hybrid(self) -> bool:
        """Whether any layer keeps a recurrent state."""
        return any(isinstance(layer.cache, State) for layer in self.layers)

    @property
    def indexed(self) -> bool:
        """Whether attention is sparse, chosen by an indexer (DSA)."""
        return any(
            isinstance(layer.cache, Latent) and layer.cache.indexer is not None
            for layer in self.layers
        )

    @property
    def latent(self) -> bool:
        """Whether attention is MLA."""
        return any(isinstance(layer.cache, Latent) for layer in self.layers)
