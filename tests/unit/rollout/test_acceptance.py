"""Good or worse: the judgement over figures, and the probe against stand-ins."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.stubs.engine import Engine
from tests.unit.gate.stand_in import StandIn
from vllm_fleet.onhost import acceptance as asking
from vllm_fleet.rollout.acceptance import (
    better,
    judge,
    judge_errors,
    judge_memory,
    refused,
    too_slow,
)
from vllm_fleet.spec.model import Acceptance

pytestmark = pytest.mark.slow

LIMITS = Acceptance()
GOOD: dict[str, Any] = {
    "asked": 4,
    "failures": [],
    "first_token_seconds": 0.1,
    "tokens_per_second": 60.0,
    "answers": 3,
    "ended": 3,
    "reasoning": True,
    "tool_called": True,
}


def why(new: dict[str, Any], old: dict[str, Any] | None = GOOD, **limits: Any) -> str:
    return refused(judge(old, {**GOOD, **new}, Acceptance(**limits)))


def test_what_is_the_same_passes_and_is_told() -> None:
    found = judge(GOOD, GOOD, LIMITS)
    assert not refused(found)
    assert [str(one) for one in found] == [
        "questions answered: 4 of 4 -> 4 of 4",
        "answers that end by themselves: 3 of 3 -> 3 of 3",
        "tool calls: yes -> yes",
        "reasoning: yes -> yes",
        "time to first token: 100 ms -> 100 ms",
        "tokens a second: 60.0 -> 60.0",
    ]


@pytest.mark.parametrize(
    ("times", "passes"), [(1.0, True), (1.3, True), (1.9, True), (2.1, False), (3.0, False)]
)
def test_slower_is_refused_from_the_limit_on(times: float, passes: bool) -> None:
    first = why({"first_token_seconds": 0.1 * times})
    rate = why({"tokens_per_second": 60 / times})
    assert (not first, not rate) == (passes, passes)
    if not passes:
        grown = f"100 ms -> {100 * times:.0f} ms: {times:.1f} times; 2 is the limit"
        assert first == f"time to first token {grown}"
        assert f"{times:.1f} times slower" in rate


def test_limits_are_settings() -> None:
    assert why({"tokens_per_second": 45.0}, tokens_times=1.2)
    assert not why({"tokens_per_second": 20.5}, tokens_times=3.0)


def test_times_that_nobody_feels_are_no_reason() -> None:
    assert not why({"first_token_seconds": 0.015}, {**GOOD, "first_token_seconds": 0.005})


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (
            {"failures": [{"name": "long prompt", "why": "/v1/chat/completions answered 500: x"}]},
            "questions answered 4 of 4 -> 3 of 4: long prompt: /v1/chat/completions answered 500",
        ),
        ({"ended": 0}, "3 of 3 -> 0 of 3: its answers go on until they are cut"),
        ({"reasoning": False}, "shows no reasoning any more"),
        ({"tool_called": False}, "calls no tool any more"),
    ],
)
def test_what_a_model_can_no_more_is_refused(new: dict[str, Any], words: str) -> None:
    assert words in why(new)


def test_a_model_that_never_could_is_not_refused_for_it() -> None:
    could_not = {"ended": 0, "reasoning": False, "tool_called": False}
    assert not why(could_not, {**GOOD, **could_not})
    assert not why({}, {**GOOD, **could_not})


def test_answers_that_ended_by_chance_are_no_reason() -> None:
    """A model with random weights, or one that thinks for long: 2 of 3 says nothing."""
    old, new = {**GOOD, "answers": 3, "ended": 2}, {**GOOD, "answers": 3, "ended": 0}
    found = judge(old, new, LIMITS)
    assert not refused(found)
    assert "answers that end by themselves: 2 of 3 -> 0 of 3" in [str(one) for one in found]


def test_a_question_that_failed_before_is_no_reason_another_one_is() -> None:
    broken = {"failures": [{"name": "tools", "why": "answered 400"}]}
    assert not why(broken, {**GOOD, **broken})
    more = [*broken["failures"], {"name": "long prompt", "why": "answered 500"}]
    assert why({"failures": more}, {**GOOD, **broken}).endswith(": long prompt: answered 500")


def test_without_an_old_one_only_failures_count() -> None:
    slow = {"first_token_seconds": 50.0, "ended": 0}
    assert not why(slow, None)
    assert why({"failures": [{"name": "tools", "why": "no answer"}]}, None)
    assert "- -> 50000 ms" in str(judge(None, {**GOOD, **slow}, LIMITS)[4])


@pytest.mark.parametrize(
    ("old", "new", "bad"),
    [
        ({"kv_cache_tokens": 100_000}, {"kv_cache_tokens": 95_000}, False),
        ({"kv_cache_tokens": 100_000}, {"kv_cache_tokens": 50_000}, True),
        ({"kv_cache_gib": 10.0}, {"kv_cache_gib": 5.0}, True),
        ({}, {"kv_cache_tokens": 5}, None),
        (None, {"kv_cache_tokens": 5}, None),
        ({"kv_cache_tokens": 5}, {}, None),
    ],
)
def test_memory(old: dict[str, Any] | None, new: dict[str, Any], bad: bool | None) -> None:
    found = judge_memory(old, new, LIMITS)
    assert (bool(found[0].bad) if found else None) == bad


def test_half_the_memory_is_told_in_figures() -> None:
    found = judge_memory({"kv_cache_tokens": 100_000}, {"kv_cache_tokens": 50_000}, LIMITS)
    assert refused(found) == (
        "KV cache 100,000 tokens -> 50,000 tokens: 50% of what it was; at least 90% must be left"
    )


@pytest.mark.parametrize(("answered", "failed", "bad"), [(0, 0, 0), (100, 2, 0), (100, 3, 1)])
def test_errors_of_clients(answered: int, failed: int, bad: int) -> None:
    assert bool(judge_errors(answered, failed, LIMITS).bad) == bool(bad)


def test_slowness_alone_is_worth_a_second_look() -> None:
    slow = {**GOOD, "first_token_seconds": 0.5, "tokens_per_second": 10.0}
    assert too_slow(judge(GOOD, slow, LIMITS))
    assert not too_slow(judge(GOOD, {**slow, "ended": 0}, LIMITS))
    assert not too_slow(judge(GOOD, GOOD, LIMITS))
    second = {**GOOD, "tokens_per_second": 8.0, "first_token_seconds": 0.11}
    both = better(slow, second)
    assert (both["first_token_seconds"], both["tokens_per_second"]) == (0.11, 10.0)
    assert better({"failures": [1]}, {"failures": []})["failures"] == []


# --- the probe


def asked(port: int, **changes: Any) -> dict[str, Any]:
    """Run the script as a host does."""
    order = {
        "instance": "a",
        "port": port,
        "model": "glm",
        "task": "chat",
        "tools": False,
        "probes": 3,
        "answer_tokens": 32,
        "seconds": 30,
        **changes,
    }
    done = subprocess.run(
        [sys.executable, "-I", asking.__file__],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    found: dict[str, Any] = json.loads(line.removeprefix("result "))
    return found


def test_a_probe_times_streams_and_talks(tmp_path: Path) -> None:
    with Engine(first_byte=0.05, chunk_gap=0.02, chunks=6) as engine:
        found = asked(engine.port)
        bodies = [hit.json for hit in engine.hits]
    assert found["failures"] == []
    assert found["asked"] == 3
    assert found["first_token_seconds"] >= 0.05
    assert 1 < found["tokens_per_second"] <= 55
    assert (found["answers"], found["ended"]) == (3, 3)
    streams = [b for b in bodies if b.get("stream")]
    assert len(streams) == 4
    # What is timed is new each time; a talk is the same on every version, to be compared.
    timed = [b["messages"][0]["content"] for b in (*streams, bodies[-1])]
    assert len({text[:8] for text in timed}) == 1
    assert bodies[4]["messages"][0]["content"].startswith("My name is Ada")
    assert len({s["messages"][0]["content"] for s in streams}) == 4  # no prefix twice
    assert [len(b["messages"]) for b in bodies[4:7]] == [1, 3, 5]


def test_a_server_that_became_much_slower_is_refused_by_its_own_figures() -> None:
    seen = []
    for gap in (0.01, 0.3):
        with Engine(first_byte=gap, chunk_gap=gap, chunks=3) as engine:
            seen.append(asked(engine.port, probes=1))
    reason = refused(judge(seen[0], seen[1], LIMITS))
    assert "tokens a second" in reason
    assert "time to first token" in reason


@pytest.mark.parametrize(
    ("answer", "words"),
    [("bad", "answered 400"), ("close", "/v1/chat/completions"), ("busy", "answered 503")],
)
def test_a_server_that_answers_badly(answer: Any, words: str) -> None:
    with Engine(answer=answer) as engine:
        found = asked(engine.port)
    assert [one["name"] for one in found["failures"]] == [
        "timed streams",
        "conversation of three turns",
        "long prompt",
    ]
    assert all(words in one["why"] for one in found["failures"])
    assert refused(judge(GOOD, found, LIMITS))


def test_a_server_that_hangs_and_one_that_never_ends() -> None:
    with Engine(answer="hang") as engine:
        found = asked(engine.port, seconds=0.3)
    assert all("no answer within" in one["why"] for one in found["failures"])
    with Engine(chunk_gap=0.01, chunks=100_000) as engine:
        found = asked(engine.port, seconds=3)  # a busy machine gives the first token in time
    assert "was not over after" in found["failures"][0]["why"]


def test_a_port_nobody_listens_on_is_a_failure_not_a_crash() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        found = asked(closed.getsockname()[1])
    assert len(found["failures"]) == 3


def chat(**message: Any) -> Any:
    choice = {"message": {"content": "x", **message}, "finish_reason": "length"}
    return lambda body: (
        ['data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "data: [DONE]\n\n"]
        if body.get("stream")
        else (200, {"choices": [choice]})
    )


def test_tools_reasoning_and_answers_that_are_cut() -> None:
    calls = [{"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]
    routes = {"/v1/chat/completions": chat(reasoning="hm", tool_calls=calls, content=None)}
    with StandIn(routes) as server:
        found = asked(server.port, tools=True)
        with_tools = [body for _, body, _ in server.asked if "tools" in body]
    assert (found["tool_called"], found["reasoning"], found["ended"]) == (True, True, 0)
    assert len(with_tools) == 1
    broken = [{"function": {"name": "get_weather", "arguments": "{city"}}]
    with StandIn({"/v1/chat/completions": chat(tool_calls=broken)}) as server:
        found = asked(server.port, tools=True)
    assert found["failures"] == [
        {"name": "tools", "why": "a tool was called without arguments in JSON"}
    ]


def test_a_long_prompt_is_halved_until_it_fits() -> None:
    def answer(body: Any) -> Any:
        if len(body["messages"][0]["content"].split()) > 1000:
            return 400, {"error": {"message": "This model's maximum context length is 1000"}}
        return chat()(body)

    with StandIn({"/v1/chat/completions": answer}) as server:
        found = asked(server.port)
    assert found["failures"] == []
    assert found["long_prompt_words"] == 512


def test_embeddings_and_rankings_are_asked_too() -> None:
    routes = {
        "/v1/embeddings": lambda body: (200, {"data": [{"embedding": [1.0]}]}),
        "/v1/rerank": lambda body: (200, {"results": []}),
    }
    with StandIn(routes) as server:
        embed = asked(server.port, task="embed")
        rerank = asked(server.port, task="rerank")
    assert embed["failures"] == []
    assert embed["first_token_seconds"] > 0
    assert rerank["failures"][0]["why"] == "/v1/rerank answered without results"


def test_the_probe_goes_past_the_gate_with_token_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "RUN", str(tmp_path))
    monkeypatch.setattr(asking, "ETC", str(tmp_path))
    monkeypatch.setattr(asking, "STATE", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/warmup.json").write_text('{"max_model_len": 128}')
    (tmp_path / "a/token").write_text("t0ken\n")
    (tmp_path / "a.env").write_text('X="1"\nVLLM_API_KEY="k3y"\n')
    with StandIn({"/v1/chat/completions": chat()}) as server:
        order = {"instance": "a", "port": server.port, "model": "m", "task": "chat"}
        order |= {"probes": 1, "answer_tokens": 99, "seconds": 9}
        monkeypatch.setattr(sys, "stdin", __import__("io").StringIO(json.dumps(order)))
        assert asking.main() == 0
        headers = [h for _, _, h in server.asked]
        assert {body["max_tokens"] for _, body, _ in server.asked} == {32, 16, 8}
    assert {h["x-fleet-token"] for h in headers} == {"t0ken"}
    assert {h["authorization"] for h in headers} == {"Bearer k3y"}
    assert threading.active_count() < 50
    assert "k3y" not in capsys.readouterr().out
