"""A vLLM that is not ours: named with what takes it over, and taken over only when told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import fleet, states
from vllm_fleet import adoption
from vllm_fleet.adoption import AdoptionError
from vllm_fleet.onhost import adopt, ledger, switch
from vllm_fleet.plan import Refusal, plan_fleet
from vllm_fleet.spec.inputs import Inputs

pytestmark = pytest.mark.slow

BY_HAND = {
    "pid": 77,
    "user": "ann",
    "command": "/home/ann/venv/bin/python /home/ann/venv/bin/vllm serve /data/glm --port 8001",
    "unit": None,
    "session": 70,
}
WORKER = {"pid": 78, "user": "ann", "command": "VLLM::EngineCore", "unit": None, "session": 70}


def held(root: Path, listener: dict[str, Any], *holders: dict[str, Any]) -> Any:
    found = fleet(root)
    known = states(found, gpu_1={"listening": {"8001": listener}})
    known["gpu-1"].cards["holders"] = [
        {**one, "uuid": "GPU-0000", "memory_mib": 40000} for one in holders
    ]
    return found, known


@pytest.mark.parametrize(
    ("command", "whether"),
    [
        (BY_HAND["command"], True),
        ("python3 -m vllm.entrypoints.openai.api_server --port 8001", True),
        ("VLLM::Worker_TP0", True),
        ("nginx: master process /usr/sbin/nginx", False),
        ("python3 train.py --name not-vllm", False),
        ("", False),
    ],
)
def test_a_vllm_is_known_by_its_command(command: str, whether: bool) -> None:
    assert adoption.is_vllm({"command": command}) is whether


def test_it_is_named_with_what_takes_it_over(tmp_path: Path) -> None:
    found, known = held(tmp_path, BY_HAND, WORKER)
    with pytest.raises(Refusal) as refused:
        plan_fleet(found, known, Inputs())
    told = str(refused.value)
    assert "port 8001 of instance glm-a is taken by pid 77 of ann, outside any unit" in told
    assert "deploy.py --data adopt=gpu-1/glm-a" in told
    assert "card 0 of instance glm-a is held by pid 78 of ann" in told


def test_when_told_it_stands_in_nobodys_way_and_ours_waits_for_the_rollout(tmp_path: Path) -> None:
    found, known = held(tmp_path, BY_HAND, WORKER)
    names = adoption.asked("gpu-1/glm-a", found)
    plan = plan_fleet(found, adoption.as_if_gone(found, known, names), Inputs())["gpu-1"]
    assert plan.state.adopted == {"glm-a": BY_HAND}
    assert "glm-a" not in [one.name for one in plan.to_start()]


def test_cards_that_another_server_holds_are_still_refused(tmp_path: Path) -> None:
    found, known = held(tmp_path, BY_HAND, {**WORKER, "session": 99})
    states = adoption.as_if_gone(found, known, adoption.asked("gpu-1/glm-a", found))
    with pytest.raises(Refusal, match=r"card 0 of instance glm-a is held by pid 78"):
        plan_fleet(found, states, Inputs())


def test_what_is_no_vllm_and_what_is_no_instance_are_refused(tmp_path: Path) -> None:
    found, known = held(tmp_path, {**BY_HAND, "command": "nginx: worker"})
    with pytest.raises(AdoptionError, match=r"pid 77 of ann: nginx: worker: no vLLM"):
        adoption.as_if_gone(found, known, frozenset({"gpu-1/glm-a"}))
    with pytest.raises(AdoptionError, match=r"adopt=gpu-1/glm: no such instance; .*gpu-1/glm-a"):
        adoption.asked("gpu-1/glm", found)
    # Nobody there, or ours by now: nothing to do, and no error.
    _, free = held(tmp_path, {**BY_HAND, "unit": "vllm@glm-a.service"})
    assert adoption.as_if_gone(found, free, frozenset({"gpu-1/glm-a"})) == free


# --- on a host

SERVER = """\
import http.server, os, signal, subprocess, sys
busy = os.path.join(os.path.dirname(__file__), "busy")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = b"vllm:num_requests_running{engine=\\"0\\"} %d.0\\n" % os.path.exists(busy)
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *args): pass
if os.environ.get("STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@contextmanager
def by_hand(folder: Path, name: str = "vllm", **more: str) -> Iterator[tuple[int, int]]:
    """(pid, port) of a server started by somebody, with a child of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = folder / name
    program.write_text(SERVER)
    words = [sys.executable, str(program), "serve", str(port)]
    process = subprocess.Popen(words, start_new_session=True, env={**os.environ, **more})
    try:
        deadline = time.monotonic() + 20
        while not adopt.before_start.listeners(port):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process.pid, port
    finally:
        for pid in adopt.session(process.pid) if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "ROOT", str(tmp_path / "rollout"))
    monkeypatch.setattr(ledger, "STATE", str(tmp_path))
    monkeypatch.setattr(switch, "unit_of", lambda pid: None)
    monkeypatch.setattr(adopt, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(adopt, "LEFT_SECONDS", 0.3)
    monkeypatch.setattr(adopt, "CONTAINER", adopt.re.compile("never"))


@pytest.mark.usefixtures("_host")
def test_its_requests_end_then_it_ends_and_how_it_was_started_is_kept(tmp_path: Path) -> None:
    (tmp_path / "busy").write_text("")
    with by_hand(tmp_path, TOKEN="secret") as (pid, port):
        family = adopt.session(pid)
        assert len(family) == 2
        begun = time.monotonic()
        subprocess.Popen(["sh", "-c", f"sleep 1; rm {tmp_path}/busy"])
        found = adopt.adopt({"instance": "a", "port": port, "seconds": 30})
        assert time.monotonic() - begun > 0.9
        assert found["adopted"] == [pid]
        assert not [one for one in family if adopt.alive(one)]
        assert adopt.adopt({"instance": "a", "port": port, "seconds": 1}) == {"adopted": []}
    kept = Path(found["kept"])
    assert kept.stat().st_mode & 0o777 == 0o600
    (seen,) = json.loads(kept.read_text())["processes"]
    assert seen["command"][1:] == [str(tmp_path / "vllm"), "serve", str(port)]
    assert "TOKEN=secret" in seen["environment"]


@pytest.mark.usefixtures("_host")
def test_what_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "END_SECONDS", 0.3)
    with by_hand(tmp_path, STUBBORN="1") as (pid, port):
        adopt.adopt({"instance": "a", "port": port, "seconds": 1})
        assert not adopt.alive(pid)


@pytest.mark.usefixtures("_host")
def test_another_program_on_the_port_is_named_and_left_alone(tmp_path: Path) -> None:
    with by_hand(tmp_path, name="other") as (pid, port):
        with pytest.raises(ledger.Refused, match=rf"pid {pid} .* which is no vLLM: end it by hand"):
            adopt.adopt({"instance": "a", "port": port, "seconds": 1})
        assert adopt.alive(pid)


@pytest.mark.parametrize(
    ("unit", "main", "found"),
    [
        (None, "", None),
        ("ssh.service", "sshd: /usr/sbin/sshd -D", None),  # where logins have no scope
        ("vllm.service", "/opt/venv/bin/python /opt/venv/bin/vllm serve /data/glm", "vllm.service"),
    ],
)
def test_a_unit_is_stopped_where_it_is_for_vllm(
    monkeypatch: pytest.MonkeyPatch, unit: str | None, main: str, found: str | None
) -> None:
    monkeypatch.setattr(switch, "unit_of", lambda pid: unit)
    monkeypatch.setattr(adopt.instances, "show", lambda unit: {"MainPID": "5"})
    monkeypatch.setattr(adopt, "words", lambda pid: main)
    assert adopt.service(77) == found


def test_a_unit_that_does_more_is_left_to_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "unit_of", lambda pid: "supervisor.service")
    monkeypatch.setattr(adopt.instances, "show", lambda unit: {"MainPID": "5"})
    monkeypatch.setattr(adopt, "words", lambda pid: "/usr/bin/python3 /usr/bin/supervisord -n")
    with pytest.raises(ledger.Refused, match=r"pid 77 runs in supervisor\.service, whose main"):
        adopt.service(77)
