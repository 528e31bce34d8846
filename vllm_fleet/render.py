"""Templates to text. A name that a template uses and nobody gave is an error."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def _environment() -> Environment:
    here = Path(__file__).parent
    # Beside the package in a checkout, inside it where a wheel was installed.
    places = (here.parent / "templates", here / "templates")
    return Environment(
        loader=FileSystemLoader([str(p) for p in places]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: object) -> str:
    """Text of the template, a path below templates/, with the values filled in."""
    return _environment().get_template(template).render(**values)
