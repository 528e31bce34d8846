"""What differs between vLLM versions in how memory is counted.

Read from the published sources of 0.18.0 to 0.33.0 (and 0.11.0, for old logs). Each field
names the place. A version outside that range uses the nearest rules, and ``known`` is false.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import SizingError

OLDEST = (0, 18)
NEWEST = (0, 33)
DEFAULT_VERSION = "0.21.0"


@dataclass(frozen=True)
class Rules:
    """Memory rules of one vLLM version."""

    version: str
    known: bool
    #: config/cache.py: CacheConfig.gpu_memory_utilization
    gpu_memory_utilization: float
    #: envs.py: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS; graphs are taken off before the KV cache
    reserves_cuda_graphs: bool
    #: gpu/model_runner.profile_cudagraph_memory of the second runner: 0 before 0.29
    v2_reserves_cuda_graphs: bool
    #: v1/sample/ops/topk_topp_triton.py exists; before it, the profile run sorts whole logits
    triton_topk: bool
    #: v1/worker/workspace.py: expert buffers are kept from layer to layer
    keeps_workspace: bool
    #: measured, GiB: CUDA modules loaded by the profile run (CUDA 12.8 wheels of old, then more)
    modules_gib: float
    #: kv_cache_utils._report_kv_cache_config: tokens = int(concurrency * max_model_len)
    tokens_from_concurrency: bool
    #: config/vllm.py: max_in_flight_tokens; windows keep every batch in flight (async: two)
    in_flight_batches: int
    #: kv_cache_utils._check_enough_kv_cache_memory plans without the block pool's null block
    null_block: bool
    #: kv_cache_utils._get_kv_cache_groups_uniform_page_size merges compatible buckets, and
    #: unify_kv_cache_spec_page_size may pad pages that do not divide
    merges_groups: bool
    #: engine/arg_utils.get_batch_defaults: cards of 160 GiB and more get 16384 tokens
    big_card_batch: bool
    #: config/vllm.py: use_v2_model_runner: "no", "listed", "dense", "all"
    v2_runner: str
    v2_architectures: frozenset[str]
    #: the engine before 0.8: a request is prefilled at once
    first_engine: bool
    #: utils/mem_utils.memory_profiling: consumed = free before - free after, so that buffers the
    #: runner allocates outside the profile run are counted too
    counts_runner_buffers: bool
    #: deepseek_v2.py: layers that use the indices of another (index_topk_freq) have no indexer
    shares_indexers: bool
    #: mla_attention._canonicalize_sparse_mla_kv_cache_dtype: DSA on sm_12x keeps fp8_ds_mla by
    #: itself; before there is no sparse attention for it
    packs_sparse_keys: bool
    #: compilation/passes/fusion/allreduce_rms_fusion.py is on by default (config/vllm.py: O2)
    fuses_allreduce: bool
    #: flashinfer/comm/mnnvl.py before 0.6.16 rounds to the multicast granularity
    multicast_steps: bool
    #: flashinfer_mla.py: g_fi_workspace is a module's own variable, not made on first use
    allocates_on_import: bool
    #: flashmla_sparse.py: FlashMLASparseImpl keeps views of the workspace it was made with
    keeps_sparse_workspace: bool
    #: v1/worker/gpu/model_runner._dummy_sampler_run: the second runner profiles fp32 logits
    v2_samples_fp32: bool

    def uses_v2_runner(
        self, architecture: str, *, moe: bool, quantised: bool, hybrid: bool, generates: bool = True
    ) -> bool:
        """Whether this version serves the model with its second model runner by default."""
        if self.v2_runner == "no" or not generates:
            return False
        listed = architecture in self.v2_architectures
        if self.v2_runner == "listed":
            return listed and not moe and not quantised
        if self.v2_runner == "listed any":
            return listed
        if self.v2_runner == "dense":
            return listed or not (moe or hybrid)
        return True


_LISTED = {
    22: frozenset({"Qwen3ForCausalLM"}),
    23: frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"}),
    24: frozenset(
        {
            "DeepseekV2ForCausalLM",
            "GraniteMoeForCausalLM",
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
        }
    ),
}
_LISTED_MOE = frozenset({"DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"})


def parse_version(text: str) -> tuple[int, int]:
    """``0.21.0``, ``v0.19.1rc1.dev329`` or ``~0.11`` -> (major, minor)."""
    match = re.match(r"[v~=]*(\d+)\.(\d+)", text.strip())
    if not match:
        raise SizingError(f"vLLM version {text!r} is not a version. Write it like 0.21.0.")
    return int(match[1]), int(match[2])


def rules(version: str = DEFAULT_VERSION) -> Rules:
    """The rules of a vLLM version, or the nearest ones (``known`` says which)."""
    major, minor = parse_version(version)
    known = OLDEST <= (major, minor) <= NEWEST
    if major > 0:
        minor = NEWEST[1]
    minor = min(minor, NEWEST[1])
    if minor < 22:
        runner, listed = "no", frozenset[str]()
    elif minor < 24:
        runner, listed = "listed", _LISTED[minor]
    elif minor < 25:
        runner, listed = "listed any", _LISTED[24]
    elif minor < 29:
        runner, listed = "dense", _LISTED_MOE
    else:
        runner, listed = "all", frozenset[str]()
    return Rules(
        version=version.lstrip("v~="),
        known=known,
        gpu_memory_utilization=0.92 if minor >= 20 else 0.9,
        reserves_cuda_graphs=minor >= 20,
        v2_reserves_cuda_graphs=minor >= 29,
        triton_topk=minor >= 18,
        keeps_workspace=minor >= 18,
        modules_gib=0.23 if minor >= 20 else 0.245 if minor >= 18 else 0.145,
        first_engine=minor < 8,
        tokens_from_concurrency=minor >= 21,
        in_flight_batches=2 if minor >= 26 else 1,
        null_block=minor >= 29,
        merges_groups=minor >= 27,
        big_card_batch=minor >= 28,
        v2_runner=runner,
        v2_architectures=listed,
        counts_runner_buffers=minor >= 27,
        shares_indexers=minor >= 24,
        packs_sparse_keys=minor >= 24,
        fuses_allreduce=minor >= 18,
        multicast_steps=minor < 27,
        allocates_on_import=minor < 25,
        keeps_sparse_workspace=minor < 31,
        v2_samples_fp32=minor >= 33,
    )
