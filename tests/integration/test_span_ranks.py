"""The ranks of a span on two loopback addresses: when they start, and what ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from vllm_fleet.gate import span

pytestmark = pytest.mark.multinode

SILENT = 3
# Of a rank's engine: a process named as vLLM's own are, and a server around it.
ENGINE = """
import subprocess, sys, time
worker = subprocess.Popen(
    ["VLLM::Worker", "-c", "import time\\nwhile True: time.sleep(60)"], executable=sys.executable)
print("worker", worker.pid, flush=True)
while True: time.sleep(60)
"""


class Ranks:
    """Two ranks, each in a process group of its own, with a folder for its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, **changed: str) -> None:
        run = self.folder / f"run-{rank}"
        run.mkdir(exist_ok=True)
        for old in run.iterdir():
            old.unlink()
        env = {
            **os.environ,
            "FLEET_SPAN": "big",
            "FLEET_RANK": str(rank),
            "FLEET_RANKS": "one=127.0.0.1,two=127.0.0.2",
            "FLEET_WATCH_PORT": str(self.port),
            "FLEET_SILENT_SECONDS": str(SILENT),
            "FLEET_JOIN_SECONDS": "5",
            "FLEET_SETTINGS": "abc",
            "FLEET_EXECUTOR": "mp",
            "FLEET_RELEASE": str(self.folder / "0.32.0-12345678"),
            "FLEET_RUN": str(run),
            "FLEET_PORT": str(self.port + 1),
            "FLEET_DRAIN_SECONDS": "5",
            **changed,
        }
        with self.log(rank).open("ab") as log:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, str(Path(span.__file__)), sys.executable, "-c", ENGINE],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, rank: int) -> Path:
        return self.folder / f"log-{rank}"

    def text(self, rank: int) -> str:
        return self.log(rank).read_text() if self.log(rank).exists() else ""

    def state(self, rank: int) -> str:
        try:
            return str(json.loads((self.folder / f"run-{rank}/span.json").read_text())["state"])
        except (OSError, ValueError):
            return ""

    def worker(self, rank: int) -> int:
        return int(self.text(rank).rpartition("worker ")[2].split()[0])

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 40) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + seconds, (
                f"{what}: not so\n{self.text(0)}\n--\n{self.text(1)}"
            )
            time.sleep(0.05)
        return time.monotonic() - began

    def both_start(self) -> None:
        self.start(0)
        self.start(1)
        self.until(
            lambda: all("worker" in self.text(rank) for rank in (0, 1)), "both have an engine"
        )

    def both_ended(self, *codes: int) -> None:
        self.until(
            lambda: all(p.poll() is not None for p in self.processes.values()), "both have ended"
        )
        assert tuple(self.processes[rank].returncode for rank in (0, 1)) == codes, self.text(0)
        assert "Traceback" not in self.text(0) + self.text(1)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for process in made.processes.values():
        # As systemd does with what is left of a unit.
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
        process.wait()


def test_nothing_is_started_before_all_are_there(ranks: Ranks) -> None:
    ranks.start(0)
    ranks.until(lambda: ranks.state(0) == "waiting", "rank 0 waits")
    assert "rank 1 on two (127.0.0.2) has not come" in ranks.text(0)
    assert "worker" not in ranks.text(0)
    ranks.start(1)
    ranks.until(lambda: all(ranks.state(r) == "starting" for r in (0, 1)), "both start")


def test_the_others_wait_for_rank_0(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.until(lambda: "its unit does not run there" in ranks.text(1), "rank 1 says why")
    assert "worker" not in ranks.text(1)


def test_all_are_ready_when_rank_0_is(ranks: Ranks) -> None:
    ranks.both_start()
    ready = ranks.folder / "run-1/ready"
    assert not ready.exists()
    (ranks.folder / "run-0/ready").write_text("warm")
    ranks.until(ready.exists, "rank 1 is ready")
    (ranks.folder / "run-0/ready").unlink()
    ranks.until(lambda: not ready.exists(), "rank 1 is not")


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_others(ranks: Ranks, dead: int) -> None:
    ranks.both_start()
    (ranks.folder / "run-0/ready").write_text("warm")
    os.killpg(ranks.processes[dead].pid, signal.SIGKILL)
    ranks.until(lambda: ranks.processes[1 - dead].poll() is not None, "the other has ended")
    assert ranks.processes[1 - dead].returncode == 1
    assert "is lost" in ranks.text(1 - dead)
    if dead == 1:
        assert not (ranks.folder / "run-0/ready").exists()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_host_is_noticed_and_notices_it_later(ranks: Ranks, frozen: int) -> None:
    ranks.both_start()
    group = ranks.processes[frozen].pid
    os.killpg(group, signal.SIGSTOP)
    other = ranks.processes[1 - frozen]
    ranks.until(lambda: other.poll() is not None, "the other has ended")
    assert f"says nothing for {SILENT} s: its host is down or frozen" in ranks.text(1 - frozen)
    os.killpg(group, signal.SIGCONT)
    ranks.until(lambda: ranks.processes[frozen].poll() is not None, "the frozen one too")
    assert ranks.processes[frozen].returncode == 1


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "was stopped (SIGSTOP)")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_or_is_stopped_ends_all(
    ranks: Ranks, rank: int, number: signal.Signals, words: str
) -> None:
    ranks.both_start()
    time.sleep(2.5)  # it must have been seen once
    os.kill(ranks.worker(rank), number)
    ranks.both_ended(1, 1)
    assert f"VLLM::Worker (pid {ranks.worker(rank)}) {words}" in ranks.text(rank)
    assert words in ranks.text(1 - rank)  # and the other says the same


def test_an_engine_that_ends_ends_all(ranks: Ranks) -> None:
    ranks.both_start()
    server = int(Path(f"/proc/{ranks.worker(1)}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    ranks.both_ended(1, 1)
    assert "ended with -9" in ranks.text(0)


def test_a_stop_of_rank_0_is_no_failure(ranks: Ranks) -> None:
    ranks.both_start()
    ranks.processes[0].terminate()
    ranks.both_ended(0, 0)
    assert "LOST" not in ranks.text(0) + ranks.text(1)


def test_a_rank_that_leaves_has_rank_0_drain(ranks: Ranks) -> None:
    ranks.both_start()
    ready = ranks.folder / "run-0/ready"
    ready.write_text("warm")
    (ranks.folder / "run-1/leaving").touch()
    ranks.until((ranks.folder / "run-1/drained").exists, "drained")
    assert not ready.exists()
    ranks.processes[1].terminate()
    ranks.both_ended(0, 0)
    assert "rank 1 on two (127.0.0.2) was told to stop" in ranks.text(0)
    assert "LOST" not in ranks.text(0) + ranks.text(1)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("FLEET_RELEASE", "/opt/0.31.0-0", "release 0.31.0-0, not 0.32.0-12345678"),
        ("FLEET_SETTINGS", "other", "settings other, not abc"),
    ],
)
def test_ranks_that_differ_do_not_start(ranks: Ranks, key: str, value: str, words: str) -> None:
    ranks.start(0)
    ranks.start(1, **{key: value})
    ranks.until(lambda: words in ranks.text(0) and words in ranks.text(1), "both say how")
    assert ranks.state(0) == ranks.state(1) == "waiting"
    assert "worker" not in ranks.text(0) + ranks.text(1)


def test_a_release_without_a_lock_is_compared_by_what_is_in_it(tmp_path: Path) -> None:
    env = {"FLEET_SETTINGS": "x"}
    found = []
    for name, version in (("a", "2.12.0"), ("b", "2.13.0")):
        folder = tmp_path / name / "0.32.0-open/lib/python3.11/site-packages"
        (folder / f"torch-{version}.dist-info").mkdir(parents=True)
        (folder / "torchvision-1.0.dist-info").mkdir()
        found.append(span.same({**env, "FLEET_RELEASE": str(folder.parents[2])}))
    assert span.difference(*found) == "torch 2.13.0, not 2.12.0"


def test_somebody_else_at_the_port_is_no_rank(ranks: Ranks) -> None:
    ranks.start(0)
    ranks.until(lambda: ranks.state(0) == "waiting", "rank 0 waits")
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"span": "other", "rank": 1}\n', b"[1]\n"):
        with socket.create_connection(("127.0.0.1", ranks.port), 5) as one:
            one.sendall(words)
            one.settimeout(5)
            assert b"go" not in one.recv(1000)
    assert ranks.processes[0].poll() is None
    assert ranks.state(0) == "waiting"
