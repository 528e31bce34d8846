"""A report of GuideLLM read, and what its levels tell."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.bench.levels import level
from vllm_fleet.bench.advice import drift, proposals
from vllm_fleet.bench.knee import Target, TargetError, keeps, knee
from vllm_fleet.bench.load import Load
from vllm_fleet.bench.measure import unreported
from vllm_fleet.bench.report import ReportError, Spread, levels_of
from vllm_fleet.bench.watch import Seen

# Of GuideLLM 0.8.1 against the stub engine: 200 ms to the first token, 20 ms between tokens, 16
# tokens; on a machine that had much else to do.
REPORT = json.loads((Path(__file__).parent / "guidellm-0.8.1.json").read_text())
LOAD = Load("http://gw/v1", "glm", "")


def seen(preemptions: float = 0, kv: float = 0.5, memory: tuple[float, ...] = ()) -> Seen:
    points = tuple((float(at), value * 2**30) for at, value in enumerate(memory))
    return Seen({}, {}, 1, 1, preemptions, kv, 0, points)


def test_a_report_is_read() -> None:
    levels = levels_of(REPORT)
    assert [one.streams for one in levels] == [1, 2, 4, 8]
    assert all(one.success == 1 and one.refused == 0 for one in levels)
    first = levels[0]
    assert (first.answered, first.tokens_in, first.tokens_out) == (20, 20 * 128, 20 * 16)
    assert first.first_token.p50 == pytest.approx(0.2, rel=0.05)
    assert first.between_tokens.p50 == pytest.approx(0.02, rel=0.1)
    assert first.whole.mean == pytest.approx(0.2 + 16 * 0.02, rel=0.1)
    assert first.out_per_second == pytest.approx(320 / first.seconds)
    assert len(first.points) == 20


def test_failures_are_told_by_their_status() -> None:
    one = json.loads(json.dumps(REPORT["benchmarks"][0]))
    errors = [
        "Client error '429 Too Many Requests' for url 'http://gw/v1/chat/completions'",
        "Server error '503 Service Unavailable' for url 'http://gw'",
        "ConnectError('All connection attempts failed')",
        None,
    ]
    one["requests"]["errored"] = [{"info": {"error": error}} for error in errors]
    (found,) = levels_of({"benchmarks": [one]})
    assert found.failed == {"429": 1, "503": 1, "ConnectError": 1, "no answer": 1}
    assert found.refused == 2
    assert found.success == pytest.approx(20 / 24)


def test_a_level_without_an_answer_has_no_times() -> None:
    one = json.loads(json.dumps(REPORT["benchmarks"][0]))
    one["requests"] = {"successful": [], "errored": [], "incomplete": None}
    (found,) = levels_of({"benchmarks": [one]})
    assert math.isnan(found.first_token.p95)
    assert found.as_json()["first_token"]["p95"] is None
    assert knee([found]) is None
    assert keeps([found], [Target.parse("ttft-p95=9s")]) is None


def test_no_report_is_refused() -> None:
    with pytest.raises(ReportError, match="GuideLLM"):
        levels_of({"results": []})


def test_requests_that_the_generator_does_not_tell_of_are_noted() -> None:
    load = Load("http://gw/v1", "glm", "", (1, 2, 4, 8), requests_per_stream=4)
    levels = levels_of(REPORT)
    assert unreported(load, levels) == [
        "At 2 streams GuideLLM tells of 19 of 20 requests: the others are in no figure but the "
        "engine's."
    ]
    # Its time was over, it was still asking, or nobody said how many: nothing is missing.
    assert unreported(replace(load, seconds=1), levels) == []
    assert unreported(load, [replace(levels[1], cut=1)]) == []
    assert unreported(replace(load, soak=True), levels) == []


def test_percentiles_count_by_weight() -> None:
    even = Spread.of([float(n) for n in range(1, 101)])
    assert (even.p50, even.p95, even.p99, even.mean) == (50, 95, 99, 50.5)
    heavy = Spread.of([1.0, 2.0], [99.0, 1.0])
    assert (heavy.p50, heavy.p99) == (1.0, 1.0)
    assert heavy.mean == pytest.approx(1.01)


def test_the_knee_is_where_more_streams_stop_to_pay() -> None:
    levels = [level(1, 100), level(2, 190), level(4, 350), level(8, 390, whole=4), level(16, 400)]
    found = knee(levels)
    assert found is not None
    assert (found.level.streams, found.reached) == (4, True)
    assert "8 streams bring 390 tokens/s after 350" in found.why
    found = knee(levels[:3])
    assert found is not None
    assert (found.level.streams, found.reached) == (4, False)
    refused = knee([level(1, 100), level(2, 200, failed={"503": 40})])
    assert refused is not None
    assert (refused.level.streams, refused.reached) == (1, True)


def test_targets_hold_up_to_the_first_level_that_breaks_one() -> None:
    levels = [level(1, 1, first=0.1), level(2, 1, first=0.5), level(4, 1, first=0.2)]
    kept = keeps(levels, [Target.parse("ttft-p95=300ms"), Target.parse("success=99%")])
    assert kept is not None
    assert kept.streams == 1  # 4 streams keep it by chance alone
    assert keeps(levels, [Target.parse("itl-p99=1ms")]) is None
    assert str(Target.parse("e2e-mean=2.5s")) == "whole answer mean 2.5 s"


@pytest.mark.parametrize("text", ["ttft=1s", "ttft-p95=1", "speed-p95=1s", "success", ""])
def test_a_wrong_target_is_refused(text: str) -> None:
    with pytest.raises(TargetError, match="ttft-p95=800ms"):
        Target.parse(text)


def test_settings_are_proposed_with_reasons() -> None:
    levels = [level(1, 100), level(8, 700), level(16, 720)]
    bend = knee(levels)
    found = proposals(LOAD, levels, [None, None, seen(12)], bend, None, [])
    lines = {one.line: one.why for one in found}
    assert "16 streams bring" in lines["vllm_args: {max-num-seqs: 8}"]
    assert "at 16 streams 12 sequences" in lines["vllm_args: {kv-cache-dtype: fp8}"]
    assert "traffic: {mean_in: 512, mean_out: 507}" in lines
    # What the targets say goes before the knee.
    target = Target.parse("ttft-p95=1s")
    kept = keeps(levels, [target])
    found = proposals(LOAD, levels, [None] * 3, bend, kept, [target])
    assert found[0].line == "vllm_args: {max-num-seqs: 16}"
    none = proposals(LOAD, levels, [None] * 3, bend, None, [target])
    assert (none[0].line, "no level keeps" in none[0].why) == ("", True)
    limited = [level(1, 100, failed={"429": 5})]
    found = proposals(LOAD, limited, [None], knee(limited), None, [])
    assert any("5 requests were turned away" in one.why for one in found)


def test_a_soak_tells_what_drifted() -> None:
    even = tuple((float(at), 1.0) for at in range(100))
    slower = tuple((float(at), 1.0 if at < 50 else 2.0) for at in range(100))
    assert drift(level(8, 1, points=even), seen(memory=(1.0,) * 8)) == []
    (told,) = drift(level(8, 1, points=slower), None)
    assert "1.00 s in the first half, 2.00 s in the second" in told
    (told,) = drift(level(8, 1, points=even), seen(memory=(1, 1, 1, 1, 1.2, 1.2, 1.3, 1.3)))
    assert told == "the server's memory grew from 1.00 to 1.30 GiB"
    (told,) = drift(level(8, 1, points=even, failed={"500": 1}), None)
    assert "99.01% of the requests were answered: 1 x 500" in told
