"""The scanner reads `model` as Python's json.loads does; run by lua5.1 with Debian's lua-cjson."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LUA = HERE.parents[2] / "vllm_fleet" / "gateway" / "lua"

pytestmark = pytest.mark.skipif(
    shutil.which("lua5.1") is None, reason="needs Debian's lua5.1 and lua-cjson"
)


def scan(bodies: list[bytes], rounds: int = 1) -> list[tuple[str, str, float]]:
    """(kind, model, microseconds) of each body."""
    done = subprocess.run(
        ["lua5.1", HERE / "scan_harness.lua", LUA, str(rounds)],
        input=b"".join(b"%d\n%b\n" % (len(body), body) for body in bodies),
        capture_output=True,
        check=True,
    )
    result = []
    for line in done.stdout.decode().splitlines():
        kind, micros, name = line.split(" ")
        result.append((kind, bytes.fromhex(name).decode("utf-8", "replace"), float(micros)))
    assert len(result) == len(bodies)
    return result


CASES: list[tuple[bytes, str, str]] = [
    (b'{"model":"a"}', "string", "a"),
    (b' \r\n\t{ "model" : "a" }\n', "string", "a"),
    (b'\xef\xbb\xbf{"model":"a"}', "string", "a"),
    (b'{"messages":[{"role":"user","content":"x"}],"model":"a"}', "string", "a"),
    # the last one wins
    (b'{"model":"a","model":"b"}', "string", "b"),
    (b'{"model":"a","x":{"model":"c"},"model":"b","y":[{"model":"d"}]}', "string", "b"),
    (b'{"model":"a","model":null}', "missing", ""),
    (b'{"model":"a","model":7}', "type", ""),
    (b'{"model":7,"model":"a"}', "string", "a"),
    # escapes in key and value
    (rb'{"\u006dodel":"a"}', "string", "a"),
    (rb'{"model":"a","mode\u006C":"b"}', "string", "b"),
    (rb'{"\u006d\u006f\u0064\u0065\u006c":"\u0061\/\"\\"}', "string", 'a/"\\'),
    (rb'{"model":"\ud83d\ude00"}', "string", "\U0001f600"),
    (rb'{"model\ud800":"b","model":"a"}', "string", "a"),
    (rb'{"model":"\ud800"}', "string", "�"),
    (b'{"model":"\xe6\xa8\xa1"}', "string", "模"),
    # look-alikes inside strings and nested values
    (rb'{"x":"\"model\":\"b\"","model":"a"}', "string", "a"),
    (rb'{"x":"\\","model":"a"}', "string", "a"),
    (rb'{"x":"\\\"","model":"a"}', "string", "a"),
    (b'{"x":["]}",{"y":"}]"}],"model":"a"}', "string", "a"),
    (b'{"Model":"b","model ":"b","mode":"b","model":"a"}', "string", "a"),
    (b'{"a":-1.5e+3,"b":true,"c":NaN,"d":-Infinity,"model":"a"}', "string", "a"),
    # no model
    (b"{}", "missing", ""),
    (b"{ }", "missing", ""),
    (b'{"model":""}', "missing", ""),
    (b'{"x":{"model":"a"}}', "missing", ""),
    (b'{"model":["a"]}', "type", ""),
    (b'{"model":true}', "type", ""),
    # not a JSON object
    (b"", "json", ""),
    (b"  ", "json", ""),
    (b"hello", "json", ""),
    (b'["model"]', "json", ""),
    (b'"model"', "json", ""),
    (b'{"model":"a"', "json", ""),
    (b'{"model":"a', "json", ""),
    (b'{"model":"a\\"}', "json", ""),
    (b'{"model" "a"}', "json", ""),
    (b'{"model":}', "json", ""),
    (b'{"model":"a",}', "json", ""),
    (b'{"model":"a"} x', "json", ""),
    (b'{"model":"a"}{"model":"b"}', "json", ""),
    (b'{"x":[1,2,"model":"a"}', "json", ""),
    (b"{model:1}", "json", ""),
    (b"{", "json", ""),
]


def test_cases() -> None:
    found = scan([body for body, _, _ in CASES])
    wrong = [
        (body, (kind, name), got[:2])
        for (body, kind, name), got in zip(CASES, found, strict=True)
        if got[:2] != (kind, name)
    ]
    assert not wrong


def _loads(body: bytes) -> tuple[str, str]:
    """What Python makes of the body, in the scanner's words."""
    value = json.loads(body)
    if not isinstance(value, dict):
        return "json", ""
    model = value.get("model")
    if model is None or model == "":
        return "missing", ""
    return ("string", model) if isinstance(model, str) else ("type", "")


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind < 2:
        return "".join(rng.choice('ab"\\{}[]:,\n模😀model') for _ in range(rng.randrange(12)))
    if kind < 5:
        return rng.choice([None, True, False, 0, -1.5, 1e30, float("nan"), "model"])
    if kind < 6:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice(["model", "x", '"', "\\"]): _value(rng, depth - 1)
        for _ in range(rng.randrange(4))
    }


def _object(rng: random.Random) -> bytes:
    """An object with repeated keys, of which json.dumps can write none."""
    ascii_only = rng.random() < 0.5
    pairs = []
    for _ in range(rng.randrange(6)):
        key = json.dumps(rng.choice(["model", "messages", "模", "mod", ""]))
        if rng.random() < 0.2:
            key = key.replace("o", r"\u006f")
        pairs.append(f"{key}: {json.dumps(_value(rng, 3), ensure_ascii=ascii_only)}")
    return ("{" + " , ".join(pairs) + "}").encode()


def test_agrees_with_python_on_random_objects() -> None:
    rng = random.Random(7)
    bodies = [_object(rng) for _ in range(3000)]
    wrong = [
        (body, _loads(body), got[:2])
        for body, got in zip(bodies, scan(bodies), strict=True)
        if got[:2] != _loads(body)
    ]
    assert not wrong
    kinds = {_loads(body)[0] for body in bodies}
    assert kinds == {"string", "missing", "type"}  # the sample holds what it should


def test_never_takes_a_broken_body_for_another_model() -> None:
    """A body cut short anywhere is refused, or the engine's own parser refuses it too."""
    whole = b'{"messages":[{"content":"a \\" b"}],"model":"a","n":[1,{"x":2}],"model":"b"}'
    cut = [whole[:size] for size in range(len(whole))]
    assert {kind for kind, _, _ in scan(cut)} == {"json"}


def test_cost_of_long_bodies() -> None:
    """1 MB of chat with the model last; a decode takes some milliseconds."""
    text = "The quick brown fox said \"hello\" and\nwent on. " * 40
    messages = [{"role": "user", "content": text} for _ in range(500)]
    body = json.dumps({"messages": messages, "model": "a"}).encode()
    assert len(body) > 900_000
    hostile = b'{"x":"' + b"\\\\" * 500_000 + b'","model":"a"}'
    nested = b'{"x":' + b"[" * 400_000 + b"]" * 400_000 + b',"model":"a"}'
    found = scan([body, hostile, nested], rounds=2)
    assert [got[:2] for got in found] == [("string", "a")] * 3
    # A loaded machine is several times slower; quadratic work would be thousands of times slower.
    assert max(got[2] for got in found) < 100_000
