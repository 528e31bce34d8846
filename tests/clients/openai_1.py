"""openai-python since 1.0, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from report import BASE, KEY, MODEL, NO_KEY, NO_MODEL, report

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def client(key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{BASE}/v1", api_key=key, max_retries=0)


def chat(model: str = MODEL, key: str = KEY) -> Any:
    got = client(key).chat.completions.create(model=model, messages=MESSAGES)
    return got.choices[0].message.content


def stream() -> Any:
    parts = client().chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    return "".join(part.choices[0].delta.content or "" for part in parts)


def usage() -> Any:
    """What a client that asks for usage gets: text, then one more chunk with it."""
    parts = list(
        client().chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    return [len(part.choices) for part in parts][-2:], parts[-1].usage.total_tokens


async def _many() -> Any:
    async with openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0) as many:
        got = await asyncio.gather(
            *(many.chat.completions.create(model=MODEL, messages=MESSAGES) for _ in range(20))
        )
    return sorted({each.choices[0].message.content for each in got})


def response_stream() -> Any:
    events = list(client().responses.create(model=MODEL, input="hi", stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    return text, events[-1].type


report(
    {
        "models": lambda: [model.id for model in client().models.list()],
        "model": lambda: client().models.retrieve(MODEL).id,
        "chat": chat,
        "stream": stream,
        "usage": usage,
        "many": lambda: asyncio.run(_many()),
        "wrong key": lambda: chat(key=NO_KEY),
        "unknown model": lambda: chat(model=NO_MODEL),
        "embeddings": lambda: [
            d.embedding for d in client().embeddings.create(model=MODEL, input=["a", "b"]).data
        ],
        "completion": lambda: client().completions.create(model=MODEL, prompt="hi").choices[0].text,
        "response": lambda: client().responses.create(model=MODEL, input="hi").output_text,
        "response stream": response_stream,
    }
)
