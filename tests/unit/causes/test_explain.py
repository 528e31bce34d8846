"""`fleet explain` as an operator calls it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from vllm_fleet.cli.explain import explain

LOG = (
    "INFO starting\n"
    "ValueError: Total number of attention heads (28) must be divisible by tensor parallel "
    "size (8).\n"
    "RuntimeError: Engine core initialization failed. See root cause above.\n"
)


def test_json_names_the_root_first(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    result = CliRunner().invoke(explain, [str(tmp_path / "log"), "--json"])
    assert result.exit_code == 0
    matches = json.loads(result.output)["matches"]
    assert [m["id"] for m in matches] == ["heads-not-divisible", "engine-init-failed"]
    assert set(matches[0]) == {"id", "cause", "fix", "line"}
    assert matches[0]["line"] == LOG.splitlines()[1]


def test_text_on_standard_input() -> None:
    for args in ([], ["-"]):
        result = CliRunner().invoke(explain, args, input=LOG)
        assert result.exit_code == 0
        assert result.output.startswith("cause  heads-not-divisible: ")
        assert "fix    Choose a number of cards" in result.output


def test_unknown_says_so_and_exits_1() -> None:
    result = CliRunner().invoke(explain, ["-"], input="all is well\n")
    assert result.exit_code == 1
    assert result.output.startswith("unknown: ")
    result = CliRunner().invoke(explain, ["-", "--json"], input="all is well\n")
    assert (result.exit_code, json.loads(result.output)) == (1, {"matches": []})


def test_an_error_that_is_not_known_is_named_in_its_own_words() -> None:
    log = (
        "(EngineCore pid=7) ERROR [core.py:1108] RuntimeError: the flux capacitor is cold\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    result = CliRunner().invoke(explain, ["-"], input=log)
    assert result.exit_code == 0
    assert result.output.startswith("error  RuntimeError: the flux capacitor is cold\n")
    assert "cause  engine-init-failed: " in result.output
    result = CliRunner().invoke(explain, ["-", "--json"], input=log)
    assert json.loads(result.output)["error"] == "RuntimeError: the flux capacitor is cold"
    # Where a cause is known, it is the answer.
    result = CliRunner().invoke(explain, ["-", "--json"], input=log + LOG)
    assert "error" not in json.loads(result.output)
    unknown = log.splitlines()[0] + "\n"
    result = CliRunner().invoke(explain, ["-"], input=unknown)
    assert result.exit_code == 1
    assert result.output.startswith("error  RuntimeError: the flux capacitor is cold\n")
    assert "unknown: " in result.output


def test_wrong_usage_exits_2() -> None:
    assert CliRunner().invoke(explain, ["/does/not/exist"]).exit_code == 2
    assert CliRunner().invoke(explain, ["-", "--vllm", "new"], input=LOG).exit_code == 2


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\xfe\x00 header too large \xff\n")
    result = CliRunner().invoke(explain, [str(tmp_path / "log"), "--json"])
    assert json.loads(result.output)["matches"][0]["id"] == "shard-is-lfs-pointer"
