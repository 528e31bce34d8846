"""apply.py on a real file system: all or nothing, and only what is ours is ever removed."""

from __future__ import annotations

import grp
import json
import os
import pwd
from pathlib import Path

import pytest

from vllm_fleet.onhost import apply


@pytest.fixture(autouse=True)
def _own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setattr(apply, "STATE", str(state))
    monkeypatch.setattr(apply, "MANIFEST", str(state / "manifest.json"))
    monkeypatch.setattr(apply, "UNITS", "/nowhere")
    monkeypatch.setattr(apply, "OWN_UNITS", str(tmp_path / "units"))
    monkeypatch.setattr(apply, "system_user", lambda: None)
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "chown", lambda *_: None)


def order(
    *files: tuple[Path, str], remove: tuple[Path, ...] = (), checks: list[object] | None = None
):
    owner, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    return {
        "files": [
            {"path": str(p), "content": c, "mode": "640", "owner": owner, "group": group}
            for p, c in files
        ],
        "remove": [str(p) for p in remove],
        "checks": checks or [],
    }


def test_a_file_is_written_with_its_mode_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "a.conf"
    assert apply.apply(order((path, "one\n"))) is None
    assert path.read_text() == "one\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(json.loads(Path(apply.MANIFEST).read_text())) == [str(path)]
    assert Path(apply.MANIFEST).stat().st_mode & 0o777 == 0o600


def test_a_refusing_check_puts_everything_back(tmp_path: Path) -> None:
    old, new = tmp_path / "old.conf", tmp_path / "new.conf"
    old.write_text("as it was\n")
    old.chmod(0o604)
    check = {"paths": [str(tmp_path)], "command": ["sh", "-c", "echo bad directive; exit 1"]}
    refusal = apply.apply(order((old, "changed\n"), (new, "new\n"), checks=[check]))
    assert refusal is not None
    assert "bad directive" in refusal
    assert old.read_text() == "as it was\n"
    assert old.stat().st_mode & 0o777 == 0o604
    assert not new.exists()
    assert not Path(apply.MANIFEST).exists()


def test_a_refusal_says_what_to_do(tmp_path: Path) -> None:
    check = {"paths": [str(tmp_path)], "command": ["false"], "remedy": "set `firewall: false`"}
    refusal = apply.apply(order((tmp_path / "a", "x"), checks=[check]))
    assert refusal == "false: ; set `firewall: false`"


def test_a_check_of_other_paths_is_not_run(tmp_path: Path) -> None:
    check = {"paths": ["/elsewhere/"], "command": ["false"]}
    assert apply.apply(order((tmp_path / "a", "x"), checks=[check])) is None


def test_a_file_that_goes_is_not_checked(tmp_path: Path) -> None:
    """As the configuration of a daemon that left the plan; what stays is checked still."""
    gone, stays = tmp_path / "gone.conf", tmp_path / "stays.conf"
    assert apply.apply(order((gone, "x"), (stays, "y"))) is None
    of_gone = {"paths": [str(tmp_path)], "command": ["grep", "-q", "x", str(gone)]}
    of_stays = {"paths": [str(tmp_path)], "command": ["grep", "-q", "never", str(stays)]}
    assert apply.apply(order(remove=(gone,), checks=[of_gone, of_stays])) is not None
    assert gone.exists()
    assert apply.apply(order(remove=(gone,), checks=[of_gone])) is None
    assert not gone.exists()


def test_a_missing_checker_refuses(tmp_path: Path) -> None:
    check = {"paths": [str(tmp_path)], "command": ["no-such-checker"]}
    assert "not installed" in str(apply.apply(order((tmp_path / "a", "x"), checks=[check])))
    assert not (tmp_path / "a").exists()


def test_an_unknown_owner_puts_everything_back(tmp_path: Path) -> None:
    wanted = order((tmp_path / "a", "x"), (tmp_path / "b", "y"))
    wanted["files"][1]["owner"] = "nobody-of-this-name"
    assert apply.apply(wanted) is not None
    assert not (tmp_path / "a").exists()


def test_only_what_we_put_is_removed(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.write_text("precious")
    assert apply.apply(order((ours, "x"))) is None
    assert "not put here by us" in str(apply.apply(order(remove=(ours, theirs))))
    assert ours.exists()
    assert theirs.exists()
    assert apply.apply(order(remove=(ours,))) is None
    assert not ours.exists()
    assert json.loads(Path(apply.MANIFEST).read_text()) == {}


def test_a_second_time_changes_nothing_but_time(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for _ in range(2):
        assert apply.apply(order((path, "x"))) is None
    assert path.read_text() == "x"
    assert not list(tmp_path.glob(f"*{apply.SUFFIX}"))


def test_a_unit_that_goes_is_stopped_and_no_longer_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemctl is a stand-in here: it writes down what it was asked."""
    (tmp_path / "bin").mkdir()
    asked = tmp_path / "asked"
    (tmp_path / "bin/systemctl").write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    (tmp_path / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    units = tmp_path / "units"
    names = ("fleet.service", "fleet.timer", "vllm@.service", "nginx.service.d/fleet.conf")
    files = tuple(units / name for name in names)
    wants = units / "timers.target.wants"
    wants.mkdir(parents=True)
    for name in ("fleet.timer", "other.timer"):
        (wants / name).symlink_to(units / name)
    assert apply.apply(order(*((file, "x") for file in files))) is None
    assert not asked.exists()
    assert apply.apply(order(remove=files)) is None
    assert asked.read_text() == "stop fleet.service fleet.timer\n"
    assert [link.name for link in wants.iterdir()] == ["other.timer"]


def test_a_unit_whose_removal_is_refused_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = tmp_path / "units/fleet.service"
    assert apply.apply(order((unit, "x"))) is None
    stopped: list[object] = []
    monkeypatch.setattr(apply, "end_units", stopped.append)
    check = {"paths": [str(tmp_path)], "command": ["false"]}
    assert apply.apply(order(remove=(unit,), checks=[check])) is not None
    assert unit.exists()
    assert not stopped
