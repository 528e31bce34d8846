"""Sizing: a config and a card in, what vLLM would print out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import memory
from .arch import Attention, Latent, Layer, Model, State
from .errors import RefusedError, SizingError
from .gpus import Gpu
from .headers import StoredWeights, stored_weights
from .kvcache import (
    GIB,
    Capacity,
    Limits,
    Pool,
    Spec,
    align_hybrid_block,
    capacity,
    group_layers,
    longest,
    pool,
)
from .models import build, check_version
from .quant import Quantisation, quantisation
from .rules import DEFAULT_VERSION, Rules, parse_version, rules
from .weights import (
    Card,
    Parallel,
    check_split,
    element_bytes,
    rank_layers,
    rank_weights,
)

DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}
KV_DTYPES = {
    "auto": None,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "fp8_ds_mla": 1.0,
    "int8_per_token_head": 1.0,
    "fp8_per_token_head": 1.0,
    "nvfp4": 0.5625,
}


@dataclass(frozen=True)
class Spread:
    """A figure with the range it may be in."""

    low: float
    high: float


@dataclass(frozen=True)
class Rank:
    """One pipeline rank's card, GiB."""

    layers: int
    weights_gib: float
    activation_gib: float
    non_torch_gib: float
    graphs_gib: float
    kv_cache_gib: float


@dataclass(frozen=True)
class Sizing:
    """What one server needs and offers, per card, as vLLM prints it."""

    fits: bool
    reason: str  # why it does not fit, or ""
    weights_gib: float
    kv_cache_gib: float
    kv_bytes_per_token: float
    kv_cache_tokens: int
    max_concurrency: float
    max_model_len: int
    max_model_len_max: int
    activation_gib: float
    non_torch_gib: float
    graphs_gib: float
    requested_gib: float
    blocks: int
    block_size: int
    spread: Mapping[str, Spread] = field(default_factory=dict)
    ranks: tuple[Rank, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The JSON of ``fleet size``."""
        return {
            "fits": self.fits,
            "weights_gib": round(self.weights_gib, 3),
            "kv_cache_gib": round(self.kv_cache_gib, 3),
            "kv_bytes_per_token": round(self.kv_bytes_per_token, 2),
            "kv_cache_tokens": self.kv_cache_tokens,
            "max_concurrency": round(self.max_concurrency, 2),
            "max_model_len_max": self.max_model_len_max,
            "warnings": list(self.warnings),
            "reason": self.reason,
            "max_model_len": self.max_model_len,
            "activation_gib": round(self.activation_gib, 3),
            "non_torch_gib": round(self.non_torch_gib, 3),
            "cuda_graphs_gib": round(self.graphs_gib, 3),
            "requested_gib": round(self.requested_gib, 3),
            "num_blocks": self.blocks,
            "block_size": self.block_size,
            "spread": {k: [round(v.low, 3), round(v.high, 3)] for k, v in self.spread.items()},
            "ranks": [{k: round(v, 3) for k, v in asdict(rank).items()} for rank in self.ranks],
            "settings": dict(self.settings),
        }


def _positive(name: str, value: int | None, *, least: int = 1) -> None:
    if value is not None and (isinstance(value, bool) or value < least):
        raise SizingError(f"{name}: {value} is less than {least}.")


def default_batch(
    gpu: Gpu, found: Rules, max_model_len: int, *, offline: bool = False
) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens of `vllm serve` (or the LLM class, offline).

    engine/arg_utils.py: get_batch_defaults and
    _set_default_max_num_seqs_and_batched_tokens_args.
    """
    if found.first_engine:
        # config.py of 0.6: no chunked prefill up to 32768 tokens, else 512 a step
        return 256, max(max_model_len, 2048) if max_model_len <= 32768 else 512
    if found.big_card_batch and gpu.gib >= 160:
        seqs, tokens = 1024, 16384
    elif (
        gpu.gib >= 70
        and not gpu.name.lower().startswith("a100")
        and not (gpu.capability == (12, 1) and parse_version(found.version) >= (0, 33))
    ):
        seqs, tokens = 1024, 16384 if offline else 8192
    else:
        seqs, tokens = 256, 8192 if offline else 2048
    tokens = min(tokens, seqs * max_model_len)
    return min(seqs, tokens), tokens


def kernel_block(model: Model, gpu: Gpu, kv_dtype: str) -> int:
    """Block size of the attention backend that vLLM picks (get_preferred_block_size).

    Sparse MLA takes 64 tokens, dense MLA on Blackwell 64 too; the others the default of 16.
    """
    if model.indexed:
        return 64
    if model.latent and gpu.capability[0] == 10:
        return 64
    if model.latent and kv_dtype.startswith("fp8") and gpu.capability[0] == 9:
        return 64  # FlashMLA: FlashAttention's MLA has no fp8 cache
    return 16


def _kv_token(
    cache: Attention | Latent,
    parallel: Parallel,
    kv_dtype: str,
    element: float,
    gpu: Gpu,
    sparse: bool,
    packs: bool = False,
) -> float:
    """Bytes of one token in one layer on one card. ``packs``: see Rules.packs_sparse_keys."""
    if isinstance(cache, Latent):
        if kv_dtype == "fp8_ds_mla" or (
            sparse
            and (
                (kv_dtype.startswith("fp8") and gpu.capability[0] != 10)
                or (kv_dtype == "auto" and packs and gpu.capability[0] == 12)
            )
        ):
            return 656.0  # 512 fp8 + 4 scales + 64 in bf16
        if kv_dtype.startswith(("fp8",)):
            return cache.width * 1.0
        size = KV_DTYPES[kv_dtype]
        return cache.width * (element if size is None else size)
    heads = max(cache.kv_heads // parallel.tp, 1)
    if kv_dtype == "nvfp4":
        return heads * sum(h // 2 + h // 16 for h in (cache.head, cache.head_v))
    size = KV_DTYPES[kv_dtype]
    per_token = heads * (cache.head + cache.head_v) * (element if size is None else size)
    if kv_dtype.endswith("per_token_head"):
        per_token += 2 * heads * 4
    return per_token


def _state_bytes(state: State, parallel: Parallel, element: float, speculative: int) -> int:
    """mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape"""
    tp = parallel.tp
    width = (2 * state.key_heads * state.key_head + state.value_heads * state.value_head) // tp
    window = width * (state.kernel - 1 + speculative) * element
    matrix = state.value_heads // tp * state.value_head * state.key_head
    return int(window + matrix * (4.0 if state.float32 else element))


def cache_specs(
    model: Model,
    parallel: Parallel,
    *,
    kv_dtype: str,
    element: float,
    gpu: Gpu,
    found: Rules,
    block_size: int | None = None,
    prefix_caching: bool | None = None,
    speculative: int = 0,
) -> tuple[list[dict[str, Spec]], int]:
    """Specs of every layer on each pipeline rank, and the block size."""
    block = block_size or kernel_block(model, gpu, kv_dtype)
    kernel = kernel_block(model, gpu, kv_dtype)
    if prefix_caching is None:
        prefix_caching = not model.hybrid or found.in_flight_batches > 1
    state_page: int | None = None
    align = False
    if model.hybrid:
        attention = next(e.cache for e in model.layers if isinstance(e.cache, Attention | Latent))
        state = next(e.cache for e in model.layers if isinstance(e.cache, State))
        token = int(
            _kv_token(
                attention, parallel, kv_dtype, element, gpu, model.indexed, found.packs_sparse_keys
            )
        )
        size = _state_bytes(state, parallel, element, speculative)
        block, state_page = align_hybrid_block(block, kernel, token, size)
        align = prefix_caching
    specs: list[dict[str, Spec]] = []
    spans = rank_layers(len(model.layers), parallel.pp)
    for rank, span in enumerate(spans):
        mine: dict[str, Spec] = {}
        entries: list[Layer] = [model.layers[i] for i in span]
        if speculative and rank == len(spans) - 1:
            entries += list(model.draft)
        for entry in entries:
            name = f"layers.{entry.index}"
            cache = entry.cache
            if cache is None:
                continue
            if isinstance(cache, State):
                mine[name] = Spec(
                    "state",
                    block if align else 1,
                    _state_bytes(cache, parallel, element, speculative),
                    padded_page=state_page,
                    align_mode=align,
                    extra_blocks=speculative,
                )
                continue
            token = int(
                _kv_token(
                    cache, parallel, kv_dtype, element, gpu, model.indexed, found.packs_sparse_keys
                )
            )
            if isinstance(cache, Latent):
                mine[name] = Spec("mla", block, token)
                if cache.indexer is not None:
                    mine[f"{name}.indexer"] = Spec("mla", block, cache.indexer)
            elif cache.window is not None:
                mine[name] = Spec("window", block, token, window=cache.window)
            else:
                mine[name] = Spec("full", block, token)
        specs.append(mine)
    return specs, block


def bytes_per_token(specs: list[dict[str, Spec]], parallel: Parallel) -> float:
    """Bytes that each further token of a long context takes on the fullest card.

    Windows and states do not grow; a context split over DCP ranks takes its share.
    """
    return (
        max(
            sum(s.token_bytes for s in mine.values() if s.kind in ("full", "mla")) for mine in specs
        )
        / parallel.dcp
    )


def size(
    config: Mapping[str, Any],
    *,
    gpu: Gpu | None = None,
    gpu_memory_gib: float | None = None,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    dp: int = 1,
    expert_parallel: bool = False,
    vllm_version: str = DEFAULT_VERSION,
    gpu_memory_utilization: float | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    kv_cache_dtype: str = "auto",
    dtype: str = "auto",
    quantization: str | None = None,
    enforce_eager: bool = False,
    block_size: int | None = None,
    prefix_caching: bool | None = None,
    speculative_tokens: int = 0,
    vision: bool = True,
    pooling: bool = False,
    offline: bool = False,
    kv_cache_memory_gib: float | None = None,
    weights_gib: float | None = None,
    used_gib: float = 0.0,
    weights_dir: Path | None = None,
    where: str = "config.json",
) -> Sizing:
    """Sizes one server of a model.

    ``gpu`` or ``gpu_memory_gib`` (the total that torch sees) is needed. ``kv_cache_memory_gib``
    and ``weights_gib`` put a printed or pinned figure in place of the computed one.
    ``used_gib``: memory of the card that others hold at the start. Figures are per card.
    Raises SizingError for what cannot be sized; what does not fit is a Sizing with ``fits``
    false and a reason.
    """
    if gpu is None:
        if gpu_memory_gib is None:
            raise SizingError("a card or its memory is needed.")
        gpu = Gpu(f"{gpu_memory_gib:g} GiB", gpu_memory_gib, known=False)
    elif gpu_memory_gib is not None:
        gpu = Gpu(gpu.name, gpu_memory_gib, gpu.capability, gpu.sms, gpu.nvlink, gpu.unified)
    for name, value in (
        ("tp", tp),
        ("pp", pp),
        ("dcp", dcp),
        ("dp", dp),
        ("max_model_len", max_model_len),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("block_size", block_size),
    ):
        _positive(name, value)
    _positive("speculative_tokens", speculative_tokens, least=0)
    found = rules(vllm_version)
    warnings: list[str] = []
    if not found.known:
        warnings.append(f"vLLM {found.version} is outside 0.18 to 0.33; the nearest rules are used")
    if not gpu.known:
        warnings.append(
            f"compute capability and multiprocessors of a {gpu.name} card are not known; those "
            "of an H100 are used"
        )
    utilization = (
        found.gpu_memory_utilization if gpu_memory_utilization is None else gpu_memory_utilization
    )
    if not 0 < utilization <= 1:
        raise SizingError(
            f"gpu_memory_utilization {utilization}: a share of the card above 0 up to 1."
        )
    if found.known:
        check_version(config, found.version, where)
    model = build(config, where)
    if found.shares_indexers:
        model = replace(model, layers=tuple(map(_without_own_indexer, model.layers)))
    quant = quantisation(config, quantization, where)
    parallel = Parallel(tp, pp, dcp, dp, expert_parallel)
    check_split(model, parallel)
    if pooling:
        model = replace(model, generates=False)
    warnings += model.warnings
    wanted = DTYPES.get(dtype, dtype)
    used_dtype = model.dtype.removeprefix("torch.") if wanted == "auto" else wanted
    if wanted == "auto" and used_dtype == "float32":
        # config/model.py: _resolve_auto_dtype: float32 checkpoints run in 16 bit
        used_dtype = "bfloat16"
    if wanted == "auto" and used_dtype == "bfloat16" and gpu.capability < (8, 0):
        used_dtype = "float16"
        warnings.append(f"{gpu.name} has no bfloat16: dtype auto becomes float16")
    element = element_bytes(used_dtype)
    if kv_cache_dtype not in KV_DTYPES:
        raise SizingError(
            f"kv_cache_dtype {kv_cache_dtype!r} is not sized here; known: {', '.join(KV_DTYPES)}."
        )
    kv_dtype = kv_cache_dtype
    if kv_dtype == "auto" and quant.kv_cache is not None:
        kv_dtype = quant.kv_cache
        warnings.append(f"kv_cache_dtype auto becomes {kv_dtype}, as the checkpoint asks")
    longest_known = model.max_len
    length = longest_known if max_model_len is None else max_model_len
    if max_model_len is not None and max_model_len > longest_known:
        warnings.append(
            f"max_model_len {max_model_len} is more than the {longest_known} of config.json; "
            "vLLM refuses it unless the config's rope scaling allows it"
        )
    seqs, tokens = default_batch(gpu, found, length, offline=offline)
    tokens = max_num_batched_tokens or tokens
    seqs = max_num_seqs or min(seqs, tokens)
    if seqs > tokens:
        raise RefusedError(
            f"max_num_batched_tokens {tokens} is less than max_num_seqs {seqs}; vLLM refuses that."
        )
    if speculative_tokens and not model.draft:
        raise SizingError(
            f"{where}: speculative tokens are asked for, but the model has no MTP layer."
        )
    v2 = found.uses_v2_runner(
        model.architecture,
        moe=model.moe,
        quantised=quant.method != "none",
        hybrid=model.hybrid,
        generates=model.generates,
    )
    in_flight = 1
    if found.in_flight_batches > 1:
        in_flight = pp + 1 if v2 else (2 if pp == 1 else pp)
    limits = Limits(length, tokens, in_flight, dcp)

    specs, block = cache_specs(
        model,
        parallel,
        kv_dtype=kv_dtype,
        element=element,
        gpu=gpu,
        found=found,
        block_size=block_size,
        prefix_caching=prefix_caching,
        speculative=speculative_tokens,
    )
    merged = {name: spec for mine in specs for name, spec in mine.items()}
    groups = group_layers(merged, found)
    pools = [pool(groups, mine) for mine in specs]

    stored: StoredWeights | None = None
    if weights_dir is not None:
        stored = stored_weights(weights_dir)
        if stored is None:
            warnings.append(
                f"no safetensors in {weights_dir}: the weights are sized from config.json alone"
            )
        else:
            warnings += stored.warnings
    minor = min(parse_version(found.version)[1], 33)
    card = Card(gpu.capability)
    ranked = rank_weights(
        model,
        parallel,
        quant,
        dtype=used_dtype,
        card=card,
        minor=minor,
        draft=speculative_tokens > 0,
        vision=vision,
    )
    run = memory.Run(
        tokens=tokens,
        seqs=seqs,
        max_model_len=length,
        element=element,
        eager=enforce_eager or found.first_engine,
        v2=v2,
        speculative=speculative_tokens,
        block=block,
        see=vision,
        kv_dtype=kv_dtype,
    )
    made = memory.made_with_model(model, run, parallel, found, gpu)
    totals = [weights_gib * GIB if weights_gib is not None else w.total + made for w in ranked]
    if stored is not None and weights_gib is None:
        share = _stored_share(stored, model, quant, used_dtype, card, minor)
        if abs(share - 1) > 0.005:
            totals = [total * share for total in totals]
            warnings.append(
                f"the weights on disk are {share - 1:+.1%} of what config.json says; the sizes in "
                "their safetensors headers are used"
            )
    warnings += _card_warnings(gpu, quant, kv_dtype, found, used_dtype)

    requested = math.ceil(gpu.gib * GIB * utilization)
    spans = rank_layers(len(model.layers), pp)
    ranks: list[Rank] = []
    available: list[int] = []
    lows: list[int] = []
    highs: list[int] = []
    for index, span in enumerate(spans):
        need = memory.needs(
            model, run, parallel, found, quant, gpu, layers=span, last=index == pp - 1
        )
        if kv_cache_memory_gib is not None:
            free = low = high = kv_cache_memory_gib * GIB
        else:
            free = requested - totals[index] - need.total.bytes
            low = requested - totals[index] - need.total.high
            high = requested - totals[index] - need.total.low
        available.append(int(free))
        lows.append(int(low))
        highs.append(int(high))
        ranks.append(
            Rank(
                len(span),
                totals[index] / GIB,
                need.activation.bytes / GIB,
                need.non_torch.bytes / GIB,
                need.graphs.bytes / GIB,
                free / GIB,
            )
        )

    def fill(free: list[int]) -> tuple[int, Capacity]:
        blocks = min(p.blocks(f) for p, f in zip(pools, free, strict=True))
        reference = max(pools, key=lambda p: p.request_blocks(limits))
        return blocks, capacity(_whole(reference, groups), blocks, limits, found)

    blocks, filled = fill(available)
    _, least = fill([max(v, 0) for v in lows])
    _, most = fill([max(v, 0) for v in highs])
    reach = min(
        longest(p, f, limits, found, max(longest_known, length))
        for p, f in zip(pools, available, strict=True)
    )
    tightest = min(range(pp), key=lambda i: available[i])
    reason = ""
    if used_gib and (gpu.gib - used_gib) * GIB < requested:
        reason = (
            f"free memory of the card ({gpu.gib - used_gib:.2f} of {gpu.gib:.2f} GiB) is less "
            f"than gpu_memory_utilization {utilization} asks for ({requested / GIB:.2f} GiB); "
            "lower it or stop what holds the card"
        )
    elif available[tightest] <= 0:
        reason = (
            f"no memory is left for the KV cache: weights {ranks[tightest].weights_gib:.1f} GiB "
            f"and {ranks[tightest].activation_gib + ranks[tightest].non_torch_gib:.1f} GiB of "
            f"activations and buffers exceed the {requested / GIB:.1f} GiB allowed on a card; "
            "use more cards, quantised weights or a smaller max_num_batched_tokens"
        )
    elif reach < length:
        needed = max(p.request_bytes(limits) for p in pools)
        reason = (
            f"one request of {length} tokens needs {needed / GIB:.2f} GiB of KV cache, but "
            f"{available[tightest] / GIB:.2f} GiB are there; the longest max_model_len is {reach}"
        )
    elif model.hybrid and blocks < seqs:
        states = [g for g in groups if g.spec.kind == "state"]
        per_state = 2 if states and states[0].spec.align_mode else 1
        warnings.append(
            f"max_num_seqs {seqs} is more than the {blocks} blocks that hold recurrent states "
            f"({per_state} for each sequence); vLLM may refuse to start: set max_num_seqs to "
            f"{max(blocks // max(per_state * len(states), 1), 1)} or less"
        )
    if kv_cache_memory_gib is None and not reason:
        margin = (most.tokens - least.tokens) / max(filled.tokens, 1)
        if margin > 0.05:
            warnings.append(
                f"activations and buffers are uncertain here: between {least.tokens} and "
                f"{most.tokens} tokens of KV cache"
            )
    head = ranks[max(range(pp), key=lambda i: ranks[i].weights_gib)]
    return Sizing(
        fits=not reason,
        reason=reason,
        weights_gib=head.weights_gib,
        kv_cache_gib=max(available[tightest], 0) / GIB,
        kv_bytes_per_token=bytes_per_token(specs, parallel),
        kv_cache_tokens=filled.tokens,
        max_concurrency=filled.concurrency,
        max_model_len=length,
        max_model_len_max=reach,
        activation_gib=max(r.activation_gib for r in ranks),
        non_torch_gib=max(r.non_torch_gib for r in ranks),
        graphs_gib=max(r.graphs_gib for r in ranks),
        requested_gib=requested / GIB,
        blocks=blocks,
        block_size=block,
        spread={
            "kv_cache_gib": Spread(min(lows) / GIB, min(highs) / GIB),
            "kv_cache_tokens": Spread(least.tokens, most.tokens),
        },
        ranks=tuple(ranks),
        settings={
            "vllm": found.version,
            "gpu": gpu.name,
            "gpu_gib": gpu.gib,
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "decode_context_parallel_size": dcp,
            "gpu_memory_utilization": utilization,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": tokens,
            "kv_cache_dtype": kv_dtype,
            "dtype": used_dtype,
            "quantization": quant.method,
            "model_runner": "v2" if v2 else "v1",
        },
        warnings=tuple(warnings),
    )


def _without_own_indexer(layer: Layer) -> Layer:
    """A DSA layer as it is made where it uses the indices of one before it."""
    if not isinstance(layer.cache, Latent) or not layer.cache.shares:
        return layer
    kept = tuple(w for w in layer.weights if ".indexer." not in w.name)
    return replace(layer, cache=replace(layer.cache, indexer=None), weights=kept)


def _whole(shared: Pool, groups: tuple[Any, ...]) -> Pool:
    """The scheduler's view: every group has its layers, whatever rank they are on."""
    return Pool(groups, shared.block_bytes)


def _stored_share(
    stored: StoredWeights,
    model: Model,
    quant: Quantisation,
    dtype: str,
    card: Card,
    minor: int,
) -> float:
    """Bytes in the safetensors headers over those computed from the config.

    The computed side is the checkpoint's: no rotary tables, no copies, one card.
    """
    bare = replace(model, every=(), latent_heads=0, generates=stored.has_head)
    alone = rank_weights(
        bare, Parallel(), quant, dtype=dtype, card=card, minor=minor, draft=stored.has_draft
    )
    return stored.bytes / sum(w.total for w in alone)


def _card_warnings(
    gpu: Gpu, quant: Quantisation, kv_dtype: str, found: Rules, dtype: str
) -> list[str]:
    warnings = []
    capability = ".".join(map(str, gpu.capability))
    if gpu.known and gpu.capability < (7, 5) and parse_version(found.version) >= (0, 20):
        warnings.append(
            f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}) is not in the default "
            "wheels since vLLM 0.20"
        )
    if quant.method == "fp8" and gpu.capability < (8, 9):
        warnings.append(
            f"compute capability {capability} has no FP8 arithmetic: FP8 weights run through "
            "Marlin, weight-only"
        )
    if kv_dtype.startswith("fp8") and gpu.capability < (8, 9):
        warnings.append(
            f"compute capability {capability}: an FP8 KV cache saves memory but is not computed "
            "in FP8"
        )
    if dtype == "bfloat16" and gpu.capability < (8, 0):
        warnings.append(
            f"compute capability {capability} has no bfloat16; vLLM refuses it: use --dtype half, "
            "or leave --dtype out"
        )
    if gpu.unified:
        warnings.append(
            f"{gpu.name} shares memory with the CPU: what the system uses is missing from the "
            "figure"
        )
    return warnings
