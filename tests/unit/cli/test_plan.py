"""`fleet plan` on pyinfra's @fake connector: sound, broken, MIG, in-use and mixed hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cards.made import matrix, uniform, with_lost
from tests.unit.deploys.test_fake import BY_KIND, VARS, fleet_command, lay_out
from tests.unit.fleets import CARDS, state

pytestmark = pytest.mark.deploys
REPO = Path(__file__).resolve().parents[3]
HEADER, *ROWS = CARDS.splitlines()


def plan(
    root: Path, *flags: str, text: str = VARS, **changes: dict[str, Any] | None
) -> subprocess.CompletedProcess[str]:
    lay_out(root, text, **changes)
    return fleet_command(root, "plan", *flags, "inventory/prod.py")


def cards(**changes: Any) -> dict[str, Any]:
    return {"cards": {**state().cards, **changes}}


def test_sound_hosts_are_shown_as_deploy_would_make_them(tmp_path: Path) -> None:
    before = sorted(p.name for p in tmp_path.iterdir())
    done = plan(tmp_path, text=BY_KIND)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout  # plain when piped
    for words in (
        "4 x NVIDIA L40S",
        "2 (chosen now)",
        "start     glm-a, qwen-a",
        "will write placement/prod.yml: @fake/gpu-1: qwen-a: 1 x L40S = cards 2",
        "not sized: its config.json is not known",
    ):
        assert words in done.stdout, done.stdout
    assert not (tmp_path / "placement").exists()
    assert before == []


def test_json_of_a_broken_a_mig_an_in_use_and_a_mixed_host(tmp_path: Path) -> None:
    mig = [HEADER + ", mig.mode.current", *(f"{row}, Disabled" for row in ROWS)]
    mig[2] = mig[2].replace("Disabled", "Enabled")
    holder = {
        "uuid": "GPU-3333",
        "pid": 77,
        "user": "bob",
        "command": "train.py",
        "unit": "jupyter.service",
        "memory_mib": 40000,
    }
    broken = {**cards(topo=matrix(with_lost(4, "NV18", 0, "SYS")), holders=[holder])}
    mixed = "\n".join([*mig[:3], *(row.replace("L40S", "L4") for row in mig[3:])])
    done = plan(tmp_path, "--json", gpu_1=broken, gpu_2=cards(csv=mixed))
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert not data["ok"]
    first, second, gateway = data["hosts"]
    assert {o["gpu"] for o in first["left_out"]} >= {0, 3}
    assert [g["gpus"] for g in second["card_groups"]] == [[0], [2, 3]]
    assert not gateway["card_groups"]
    refused = "\n".join(data["refusals"])
    assert "@fake/gpu-1: card 0 of instance glm-a: its NVLink is broken" in refused
    assert "@fake/gpu-2: card 1 of instance glm-a: it is in MIG mode" in refused
    assert "pid 77" not in refused  # nobody wants card 3
    held = next(v for v in first["verdicts"] if v["what"] == "card 3")
    assert held["level"] == "warning"
    assert "train.py (pid 77)" in held["remedy"]
    shown = plan(tmp_path, gpu_1=broken, gpu_2=cards(csv=mixed)).stdout
    assert "Refused: deploy.py would change nothing" in shown
    assert "deploy.py would change\n" not in shown


def test_the_plan_is_the_one_that_deploy_applies(tmp_path: Path) -> None:
    from tests.unit.deploys.test_fake import plan_of, run

    data = json.loads(plan(tmp_path, "--json", text=BY_KIND).stdout)
    dry = plan_of(run(tmp_path, "--json", "--dry", text=BY_KIND))
    for what, operation in (
        ("packages", "Debian packages"),
        ("files", "Files of ours"),
        ("releases", "Releases of vLLM"),
        ("weights", "Weights of the models"),
        ("start", "Instances that do not run"),
    ):
        mine = [h["name"].removeprefix("@fake/") for h in data["hosts"] if h["changes"][what]]
        assert mine == dry[operation], what


def test_a_host_without_facts_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    done = plan(tmp_path, "--json", gpu_2=None)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "python3: not found" in done.stderr
    data = json.loads(done.stdout)
    assert data["hosts"][0]["verdicts"]
    assert not data["hosts"][1]["reached"]
    assert any("@fake/gpu-2: gave no facts" in warning for warning in data["warnings"])


def test_a_wrong_spec_is_told_before_any_host_is_asked(tmp_path: Path) -> None:
    done = plan(tmp_path, text=VARS.replace("port: 8002", "port: 80000"))
    assert done.returncode == 1
    assert done.stderr.startswith("group_vars/all.yml:7:")
    assert "Traceback" not in done.stderr


def test_some_hosts_alone(tmp_path: Path) -> None:
    done = plan(tmp_path, "--limit", "@fake/gpu-2", gpu_2=cards(topo=matrix(uniform(4, "NV4"))))
    assert done.returncode == 0
    assert "gpu-1" not in done.stdout
    assert "0 1 2 3  NVIDIA L40S  45 GiB  NV4   glm-a" in done.stdout
    assert plan(tmp_path, "--limit", "nope").returncode == 2


def test_help_needs_no_pyinfra() -> None:
    code = (
        "import sys\nfrom vllm_fleet.cli import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'pyinfra', 'gevent', 'rich'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=REPO)
    assert done.stdout.splitlines()[-1] == "[]"
