"""The probe: a wedged engine is told from a busy one, and freed within its bounds.

The server here is a small stand-in that answers, hangs and shows metrics as told; systemd is
replaced by a table. A real unit and a frozen process are in tests/integration.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet import metrics
from vllm_fleet.onhost import probe

pytestmark = pytest.mark.slow


class Engine:
    """A server of one instance, and the gateway that speaks of its pool."""

    def __init__(self) -> None:
        self.hangs = False
        self.status = 200
        self.tokens = 100
        self.busy = False  # gives tokens to others at every look
        self.metrics_hang = False
        self.headers: list[dict[str, str]] = []
        self.pool: list[tuple[str, str, str]] = [
            ("gpu-1", "a", "ready"),
            ("gpu-2", "b", "ready"),
        ]
        self.gateway_up = True
        self.over = threading.Event()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    if engine.metrics_hang:
                        engine.over.wait(20)
                    engine.tokens += engine.busy
                    name = "vllm:generation_tokens_total"
                    labels = '{engine="0",model_name="m"}'
                    self.say(200, f"{name}{labels} {engine.tokens}\nprocess_cpu_seconds 7\n")
                elif not engine.gateway_up:
                    self.say(503, "{}")
                else:
                    listed = [
                        {"host": h, "name": n, "state": s, "ready": s == "ready"}
                        for h, n, s in engine.pool
                    ]
                    pools = [{"name": "other", "instances": []}, {"name": "m", "instances": listed}]
                    self.say(200, json.dumps({"pools": pools}))

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                engine.headers.append({**dict(self.headers), "path": self.path, "body": body})
                if engine.hangs:
                    engine.over.wait(20)
                    return
                engine.tokens += engine.status == 200
                self.say(engine.status, json.dumps({"choices": [{}]}))

            def say(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Host:
    """A host of one instance: its folders, its unit, and rounds of the probe."""

    def __init__(self, root: Path, engine: Engine) -> None:
        self.root, self.engine = root, engine
        self.run = root / "run" / "a"
        self.run.mkdir(parents=True)
        (root / "etc").mkdir()
        (root / "state").mkdir()
        (root / "etc" / "a.env").write_text('VLLM_API_KEY="k\\"1"\n')
        (self.run / "token").write_text("secret")
        (self.run / "ready").write_text("1 1")
        self.unit = {"ActiveState": "active", "MainPID": str(os.getpid())}
        self.killed: list[list[str]] = []
        port = engine.server.server_port
        self.settings: dict[str, Any] = {
            "host": "gpu-1",
            "gateways": [f"127.0.0.1:{port}"],
            "instances": [
                {
                    "name": "a",
                    "pool": "m",
                    "model": "m",
                    "port": port,
                    "task": "chat",
                    "start_seconds": 600,
                }
            ],
            "deadline_seconds": 0.4,
            "wedged_seconds": 1.6,
            "restart_seconds": 1.6,
            "restart": True,
            "restarts_per_hour": 2,
            "restart_last": False,
        }

    def round(self) -> dict[str, float]:
        """One round; the metrics that it wrote, by name."""
        path = self.root / "probe.json"
        path.write_text(json.dumps(self.settings))
        assert probe.main([str(path)]) == 0
        text = (self.root / "state" / "metrics" / probe.METRICS_FILE).read_text()
        found = re.findall(r'^(\w+)\{vllm_instance="a",pool="m"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def in_rotation(self) -> bool:
        return (self.run / "ready").exists()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    engine = Engine()
    host = Host(tmp_path, engine)
    monkeypatch.setattr(probe, "RUN", str(tmp_path / "run"))
    monkeypatch.setattr(probe, "ETC", str(tmp_path / "etc"))
    monkeypatch.setattr(probe, "STATE", str(tmp_path / "state"))
    monkeypatch.setattr(probe, "METRICS_SECONDS", 0.3)
    monkeypatch.setattr(probe, "show", lambda _unit: host.unit)
    monkeypatch.setattr(probe, "processes", lambda _unit: [os.getpid()])

    def run(command: list[str], **_more: Any) -> None:
        host.killed.append(command)

    monkeypatch.setattr(probe.subprocess, "run", run)
    monkeypatch.setattr(probe, "output", lambda _command: "")
    yield host
    engine.over.set()
    engine.server.shutdown()


def test_a_good_instance_is_asked_for_one_token_past_the_gate(host: Host) -> None:
    found = host.round()
    asked = host.engine.headers[0]
    assert asked["path"] == "/v1/chat/completions"
    assert asked["body"]["max_tokens"] == 1  # type: ignore[index]
    assert asked["X-Fleet-Token"] == "secret"
    assert asked["Authorization"] == 'Bearer k"1'
    assert found["vllm_fleet_probe_success"] == 1
    assert found["vllm_fleet_probe_out"] == 0
    assert found["vllm_fleet_probe_restarts_total"] == 0
    assert abs(found["vllm_fleet_probe_time_seconds"] - time.time()) < 60
    assert set(found) <= metrics.own_series()


@pytest.mark.parametrize(("task", "path"), [("embed", "/v1/embeddings"), ("rerank", "/v1/rerank")])
def test_each_task_is_asked_in_its_own_way(host: Host, task: str, path: str) -> None:
    host.settings["instances"][0]["task"] = task
    host.round()
    assert host.engine.headers[0]["path"] == path


def test_a_wedged_engine_goes_out_of_rotation_and_is_killed(host: Host) -> None:
    host.round()
    host.engine.hangs = True
    host.settings["restart_seconds"] = 1000
    found = host.round()
    assert found["vllm_fleet_probe_success"] == 0
    assert found["vllm_fleet_probe_out"] == 1
    assert not host.in_rotation()
    assert host.killed == []
    host.settings["restart_seconds"] = 1.6
    found = host.round()
    assert host.killed == [["systemctl", "kill", "--signal=SIGKILL", "vllm@a.service"]]
    assert found["vllm_fleet_probe_restarts_total"] == 1
    stacks = list((host.root / "state" / "stacks").iterdir())
    assert len(stacks) == 1
    assert stat.S_IMODE(stacks[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(stacks[0].parent.stat().st_mode) == 0o700
    assert "-- thread" in stacks[0].read_text()


def test_a_saturated_engine_is_left_alone(host: Host) -> None:
    """Its probe waits in the queue, and tokens come out for others."""
    host.round()
    host.engine.hangs = host.engine.busy = True
    for _ in range(3):
        found = host.round()
        assert found["vllm_fleet_probe_success"] == 0
        assert found["vllm_fleet_probe_out"] == 0
    assert host.in_rotation()
    assert host.killed == []


def test_errors_are_told_and_nothing_is_taken_out(host: Host) -> None:
    host.round()
    host.engine.status = 500
    time.sleep(1.7)
    found = host.round()
    assert found["vllm_fleet_probe_success"] == 0
    assert host.in_rotation()
    assert host.killed == []


def test_a_server_that_computes_is_not_wedged_though_it_shows_no_metrics(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.round()
    host.engine.hangs = host.engine.metrics_hang = True
    seconds = iter(range(10**6))
    monkeypatch.setattr(probe, "cpu_seconds", lambda _pid: next(seconds))
    host.round()
    assert host.in_rotation()
    monkeypatch.setattr(probe, "cpu_seconds", lambda _pid: 5)
    host.round()
    assert not host.in_rotation()


def test_what_answers_again_is_put_back(host: Host) -> None:
    host.settings["restart_seconds"] = 1000
    host.round()
    host.engine.hangs = True
    host.round()
    assert not host.in_rotation()
    host.engine.hangs = False
    found = host.round()
    assert host.in_rotation()
    assert found["vllm_fleet_probe_out"] == 0


@pytest.mark.parametrize("others", ["none", "not ready", "draining", "no gateway"])
def test_the_last_ready_one_is_never_taken_out(host: Host, others: str) -> None:
    host.round()
    host.engine.hangs = True
    if others == "no gateway":
        host.engine.gateway_up = False
    else:
        host.engine.pool[1:] = [] if others == "none" else [("gpu-2", "b", others)]
    host.round()
    assert host.in_rotation()
    assert host.killed == []
    host.settings["restart_last"] = True
    host.round()
    assert not host.in_rotation()
    assert len(host.killed) == 1


def test_one_of_a_pool_at_a_time(host: Host) -> None:
    host.engine.pool.append(("gpu-0", "z", "ready"))
    host.round()
    host.engine.hangs = True
    host.engine.pool[2] = ("gpu-0", "z", "not ready")  # seen ready a moment ago: it is starting
    host.round()
    assert host.killed == []
    host.engine.pool[2] = ("gpu-0", "z", "ready")
    host.round()
    assert len(host.killed) == 1


def test_what_is_away_for_long_is_waited_for_no_more(host: Host) -> None:
    host.engine.pool.append(("gpu-0", "z", "not ready"))  # never seen ready
    host.round()
    host.engine.hangs = True
    host.round()
    assert len(host.killed) == 1


def test_at_most_so_often(host: Host) -> None:
    host.round()
    host.engine.hangs = True
    for _ in range(4):
        host.round()
    assert len(host.killed) == 2


def test_restarts_are_off_by_a_setting(host: Host) -> None:
    host.settings["restart"] = False
    host.round()
    host.engine.hangs = True
    host.round()
    assert not host.in_rotation()
    assert host.killed == []


@pytest.mark.parametrize("state", ["activating", "deactivating", "failed", "drained"])
def test_what_starts_or_stops_is_not_asked(host: Host, state: str) -> None:
    if state == "drained":
        (host.run / "ready").unlink()
    else:
        host.unit["ActiveState"] = state
    found = host.round()
    assert host.engine.headers == []
    assert "vllm_fleet_probe_success" not in found


def test_a_new_process_is_not_judged_by_the_old_one(host: Host) -> None:
    host.round()
    host.engine.hangs = True
    host.settings["wedged_seconds"] = 3
    time.sleep(1)
    host.unit["MainPID"] = str(os.getppid())
    begun = time.monotonic()
    host.round()
    assert time.monotonic() - begun >= 0.4
    state = json.loads((host.root / "state" / "probe.json").read_text())
    assert state["a"]["pid"] == str(os.getppid())
    assert state["a"]["changed_at"] >= begun - 0.5
