"""One instance from version to version: every step repeatable, whoever is killed when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.hosts import Host, texts_of
from vllm_fleet.gate import before_start
from vllm_fleet.onhost import apply, ledger, switch

pytestmark = pytest.mark.slow


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def change(host: Host, version: dict[str, Any]) -> Any:
    """All steps of a change that goes well, as the rollout asks for them."""
    host.do("stage", pool="glm", next=version)
    host.do("begin", run="r1", pool="glm", drained=False, seconds=600)
    assert host.change()["pool"] == "glm"
    done = host.do("switch", to=version["checksum"], seconds=60)
    if done["ok"]:
        host.do("accept", run="r1", probe={"tokens": 9})
        assert host.change() is None
    return done


def back(host: Host, bad: dict[str, Any], good: dict[str, Any]) -> Any:
    refused = {"release": bad["release"], "checksum": bad["checksum"], "why": "worse"}
    host.do("refuse", run="r1", refused=refused)
    done = host.do("switch", to=good["checksum"], seconds=60)
    assert host.change() is not None
    host.do("settle", run="r1")
    assert host.change() is None
    return done


def record() -> dict[str, Any]:
    return ledger.read_record("a")


def test_a_change_that_goes_well(host: Host) -> None:
    old, new = host.version("0.31", plan=True), host.version("0.32")
    host.deploy(old)
    done = change(host, new)
    assert done["ok"]
    assert done["figures"] == {"load_seconds": 3.0, "warm_seconds": 1.0, "vllm_version": "0"}
    assert host.texts() == texts_of(new)
    assert host.starts == [old["checksum"], new["checksum"]]
    assert json.loads(Path(apply.MANIFEST).read_text()) == apply.checksums(new["files"])
    assert [good["release"] for good in record()["goods"]] == ["0.32", "0.31"]
    assert record()["goods"][0]["probe"] == {"tokens": 9}
    assert record()["step"] is record()["next"] is None


def test_the_files_of_versions_are_for_root_alone(host: Host) -> None:
    host.deploy(host.version("0.31"))
    change(host, host.version("0.32"))
    path = Path(ledger.record_path("a"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" in path.read_text()
    assert "secret" not in json.dumps(switch.short(record()["goods"][0]))


def test_a_version_that_does_not_start_goes_back_to_the_one_before(host: Host) -> None:
    old, new = host.version("0.31", plan=True), host.version("0.32")
    host.bad.add("0.32")
    host.deploy(old)
    done = change(host, new)
    assert not done["ok"]
    assert "failed to start" in done["why"]
    assert host.unit["ActiveState"] == "inactive"  # not tried again and again
    assert back(host, new, old)["ok"]
    assert host.texts() == texts_of(old)
    assert host.unit["ActiveState"] == "active"
    assert [good["release"] for good in record()["goods"]] == ["0.31"]
    assert [bad["release"] for bad in record()["refused"]] == ["0.32"]
    assert record()["step"] is record()["next"] is None


def test_switching_to_what_runs_touches_nothing(host: Host) -> None:
    new = host.version("0.32")
    host.deploy(host.version("0.31"))
    change(host, new)
    before = list(host.starts)
    host.do("stage", pool="glm", next=new)
    host.do("begin", run="r2", pool="glm", drained=False, seconds=600)
    assert host.do("switch", to=new["checksum"], seconds=60)["ok"]
    assert host.starts == before
    assert ("stop", "--no-block", "vllm@a.service") not in host.calls[-4:]


def test_whoever_is_killed_at_any_step_a_second_run_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at every call to the system in turn, until a run gets through unharmed."""
    points = 0
    for calls in range(1, 500):
        with monkeypatch.context() as patch:
            host = Host(tmp_path / str(calls), patch)
            old, new = host.version("0.31", plan=True), host.version("0.32")
            host.deploy(old)
            with host.killed_after(calls) as killed:
                change(host, new)
            if not killed[0]:
                break
            points += 1
            if not Path(switch.marker("a")).exists():
                # Whatever starts the unit now finds one version whole.
                assert host.texts() in (texts_of(old), texts_of(new)), calls
            if host.unit["ActiveState"] == "active":
                assert host.starts[-1] in (old["checksum"], new["checksum"])
            assert change(host, new)["ok"], calls
            assert host.texts() == texts_of(new), calls
            goods = record()["goods"]
            assert [good["release"] for good in goods] == ["0.32", "0.31"], calls
            assert texts_of(goods[1]) == texts_of(old), calls
            assert record()["step"] is record()["next"] is None
            assert host.starts.count(new["checksum"]) == 1, calls
            assert json.loads(Path(apply.MANIFEST).read_text()) == apply.checksums(new["files"])
    assert points > 30


def test_killed_on_the_way_back_a_second_run_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = 0
    for calls in range(1, 500):
        with monkeypatch.context() as patch:
            host = Host(tmp_path / str(calls), patch)
            old, new = host.version("0.31", plan=True), host.version("0.32")
            host.bad.add("0.32")
            host.deploy(old)
            change(host, new)
            with host.killed_after(calls) as killed:
                back(host, new, old)
            if not killed[0]:
                break
            points += 1
            assert record()["step"] is None or host.texts() != {}
            assert back(host, new, old)["ok"], calls
            assert host.texts() == texts_of(old), calls
            assert host.unit["ActiveState"] == "active"
            assert [one["release"] for one in record()["refused"]] == ["0.32"]
            assert record()["step"] is None
    assert points > 20


def test_what_was_never_accepted_is_not_taken_for_good(host: Host) -> None:
    """Killed after the start of one version; then another one is wanted."""
    old, bad, new = host.version("0.31"), host.version("0.32"), host.version("0.33")
    host.deploy(old)
    host.do("stage", pool="glm", next=bad)
    host.do("begin", run="r1", pool="glm", drained=False, seconds=600)
    host.do("switch", to=bad["checksum"], seconds=60)
    change(host, new)
    assert [good["release"] for good in record()["goods"]] == ["0.33", "0.31"]


def test_what_ended_or_was_changed_before_its_acceptance_is_not_accepted(host: Host) -> None:
    old, new = host.version("0.31"), host.version("0.32")
    host.deploy(old)
    host.do("stage", pool="glm", next=new)
    host.do("begin", run="r1", pool="glm", drained=False, seconds=600)
    host.do("switch", to=new["checksum"], seconds=60)
    host.stop()
    with pytest.raises(ledger.Refused, match=r"is not ready any more \(inactive"):
        host.do("accept", run="r1")
    host.deploy(old)  # by hand
    with pytest.raises(ledger.Refused, match="does not run the staged version any more"):
        host.do("accept", run="r1")
    assert [good["release"] for good in record()["goods"]] == ["0.31"]


def test_what_is_missing_is_refused_before_anything_is_touched(host: Host) -> None:
    old, new = host.version("0.31"), host.version("0.32")
    host.deploy(old)
    (host.root / "rel/0.32/release.json").unlink()
    with pytest.raises(ledger.Refused, match=r"release 0\.32 is not on this host"):
        host.do("stage", pool="glm", next=new)
    host.version("0.32")
    (host.root / "weights/config.json").unlink()
    with pytest.raises(ledger.Refused, match="no verified weights"):
        host.do("stage", pool="glm", next=new)
    assert host.unit["ActiveState"] == "active"
    with pytest.raises(ledger.Refused, match="no version 99999999 is staged"):
        host.do("switch", to="9" * 64, seconds=60)
    assert host.unit["ActiveState"] == "active"


def test_a_full_disk_is_found_before_anything_is_touched(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.deploy(host.version("0.31"))
    monkeypatch.setattr(switch, "ROOM_MIB", 1 << 50)
    with pytest.raises(ledger.Refused, match=r"has \d+ MiB free; make room"):
        host.do("stage", pool="glm", next=host.version("0.32"))
    assert record()["next"] is None


def sibling(host: Host, name: str, release: str, *, ready: bool = True, cards: str = "0,1") -> Path:
    """Another instance with the same release that has compiled something."""
    env = f'FLEET_RELEASE="{host.root}/rel/{release}"\nFLEET_MODEL="glm"\nFLEET_CARDS="{cards}"\n'
    (host.root / f"etc/{name}.env").write_text(env)
    cache = host.root / "state" / name / "cache" / release / "vllm"
    cache.mkdir(parents=True)
    (cache / "kernel").write_text(name)
    (host.root / "run" / name).mkdir()
    if ready:
        (host.root / "run" / name / "ready").write_text("1")
    return cache


def for_glm(version: dict[str, Any], cards: str = "2,3") -> dict[str, Any]:
    for file in version["files"]:
        if file["path"].endswith(".env"):
            file["content"] += f'FLEET_MODEL="glm"\nFLEET_CARDS="{cards}"\n'
    return version


def test_what_a_sibling_has_compiled_is_there_before_the_start(host: Host) -> None:
    host.deploy(for_glm(host.version("0.31")))
    sibling(host, "cold", "0.32", ready=False)
    sibling(host, "half", "0.32", cards="4")
    theirs = sibling(host, "warm", "0.32")
    change(host, for_glm(host.version("0.32")))
    mine = host.root / "state/a/cache/0.32/vllm/kernel"
    assert mine.read_text() == "warm"
    mine.write_text("my own")
    assert (theirs / "kernel").read_text() == "warm"
    # What is there is never replaced, and of another release there is nothing to take.
    change(host, for_glm(host.version("0.33")))
    assert not (host.root / "state/a/cache/0.33").exists()
    change(host, for_glm(host.version("0.32")))
    assert mine.read_text() == "my own"


def test_caches_that_do_not_fit_stop_no_change(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host.deploy(for_glm(host.version("0.31")))
    sibling(host, "warm", "0.32")
    host.do("stage", pool="glm", next=for_glm(host.version("0.32")))
    monkeypatch.setattr(switch, "ROOM_MIB", 1 << 50)
    host.do("begin", run="r1", pool="glm", drained=False, seconds=600)
    assert host.do("switch", to=host.version("0.32")["checksum"], seconds=60)["ok"]
    assert not (host.root / "state/a/cache/0.32").exists()
    assert "compile caches of warm were not taken: no room" in capsys.readouterr().out


def test_watching_ends_at_a_crash_and_at_a_new_start(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.deploy(host.version("0.31"))
    assert switch.watch({"instance": "a", "seconds": 0.02})["ok"]
    seen = iter([dict(host.unit)] * 3 + [{**host.unit, "InvocationID": "other"}] * 9)
    monkeypatch.setattr("vllm_fleet.onhost.instances.show", lambda unit: next(seen))
    assert "started again" in switch.watch({"instance": "a", "seconds": 30})["why"]
    monkeypatch.setattr("vllm_fleet.onhost.instances.show", lambda unit: dict(host.unit))
    monkeypatch.setattr(switch, "answers", lambda port: False)
    assert "does not answer" in switch.watch({"instance": "a", "seconds": 30})["why"]
    host.stop()
    assert "not ready any more" in switch.watch({"instance": "a", "seconds": 30})["why"]


def process(user: str) -> Any:
    return before_start.Process(os.getpid(), user, "python serve")


def test_only_what_our_user_left_outside_of_units_is_ended(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ours = before_start.Process(left.pid, "vllm", "vllm serve")
    monkeypatch.setattr(switch, "unit_of", lambda pid: None)
    monkeypatch.setattr(switch, "holding", lambda env: [] if left.poll() is not None else [ours])
    switch.free("a", {})
    assert left.wait(10) == -9

    monkeypatch.setattr(switch, "holding", lambda env: [process("bob")])
    with pytest.raises(ledger.Refused, match=r"held by pid \d+ of bob: python serve: end it"):
        switch.free("a", {}, seconds=0.05)
    # Of our user, but some unit's: another instance, say.
    monkeypatch.setattr(switch, "unit_of", lambda pid: "vllm@b.service")
    monkeypatch.setattr(switch, "holding", lambda env: [process("vllm")])
    with pytest.raises(ledger.Refused, match=r"\(vllm@b\.service\)"):
        switch.free("a", {}, seconds=0.05)


@pytest.mark.parametrize(
    ("text", "seconds"), [("11min 30s", 690), ("500ms", 0.5), ("1h", 3600), ("infinity", 3600)]
)
def test_time_spans_of_systemd(text: str, seconds: float) -> None:
    assert switch.span(text) == seconds


def test_a_start_between_two_files_of_a_change_is_refused(host: Host) -> None:
    change(host, host.version("0.31"))
    ledger.write(switch.marker("a"), "x")
    with pytest.raises(before_start.Refused, match=r"run upgrade\.py again"):
        before_start.check_whole(str(host.root / "state/a"), "a")
    os.unlink(switch.marker("a"))
    before_start.check_whole(str(host.root / "state/a"), "a")


def test_a_second_script_on_an_instance_waits_for_the_first(host: Host) -> None:
    code = (
        "import json, sys, time\nfrom vllm_fleet.onhost import ledger\n"
        f"ledger.ROOT = {ledger.ROOT!r}\n"
        "with ledger.guarded('a'):\n    print('in', time.time(), flush=True)\n"
    )
    with ledger.guarded("a"):
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "a: waiting for what an earlier run does on it\n"
        let_go = time.time()
    out, _ = other.communicate(timeout=20)
    assert float(out.split()[1]) >= let_go


def test_an_operator_who_is_gone_stops_no_script_half_way(tmp_path: Path) -> None:
    """Its terminal hangs up and nobody reads what it says: it ends what it began."""
    out = tmp_path / "out"
    code = (
        "import pathlib, sys, time\nfrom vllm_fleet.onhost import instances, ledger, switch\n"
        f"ledger.ROOT = {str(tmp_path / 'rollout')!r}\n"
        "def slow(order):\n"
        "    for _ in range(20):\n"
        "        switch.say('a: on its way')\n        instances.say('a: on its way')\n"
        "        time.sleep(0.02)\n"
        f"    pathlib.Path({str(out)!r}).write_text('done')\n    return {{}}\n"
        "switch.ACTIONS['slow'] = slow\nsys.exit(switch.main())\n"
    )
    script = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert script.stdin is not None
    assert script.stdout is not None
    script.stdin.write('{"action": "slow", "instance": "a"}')
    script.stdin.close()
    assert script.stdout.readline() == "a: on its way\n"
    script.stdout.close()
    script.send_signal(signal.SIGHUP)
    script.wait(30)
    assert out.read_text() == "done"
