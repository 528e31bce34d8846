"""Room for everything at once, before anything begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import ALL, fleet, states
from vllm_fleet import room
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import Refusal, plan_fleet
from vllm_fleet.spec.inputs import read_inputs

GIB = 1 << 30
MODELS = {"glm": ("ZhipuAI/GLM-4-9B-0414", "v1", 30), "qwen": ("Qwen/Qwen3-8B", "v2", 20)}


def plans(root: Path, all_vars: str = ALL, **changes: Any) -> dict[str, HostPlan]:
    (root / "listings").mkdir(exist_ok=True)
    for number, (name, (repo, revision, size)) in enumerate(MODELS.items()):
        files = [
            {
                "path": f"{part}.safetensors",
                "size": size * GIB // 2,
                "sha256": f"{number}{part}" * 32,
            }
            for part in range(2)
        ]
        about = {"source": "modelscope", "repo": repo, "revision": revision, "files": files}
        (root / f"listings/{name}@{revision}.json").write_text(json.dumps(about))
    found = fleet(root, all=all_vars)
    return plan_fleet(found, states(found, **changes), read_inputs(found))


def disks(opt: float, cache: float | None = None) -> dict[str, dict[str, int]]:
    one = {"free_mib": int(opt * 1024), "device": 1}
    other = one if cache is None else {"free_mib": int(cache * 1024), "device": 2}
    return {"/opt/vllm": one, "/var/lib/vllm": one, "/var/cache": other}


def test_one_disk_for_all_of_it(tmp_path: Path) -> None:
    # tools, release 12 + 5, weights 30 + 20 and a little beside each
    with pytest.raises(Refusal) as refused:
        plans(tmp_path, gpu_1={"disks": disks(60)})
    (line,) = refused.value.reasons
    assert line.startswith("gpu-1: /opt/vllm has 60.0 GiB free, needed are 67.9 GiB (tools ")
    for part in ("release 0.32.0-open 12.0 GiB", "weights of glm 30.2 GiB", "7.9 GiB are missing"):
        assert part in line
    assert plans(tmp_path, gpu_1={"disks": disks(68)})


def test_each_disk_by_itself(tmp_path: Path) -> None:
    assert plans(tmp_path, gpu_1={"disks": disks(63, cache=6)})
    with pytest.raises(Refusal, match=r"/var/cache has 4.0 GiB free, needed are 5.0 GiB \(downl"):
        plans(tmp_path, gpu_1={"disks": disks(63, cache=4)})
    with pytest.raises(Refusal, match=r"/opt/vllm has 62\.0 GiB free"):
        plans(tmp_path, gpu_1={"disks": disks(62, cache=6)})


def test_what_is_there_already_needs_no_room(tmp_path: Path) -> None:
    part = {"/opt/vllm/models/glm/v1": 25 * GIB}
    assert plans(tmp_path, gpu_1={"disks": disks(43), "fetched": part})
    older = {
        "/opt/vllm/models/qwen/v1/.verified.json": {
            "source": "modelscope", "intact": True, "sha256": ["10" * 32, "11" * 32],
        }
    }  # fmt: skip
    assert plans(tmp_path, gpu_1={"disks": disks(48), "weights": older})
    with pytest.raises(Refusal):
        plans(tmp_path, gpu_1={"disks": disks(47), "weights": older})


def test_a_further_release_shares_the_cache(tmp_path: Path) -> None:
    plan = plans(tmp_path, gpu_1={"releases": {"0.31.0-open": {}}})["gpu-1"]
    sizes = {want.what: want.size for want in room.wants(plan)}
    assert sizes["release 0.32.0-open"] == 3 * GIB
    assert "downloads of packages" not in sizes


def test_all_hosts_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        plans(tmp_path, gpu_1={"disks": disks(1)}, gpu_2={"disks": disks(2)})
    assert [line.partition(":")[0] for line in refused.value.reasons] == ["gpu-1", "gpu-2"]
