"""The file of clients' keys is read early, and never repeated."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.unit.spec.conftest import Project
from vllm_fleet.spec.keys_file import read_keys
from vllm_fleet.spec.model import ApiKey, moment

SHAPE = 'must be a list of {name: "...", key: "..."}'
DIGEST = hashlib.sha256(b"secret").hexdigest()
DATE = 'must be a date such as "2030-12-31", or a time such as "2030-12-31T18:00:00+08:00"'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 'group_vars/gateway.yml:1:18: api_keys.file: "keys.yml" is empty; '),
        ("- " * 2000 + "x\n", "keys.yml:1:1: is nested too deeply"),
        ("- {name: x, key: secret}\n---\n- {name: y, key: z}\n", "keys.yml:2:1: is not YAML here"),
        ("- {name: x, key: secret, ? [secret] : y}\n", "keys.yml:1:28: YAML takes this for some"),
        ("# none\n", f"keys.yml:1:1: {SHAPE}"),
        ("name: x\n", f"keys.yml:1:1: {SHAPE}"),
        ("- x\n", f"keys.yml:1:3: [0]: {SHAPE}"),
        ("- {name: x}\n", "keys.yml:1:3: [0]: has no key; give `key`, or `sha256`"),
        ("- {key: secret}\n", "keys.yml:1:3: [0].name: is missing; it must be at most 64 visible"),
        (
            "- {name: x, key: 12345}\n",
            "keys.yml:1:18: [0].key: must be visible ASCII without spaces; put it in quotes",
        ),
        (
            "- {name: x, key: top secret}\n",
            "keys.yml:1:18: [0].key: must be visible ASCII without spaces",
        ),
        ("- name: x\n  key: !secret\n", "keys.yml:2:8: YAML takes this for something else"),
        (
            "- {name: x, key: secret}\n- {name: y, key: secret}\n",
            "keys.yml:2:18: [1].key: this key stands in line 1 already",
        ),
        (
            f"- {{name: x, key: secret}}\n- {{name: y, sha256: {DIGEST.upper()}}}\n",
            "keys.yml:2:21: [1].sha256: this key stands in line 1 already",
        ),
        (
            "- {name: x, key: secret}\n- {name: x, key: secret2}\n",
            "keys.yml:2:10: [1].name: stands in line 1 already",
        ),
        (
            f"- {{name: x, key: secret, sha256: {DIGEST}}}\n",
            "keys.yml:1:26: [0].sha256: key and sha256 both stand here; keep one",
        ),
        (
            "- {name: x, sha256: secret}\n",
            "keys.yml:1:21: [0].sha256: must be a SHA-256 in hex, 64 digits",
        ),
        (
            "- {name: x, key: secret, key: secret}\n",
            "keys.yml:1:26: [0].key: stands twice, in lines 1 and 1",
        ),
        (
            "- {name: x, key: secret, expire: 2030-01-01}\n",
            'keys.yml:1:26: [0].expire: no such setting; did you mean "expires"?',
        ),
        (
            "- {name: x, key: secret, tokens-per-minute: 5}\n",
            "keys.yml:1:26: [0].tokens-per-minute: no such setting; did you mean "
            '"tokens_per_minute"?',
        ),
        (
            "- {name: x, key: secret, owner: y}\n",
            "keys.yml:1:26: [0].owner: no such setting; there are name, key, sha256, expires, ",
        ),
        (
            "- {name: x, key: secret, expires: 2030-02-30}\n",
            f"keys.yml:1:35: [0].expires: {DATE}",
        ),
        ("- {name: x, key: secret, expires: soon}\n", f"keys.yml:1:35: [0].expires: {DATE}"),
        ("- {name: x, key: secret, expires: 2030}\n", f"keys.yml:1:35: [0].expires: {DATE}"),
        (
            "- {name: x, key: secret, models: [air-fats]}\n",
            'keys.yml:1:35: [0].models[0]: "air-fats" is no model or alias of this inventory; did '
            'you mean "air-fast"?',
        ),
        (
            "- {name: x, key: secret, models: [other]}\n",
            'keys.yml:1:35: [0].models[0]: "other" is no model or alias of this inventory; there '
            "are glm, air-fast",
        ),
        ("- {name: x, key: secret, models: []}\n", "keys.yml:1:34: [0].models: must not be empty"),
        ("- {name: x, key: secret, models: glm}\n", "keys.yml:1:34: [0].models: must be a list"),
        (
            "- {name: x, key: secret, concurrent: 0}\n",
            "keys.yml:1:38: [0].concurrent: must be a positive integer",
        ),
        (
            '- {name: x, key: secret, requests_per_minute: "60"}\n',
            "keys.yml:1:47: [0].requests_per_minute: must be a positive integer; take the quotes "
            "away: 60",
        ),
        (
            "- {name: x, key: secret, tokens_per_minute: 1_000}\n",
            "keys.yml:1:45: [0].tokens_per_minute: YAML reads 1_000 as the number 1000; write 1000",
        ),
        ("- {name: x, key: 'secret\n", "keys.yml:2:1: is not YAML here"),
    ],
)
def test_bad_keys(project: Project, text: str, wanted: str) -> None:
    project.good(("Air\n", "Air\n    aliases: [air-fast]\n"))
    project.write("group_vars/gateway.yml", "api_keys: {file: keys.yml}\n")
    project.write("keys.yml", text)
    (line,) = project.complaints()
    assert line.startswith(wanted)
    assert "secret" not in line
    assert "12345" not in line


def test_every_mistake_in_one_go(project: Project) -> None:
    project.write("group_vars/gateway.yml", "api_keys: {file: keys.yml}\n")
    project.write("keys.yml", "- {name: x, key: a b, concurrent: -1}\n- {name: y, bogus: 1}\n")
    assert [line.split(" ")[0] for line in project.complaints()] == [
        "keys.yml:1:18:",
        "keys.yml:1:35:",
        "keys.yml:2:3:",
        "keys.yml:2:13:",
    ]


def test_no_word_of_unknown_models_where_models_are_wrong(project: Project) -> None:
    project.good(("models:\n", "models:\n  gl m: {repo: a/b}\n"))
    project.write("group_vars/gateway.yml", "api_keys: {file: keys.yml}\n")
    project.write("keys.yml", "- {name: x, key: secret, models: [glm, gl m]}\n")
    assert not [line for line in project.complaints() if line.startswith("keys.yml")]


@pytest.mark.parametrize(
    "modules", ["law=/m/law", "[law=/m/law]", '[\'{"name": "law", "path": "/m/law"}\']']
)
def test_a_key_may_be_for_an_adapter(project: Project, modules: str) -> None:
    project.good(("Air\n", f"Air\n    vllm_args: {{enable-lora: true, lora-modules: {modules}}}\n"))
    project.write("group_vars/gateway.yml", "api_keys: {file: keys.yml}\n")
    project.write("keys.yml", "- {name: x, key: secret, models: [law]}\n")
    assert project.complaints() == []


def test_good_keys(project: Project) -> None:
    project.good(("Air\n", "Air\n    aliases: [air-fast]\n"))
    project.write("group_vars/gateway.yml", "api_keys: {file: keys.yml}\n")
    project.write("keys.yml", "- {name: chat, key: sk-1}\n- {name: batch, key: sk-2}\n")
    assert project.complaints() == []
    path = project.write(
        "keys.yml",
        f"- name: a\n  sha256: {DIGEST}\n  expires: 2030-12-31\n  models: [glm, air-fast]\n"
        "- {name: b, key: x, expires: 2030-12-31 18:00, requests_per_minute: 60,\n"
        "   tokens_per_minute: 1000, concurrent: 2}\n",
    )
    assert project.complaints() == []
    a, b = read_keys(path, "keys.yml").keys
    assert (a.digest, a.models) == (DIGEST, ("glm", "air-fast"))
    assert (b.requests_per_minute, b.tokens_per_minute, b.concurrent) == (60, 1000, 2)
    assert (a.ends, b.ends) == (moment("2031-01-01T00:00"), moment("2030-12-31T18:00:00Z"))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "keys.yml"
    path.write_bytes(b"\xef\xbb\xbf- {name: x, key: y}\n")
    assert read_keys(path, "keys.yml").keys == (ApiKey(name="x", key="y"),)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01", 86400),
        ("1970-01-01T00:00", 0),
        ("1970-01-01 00:01:00Z", 60),
        ("1970-01-01T08:00:00+08:00", 0),
    ],
)
def test_moments(text: str, seconds: int) -> None:
    assert moment(text) == seconds


@pytest.mark.parametrize("text", ["", "20301231", "2030-12-31T", "2030-12-31T24:61", "2030-W01-1"])
def test_no_moments(text: str) -> None:
    with pytest.raises(ValueError, match="must be a date such as"):
        moment(text)
