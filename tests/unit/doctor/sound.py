"""A fleet in which everything is as planned, as data: what a test breaks, the doctor must find."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.unit.fleets import fleet, states, unit
from vllm_fleet import weights
from vllm_fleet.doctor.case import Case
from vllm_fleet.doctor.questions import question, served_names
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import Inputs, read_inputs
from vllm_fleet.spec.model import Fleet, HostSpec
from vllm_fleet.state import HostState

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
KEYS = '- {name: app, key: "sk-app-1"}\n'
GATEWAY = "api_keys: {file: secrets/keys.yml}\n"
CLOCK = NOW.timestamp()


def sound(root: Path, keys: str = KEYS, **group_vars: str) -> Case:
    """The case of a fleet that was deployed and serves."""
    (root / "secrets").mkdir(parents=True, exist_ok=True)
    (root / "secrets/keys.yml").write_text(keys)
    made = fleet(root, gateway=GATEWAY, **group_vars)
    inputs = read_inputs(made)
    fresh = states(made)
    plans = plan_fleet(made, fresh, inputs)
    there = {name: deployed(plan) for name, plan in plans.items()}
    # What one host has decides files of others, such as the firewall's of the gateway's addresses.
    plans = plan_fleet(made, there, inputs)
    there = {name: deployed(plan) for name, plan in plans.items()}
    return Case(
        inventory="inventory/prod.py",
        fleet=made,
        inputs=inputs,
        states=there,
        answers=answers(made, inputs),
        asked_at={spec.name: (CLOCK - 1, CLOCK + 1) for spec in made.hosts},
        now=NOW,
    )


def deployed(plan: HostPlan) -> HostState:
    """The state of a host after its deploy."""
    files = {
        f.path: f for f in (*plan.files, *(f for fs in plan.instance_files.values() for f in fs))
    }
    services = (
        *plan.bundle_services,
        *plan.firewall_services,
        *plan.gateway_services,
        *plan.monitoring_services,
    )
    units = {service.unit: unit() for service in services}
    units |= {one.unit: unit() for one in plan.wanted}
    stamps = {}
    for one in plan.wanted:
        wanted = weights.wanted(one.model_name, one.model)
        stamps[wanted.stamp] = {
            **wanted.identity,
            "passed": ["tokenizer", "chat_template"],
            "intact": True,
            "config": None,
            "quant": None,
            "sha256": [],
            "listing": None,
            "verified_at": "",
        }
    listening = {
        str(one.port): {"pid": 100 + one.port, "user": "vllm", "command": "vllm", "unit": one.unit}
        for one in plan.wanted
    }
    if "gateway" in plan.spec.groups:
        listening["80"] = {"pid": 9, "user": "root", "command": "nginx", "unit": "nginx.service"}
        listening["9145"] = listening["80"]
    exporter = "prometheus-node-exporter"
    listening["9100"] = {"pid": 7, "user": "p", "command": exporter, "unit": f"{exporter}.service"}
    return replace(
        plan.state,
        packages=dict.fromkeys(plan.packages, "1"),
        manifest={path: file.sha256 for path, file in files.items()},
        files={
            path: [file.sha256, oct(file.mode), file.owner, file.group]
            for path, file in files.items()
        },
        units=units,
        loaded={s.unit: f"{s.restarts}:{s.reloads}" for s in services},
        releases={b.id: {"version": b.id.split("-")[0]} for b in plan.releases},
        weights=stamps,
        listening=listening,
        tools=plan.tools.id if plan.tools else None,
        instances={
            one.name: {
                "actual": None,
                "start_seconds": 90.0,
                "running": plan.checksums[one.name],
                "ready": True,
                "release": one.release,
            }
            for one in plan.wanted
        },
        nics={"bond0": {"state": "up", "speed_mbit": 100000, "mtu": 1500, "hardware": True}},
    )


def answers(made: Fleet, inputs: Inputs) -> dict[str, dict[str, Any]]:
    """What onhost/doctor.py prints on each host, which all are sound."""
    names = served_names(made)
    return {spec.name: _answer(made, spec, inputs, names) for spec in made.hosts}


def _answer(
    made: Fleet, spec: HostSpec, inputs: Inputs, names: dict[str, set[str]]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "time": CLOCK,
        "strangers": [],
        "disks": [{"mount": "/", "free_mib": 500_000, "free": 0.6, "inodes_free": 0.9}],
        "synchronised": True,
        "interfaces": ["bond0", "lo"],
        "blocking": [],
        "instances": {},
        "stamps": {},
        "gateway": None,
        "prometheus": None,
    }
    order = question(made, spec, inputs, NOW)
    for one in order["instances"]:
        found["instances"][one["name"]] = {
            "script_names": sorted(names[one["model"]]),
            "environment": {},
            "restarts": {"count": 0, "log": "", "last": None},
            "names": sorted(names[one["model"]]),
            "answer": {"ok": True, "seconds": 0.1, "why": ""},
            "turns": {"ok": True, "why": "", "answers": 3, "ended": 3, "reasoning": False},
            "why": "",
            "template": True,
        }
    for path in order["stamps"]:
        found["stamps"][path] = {"there": True, "changed": [], "wrong": [], "bytes": 0}
    if order["gateway"]:
        instances = [
            (pool, host.name, one)
            for host in made.hosts
            for one in host.instances
            for pool in [one.model]
        ]
        found["gateway"] = {
            "why": "",
            "names": sorted(set().union(*names.values())),
            "answers": {
                model: {"ok": True, "why": "200 ", "seconds": 0.1}
                for model in order["gateway"]["models"]
            },
            "certificate": None,
            "reach": dict.fromkeys(order["gateway"]["reach"], ""),
            "status": {
                "pools": [
                    {
                        "name": pool,
                        "instances": [
                            {
                                "host": host,
                                "name": one.name,
                                "ready": True,
                                "draining": False,
                                "state": "ready",
                                "in_flight": 0,
                            }
                        ],
                    }
                    for pool, host, one in instances
                ]
            },
        }
    if order["prometheus"]:
        found["prometheus"] = {"why": "", "targets": 9, "down": [], "alerts": []}
    copied: dict[str, Any] = json.loads(json.dumps(found))
    return copied
