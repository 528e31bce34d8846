"""Hosts without internet: what is refused, where they are pointed, what the bundle must hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import ALL, fleet, states, unit
from vllm_fleet import airgap, release
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.onhost import bundle as onhost
from vllm_fleet.operations import host
from vllm_fleet.operations.remote import Script
from vllm_fleet.plan import TOOLS_LOCK, Refusal, plan_fleet
from vllm_fleet.spec.addresses import resolved
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.inputs import read_inputs

GAP = 'vllm_lock: "locks/{version}.txt"\nair_gapped: {bundle: /srv/bundle, host: gw-1}\n'
LOCK = f"vllm==0.32.0 \\\n    --hash=sha256:{'0' * 64}\n"
URL = "http://10.0.0.9:8996"
HELD: dict[str, Any] = {
    "locks": [],
    "models": [],
    "archives": [],
    "systems": {"debian-12-amd64": ["nginx"]},
    "files": {},
}
MODELS = {
    "glm": ("ZhipuAI/GLM-4-9B-0414", "v1"),
    "qwen": ("Qwen/Qwen3-8B", "v2"),
}


def pinned(root: Path) -> None:
    """The lock and the listings of the usual fleet."""
    for folder in ("locks", "listings"):
        (root / folder).mkdir(exist_ok=True)
    (root / "locks/0.32.0.txt").write_text(LOCK)
    (root / "locks/apt-debian-12-amd64.txt").write_text(f"# sha256\n{'d' * 64}\n")
    for name, (repo, revision) in MODELS.items():
        listing = {
            "source": "modelscope",
            "repo": repo,
            "revision": revision,
            "files": [{"path": "model.safetensors", "size": 5, "sha256": "1" * 64}],
        }
        (root / f"listings/{name}@{revision}.json").write_text(json.dumps(listing))


def plans(root: Path, **changes: Any) -> dict[str, HostPlan]:
    pinned(root)
    found = resolved(fleet(root, all=ALL + GAP))
    return plan_fleet(found, states(found, **changes), read_inputs(found))


def complaints(root: Path, more: str = "", **group_vars: str) -> list[str]:
    with pytest.raises(SpecError) as refused:
        fleet(root, all=ALL + GAP + more, **group_vars)
    return [str(one) for one in refused.value.complaints]


def test_everything_comes_from_the_bundle(tmp_path: Path) -> None:
    found = plans(tmp_path)
    gpu = found["gpu-1"]
    assert gpu.tools is not None
    for order in (gpu.tools.order, gpu.releases[0].order):
        index = order["index"]
        assert isinstance(index, dict)
        assert index["index_url"] == f"{URL}/simple/"
        assert not index["extra_index_urls"]
        assert not index["find_links"]
    assert {one.order["endpoint"] for one in gpu.weights} == {URL}
    listed = {file.path: file.content for plan in found.values() for file in plan.files}
    assert f"{URL}/apt/debian-12-amd64/ ./" in listed[airgap.SOURCES]
    texts = "".join(json.dumps(w.order) for w in gpu.weights) + json.dumps(gpu.releases[0].order)
    texts += json.dumps(gpu.tools.order)
    asked = re.findall(r"https?://[^/\"'\s]+", texts.replace(TOOLS_LOCK, ""))
    assert set(asked) == {URL}


def test_python_and_grafana_come_from_the_bundle_too(tmp_path: Path) -> None:
    pinned(tmp_path)
    more = (
        "python_archive: {source: 'https://mirror.example/py.tar.gz', version: '3.12', "
        f"sha256: {'ab' * 32}}}\n"
        "monitoring: {grafana: {apt_source: 'deb https://mirror.example stable main'}}\n"
    )
    found = resolved(fleet(tmp_path, all=ALL + GAP + more))
    plans_ = plan_fleet(found, states(found), read_inputs(found))
    archive = plans_["gpu-1"].releases[0].order["python_archive"]
    assert archive["source"] == f"{URL}/python/3.12-{'ab' * 8}.tar"  # type: ignore[index]
    texts = {file.path: file.content for plan in plans_.values() for file in plan.files}
    assert not [path for path, text in texts.items() if "mirror.example" in str(text)]
    serving = next(plan for plan in plans_.values() if plan.bundle is not None)
    assert serving.bundle is not None
    needs = serving.bundle.order["needs"]
    assert needs["archives"] == {"ab" * 32: "of Python 3.12"}  # type: ignore[index]
    assert "grafana" in plans_["gw-1"].packages
    lacking = onhost.lacking(HELD, needs)  # type: ignore[arg-type]
    assert "archive of Python 3.12" in lacking
    assert "Debian package grafana for debian-12-amd64" in lacking
    assert any(one.startswith("packages of locks/apt-debian-12-amd64.txt") for one in lacking)


def test_a_bundle_for_another_system_is_refused_with_what_to_add() -> None:
    (text,) = onhost.lacking(HELD, {"systems": {"ubuntu-24.04-amd64": ["nginx"]}})
    assert "Debian packages for ubuntu-24.04-amd64" in text
    assert "it has those for debian-12-amd64" in text
    assert "--system ubuntu-24.04-amd64=FILE" in text


def test_packages_without_a_checksum_of_their_list_are_refused(tmp_path: Path) -> None:
    pinned(tmp_path)
    (tmp_path / "locks/apt-debian-12-amd64.txt").write_text("# cut off\n")
    found = resolved(fleet(tmp_path, all=ALL + GAP))
    with pytest.raises(Refusal) as refused:
        plan_fleet(found, states(found, packages=[]), read_inputs(found))
    assert "gpu-1: runs debian-12-amd64, and locks/apt-debian-12-amd64.txt" in str(refused.value)
    assert "`fleet bundle`" in str(refused.value)


def test_variants_name_no_public_index(tmp_path: Path) -> None:
    pinned(tmp_path)
    (tmp_path / "locks/0.32.0.txt").write_text(LOCK.replace("0.32.0", "0.32.0+cu129"))
    found = resolved(fleet(tmp_path, all=ALL + GAP + "vllm_variant: cu129\n"))
    gpu = plan_fleet(found, states(found), read_inputs(found))["gpu-1"]
    assert gpu.releases[0].order["index"]["index_url"] == f"{URL}/simple/"  # type: ignore[index]


def test_one_host_serves_and_answers_the_fleet_alone(tmp_path: Path) -> None:
    nics = {
        "eth0": {"addresses": ["10.0.0.1/24", "192.168.7.1/24"]},
        "docker0": {"addresses": ["172.17.0.1/16"]},
    }
    found = plans(tmp_path, gpu_1={"nics": nics})
    files = {file.path: file.content for file in found["gw-1"].files}
    settings = json.loads(files[airgap.SETTINGS])
    assert settings["address"] == "10.0.0.9"
    assert settings["allow"] == ["10.0.0.1", "10.0.0.2", "10.0.0.9", "192.168.7.1"]
    assert airgap.UNIT_FILE in files
    assert f"{'/opt/vllm/lib'}/bundle.py" in files
    for name in ("gpu-1", "gpu-2"):
        assert found[name].bundle is None
        assert airgap.UNIT_FILE not in {file.path for file in found[name].files}


def test_what_the_bundle_must_hold(tmp_path: Path) -> None:
    bundle = plans(tmp_path)["gw-1"].bundle
    assert bundle is not None
    assert not bundle.held
    needs: Any = bundle.order["needs"]
    tools, _ = airgap.tools_key(TOOLS_LOCK, "3.11.2")
    assert set(needs["locks"]) == {release.lock_sha256(LOCK), tools}
    assert set(needs["listings"].values()) == {"listings/glm@v1.json", "listings/qwen@v2.json"}
    assert {"gcc", "lua-cjson", "prometheus"} <= set(needs["systems"]["debian-12-amd64"])
    stamp = {
        "source": "/srv/bundle",
        "locks": list(needs["locks"]),
        "listings": list(needs["listings"]),
        "packages": list(needs["packages"]),
        "systems": needs["systems"],
    }
    again = plans(tmp_path, gw_1={"bundle": stamp, "units": {airgap.UNIT: unit()}})["gw-1"].bundle
    assert again is not None
    assert again.held
    for key in ("locks", "listings", "packages"):
        less = plans(tmp_path, gw_1={"bundle": {**stamp, key: stamp[key][1:]}})["gw-1"].bundle
        assert less is not None
        assert not less.held
    ubuntu = {"id": "ubuntu", "version": "24.04", "name": "Ubuntu 24.04"}
    pinned(tmp_path)
    (tmp_path / "locks/apt-ubuntu-24.04-amd64.txt").write_text(f"{'e' * 64}\n")
    other = plans(tmp_path, gw_1={"bundle": stamp}, gpu_2={"os": ubuntu})
    assert other["gw-1"].bundle is not None
    assert not other["gw-1"].bundle.held


def test_apt_has_one_source_and_no_proxy(tmp_path: Path) -> None:
    plan = plans(tmp_path)["gpu-2"]
    yielded = host.packages._inner(plan=plan)
    (command,) = [c.get_raw_value() for c in yielded if not isinstance(c, str | Script)]
    for word in (
        f"-o Dir::Etc::SourceList={airgap.SOURCES} ",
        "-o Dir::Etc::SourceParts=/dev/null ",
        "-o Acquire::http::Proxy=DIRECT ",
    ):
        assert command.count(word) == 2, command  # of update and of install
    assert "http_proxy" not in command


def test_a_host_without_a_lock_and_models_without_listings(tmp_path: Path) -> None:
    found = complaints(tmp_path, more="")
    assert any("locks/0.32.0.txt" in one and "does not exist" in one for one in found)
    assert any(one.startswith("group_vars/all.yml:3:3: models.glm: has no frozen") for one in found)
    assert any("models.qwen: has no frozen listing (listings/qwen@v2.json)" in one for one in found)
    with pytest.raises(SpecError) as refused:
        fleet(tmp_path, all=ALL + GAP.splitlines()[1] + "\n")
    assert any("air_gapped: gpu-1, gpu-2: has no lock" in str(c) for c in refused.value.complaints)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("package_index: {index_url: 'https://index.example/simple'}\n", "package_index.index_url"),
        ("package_index: {find_links: ['http://x/']}\n", "package_index.find_links"),
        ("package_index: {extra_index_urls: ['http://x/']}\n", "package_index.extra_index_urls"),
        ("hub: {endpoint: 'http://x'}\n", "hub.endpoint"),
        ("hub: {huggingface_endpoint: 'http://x'}\n", "hub.huggingface_endpoint"),
        ("proxy: {https: 'http://x:3128'}\n", "proxy.https"),
        (
            "gateway: {listen: 443, tls: {acme: {email: a@b.example, domains: [a.example]}}}\n",
            "gateway.tls.acme",
        ),
    ],
)
def test_an_address_outside_is_refused_with_its_place(tmp_path: Path, more: str, key: str) -> None:
    pinned(tmp_path)
    line = (ALL + GAP).count("\n") + 1
    found = complaints(tmp_path, more)
    assert len(found) == 1, found
    assert found[0].startswith(f"group_vars/all.yml:{line}:")
    assert f": {key}: " in found[0]
    assert "nothing comes from elsewhere" in found[0]


def test_the_host_must_be_one_of_the_inventory_and_agree(tmp_path: Path) -> None:
    pinned(tmp_path)
    with pytest.raises(SpecError) as refused:
        fleet(tmp_path, all=ALL + GAP.replace("gw-1", "gw-2"))
    assert [str(c) for c in refused.value.complaints] == [
        'group_vars/all.yml:9:41: air_gapped.host: "gw-2" is no host of inventory/prod.py; did you '
        'mean "gw-1"?'
    ]
    found = complaints(tmp_path, gpu="air_gapped: {bundle: /other, host: gw-1}\n")
    assert "gw-1 has other `air_gapped` settings than gpu-1, gpu-2" in found[0]


def test_without_it_nothing_changes(tmp_path: Path) -> None:
    found = fleet(tmp_path)
    assert airgap.pointed(found) == found
