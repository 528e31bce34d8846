"""What a plan decides: the instances of all hosts, and the pools that they make."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_fleet.spec.model import Device, Model


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

    @property
    def unit(self) -> str:
        """Name of its systemd unit."""
        return f"vllm@{self.name}.service"


@dataclass(frozen=True)
class Pool:
    """The instances that serve one model name, over all hosts, in declared order."""

    name: str
    aliases: tuple[str, ...]
    model: Model
    instances: tuple[PlannedInstance, ...]
