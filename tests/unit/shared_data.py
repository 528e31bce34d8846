"""Where the real outputs and dumps lie that are not part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(os.environ.get("FLEET_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")

needs_shared_data = pytest.mark.skipif(
    not HERE.is_dir(), reason=f"no shared data at {HERE}; name it by FLEET_SHARED_DATA"
)


def files(folder: str) -> list[Path]:
    """Every file of a folder of the shared data, by name; none where it is absent."""
    return sorted((HERE / folder).glob("*")) if HERE.is_dir() else []
