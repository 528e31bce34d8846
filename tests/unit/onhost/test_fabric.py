"""The fabric's file on a host: staged, kept, put back; and killed at every moment of it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.onhost import fabric, ledger

OLD, NEW = "# old\n", "# new\n"


class Killed(BaseException):
    """The script is gone at this moment."""


class Host:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = root / "etc/fabric.env"
        self.kill_in = 0
        self.file.parent.mkdir()
        (root / "state").mkdir()
        monkeypatch.setattr(fabric, "FILE", str(self.file))
        monkeypatch.setattr(ledger, "ROOT", str(root / "state"))
        for name in ("replace", "unlink", "open", "fsync", "makedirs"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.kill_in:
                self.kill_in -= 1
                if not self.kill_in:
                    raise Killed
            return call(*args, **kwargs)

        return counted

    def do(self, action: str, run: str = "r1", **order: Any) -> Any:
        return fabric.ACTIONS[action]({"action": action, "run": run, **order})

    def text(self) -> str | None:
        return self.file.read_text() if self.file.exists() else None


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_staged_kept_and_done(host: Host, tmp_path: Path) -> None:
    host.file.write_text(OLD)
    assert host.do("stage", text=NEW) == {"cut_off": None}
    assert host.text() == OLD
    host.do("keep")
    assert host.text() == NEW
    host.do("done", tested={"hosts": ["a", "b"]})
    assert sorted(p.name for p in (tmp_path / "state/fabric").iterdir()) == ["tested.json"]
    tested = json.loads((tmp_path / "state/fabric/tested.json").read_text())
    assert tested["hosts"] == ["a", "b"]
    # The fact of a host is compared with it.
    assert len(tested["sha256"]) == 64


@pytest.mark.parametrize("old", [OLD, None])
@pytest.mark.parametrize("new", [NEW, None])
def test_put_back_also_where_there_was_none(host: Host, old: str | None, new: str | None) -> None:
    if old is not None:
        host.file.write_text(old)
    host.do("stage", text=new)
    assert host.do("back") == {"changed": False}
    host.do("stage", text=new)
    host.do("keep")
    assert host.text() == new
    assert host.do("back") == {"changed": old != new}
    assert host.text() == old
    assert host.do("back") == {"changed": False}


def test_another_runs_change_is_neither_kept_nor_put_back(host: Host) -> None:
    host.file.write_text(OLD)
    host.do("stage", run="r1", text=NEW)
    with pytest.raises(ledger.Refused, match="run r1 has staged an environment here, not run r2"):
        host.do("keep", run="r2")
    assert host.do("back", run="r2") == {"changed": False}
    host.do("keep", run="r1")
    assert host.text() == NEW


def test_a_run_after_a_killed_one_puts_back_what_was_before_both(host: Host) -> None:
    host.file.write_text(OLD)
    host.do("stage", run="r1", text="# half\n")
    host.do("keep", run="r1")
    assert host.do("stage", run="r2", text=NEW) == {"cut_off": "r1"}
    host.do("keep", run="r2")
    host.do("back", run="r2")
    assert host.text() == OLD


def test_killed_at_every_moment_it_is_old_or_new_and_the_next_run_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = 0
    while True:
        root = tmp_path / str(moments)
        root.mkdir()
        with monkeypatch.context() as patched:
            host = Host(root, patched)
            host.file.write_text(OLD)
            host.kill_in = moments + 1
            try:
                host.do("stage", text=NEW)
                host.do("keep")
                host.do("done", tested={})
            except Killed:
                killed = True
            else:
                killed = False
            host.kill_in = 0
            assert host.text() in (OLD, NEW)
            host.do("stage", run="r2", text="# third\n")
            host.do("keep", run="r2")
            before = host.text()
            host.do("back", run="r2")
            assert before == "# third\n"
            # Of one that was cut off only what was before it was ever tested to the end.
            assert host.text() == (OLD if killed else NEW)
        if not killed:
            break
        moments += 1
    assert moments > 10


def test_ports_that_are_taken_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        listeners = fabric.Listeners("127.0.0.1", port)
        try:
            assert f"pid {os.getpid()}" in listeners.taken[port]
        finally:
            listeners.close()


def test_two_hosts_on_one_machine_reach_each_other_and_tell_the_time() -> None:
    """Each of the two addresses plays a host."""
    found: dict[str, Any] = {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def host(me: str, own: str, peer: str, other: str) -> None:
        found[me] = fabric.ports(
            {
                "name": me,
                "address": own,
                "port": port,
                "peers": [{"name": peer, "address": other}],
                "seconds": 10,
            }
        )

    threads = [
        threading.Thread(target=host, args=words)
        for words in (("a", "127.0.0.1", "b", "127.0.0.2"), ("b", "127.0.0.2", "a", "127.0.0.1"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for me, peer in (("a", "b"), ("b", "a")):
        seen = found[me]["peers"][peer]
        assert (found[me]["taken"], seen["problems"]) == ({}, {})
        assert abs(seen["clock"][1]) < 1.0


def test_what_a_rank_said_is_put_together() -> None:
    lines = [
        'step {"rank": 0, "step": "torch"}',
        "[W socket.cpp] something of torch",
        'step {"rank": 0, "step": "rendezvous"}',
        'failed {"rank": 0, "why": "no route", "nccl": {}}',
    ]
    found = fabric.heard(3, 1, lines)
    assert (found["rank"], found["step"], found["why"]) == (3, "rendezvous", "no route")
    assert found["tail"] == ["[W socket.cpp] something of torch"]
    assert fabric.heard(0, -9, ["step {broken"])["step"] == ""
