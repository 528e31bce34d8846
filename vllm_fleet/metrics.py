"""Which metrics there are: of each vLLM version, read from running servers, and of the gateway."""

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

# What the gateway's /metrics has, by kind; its Lua module `metrics` writes them.
GATEWAY = {
    "vllm_fleet_gateway_requests_total": "counter",
    "vllm_fleet_gateway_key_requests_total": "counter",
    "vllm_fleet_gateway_tokens_total": "counter",
    "vllm_fleet_gateway_limited_total": "counter",
    "vllm_fleet_gateway_key_refused_total": "counter",
    "vllm_fleet_gateway_retries_total": "counter",
    "vllm_fleet_gateway_refused_total": "counter",
    "vllm_fleet_gateway_series_dropped_total": "counter",
    "vllm_fleet_gateway_first_byte_seconds": "histogram",
    "vllm_fleet_gateway_duration_seconds": "histogram",
    "vllm_fleet_gateway_instance_ready": "gauge",
    "vllm_fleet_gateway_instance_draining": "gauge",
    "vllm_fleet_gateway_in_flight": "gauge",
    "vllm_fleet_gateway_queued": "gauge",
    "vllm_fleet_gateway_held": "gauge",
    "vllm_fleet_gateway_connections": "gauge",
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
    return _names(metrics)


def gateway_series() -> frozenset[str]:
    """Names of all series that a gateway exports."""
    return _names(GATEWAY)


def _names(kinds: dict[str, str]) -> frozenset[str]:
    return frozenset(name + suffix for name, kind in kinds.items() for suffix in _SUFFIXES[kind])
