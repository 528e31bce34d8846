"""The demo's three hosts, as `make demo` made them on this machine (see tests/testbed)."""

import json as _json
import os as _os
from pathlib import Path as _Path

_repo = _Path(__file__).resolve().parent.parent
_state = _Path(_os.environ.get("FLEET_TESTBED") or _repo / ".testbed") / "state.json"


def _hosts() -> dict[str, dict[str, object]]:
    """Connection data by host name."""
    try:
        found: dict[str, dict[str, object]] = _json.loads(_state.read_text())["inventory"]
    except (OSError, ValueError, KeyError):
        raise SystemExit(
            "inventory/demo.py: the demo's hosts are not up; `make demo` makes them"
        ) from None
    return found


_data = _hosts()

gpu = [(name, data) for name, data in _data.items() if name.startswith("demo-gpu-")]
gateway = [(name, data) for name, data in _data.items() if name == "demo-gw"]
monitoring = [(name, data) for name, data in _data.items() if name == "demo-gw"]
