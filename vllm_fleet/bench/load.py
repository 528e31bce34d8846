"""What is sent to an endpoint, and the same as GuideLLM reads it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_LENGTH = re.compile(r"(\d+)(?:~(\d+))?")
_PREFIX = re.compile(r"(\d+)(?:x(\d+))?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600}


class LoadError(ValueError):
    """A load that cannot be sent; says why."""


@dataclass(frozen=True)
class Length:
    """A number of tokens; ``spread`` is the standard deviation of sampled ones, 0 where fixed."""

    tokens: int
    spread: int = 0

    @classmethod
    def parse(cls, text: str) -> Length:
        """``512`` is fixed, ``512~128`` is sampled. Raises LoadError."""
        found = _LENGTH.fullmatch(text.strip())
        if not found or not int(found[1]):
            raise LoadError(f"{text!r} is no length: write 512, or 512~128 for sampled ones")
        return cls(int(found[1]), int(found[2] or 0))

    def __str__(self) -> str:
        return f"{self.tokens}~{self.spread}" if self.spread else str(self.tokens)


@dataclass(frozen=True)
class Load:
    """One run: how many streams at once, one level after another, and what each sends."""

    url: str  # with or without /v1
    model: str
    tokenizer: str  # a directory or a name at the hub; prompts are made with it
    streams: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    input: Length = Length(512)
    output: Length = Length(128)
    requests_per_stream: int = 8
    least_requests: int = 20
    seconds: float = 120  # a level ends then, whatever is open
    soak: bool = False  # one level that lasts `seconds`, however many requests that takes
    prefix_tokens: int = 0  # the same beginning of many prompts
    prefixes: int = 1  # how many such beginnings there are
    turns: int = 1  # of a conversation
    path: str = "chat"
    timeout: float = 900
    verify_tls: bool = True
    seed: int = 42
    extras: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request

    @property
    def target(self) -> str:
        """The base URL without /v1, as GuideLLM wants it."""
        return self.url.rstrip("/").removesuffix("/v1")

    def requests(self, streams: int) -> int:
        """How many requests a level of so many streams sends."""
        return max(self.least_requests, streams * self.requests_per_stream)

    def told(self) -> str:
        """The load in words."""
        parts = [f"{self.input} tokens in, {self.output} out"]
        if self.prefix_tokens:
            parts.append(
                f"the first {self.prefix_tokens} further tokens shared ({self.prefixes} kinds)"
            )
        if self.turns > 1:
            parts.append(f"conversations of {self.turns} turns")
        if self.soak:
            parts.append(f"for {self.seconds:.0f} s")
        return ", ".join(parts)


def prefix_of(text: str) -> tuple[int, int]:
    """(tokens, kinds) of ``2000`` or ``2000x8``. Raises LoadError."""
    found = _PREFIX.fullmatch(text.strip())
    if not found or not int(found[1]) or not int(found[2] or 1):
        raise LoadError(f"{text!r} is no shared beginning: write 2000, or 2000x8 for 8 of them")
    return int(found[1]), int(found[2] or 1)


def seconds_of(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m`` or ``1h``. Raises LoadError."""
    found = _DURATION.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise LoadError(f"{text!r} is no time: write 90s, 10m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def ramp(to: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to a number, which comes last."""
    levels = [1]
    while levels[-1] * 2 < to:
        levels.append(levels[-1] * 2)
    return tuple(levels if levels[-1] == to else [*levels, to])


def scenario(load: Load, report: str, api_key: str = "") -> dict[str, Any]:
    """The file that GuideLLM runs from; the key stands in it, never on a command line."""
    data: dict[str, Any] = {"kind": "synthetic_text", "turns": load.turns}
    for name, length in (("prompt", load.input), ("output", load.output)):
        data[f"{name}_tokens"] = length.tokens
        if length.spread:
            data[f"{name}_tokens_stdev"] = length.spread
            data[f"{name}_tokens_min"] = max(1, length.tokens - 3 * length.spread)
            data[f"{name}_tokens_max"] = length.tokens + 3 * length.spread
    if load.prefix_tokens:
        data |= {"prefix_tokens": load.prefix_tokens, "prefix_count": load.prefixes}
    backend: dict[str, Any] = {
        "kind": "openai_http",
        "target": load.target,
        "model": load.model,
        "request_format": PATHS[load.path],
        "timeout": load.timeout,
        "verify": load.verify_tls,
        "http2": False,  # as most clients; and the gateway's limit of streams a connection
        "validate_backend": False,  # it asks /health, which a gateway does not let through
    }
    if api_key:
        backend["api_key"] = api_key
    if load.extras:
        backend["extras"] = {"body": dict(load.extras)}
    constraints: list[dict[str, Any]] = [{"kind": "max_duration", "seconds": load.seconds}]
    if not load.soak:
        counts = [load.requests(streams) for streams in load.streams]
        constraints.append({"kind": "max_requests", "count": counts})
    return {
        "metadata": {"labels": {}},
        "spec": {
            "backend": backend,
            "profile": {"kind": "concurrent", "streams": list(load.streams)},
            "constraints": constraints,
            "tokenizer": {"kind": "huggingface_auto", "model": load.tokenizer},
            "data": [data],
            "seed": {"kind": "static", "value": load.seed},
            "outputs": [{"kind": "json", "path": report}],
        },
    }
