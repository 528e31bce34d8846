"""A plan of many hosts: what it says of one on which nothing is to be done, and what it costs."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit import large
from tests.unit.fleets import unit
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import read_inputs
from vllm_fleet.spec.load import load_fleet
from vllm_fleet.state import HostState


def calls(root: Path, hosts: int) -> int:
    """How many function calls it takes to read and plan so many hosts."""
    large.write_files(root, hosts)
    profile = cProfile.Profile()
    profile.enable()
    fleet = load_fleet(str(root / "inventory" / "prod.py"))
    inputs = read_inputs(fleet)
    profile.disable()
    states = large.bare(fleet)
    profile.enable()
    plan_fleet(fleet, states, inputs)
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.deploys
def test_one_more_host_costs_the_same_in_a_large_fleet(tmp_path: Path) -> None:
    """Counted in calls, which other work on this machine does not change."""
    calls(tmp_path / "first", 22)  # what is made once
    few, some, many = (calls(tmp_path / str(n), n) for n in (22, 32, 62))
    assert (many - some) / 30 < 1.15 * (some - few) / 10


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HostPlan]:
    """Plans of a small fleet on which nothing is to be done."""
    root = tmp_path_factory.mktemp("settled")
    large.write_files(root, 4)
    states = large.settle(root)
    fleet = load_fleet(str(root / "inventory" / "prod.py"))
    return plan_fleet(fleet, states, read_inputs(fleet))


def test_nothing_is_to_be_done_on_hosts_that_are_as_wanted(settled: dict[str, HostPlan]) -> None:
    assert all(plan.as_wanted for plan in settled.values())


GPU, GATEWAY = f"{large.PREFIX}gpu-0", f"{large.PREFIX}gw-1"
INSTANCE = "vllm@i0.service"


def without(values: dict[str, Any]) -> dict[str, Any]:
    """All of them but the first."""
    return dict(list(values.items())[1:])


@pytest.mark.parametrize(
    ("host", "part", "change"),
    [
        (GPU, "packages", without),
        (GPU, "files", without),
        (GPU, "manifest", lambda manifest: {**manifest, "/etc/vllm/old": "0"}),
        (GPU, "tools", lambda _: "another"),
        (GPU, "releases", without),
        (GPU, "weights", without),
        (GPU, "loaded", without),
        (GPU, "units", lambda units: {**units, INSTANCE: unit("failed")}),
        (GPU, "units", lambda units: {**units, "vllm@left.service": unit()}),
        (GPU, "instances", lambda found: {**found, "i0": {**found["i0"], "running": "old"}}),
        (GATEWAY, "units", lambda units: {**units, "nginx.service": unit("inactive")}),
        (GATEWAY, "loaded", lambda loaded: {**loaded, "nginx.service": ":old"}),
    ],
)
def test_anything_that_differs_is_to_be_done(
    settled: dict[str, HostPlan], tmp_path: Path, host: str, part: str, change: Any
) -> None:
    states: dict[str, HostState] = {name: plan.state for name, plan in settled.items()}
    states[host] = replace(states[host], **{part: change(getattr(states[host], part))})
    large.write_files(tmp_path, 4)
    fleet = load_fleet(str(tmp_path / "inventory" / "prod.py"))
    plans = plan_fleet(fleet, states, read_inputs(fleet))
    assert not plans[host].as_wanted
