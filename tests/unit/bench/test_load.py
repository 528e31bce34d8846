"""What is sent, and how GuideLLM is told."""

from __future__ import annotations

import pytest

from vllm_fleet.bench import tokenizer
from vllm_fleet.bench.load import Length, Load, LoadError, prefix_of, ramp, scenario, seconds_of


def test_words_for_lengths_times_and_levels() -> None:
    assert Length.parse("512") == Length(512, 0)
    assert Length.parse("512~128") == Length(512, 128)
    assert prefix_of("2000") == (2000, 1)
    assert prefix_of("2000x8") == (2000, 8)
    assert [seconds_of(text) for text in ("90", "90s", "10m", "1h", "0.5m")] == [
        90, 90, 600, 3600, 30
    ]  # fmt: skip
    assert ramp(1) == (1,)
    assert ramp(8) == (1, 2, 4, 8)
    assert ramp(12) == (1, 2, 4, 8, 12)


@pytest.mark.parametrize("text", ["", "0", "many", "512~", "-3", "1e3"])
def test_a_wrong_length_is_refused(text: str) -> None:
    with pytest.raises(LoadError, match="512~128"):
        Length.parse(text)


@pytest.mark.parametrize("text", ["0", "ten", "5 d"])
def test_a_wrong_time_is_refused(text: str) -> None:
    with pytest.raises(LoadError, match="10m"):
        seconds_of(text)


def test_the_scenario_has_all_of_a_load() -> None:
    load = Load(
        "https://gw/v1/", "glm", "/models/glm", (1, 2, 8), Length(1000, 100), Length(50),
        requests_per_stream=4, prefix_tokens=2000, prefixes=3, turns=2,
    )  # fmt: skip
    spec = scenario(load, "/out/report.json", "sk-1")["spec"]
    assert spec["backend"]["target"] == "https://gw"
    assert spec["backend"]["api_key"] == "sk-1"
    assert spec["profile"]["streams"] == [1, 2, 8]
    assert spec["data"] == [
        {
            "kind": "synthetic_text",
            "turns": 2,
            "prompt_tokens": 1000,
            "prompt_tokens_stdev": 100,
            "prompt_tokens_min": 700,
            "prompt_tokens_max": 1300,
            "output_tokens": 50,
            "prefix_tokens": 2000,
            "prefix_count": 3,
        }
    ]
    assert {"kind": "max_requests", "count": [20, 20, 32]} in spec["constraints"]
    soak = scenario(Load("http://x", "m", "t", (8,), soak=True, seconds=600), "r")["spec"]
    assert soak["constraints"] == [{"kind": "max_duration", "seconds": 600}]
    assert "api_key" not in soak["backend"]


def test_without_a_tokenizer_lengths_are_bytes() -> None:
    load = tokenizer.stretched(Load("http://x", "m", "", input=Length(100, 10), prefix_tokens=200))
    assert (load.input, load.prefix_tokens) == (Length(550, 55), 1100)
    assert load.output == Length(128)  # the engine counts those
    letters = tokenizer._letters()
    assert len(set(letters)) == 256
    assert [letters[ord(one)] for one in "aZ0"] == ["a", "Z", "0"]
    assert letters[ord(" ")] == "Ġ"  # as every byte-level tokenizer writes a blank
