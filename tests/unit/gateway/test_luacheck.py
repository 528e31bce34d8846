"""The Lua modules are clean in luacheck."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_fleet import gateway


@pytest.mark.skipif(shutil.which("luacheck") is None, reason="needs Debian's lua-check")
def test_luacheck() -> None:
    modules = Path(gateway.__file__).parent / "lua"
    done = subprocess.run(
        ["luacheck", "--no-color", "--std", "ngx_lua", "--max-line-length", "100", modules],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
