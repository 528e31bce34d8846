"""The client page: addresses, names, and settings in the shape that each client reads."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from click.testing import CliRunner

from tests.unit.fleets import ALL, fleet
from vllm_fleet.cli.status import status
from vllm_fleet.clients import KEY, Page, base_of, page
from vllm_fleet.spec.model import Gateway, HostSettings, HostSpec, Tls

VARS = ALL.replace(
    "aliases: [glm-4]}", "aliases: [glm-4], adapters: {support: {path: /data/support}}}"
)


@pytest.fixture
def found(tmp_path: Path) -> Page:
    return page(fleet(tmp_path, all=VARS))


def snippet(found: Page, client: str) -> str:
    (one,) = [s for s in found.snippets if s.client == client]
    return one.text


def test_address_and_every_name_stand_on_it(found: Page) -> None:
    assert found.bases == ("http://10.0.0.9",)
    assert not found.asks_key
    assert [(n.name, n.kind, n.of) for n in found.names] == [
        ("glm", "model", "glm"),
        ("glm-4", "alias", "glm"),
        ("support", "adapter", "glm"),
        ("qwen", "model", "qwen"),
    ]


@pytest.mark.parametrize(
    ("gateway", "wanted"),
    [
        ({}, "http://10.0.0.9"),
        ({"listen": 8080}, "http://10.0.0.9:8080"),
        ({"keepalived": {"address": "10.0.0.100/24"}}, "http://10.0.0.100"),
        (
            {
                "listen": 443,
                "tls": Tls(certificate="c", key="k", names=("*.example.com", "llm.example.com")),
            },
            "https://llm.example.com",
        ),
        ({"listen": 8443, "tls": Tls(certificate="c", key="k")}, "https://10.0.0.9:8443"),
    ],
)
def test_the_address_is_the_one_that_clients_use(gateway: dict[str, Any], wanted: str) -> None:
    settings = HostSettings(gateway=Gateway.model_validate(gateway))
    spec = HostSpec(name="gw", groups=("gateway",), address="10.0.0.9", settings=settings)
    assert base_of(spec) == wanted


def test_shapes_of_what_is_not_run_are_those_that_clients_read(found: Page) -> None:
    base = "http://10.0.0.9"
    env = json.loads(snippet(found, "Claude Code"))["env"]
    assert env["ANTHROPIC_BASE_URL"] == base  # it appends /v1/messages itself
    assert env["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert env["ANTHROPIC_MODEL"] == "glm"
    assert env["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "qwen"
    assert all(isinstance(value, str) for value in env.values())
    codex = tomllib.loads(snippet(found, "Codex"))
    provider = codex["model_providers"][codex["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (f"{base}/v1", "responses")
    for client, app, endpoint in (
        ("CC Switch, for Claude Code", "claude", base),
        ("CC Switch, for Codex", "codex", f"{base}/v1"),
    ):
        link = urlsplit(snippet(found, client).strip())
        assert (link.scheme, link.netloc, link.path) == ("ccswitch", "v1", "/import")
        query = {key: value[0] for key, value in parse_qs(link.query).items()}
        assert (query["resource"], query["app"]) == ("provider", app)
        assert (query["endpoint"], query["apiKey"], query["model"]) == (endpoint, KEY, "glm")
        assert {"name", "homepage"} <= set(query)
    (model,) = yaml.safe_load(snippet(found, "Continue"))["models"]
    assert (model["apiBase"], model["model"]) == (f"{base}/v1", "glm")
    webui = dict(line.split("=", 1) for line in snippet(found, "Open WebUI").splitlines())
    assert webui["OPENAI_API_BASE_URL"] == f"{base}/v1"


def test_programs_parse(found: Page) -> None:
    for one in found.snippets:
        if one.format == "python":
            compile(one.text, one.client, "exec")
        elif one.format == "sh":
            subprocess.run(["sh", "-n", "-c", one.text], check=True)


def test_every_error_leads_to_an_entry_with_what_to_do(found: Page) -> None:
    assert len(found.errors) >= 8
    assert all(one.cause and one.remedy for one in found.errors)


def test_the_command_asks_no_host_and_says_what_was_not_run(tmp_path: Path) -> None:
    fleet(tmp_path, all=VARS)
    inventory = str(tmp_path / "inventory/prod.py")
    done = CliRunner().invoke(status, [inventory, "--clients"])
    assert done.exit_code == 0, done.output
    assert "http://10.0.0.9/v1" in done.output
    assert "support (adapter on glm)" in done.output
    assert "--- Claude Code  (untested" in done.output
    assert "--- openai-python\n" in done.output
    data = json.loads(CliRunner().invoke(status, [inventory, "--clients", "--json"]).output)
    assert data["bases"] == ["http://10.0.0.9"]


def test_without_a_gateway_there_is_no_address(tmp_path: Path) -> None:
    fleet(tmp_path, inventory='gpu = ["gpu-1", "gpu-2"]\n')
    done = CliRunner().invoke(status, [str(tmp_path / "inventory/prod.py"), "--clients"])
    assert done.exit_code == 1
    assert "no host is in group gateway" in done.output
