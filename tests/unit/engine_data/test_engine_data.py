"""What versions know and need."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from vllm_fleet import engine_data

RELEASES = (
    "0.18.0 0.18.1 0.19.0 0.19.1 0.20.0 0.20.1 0.20.2 0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0 "
    "0.25.1 0.26.0 0.27.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0"
)


def test_every_release_has_its_file() -> None:
    assert engine_data.versions() == tuple(RELEASES.split())


@pytest.mark.parametrize("version", RELEASES.split())
def test_every_file_is_whole(version: str) -> None:
    data = engine_data.load(version)
    assert data.options["--tensor-parallel-size"] is data.options["-tp"]
    assert data.options["--gpu-memory-utilization"].limits == (("gt", 0), ("le", 1))
    assert {"Qwen3ForCausalLM", "Glm4MoeForCausalLM", "ChatGLMModel"} <= data.architectures
    assert {"glm45", "hermes"} <= set(data.tool_parsers)
    assert {"glm45", "qwen3"} <= set(data.reasoning_parsers)
    assert {"fp8", "awq", "compressed-tensors"} <= set(data.values["quantization"])
    assert data.metrics["vllm:kv_cache_usage_perc"] == "gauge"
    assert data.block_size == 16
    assert data.batch[-1].keys() == {"max_num_batched_tokens", "max_num_seqs"}


def test_loading_is_fast() -> None:
    code = (
        "import time; start = time.perf_counter(); from vllm_fleet import engine_data; "
        "mid = time.perf_counter(); engine_data.load('0.33.0'); "
        "print(time.perf_counter() - mid)"
    )
    times = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        times.append(float(run.stdout))
    assert min(times) < 1


def test_a_version_without_data_takes_the_nearest_older() -> None:
    assert engine_data.nearest("0.33.7").version == "0.33.0"
    assert engine_data.nearest("0.28.5").version == "0.28.0"
    assert engine_data.nearest("0.9.0").version == "0.18.0"
    with pytest.raises(KeyError):
        engine_data.load("0.28.5")


def test_first_version_with_an_architecture() -> None:
    first = engine_data.first_version_with
    assert first("Qwen3ForCausalLM") == "0.18.0"
    assert first("Glm5NextForCausalLM") == "0.30.0"
    assert first("NoSuchForCausalLM") is None
    for version in engine_data.versions()[: engine_data.versions().index("0.28.0") + 1]:
        assert not any(a.startswith("Glm5Next") for a in engine_data.load(version).architectures)


@pytest.mark.parametrize(
    ("version", "architecture", "sentence"),
    [
        ("0.21.0", "Glm4MoeForCausalLM", None),
        ("0.21.0", "Glm5NextForCausalLM", "the first version with it is 0.30.0"),
        ("0.28.0", "Glm5NextForConditionalGeneration", "the first version with it is 0.30.0"),
        ("0.33.0", "ChameleonForConditionalGeneration", "0.28.0 was the last version with it"),
        ("0.33.0", "NoSuchForCausalLM", "nor does any version from 0.18.0 to 0.33.0"),
        ("0.21.0", "Qwen3ForSequenceClassification", None),
        ("0.21.0", "Qwen3Model", None),
        ("0.21.0", "Glm5NextForSequenceClassification", "the first version with it is 0.30.0"),
        # Made of Qwen3_5ForConditionalGeneration, it would look for a vision tower.
        ("0.21.0", "Qwen3_5ForCausalLM", "the first version with it is 0.27.0"),
        ("0.21.0", "Model", "nor does any version"),
    ],
)
def test_architecture_problem(version: str, architecture: str, sentence: str | None) -> None:
    found = engine_data.architecture_problem(version, architecture)
    assert found is None if sentence is None else sentence in str(found)


@pytest.mark.parametrize(
    ("version", "card", "sentence"),
    [
        ("0.19.1", (7, 0), None),
        ("0.20.0", (7, 0), "0.19.1 is the last version built for it"),
        ("0.33.0", (7, 5), None),
        ("0.33.0", (8, 0), None),
        ("0.33.0", (8, 7), None),
        ("0.33.0", (9, 0), None),
        ("0.33.0", (10, 3), None),
        ("0.33.0", (12, 1), None),
        ("0.33.0", (11, 0), "no version here is"),
        ("0.33.0", (6, 1), "no version here is"),
    ],
)
def test_capability_problem(version: str, card: tuple[int, int], sentence: str | None) -> None:
    found = engine_data.capability_problem(version, card)
    assert found is None if sentence is None else sentence in str(found)


@pytest.mark.parametrize(
    ("version", "driver", "sentence"),
    [
        ("0.19.1", "535.183.01", None),
        ("0.20.0", "580.95.05", None),
        ("0.21.0", "570.124.06", "needs driver 580 or later, this host has 570.124.06"),
        ("0.21.0", "570.124.06", "set vllm_version to 0.19.1"),
        ("0.18.0", "515.1", "needs driver 525 or later"),
        ("0.21.0", "unknown", "no NVIDIA driver version"),
    ],
)
def test_driver_problem(version: str, driver: str, sentence: str | None) -> None:
    found = engine_data.driver_problem(version, driver)
    assert found is None if sentence is None else sentence in str(found)


@pytest.mark.parametrize(
    ("version", "glibc", "sentence"),
    [
        ("0.20.0", "2.36", None),
        ("0.20.0", "2.35", None),
        ("0.20.0", "2.31", "needs glibc 2.35, this host has 2.31; the newest version it carries"),
        ("0.21.0", "2.31", None),
        ("0.33.0", "2.17", "needs glibc 2.28"),
    ],
)
def test_glibc_problem(version: str, glibc: str, sentence: str | None) -> None:
    found = engine_data.glibc_problem(version, glibc)
    assert found is None if sentence is None else sentence in str(found)


@pytest.mark.parametrize(
    ("version", "python", "good"),
    [
        ("0.31.0", "3.10.12", True),
        ("0.32.0", "3.10.12", False),
        ("0.32.0", "3.11.2", True),
        ("0.19.0", "3.14.0", False),
        ("0.20.0", "3.14.0", True),
        ("0.33.0", "3.15.0", False),
        ("0.18.0", "3.9", False),
    ],
)
def test_python_problem(version: str, python: str, good: bool) -> None:
    found = engine_data.python_problem(version, python)
    assert (found is None) == good
    assert good or "set `python` to an interpreter" in str(found)


@pytest.mark.parametrize(
    ("version", "memory", "name", "card", "expected"),
    [
        ("0.21.0", 139.8, "NVIDIA H200", (9, 0), (8192, 1024)),
        ("0.21.0", 80.0, "NVIDIA A100-SXM4-80GB", (8, 0), (2048, 256)),
        ("0.21.0", 44.9, "NVIDIA L40S", (8, 9), (2048, 256)),
        ("0.21.0", 178.0, "NVIDIA B200", (10, 0), (8192, 1024)),
        ("0.28.0", 178.0, "NVIDIA B200", (10, 0), (16384, 1024)),
        ("0.32.0", 119.0, "NVIDIA GB10", (12, 1), (8192, 1024)),
        ("0.33.0", 119.0, "NVIDIA GB10", (12, 1), (2048, 256)),
    ],
)
def test_batch_defaults(
    version: str, memory: float, name: str, card: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert engine_data.batch_defaults(version, memory, name, card) == expected


def test_requirements_of_the_wheels() -> None:
    facts = {v: engine_data.load(v) for v in ("0.18.0", "0.20.0", "0.21.0", "0.22.0", "0.33.0")}
    assert {v: (d.glibc, d.cuda, d.torch) for v, d in facts.items()} == {
        "0.18.0": ("2.31", "12.8", "2.10.0"),
        "0.20.0": ("2.35", "13.0", "2.11.0"),
        "0.21.0": ("2.24", "13.0", "2.11.0"),
        "0.22.0": ("2.28", "13.0", "2.11.0"),
        "0.33.0": ("2.28", "13.0", "2.14.0"),
    }


def test_asking_all_versions_is_fast_enough_for_a_command() -> None:
    start = time.perf_counter()
    for version in engine_data.versions():
        engine_data.load.__wrapped__(version)
    assert time.perf_counter() - start < 10
