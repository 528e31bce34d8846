"""What vLLM answers on each path that the gateway lets through, in form; nothing is computed.

Forms as vLLM 0.21 to 0.32 send them.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

VECTOR = (0.25, -0.5, 0.75)  # exact in 32 bits

Answer = dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """What an answer's usage says."""

    prompt: int = 1
    completion: int = 1

    @property
    def chat(self) -> Answer:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": None,
        }

    @property
    def pooling(self) -> Answer:
        return {"prompt_tokens": self.prompt, "total_tokens": self.prompt, "completion_tokens": 0}

    @property
    def message(self) -> Answer:
        return {"input_tokens": self.prompt, "output_tokens": self.completion}

    @property
    def response(self) -> Answer:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + self.completion,
        }


def answer(path: str, asked: Answer, text: str, tokens: Tokens) -> Answer:
    """The answer to a request without `stream`."""
    make = {
        "/v1/completions": _completion,
        "/v1/embeddings": _embeddings,
        "/v1/messages": _message,
        "/v1/messages/count_tokens": _count,
        "/v1/rerank": _rerank,
        "/v1/responses": _response,
        "/v1/score": _score,
    }.get(path.partition("?")[0], _chat)
    return make(asked, text, tokens)


def events(path: str, asked: Answer, texts: Sequence[str], tokens: Tokens) -> Iterator[str]:
    """The events of a stream whose text comes in these pieces."""
    make = {
        "/v1/completions": _completion_events,
        "/v1/messages": _message_events,
        "/v1/responses": _response_events,
    }.get(path.partition("?")[0], _chat_events)
    return make(asked, texts, tokens)


def _data(value: Answer) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _named(kind: str, **value: Any) -> str:
    return f"event: {kind}\n" + _data({"type": kind, **value})


def _chat(asked: Answer, text: str, tokens: Tokens) -> Answer:
    message: Answer = {"role": "assistant", "content": text, "reasoning": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": asked.get("model"),
        "choices": [{**choice, "stop_reason": None}],
        "usage": tokens.chat,
    }


def _chunks(
    asked: Answer, choices: list[Answer], kind: str, name: str, tokens: Tokens
) -> Iterator[str]:
    head = {"id": name, "object": kind, "created": 1_700_000_000, "model": asked.get("model")}
    for choice in choices:
        yield _data({**head, "choices": [choice]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield _data({**head, "choices": [], "usage": tokens.chat})
    yield "data: [DONE]\n\n"


def _chat_events(asked: Answer, texts: Sequence[str], tokens: Tokens) -> Iterator[str]:
    choices: list[Answer] = [
        {"index": 0, "delta": {"content": t}, "logprobs": None, "finish_reason": None}
        for t in texts
    ]
    if choices:
        choices[0]["delta"]["role"] = "assistant"
        choices[-1]["finish_reason"] = "stop"
    return _chunks(asked, choices, "chat.completion.chunk", "chatcmpl-1", tokens)


def _completion(asked: Answer, text: str, tokens: Tokens) -> Answer:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": asked.get("model"),
        "choices": [{**choice, "stop_reason": None}],
        "usage": tokens.chat,
    }


def _completion_events(asked: Answer, texts: Sequence[str], tokens: Tokens) -> Iterator[str]:
    choices: list[Answer] = [
        {"index": 0, "text": t, "logprobs": None, "finish_reason": None} for t in texts
    ]
    if choices:
        choices[-1]["finish_reason"] = "stop"
    return _chunks(asked, choices, "text_completion", "cmpl-1", tokens)


def _embeddings(asked: Answer, _: str, tokens: Tokens) -> Answer:
    vector: str | list[float] = list(VECTOR)
    if asked.get("encoding_format") == "base64":
        vector = base64.b64encode(struct.pack(f"<{len(VECTOR)}f", *VECTOR)).decode()
    given = asked.get("input")
    many = isinstance(given, list) and given and not isinstance(given[0], int)
    return {
        "id": "embd-1",
        "object": "list",
        "created": 1_700_000_000,
        "model": asked.get("model"),
        "data": [
            {"index": index, "object": "embedding", "embedding": vector}
            for index in range(len(given) if many and isinstance(given, list) else 1)
        ],
        "usage": tokens.pooling,
    }


def _message(asked: Answer, text: str, tokens: Tokens) -> Answer:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": asked.get("model"),
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": tokens.message,
    }


def _message_events(asked: Answer, texts: Sequence[str], tokens: Tokens) -> Iterator[str]:
    empty = {**_message(asked, "", tokens), "content": [], "stop_reason": None}
    empty["usage"] = {**tokens.message, "output_tokens": 0}
    yield _named("message_start", message=empty)
    yield _named("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for text in texts:
        delta = {"type": "text_delta", "text": text}
        yield _named("content_block_delta", index=0, delta=delta)
    yield _named("content_block_stop", index=0)
    yield _named("message_delta", delta={"stop_reason": "end_turn"}, usage=tokens.message)
    yield _named("message_stop")


def _count(_asked: Answer, _text: str, tokens: Tokens) -> Answer:
    return {"input_tokens": tokens.prompt}


def _rerank(asked: Answer, _: str, tokens: Tokens) -> Answer:
    documents = asked.get("documents") or []
    return {
        "id": "rerank-1",
        "model": asked.get("model"),
        "usage": {"prompt_tokens": tokens.prompt, "total_tokens": tokens.prompt},
        "results": [
            {"index": index, "document": {"text": text}, "relevance_score": 1 / (index + 1)}
            for index, text in enumerate(documents)
        ],
    }


def _score(asked: Answer, _: str, tokens: Tokens) -> Answer:
    return {
        "id": "score-1",
        "object": "list",
        "created": 1_700_000_000,
        "model": asked.get("model"),
        "data": [{"index": 0, "object": "score", "score": 0.5}],
        "usage": tokens.pooling,
    }


def _item(text: str, status: str = "completed") -> Answer:
    part: Answer = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    content = [part] if status == "completed" else []
    head = {"id": "msg_1", "type": "message", "role": "assistant"}
    return {**head, "content": content, "status": status}


def _response(asked: Answer, text: str, tokens: Tokens) -> Answer:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": asked.get("model"),
        "status": "completed",
        "output": [_item(text)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": tokens.response,
    }


def _response_events(asked: Answer, texts: Sequence[str], tokens: Tokens) -> Iterator[str]:
    whole = _response(asked, "".join(texts), tokens)
    started = {**whole, "status": "in_progress", "output": [], "usage": None}
    place = {"output_index": 0, "item_id": "msg_1", "content_index": 0}
    part: Answer = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    done = {**part, "text": "".join(texts)}
    steps: list[tuple[str, Answer]] = [
        ("response.created", {"response": started}),
        ("response.in_progress", {"response": started}),
        ("response.output_item.added", {"output_index": 0, "item": _item("", "in_progress")}),
        ("response.content_part.added", {**place, "part": part}),
        *(("response.output_text.delta", {**place, "delta": t, "logprobs": []}) for t in texts),
        ("response.output_text.done", {**place, "text": done["text"], "logprobs": []}),
        ("response.content_part.done", {**place, "part": done}),
        ("response.output_item.done", {"output_index": 0, "item": whole["output"][0]}),
        ("response.completed", {"response": whole}),
    ]
    for number, (kind, value) in enumerate(steps):
        yield _named(kind, sequence_number=number, **value)
