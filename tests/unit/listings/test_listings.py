"""Frozen listings: fetched from a hub, kept beside group_vars, given to hosts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import hub, tiny_models
from tests.testbed.hub import Fault
from tests.unit.fleets import fleet, state
from vllm_fleet import listings, weights
from vllm_fleet.configs import complete, freeze
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.inputs import read_inputs
from vllm_fleet.spec.model import Fleet, HostSettings, Hub, Model
from vllm_fleet.weights import Listing

ALL = """\
vllm_version: "0.32.0"
hub: {{endpoint: "{0}", huggingface_endpoint: "{0}", huggingface_token_file: token}}
models:
  glm: {{repo: Tiny/qwen3}}
  other: {{repo: Tiny/qwen3, source: huggingface}}
instances:
  - {{name: glm-a, hosts: [gpu-1, gpu-2], model: glm, cards: [0, 1], port: 8001}}
  - {{name: other-a, hosts: [gpu-1], model: other, cards: [2], port: 8002}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    tiny_models.make(root / "Tiny/qwen3", "qwen3")
    return root


@pytest.fixture
def endpoint(model: Path) -> Iterator[str]:
    with hub.running(model) as address:
        yield address
    hub.switch(model)


def made(root: Path, endpoint: str) -> Fleet:
    (root / "token").write_text("hf_secret\n")
    return fleet(root, all=ALL.format(endpoint))


def test_listings_are_frozen_once_and_given_to_hosts(tmp_path: Path, endpoint: str) -> None:
    found = made(tmp_path, endpoint)
    inputs = read_inputs(found)
    written, failed = freeze(found, inputs)
    assert (written, failed) == (["listings/glm@master.json", "listings/other@main.json"], [])
    assert freeze(found, read_inputs(found)) == ([], [])
    assert read_inputs(found).listings == inputs.listings
    text = (tmp_path / "listings/glm@master.json").read_text()
    assert len(text.splitlines()) == 7 + len(json.loads(text)["files"])  # one file a line
    assert "hf_secret" not in text + (tmp_path / "listings/other@main.json").read_text()
    states = {name: state() for name in ("gpu-1", "gpu-2")}
    order = plan_fleet(found, states, inputs)["gpu-1"].weights
    assert [one.order["listing_file"] for one in order] == written
    assert [one.order["endpoint"] for one in order] == [endpoint] * 2
    assert order[1].order["token_file"] == "/etc/vllm/huggingface.token"
    assert "token_file" not in order[0].order
    other = order[1].order["listing"]
    assert isinstance(other, list)
    assert all(("sha256" in one) != ("git" in one) for one in other)


def test_weights_of_another_listing_are_not_there(tmp_path: Path, endpoint: str) -> None:
    found = made(tmp_path, endpoint)
    inputs = read_inputs(found)
    wanted = weights.wanted("glm", Model(repo="Tiny/qwen3"))
    stamp = {**wanted.identity, "passed": list(weights.needs(wanted)), "intact": True}

    def present(listing: str) -> bool:
        host = state(weights={wanted.stamp: {**stamp, "listing": listing}})
        return plan_fleet(found, {"gpu-2": host}, inputs)["gpu-2"].weights[0].present

    assert present("")
    freeze(found, inputs)
    assert not present("")
    assert not present(inputs.listings["listings/other@main.json"].digest)
    assert present(inputs.listings["listings/glm@master.json"].digest)


def test_the_config_of_a_hugging_face_model_is_fetched(tmp_path: Path, endpoint: str) -> None:
    found = made(tmp_path, endpoint)
    written, failed = complete(found, {}, read_inputs(found))
    assert (written, failed) == (["configs/glm@master.json", "configs/other@main.json"], [])


@pytest.mark.parametrize(
    ("source", "fault", "said"),
    [
        ("modelscope", Fault("error"), "answers 500"),
        ("modelscope", Fault("dead"), "gives no listing"),
        ("modelscope", Fault("no_sha256", "*.safetensors"), "without sha256"),
        ("huggingface", Fault("no_sha256", "*.safetensors"), "without sha256"),
    ],
)
def test_a_hub_that_fails_is_said(
    tmp_path: Path, model: Path, endpoint: str, source: str, fault: Fault, said: str
) -> None:
    hub.switch(model, fault)
    hubs = Hub(endpoint=endpoint, huggingface_endpoint=endpoint)
    wanted = Model(repo="Tiny/qwen3", source=source)  # type: ignore[arg-type]
    with pytest.raises(listings.ListingError, match=said) as refused:
        listings.fetch("glm", wanted, HostSettings(hub=hubs), tmp_path)
    assert "model glm" in str(refused.value)


@pytest.mark.parametrize("source", ["modelscope", "huggingface"])
def test_an_unknown_revision_is_said(tmp_path: Path, endpoint: str, source: str) -> None:
    hubs = Hub(endpoint=endpoint, huggingface_endpoint=endpoint)
    wanted = Model(repo="Tiny/qwen3", revision="v9", source=source)  # type: ignore[arg-type]
    with pytest.raises(listings.ListingError, match=r"v9.*check.*revision"):
        listings.fetch("glm", wanted, HostSettings(hub=hubs), tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no readable JSON"),
        ('{"files": []}', "is no listing"),
        (
            '{"source": "modelscope", "repo": "Tiny/old", "revision": "master", "files": []}',
            "is of Tiny/old at master",
        ),
    ],
)
def test_a_damaged_or_foreign_listing_is_refused(
    tmp_path: Path, endpoint: str, text: str, said: str
) -> None:
    found = made(tmp_path, endpoint)
    (tmp_path / "listings").mkdir()
    (tmp_path / "listings/glm@master.json").write_text(text)
    with pytest.raises(SpecError, match=said) as refused:
        read_inputs(found)
    assert "listings/glm@master.json" in str(refused.value)


def test_the_checksum_of_a_listing_is_of_its_files_in_any_order() -> None:
    files = [
        {"path": "a", "size": 1, "sha256": hashlib.sha256(b"a").hexdigest()},
        {"path": "b", "size": 2, "git": "0" * 40},
    ]
    one = Listing("", tuple(files)).digest
    assert Listing("", tuple(files[::-1])).digest == one
    assert Listing("", ({**files[0], "size": 3}, files[1])).digest != one
