"""What pyinfra does otherwise than one thinks (docs/decisions.md): each would show up here again.

Of the source: what is known to mislead is not used. Of what is run: what we do instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import ALL, fleet, state, states, unit
from vllm_fleet.deploys import fleet as deploying
from vllm_fleet.host_plan import HostPlan, Service
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import Inputs

REPO = Path(__file__).resolve().parents[3]
FILES = [
    *(REPO / name for name in ("deploy.py", "upgrade.py", "rollback.py", "maintain.py")),
    REPO / "config.py",
    *sorted((REPO / "vllm_fleet" / "deploys").glob("*.py")),
    *sorted((REPO / "vllm_fleet" / "operations").glob("*.py")),
]
# Global arguments and options that do something else than they seem to.
MISLEADING = {
    "_serial": "runs an operation on all hosts, also after one has failed",
    "_retries": "a gate fails by its exit code, once, and says why",
    "_retry_until": "one that never comes true ends as success",
    "_ignore_errors": "a failure that nobody sees",
    "restarted": "restarts only what runs, and is lost where a run dies before it",
    "reloaded": "is lost where a run dies before it: see HostPlan.due",
}


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path, node


def test_nothing_is_used_that_misleads() -> None:
    found = [
        f"{path.name}:{call.lineno}: {word.arg}: {MISLEADING[word.arg]}"
        for path, call in calls()
        for word in call.keywords
        if word.arg in MISLEADING
    ]
    assert not found
    assert len(list(calls())) > 200


def test_a_change_that_must_stop_is_one_call_that_rolls_by_itself() -> None:
    """Operations over hosts go on after a failure; a rollout is one function for all hosts."""
    once = [
        ast.unparse(word.value)
        for path, call in calls()
        for word in call.keywords
        if word.arg == "function" and any(one.arg == "_run_once" for one in call.keywords)
    ]
    assert {f"rolling.{name}" for name in ("deploy", "maintain", "rollback", "upgrade")} <= {*once}


def test_operations_are_called_the_same_on_every_host() -> None:
    """pyinfra merges those at one line over hosts and shows the name that one of them gave."""
    named = [
        (path.name, call.lineno, word.value)
        for path, call in calls()
        for word in call.keywords
        if word.arg == "name" and isinstance(call.func, ast.Attribute)
    ]
    told = [one for one in named if isinstance(one[2], ast.JoinedStr)]
    assert not told
    assert len(named) > 15


def test_hosts_that_take_part_come_in_declared_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyinfra keeps active hosts in a set: the first of it is no canary."""

    class Host:
        def __init__(self, name: str) -> None:
            self.name = name

    declared = [Host(f"g{number}") for number in (7, 3, 9, 1, 5, 2, 8)]
    active = {one for one in declared if one.name != "g9"}
    fake: Any = type(
        "State", (), {"active_hosts": active, "is_host_in_limit": lambda self, one: False}
    )()
    monkeypatch.setattr(deploying, "inventory", declared)
    monkeypatch.setattr(deploying, "state", fake)
    assert [one.name for one in deploying.taking_part()] == ["g7", "g3", "g1", "g5", "g2", "g8"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_order_is_taken_from_a_set_of_hosts(path: Path) -> None:
    loops = [
        node.iter
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.For | ast.comprehension)
    ]
    assert not [
        one
        for one in loops
        if isinstance(one, ast.Attribute) and one.attr in ("active_hosts", "activated_hosts")
    ]


def test_a_restart_is_not_lost_with_the_run_that_wrote_the_files(tmp_path: Path) -> None:
    """Files are as wanted, and what reads them runs: it is restarted as it has not read them."""
    service = Service("prometheus.service", "new", "", ())
    plan = HostPlan(
        fleet(tmp_path).host("gw-1"),
        state(
            units={"prometheus.service": unit()},
            loaded={"prometheus.service": "old:"},
        ),
    )
    assert "systemctl restart prometheus.service" in plan.due([service])[0]
    read = state(
        units={"prometheus.service": unit()},
        loaded={"prometheus.service": "new:"},
    )
    assert HostPlan(plan.spec, read).due([service]) == []


def test_a_process_is_known_by_what_it_was_started_with(tmp_path: Path) -> None:
    """The same of instances: every file is in place, and the process is of an earlier run."""
    found = fleet(tmp_path, all=ALL)
    first = plan_fleet(found, states(found), Inputs())["gpu-1"]
    known = {
        "instances": {
            one.name: {"running": "of before", "ready": True, "release": one.release}
            for one in first.instances
        },
        "units": {one.unit: unit() for one in first.instances},
        "files": {f.path: [f.sha256, oct(f.mode), f.owner, f.group] for f in first.files},
        "releases": {one.release: {"version": one.vllm_version} for one in first.instances},
    }
    plan = plan_fleet(found, states(found, gpu_1=known), Inputs())["gpu-1"]
    assert [one.name for one in plan.to_restart()] == [one.name for one in plan.instances]
