"""`fleet check`: exit codes, streams, JSON, speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_fleet.cli import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "inventory/lab.py").write_text('gpu = ["a"]\n')
    (tmp_path / "group_vars/lab.yml").write_text("device: gpu\nstart_seconds: 0\n")
    return tmp_path / "inventory/lab.py"


def test_good() -> None:
    result = CliRunner().invoke(main, ["check", str(ROOT / "inventory/prod.py")])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "prod: 4 hosts (gpu 3, gateway 1, monitoring 1); 3 instances of 2 models: "
        "glm-4.5-air (2), qwen3-8b (1).\n"
    )


def test_broken(broken: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(broken)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        'group_vars/lab.yml:1:9: device: must be "cuda", "rocm" or "cpu"',
        "group_vars/lab.yml:2:16: start_seconds: must be a positive integer",
        "2 mistakes",
    ]


def test_json(broken: Path) -> None:
    result = CliRunner().invoke(main, ["check", "--json", str(broken)])
    answer = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, answer["ok"]) == (1, "", False)
    assert answer["complaints"][1] == {
        "file": "group_vars/lab.yml",
        "line": 2,
        "column": 16,
        "key": "start_seconds",
        "text": "must be a positive integer",
    }
    result = CliRunner().invoke(main, ["check", "--json", str(ROOT / "inventory/local.py")])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["instances"] == [
        {"host": "@local", "name": "qwen", "model": "qwen3-8b", "port": 8001, "cards": [0]}
    ]


@pytest.mark.parametrize("arguments", [["check"], ["check", "nope.py"], ["check", "."], ["nope"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_every_command_is_listed_and_loads() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in ("check", "init"):
        assert f"\n  {name} " in result.stdout


def test_imports_neither_pyinfra_nor_other_commands() -> None:
    code = (
        "import sys\nfrom vllm_fleet.cli import main\n"
        "try:\n"
        f"    main(['check', {str(ROOT / 'inventory/prod.py')!r}])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'pyinfra', 'gevent', 'modelscope', 'rich', 'jinja2', 'vllm_fleet.cli.init'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_cpu_time_of_a_whole_run_is_under_a_second() -> None:
    # CPU time of the child, so that a busy machine does not decide; each try pays for imports.
    code = (
        "import resource\nfrom vllm_fleet.cli import main\n"
        "try:\n"
        f"    main(['check', {str(ROOT / 'inventory/prod.py')!r}])\n"
        "except SystemExit:\n    pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\nprint(used.ru_utime + used.ru_stime)\n"
    )
    command = [sys.executable, "-c", code]
    seconds = min(
        float(
            subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
            ).stdout.splitlines()[-1]
        )
        for _ in range(3)
    )
    assert seconds < 1
