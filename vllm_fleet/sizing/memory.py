"""What vLLM needs besides weights and KV cache: activations, CUDA context, graphs.

vLLM measures these in a profile run (v1/worker/gpu_worker.py: determine_available_memory): one
forward pass of max_num_batched_tokens tokens, then one sampling of max_num_seqs rows. What is
alive at once in each is added up here from the code that allocates it. Sizes are bytes on a card.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .arch import Attention, Latent, Layer, Model, State
from .gpus import Gpu
from .kvcache import GIB, cdiv
from .quant import Quantisation
from .rules import Rules
from .weights import Parallel

MIB = 1 << 20


@dataclass(frozen=True)
class Term:
    """A size with the range it may be in."""

    bytes: float
    low: float
    high: float

    @classmethod
    def of(cls, size: float, spread: float = 0.0) -> Term:
        """A size, give or take a share of it."""
        return cls(size, size * (1 - spread), size * (1 + spread))

    def __add__(self, other: Term) -> Term:
        return Term(self.bytes + other.bytes, self.low + other.low, self.high + other.high)


@dataclass(frozen=True)
class Needs:
    """Memory of one rank besides weights and KV cache."""

    activation: Term
    non_torch: Term
    graphs: Term
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> Term:
        """All of it that is taken off before the KV cache."""
        return self.activation + self.non_torch + self.graphs


@dataclass(frozen=True)
class Run:
    """The settings that activations depend on."""

    tokens: int  # max_num_batched_tokens
    seqs: int  # max_num_seqs
    max_model_len: int
    element: float
    eager: bool
    v2: bool
    speculative: int = 0
    block: int = 16
    see: bool = True  # multimodal encoder profiled
    kv_dtype: str = "auto"


def sampler(model: Model, run: Run, rules: Rules, gpu: Gpu) -> float:
    """Peak of sampling max_num_seqs rows, in units of one fp32 logit.

    Half a unit are the model's 16-bit logits, one their fp32 copy; softmax and random numbers
    (native), or masked logits and softmax (FlashInfer), are one each: v1/sample/sampler.py,
    ops/topk_topp_sampler.py. Before the Triton kernel the whole logits were sorted: values (1),
    int64 indices (2), and torch.sort's own work space (5).
    """
    rows = min(run.seqs, run.tokens)
    unit = rows * model.vocab * 4.0
    if run.v2 and not rules.v2_samples_fp32:
        # gpu/model_runner._dummy_sampler_run: no request asks for anything, logits only
        return unit * run.element / 4
    size = unit * (run.element / 4 + 3)
    if not rules.triton_topk and not rules.first_engine:
        return unit * (run.element / 4 + 9)
    if rows >= 8:
        # topk_topp_triton.py keeps one row of logits for each multiprocessor
        size += min(gpu.sms, 1 << (rows - 1).bit_length()) * model.vocab * 4.0
    if run.speculative:
        # rejection sampler: random and fp32 target logits for twice the rows
        size += unit * 2
    return size


def forward(model: Model, layer: Layer, run: Run, parallel: Parallel, passing: float) -> float:
    """Peak of one layer's forward pass over max_num_batched_tokens tokens.

    MLP: gate, up and their product (3 widths) beside residual, normed input, output and the
    layer's input (4 hidden; a compiled graph reuses part of one). Attention: q, k, v and the
    result; for MLA see latent_attention. Seen on an H200 within 2 %, but for compiled models
    under the second runner: 5 of each there, from one run of 0.26.
    """
    tp = parallel.tp
    widths, hiddens = (5.0, 5.0) if run.v2 and not run.eager else (3.0, 3.5)
    hidden = (4.0 if run.eager else hiddens) * model.hidden
    mlp = widths * max(layer.mlp, layer.shared_width) / tp
    projected = layer.qkv / tp
    attention = projected + layer.attention_out / tp
    if isinstance(layer.cache, State):
        # gdn_linear_attn.py: beside the projections the joined q, k, v, z and the result; the
        # gated norm takes z and result in fp32 when it is not compiled into one kernel.
        keys = layer.cache.key_heads * layer.cache.key_head / tp
        values = layer.cache.value_heads * layer.cache.value_head / tp
        attention = 4 * keys + (10 if run.eager else 6) * values
    if isinstance(layer.cache, Latent):
        beside = hidden if run.v2 and not run.eager else (2 if run.eager else 1) * model.hidden
        attention = latent_attention(model, layer, layer.cache, run, parallel)
        size = run.tokens * (beside + attention) * run.element + passing
    else:
        size = run.tokens * (hidden + attention) * run.element
    size = max(size, run.tokens * (hidden + mlp) * run.element)
    if layer.experts:
        size = max(
            size,
            run.tokens * ((hidden + mlp) * run.element + layer.experts * 4.0),  # router logits
        )
    if parallel.pp > 1:
        # hidden states and residual of the next rank, and what is received
        size += 2.5 * run.tokens * model.hidden * run.element
    return size


def latent_attention(
    model: Model, layer: Layer, cache: Latent, run: Run, parallel: Parallel
) -> float:
    """Widths alive beside the residual (and, uncompiled, the normed input) when MLA runs.

    layers/mla.py: forward: the heads' queries and results and the latent. Uncompiled, Python
    holds on to what they were made of: the joined projection (compressed query and latent),
    and both of its norms. vLLM's profile run takes this path for sparse attention, too.
    """
    by_head = layer.qkv - cache.width + layer.attention_out
    width = by_head / parallel.tp + cache.width
    if run.eager:
        width += 2 * cache.query + model.latent_rank
    return width


def expert_workspace(
    model: Model, run: Run, parallel: Parallel, quant: Quantisation, gpu: Gpu
) -> float:
    """Buffers of the fused experts, kept for all layers (v1/worker/workspace.py).

    triton_moe.py, deep_gemm_moe.py: workspace_shapes: one row for each token and chosen expert,
    of max(width, hidden) and max(2 widths, hidden). DeepGEMM aligns each expert's rows, but on
    Hopper it is not taken: fused_moe/oracle/fp8.py puts Triton first, and with expert
    parallelism FlashInfer's CUTLASS, whose own buffers are not known and taken for as large.
    """
    layer = next((entry for entry in model.layers if entry.experts), None)
    if layer is None:
        return 0.0
    width = (
        layer.expert_width
        if parallel.expert_parallel
        else cdiv(layer.expert_width, parallel.experts_over)
    )
    rows = run.tokens * layer.top_k
    scheme = quant.scheme(f"model.layers.{layer.index}.mlp.experts", "expert")
    local = (
        cdiv(layer.experts, parallel.experts_over) if parallel.expert_parallel else layer.experts
    )
    if scheme.kind == "fp8" and scheme.block and gpu.capability[0] >= 10:
        rows = cdiv(rows + local * 127, 128) * 128
    return rows * (max(width, model.hidden) + max(2 * width, model.hidden)) * run.element


def latent_workspace(model: Model, run: Run, parallel: Parallel) -> tuple[float, float]:
    """MLA's buffers of the profile run: (kept, only during the forward pass).

    The up-projected context of a chunked prefill, of determine_chunked_prefill_workspace_size
    tokens: mla_attention.py: forward_impl allocates it without metadata, sparse attention or
    not. An indexer gathers keys (mla/indexer.py: 40 x max_model_len of them, and 1 MiB for the
    choice), and takes 512 MiB of index logits (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB) before that.
    """
    if not model.latent:
        return 0.0, 0.0
    tokens = min(max(8 * run.max_model_len, 4 * run.seqs * run.block), 64 * 1024)
    tokens = max(tokens, run.seqs * run.block)
    per_head = model.latent_up // max(model.latent_rank, 1)
    context = tokens * (model.latent_heads / parallel.tp) * per_head * run.element
    if not model.indexed:
        return 0.0, context
    return 40 * run.max_model_len * 132.0 + MIB, max(context, 512.0 * MIB)


def sparse_workspace(model: Model, run: Run, parallel: Parallel, gpu: Gpu) -> float:
    """Workspace that sparse MLA takes when the model is made, so that it prints as weights.

    flashmla_sparse.py: FlashMLASparseImpl.__init__: q_concat_buffer, latent and rotary part of
    every head's query; with an fp8 cache also 5 x max_model_len latents in bf16. On Blackwell
    FlashInfer's backend, which takes none, comes first for fp8 and for up to 16 heads
    (platforms/cuda.py: _get_backend_priorities).
    """
    if not model.indexed:
        return 0.0
    width = max(layer.cache.width for layer in model.layers if isinstance(layer.cache, Latent))
    heads = model.latent_heads / parallel.tp
    packed = run.kv_dtype.startswith("fp8")
    if gpu.capability[0] == 10 and (packed or heads <= 16):
        return 0.0
    latents = 5 * run.max_model_len * width * 2.0 if packed else 0.0
    return run.tokens * heads * width * 2.0 + latents


def made_with_model(model: Model, run: Run, parallel: Parallel, rules: Rules, gpu: Gpu) -> float:
    """Buffers that are made with an MLA model and printed as weights.

    sparse_workspace; DSA's chosen indices (deepseek_v2.py: topk_indices_buffer, int32); 128 MiB
    that flashinfer_mla.py allocates when it is imported, as every backend is to be asked
    whether it fits (and cutlass_mla.py as much again on Blackwell). Some 19 MiB more are
    printed, whatever the model (five models, 8 to 78 layers, TP 1 to 8, on Hopper): where was
    not found.
    """
    if not model.latent:
        return 0.0
    size = sparse_workspace(model, run, parallel, gpu) + run.tokens * model.index_topk * 4.0
    if rules.allocates_on_import:
        size += 128.0 * MIB * (2 if gpu.capability[0] == 10 else 1)
    return size + 19.0 * MIB


def encoder(model: Model, run: Run, parallel: Parallel) -> tuple[Term, float]:
    """The multimodal encoder's own profile run, and its outputs, kept while the model runs.

    gpu_model_runner.profile_run with MultiModalBudget: the largest item, or a batch of tokens if
    that is more.
    """
    eye = model.vision
    if eye is None or not run.see:
        return Term.of(0), 0.0
    tokens = max(run.tokens, min(eye.item, run.max_model_len))
    patches = tokens * eye.merge**2
    split = parallel.tp if eye.split else 1
    width = max(8 * eye.hidden, 2 * eye.hidden + eye.alive / split)
    outputs = tokens * model.hidden * eye.levels * run.element
    return Term.of(patches * width * run.element + outputs, 0.5), outputs


def cublas_workspace(gpu: Gpu) -> float:
    """aten/cuda/CublasHandlePool.cpp: 32 MiB from Hopper on, else 8.125 MiB."""
    return 32.0 * MIB if gpu.capability[0] >= 9 else 8.125 * MIB


def runner_buffers(model: Model, run: Run, kept_blocks: int) -> float:
    """Buffers that the runner allocates before the profile run.

    Counted from 0.27 on. The second runner keeps token counts of every sequence for penalties
    (gpu/sample/penalties.py: int32 [max_num_seqs, vocab] and one bit each).
    """
    size = 2.0 * run.seqs * cdiv(run.max_model_len, max(kept_blocks, 1)) * 4
    size += run.tokens * 32
    if model.vision is not None and run.see:
        size += run.tokens * model.hidden * run.element
    if run.v2:
        size += run.seqs * model.vocab * 4.0 + run.seqs * cdiv(model.vocab, 32) * 4.0
    return size


#: allreduce_rms_fusion.py: FI_ALLREDUCE_FUSION_MAX_SIZE_MB: by capability and TP
FUSED_MIB = {
    (9, 0): {2: 64.0, 4: 2.0, 8: 0.5},
    (10, 0): {2: 64.0, 4: 32.0, 8: 1.0},
    (10, 3): {2: 64.0, 4: 64.0, 8: 2.0},
}


def fused_reduce(model: Model, run: Run, parallel: Parallel, gpu: Gpu, rules: Rules) -> float:
    """FlashInfer's buffers for an all-reduce joined with the norm after it.

    A pass of torch.compile (allreduce_rms_fusion.py), so that there are none with enforce_eager.
    flashinfer/comm/trtllm_ar.py: the values of every card, its flags, and three times the values
    for small batches. mnnvl.py: SymmDeviceMemory rounds each of the three up to the multicast
    granularity that the driver recommends, and from 0.6.16 on, without multicast, to 2 MiB. The
    granularity is taken for 512 MiB: with that the runs with two and with four cards, of 64 and
    of 2 MiB of values, come out as printed.
    """
    limit = FUSED_MIB.get(gpu.capability, {}).get(parallel.tp)
    if limit is None or run.eager or not gpu.nvlink or not rules.fuses_allreduce:
        return 0.0
    token = model.hidden * run.element
    values = parallel.tp * min(limit * MIB // token, run.tokens) * token
    step = (512 if rules.multicast_steps else 2) * MIB
    return sum(cdiv(int(size), step) * step for size in (values, 1.0, 3 * values))


def non_torch(
    model: Model, run: Run, parallel: Parallel, gpu: Gpu, rules: Rules, *, last: bool
) -> Term:
    """CUDA modules, NCCL with its peers, and fused_reduce: what torch did not allocate.

    The first two are measured. Kernels loaded during the profile run: 0.07 GiB without sampling,
    0.22 to 0.25 with (H100 and H200, vLLM 0.19 and 0.21). What NCCL connects during it: over
    NVLink 0.31 to 0.39 GiB (two and four H100; two H200, eager and compiled); over PCIe some
    0.4, with a wide range.
    """
    modules = rules.modules_gib * GIB
    base = (
        Term(modules, modules * 0.75, modules * 1.3)
        if last
        else Term(0.07 * GIB, 0.05 * GIB, 0.2 * GIB)
    )
    if parallel.tp == 1:
        return base
    if not gpu.nvlink:
        return base + Term(0.4 * GIB, 0.15 * GIB, 0.9 * GIB)
    peers = 0.32 + 0.03 * (parallel.tp - 2) ** 0.5
    fused = fused_reduce(model, run, parallel, gpu, rules)
    return base + Term(peers * GIB, 0.25 * GIB, 0.6 * GIB) + Term(fused, fused * 0.98, fused)


def capture_sizes(run: Run) -> list[int]:
    """Batch sizes that CUDA graphs are captured for: VllmConfig._set_cudagraph_sizes."""
    largest = min(run.seqs * (1 + run.speculative) * 2, 512, run.tokens)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [n for n in sizes if n <= largest]


def graphs(model: Model, run: Run, parallel: Parallel, rules: Rules, gpu: Gpu) -> Term:
    """CUDA graphs' share, taken off before the KV cache from 0.20 on (profile_cudagraph_memory).

    The larger first capture, and one step of memory for each further graph of two kinds. Mixed
    batches are captured in pieces, one for each layer; decoding whole. FlashAttention 3 keeps a
    partial result for each of 32 splits of every sequence in the whole graph
    (attention backends: max_num_splits). Steps are 2 MiB, the driver's granularity: measured on
    an H200 with four models of 4 to 48 layers.
    """
    if run.eager or not rules.reserves_cuda_graphs:
        return Term.of(0)
    if run.v2 and not rules.v2_reserves_cuda_graphs:
        return Term.of(0)
    sizes = capture_sizes(run)
    if not sizes:
        return Term.of(0)
    whole = [n for n in sizes if n <= run.seqs * (1 + run.speculative)]
    layer = max(model.layers, key=lambda entry: max(entry.mlp, entry.shared_width))
    width = 3 * max(layer.mlp, layer.shared_width) / parallel.tp + 4 * model.hidden
    first = 60.0 * MIB + sizes[-1] * width * run.element
    if whole and gpu.capability[0] == 9:
        splits = 32 * whole[-1] * model.heads / parallel.tp * 4.0
        decode = max(_head_width(entry, model) for entry in model.layers)
        first = max(first, splits * decode + (84.0 if model.latent else 4.0) * MIB)
    # Kernels of a layer: more with experts and with MLA.
    kernels = len(model.layers) / parallel.pp * (1 + model.moe + model.latent)
    pieces = cdiv(int(kernels), 32) * 2.0 * MIB
    one = max(int(kernels) // 64 * 2.0, 1.0) * MIB
    size = first + (len(sizes) - 1) * pieces + max(len(whole) - 1, 0) * one
    return Term(size, size * 0.6, size * 1.6)


def _head_width(layer: Layer, model: Model) -> int:
    """Width of one head's result: FlashAttention's scratch for a split."""
    if isinstance(layer.cache, Latent):
        return model.latent_rank
    return layer.cache.head_v if isinstance(layer.cache, Attention) else 0


def grown(wanted: float, made: float, rules: Rules) -> float:
    """What the shared workspace takes more than was made with the model (v1/worker/workspace.py).

    It grows by being made anew. The old one is freed only where no layer kept a view of it.
    """
    if wanted <= made:
        return 0.0
    return wanted if rules.keeps_sparse_workspace else wanted - made


def needs(
    model: Model,
    run: Run,
    parallel: Parallel,
    rules: Rules,
    quant: Quantisation,
    gpu: Gpu,
    *,
    layers: range,
    last: bool,
) -> Needs:
    """Everything besides weights and KV cache on one pipeline rank."""
    mine = [model.layers[i] for i in layers]
    seen, seen_kept = encoder(model, run, parallel) if layers.start == 0 else (Term.of(0), 0.0)
    experts = expert_workspace(model, run, parallel, quant, gpu)
    kept, passing = latent_workspace(model, run, parallel)
    if not rules.keeps_workspace:
        experts, passing = 0.0, passing + experts
    workspace = grown(max(experts, kept), sparse_workspace(model, run, parallel, gpu), rules)
    peak_forward = max(forward(model, layer, run, parallel, passing) for layer in mine)
    peak_sampler = 0.0
    if last and model.generates:
        rows = min(run.seqs, run.tokens)
        peak_sampler = (
            sampler(model, run, rules, gpu)
            + run.tokens * model.hidden * run.element
            + 2 * rows * model.hidden * run.element
        )
    always = workspace + cublas_workspace(gpu) + seen_kept
    # Sampling is known to a few per cent; what a compiled forward pass holds, less well.
    if peak_sampler >= peak_forward:
        peak = Term(peak_sampler, peak_sampler * 0.98, max(peak_sampler * 1.02, peak_forward * 1.1))
    else:
        # Compiled under the second runner, 3 to 5 widths were seen.
        least = 0.6 if run.v2 and not run.eager else 0.9
        peak = Term(peak_forward, max(peak_sampler, peak_forward * least), peak_forward * 1.15)
    activation = peak + Term.of(always, 0.05)
    if seen.bytes > activation.bytes:
        activation = seen + Term.of(cublas_workspace(gpu))
    buffers = 0.0
    if rules.counts_runner_buffers:
        buffers = runner_buffers(model, run, run.block)
    return Needs(
        activation=activation + Term.of(buffers, 0.1),
        non_torch=non_torch(model, run, parallel, gpu, rules, last=last),
        graphs=graphs(model, run, parallel, rules, gpu),
        parts={
            "forward": peak_forward,
            "sampler": peak_sampler,
            "workspace": workspace,
            "encoder": seen.bytes,
            "buffers": buffers,
        },
    )
