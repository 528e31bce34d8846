"""`fleet init`: a directory that is good as it stands, and nothing overwritten."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_fleet.cli import main
from vllm_fleet.cli.init import OWN, SHARED

ROOT = Path(__file__).resolve().parents[3]


def init(directory: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["init", str(directory)])
    return result.exit_code, result.stderr


@pytest.mark.parametrize("name", ["new/deeper", "."])
def test_writes_a_directory_that_checks_clean(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    assert init(directory) == (0, "")
    written = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    assert written == {*OWN, *SHARED}
    for inventory in ("prod", "local"):
        checked = CliRunner().invoke(main, ["check", str(directory / f"inventory/{inventory}.py")])
        assert checked.exit_code == 0, checked.stderr
    for name in (
        "deploy.py",
        "upgrade.py",
        "rollback.py",
        "maintain.py",
        "nccl.py",
        "bench.py",
    ):
        compile((directory / name).read_text(), name, "exec")
    assert "/secrets/" in (directory / ".gitignore").read_text().splitlines()


def test_refuses_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    code, said = init(tmp_path)
    assert code == 1
    assert "is not empty, and nothing in it is overwritten" in said
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    assert init(tmp_path / "file")[0] == 2
    code, said = init(tmp_path / "file/below")
    assert code == 1
    assert "Not a directory" in said
    assert (tmp_path / "file").read_text() == "kept"


def test_a_wheel_holds_everything_that_init_copies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for name in SHARED:
        assert included[name] == f"vllm_fleet/skeleton/{name}"
        assert (ROOT / name).is_file()
    for name in OWN.values():
        here = (ROOT / "vllm_fleet/skeleton" / name).is_file()
        assert here or included[name] == f"vllm_fleet/skeleton/{name}"
