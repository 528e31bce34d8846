"""JSON from elsewhere: whatever is wrong with it is a ValueError. Pure."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises ValueError, also where Python itself gives up: thousands of brackets in each other, or
    a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
