"""Templates to text. An undefined name is an error, never an empty string."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_PACKAGE = Path(__file__).resolve().parent


@cache
def _environment() -> Environment:
    # A checkout has templates/ beside the package; an installed wheel has them inside it.
    places = [_PACKAGE / "templates", _PACKAGE.parent / "templates"]
    return Environment(
        loader=FileSystemLoader(places),
        undefined=StrictUndefined,
        autoescape=False,  # configuration files, not HTML
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )


def render(template: str, **values: object) -> str:
    """The text of ``templates/<template>`` with these values.

    Raises jinja2.TemplateNotFound for an unknown template and jinja2.UndefinedError for a
    name that the template uses and ``values`` lacks.
    """
    if all(isinstance(value, _PLAIN) for value in values.values()):
        return _rendered(template, **values)
    return _environment().get_template(template).render(**values)


# Most files are the same on many hosts.
_PLAIN = (str, int, float, type(None))


@lru_cache(maxsize=4096, typed=True)
def _rendered(template: str, **values: object) -> str:
    return _environment().get_template(template).render(**values)
