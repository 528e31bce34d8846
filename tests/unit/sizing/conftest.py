"""Configs of real models, as the benchmark keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "sizing"


@pytest.fixture
def config() -> Callable[..., dict[str, Any]]:
    """Reads a config by name; keywords replace keys, None removes one."""

    def read(name: str, **changes: Any) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((DATA / "configs" / f"{name}.json").read_text("utf-8"))
        data.update(changes)
        return {k: v for k, v in data.items() if v is not None}

    return read
