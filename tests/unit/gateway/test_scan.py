"""The scanner reads a request as Python's json.loads does; run by LuaJIT, as nginx runs it."""

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
    shutil.which("luajit") is None, reason="needs luajit2 and lua-cjson"
)


def requests(bodies: list[bytes], rounds: int = 1) -> list[dict[str, Any]]:
    """What scan.request tells of each body, with `micros` and `least` beside it."""
    done = subprocess.run(
        ["luajit", HERE / "scan_harness.lua", LUA, str(rounds)],
        input=b"".join(b"%d\n%b\n" % (len(body), body) for body in bodies),
        capture_output=True,
        check=True,
    )
    result = []
    for line in done.stdout.decode().splitlines():
        _, micros, name, least, found = line.split(" ", 4)
        model = bytes.fromhex(name).decode("utf-8", "replace")
        result.append(
            {**json.loads(found), "model": model, "micros": float(micros), "least": int(least)}
        )
    assert len(result) == len(bodies)
    return result


def scan(bodies: list[bytes], rounds: int = 1) -> list[tuple[str, str, float]]:
    """(kind, model, microseconds) of each body."""
    return [(r["kind"], r["model"], r["micros"]) for r in requests(bodies, rounds)]


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
    text = 'The quick brown fox said "hello" and\nwent on. ' * 40
    messages = [{"role": "user", "content": text} for _ in range(500)]
    body = json.dumps({"messages": messages, "model": "a"}).encode()
    assert len(body) > 900_000
    hostile = b'{"x":"' + b"\\\\" * 500_000 + b'","model":"a"}'
    nested = b'{"messages":' + b"[" * 400_000 + b"]" * 400_000 + b',"model":"a"}'
    escapes = b'{"prompt":[' + rb'"\u4e00",' * 80_000 + b'"x"],"model":"a"}'
    late = b'{"prompt":[' + b'"x",' * 200_000 + rb'"\u4e00"],"model":"a"}'
    found = scan([body, hostile, nested, escapes, late], rounds=2)
    assert [got[:2] for got in found] == [("string", "a")] * 5
    # A loaded machine is several times slower; quadratic work would be thousands of times slower.
    assert max(got[2] for got in found) < 100_000


def test_what_else_a_request_says() -> None:
    body = (
        b'{"stream":true,"max_tokens":5,"n":2,"stream_options": {"include_usage": true} ,'
        b'"max_completion_tokens":7,"model":"a"}'
    )
    (got,) = requests([body])
    assert (got["stream"], got["max_tokens"], got["n"]) == (True, 7, 2)
    start, end = got["stream_options"]
    assert body[start - 1 : end] == b'{"include_usage": true}'
    assert got["include_usage"]
    assert body[got["model_from"] - 1 : got["model_to"]] == b'"a"'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # the last one wins, null says nothing
        (b'{"stream":true,"stream":false}', {"stream": False}),
        (b'{"stream":"true"}', {"stream": False}),
        (b'{"max_tokens":5,"max_tokens":null}', {"max_tokens": 5}),
        (b'{"max_tokens":9,"max_output_tokens":3}', {"max_tokens": 3}),
        (rb'{"max_tok\u0065ns":5}', {"max_tokens": 5}),
        (b'{"stream_options":{"include_usage":true},"stream_options":null}', {"include_usage": 0}),
        (b'{"stream_options":{"include_usage":1}}', {"include_usage": False}),
        (b'{"stream_options":{"include_usage":nonsense}}', {"include_usage": False}),
        (b'{"x":{"stream":true,"max_tokens":5}}', {"stream": False, "max_tokens": None}),
        (b'{"truncate_prompt_tokens":-1}', {"truncates": True}),
        (b'{"truncate_prompt_tokens":null}', {"truncates": False}),
        (b'{"truncation":"auto"}', {"truncates": True}),
        (b'{"truncation":"disabled"}', {"truncates": False}),
    ],
)
def test_values(body: bytes, expected: dict[str, Any]) -> None:
    (got,) = requests([body])
    assert {key: got.get(key) for key in expected} == expected


def tokens(body: Any) -> tuple[int, int, int]:
    """(all tokens, those of the longest prompt, media) that are seen in a body."""
    (got,) = requests([json.dumps(body).encode()])
    return got["tokens"], got["longest"], got["media"]


def test_only_the_texts_of_a_prompt_count() -> None:
    text = "a few words of a question " * 40
    one = {"role": "user", "content": text}
    alone = tokens({"messages": [one]})
    assert alone[0] == alone[1] > 200
    elsewhere = {"user": text, "metadata": {"x": text}, "stop": [text]}
    assert tokens({"messages": [one], **elsewhere}) == alone
    parts = {"role": "user", "content": [{"type": "text", "text": text}]}
    assert tokens({"messages": [parts]})[0] - alone[0] in range(10)
    assert tokens({"messages": [one, one]})[1] in range(2 * alone[1] - 2, 2 * alone[1] + 1)
    assert tokens({"messages": [one], "system": text})[1] > 1.9 * alone[1]
    assert tokens({"messages": [one], "tools": [{"description": text}]})[1] > 1.9 * alone[1]
    (twice,) = requests(
        [
            json.dumps({"messages": [one, one], "message_": [one]})
            .replace("message_", "messages")
            .encode()
        ]
    )
    assert (twice["tokens"], twice["longest"]) == alone[:2]
    assert tokens({"messages": text})[0] in range(alone[0] - 10, alone[0])


def test_media_are_no_text() -> None:
    data = "aGVsbG8gd29ybGQh" * 5000
    text = {"type": "text", "text": "what is this"}
    alone = tokens({"messages": [{"role": "user", "content": [text]}]})
    for medium in (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}},
        {"type": "input_image", "image_url": "data:image/png;base64," + data},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    ):
        got = tokens({"messages": [{"role": "user", "content": [text, medium]}]})
        assert got[0] - alone[0] < 20
        assert got[2] == 1
    # no key says that this is a picture
    assert tokens({"messages": [{"role": "user", "content": data}]})[0] > 10_000


def test_the_longest_of_several_prompts() -> None:
    short, long = "a word", "many more words " * 50
    alone = tokens({"prompt": long})[0]
    for body in (
        {"prompt": [short, long, short]},
        {"input": [long, short]},
        {"query": "", "documents": [short, long]},
        {"documents": [{"text": short}, {"text": long}]},
        {"text_1": "", "text_2": [short, long]},
    ):
        total, longest, _ = tokens(body)
        assert total > longest
        assert longest - alone in range(5)
    assert tokens({"prompt": list(range(500))})[:2] == (500, 500)
    assert tokens({"input": [[1, 2, 3], [4] * 70]})[:2] == (73, 70)
    conversation = {"input": [{"role": "user", "content": long}, {"content": long}]}
    assert tokens(conversation)[1] > 1.9 * alone


def first(body: Any) -> bytes:
    (got,) = requests([json.dumps(body).encode()])
    return bytes.fromhex(got.get("first", ""))


def test_first_stays_the_same_over_a_conversation() -> None:
    system = {"role": "system", "content": "You help."}
    one, two = ({"role": "user", "content": text} for text in ("What is {this}?", "And that?"))
    answer = {"content": "A thing.", "role": "assistant"}
    begun = {"messages": [system, one]}
    whole = {"messages": [system, one, answer, two], "temperature": 0}
    assert first(begun)[:-1] == first(whole)[: len(first(begun)) - 1]
    assert b"What is {this}?" in first(whole)
    assert b"thing" not in first(whole)
    assert first({"messages": [system, two]}) != first(begun)
    # what is common to all, however long, does not hide what differs
    common = {"role": "system", "content": "rules " * 5000}
    assert first({"messages": [common, one]}) != first({"messages": [common, two]})
    assert len(first({"messages": [common, one]})) == 1024
    assert first({"prompt": "x" * 9000}) == first({"prompt": "x" * 9000 + "y"}) != b""
    assert first({"messages": []}) == b"[]"
    assert first({"x": 1}) == b""
