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


def test_a_check_of_other_paths_is_not_run(tmp_path: Path) -> None:
    check = {"paths": ["/elsewhere/"], "command": ["false"]}
    assert apply.apply(order((tmp_path / "a", "x"), checks=[check])) is None


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
