"""The doctor's own questions on a host, with real processes, files, sockets and servers."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.doctor.questions import SCRIPTS
from vllm_fleet.onhost import doctor, state
from vllm_fleet.operations.remote import BOOT, bundled


@pytest.fixture
def process() -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> int:
        one = subprocess.Popen([name, "-c", "import time; time.sleep(60)", *words],
                               executable=sys.executable)  # fmt: skip
        started.append(one)
        deadline = time.monotonic() + 10
        while one.pid not in doctor.processes():  # between fork and exec it has our own name
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while not doctor.processes()[one.pid][1].startswith(name):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return one.pid

    yield start
    for one in started:
        one.kill()
        one.wait()


def test_engines_and_servers_outside_our_units_are_told(process: Any) -> None:
    engine = process("VLLM::EngineCore")
    server = process("python3", "/opt/x/bin/vllm", "serve", "/data/model")
    process("grep", "vllm", "serve")  # speaks of one
    process("python3", "-m", "http.server")
    found = {one["pid"]: one["kind"] for one in doctor.strangers(doctor.processes())}
    ours = {pid: kind for pid, kind in found.items() if doctor.processes()[pid][0] == os.getpid()}
    assert ours == {engine: "engine", server: "server"}


def test_an_engine_of_a_server_that_is_told_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "process", lambda pid: {"pid": pid, "unit": None})
    table = {
        9: (1, "bash -c vllm serve m"),
        10: (9, "sh start.sh"),
        11: (10, "python bin/vllm serve m"),
        12: (11, "VLLM::EngineCore"),
        13: (12, "VLLM::Worker_TP0"),
        20: (1, "VLLM::Worker_TP1"),
    }
    found = [(one["pid"], one["workers"]) for one in doctor.strangers(table)]
    assert found == [(11, [12, 13]), (20, [])]


def test_an_engine_that_has_just_ended_is_no_orphan() -> None:
    assert doctor.strangers({999999999: (1, "VLLM::EngineCore")}) == []


def test_names_are_read_from_a_launch_script() -> None:
    text = (
        "#!/bin/sh\n# Managed by vllm-fleet\nset -eu\n"
        "exec /opt/vllm/bin/vllm serve '/data/a b' \\\n"
        "  --port 8001 \\\n  --served-model-name glm glm-4 \\\n  --dtype bfloat16\n"
    )
    assert doctor.script_names(text) == ["glm", "glm-4"]
    assert doctor.script_names("exec vllm serve m --served-model-name=old --port 1") == ["old"]
    assert doctor.script_names("exec vllm serve 'unclosed") == []


def test_only_what_may_be_told_of_an_environment_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "ETC", str(tmp_path))
    (tmp_path / "a.env").write_text(
        'NCCL_DEBUG="INFO"\nVLLM_API_KEY="sk-secret"\nHF_TOKEN="hf_secret"\n# NCCL_P2P_DISABLE=1\n'
    )
    drop_in = tmp_path / "x.conf"
    drop_in.write_text(
        '[Service]\nEnvironment=NCCL_SOCKET_IFNAME=ib9 "GLOO_SOCKET_IFNAME=ib8" SECRET=1\n'
    )
    found = doctor.environment("a", {"DropInPaths": str(drop_in), "EnvironmentFiles": ""}, 0)
    assert {key: one["value"] for key, one in found.items()} == {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "ib9",
        "GLOO_SOCKET_IFNAME": "ib8",
    }
    assert found["NCCL_SOCKET_IFNAME"]["files"] == [str(drop_in)]
    assert "secret" not in json.dumps(found)


def test_weights_that_changed_are_named_and_bytes_are_read_only_when_asked(tmp_path: Path) -> None:
    files = {}
    for name in ("a.safetensors", "b.safetensors", "c.json", "d.json"):
        path = tmp_path / name
        path.write_bytes(name.encode() * 10)
        stat = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files[name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}
    stamp = tmp_path / ".verified.json"
    stamp.write_text(json.dumps({"files": files}))
    assert doctor.weights(str(stamp), True) == {
        "there": True, "changed": [], "wrong": [], "bytes": 380
    }  # fmt: skip
    flipped = tmp_path / "a.safetensors"
    before = flipped.stat()
    flipped.write_bytes(b"X" + flipped.read_bytes()[1:])
    os.utime(flipped, ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "c.json").write_bytes(b"shorter")
    (tmp_path / "d.json").unlink()
    shallow = doctor.weights(str(stamp), False)
    assert [name for name, _ in shallow["changed"]] == ["c.json", "d.json"]
    assert shallow["wrong"] == []
    assert doctor.weights(str(stamp), True)["wrong"] == ["a.safetensors", "c.json"]
    assert doctor.weights(str(tmp_path / "none"), True)["there"] is False


def test_rules_that_close_a_port_are_found_with_their_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """\
table inet vllm_fleet { # handle 1
	chain input { # handle 1
		tcp dport { 8001, 8002 } drop # handle 5
	}
}
table ip filter { # handle 2
	chain INPUT { # handle 3
		type filter hook input priority filter; policy accept;
		tcp dport 22 accept # handle 4
		ip saddr 10.0.0.9 tcp dport { 9000-9200, 80 } counter packets 0 bytes 0 drop # handle 12
		tcp dport 8001 reject with tcp reset # handle 13
		tcp sport 8001 drop # handle 14
	}
}
"""
    nft = tmp_path / "nft"
    nft.write_text(f"#!/bin/sh\ncat <<'X'\n{text}X\n")
    nft.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = [(r["port"], r["at"], r["handle"]) for r in doctor.blocking([8001, 9100, 22])]
    assert found == [(9100, "ip filter INPUT", 12), (8001, "ip filter INPUT", 13)]


def test_the_log_of_a_restart_ends_where_the_next_process_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "100.5 python[1]: ValueError: the cause",
        "101.0 systemd[1]: vllm@a.service: Main process exited, code=exited, status=1/FAILURE",
        "101.1 systemd[1]: vllm@a.service: Failed with result 'exit-code'.",
        "106.0 systemd[1]: vllm@a.service: Scheduled restart job, restart counter is at 1.",
        "107.0 systemd[1]: Starting vllm@a.service",
        "108.0 python[2]: ready",
        "109.0 python[2]: RuntimeError: of the process that runs",
    ]
    tool = tmp_path / "journalctl"
    tool.write_text("#!/bin/sh\ncat <<'X'\n" + "\n".join(lines) + "\nX\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = doctor.restarts("vllm@a.service", 1, {"ActiveState": "active"})
    assert found["last"] == 106.0
    assert "the cause" in found["log"]
    assert "of the process that runs" not in found["log"]
    assert doctor.restarts("vllm@a.service", 0, {"ActiveState": "active"})["log"] == ""


def test_ports_that_are_closed_and_open_are_told_apart() -> None:
    with socket.socket() as open_one, socket.socket() as closed:
        open_one.bind(("127.0.0.1", 0))
        open_one.listen()
        closed.bind(("127.0.0.1", 0))
        where = {
            "h/a": ["127.0.0.1", open_one.getsockname()[1]],
            "h/b": ["127.0.0.1", closed.getsockname()[1]],
        }
        assert doctor.reach(where) == {"h/a": "", "h/b": "connection refused"}


TARGETS = [
    {"labels": {"job": "node", "host": "h", "instance": "node"}, "health": "down",
     "scrapeUrl": "http://h:9100/metrics", "lastError": "refused"},
    {"labels": {"job": "vllm", "host": "h", "instance": "a"}, "health": "up"},
]  # fmt: skip
ALERTS = [
    {"labels": {"alertname": "A"}, "annotations": {"summary": "s"}, "state": "firing"},
    {"labels": {"alertname": "B"}, "annotations": {}, "state": "pending"},
]


class _Prometheus(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            body = (
                b'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:num_requests_waiting{e="1"} 4\n'
            )
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        data = {"activeTargets": TARGETS} if "targets" in self.path else {"alerts": ALERTS}
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_targets_that_are_down_and_alerts_that_fire_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no proxy is asked
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Prometheus)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        found = doctor.prometheus(server.server_port, 5)
        assert doctor.waiting(server.server_port, 5) == 7
    finally:
        server.shutdown()
        server.server_close()
    assert found["targets"] == 2
    assert [(one["host"], one["error"]) for one in found["down"]] == [("h", "refused")]
    assert [one["labels"]["alertname"] for one in found["alerts"]] == ["A"]
    assert doctor.prometheus(server.server_port, 5)["why"] == "connection refused"
    assert doctor.waiting(server.server_port, 5) is None


def test_it_runs_as_it_is_sent_to_a_host() -> None:
    """All its modules over standard input, with the host's own Python."""
    order = {
        "instances": [], "stamps": [], "deep": False, "gateway": None, "prometheus": None,
        "watched": [], "seconds": 5,
    }  # fmt: skip
    command = bundled(("doctor",), order, *SCRIPTS)
    done = subprocess.run(
        ["/usr/bin/python3", "-u", "-c", BOOT, "doctor"],
        input=command.connector_arguments["_stdin"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout.splitlines()[-1].partition(" ")[2])
    assert abs(found["time"] - time.time()) < 30
    assert "lo" in found["interfaces"]
    assert found["disks"]
