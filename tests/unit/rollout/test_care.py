"""A host out of service and back: its own script, on real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.hosts import Host
from vllm_fleet.onhost import care, instances, ledger
from vllm_fleet.onhost import state as fact


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path, monkeypatch)
    monkeypatch.setattr(fact, "STATE", str(tmp_path / "state"))
    Path(ledger.ROOT).mkdir()
    return made


def do(action: str, **order: Any) -> Any:
    return care.ACTIONS[action]({"action": action, **order})


def test_stopped_and_started_with_what_is_in_place(host: Host) -> None:
    old, new = host.version("0.31"), host.version("0.32")
    host.deploy(old)
    host.do("stage", pool="glm", next=new)
    host.do("begin", run="r1", pool="glm", drained=False, seconds=600)
    host.do("switch", to=new["checksum"], seconds=60)
    host.do("accept", run="r1", probe={"tokens": 9})
    before = host.texts()
    assert do("halt", instance="a", pool="glm", seconds=600) == {"served": True}
    assert host.unit["ActiveState"] == "inactive"
    assert host.change()["pool"] == "glm"  # those who watch know that it is on purpose
    assert do("halt", instance="a", pool="glm", seconds=600) == {"served": False}
    found = do("resume", instance="a", seconds=60)
    assert found["ok"]
    assert host.change() is None
    assert found["probe"] == {"tokens": 9}
    assert found["figures"]["load_seconds"] == 3.0
    assert do("resume", instance="a", seconds=60)["ok"]  # said again: it runs
    assert host.starts == [old["checksum"], new["checksum"], new["checksum"]]
    assert host.texts() == before


def test_what_was_never_changed_has_nothing_to_compare_with(host: Host) -> None:
    host.deploy(host.version("0.31"))
    do("halt", instance="a", pool="glm", seconds=600)
    found = do("resume", instance="a", seconds=60)
    assert (found["ok"], found["probe"], found["good_figures"]) == (True, None, None)


def test_a_start_that_fails_is_told_and_not_tried_for_ever(host: Host) -> None:
    host.deploy(host.version("0.31"))
    do("halt", instance="a", pool="glm", seconds=600)
    host.bad.add("0.31")
    found = do("resume", instance="a", seconds=60)
    assert not found["ok"]
    assert "failed to start (exit-code" in found["why"]
    assert host.calls[-1][0] == "stop"


@pytest.mark.parametrize("bad", [False, True])
def test_the_start_of_a_spare_is_a_planned_change_of_its_pool(
    host: Host, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    host.deploy(host.version("0.31"))
    host.stop()
    host.bad = {"0.31"} if bad else set()
    seen: list[Any] = []
    start = host.start
    monkeypatch.setattr(host, "start", lambda: (seen.append(host.change()), start()))
    assert do("resume", instance="a", pool="glm", seconds=60)["ok"] is not bad
    assert [one["pool"] for one in seen] == ["glm"]
    assert host.change() is None


def test_in_the_middle_of_a_change_nothing_is_stopped(host: Host) -> None:
    host.deploy(host.version("0.31"))
    host.do("stage", pool="glm", next=host.version("0.32"))
    host.do("begin", run="r1", pool="glm", drained=False, seconds=600)
    with pytest.raises(ledger.Refused, match="was cut off"):
        do("halt", instance="a", pool="glm", seconds=600)
    assert host.unit["ActiveState"] == "active"


def test_a_hold_is_seen_by_the_fact_and_taken_back(host: Host) -> None:
    do("hold", held={"who": "ann", "why": "card 3"})
    held = json.loads(Path(care.held_path()).read_text())
    assert (held["who"], held["why"]) == ("ann", "card 3")
    assert held == fact.read_json(f"{fact.STATE}/_rollout/held.json")
    do("unhold")
    do("unhold")
    assert not Path(care.held_path()).exists()


def test_the_lock_as_the_fact_tells_of_it(host: Host) -> None:
    assert fact.lock() == {}
    holder = {"run": "r1", "who": "ann"}
    ledger.ACTIONS["lock"]({"holder": holder, "stale": 120})
    found = fact.lock()
    assert (found["run"], found["who"]) == ("r1", "ann")
    assert 0 <= found["silent"] < 60


def test_a_reboot_leaves_time_for_the_answer(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    program = tmp_path / "bin/systemd-run"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >{said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    do("reboot")
    assert "--on-active=1" in said.read_text()
    assert said.read_text().strip().endswith("systemctl reboot")
    program.write_text("#!/bin/sh\necho no bus; exit 1\n")
    with pytest.raises(ledger.Refused, match="systemd-run: no bus"):
        do("reboot")
    boot = do("boot")["boot"]
    assert boot
    assert boot == do("boot")["boot"]


def test_the_script_takes_orders_from_its_standard_input(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io
    import sys

    host.deploy(host.version("0.31"))
    for order, code, last in (
        (
            {"action": "halt", "instance": "a", "pool": "glm", "seconds": 600},
            0,
            'result {"served": true}',
        ),
        ({"action": "boot"}, 0, "result {"),
        ({"action": "dance"}, 1, "refused 'dance' is none of halt"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order)))
        monkeypatch.setattr(care.signal, "signal", lambda *_: None)
        assert care.main() == code
        assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    assert instances.show("vllm@a.service")["ActiveState"] == "inactive"
