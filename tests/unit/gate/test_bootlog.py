"""What vLLM prints of its memory at a start, read back and compared with the plan."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.shared_data import HERE, needs_shared_data
from vllm_fleet.gate import bootlog

V0 = """\
INFO 03-02 10:11:12 api_server.py:840] vLLM API server version 0.6.4.post1
INFO 03-02 10:11:20 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 03-02 10:11:25 worker.py:232] Memory profiling results: total_gpu_memory=79.19GiB
the current vLLM instance can use total_gpu_memory (79.19GiB) x gpu_memory_utilization (0.90) = 71.27GiB
model weights take 14.99GiB; non_torch_memory takes 0.12GiB; PyTorch activation peak memory takes 1.21GiB; the rest of the memory reserved for KV Cache is 54.95GiB.
INFO 03-02 10:11:26 gpu_executor.py:122] # GPU blocks: 28134, # CPU blocks: 2048
INFO 03-02 10:11:26 gpu_executor.py:126] Maximum concurrency for 131072 tokens per request: 3.43x
INFO 03-02 10:11:50 model_runner.py:1518] Graph capturing finished in 21 secs, took 0.26 GiB
"""  # noqa: E501
V1 = """\
(APIServer pid=100) INFO 09-09 09:09:09 [utils.py:233] vLLM API server version 0.21.0
(Worker_TP0 pid=201) INFO 09-09 09:09:30 [gpu_model_runner.py:2653] Model loading took 31.2310 GiB and 12.5 seconds
(Worker_TP1 pid=202) INFO 09-09 09:09:31 [gpu_model_runner.py:2653] Model loading took 31.2312 GiB memory and 12.9 seconds
(Worker_TP0 pid=201) INFO 09-09 09:09:40 [default_loader.py:268] Loading weights took 9.87 seconds
(Worker_TP1 pid=202) INFO 09-09 09:09:50 [gpu_worker.py:298] Available KV cache memory: 40.10 GiB
(Worker_TP0 pid=201) INFO 09-09 09:09:50 [gpu_worker.py:298] Available KV cache memory: 40.01 GiB
(EngineCore_DP0 pid=150) INFO 09-09 09:09:51 [kv_cache_utils.py:1087] GPU KV cache size: 1,234,560 tokens
(EngineCore_DP0 pid=150) INFO 09-09 09:09:51 [kv_cache_utils.py:1091] Maximum concurrency for 32,768 tokens per request: 37.68x
(Worker_TP0 pid=201) INFO 09-09 09:10:20 [gpu_model_runner.py:3480] Graph capturing finished in 18 secs, took 0.83 GiB
"""  # noqa: E501
COMBINED = """\
(EngineCore pid=9) INFO 02-03 04:05:06 [worker.py:1] Model loading took 78.79 GiB memory and 240.1 seconds
(EngineCore pid=9) INFO 02-03 04:05:06 [worker.py:1] Available KV cache memory: 32.08 GiB
(EngineCore pid=9) INFO 02-03 04:05:06 [kv_cache_utils.py:9] GPU KV cache size: 2,182,642 tokens, Maximum concurrency for 430,080 tokens per request: 5.07x
"""  # noqa: E501


def test_v0() -> None:
    assert bootlog.parse(V0.splitlines()) == {
        "vllm_version": "0.6.4.post1",
        "weights_gib": 14.99,
        "non_torch_gib": 0.12,
        "activation_gib": 1.21,
        "kv_cache_gib": 54.95,
        "kv_cache_tokens": 28134 * 16,
        "max_concurrency": 3.43,
        "max_model_len": 131072,
        "cuda_graphs_gib": 0.26,
    }


def test_v1_of_two_workers_takes_the_largest_weights_and_the_least_cache() -> None:
    assert bootlog.parse(V1.splitlines()) == {
        "vllm_version": "0.21.0",
        "weights_gib": 31.2312,
        "kv_cache_gib": 40.01,
        "kv_cache_tokens": 1234560,
        "max_concurrency": 37.68,
        "max_model_len": 32768,
        "cuda_graphs_gib": 0.83,
    }


def test_size_and_concurrency_in_one_line() -> None:
    assert bootlog.parse(COMBINED.splitlines()) == {
        "weights_gib": 78.79,
        "kv_cache_gib": 32.08,
        "kv_cache_tokens": 2182642,
        "max_concurrency": 5.07,
        "max_model_len": 430080,
    }


@pytest.mark.parametrize(
    "line",
    [
        "Loading weights took 32.09 seconds",
        "init engine (profile, create kv cache, warmup model) took 9.38 s",
        "# GPU blocks: , # CPU blocks: 2048",
        "Maximum concurrency for many tokens per request: x",
        "Available KV cache memory: ... GiB",
        "",
    ],
)
def test_lines_that_say_nothing_of_memory(line: str) -> None:
    assert bootlog.parse([line]) == {}


def test_where_the_seconds_of_a_start_went() -> None:
    lines = [
        *V1.splitlines(),
        "(EngineCore pid=9) INFO [monitor.py:53] torch.compile took 31.20 s in total",
        "init engine (profile, create kv cache, warmup model) took 80.25 s (compilation: 31.20 s)",
        "Graph capturing finished in many secs",
    ]
    # Of the ranks the slowest counts.
    assert bootlog.durations(lines) == {"weights": 12.9, "compile": 31.2, "graphs": 18.0}
    assert bootlog.durations(["nothing of it", ""]) == {}


def test_blocks_of_another_size() -> None:
    lines = ["Initializing with block_size=32", "# cuda blocks: 100, # CPU blocks: 0"]
    assert bootlog.parse(lines)["kv_cache_tokens"] == 3200


@needs_shared_data
def test_the_figures_of_every_known_case_are_read_back() -> None:
    cases = json.loads((HERE / "sizing" / "cases.json").read_text())
    seen = 0
    for case in cases:
        lines = []
        if case.get("w_gib"):
            lines.append(f"Model loading took {case['w_gib']} GiB and 3.1 seconds")
        if case.get("kv_gib"):
            lines.append(f"Available KV cache memory: {case['kv_gib']} GiB")
        if case.get("tokens"):
            lines.append(f"GPU KV cache size: {case['tokens']:,} tokens")
        found = bootlog.parse(lines)
        assert found.get("weights_gib") == (case.get("w_gib") or None)
        assert found.get("kv_cache_gib") == (case.get("kv_gib") or None)
        assert found.get("kv_cache_tokens") == (case.get("tokens") or None)
        seen += bool(found)
    assert seen > 20


PLAN = {
    "weights_gib": 15.0,
    "kv_cache_gib": 58.0,
    "kv_cache_tokens": 475000,
    "max_concurrency": 58.0,
    "max_model_len": 8192,
}


def differences(**actual: float) -> dict[str, str]:
    found = bootlog.compare(PLAN, {**PLAN, **actual})
    return {one["what"]: one["cause"] for one in found}


def test_what_is_within_five_percent_is_as_planned() -> None:
    assert differences() == {}
    assert differences(weights_gib=15.7, kv_cache_gib=55.2, kv_cache_tokens=498000) == {}


def test_the_cause_follows_from_the_other_figures() -> None:
    wide = differences(weights_gib=29.8, kv_cache_gib=43.0, kv_cache_tokens=352000)
    assert "wider type" in wide["weights_gib"]
    assert "what the weights leave" in wide["kv_cache_gib"]
    assert "memory of the KV cache" in wide["kv_cache_tokens"]
    assert "another process" in differences(kv_cache_gib=50.0)["kv_cache_gib"]
    assert "hybrid" in differences(kv_cache_tokens=950000)["kv_cache_tokens"]
    shorter = differences(max_concurrency=116.0, max_model_len=4096)
    assert "4096 tokens, the plan of 8192" in shorter["max_concurrency"]


def test_what_was_not_planned_or_not_printed_is_not_compared() -> None:
    assert bootlog.compare({}, PLAN) == []
    assert bootlog.compare(PLAN, {}) == []
    assert bootlog.compare({"weights_gib": 0}, PLAN) == []


def test_a_difference_in_words() -> None:
    (one,) = bootlog.compare(PLAN, {**PLAN, "kv_cache_gib": 50.0})
    assert bootlog.warning(one).startswith("KV cache: 58 GiB planned, 50 GiB found (-13.8 %): ")


def test_metrics_can_be_read_by_prometheus() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    actual = bootlog.parse(V1.splitlines())
    found = bootlog.compare(PLAN, actual)
    text = bootlog.metrics('air"a', "glm", PLAN, actual, found)
    samples = {
        (s.name, s.labels.get("source")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert samples["vllm_fleet_plan_weights_bytes", "plan"] == 15 * 2**30
    assert samples["vllm_fleet_plan_kv_cache_tokens", "actual"] == 1234560
    assert samples["vllm_fleet_plan_differences", None] == len(found) == 4
    assert len(samples) == 9


def run(tmp_path: Path, lines: str) -> subprocess.CompletedProcess[str]:
    """The script with a journalctl and directories of its own."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (tmp_path / "lines").write_text(lines)
    fake = bin_dir / "journalctl"
    fake.write_text(f'#!/bin/sh\n[ "$1" = _SYSTEMD_INVOCATION_ID=abc ] && cat {tmp_path}/lines\n')
    fake.chmod(0o755)
    code = (
        "import os, sys\nfrom vllm_fleet.gate import bootlog\n"
        f"bootlog.ETC, bootlog.METRICS = {str(tmp_path)!r}, {str(tmp_path / 'metrics')!r}\n"
        "sys.exit(bootlog.main(os.environ))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": f"{bin_dir}:/usr/bin:/bin",
            "FLEET_INSTANCE": "air-a",
            "FLEET_MODEL": "glm",
            "FLEET_STATE": str(tmp_path),
            "INVOCATION_ID": "abc",
        },
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_whole_script_records_exports_and_warns(tmp_path: Path) -> None:
    (tmp_path / "air-a.plan.json").write_text(json.dumps({**PLAN, "weights_gib": 31.2}))
    # Another user's link must not lead the file elsewhere.
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / "actual.json").symlink_to(tmp_path / "victim")
    done = run(tmp_path, V1)
    assert (done.returncode, done.stderr) == (0, "")
    first, *warnings = done.stdout.splitlines()
    assert first == (
        "bootlog: air-a: weights 31.23 GiB, KV cache 40.01 GiB for 1,234,560 tokens, "
        "37.68 requests of 32,768 tokens at once"
    )
    assert len(warnings) == 3
    assert all(line.startswith("bootlog: air-a: WARNING: ") for line in warnings)
    report = json.loads((tmp_path / "actual.json").read_text())
    assert report["invocation"] == "abc"
    assert report["actual"]["kv_cache_tokens"] == 1234560
    assert [d["what"] for d in report["differences"]] == [
        "kv_cache_gib",
        "kv_cache_tokens",
        "max_concurrency",
    ]
    assert (tmp_path / "victim").read_text() == "untouched"
    exported = tmp_path / "metrics" / "vllm_fleet_plan_air-a.prom"
    assert stat.S_IMODE(os.stat(exported).st_mode) == 0o644
    assert not list(tmp_path.glob("*.json.*"))


def test_without_plan_or_lines_it_says_so_and_fails_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing of interest\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "bootlog: air-a: vLLM said nothing of its memory\n"
    assert json.loads((tmp_path / "actual.json").read_text())["differences"] == []
