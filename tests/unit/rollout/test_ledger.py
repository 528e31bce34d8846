"""Lock, audit log and what is remembered, with everything that can happen to their holder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import fleet, state
from tests.unit.rollout.hosts import Host
from vllm_fleet.onhost import ledger
from vllm_fleet.rollout.audit import Change, run_mark
from vllm_fleet.rollout.hosts import Failed, result_of
from vllm_fleet.rollout.lock import Holder, Lock, Locked, lock_host, recorded, unlocked
from vllm_fleet.rollout.policy import Standing, Version
from vllm_fleet.rollout.state import record_of, refusal_of, refusals, standing

OLD, NEW = Version("0.31", "1" * 64), Version("0.32", "2" * 64)


class Local:
    """The lock's host is this process; ``lost`` while its network is."""

    def __init__(self) -> None:
        self.lost = False
        self.said: list[str] = []

    def ask(self, host: str, script: str, order: Mapping[str, Any]) -> dict[str, Any]:
        if self.lost:
            raise Failed(f"{host}: lost")
        assert script == "ledger"
        try:
            with ledger.guarded():
                return ledger.ACTIONS[order["action"]](json.loads(json.dumps(order)))
        except ledger.Refused as error:
            raise Failed(f"{host}: {error}") from None

    def say(self, text: str) -> None:
        self.said.append(text)

    def save(self, name: str, lines: Sequence[str]) -> str:
        raise AssertionError


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Local:
    monkeypatch.setattr(ledger, "ROOT", str(tmp_path / "_rollout"))
    monkeypatch.setattr(ledger, "METRICS", str(tmp_path / "metrics"))
    return Local()


def test_one_operator_at_a_time(hosts: Local) -> None:
    with Lock(hosts, "gw", Holder("upgrade to 0.32", who="ann")) as lock:
        with pytest.raises(Locked) as second, Lock(hosts, "gw", Holder("upgrade", who="bob")):
            raise AssertionError
        lock.check()
    text = str(second.value)
    assert "ann" in text
    assert "upgrade to 0.32" in text
    assert "Wait until that run has ended" in text
    with Lock(hosts, "gw", Holder("upgrade", who="bob")):
        pass


def test_a_failure_gives_the_lock_back(hosts: Local) -> None:
    with pytest.raises(KeyboardInterrupt), Lock(hosts, "gw", Holder("upgrade")):
        raise KeyboardInterrupt
    assert hosts.ask("gw", "ledger", {"action": "look", "stale": 9})["holder"] is None


def killed(run: str, who: str = "ann") -> None:
    """A holder that is gone since ten minutes."""
    with ledger.guarded():
        ledger.lock(
            {"holder": {"run": run, "who": who, "where": "pc pid 1", "what": "x"}, "stale": 9}
        )
        path = Path(ledger.ROOT) / "lock.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "beat": time.time() - 600}))


def test_a_stale_lock_is_named_and_taken_only_by_its_run(hosts: Local) -> None:
    killed("r1")
    with pytest.raises(Locked, match="--data unlock=r1"), Lock(hosts, "gw", Holder("upgrade")):
        raise AssertionError
    with pytest.raises(Failed, match="held by run r1 of ann, not by r0: nothing was unlocked"):
        unlocked(hosts, "gw", "r0")
    assert "taken from run r1 of ann" in unlocked(hosts, "gw", "r1")
    assert "nobody held" in unlocked(hosts, "gw", "r1")
    line = json.loads((Path(ledger.ROOT) / "audit.log").read_text())
    assert (line["result"], line["run"]) == ("unlocked", "r1")
    with Lock(hosts, "gw", Holder("upgrade")):
        pass


def test_the_holder_shows_that_it_lives_and_learns_that_it_was_robbed(hosts: Local) -> None:
    holder = Holder("upgrade")
    with Lock(hosts, "gw", holder, beat_seconds=0.01) as lock:
        first = hosts.ask("gw", "ledger", {"action": "look", "stale": 9})["holder"]["beat"]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            now = hosts.ask("gw", "ledger", {"action": "look", "stale": 9})["holder"]["beat"]
            if now > first:
                break
        assert now > first
        lock.check()
        hosts.lost = True  # a short break of the network is no reason
        time.sleep(0.05)
        lock.check()
        with ledger.guarded():
            ledger.unlock({"run": holder.run, "by": "bob"})
        killed("r2", "bob")
        hosts.lost = False
        lock._thread.join(30)
        with pytest.raises(Locked, match="taken away by run r2 of bob"):
            lock.check()
    # What is another's by now is not given back.
    assert hosts.ask("gw", "ledger", {"action": "look", "stale": 9})["holder"]["run"] == "r2"


def test_a_lost_lock_host_is_told_and_stops_nothing(hosts: Local) -> None:
    with Lock(hosts, "gw", Holder("upgrade")):
        hosts.lost = True
    assert "could not be given back" in hosts.said[0]


def test_of_many_at_once_one_gets_the_lock(hosts: Local) -> None:
    code = (
        "import json, sys\nfrom vllm_fleet.onhost import ledger\n"
        f"ledger.ROOT = {ledger.ROOT!r}\n"
        "holder = {'run': sys.argv[1], 'who': 'w', 'where': 'x', 'what': 'y'}\n"
        "with ledger.guarded():\n"
        "    print(ledger.lock({'holder': holder, 'stale': 9})['taken'])\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, f"r{i}"], stdout=subprocess.PIPE, text=True)
        for i in range(6)
    ]
    assert sorted(run.communicate(timeout=60)[0].strip() for run in runs) == ["False"] * 5 + [
        "True"
    ]


def test_a_lock_that_is_cut_off_at_any_step_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for calls in range(1, 100):
        with monkeypatch.context() as patch:
            host = Host(tmp_path / str(calls), patch)
            holder = {"run": "r1", "who": "ann", "where": "x", "what": "y"}
            with host.killed_after(calls) as was, ledger.guarded():
                ledger.lock({"holder": holder, "stale": 9})
                ledger.beat({"run": "r1"})
                ledger.append([{"result": "done"}])
                ledger.release({"run": "r1"})
            held = ledger.look({"stale": 9})["holder"]
            assert held is None or held["run"] == "r1"
            if not was[0]:
                assert calls > 8
                return
    raise AssertionError("never got through")


def test_audit_lines_are_whole_also_after_a_power_cut(hosts: Local) -> None:
    lines = [{"result": "done", "n": n} for n in range(3)]
    hosts.ask("gw", "ledger", {"action": "audit", "lines": lines[:2]})
    path = Path(ledger.ROOT) / "audit.log"
    with path.open("a") as file:
        file.write('{"result": "do')  # cut off
    hosts.ask("gw", "ledger", {"action": "audit", "lines": lines[2:]})
    found = path.read_text().splitlines()
    assert [json.loads(found[i])["n"] for i in (0, 1, 3)] == [0, 1, 2]
    assert path.stat().st_mode & 0o777 == 0o640


def test_lines_of_two_writers_do_not_mix(hosts: Local) -> None:
    def write(who: str) -> None:
        for n in range(40):
            hosts.ask("gw", "ledger", {"action": "audit", "lines": [{"who": who * 50, "n": n}]})

    threads = [threading.Thread(target=write, args=(who,)) for who in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [json.loads(x) for x in (Path(ledger.ROOT) / "audit.log").read_text().splitlines()]
    assert len(found) == 120


def test_marks_are_for_the_node_exporter_and_nothing_else_is_written(hosts: Local) -> None:
    one = Standing("gpu-1", "a", "glm", NEW, OLD, True)
    holder = Holder('upgrade "x"', who="ann")
    change = Change(one, NEW, "returned", 61.23, "half the KV cache", {"start": 40.04, "stop": 20})
    assert change.told_parts() == "start 40.0, stop 20.0, rest 1.2"
    lines, marks = [change.line(holder)], dict([change.mark(1e9), run_mark(holder, "failed", 1e9)])
    recorded(hosts, ["gw"], lines, marks)
    line = json.loads((Path(ledger.ROOT) / "audit.log").read_text())
    assert (line["who"], line["from"], line["to"]) == ("ann", str(OLD), str(NEW))
    assert (line["result"], line["seconds"], line["why"]) == ("returned", 61.2, "half the KV cache")
    assert line["parts"] == {"start": 40.0, "stop": 20}
    texts = {p.name: p.read_text() for p in Path(ledger.METRICS).iterdir()}
    assert set(texts) == {"vllm_fleet_change_a.prom", "vllm_fleet_rollout.prom"}
    assert (
        'result="returned",from="0.31",to="0.32"} 1000000000' in texts["vllm_fleet_change_a.prom"]
    )
    assert r'what="upgrade \"x\""' in texts["vllm_fleet_rollout.prom"]
    promtool = "/usr/bin/promtool"
    if os.path.exists(promtool):
        done = subprocess.run(
            [promtool, "check", "metrics"],
            input="".join(texts.values()),
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
    recorded(hosts, ["gw"], [], {"../../etc/passwd": "x"})
    assert "is no name of a text file of ours" in hosts.said[-1]


def test_a_broken_file_is_named_and_nothing_is_guessed(hosts: Local) -> None:
    os.makedirs(ledger.ROOT)
    (Path(ledger.ROOT) / "lock.json").write_text("{")
    with pytest.raises(Failed, match=r"lock\.json cannot be read"), Lock(hosts, "gw", Holder("x")):
        raise AssertionError


def test_the_script_answers_in_lines(hosts: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"action": "look", "stale": 1}'))
    assert ledger.main() == 0
    assert result_of("gw", out.getvalue().splitlines()) == {"holder": None}
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"action": "unlock", "run": "r", "by": "x"}'))
    killed("r9")
    assert ledger.main() == 1
    with pytest.raises(Failed, match="gw: the lock is held by run r9"):
        result_of("gw", out.getvalue().splitlines())
    with pytest.raises(Failed, match=r"gw: no answer to the end \(bash: python3: not found\)"):
        result_of("gw", ["bash: python3: not found"])
    with pytest.raises(Failed, match="it said nothing"):
        result_of("gw", [])


def test_the_lock_stands_on_the_first_gateway(tmp_path: Path) -> None:
    assert lock_host(fleet(tmp_path)) == "gw-1"
    alone = fleet(tmp_path, inventory='gpu = ["gpu-2", "gpu-1"]\n')
    assert lock_host(alone) == "gpu-2"


def remembered(pool: str = "glm", **changes: Any) -> Any:
    """A host that remembers this of instance `a`."""
    good = {"release": OLD.release, "checksum": OLD.checksum, "at": 1}
    return state(rollout={"a": {"pool": pool, "goods": [good], "refused": [], **changes}})


def test_a_release_that_one_instance_refused_is_refused_for_its_pool() -> None:
    bad = {"release": NEW.release, "checksum": NEW.checksum, "why": "slow", "by_release": True}
    known = refusals([state(), remembered(refused=[bad])])
    other = Version(NEW.release, "9" * 64)
    assert refusal_of("glm", NEW, known) == refusal_of("glm", other, known) == "slow"
    assert refusal_of("qwen", NEW, known) == refusal_of("glm", OLD, known) == ""
    known = refusals([remembered(refused=[{**bad, "by_release": False}])])
    assert refusal_of("glm", NEW, known) == "slow"
    assert refusal_of("glm", other, known) == ""


def test_what_was_cut_off_is_seen() -> None:
    to = {"release": NEW.release, "checksum": NEW.checksum}
    record = record_of(remembered(step={"name": "swapping", "to": to, "back": True}), "a")
    assert (record.cut_off, record.on_its_way_back) == (NEW, True)
    assert [good.version for good in record.goods] == [OLD]
    nothing = record_of(remembered(), "a")
    assert (nothing.cut_off, nothing.on_its_way_back) == (None, False)
    assert record_of(state(), "a").goods == ()


def test_an_instance_as_the_policy_looks_at_it() -> None:
    units = {"vllm@a.service": {"ActiveState": "active"}}
    now = {"running": OLD.checksum, "release": OLD.release, "ready": True, "start_seconds": 63.5}
    there = state(units=units, instances={"a": now})
    one = standing(there, "gpu-1", "a", "glm", NEW, ())
    assert (one.runs, one.serving, one.start_seconds, one.refused) == (OLD, True, 63.5, "")
    odd = standing(state(units=units), "gpu-1", "a", "glm", NEW, ())
    assert odd.runs == Version("?", "?")  # it runs, whatever it is
    gone = standing(state(instances={"a": now}), "gpu-1", "a", "glm", NEW, ())
    assert (gone.runs, gone.serving) == (None, False)
    # Of a host that is held nothing changes, and its pool misses it.
    held = standing(replace(there, held={"who": "ann"}), "gpu-1", "a", "glm", NEW, ())
    assert (held.as_wanted, held.counts) == (True, False)


def test_a_refused_version_can_be_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, monkeypatch)
    host.deploy(host.version("0.31"))
    host.do("stage", pool="glm", next=host.version("0.32"))
    bad = {"release": "0.32", "checksum": "x", "why": "slow", "by_release": True}
    host.do("refuse", run="r1", refused=bad)
    host.do("refuse", run="r2", refused=bad)
    assert len(ledger.read_record("a")["refused"]) == 1
    order = {"instances": [], "release": "0.32", "by": "ann"}
    with ledger.guarded():
        assert ledger.forget(order) == {"cleared": ["a"]}
        assert ledger.forget(order) == {"cleared": []}
    assert ledger.read_record("a")["refused"] == []
