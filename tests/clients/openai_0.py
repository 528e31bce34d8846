"""openai-python 0.28: the interface before 1.0, which old programs still use."""

from __future__ import annotations

from typing import Any

import openai
from report import BASE, KEY, MODEL, NO_KEY, NO_MODEL, report

openai.api_base = f"{BASE}/v1"
openai.api_key = KEY

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(model: str = MODEL, key: str = KEY) -> Any:
    got = openai.ChatCompletion.create(model=model, messages=MESSAGES, api_key=key)
    return got.choices[0].message.content


def embeddings() -> Any:
    # Asked for as numbers: unpacking its default would take numpy.
    got = openai.Embedding.create(model=MODEL, input=["a", "b"], encoding_format="float")
    return [list(each.embedding) for each in got.data]


def stream() -> Any:
    parts = openai.ChatCompletion.create(model=MODEL, messages=MESSAGES, stream=True)
    return "".join(part.choices[0].delta.get("content") or "" for part in parts)


report(
    {
        "models": lambda: [model.id for model in openai.Model.list().data],
        "chat": chat,
        "stream": stream,
        "wrong key": lambda: chat(key=NO_KEY),
        "unknown model": lambda: chat(model=NO_MODEL),
        "embeddings": embeddings,
        "completion": lambda: openai.Completion.create(model=MODEL, prompt="hi").choices[0].text,
    }
)
