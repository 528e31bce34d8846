"""Planned instances for tests."""

from __future__ import annotations

from typing import Any

from vllm_fleet.planned import PlannedInstance
from vllm_fleet.spec.model import Model


def planned(model: dict[str, Any] | None = None, **changes: Any) -> PlannedInstance:
    """An instance on two cards; `model` and `changes` replace single values."""
    values: dict[str, Any] = {
        "host": "gpu-01",
        "address": "10.0.0.11",
        "name": "air-a",
        "model_name": "glm-4.5-air",
        "model": Model(**{"repo": "ZhipuAI/GLM-4.5-Air", "revision": "v1.0", **(model or {})}),
        "port": 8001,
        "device": "cuda",
        "cards": (4, 5),
        "uuids": ("GPU-aaaa", "GPU-bbbb"),
        "release": "0.21.0-abc",
        "vllm_version": "0.21.0",
        "weights": "/opt/vllm/models/glm-4.5-air/v1.0",
        "args": {},
        "env": {},
        "start_seconds": 1800,
        "drain_seconds": 600,
    }
    return PlannedInstance(**{**values, **changes})
