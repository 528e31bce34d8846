"""Small fleets and host states for tests of what comes after the spec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.unit.cards.made import matrix, uniform
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.spec.load import load_fleet
from vllm_fleet.spec.model import Fleet
from vllm_fleet.state import HostState

INVENTORY = """\
gpu = [("gpu-1", {"ssh_hostname": "10.0.0.1"}), ("gpu-2", {"ssh_hostname": "10.0.0.2"})]
gateway = [("gw-1", {"ssh_hostname": "10.0.0.9"})]
monitoring = ["gw-1"]
"""
ALL = """\
vllm_version: "0.32.0"
models:
  glm: {repo: ZhipuAI/GLM-4-9B-0414, revision: v1, aliases: [glm-4]}
  qwen: {repo: Qwen/Qwen3-8B, revision: v2}
instances:
  - {name: glm-a, hosts: [gpu-1, gpu-2], model: glm, cards: [0, 1], port: 8001}
  - {name: qwen-a, hosts: [gpu-1], model: qwen, cards: [2], port: 8002}
"""
CARDS = "\n".join(
    [
        "index, name, uuid, pci.bus_id, memory.total [MiB], memory.used [MiB], compute_cap, "
        "driver_version, persistence_mode",
        *(
            f"{i}, NVIDIA L40S, GPU-{i}{i}{i}{i}, 00000000:{i}1:00.0, 46068 MiB, 4 MiB, 8.9, "
            "580.95.05, Enabled"
            for i in range(4)
        ),
    ]
)


def fleet(root: Path, *, inventory: str = INVENTORY, **group_vars: str) -> Fleet:
    """The checked fleet of these texts; `all` is :data:`ALL` unless given."""
    for folder in ("inventory", "group_vars"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "inventory" / "prod.py").write_text(inventory)
    for name, text in {"all": ALL, **group_vars}.items():
        (root / "group_vars" / f"{name}.yml").write_text(text)
    return load_fleet(str(root / "inventory" / "prod.py"))


def state(**changes: Any) -> HostState:
    """A fresh Debian 12 GPU host with four cards, less what is changed."""
    values: dict[str, Any] = {
        "hostname": "gpu-1",
        "user": "root",
        "os": {"id": "debian", "version": "12", "name": "Debian GNU/Linux 12 (bookworm)"},
        "arch": "x86_64",
        "kernel": "6.1.0",
        "glibc": "2.36",
        "python": "3.11.2",
        "init": "systemd",
        "systemd": True,
        "memory": {"total_mib": 515000, "available_mib": 500000},
        "disks": {
            path: {"free_mib": 900 * 1024, "device": 1}
            for path in ("/opt/vllm", "/var/lib/vllm", "/var/cache")
        },
        "packages": {},
        "vllm_user": False,
        "manifest": {},
        "files": {},
        "units": {},
        "listening": {},
        "cards": {
            "present": True,
            "error": None,
            "csv": CARDS,
            "holders": [],
            "topo": matrix(uniform(4, "PIX")),
        },
        "releases": {},
        "tools": None,
        "weights": {},
    }
    return HostState(**{**values, **changes})


def states(fleet: Fleet, **changes: Mapping[str, Any]) -> dict[str, HostState]:
    """A state for every host; `changes` by host name, with `_` for `-`."""
    return {
        host.name: state(hostname=host.name, **changes.get(host.name.replace("-", "_"), {}))
        for host in fleet.hosts
    }


def unit(active: str = "active", enabled: str = "enabled", **fields: str) -> dict[str, str]:
    """Fields of a unit as the state holds them."""
    return {"ActiveState": active, "UnitFileState": enabled, "NRestarts": "0", **fields}


def settled(plan: HostPlan) -> dict[str, Any]:
    """Changes that make the state of a host be as its plan wants it, everything running."""
    daemons = (*plan.firewall_services, *plan.gateway_services, *plan.monitoring_services)
    return {
        "packages": dict.fromkeys(plan.packages, "1"),
        "manifest": {f.path: f.sha256 for f in plan.files},
        "files": {f.path: [f.sha256, oct(f.mode), f.owner, f.group] for f in plan.files},
        "releases": {r.id: {"version": r.id.split("-")[0]} for r in plan.releases},
        "tools": plan.tools.id if plan.tools else None,
        "weights": {
            str(w.order["stamp"]): {
                **{key: w.order[key] for key in ("source", "repo", "revision")},
                "passed": w.order["needs"],
                "intact": True,
                "config": None,
                "quant": None,
            }
            for w in plan.weights
        },
        "units": {
            **{i.unit: unit() for i in plan.instances},
            **{s.unit: unit() for s in daemons},
        },
        "loaded": {s.unit: f"{s.restarts}:{s.reloads}" for s in daemons},
        "instances": {
            i.name: {
                "running": plan.checksums[i.name],
                "ready": True,
                "release": i.release,
                "start_seconds": 60.0,
            }
            for i in plan.instances
        },
    }
