"""What a plan decides: the instances of all hosts, and the pools that they make."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_fleet.spec.model import Device, Model, Span


@dataclass(frozen=True)
class PlannedSpan:
    """One server over several hosts, and which part of it an instance is."""

    name: str
    rank: int
    hosts: tuple[str, ...]  # by rank
    addresses: tuple[str, ...]  # at which the ranks reach each other
    settings: Span
    tensor_parallel: int
    pipeline_parallel: int
    # What nccl.py has tested and put on the host, which its start reads: another one is a change.
    fabric: tuple[tuple[str, str], ...] = ()

    @property
    def address(self) -> str:
        """Of this rank."""
        return self.addresses[self.rank]


@dataclass(frozen=True)
class PlannedInstance:
    """One vLLM server on one host, with every choice made."""

    host: str
    address: str  # where gateways and monitors reach it
    name: str
    model_name: str
    model: Model
    port: int
    device: Device
    cards: tuple[int, ...]  # absolute indices, CUDA_DEVICE_ORDER=PCI_BUS_ID
    uuids: tuple[str, ...]  # of these cards, in the same order; empty on cpu
    release: str  # id, a directory below paths.RELEASES
    vllm_version: str
    weights: str  # directory of the verified weights
    args: dict[str, object]  # options of `vllm serve`, model's and instance's merged
    env: dict[str, str]
    start_seconds: int
    drain_seconds: int
    # Memory that sizing expects, per card: weights_gib, kv_cache_gib, kv_cache_tokens,
    # max_concurrency; empty where it was not sized, or not with these options.
    expected: dict[str, float] = field(default_factory=dict)
    span: PlannedSpan | None = None  # of which it is one rank

    @property
    def unit(self) -> str:
        """Name of its systemd unit."""
        return f"vllm@{self.name}.service"

    @property
    def answers(self) -> bool:
        """Whether it takes requests: of a span rank 0 does, for all of them."""
        return self.span is None or self.span.rank == 0


@dataclass(frozen=True)
class Pool:
    """The instances that serve one model name, over all hosts, in declared order."""

    name: str
    aliases: tuple[str, ...]
    model: Model
    instances: tuple[PlannedInstance, ...]
