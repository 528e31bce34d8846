"""Reads an EnvironmentFile with systemd's own parser."""

from __future__ import annotations

import ctypes
import glob
from pathlib import Path

import pytest


def read_env_file(path: Path) -> dict[str, str]:
    """What systemd makes of the file; skips the test where libsystemd-shared is missing."""
    found = glob.glob("/usr/lib/*/systemd/libsystemd-shared-*.so") + glob.glob(
        "/usr/lib/systemd/libsystemd-shared-*.so"
    )
    if not found:
        pytest.skip("needs libsystemd-shared (package systemd), whose parser is asked")
    library = ctypes.CDLL(found[0])
    library.load_env_file.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.POINTER(ctypes.c_char_p)),
    ]
    variables = ctypes.POINTER(ctypes.c_char_p)()
    result = library.load_env_file(None, str(path).encode(), ctypes.byref(variables))
    assert result >= 0, f"systemd refuses {path}: errno {-result}"
    read: dict[str, str] = {}
    index = 0
    while variables and (line := variables[index]) is not None:
        key, _, value = line.decode().partition("=")
        read[key] = value
        index += 1
    return read
