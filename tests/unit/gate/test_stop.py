"""The stop of an instance, against a stand-in server and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.unit.gate.stand_in import StandIn
from vllm_fleet.gate import stop

pytestmark = pytest.mark.slow


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(stop, "TOLD_SECONDS", 0.0)
    (tmp_path / "ready").write_text("1")
    return {
        "FLEET_INSTANCE": "air-a",
        "FLEET_RUN": str(tmp_path),
        "FLEET_PORT": "1",
        "FLEET_DRAIN_SECONDS": "20",
    }


def counting(*counts: int) -> StandIn:
    """A server whose gate tells these counts, the last one for ever."""
    left = list(counts)

    def ready(body: object) -> tuple[int, object]:
        count = left.pop(0) if len(left) > 1 else left[0]
        return 503, {"ready": False, "in_flight": count}

    return StandIn({"/fleet/ready": ready})


def main_process() -> subprocess.Popen[bytes]:
    """A process that is reaped when it ends, as systemd does."""
    process = subprocess.Popen(["sleep", "60"])
    threading.Thread(target=process.wait, daemon=True).start()
    return process


def test_waits_for_requests_in_flight_then_ends_the_server(
    env: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "POLL_SECONDS", 0.05)
    process = main_process()
    with counting(2, 1, 1, 0) as server:
        assert stop.main(env | {"FLEET_PORT": str(server.port), "MAINPID": str(process.pid)}) == 0
    assert len(server.asked) == 4
    assert not (Path(env["FLEET_RUN"]) / "ready").exists()
    assert process.wait(5) == -signal.SIGTERM
    assert "air-a: drained in" in capsys.readouterr().out


def test_an_idle_server_lives_until_gateways_know(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "TOLD_SECONDS", 0.7)
    process = main_process()
    with counting(0) as server:
        begun = time.monotonic()
        assert stop.main(env | {"FLEET_PORT": str(server.port), "MAINPID": str(process.pid)}) == 0
        assert time.monotonic() - begun >= 0.7
    assert process.wait(5) == -signal.SIGTERM


def test_the_drain_is_bounded_and_says_what_it_cut(
    env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    process = main_process()
    with counting(3) as server:
        changes = {"FLEET_PORT": str(server.port), "FLEET_DRAIN_SECONDS": "1"}
        begun = time.monotonic()
        assert stop.main(env | changes | {"MAINPID": str(process.pid)}) == 0
        assert 1 <= time.monotonic() - begun < 15
    assert "3 requests still ran after drain_seconds (1 s) and are cut" in capsys.readouterr().out
    assert process.wait(5) == -signal.SIGTERM


def test_a_server_that_is_gone_is_not_waited_for(env: dict[str, str]) -> None:
    begun = time.monotonic()
    with counting(5) as server:
        assert stop.main(env | {"FLEET_PORT": str(server.port)}) == 0, "systemd has no main PID"
        process = subprocess.Popen(["true"])
        process.wait()
        changes = {"FLEET_PORT": str(server.port), "MAINPID": str(process.pid)}
        assert stop.main(env | changes) == 0, "its gate cannot be the one that answers"
    assert time.monotonic() - begun < 10


def test_a_busy_server_is_not_taken_for_an_idle_one(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "POLL_SECONDS", 0.01)
    replies: list[tuple[int, object]] = [(500, {"error": {}}), (200, {"in_flight": 0})]
    with StandIn({"/fleet/ready": lambda body: replies.pop(0)}) as server:
        assert stop.drain("air-a", os.getpid(), server.port, 10, 0) == 0
    assert not replies
    with StandIn({"/fleet/ready": lambda body: (500, {})}) as server:
        assert stop.drain("air-a", os.getpid(), server.port, 0.1, 0) == 1


def test_a_server_that_ignores_sigterm_is_killed(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop, "SHUTDOWN_SECONDS", 0.3)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    process = subprocess.Popen(
        [sys.executable, "-c", code + "print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout
    process.stdout.readline()
    assert stop.main(env | {"MAINPID": str(process.pid)}) == 0
    assert process.wait(5) == -signal.SIGKILL
    assert "hangs 0 s after SIGTERM: killed" in capsys.readouterr().out


def test_a_stop_before_the_instance_was_ready(env: dict[str, str]) -> None:
    (Path(env["FLEET_RUN"]) / "ready").unlink()
    assert stop.main(env) == 0
