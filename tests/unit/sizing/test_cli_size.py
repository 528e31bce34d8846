"""``fleet size``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vllm_fleet.cli.size import size

from .conftest import DATA

QWEN = str(DATA / "configs" / "qwen3-8b.json")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(size, arguments)


def test_fits() -> None:
    result = run(
        QWEN,
        "--gpu",
        "H200",
        "--count",
        "1",
        "--max-model-len",
        "8192",
        "--json",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "0.9",
        "--max-num-batched-tokens",
        "16384",
        "--max-num-seqs",
        "1024",
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    for key in (
        "fits",
        "weights_gib",
        "kv_cache_gib",
        "kv_bytes_per_token",
        "kv_cache_tokens",
        "max_concurrency",
        "max_model_len_max",
        "warnings",
    ):
        assert key in found
    assert found["fits"] is True
    assert found["kv_cache_tokens"] == pytest.approx(786800, rel=0.001)


def test_does_not_fit() -> None:
    result = run(QWEN, "--gpu", "RTX 3060", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["fits"] is False
    result = run(QWEN, "--gpu", "L4", "--max-model-len", "40960", "--enforce-eager")
    assert result.exit_code == 1
    assert "the longest max_model_len is" in result.stderr


def test_a_card_that_vllm_has_no_kernels_for_is_said() -> None:
    model = str(DATA / "configs" / "glm-5.1-fp8.json")
    result = run(model, "--gpu", "A100", "--count", "16", "--tp", "16", "--json")
    assert "needs Hopper or Blackwell" in " ".join(json.loads(result.stdout)["warnings"])
    fine = run(model, "--gpu", "H200", "--count", "8", "--json")
    assert "would not start" not in fine.stdout


def test_refused() -> None:
    result = run(QWEN, "--gpu", "H100", "--count", "3")
    assert result.exit_code == 1
    assert "does not divide" in result.stderr
    assert "Traceback" not in result.output
    result = run("no-such-file.json", "--gpu", "H100", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["fits"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        (QWEN,),
        (QWEN, "--gpu", "H100", "--count", "0"),
        (QWEN, "--gpu", "H100", "--count", "4", "--tp", "3"),
        (QWEN, "--gpu", "H100", "--count", "4", "--tp", "2", "--pp", "1"),
        (QWEN, "--gpu", "H100", "--gpu-memory-utilization", "1.5"),
        (QWEN, "--gpu", "H100", "--kv-cache-dtype", "fp7"),
    ],
)
def test_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_table_is_plain_and_names_ranks(tmp_path: Path) -> None:
    result = run(QWEN, "--gpu", "79.19", "--count", "3", "--pp", "3")
    assert result.exit_code == 0
    assert "12 layers" in result.stdout
    assert "\x1b" not in result.stdout
    assert "of an H100 are used" in result.stderr
