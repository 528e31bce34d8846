"""Types in plain words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from vllm_fleet.spec.model import Gateway, HostSettings, Instance, Model, Port, Version
from vllm_fleet.spec.words import Type, describe, nearest


@pytest.mark.parametrize(
    ("annotation", "wanted"),
    [
        (Annotated[int, Field(ge=1)] | Literal["auto"], 'a positive integer or "auto"'),
        (Annotated[int, Field(ge=0)], "an integer, 0 or more"),
        (int, "an integer"),
        (Port, "an integer from 1 to 65535"),
        (Version | None, 'a version such as "0.21.0"'),
        (Literal["a", "b", "c"], '"a", "b" or "c"'),
        (bool, "true or false"),
        (tuple[str, ...], "a list"),
        (dict[str, Any], "a mapping"),
        (Gateway, "a mapping"),
        (str | int | None, "text or an integer"),
    ],
)
def test_describe(annotation: Any, wanted: str) -> None:
    assert describe(Type.of(annotation)) == wanted


def test_child() -> None:
    root = Type(HostSettings)
    port = root.child("instances").child(3).child("port")  # type: ignore[union-attr]
    assert port is not None
    assert describe(port) == "an integer from 1024 to 65535"
    assert root.child("nonsense") is None
    models = root.child("models")
    assert models is not None
    assert models.child("any").model is Model  # type: ignore[union-attr]
    assert root.child("instances").child(0).model is Instance  # type: ignore[union-attr]


def test_nearest() -> None:
    assert nearest("max_modle_len", Model.model_fields) == "max_model_len"
    assert nearest("zzz", Model.model_fields) is None
