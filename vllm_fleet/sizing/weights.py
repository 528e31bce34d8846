"""Bytes of weights on each rank, as 'Model loading took' prints them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from .allocator import Allocator
from .arch import Layer, Model, Weight
from .errors import RefusedError, SizingError
from .kvcache import cdiv
from .quant import PLAIN, Quantisation, Scheme

ELEMENT = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "float32": 4.0,
    "float": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
}
#: vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE
VOCAB_PADDING = 64


@dataclass(frozen=True)
class Parallel:
    """How a model is spread over cards."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @property
    def experts_over(self) -> int:
        """Cards that experts are divided over: whole ones with EP, else each of them.

        FusedMoEParallelConfig.make
        """
        return self.tp * self.dp


def element_bytes(dtype: str) -> float:
    """Bytes of one element of a torch dtype."""
    name = dtype.removeprefix("torch.").lower()
    if name not in ELEMENT:
        raise SizingError(f"dtype {dtype!r} is not known: auto, bfloat16, float16 or float32.")
    return ELEMENT[name]


def check_split(model: Model, parallel: Parallel) -> None:
    """Refuses sizes that vLLM's layers refuse: TP must divide heads and widths."""
    tp = parallel.tp
    for what, number in model.divide:
        if what == "KV heads or more":
            continue
        if "expert" in what and parallel.expert_parallel:
            continue
        if "expert" in what and parallel.dp > 1 and number % parallel.experts_over:
            raise RefusedError(
                f"tensor x data parallel size {tp} x {parallel.dp} does not divide the {number} "
                f"{what} of {model.architecture}; use enable-expert-parallel, or fewer."
            )
        if number and number % tp:
            good = [n for n in (1, 2, 4, 8, 16) if all(v % n == 0 for _, v in model.divide if v)]
            raise RefusedError(
                f"tensor parallel size {tp} does not divide the {number} {what} of "
                f"{model.architecture}; possible are {', '.join(map(str, good))}."
            )
    for layer in model.layers:
        heads = getattr(layer.cache, "kv_heads", None)
        if heads is not None and heads % tp and tp % heads:
            raise RefusedError(
                f"tensor parallel size {tp} neither divides nor is a multiple of the {heads} KV "
                f"heads of layer {layer.index}."
            )
    if parallel.pp > len(model.layers):
        raise RefusedError(
            f"pipeline parallel size {parallel.pp} is more than the {len(model.layers)} layers."
        )
    if parallel.dcp > 1:
        kv = (
            1
            if model.latent
            else max((getattr(layer.cache, "kv_heads", 0) for layer in model.layers), default=1)
        )
        # config/parallel.py, config/model.py: verify_with_parallel_config
        if tp % parallel.dcp or (not model.latent and (tp <= kv or tp // kv < parallel.dcp)):
            raise RefusedError(
                f"decode context parallel size {parallel.dcp} needs KV heads that are "
                f"replicated: tensor parallel size {tp} over {kv} KV heads leaves "
                f"{max(tp // kv, 1)} copies. Lower it."
            )


def rank_layers(count: int, pp: int) -> list[range]:
    """Layers of each pipeline rank: distributed/utils.get_pp_indices.

    Left-over layers go to the ranks before the last, from the back, as the last one has the head.
    """
    sizes = [count // pp] * pp
    for i in range(2, count % pp + 2):
        sizes[-i] += 1
    ranges, start = [], 0
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return ranges


@dataclass(frozen=True)
class Card:
    """What of a card changes how weights are kept."""

    capability: tuple[int, int] = (9, 0)

    @property
    def fp8(self) -> bool:
        """Whether it computes in FP8; else Marlin keeps FP8 weights and widens block scales."""
        return self.capability >= (8, 9)


def shard(weight: Weight, parallel: Parallel) -> tuple[int, int, float]:
    """Rows, columns and count of a weight on one rank of a TP group."""
    tp = parallel.experts_over if weight.role == "expert" else parallel.tp
    out, inner, count = weight.out, weight.inner, float(weight.count)
    if weight.role == "expert" and parallel.expert_parallel:
        return out, inner, cdiv(weight.count, parallel.experts_over)
    if weight.split == "out":
        out = cdiv(out, tp)
    elif weight.split == "in":
        inner = cdiv(inner, tp)
    elif weight.split == "kv":
        out = out // weight.heads * max(weight.heads // tp, 1)
    elif weight.split == "vocab":
        padded = cdiv(out, VOCAB_PADDING) * VOCAB_PADDING
        out = cdiv(padded, tp)
    return out, inner, count


def _mxfp4(out: int, inner: int, weight: Weight, card: Card, minor: int) -> float:
    """GPT-OSS experts: padded as the kernel of the card wants (oracle/mxfp4.py)."""
    gate_up = weight.split == "out"
    width, hidden = (out // 2, inner) if gate_up else (inner, out)
    if card.capability[0] >= 10 and card.capability[0] < 12:
        width, hidden = cdiv(width, 256) * 256, cdiv(hidden, 256) * 256
    elif card.capability[0] == 9:
        width = cdiv(width, 64) * 64
        rows, columns = (2 * width, hidden) if gate_up else (hidden, width)
        # triton_kernels: Hopper's value layout in tiles of 64 packed bytes (of 256 before
        # 0.18), its scale layout in tiles of 256 rows and 2 columns.
        tile = 64 if minor >= 18 else 256
        packed = cdiv(columns // 2, tile) * tile
        scales = cdiv(rows, 256) * 256 * cdiv(cdiv(columns, 32), 2) * 2
        return rows * packed + scales
    else:  # Marlin
        width, hidden = cdiv(width, 128) * 128, cdiv(hidden, 256) * 256
    rows, columns = (2 * width, hidden) if gate_up else (hidden, width)
    return Scheme("mxfp4", 4, 32).weight_bytes(rows, columns, 2)


def weight_bytes(
    weight: Weight,
    parallel: Parallel,
    quant: Quantisation,
    element: float,
    card: Card,
    minor: int = 21,
) -> float:
    """Bytes of one weight on one rank."""
    out, inner, count = shard(weight, parallel)
    scheme = quant.scheme(weight.name, weight.role)
    size = weight.element if weight.element is not None else element
    if scheme.kind == "mxfp4" and weight.role == "expert":
        total = _mxfp4(out, inner, weight, card, minor) * count
    else:
        if scheme.kind == "fp8" and scheme.block and not card.fp8:
            # marlin_utils_fp8: block scales become one for each row and 128 columns, 16 bit.
            total = (out * inner + 2 * out * cdiv(inner, scheme.block[1])) * count
        else:
            total = scheme.weight_bytes(out, inner, size) * count
    if weight.bias:
        total += out * element * count
    return total


def _latent_copies(
    model: Model, layer: Layer, parallel: Parallel, quant: Quantisation, element: float
) -> float:
    """MLA keeps W_UK and W_UV apart; of a quantised kv_b_proj they are 16-bit copies.

    attention/mla_attention.py: process_weights_after_loading (views when not quantised).
    """
    if not model.latent_heads:
        return 0.0
    name = f"model.layers.{layer.index}.self_attn.kv_b_proj"
    if quant.scheme(name, "linear") == PLAIN:
        return 0.0
    return cdiv(model.latent_heads, parallel.tp) * model.latent_up * element


_FUSED = (
    (re.compile(r"\.(q|k|v)_proj$"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"),
    (re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)$"), ".fused_qkv_a_proj"),
    (re.compile(r"\.in_proj_(qkv|z)$"), ".in_proj_qkvz"),
)


def fused_name(weight: Weight) -> str:
    """The parameter that vLLM joins a weight into (packed_modules_mapping)."""
    return f"{weight.name}.{weight.split}" if weight.role == "expert" else _fused(weight.name)


@lru_cache(maxsize=16384)
def _fused(name: str) -> str:
    for pattern, joined in _FUSED:
        whole, found = pattern.subn(joined, name)
        if found:
            return whole
    return name


@dataclass(frozen=True)
class RankWeights:
    """Weights of one pipeline rank: bytes on each of its cards."""

    layers: float
    embedding: float
    head: float
    vision: float
    draft: float
    other: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.layers + self.embedding + self.head + self.vision + self.draft + self.other


def rank_weights(
    model: Model,
    parallel: Parallel,
    quant: Quantisation,
    *,
    dtype: str,
    card: Card,
    minor: int = 21,
    draft: bool = False,
    vision: bool = True,
) -> tuple[RankWeights, ...]:
    """Weights of each pipeline rank."""
    element = element_bytes(dtype)

    def total(weights: Iterable[Weight], spread: Parallel = parallel) -> float:
        """Allocates the parameters that vLLM makes of them."""
        joined: dict[str, float] = {}
        for weight in weights:
            size = weight_bytes(weight, spread, quant, element, card, minor)
            name = fused_name(weight)
            joined[name] = joined.get(name, 0.0) + size
        before = allocator.allocated
        for size in joined.values():
            allocator.allocate(size)
        return allocator.allocated - before

    def copies(layer: Layer) -> float:
        size = _latent_copies(model, layer, parallel, quant, element)
        before = allocator.allocated
        if size:
            allocator.allocate(size)
        return allocator.allocated - before

    allocator = Allocator()
    ranks = []
    spans = rank_layers(len(model.layers), parallel.pp)
    for rank, span in enumerate(spans):
        first, last = rank == 0, rank == len(spans) - 1
        allocator = Allocator()
        layers = sum(total(model.layers[i].weights) + copies(model.layers[i]) for i in span)
        tied_copy = model.head is None and last
        embedding = total((model.embedding,)) if first or tied_copy else 0.0
        if first:
            embedding += total(model.first)
        head = 0.0
        if model.head is not None and model.generates and last:
            head = total((model.head,))  # adapters.py: a model for pooling has none
        tower = 0.0
        if vision and model.vision is not None and first:
            split = parallel if model.vision.split else replace(parallel, tp=1)
            tower = total(model.vision.weights, split)
        drafted = 0.0
        if draft and last:
            drafted = sum(total(d.weights) + copies(d) for d in model.draft)
            if not first:
                # llm_base_proposer.py: the target's embedding is on another rank
                drafted += total((model.embedding,))
        other = total(model.every) + (total(model.others) if last else 0.0)
        ranks.append(RankWeights(layers, embedding, head, tower, drafted, other))
    return tuple(ranks)
