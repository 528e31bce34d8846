"""pool.lua and queue.lua over a stand-in for nginx with several workers, in virtual time."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.gateway.test_scan import HERE, LUA

pytestmark = pytest.mark.skipif(
    shutil.which("luajit") is None, reason="needs luajit2 and lua-cjson"
)


def test_cases(tmp_path: Path) -> None:
    done = subprocess.run(
        ["luajit", HERE / "balance_cases.lua", LUA, HERE, tmp_path / "drained"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 20
    assert [line for line in lines if not line.startswith("ok ")] == []
