"""LangChain's client for OpenAI-compatible servers."""

from __future__ import annotations

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr
from report import BASE, KEY, MODEL, NO_KEY, NO_MODEL, report


def chat(model: str = MODEL, key: str = KEY) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{BASE}/v1", api_key=SecretStr(key), model=model, max_retries=0)


# Texts, not tokens: OpenAI's tokenizer is not the model's, and it would have to be downloaded.
embeddings = OpenAIEmbeddings(
    base_url=f"{BASE}/v1", api_key=SecretStr(KEY), model=MODEL, check_embedding_ctx_length=False
)

report(
    {
        "chat": lambda: chat().invoke("hi").content,
        "stream": lambda: "".join(str(part.content) for part in chat().stream("hi")),
        "wrong key": lambda: chat(key=NO_KEY).invoke("hi"),
        "unknown model": lambda: chat(model=NO_MODEL).invoke("hi"),
        "embeddings": lambda: embeddings.embed_documents(["a", "b"]),
        "tokens": lambda: (chat().invoke("hi").usage_metadata or {}).get("total_tokens"),
    }
)
