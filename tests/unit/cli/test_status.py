"""`fleet status` on pyinfra's @fake connector: sound, mixed, cut off, held, unreached."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit import large
from tests.unit.deploys.test_fake import fleet_command, lay_out
from tests.unit.fleets import unit

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[3]
VARS = """\
vllm_version: "0.32.0"
models: {glm: {repo: ZhipuAI/GLM-4-9B-0414, revision: v1}}
instances:
  - {name: a, hosts: ["@fake/gpu-1", "@fake/gpu-2"], model: glm, cards: [0], port: 8001}
"""
RELEASES = {f"0.{n}.0-open": {"version": f"0.{n}.0"} for n in (31, 32)}


def host(release: str = "0.32.0-open", **changes: Any) -> dict[str, Any]:
    """A host whose instance serves."""
    return {
        "releases": RELEASES,
        "instances": {"a": {"release": release, "ready": True, "running": "x"}},
        "units": {"vllm@a.service": unit()},
        **changes,
    }


def status(root: Path, *flags: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    lay_out(root, VARS, **{"gpu_1": host(), "gpu_2": host(), **changes})
    return fleet_command(root, "status", *flags, "inventory/prod.py")


def test_a_sound_fleet(tmp_path: Path) -> None:
    done = status(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "glm: 2 of 2 ready" in done.stdout
    assert "Not as it should be" not in done.stdout
    assert "\x1b" not in done.stdout


def test_mixed_cut_off_refused_and_locked_as_json(tmp_path: Path) -> None:
    step = {"to": {"release": "0.32.0-open", "checksum": "2"}}
    good = {"release": "0.31.0-open", "checksum": "1"}
    bad = {"release": "0.32.1-open", "checksum": "3", "why": "3 times slower", "by_release": True}
    old = host(
        "0.31.0-open",
        rollout={"a": {"pool": "glm", "goods": [good], "refused": [bad], "step": step}},
    )
    lock = {"run": "1130-1", "who": "ann", "where": "x", "what": "upgrade.py", "silent": 500}
    done = status(tmp_path, "--json", gpu_2=old, gw_1={"lock": lock})
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["pools"] == [
        {
            "name": "glm",
            "instances": 2,
            "ready": 2,
            "releases": {"0.32.0-open": ["@fake/gpu-1/a"], "0.31.0-open": ["@fake/gpu-2/a"]},
            "mixed": True,
        }
    ]
    assert data["instances"][1]["cut_off"] == "0.32.0-open"
    assert data["instances"][1]["last_good"] == "0.31.0-open"
    assert data["refused"] == [{"pool": "glm", "release": "0.32.1-open", "why": "3 times slower"}]
    assert data["lock"]["stale"] is True
    told = "\n".join(data["findings"])
    for words in (
        "pool glm runs several releases: 0.32.0-open: @fake/gpu-1/a; 0.31.0-open: @fake/gpu-2/a",
        "@fake/gpu-2/a: a change to 0.32.0-open was cut off",
        "@fake/gpu-2/a: runs 0.31.0, group_vars want 0.32.0",
        "--data unlock=1130-1",
    ):
        assert words in told


def test_held_down_and_unreached_hosts_are_told(tmp_path: Path) -> None:
    held = host(held={"who": "ann", "why": "card 3"}, units={"vllm@a.service": unit("inactive")})
    done = status(tmp_path, gpu_1=held, gpu_2=host(units={"vllm@a.service": unit("failed")}))
    assert done.returncode == 1
    assert "@fake/gpu-1: held by ann (card 3)" in done.stdout
    assert "@fake/gpu-1/a: not running" not in done.stdout  # said by the line above
    assert "@fake/gpu-2/a: failed" in done.stdout
    assert "pool glm: no instance is ready" in done.stdout
    done = status(tmp_path, gpu_2=None)
    assert done.returncode == 1
    assert "@fake/gpu-2: gave no facts" in done.stdout
    assert "@fake/gpu-2/a  unknown" in done.stdout


def test_of_a_large_fleet_only_what_is_odd_is_listed(tmp_path: Path) -> None:
    large.write_files(tmp_path, 22, delay=0)
    states = large.settle(tmp_path)
    odd = states[f"{large.PREFIX}gpu-7"]
    odd.instances["i3"]["ready"] = False
    (tmp_path / "states" / "gpu-7.json").write_text(json.dumps(asdict(odd)))
    done = fleet_command(tmp_path, "status", "inventory/prod.py")
    assert done.returncode == 1
    assert "159 instances are ready, with what is wanted: --all lists them" in done.stdout
    assert f"{large.PREFIX}gpu-7/i3: not ready" in done.stdout
    assert f"{large.PREFIX}gpu-8/i3" not in done.stdout
    every = fleet_command(tmp_path, "status", "--all", "inventory/prod.py")
    assert f"{large.PREFIX}gpu-8/i3" in every.stdout


def test_a_spare_that_was_left_behind_is_told(tmp_path: Path) -> None:
    left = host()
    left["instances"]["a.spare"] = {"release": "0.32.0-open", "ready": True, "running": "y"}
    left["units"]["vllm@a.spare.service"] = unit()
    done = status(tmp_path, gpu_2=left)
    assert done.returncode == 1
    assert "@fake/gpu-2/a.spare: a spare, of a rollout that is under way or was" in " ".join(
        done.stdout.split()
    )
