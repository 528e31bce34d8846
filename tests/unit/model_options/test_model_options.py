"""Settings of a model as options of vLLM, and what is refused."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.unit.gateway.fleet import spec
from tests.unit.planned import planned
from vllm_fleet import engine, engine_data, gateway, instance
from vllm_fleet.engine_args import check_args
from vllm_fleet.model_options import given_options, setting_options
from vllm_fleet.planned import Pool
from vllm_fleet.spec.model import Instance, Model

ADAPTERS = {"support": {"path": "/data/a=b/support", "rank": 32}, "sql": {"path": "/data/sql"}}
ALL = {
    "repo": "Qwen/Qwen3-8B",
    "adapters": ADAPTERS,
    "generation_config": {"temperature": 0.7, "top_p": 0.8},
    "reasoning": {"parser": "qwen3", "thinking": False, "budget": True},
}
ONE = Instance(name="a", hosts=("h",), model="qwen", port=8001)


def words(model: Model) -> list[str]:
    found = []
    for name, value in given_options("qwen", model, ONE).items():
        for line in engine.option_words(name, value):
            found += line
    return found


def test_a_model_without_them_gets_no_option() -> None:
    assert setting_options("qwen", Model(repo="a/b")) == {}


@pytest.mark.parametrize("version", [v for v in engine_data.versions() if v >= "0.19"])
def test_every_version_that_knows_them_takes_what_is_written(version: str) -> None:
    assert check_args(version, words(Model.model_validate(ALL, strict=False))) == ()


def test_each_setting_becomes_its_options() -> None:
    given = given_options("qwen", Model.model_validate(ALL, strict=False), ONE)
    assert given["lora-modules"] == [
        {"name": "support", "path": "/data/a=b/support", "base_model_name": "qwen"},
        {"name": "sql", "path": "/data/sql", "base_model_name": "qwen"},
    ]
    assert (given["enable-lora"], given["max-lora-rank"], given["max-loras"]) == (True, 32, 2)
    assert given["override-generation-config"] == {"temperature": 0.7, "top_p": 0.8}
    assert given["reasoning-parser"] == "qwen3"
    assert given["default-chat-template-kwargs"] == {"enable_thinking": False}
    assert given["reasoning-config"] == {
        "reasoning_start_str": "<think>",
        "reasoning_end_str": "</think>",
    }


def test_the_launch_script_quotes_them_and_the_start_checks_the_adapters() -> None:
    model = Model.model_validate(ALL, strict=False)
    one = planned(ALL, args=dict(given_options("qwen", model, ONE)))
    files = {f.path.rpartition(".")[2]: f.content for f in instance.files(one)}
    parts = shlex.split(files["sh"].split("exec ", 1)[1])
    at = parts.index("--lora-modules")
    assert json.loads(parts[at + 1])["path"] == "/data/a=b/support"
    (line,) = [x for x in files["env"].splitlines() if x.startswith("FLEET_ADAPTERS=")]
    assert json.loads(json.loads(line.partition("=")[2])) == ["/data/a=b/support", "/data/sql"]
    assert (
        "FLEET_ADAPTERS" not in {f.path: f.content for f in instance.files(planned())}.popitem()[1]
    )


def test_the_gateway_routes_adapters_by_their_names() -> None:
    model = Model.model_validate(ALL, strict=False)
    one = planned(ALL, args=dict(given_options("qwen", model, ONE)))
    (text,) = [
        file.content
        for file in gateway.files(spec(), [Pool("qwen", (), model, (one,))], {}, ())
        if file.path.endswith("pools.json")
    ]
    assert json.loads(text)["pools"][0]["loras"] == ["sql", "support"]
