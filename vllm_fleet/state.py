"""What a host is like now, as plain data: filled by the fact, read by the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Who listens on a port or holds a card: {"pid", "user", "command", "unit"}.
Process = dict[str, Any]


@dataclass(frozen=True)
class HostState:
    """Field by field what vllm_fleet/onhost/state.py prints."""

    hostname: str
    user: str
    os: dict[str, str]  # id, version, name
    arch: str
    kernel: str
    glibc: str
    python: str
    init: str
    systemd: bool
    memory: dict[str, int]  # total_mib, available_mib
    disks: dict[str, dict[str, int]]  # by path: free_mib, device
    packages: dict[str, str]  # installed version by name
    vllm_user: bool
    manifest: dict[str, str]  # sha256 by path, as we put it
    files: dict[str, list[str]]  # [sha256, mode, owner, group] by path, as it is
    units: dict[str, dict[str, str]]
    listening: dict[str, Process]  # by TCP port
    cards: dict[str, Any]  # texts of nvidia-smi (csv, topo, p2p, head), holders, error; rocm
    releases: dict[str, dict[str, Any]]  # stamp by id
    tools: str | None  # id of the tools venv in use
    weights: dict[str, dict[str, Any]]  # by path of the stamp: what it says, "intact", config
    loaded: dict[str, str] = field(default_factory=dict)  # checksum that a daemon last read
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollout: dict[str, dict[str, Any]] = field(default_factory=dict)  # record by instance
    held: dict[str, Any] = field(default_factory=dict)  # who keeps this host out of service
    lock: dict[str, Any] = field(default_factory=dict)  # who changes the fleet; one host's
    fabric: dict[str, Any] = field(default_factory=dict)  # tested: what was; change: cut off
    texts: dict[str, str | None] = field(default_factory=dict)  # of files of others, by path
    cmdline: str = ""  # of the kernel
    uptime_s: int = 0
    cpus: int = 0
    numa: dict[str, dict[str, Any]] = field(default_factory=dict)  # cpus, memory_mib by node
    nics: dict[str, dict[str, Any]] = field(default_factory=dict)  # state, speed_mbit, mtu, ...
    rdma: dict[str, dict[str, Any]] = field(default_factory=dict)  # by device:port
    transfers: dict[str, Any] = field(default_factory=dict)  # ports of the kernel, peermem
    libraries: dict[str, dict[str, str]] = field(default_factory=dict)  # torch, nccl, vllm by id
    kernel_log: list[str] = field(default_factory=list)  # lines of it that tell of broken cards
    limits: dict[str, str] = field(default_factory=dict)  # memlock: systemd's default in bytes
    nodes: list[str] = field(default_factory=list)  # /dev/nvidia*, /dev/kfd, /dev/dri/*
    fetched: dict[str, int] = field(default_factory=dict)  # bytes beside a directory of weights
    bundle: dict[str, Any] = field(default_factory=dict)  # stamp of the bundle; {}: none, or stale

    # By instance, not from the host: a vLLM that is not ours and is to be taken over.
    adopted: dict[str, Process] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For pyinfra's debug output."""
        return dict(vars(self))

    def active(self, unit: str) -> bool:
        """Whether a unit runs, or is being started or stopped."""
        return self.units.get(unit, {}).get("ActiveState", "inactive") not in ("inactive", "failed")

    def enabled(self, unit: str) -> bool:
        """Whether a unit starts at boot."""
        return self.units.get(unit, {}).get("UnitFileState") in ("enabled", "static")

    def started_with(self, instance: str) -> str:
        """Checksum of the files that an instance was started with; "" where it never was."""
        return str(self.instances.get(instance, {}).get("running") or "")
