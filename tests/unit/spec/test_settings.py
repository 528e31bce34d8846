"""docs/settings.md and the shared files of group_vars are those of the models."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from vllm_fleet.spec import settings
from vllm_fleet.spec.load import check_inventory
from vllm_fleet.spec.model import HostSettings, Instance, Model
from vllm_fleet.spec.words import Type

ROOT = Path(__file__).resolve().parents[3]


def paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every setting, dotted: gateway.tls.key, models.*.repo, instances.*.port."""
    for name, field in model.model_fields.items():
        path = f"{above}{name}"
        yield path
        wanted = Type.of(field.annotation, field.metadata)
        if wanted.model:
            yield from paths(wanted.model, f"{path}.")
        for option in wanted.options:
            if get_origin(option.annotation) in (dict, tuple):
                args = get_args(option.annotation)
                for inner in (Type.of(args[0]), Type.of(args[-1])):
                    if inner.model in (Model, Instance):
                        yield from paths(inner.model, f"{path}.*.")


def keys(value: Any, wanted: set[str], above: str = "") -> Iterator[str]:
    """The dotted keys of a YAML value, list items and entries that are no setting as *."""
    if isinstance(value, list):
        value = dict.fromkeys(range(len(value)), value[0]) if value else {}
    if isinstance(value, dict):
        for name, inner in value.items():
            path = f"{above}{name}" if f"{above}{name}" in wanted else f"{above}*"
            if path in wanted:
                yield path
            yield from keys(inner, wanted, f"{path}.")


def uncommented(file: str) -> Any:
    """A shared file as an operator has it who takes every "# " away."""
    text = (ROOT / f"group_vars/{file}.yml").read_text()
    return yaml.safe_load(re.sub(r"^# ", "", text, flags=re.MULTILINE))


def test_the_page_is_the_models() -> None:
    assert (ROOT / "docs/settings.md").read_text() == settings.page(), (
        "run `python -m vllm_fleet.spec.settings > docs/settings.md`"
    )


@pytest.mark.parametrize("file", settings.FILES)
def test_a_shared_file_is_the_models_and_sets_nothing(file: str) -> None:
    text = (ROOT / f"group_vars/{file}.yml").read_text()
    assert text == settings.group_vars(file), (
        f"run `python -m vllm_fleet.spec.settings {file} > group_vars/{file}.yml`"
    )
    assert yaml.safe_load(text) is None
    assert max(map(len, text.splitlines())) <= 100


def test_every_setting_stands_in_exactly_one_shared_file() -> None:
    wanted = set(paths(HostSettings))
    assert {"models.*.repo", "instances.*.port", "gateway.tls.key", "hub.endpoint"} <= wanted
    named = Counter(path for file in settings.FILES for path in keys(uncommented(file), wanted))
    assert set(named) == wanted
    assert {path: count for path, count in named.items() if count != 1} == {}


@pytest.mark.parametrize("file", settings.FILES)
def test_what_a_shared_file_shows_is_valid_when_uncommented(file: str) -> None:
    HostSettings.model_validate_json(json.dumps(uncommented(file)))


def test_every_setting_is_on_the_page_and_has_a_meaning() -> None:
    page = settings.page()
    for path in paths(HostSettings):
        shown = path.replace("models.*", "models.<name>").replace("instances.*", "instances[]")
        assert f"| `{shown}` |" in page
    for model in (HostSettings, Model, Instance):
        assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize("name", ["prod", "local"])
def test_the_shipped_examples_are_good(name: str) -> None:
    result = check_inventory(str(ROOT / f"inventory/{name}.py"))
    assert result.complaints == ()
    assert result.warnings == ()
    assert result.fleet is not None
    assert any(host.instances for host in result.fleet.hosts)
