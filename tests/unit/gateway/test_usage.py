"""The usage of an answer is found in every form and across every border; run by LuaJIT."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LUA = HERE.parents[2] / "vllm_fleet" / "gateway" / "lua"
JSON = {"Content-Type": "application/json"}
SSE = {"Content-Type": "text/event-stream; charset=utf-8"}

pytestmark = pytest.mark.skipif(
    shutil.which("luajit") is None, reason="needs luajit2 and lua-cjson"
)


def run(cases: list[dict[str, Any]]) -> list[Any]:
    """What the harness makes of each case."""
    done = subprocess.run(
        ["luajit", HERE / "usage_harness.lua", LUA],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer(pieces: list[bytes], **case: Any) -> dict[str, Any]:
    """The case of an answer that comes in these pieces."""
    values = {"run": "read", "status": 200, "header": JSON, "hide": False, "whole": True}
    return {**values, **case, "pieces": [piece.hex() for piece in pieces]}


def read(pieces: list[bytes], **case: Any) -> tuple[bytes, list[int]]:
    """What the client gets, and the cost: [prompt, completion]."""
    (got,) = run([answer(pieces, **case)])
    return b"".join(map(bytes.fromhex, got["out"])), got["cost"]


def everywhere(text: bytes) -> list[list[bytes]]:
    """A text cut in two at every place, and in single bytes."""
    cuts = [[text[:at], text[at:]] for at in range(1, len(text))]
    return [[text], [bytes([byte]) for byte in text], *cuts]


ESTIMATED = [40, 60]  # what the harness charges where an answer says nothing


# In one piece

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
TRICKS = r'x" \" {"usage":{"prompt_tokens":0}} \\" usage'


@pytest.mark.parametrize(
    ("body", "cost"),
    [
        ({"id": "1", "choices": [{"text": TRICKS}], "usage": USAGE, "more": [{"x": 1}]}, [7, 3]),
        ({"usage": USAGE}, [7, 3]),
        ({"tools": [{"usage": {"prompt_tokens": 0}}], "x": "usage", "usage": USAGE}, [7, 3]),
        ({"metadata": {"usage": {"prompt_tokens": 1}}, "usage": USAGE}, [7, 3]),
        ({"metadata": {"usage": {"prompt_tokens": 1}}}, ESTIMATED),
        ({"usage": USAGE, "metadata": [{"usage": {"prompt_tokens": 1}}]}, [7, 3]),
        ({"usage": USAGE, "metadata": {"usage": {}}, "kind": "usage"}, [7, 3]),
        ({"usage": USAGE, "text": TRICKS, "y": [{}]}, [7, 3]),
        ({"usages": USAGE, "usag": USAGE, "us\\age": USAGE, 'us"age': USAGE}, ESTIMATED),
        ({"usage": None, "x": {"prompt_tokens": 1}}, ESTIMATED),
        ({"usage": [USAGE]}, ESTIMATED),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": "3"}}, [0, 0]),
        ({"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 5}}}, [7, 3]),
        # embeddings, rerank
        ({"data": [{"embedding": [0.1, -2e-5]}], "usage": {"total_tokens": 9}}, [9, 0]),
        ({"usage": {"prompt_tokens": 9, "total_tokens": 9}}, [9, 0]),
        ({"usage": {"total_tokens": 9, "completion_tokens": 2}}, [7, 2]),
        # messages: what came from the cache is counted apart
        ({"usage": {"input_tokens": 5, "output_tokens": 2}}, [5, 2]),
        (
            {
                "usage": {
                    "input_tokens": 5,
                    "output_tokens": 2,
                    "cache_read_input_tokens": 30,
                    "cache_creation_input_tokens": 4,
                }
            },
            [39, 2],
        ),
        # responses
        (
            {"usage": {"input_tokens": 5, "input_tokens_details": {"x": 1}, "output_tokens": 2}},
            [5, 2],
        ),
    ],
)
def test_every_form_over_every_border(body: dict[str, Any], cost: list[int]) -> None:
    for text in (json.dumps(body).encode(), json.dumps(body, indent=1).encode()):
        cases = everywhere(text)
        got = run([answer(pieces) for pieces in cases])
        whole = {**JSON, "Content-Length": str(len(text))}  # then a piece may be known to be all
        got += run([answer(pieces, header=whole) for pieces in ([text], [b"", text], cases[-1])])
        assert {tuple(g["cost"]) for g in got} == {tuple(cost)}
        assert {b"".join(map(bytes.fromhex, g["out"])) for g in got} == {text}


@pytest.mark.parametrize("text", [b"", b"[]", b"not json", b'{"usage":{', b'{"usage":{"a":1]}'])
def test_no_usage_is_the_estimate(text: bytes) -> None:
    assert read([text]) == (text, ESTIMATED)


def test_a_usage_without_end_is_not_kept() -> None:
    text = b'{"usage":{"x":"' + b"x" * 100_000 + b'"},"y":1}'
    assert read([text[at : at + 4096] for at in range(0, len(text), 4096)]) == (text, ESTIMATED)


def test_errors_cost_nothing() -> None:
    assert read([b'{"error":{}}'], status=400)[1] == [0, 0]
    assert read([b"busy"], status=500, header={})[1] == [0, 0]


@pytest.mark.parametrize(
    ("status", "with_instance", "cost"),
    [(499, True, ESTIMATED), (499, False, [0, 0]), (503, False, [0, 0]), (502, False, [0, 0])],
)
def test_requests_without_an_answer(status: int, with_instance: bool, cost: list[int]) -> None:
    case = {"run": "cost", "status": status, "with_instance": with_instance}
    assert run([case]) == [cost]


# Streams


def event(value: object, name: str = "", end: str = "\n\n") -> bytes:
    head = f"event: {name}{end[:-1] if end == chr(10) * 2 else chr(13) + chr(10)}" if name else ""
    return f"{head}data: {json.dumps(value)}{end}".encode()


def chunk(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], **more}


LAST = {"id": "1", "choices": [], "usage": USAGE}
WORDS = [event(chunk(word)) for word in ("a", TRICKS, "\n\ndata: x\n\n", "模型")]
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"], ids=["lf", "crlf"])
def test_the_chunk_of_usage_is_found_and_hidden(hide: bool, end: str) -> None:
    def ended(data: bytes) -> bytes:
        return data.replace(b"\n\n", end.encode())

    parts = [*WORDS, event(LAST), DONE]
    text = ended(b"".join(parts))
    wanted = ended(b"".join([*WORDS, DONE])) if hide else text
    got = run([answer(pieces, header=SSE, hide=hide) for pieces in everywhere(text)])
    assert {tuple(g["cost"]) for g in got} == {(7, 3)}
    assert {b"".join(map(bytes.fromhex, g["out"])) for g in got} == {wanted}


def test_whole_events_pass_at_once() -> None:
    parts = [*WORDS, event(LAST), DONE]
    (got,) = run([answer(parts, header=SSE, hide=True)])
    assert [bytes.fromhex(out) for out in got["out"]] == [*WORDS, b"", DONE, b""]


def test_events_that_come_together() -> None:
    (got,) = run([answer([b"".join([WORDS[0], event(LAST), DONE])], header=SSE, hide=True)])
    assert bytes.fromhex(got["out"][0]) == WORDS[0] + DONE


def test_what_is_not_the_chunk_of_usage_is_not_hidden() -> None:
    events = [
        event(chunk("a", usage=USAGE)),  # beside text
        event({"choices": []}),  # without usage
        event({"choices": [], "usage": None}),
        event({"usage": USAGE, "object": "x"}),
        b'data: {"usage" broken\n\n',
        b': a comment with "usage"\n\n',
    ]
    text = b"".join(events)
    assert read([text], header=SSE, hide=True) == (text, [7, 3])


def test_a_stream_that_ends_within_an_event_loses_nothing() -> None:
    text = b"".join(WORDS) + b"data: {"
    assert read([text[:-3], text[-3:]], header=SSE, hide=True)[0] == text


@pytest.mark.parametrize("hide", [False, True])
def test_a_long_event_is_not_kept_back(hide: bool) -> None:
    long = event(chunk("x" * 300_000))
    pieces = [long[at : at + 8192] for at in range(0, len(long), 8192)]
    (got,) = run([answer([*pieces, event(LAST), DONE], header=SSE, hide=hide)])
    out = [bytes.fromhex(piece) for piece in got["out"]]
    assert b"".join(out) == long + (b"" if hide else event(LAST)) + DONE
    assert got["cost"] == [7, 3]
    assert sum(map(len, out[:10])) >= 8192 * 8


def test_a_cut_stream_costs_its_chunks() -> None:
    assert read(WORDS, header=SSE, hide=True, whole=False)[1] == [40, len(WORDS)]


def test_continuous_usage_of_a_cut_stream() -> None:
    events = [
        event(chunk("a", usage={"prompt_tokens": 7, "completion_tokens": n})) for n in (1, 2, 3)
    ]
    assert read(events, header=SSE, whole=False) == (b"".join(events), [7, 3])


def test_the_events_of_messages() -> None:
    events = [
        event(
            {
                "type": "message_start",
                "message": {"usage": {"input_tokens": 9, "output_tokens": 0}},
            },
            "message_start",
        ),
        event({"type": "content_block_delta", "delta": {"text": TRICKS}}, "content_block_delta"),
        event({"type": "message_delta", "usage": {"output_tokens": 4}}, "message_delta"),
        event({"type": "message_stop"}, "message_stop"),
    ]
    text = b"".join(events)
    assert read([text], header=SSE) == (text, [9, 4])


def test_the_events_of_responses() -> None:
    tools = [{"parameters": {"usage": {"input_tokens": 0}}}]
    start = {"type": "response.created", "response": {"tools": tools, "usage": None}}
    usage = {"input_tokens": 11, "output_tokens": 5, "total_tokens": 16}
    end = {
        "type": "response.completed",
        "response": {"tools": tools, "output": ["x" * 200_000], "usage": usage},
    }
    text = event(start, "response.created") + event(end, "response.completed")
    pieces = [text[at : at + 4096] for at in range(0, len(text), 4096)]
    assert read(pieces, header=SSE) == (text, [11, 5])


def test_a_hidden_stream_has_no_length() -> None:
    header = {**SSE, "Content-Length": "100"}
    cases = [answer([DONE], header=header, hide=hide) for hide in (True, False)]
    assert [got.get("length") for got in run(cases)] == [None, "100"]


def test_compressed_answers_pass() -> None:
    text = event(LAST) + DONE
    header = {**SSE, "Content-Encoding": "gzip"}
    assert read([text], header=header, hide=True) == (text, ESTIMATED)


# What is asked for and charged beforehand


def found(body: str, **more: Any) -> dict[str, Any]:
    """As scan.request tells it, as far as usage.ask looks."""
    at = body.find('{"', 1)
    options = [at + 1, body.index("}", at) + 1] if '"stream_options":{"' in body else None
    if '"stream_options":{ }' in body:
        options = [body.index("{ }") + 1, body.index("{ }") + 3]
    given = {"stream": True, "include_usage": False, **more}
    return given if options is None else {**given, "stream_options": options}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/pools/m/v1/completions"])
@pytest.mark.parametrize(
    ("body", "options"),
    [
        ('{"stream":true}', {"include_usage": True}),
        ('{"stream":true} \n', {"include_usage": True}),
        ('{"stream_options":null,"stream":true}', {"include_usage": True}),
        ('{"stream_options":{ },"stream":true}', {"include_usage": True}),
        (
            '{"stream_options":{"include_usage":false},"stream":true,"x":"模"}',
            {"include_usage": True},
        ),
        (
            '{"stream_options":{"continuous_usage_stats":true},"stream":true}',
            {"include_usage": True, "continuous_usage_stats": False},
        ),
    ],
)
def test_usage_is_asked_for(path: str, body: str, options: dict[str, bool]) -> None:
    (got,) = run([{"run": "ask", "uri": path, "found": found(body), "body": body}])
    assert json.loads(got["body"]) == {**json.loads(body), "stream_options": options}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"stream": False}),
        ("/v1/chat/completions", {"include_usage": True}),
        ("/v1/messages", {}),
        ("/v1/responses", {}),
        ("/v1/embeddings", {}),
    ],
)
def test_usage_is_not_asked_for(path: str, more: dict[str, bool]) -> None:
    body = '{"stream":true}'
    assert run([{"run": "ask", "uri": path, "found": found(body, **more), "body": body}]) == [{}]


@pytest.mark.parametrize(
    ("path", "found", "charged"),
    [
        ("/v1/chat/completions", {"tokens": 10}, [522, 10]),
        ("/v1/completions", {"tokens": 10, "max_tokens": 5}, [15, 10]),
        ("/v1/messages", {"tokens": 10, "max_tokens": 100_000}, [522, 10]),
        ("/v1/responses", {"tokens": 10, "max_tokens": -5}, [10, 10]),
        ("/v1/chat/completions", {"tokens": 10, "max_tokens": 5, "n": 3}, [25, 10]),
        ("/v1/chat/completions", {"tokens": 10, "max_tokens": 5, "media": 2}, [2015, 2010]),
        ("/v1/embeddings", {"tokens": 10, "max_tokens": 5}, [10, 10]),
        ("/v1/rerank", {"tokens": 10}, [10, 10]),
        ("/v1/messages/count_tokens", {"tokens": 10}, [0, 0]),
    ],
)
def test_estimates(path: str, found: dict[str, int], charged: list[int]) -> None:
    assert run([{"run": "estimate", "uri": path, "found": found}]) == [charged]
