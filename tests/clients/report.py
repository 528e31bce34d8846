"""What a client's steps came to, as one JSON object on stdout.

The scripts beside this file run in virtual environments of their own, with one generation of
clients each: ``script.py BASE_URL KEY MODEL``. A step gives a value, or the name of what its client
raised; the base classes tell an AuthenticationError from what merely looks like one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

BASE, KEY, MODEL = sys.argv[1:4]
NO_KEY, NO_MODEL = "sk-nobody", "no-such-model"


def report(steps: Mapping[str, Callable[[], Any]]) -> None:
    """Run every step and print what came of it."""
    out: dict[str, Any] = {}
    for name, step in steps.items():
        try:
            out[name] = step()
        except Exception as error:
            kinds = [f"{k.__module__.partition('.')[0]}.{k.__name__}" for k in type(error).__mro__]
            status = getattr(error, "status_code", None) or getattr(error, "http_status", None)
            out[name] = {"raised": kinds, "status": status, "text": str(error)[:300]}
    print(json.dumps(out))
