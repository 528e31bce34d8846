"""bench.py on @fake hosts, through pyinfra's command line: what it does, and what it refuses.

The generator is a script here that hands out a report of GuideLLM: the load is not the point.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploys.test_rolling import GATEWAY, REPO, VARS, Operator, result

pytestmark = pytest.mark.deploys
REPORT = REPO / "tests/unit/bench/guidellm-0.8.1.json"
FILE = """\
load: {streams: [1, 2, 4, 8]}
configurations:
  as it is: {}
  fewer at once: {vllm_args: {max-num-seqs: 2}}
"""


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    one = Operator(tmp_path)
    one.wants(VARS)
    (tmp_path / "bench.py").write_text((REPO / "bench.py").read_text())
    (tmp_path / "configurations.yml").write_text(FILE)
    generator = tmp_path / "guidellm"
    generator.write_text(f'#!/bin/sh\ncp {REPORT} "$(dirname "$3")/guidellm.json"\n')
    generator.chmod(0o755)
    now = {"active": True, "ready": True, "checksum": one.plans()["@fake/gpu-1"].checksums["a"]}
    good = {"release": "0.31.0-open", "checksum": now["checksum"]}
    begun: dict[str, Any] = {"now": now, "step": {}, "goods": [good]}
    one.answers["*"]["switch begin"] = result(begun)
    return one


def bench(
    operator: Operator, *flags: str, instance: str = "@fake/gpu-1/a"
) -> subprocess.CompletedProcess[str]:
    asked = {
        "instance": instance,
        "configurations": "configurations.yml",
        "generator": str(operator.root / "guidellm"),
        "out": "out",
    }
    words = [word for key, value in asked.items() for word in ("--data", f"{key}={value}")]
    return operator.run("bench.py", *words, *flags)


def test_each_configuration_is_started_and_measured_and_what_was_is_put_back(
    operator: Operator,
) -> None:
    done = bench(operator, "-y")
    assert done.returncode == 0, done.stderr
    steps = [
        line
        for line in operator.did()
        if line.split()[1] in ("switch", "gateways") or line.endswith(("lock", "release"))
    ]
    assert steps == [
        "gw-1 ledger lock",
        "gw-1 gateways status",
        "gpu-1 switch stage",
        "gpu-1 switch begin",
        "gw-1 gateways drain",
        "gpu-1 switch stage",
        "gpu-1 switch switch",
        "gpu-1 switch stage",
        "gpu-1 switch switch",
        "gpu-1 switch switch",
        "gpu-1 switch watch",
        "gw-1 gateways undrain",
        "gpu-1 switch settle",
        "gw-1 ledger release",
    ]
    data = json.loads((operator.root / "out/result.json").read_text())["results"]
    assert [one["name"] for one in data] == ["as it is", "fewer at once"]
    assert "serves as before" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_tells_and_touches_nothing(operator: Operator) -> None:
    done = bench(operator, "--dry")
    assert done.returncode == 0, done.stderr
    assert operator.did() == []
    assert "@fake/gpu-1/a of glm: out of its pool, as it is; fewer at once, measured" in done.stderr


def test_the_last_ready_instance_of_a_pool(operator: Operator) -> None:
    known = {"pool": "glm", "ready": True, "draining": False, "in_flight": 0}
    ids = {
        "@fake/gpu-1/a": known,
        "@fake/gpu-2/a": {**known, "ready": False},
        "@fake/gpu-3/a": {**known, "draining": True},
    }
    operator.answers[GATEWAY] = {"gateways status": result({"instances": ids})}
    done = bench(operator, "-y")
    assert done.returncode == 1
    assert "it is the last ready instance of pool glm" in done.stderr
    assert operator.did("switch stage", "switch switch", "gateways drain") == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("no file", "configurations.yml: No such file"),
        ("wrong key", "configurations: a: dtype: unknown"),
        ("no cards", "configurations.yml: configurations: b: "),
        ("no option", "configurations.yml: configurations: b: --max-num-sequences"),
        ("no value of it", "configurations.yml: configurations: b: --kv-cache-dtype"),
        ("no generator", "fleet bench needs GuideLLM"),
        ("cut off", "was cut off: run upgrade.py"),
        ("unknown", "no instance gpu-7/a takes part; there is @fake/gpu-3/a, @fake/gpu-1/a"),
    ],
)
def test_what_is_refused_before_anything_is_touched(
    operator: Operator, change: str, told: str
) -> None:
    file = operator.root / "configurations.yml"
    if change == "no file":
        file.unlink()
    elif change == "wrong key":
        file.write_text("configurations: {a: {dtype: half}}")
    elif change == "no cards":
        file.write_text("configurations: {b: {cards: [8, 9]}}")
    elif change == "no option":
        file.write_text("configurations: {a: {}, b: {vllm_args: {max-num-sequences: 4}}}")
    elif change == "no value of it":
        file.write_text("configurations: {b: {vllm_args: {kv-cache-dtype: fp9}}}")
    elif change == "no generator":
        (operator.root / "guidellm").unlink()
    elif change == "cut off":
        operator.remembers("gpu-1", step={"name": "swapping", "to": {}})
    done = bench(operator, "-y", instance="gpu-7/a" if change == "unknown" else "@fake/gpu-1/a")
    assert done.returncode != 0
    assert "nothing was changed" in done.stderr
    assert told in done.stderr, done.stderr[-2000:]
    assert operator.did() == []
