"""Free cards for the only instance of a pool, and the spare as an instance like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import ALL, fleet, states, unit
from vllm_fleet import spares
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spares import Spare
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.inputs import Inputs

SERVES = {"running": "c", "ready": True, "release": "0.32.0-open", "port": 8002, "cards": [2]}
SPARE = {**SERVES, "port": 8003, "cards": [3]}


def planned(root: Path, *, all: str = ALL, **changes: Any) -> dict[str, HostPlan]:
    """Plans as the chapters of a run see them: with the spares that must stay."""
    found = fleet(root, all=all)
    known = states(found, **changes)
    return plan_fleet(spares.with_spares(found, spares.kept(found, known)), known, Inputs())


def test_the_only_one_of_a_pool_is_offered_free_cards_like_its_own(tmp_path: Path) -> None:
    found = planned(tmp_path)
    assert found["gpu-1"].spares == {"qwen-a": (3,)}
    assert found["gpu-2"].spares == {}  # the other pool has two


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (ALL.replace("cards: [2]", "cards: [2, 3]"), {}),
        # A card that somebody uses, or that an instance on its way out still holds.
        (
            ALL,
            {
                "cards": {
                    "holders": [
                        {
                            "pid": 7,
                            "uuid": "GPU-3333",
                            "user": "x",
                            "command": "train",
                            "unit": None,
                            "memory_mib": 9000,
                        }
                    ]
                }
            },
        ),
        (
            ALL,
            {
                "instances": {"old": {**SERVES, "cards": [3]}},
                "units": {"vllm@old.service": unit()},
            },
        ),
    ],
)
def test_cards_that_are_not_free_are_not_offered(
    tmp_path: Path, text: str, state: dict[str, Any]
) -> None:
    found = fleet(tmp_path, all=text)
    known = states(found)
    if "cards" in state:
        known["gpu-1"].cards.update(state.pop("cards"))
    known["gpu-1"].instances.update(state.get("instances", {}))
    known["gpu-1"].units.update(state.get("units", {}))
    assert plan_fleet(found, known, Inputs())["gpu-1"].spares == {}


def test_a_spare_is_an_instance_that_gateways_and_firewall_know(tmp_path: Path) -> None:
    found = fleet(tmp_path)
    with_it = spares.with_spares(found, [Spare("gpu-1", "qwen-a", (3,), 8003)])
    plans = plan_fleet(with_it, states(found), Inputs())
    spare = plans["gpu-1"].instances[-1]
    assert (spare.name, spare.cards, spare.uuids) == ("qwen-a.spare", (3,), ("GPU-3333",))
    assert spare.args == plans["gpu-1"].instances[1].args
    assert any("10.0.0.1:8003" in file.content for file in plans["gw-1"].files)
    firewall = next(f for f in plans["gpu-1"].files if f.path.endswith(".nft"))
    assert "8003" in firewall.content
    assert [one.name for one in plans["gpu-2"].instances] == ["glm-a"]


def test_its_port_is_one_that_nobody_has(tmp_path: Path) -> None:
    found = fleet(tmp_path)
    known = states(found, gpu_1={"listening": {"8003": {"pid": 1}}})
    assert spares.free_port(found.host("gpu-1"), known["gpu-1"]) == 8004


@pytest.mark.parametrize(
    ("instance", "units", "record", "stays"),
    [
        # What it stands in for is down, or in the middle of a change: without it nobody serves.
        ({**SERVES, "ready": False}, unit(active="failed"), {}, True),
        (SERVES, unit(), {"step": {"to": {"release": "0.33", "checksum": "c"}}}, True),
        (SERVES, unit(), {}, False),
    ],
)
def test_a_spare_that_was_left_behind_stays_as_long_as_it_is_needed(
    tmp_path: Path,
    instance: dict[str, Any],
    units: dict[str, str],
    record: dict[str, Any],
    stays: bool,
) -> None:
    names = {"vllm@qwen-a.service": units, "vllm@qwen-a.spare.service": unit()}
    state = {
        "instances": {"qwen-a": instance, "qwen-a.spare": SPARE},
        "units": names,
        "rollout": {"qwen-a": record},
    }
    plans = planned(tmp_path, gpu_1=state)
    known = any("10.0.0.1:8003" in file.content for file in plans["gw-1"].files)
    assert known is stays
    assert ("qwen-a.spare" in plans["gpu-1"].retired) is not stays


def test_nobody_else_may_call_an_instance_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"must not end in \.spare"):
        fleet(tmp_path, all=ALL.replace("name: qwen-a", "name: qwen-a.spare"))
