"""The whole deploy.py on pyinfra's @fake connector, through its real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import ALL, state

pytestmark = pytest.mark.deploys
REPO = Path(__file__).resolve().parents[3]
INVENTORY = """\
import json as _json
from pathlib import Path as _Path

_states = _json.loads((_Path(__file__).parent.parent / "states.json").read_text())

def _host(name, address):
    answer = {"success": False, "stderr": ["sh: 1: python3: not found"]}
    if name in _states:
        answer = {"stdout": [_states[name]]}
    return (f"@fake/{name}", {"fake_delay": 0, "fake_delay_jitter": 0, "address": address,
            "fake_responses": {"What a host is like now": answer}})

gpu = [_host("gpu-1", "10.0.0.1"), _host("gpu-2", "10.0.0.2")]
gateway = [_host("gw-1", "10.0.0.9")]
monitoring = [_host("gw-1", "10.0.0.9")]
"""
VARS = ALL.replace("gpu-1", '"@fake/gpu-1"').replace("gpu-2", '"@fake/gpu-2"')


def fleet_command(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`fleet WORDS` in an operator's directory, as from a shell without a terminal."""
    code = "from vllm_fleet.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(REPO), "PYINFRA_PROGRESS": "off"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def lay_out(
    root: Path, text: str = VARS, inventory: str = INVENTORY, **changes: dict[str, Any] | None
) -> None:
    """Write an operator's directory with these hosts; None as a change: it gives no facts."""
    for folder in ("inventory", "group_vars"):
        (root / folder).mkdir(exist_ok=True)
    (root / "inventory" / "prod.py").write_text(inventory)
    (root / "group_vars" / "all.yml").write_text(text)
    for name in ("deploy.py", "config.py"):
        (root / name).write_text((REPO / name).read_text())
    found = {
        name: json.dumps(asdict(state(hostname=name, **(change or {}))))
        for name in ("gpu-1", "gpu-2", "gw-1")
        if (change := changes.get(name.replace("-", "_"), {})) is not None
    }
    (root / "states.json").write_text(json.dumps(found))


def run(
    root: Path,
    *flags: str,
    text: str = VARS,
    inventory: str = INVENTORY,
    **changes: dict[str, Any] | None,
) -> subprocess.CompletedProcess[str]:
    """Run deploy.py with the state of each host; None as a change: the host gives no facts."""
    lay_out(root, text, inventory, **changes)
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", *flags, "inventory/prod.py", "deploy.py"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(REPO), "PYINFRA_PROGRESS": "off"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def plan_of(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Hosts with a change by operation, from `--json --dry`."""
    assert done.returncode == 0, done.stderr
    return {
        one["name"]: sorted(name.removeprefix("@fake/") for name in one["hosts_with_change"])
        for one in json.loads(done.stdout)["plan"]
    }


def test_a_dry_run_shows_the_chapters_in_order(tmp_path: Path) -> None:
    plan = plan_of(run(tmp_path, "--json", "--dry"))
    assert plan == {
        "Debian packages": ["gpu-1", "gpu-2", "gw-1"],
        "Files of ours": ["gpu-1", "gpu-2", "gw-1"],
        "Firewall": ["gpu-1", "gpu-2"],
        "Tools": ["gpu-1", "gpu-2"],
        "Releases of vLLM": ["gpu-1", "gpu-2"],
        "Weights of the models": ["gpu-1", "gpu-2"],
        "Everything is staged on every host": [],
        "Gateway": ["gw-1"],
        "The gateways know the pools": [],
        "Instances that do not run": ["gpu-1", "gpu-2"],
        "Monitoring": ["gpu-1", "gpu-2", "gw-1"],
        "Everything serves": [],
    }


def test_a_wrong_spec_is_told_once_with_its_place_and_nothing_is_run(tmp_path: Path) -> None:
    done = run(tmp_path, "-y", text=VARS.replace("port: 8002", "port: 80000"))
    assert done.returncode == 1
    assert done.stderr.count("group_vars/all.yml:7:") == 1
    assert "Traceback" not in done.stderr
    assert "Starting operation" not in done.stderr


def test_an_unfit_host_stops_the_run_before_anything_is_changed(tmp_path: Path) -> None:
    done = run(tmp_path, "-y", gpu_2={"user": "ops"})
    assert done.returncode == 1
    assert "@fake/gpu-2: commands run as ops, not root" in done.stderr
    assert "nothing was changed" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Starting operation" not in done.stderr


def test_a_host_that_fails_stops_the_others_where_they_meet_next(tmp_path: Path) -> None:
    broken = INVENTORY.replace(
        '"fake_responses": {',
        '"fake_responses": {**({"lib/release.py": {"success": False}} if name == "gpu-2" else {}),',
    )
    done = run(tmp_path, "-y", inventory=broken)
    assert done.returncode == 1
    assert done.stderr.count("stopped here on every host, since @fake/gpu-2 failed") == 1
    assert "Starting operation: Releases of vLLM" in done.stderr
    assert "Starting operation: Gateway" not in done.stderr
    assert "Starting operation: Instances that do not run" not in done.stderr


def test_a_host_that_is_lost_stops_nobody_and_is_named_at_the_end(tmp_path: Path) -> None:
    dying = INVENTORY.replace(
        "def _host(",
        "class _Dead(dict):\n"
        "    def get(self, key, default=None):\n"
        '        raise ConnectionError("gone")\n\n'
        "def _host(",
    ).replace('now": answer}', 'now": answer, **({"": _Dead()} if name == "gpu-2" else {})}')
    done = run(tmp_path, "-y", inventory=dying)
    assert done.returncode == 1
    assert "stopped here" not in done.stderr
    assert "Starting operation: Instances that do not run" in done.stderr
    failed = done.stderr[done.stderr.index("--> Failed hosts:") :].split("\n", 1)[1]
    assert failed.strip() == "@fake/gpu-2: connection lost: Debian packages"


def test_a_host_that_fails_is_named_at_the_end_and_the_others_are_counted(tmp_path: Path) -> None:
    broken = INVENTORY.replace(
        '"fake_responses": {',
        '"fake_responses": {**({"lib/release.py": {"success": False}} if name == "gpu-2" else {}),',
    )
    done = run(tmp_path, "-y", inventory=broken)
    failed = done.stderr[done.stderr.index("--> Failed hosts:") :].splitlines()
    assert [line.strip() for line in failed[1:]] == [
        "@fake/gpu-2: failed: Releases of vLLM",
        "stopped with them, nothing of their own is wrong: 2 hosts",
    ]


def test_machines_read_one_json_object(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", "-y", gpu_2=None)
    assert done.returncode == 1
    found = json.loads(done.stdout)["results"]
    assert found
    assert "@fake/gpu-2: failed while looked at" in done.stderr


def test_a_host_without_facts_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    done = run(tmp_path, "-y", gpu_2=None)
    assert "gpu-2" in done.stderr
    assert "python3: not found" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Starting operation: Instances that do not run" in done.stderr
    assert done.returncode == 1


def test_hosts_without_an_inventory_file_are_refused_in_words(tmp_path: Path) -> None:
    run(tmp_path, "--dry")
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", "--dry", "@fake/gpu-1", "deploy.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO), "PYINFRA_FAKE_DELAY": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "group_vars stand beside an inventory file" in done.stderr
    assert "Traceback" not in done.stderr


BY_KIND = VARS.replace("cards: [2]", "cards: 1 x L40S")


def test_chosen_cards_are_written_down_before_anything_is_changed_and_kept(tmp_path: Path) -> None:
    dry = plan_of(run(tmp_path, "--json", "--dry", text=BY_KIND))
    assert next(iter(dry)) == "Cards chosen, written down"
    assert not (tmp_path / "placement").exists()
    done = run(tmp_path, "-y", text=BY_KIND)
    assert "Traceback" not in done.stderr
    written = (tmp_path / "placement/prod.yml").read_text()
    line = "qwen-a: {asked: 1 x L40S, cards: [2], uuids: [GPU-2222]}"
    assert f"'@fake/gpu-1':\n  {line}\n" in written
    assert done.stderr.index("Cards chosen, written down") < done.stderr.index("Debian packages")
    again = plan_of(run(tmp_path, "--json", "--dry", text=BY_KIND))
    assert "Cards chosen, written down" not in again


def test_a_placement_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "placement").symlink_to("/nowhere/at/all")
    done = run(tmp_path, "-y", text=BY_KIND)
    assert done.returncode == 1
    assert "nothing was changed" in done.stderr
    assert "placement/prod.yml cannot be written" in done.stderr
    assert "Starting operation: Debian packages" not in done.stderr


def test_cards_that_moved_since_they_were_chosen_are_refused(tmp_path: Path) -> None:
    (tmp_path / "placement").mkdir()
    (tmp_path / "placement/prod.yml").write_text(
        "'@fake/gpu-1':\n"
        "  qwen-a: {asked: 1 x L40S, cards: [2], uuids: [GPU-3333]}\n"
        "  old: {asked: 1 x L40S, cards: [3], uuids: [GPU-3333]}\n"
    )
    done = run(tmp_path, "-y", text=BY_KIND)
    assert done.returncode == 1
    assert "qwen-a was given card 2 (GPU-3333), which is now card 3" in done.stderr
    assert "Starting operation" not in done.stderr
    text = (tmp_path / "placement/prod.yml").read_text()
    (tmp_path / "placement/prod.yml").write_text(text.replace("[GPU-3333]", "[GPU-2222]", 1))
    done = run(tmp_path, "--dry", text=BY_KIND)
    assert done.returncode == 0
    assert "old: no instance uses this line any more" in done.stderr
