"""`fleet doctor` on pyinfra's @fake connector: fifty hosts, dead ones among them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploys.test_fake import fleet_command
from tests.unit.fleets import state

pytestmark = pytest.mark.deploys

INVENTORY = """\
import json as _json

_state = {state!r}
_answer = "result " + _json.dumps({{"time": {now}, "strangers": [], "disks": [], "stamps": {{}},
    "synchronised": True, "interfaces": [], "blocking": [], "instances": {{}}, "gateway": None,
    "prometheus": None}})

def _host(number):
    fakes = {{"What a host is like now": {{"stdout": [_state]}},
             "sys.exit(module.main())": {{"stdout": [_answer]}}}}
    slow = 600 if number == 7 else 0
    if number == 9:
        fakes["sys.exit(module.main())"] = {{"success": False, "stderr": ["no disk"]}}
    return (f"@fake/gpu-{{number}}", {{"address": f"10.0.0.{{number}}", "fake_delay": slow,
            "fake_delay_jitter": 0, "fake_responses": fakes}})

gpu = [_host(number) for number in range(1, 51)]
"""


def test_dead_hosts_hold_up_none_of_fifty(tmp_path: Path) -> None:
    for folder in ("inventory", "group_vars"):
        (tmp_path / folder).mkdir()
    fact = json.dumps(asdict(state()))
    (tmp_path / "inventory/prod.py").write_text(INVENTORY.format(state=fact, now=time.time()))
    (tmp_path / "group_vars/all.yml").write_text("firewall: false\n")
    began = time.monotonic()
    done = fleet_command(tmp_path, "doctor", "inventory/prod.py", "--json", "--seconds", "20")
    took = time.monotonic() - began
    assert done.returncode == 1, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    assert took < 90  # the dead one alone would take ten minutes
    away = {host["name"]: host["why"] for host in data["hosts"] if host["why"]}
    assert set(away) == {"@fake/gpu-7", "@fake/gpu-9"}
    assert away["@fake/gpu-7"] == "no answer within 20 s"
    assert [f["id"] for f in data["findings"] if f["host"] == "@fake/gpu-9"][:1] == [
        "not-looked-at"
    ]
    assert data["findings"][-1]["id"] == "host-down"
    seen = {check["area"]: check["seen"] for check in data["checklist"]}
    assert seen["hosts"] == "49 of 50"


def test_a_wrong_inventory_is_told_before_any_host_is_asked(tmp_path: Path) -> None:
    for folder in ("inventory", "group_vars"):
        (tmp_path / folder).mkdir()
    (tmp_path / "inventory/prod.py").write_text('gpu = ["gpu-1"]\n')
    (tmp_path / "group_vars/all.yml").write_text("nonsense: 1\n")
    done = fleet_command(tmp_path, "doctor", "inventory/prod.py")
    assert done.returncode == 1
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr
