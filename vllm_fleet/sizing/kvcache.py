"""KV cache: specs of layers, their groups and blocks, as vLLM makes them.

Mirrors vllm/v1/kv_cache_interface.py (page sizes, memory of one request) and
vllm/v1/core/kv_cache_utils.py (grouping, unifying, concurrency; from 0.33.0 in
kv_cache_planning.py). Sizes are bytes on one rank; lengths are tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm

from .errors import SizingError
from .rules import Rules

GIB = 1 << 30


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Limits:
    """What bounds one request."""

    max_model_len: int
    max_num_batched_tokens: int
    in_flight_batches: int = 1
    dcp: int = 1

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled and not settled: VllmConfig.max_in_flight_tokens."""
        return self.in_flight_batches * self.max_num_batched_tokens


@dataclass(frozen=True)
class Spec:
    """KV cache of one layer: ``block`` tokens a page.

    ``kind``: full, window, mla (one latent vector, or a DSA indexer key) or state (recurrent:
    one page per request, whatever its length).
    """

    kind: str
    block: int
    token_bytes: int  # of one token in one layer; for a state, of the whole state
    window: int | None = None
    padded_page: int | None = None
    align_mode: bool = False  # state blocks aligned to attention blocks, for prefix caching
    all_mode: bool = False  # a state kept for every block
    extra_blocks: int = 0  # speculative tokens keep a state each

    @property
    def page(self) -> int:
        """Bytes of one page."""
        real = self.token_bytes if self.kind == "state" else self.token_bytes * self.block
        return self.padded_page if self.padded_page is not None else real

    def request_pages(self, limits: Limits) -> int:
        """Pages that one request of max_model_len holds (max_memory_usage_bytes / page)."""
        if self.kind == "state":
            if self.all_mode:
                return cdiv(limits.max_model_len, self.block)
            return (2 if self.align_mode else 1) + self.extra_blocks
        if self.kind == "window":
            if self.window is None:
                raise SizingError("a sliding-window layer has no window length")
            tokens = min(self.window - 1 + limits.in_flight_tokens, limits.max_model_len)
            return cdiv(tokens, self.block) + 1
        length = limits.max_model_len
        if limits.dcp > 1:
            length = cdiv(length, limits.dcp)
        return cdiv(length, self.block)

    @property
    def uniform_key(self) -> tuple[object, ...]:
        """Layers with one key need the same token slots (UniformTypeKVCacheSpecs)."""
        if self.kind in ("full", "mla"):
            return ("full", self.block)
        if self.kind == "window":
            return ("window", self.block, self.window)
        return ("state", self.block, self.extra_blocks)


@dataclass(frozen=True)
class Group:
    """Layers that share one block table. ``per_layer``: pages of different sizes side by side."""

    layers: tuple[str, ...]
    specs: tuple[Spec, ...]
    per_layer: bool = False

    @property
    def spec(self) -> Spec:
        """The spec that stands for the group."""
        return self.specs[0]

    def only(self, names: Mapping[str, Spec]) -> Group:
        """The part of the group that a pipeline rank holds."""
        kept = [(n, s) for n, s in zip(self.layers, self.specs, strict=True) if n in names]
        if not kept:
            return Group((), (self.spec,), self.per_layer)
        return Group(tuple(n for n, _ in kept), tuple(s for _, s in kept), self.per_layer)


def group_layers(specs: Mapping[str, Spec], rules: Rules) -> tuple[Group, ...]:
    """Groups of the whole model (get_kv_cache_groups).

    Raises SizingError where vLLM cannot unify the pages either.
    """
    if not specs:
        return ()
    values = list(specs.values())
    names = tuple(specs)
    if all(s == values[0] for s in values):
        return (Group(names, tuple(values)),)
    if len({s.uniform_key for s in values}) == 1:
        return (Group(names, tuple(values), per_layer=True),)
    return _equal_groups(_unify_pages(specs, rules), rules)


def _unify_pages(specs: Mapping[str, Spec], rules: Rules) -> dict[str, Spec]:
    """One page size for all: larger blocks for small pages (unify_kv_cache_spec_page_size)."""
    largest = max(s.page for s in specs.values())
    unified = {}
    for name, spec in specs.items():
        if spec.page == largest:
            unified[name] = spec
        elif spec.kind == "state" and rules.merges_groups:
            unified[name] = replace(spec, padded_page=largest)
        elif largest % spec.page == 0 and spec.padded_page is None and spec.kind != "state":
            unified[name] = replace(spec, block=spec.block * (largest // spec.page))
        elif rules.merges_groups and spec.kind in ("full", "window"):
            unified[name] = replace(spec, padded_page=largest)
        else:
            raise SizingError(
                f"layer {name}: its KV page of {spec.page} bytes does not divide the largest "
                f"page of {largest} bytes; vLLM {rules.version} refuses such a model. Use "
                "another KV cache dtype or a newer vLLM."
            )
    return unified


def _equal_groups(specs: Mapping[str, Spec], rules: Rules) -> tuple[Group, ...]:
    """Groups of equally many layers (_get_kv_cache_groups_uniform_page_size)."""
    kinds: dict[object, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        kinds[spec].append(name)
    counts = [len(layers) for layers in kinds.values()]
    size = min(counts)
    # Few more layers of one kind than of the other (a draft layer, say): pad, do not split.
    if max(counts) < size * 1.5:
        size = max(counts)
    groups = []
    for layers in kinds.values():
        parts = cdiv(len(layers), size)
        for i in range(parts):
            part = tuple(layers[i::parts])
            groups.append(Group(part, tuple(specs[n] for n in part)))
    return tuple(groups)


@dataclass(frozen=True)
class Pool:
    """The blocks of one rank."""

    groups: tuple[Group, ...]
    block_bytes: int  # of one block id in the shared pool

    def blocks(self, available: int) -> int:
        """Blocks that fit into ``available`` bytes (get_num_blocks)."""
        return max(available // self.block_bytes, 0)

    def request_blocks(self, limits: Limits) -> int:
        """Blocks of one request of max_model_len."""
        return sum(
            max(s.request_pages(limits) for s in g.specs)
            if g.per_layer
            else g.spec.request_pages(limits)
            for g in self.groups
        )

    def request_bytes(self, limits: Limits) -> int:
        """Bytes of one request of max_model_len (_max_memory_usage_bytes_from_groups)."""
        return self.block_bytes * self.request_blocks(limits)


def pool(groups: Sequence[Group], names: Mapping[str, Spec] | None = None) -> Pool:
    """The pool of one rank that holds the layers ``names`` (all when None).

    One block id has the page of every layer of the widest group: _pool_bytes_per_block.
    """
    mine = tuple(g.only(names) for g in groups) if names is not None else tuple(groups)
    held = [g for g in mine if g.layers]
    if not held:
        return Pool(mine, 1)
    width = max(
        sum(s.page for s in g.specs) if g.per_layer else len(g.layers) * g.spec.page for g in held
    )
    return Pool(mine, width)


@dataclass(frozen=True)
class Capacity:
    """What vLLM prints of a KV cache."""

    blocks: int
    concurrency: float
    tokens: int


def capacity(shared: Pool, blocks: int, limits: Limits, rules: Rules) -> Capacity:
    """Concurrency and tokens of ``blocks`` blocks, as this version prints them.

    get_max_concurrency_for_kv_cache_config and _report_kv_cache_config.
    """
    per_request = shared.request_blocks(limits)
    concurrency = blocks / per_request if per_request else 0.0
    if rules.tokens_from_concurrency:
        tokens = int(concurrency * limits.max_model_len)
    else:
        held = [g for g in shared.groups if g.layers]
        smallest = min(g.spec.block for g in held)
        tokens = blocks // len(held) * smallest * limits.dcp
    return Capacity(blocks, concurrency, tokens)


def longest(shared: Pool, available: int, limits: Limits, rules: Rules, ceiling: int) -> int:
    """The longest max_model_len of which one request fits (estimate_max_model_len)."""
    usable = available - (shared.block_bytes if rules.null_block else 0)

    def fits(length: int) -> bool:
        return shared.request_bytes(replace(limits, max_model_len=length)) <= usable

    if not fits(1):
        return 0
    low, high = 1, ceiling
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def align_hybrid_block(
    block: int, kernel_block: int, attention_token: int, state: int
) -> tuple[int, int]:
    """Attention block size and page so that a page holds a recurrent state.

    Platform._align_hybrid_block_size, modes "none" and "align": the smallest multiple of the
    kernel's block whose page is at least the state; the state is padded to that page.
    """
    unit = lcm(max(kernel_block, 1), 1)
    unit = max(unit, block)
    wanted = unit * ceil(state / (unit * attention_token))
    block = max(block, wanted)
    return block, block * attention_token
