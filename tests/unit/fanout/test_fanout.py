"""Which hosts give each other which weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import ALL, fleet, state
from vllm_fleet import weights
from vllm_fleet.host_plan import HostPlan, WeightsFetch
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.inputs import read_inputs
from vllm_fleet.spec.model import Model

ON = "fanout: {enabled: true, port: 9000}\n"
GLM = Model(repo="ZhipuAI/GLM-4-9B-0414", revision="v1")


def plans(root: Path, text: str = ALL + ON, has: tuple[str, ...] = ()) -> dict[str, HostPlan]:
    """Plans of both GPU hosts; those named have GLM already."""
    found = fleet(root, all=text)
    wanted = weights.wanted("glm", GLM)
    stamp = {**wanted.identity, "passed": list(weights.needs(wanted)), "intact": True}
    states = {
        name: state(weights={wanted.stamp: stamp} if name in has else {})
        for name in ("gpu-1", "gpu-2")
    }
    return plan_fleet(found, states, read_inputs(found))


def fetch(plan: HostPlan, model: str = "glm") -> WeightsFetch:
    return next(one for one in plan.weights if one.name == model)


def told(plan: HostPlan, model: str = "glm") -> dict[str, Any] | None:
    found: dict[str, Any] | None = fetch(plan, model).order.get("fanout")  # type: ignore[assignment]
    return found


def test_hosts_that_lack_a_model_fetch_it_together(tmp_path: Path) -> None:
    found = plans(tmp_path)
    both = ["10.0.0.1", "10.0.0.2"]
    for host, address in (("gpu-1", both[0]), ("gpu-2", both[1])):
        assert told(found[host]) == {
            "me": address, "port": 9000, "peers": both, "fetchers": both
        }  # fmt: skip
        assert not fetch(found[host]).serves
    assert told(found["gpu-1"], "qwen") is None  # on one host alone
    assert [one.name for one in found["gpu-1"].weights] == ["glm", "qwen"]


def test_a_host_that_has_it_serves_the_other(tmp_path: Path) -> None:
    found = plans(tmp_path, has=("gpu-1",))
    serving = fetch(found["gpu-1"])
    assert (serving.present, serving.serves) == (True, True)
    one = told(found["gpu-2"])
    assert one is not None
    assert (one["peers"], one["fetchers"]) == (["10.0.0.1", "10.0.0.2"], ["10.0.0.2"])


def test_where_all_have_it_nothing_is_done(tmp_path: Path) -> None:
    found = plans(tmp_path, has=("gpu-1", "gpu-2"))
    assert all(told(plan) is None and not fetch(plan).serves for plan in found.values())


@pytest.mark.parametrize(
    "text",
    [
        ALL,
        ALL + ON.replace("true", "false"),
        ALL.replace("{repo: ZhipuAI/GLM-4-9B-0414, revision: v1", "{source: path, repo: /m") + ON,
    ],
)
def test_off_or_with_own_directories_every_host_is_on_its_own(tmp_path: Path, text: str) -> None:
    assert all(told(plan) is None for plan in plans(tmp_path, text).values())


def test_its_port_is_checked_with_the_others(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"port 8001.*the fan-out of weights"):
        plans(tmp_path, ALL + ON.replace("9000", "8001"))
