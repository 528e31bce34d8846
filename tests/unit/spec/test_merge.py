"""Precedence key by key, whole replacement, and no leak between inventories."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.unit.spec.conftest import Project
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.load import load_fleet

KEYS = ("start_seconds", "drain_seconds", "python", "proxy", "vllm_exclude")
WEAKEST_FIRST = ("all", "prod", "gpu", "fast")  # fast is declared after gpu


def value(rng: random.Random, key: str) -> object:
    number = rng.randint(1, 10_000)
    if key == "proxy":
        return {rng.choice(["http", "https", "no_proxy"]): f"p{number}"}
    if key == "vllm_exclude":
        return [f"x{number}"]
    return f"python{number}" if key == "python" else number


@pytest.mark.parametrize("seed", range(40))
def test_the_strongest_layer_that_has_a_key_gives_it_whole(project: Project, seed: int) -> None:
    rng = random.Random(seed)
    layers = {
        name: {key: value(rng, key) for key in KEYS if rng.random() < 0.4}
        for name in (*WEAKEST_FIRST, "host")
    }
    project.good()
    for name in WEAKEST_FIRST:
        text = "".join(f"{k}: {json.dumps(v)}\n" for k, v in layers[name].items())
        if name == "prod":
            project.good(then=text)
        else:
            project.write(f"group_vars/{name}.yml", text)
    project.write(
        "inventory/prod.py",
        f'gpu = [("gpu-01", {layers["host"]!r}), "gpu-02"]\nfast = ["gpu-01"]\n',
    )
    fleet = load_fleet(str(project.root / "inventory/prod.py"))
    for host, names in (("gpu-01", (*WEAKEST_FIRST, "host")), ("gpu-02", WEAKEST_FIRST[:3])):
        wanted: dict[str, object] = {}
        for name in names:
            wanted |= layers[name]
        got = fleet.host(host).settings.model_dump(mode="json", exclude_defaults=True)
        if "proxy" in wanted:
            assert {k: v for k, v in got["proxy"].items() if v is not None} == wanted["proxy"]
        assert {k: got.get(k) for k in KEYS if k != "proxy" and k in wanted} == {
            k: v for k, v in wanted.items() if k != "proxy"
        }
        assert not {k for k in KEYS if k in got} - set(wanted)


def test_nothing_leaks_from_files_that_are_not_in_use(project: Project) -> None:
    before = load_fleet(str(project.root / "inventory/prod.py"))
    for name in ("local", "demo", "cpu", "staging"):
        project.write(f"group_vars/{name}.yml", "start_seconds: 1\nnonsense: {\n")
    project.write("group_vars/notes.txt", "\t:")
    assert load_fleet(str(project.root / "inventory/prod.py")) == before


def test_two_inventories_of_one_directory_share_all_yml_alone(project: Project) -> None:
    project.write("inventory/lab.py", 'gpu = ["gpu-01"]\n')
    project.write("group_vars/all.yml", "drain_seconds: 7\n")
    project.write("group_vars/lab.yml", "start_seconds: 9\n")
    lab = load_fleet(str(project.root / "inventory/lab.py")).host("gpu-01").settings
    prod = load_fleet(str(project.root / "inventory/prod.py")).host("gpu-01").settings
    assert (lab.drain_seconds, lab.start_seconds, lab.models) == (7, 9, {})
    assert (prod.drain_seconds, prod.start_seconds) == (7, 3600)


def test_a_bad_value_lets_no_weaker_one_through(project: Project) -> None:
    project.write("group_vars/gpu.yml", "instances: none\n")
    with pytest.raises(SpecError) as caught:
        load_fleet(str(project.root / "inventory/prod.py"))
    assert [str(c) for c in caught.value.complaints] == [
        "group_vars/gpu.yml:1:12: instances: must be a list"
    ]
    assert str(caught.value) == str(caught.value.complaints[0])


def test_address_and_hosts(project: Project) -> None:
    project.write(
        "inventory/prod.py",
        'gpu = [("gpu-01", {"ssh_hostname": "10.0.0.1"}), "gpu-02"]\n'
        'gateway = [("gpu-02", {"address": "10.9.9.9"}), "@local"]\n',
    )
    fleet = load_fleet(str(project.root / "inventory/prod.py"))
    assert [(h.name, h.groups, h.address) for h in fleet.hosts] == [
        ("gpu-01", ("gpu", "prod"), "10.0.0.1"),
        ("gpu-02", ("gpu", "gateway", "prod"), "10.9.9.9"),
        ("@local", ("gateway", "prod"), "127.0.0.1"),
    ]
    assert (fleet.inventory, fleet.root) == (
        str(project.root / "inventory/prod.py"),
        str(project.root),
    )


def test_host_data_is_checked_like_a_file(project: Project) -> None:
    project.write(
        "inventory/prod.py",
        'gpu = [\n    ("gpu-01", {"start_seconds": 0, "vllm_version": 0.2}),\n    "gpu-02",\n]\n',
    )
    assert project.complaints() == [
        "inventory/prod.py:2:17: gpu-01.start_seconds: must be a positive integer",
        'inventory/prod.py:2:37: gpu-01.vllm_version: must be a version such as "0.21.0"; '
        'put it in quotes: "0.2"',
    ]


def test_setting_of_a_group_or_misspelt_in_the_inventory(project: Project) -> None:
    project.write(
        "inventory/prod.py",
        'gpu = (["gpu-01", ("gpu-02", {"adress": "x"})], {"ssh_user": "x", "start_seconds": 5})\n'
        'gateway = [("gpu-01", {"_sudo": True, "ssh_port": 2222, "rack": 7})]\n',
    )
    assert project.complaints() == [
        'inventory/prod.py:1:31: gpu-02.adress: no such setting; did you mean "address"?',
        "inventory/prod.py:1:67: gpu.start_seconds: a setting of a group stands in "
        "group_vars/gpu.yml",
    ]


def test_warnings_do_not_refuse(project: Project) -> None:
    project.write("inventory/prod.py", 'gpu = ["gpu-01", "gpu-02"]\nspare = ["gpu-02"]\n')
    project.write("group_vars/spare.yml", "instances: []\n")
    result = project.check()
    assert result.fleet is not None
    assert [str(w) for w in result.warnings] == [
        "group_vars/prod.yml:7:21: instances[0].hosts[1]: gpu-02 takes its instances from "
        "group_vars/spare.yml, so it does not run this one",
        "inventory/prod.py:1:1: no host is in group gateway: clients must ask the instances "
        "themselves",
    ]


def test_yaml_extension_is_named(project: Project) -> None:
    project.write("group_vars/gpu.yaml", "device: cpu\n")
    assert project.complaints() == ["group_vars/gpu.yaml: is never read; rename it to gpu.yml"]


def test_no_group_vars(tmp_path: Path) -> None:
    (tmp_path / "inventory").mkdir()
    inventory = tmp_path / "inventory/prod.py"
    inventory.write_text('gpu = ["a"]\n')
    with pytest.raises(SpecError, match=r"^group_vars: is missing; settings stand beside"):
        load_fleet(str(inventory))


def test_anchors_and_merge_keys(project: Project) -> None:
    project.good(
        ("instances:\n  - name: a\n", "instances:\n  - &a\n    name: a\n"),
        then="  - {<<: *a, name: b, cards: [2, 3], port: 8002}\n",
    )
    fleet = load_fleet(str(project.root / "inventory/prod.py"))
    assert [(i.name, i.model, i.cards, i.port) for i in fleet.host("gpu-02").instances] == [
        ("a", "glm", (0, 1), 8001),
        ("b", "glm", (2, 3), 8002),
    ]


def test_cards_by_kind_are_left_to_the_plan(project: Project) -> None:
    project.good(
        ("[0, 1]", "4 x A100-SXM4-80GB"),
        then="  - {name: b, hosts: [gpu-01], model: glm, cards: 4 x A100-SXM4-80GB, port: 8002}\n",
    )
    assert project.complaints() == []
