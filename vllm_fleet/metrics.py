"""Which metrics each vLLM version exports: read from the /metrics page of running servers."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

# What a metric of each kind is called in a sample, beside its own name.
_SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}


def versions() -> tuple[str, ...]:
    """Versions whose metrics are known, oldest first."""
    folder = files("vllm_fleet") / "data" / "metrics"
    found = [f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")]
    return tuple(sorted(found, key=lambda v: [int(n) for n in v.split(".")]))


@cache
def series(version: str) -> frozenset[str]:
    """Names of all series that this version exports, `_bucket` and the like included.

    FileNotFoundError for a version that is not in :func:`versions`.
    """
    text = (files("vllm_fleet") / "data" / "metrics" / f"{version}.json").read_text()
    metrics: dict[str, str] = json.loads(text)["metrics"]
    return frozenset(name + suffix for name, kind in metrics.items() for suffix in _SUFFIXES[kind])
