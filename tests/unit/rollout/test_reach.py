"""Scripts sent along with what they import, and connections that break."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api import StringCommand
from pyinfra.connectors.util import CommandOutput, OutputLine

from vllm_fleet.operations import reach
from vllm_fleet.operations.reach import Reached
from vllm_fleet.operations.remote import bundled
from vllm_fleet.rollout.hosts import SCRIPTS, Failed


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_runs_alone_on_a_host(script: str, tmp_path: Path) -> None:
    """With nothing but the host's own Python, its imports sent along."""
    order = {"action": "nothing", "instance": "a", "files": [], "port": 1, "model": "m"}
    order |= {"task": "embed", "probes": 1, "answer_tokens": 8, "seconds": 1}
    command = bundled((script, "status"), order, *SCRIPTS[script])
    words = shlex.split(command.get_raw_value())
    words.insert(1, "-I")
    assert words[-2:] == [script, "status"]
    assert sum(map(len, words)) < 2000  # the rest goes to standard input
    done = subprocess.run(
        words,
        input=command.connector_arguments["_stdin"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    assert done.stderr == ""
    said = {
        "ledger": "refused 'nothing' is none of lock, beat",
        "switch": "refused a: 'nothing' is none of stage, begin",
        "care": "refused a: 'nothing' is none of halt, resume",
        "adopt": "refused a: 'nothing' is none of adopt",
        "gateways": "refused 'nothing' is none of status, drain",
        "acceptance": 'result {"asked": 1, "failures": [{"name": "timed embeddings"',
        "fabric": "refused 'nothing' is none of stage, path",
        "rehearse": 'result {"ok": false, "why": "no command line in its start script"',
    }
    assert done.stdout.startswith(said[script])


class Host:
    """A host of pyinfra whose connection breaks some times."""

    name = "g1"
    connector: Any = None
    data: Any = type("Data", (), {"__getattr__": lambda self, key: None})()

    def __init__(self, breaks: int, lines: list[str]) -> None:
        self.breaks, self.lines = breaks, lines
        self.connected = False
        self.connects = 0

    def connect(self, **_: Any) -> None:
        self.connects += 1
        self.connected = True

    def disconnect(self) -> None:
        self.connected = False

    def run_shell_command(self, command: StringCommand, **_: Any) -> Any:
        if self.breaks:
            self.breaks -= 1
            raise EOFError("Broken pipe")
        return True, CommandOutput([OutputLine("stdout", line) for line in self.lines])


@pytest.fixture
def reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(reach, "pop_global_arguments", lambda state, host, kwargs: ({}, []))
    config = type("Config", (), {"copy": lambda self: self})()

    def of(*hosts: Host) -> Reached:
        state: Any = type("State", (), {"inventory": hosts, "config": config})()
        return Reached(state, tmp_path, "r1")

    return of


def test_a_connection_that_broke_is_made_once_more(reached: Any) -> None:
    host = Host(1, ["b: x", "result " + json.dumps({"taken": True})])
    assert reached(host).ask("g1", "ledger", {"action": "lock"}) == {"taken": True}
    assert host.connects == 2
    with pytest.raises(Failed, match=r"g1: connection lost \(EOFError: Broken pipe\)"):
        reached(Host(9, [])).ask("g1", "ledger", {"action": "lock"})


class Ssh:
    """What a host of pyinfra has where it is reached by SSH."""

    def __init__(self) -> None:
        self.client = self

    def get_transport(self) -> Ssh:
        return self

    def is_active(self) -> bool:
        return False


def test_an_answer_that_was_cut_off_is_none(reached: Any) -> None:
    host: Any = Host(0, ["b: starting"])
    host.connector = Ssh()
    with pytest.raises(Failed, match=r"g1: connection lost \(ConnectionError"):
        reached(host).ask("g1", "switch", {"action": "switch", "instance": "a"})
    assert host.connects == 2


def test_what_a_long_script_says_is_told_its_result_is_not(
    reached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Reached, "say", lambda self, text: said.append(text))
    hosts = reached(Host(0, ["a: stopped", 'result {"ok": true}']))
    hosts.ask("g1", "switch", {"action": "switch", "instance": "a"})
    assert said == ["g1: a: stopped"]


def test_logs_are_kept_beside_group_vars(reached: Any, tmp_path: Path) -> None:
    path = reached().save("g1-a.log", ["one", "two"])
    assert path == str(tmp_path / "rollout-logs/r1/g1-a.log")
    assert Path(path).read_text() == "one\ntwo\n"
