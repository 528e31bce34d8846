"""Anthropic's client, on /v1/messages."""

from __future__ import annotations

from typing import Any

import anthropic
from report import BASE, KEY, MODEL, NO_KEY, NO_MODEL, report

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def client(key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=BASE, api_key=key, max_retries=0)


def chat(model: str = MODEL, key: str = KEY) -> Any:
    got = client(key).messages.create(model=model, max_tokens=16, messages=MESSAGES)
    return got.content[0].text


def stream() -> Any:
    with client().messages.stream(model=MODEL, max_tokens=16, messages=MESSAGES) as parts:
        text = "".join(parts.text_stream)
        return text, parts.get_final_message().usage.output_tokens


report(
    {
        "models": lambda: [model.id for model in client().models.list()],
        "chat": chat,
        "stream": stream,
        "wrong key": lambda: chat(key=NO_KEY),
        "unknown model": lambda: chat(model=NO_MODEL),
        "count": lambda: (
            client().messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
        ),
    }
)
