"""Limits of a key, against a clock of the test's own; run by LuaJIT."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LUA = HERE.parents[2] / "vllm_fleet" / "gateway" / "lua"

pytestmark = pytest.mark.skipif(
    shutil.which("luajit") is None, reason="needs luajit2 and lua-cjson"
)


def run(key: dict[str, Any], calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each call gave; `after` in a call moves the clock on before it."""
    key = {"name": "team", **key}
    done = subprocess.run(
        ["luajit", HERE / "limits_harness.lua", LUA],
        input="".join(json.dumps({"key": key, **call}) + "\n" for call in calls),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def admit(estimate: int = 0, after: float = 0) -> dict[str, Any]:
    return {"run": "admit", "estimate": estimate, "after": after}


def settle(estimate: int, used: int, after: float = 0) -> dict[str, Any]:
    return {"run": "settle", "estimate": estimate, "used": used, "after": after}


def test_a_key_without_limits_may_all() -> None:
    got = run({}, [admit(10**9)] * 1000)
    assert all(g["ok"] for g in got)
    assert got[0]["header"] == {}


@pytest.mark.parametrize("limit", [1, 7, 60, 600, 100_000])
def test_requests_a_minute(limit: int) -> None:
    """A minute's worth at once, to the very request; then as many as time brings."""
    calls = [admit()] * (limit + 2)
    got = run({"requests_per_minute": limit}, calls)
    assert [g["ok"] for g in got] == [True] * limit + [False] * 2
    assert got[0]["header"]["x-ratelimit-limit-requests"] == limit
    assert got[0]["header"]["x-ratelimit-remaining-requests"] == limit - 1
    assert got[limit - 1]["header"]["x-ratelimit-remaining-requests"] == 0
    assert got[limit - 1]["header"]["x-ratelimit-reset-requests"] == "60.000s"
    assert got[limit]["wait"] == max(1, -(-60 // limit))
    assert f"has {limit} requests a minute" in got[limit]["message"]


def test_retry_after_is_true() -> None:
    """Refused until that many seconds have passed, and not a request longer."""
    calls = [*[admit()] * 11, admit(after=5.9), admit(after=0.1), admit(), admit(after=6)]
    got = run({"requests_per_minute": 10}, calls)
    assert [g["ok"] for g in got[9:]] == [True, False, False, True, False, True]
    assert [g.get("wait") for g in got[10:]] == [6, 1, None, 6, None]


def test_a_long_pause_fills_a_bucket_only_once() -> None:
    calls = [*[admit()] * 10, admit(after=86400), *[admit()] * 10]
    got = run({"requests_per_minute": 10}, calls)
    assert [g["ok"] for g in got] == [True] * 20 + [False]


def test_tokens_are_charged_as_estimated_and_settled_as_used() -> None:
    key = {"tokens_per_minute": 1000}
    got = run(
        key,
        [
            admit(600),
            admit(600),  # does not fit beside it
            settle(600, 100),
            admit(600),  # now it does
            settle(600, 1700),  # more than there was
            admit(100),
            admit(100, after=47),
            admit(100, after=7),
        ],
    )
    assert [g["ok"] for g in got if "ok" in g] == [True, False, True, False, False, True]
    assert got[0]["header"]["x-ratelimit-remaining-tokens"] == 400
    assert got[1]["wait"] == 12  # 200 more, of 1000 a minute
    assert got[5]["wait"] == 54
    assert got[6]["wait"] == 7
    assert got[5]["header"]["x-ratelimit-remaining-tokens"] == 0


def test_a_refund_never_overfills() -> None:
    got = run(
        {"tokens_per_minute": 1000},
        [admit(1000), settle(1000, 0, after=3600), admit(1000), admit(1)],
    )
    assert [g["ok"] for g in got if "ok" in g] == [True, True, False]


def test_a_request_larger_than_the_limit_is_told_so() -> None:
    (got, after) = run({"tokens_per_minute": 1000, "concurrent": 1}, [admit(1001), admit(1000)])
    assert not got["ok"]
    assert "wait" not in got
    assert got["message"] == (
        "The request is of about 1001 tokens, and the API key of team has 1000 a minute. Make it "
        "smaller."
    )
    assert after["ok"]  # nothing was charged


def test_what_one_limit_refuses_costs_nothing_of_the_others() -> None:
    key = {"requests_per_minute": 2, "tokens_per_minute": 100, "concurrent": 5}
    got = run(key, [admit(100), *[admit(10)] * 20, admit(10, after=6), admit(0)])
    assert [g["ok"] for g in got] == [True] + [False] * 20 + [True, False]
    assert "tokens a minute" in got[1]["message"]
    assert "requests a minute" in got[-1]["message"]
    assert got[20]["running"] == 1


def test_requests_at_once() -> None:
    got = run({"concurrent": 2}, [admit(), admit(), admit(), settle(0, 0), admit(), admit()])
    assert [g["ok"] for g in got if "ok" in g] == [True, True, False, True, False]
    assert (got[2]["wait"], got[2]["running"]) == (1, 2)
    assert "may have 2 requests at once" in got[2]["message"]
    got = run({"concurrent": 2}, [admit(), settle(0, 0), admit(), settle(0, 0)])
    assert got[-1]["running"] == 0
