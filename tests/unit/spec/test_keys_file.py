"""The file of clients' keys is read early, and never repeated."""

from __future__ import annotations

import pytest

from tests.unit.spec.conftest import Project

SHAPE = 'must be a list of {name: "...", key: "..."}'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 'group_vars/gateway.yml:1:18: api_keys.file: "keys.yml" is empty; '),
        ("name: x\n", f"keys.yml:1:1: {SHAPE}"),
        ("- {name: x}\n", f"keys.yml:1:3: {SHAPE}"),
        ("- {name: x, key: 12345}\n", "keys.yml:1:18: the key must be text; put it in quotes"),
        ("- {name: x, key: top secret}\n", "keys.yml:1:18: the key must be visible ASCII"),
        (
            "- {name: x, key: secret}\n- {name: y, key: secret}\n",
            "keys.yml:2:18: the key stands in line 1 already",
        ),
        ("- {name: x, key: 'secret\n", "keys.yml:2:1: is not YAML here"),
    ],
)
def test_bad_keys(project: Project, text: str, wanted: str) -> None:
    project.write("group_vars/gateway.yml", "api_keys: {file: keys.yml}\n")
    project.write("keys.yml", text)
    (line,) = project.complaints()
    assert line.startswith(wanted)
    assert "secret" not in line
    assert "12345" not in line


def test_good_keys(project: Project) -> None:
    project.write("group_vars/gateway.yml", "api_keys: {file: keys.yml}\n")
    project.write("keys.yml", "- {name: chat, key: sk-1}\n- {name: batch, key: sk-2}\n")
    assert project.complaints() == []
