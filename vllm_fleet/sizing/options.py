"""Options of ``vllm serve`` that an operator wrote, as arguments of ``size``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_fleet import engine_args
from vllm_fleet.jsontext import parsed

from .errors import SizingError


def number(own: Mapping[str, Any], name: str) -> int | None:
    """A whole number as vLLM reads it (32k is one); None where the option is absent or auto."""
    value = own.get(name)
    if value is None or value == "auto":
        return None
    found = None if isinstance(value, bool) else engine_args.number(str(value))
    if found is None or not math.isfinite(found) or found != int(found):
        raise SizingError(f"{name}: {value!r} is no whole number.")
    return int(found)


def share(own: Mapping[str, Any], name: str, default: float) -> float:
    """A number such as 0.9."""
    found = engine_args.number(str(own.get(name, default)))
    if found is None:
        raise SizingError(f"{name}: {own[name]!r} is no number.")
    return found


def flag(own: Mapping[str, Any], name: str) -> bool | None:
    """A switch, by its own name or as ``no-...``; None where neither is there."""
    for key, says in ((name, True), (f"no-{name}", False)):
        if own.get(key) is not None:
            return bool(own[key]) is says
    return None


def length(own: Mapping[str, Any]) -> int | None:
    """max-model-len; None where vLLM is to find it (auto, -1) or the option is absent."""
    found = number(own, "max-model-len")
    return None if found == -1 else found


def given(own: Mapping[str, Any], task: str) -> dict[str, Any]:
    """What of the options ``size`` knows, besides layout, batch, length and memory."""
    return {
        "dcp": number(own, "decode-context-parallel-size") or 1,
        "dp": number(own, "data-parallel-size") or 1,
        "expert_parallel": bool(flag(own, "enable-expert-parallel")),
        "quantization": own.get("quantization"),
        "enforce_eager": bool(flag(own, "enforce-eager")),
        "block_size": number(own, "block-size"),
        "prefix_caching": flag(own, "enable-prefix-caching"),
        "vision": not flag(own, "language-model-only"),
        "pooling": task != "chat",
        "speculative_tokens": speculative_tokens(own),
    }


def speculative_tokens(own: Mapping[str, Any]) -> int:
    """Tokens that the model's own MTP layers predict."""
    method, tokens = _speculation(own)
    return tokens if method.endswith("mtp") else 0


def warnings(own: Mapping[str, Any]) -> list[str]:
    """What the options ask for and ``size`` does not count."""
    method, _ = _speculation(own)
    if method and not method.endswith("mtp"):
        return [
            f"speculative decoding by {method}: the memory it takes is not in these figures; "
            "leave more free"
        ]
    return []


def _speculation(own: Mapping[str, Any]) -> tuple[str, int]:
    """Method and tokens of speculative decoding; "" without it.

    One option with a mapping or JSON, dotted ones, or (from 0.22 on) spec-method and spec-tokens.
    """
    name = "speculative-config"
    value = own.get(name)
    if isinstance(value, str):
        try:
            value = parsed(value)
        except ValueError as error:
            raise SizingError(f"{name}: is not JSON: {error}.") from None
    found = {str(k).replace("-", "_"): v for k, v in (value or {}).items()} if _maps(value) else {}
    for key, one in own.items():
        if key.startswith(f"{name}."):
            found[key.partition(".")[2].replace("-", "_")] = one
    found.setdefault("method", own.get("spec-method"))
    found.setdefault("model", own.get("spec-model"))
    found.setdefault("num_speculative_tokens", own.get("spec-tokens"))
    tokens = number(found, "num_speculative_tokens")
    method = found["method"] or ("a draft model" if found["model"] else "")
    if not method:
        return "", 0
    return str(method), 1 if tokens is None else tokens


def _maps(value: object) -> bool:
    return value is None or isinstance(value, Mapping)
