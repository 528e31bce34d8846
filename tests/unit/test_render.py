"""Templates: an undefined name is an error, and the trailing newline stays."""

from __future__ import annotations

import pytest
from jinja2 import TemplateNotFound, UndefinedError

from vllm_fleet.render import render


def test_renders_with_trailing_newline() -> None:
    text = render("nginx/main.conf.j2", mark="Mark", worker_shutdown=7)
    assert text.startswith("# Mark;")
    assert text.endswith("worker_shutdown_timeout 7s;\n")


def test_undefined_name_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="worker_shutdown"):
        render("nginx/main.conf.j2", mark="Mark")


def test_unknown_template() -> None:
    with pytest.raises(TemplateNotFound):
        render("nginx/none.j2")
