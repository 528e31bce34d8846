"""What each host is asked: only what concerns it, with a key that holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.sound import GATEWAY, NOW
from tests.unit.fleets import ALL, fleet
from vllm_fleet.doctor.questions import question, served_names, usable_key, watched
from vllm_fleet.spec.inputs import read_inputs
from vllm_fleet.spec.model import ApiKey, digest_of


def asked(root: Path, host: str, keys: str, **more: Any) -> dict[str, Any]:
    (root / "secrets").mkdir(exist_ok=True)
    (root / "secrets/keys.yml").write_text(keys)
    made = fleet(root, gateway=GATEWAY)
    return question(made, made.host(host), read_inputs(made), NOW, **more)


KEY = '- {name: app, key: "sk-1"}\n'


def test_a_gpu_host_is_asked_of_its_instances_and_a_gateway_of_every_pool(tmp_path: Path) -> None:
    gpu = asked(tmp_path, "gpu-1", KEY)
    assert [(one["name"], one["port"]) for one in gpu["instances"]] == [
        ("glm-a", 8001),
        ("qwen-a", 8002),
    ]
    assert gpu["stamps"] == [
        "/opt/vllm/models/glm/v1/.verified.json",
        "/opt/vllm/models/qwen/v2/.verified.json",
    ]
    assert gpu["gateway"] is None
    assert gpu["prometheus"] is None
    gateway = asked(tmp_path, "gw-1", KEY)
    assert gateway["instances"] == []
    assert gateway["prometheus"] == 9090
    assert gateway["gateway"]["models"] == {"glm": "chat", "qwen": "chat"}
    assert gateway["gateway"]["reach"]["gpu-2/glm-a"] == ["10.0.0.2", 8001]
    assert gateway["gateway"]["key"] == "sk-1"


def test_no_key_goes_to_a_host_that_is_no_gateway(tmp_path: Path) -> None:
    assert "sk-1" not in str(asked(tmp_path, "gpu-1", KEY, key="sk-1"))


def test_a_key_for_some_models_asks_for_these(tmp_path: Path) -> None:
    keys = '- {name: part, key: "sk-2", models: [glm-4]}\n'
    gateway = asked(tmp_path, "gw-1", keys)["gateway"]
    assert (gateway["key"], gateway["models"]) == ("sk-2", {"glm": "chat"})


def test_a_key_that_is_given_asks_where_keys_are_kept_hashed(tmp_path: Path) -> None:
    keys = f"- {{name: app, sha256: {digest_of('sk-3')}}}\n"
    assert asked(tmp_path, "gw-1", keys)["gateway"]["key"] == ""
    assert asked(tmp_path, "gw-1", keys, key="sk-3")["gateway"]["key"] == "sk-3"


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ([], None),
        ([ApiKey(name="a", key="1", expires="2026-11-01")], None),  # has expired
        ([ApiKey(name="a", sha256="0" * 64)], None),
        ([ApiKey(name="a", key="1", models=("m",)), ApiKey(name="b", key="2")], "b"),
        ([ApiKey(name="a", key="1", expires="2030-01-01")], "a"),
    ],
)
def test_the_key_is_one_that_holds_and_may_use_most(keys: list[ApiKey], chosen: str | None) -> None:
    found = usable_key(tuple(keys), NOW)
    assert (found.name if found else None) == chosen


def test_answers_have_their_share_of_a_hosts_time(tmp_path: Path) -> None:
    assert asked(tmp_path, "gpu-1", KEY, seconds=60)["seconds"] == 12
    assert asked(tmp_path, "gpu-1", KEY, seconds=3600)["seconds"] == 15


def test_ports_that_others_need_and_names_with_adapters(tmp_path: Path) -> None:
    text = ALL.replace("revision: v2}", "revision: v2, adapters: {support: {path: /data/a}}}")
    found = fleet(tmp_path, all=text)
    assert watched(found, found.host("gpu-1")) == [8001, 8002, 9100, 9146]
    assert watched(found, found.host("gw-1")) == [80, 9100, 9145]
    assert served_names(found) == {"glm": {"glm", "glm-4"}, "qwen": {"qwen", "support"}}
