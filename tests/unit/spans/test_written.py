"""Spans as an operator writes them: what comes of them, and every mistake with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_fleet.spec.load import Result, check_inventory
from vllm_fleet.spec.model import Span
from vllm_fleet.spec.spans import degrees

INVENTORY = """\
gpu = ["gpu-01", "gpu-02", "gpu-03"]
gateway = ["gw-01"]
"""
HEAD = """\
vllm_version: "0.32.0"
models:
  glm: {repo: ZhipuAI/GLM-4.6}
instances:
"""


def check(root: Path, *instances: str, head: str = HEAD, **files: str) -> Result:
    """What is found in a file of these instances, the first of which stands in line 5."""
    for folder in ("inventory", "group_vars"):
        (root / folder).mkdir(exist_ok=True)
    (root / "inventory" / "prod.py").write_text(INVENTORY)
    listed = "".join(f"  - {{{one}}}\n" for one in instances)
    for name, text in {"gpu": head + listed, **files}.items():
        (root / "group_vars" / f"{name}.yml").write_text(text)
    return check_inventory(str(root / "inventory" / "prod.py"))


BIG = "name: big, hosts: [gpu-01, gpu-02], model: glm, cards: [0, 1, 2, 3], port: 8001, "


@pytest.mark.parametrize(
    ("span", "hosts", "cards", "expected"),
    [
        (Span(), 2, 8, (8, 2)),  # TP inside a host and PP across
        (Span(), 2, 0, (1, 2)),  # hosts without cards
        (Span(pipeline_parallel=1), 2, 8, (16, 1)),
        (Span(tensor_parallel=16), 2, 8, (16, 1)),
        (Span(tensor_parallel=4), 2, 8, (4, 4)),
        (Span(data_parallel=2), 2, 8, (8, 1)),
        (Span(data_parallel=2), 4, 8, (8, 2)),
        (Span(data_parallel=4), 2, 8, (4, 1)),
        (Span(data_parallel=16), 2, 8, (1, 1)),
    ],
)
def test_cards_are_shared_as_vllm_counts_them(
    span: Span, hosts: int, cards: int, expected: tuple[int, int]
) -> None:
    assert degrees(span, hosts, cards) == expected


def test_a_span_is_good(tmp_path: Path) -> None:
    assert check(tmp_path, BIG + "span: {}").complaints == ()


GOOD = "name: a, hosts: [gpu-01], model: glm, cards: [4], "
MISTAKES = {
    "one host": (
        ["name: big, hosts: [gpu-01], model: glm, cards: [0], port: 8001, span: {}"],
        "gpu.yml:5:70: instances[0].span: one server over several hosts needs two `hosts` or "
        "more; take `span` away",
    ),
    "product": (
        [BIG + "span: {tensor_parallel: 3}"],
        "gpu.yml:5:87: instances[0].span: tensor_parallel 3 x pipeline_parallel 2 x "
        "data_parallel 1 = 6, and 2 hosts with 4 cards each are 8: change these, or `hosts`",
    ),
    "copies": (
        [BIG + "span: {data_parallel: 3}"],
        "gpu.yml:5:87: instances[0].span: data_parallel 3 cannot be divided over 2 hosts with 4 "
        "cards each: take as many copies as hosts, or a number that divides the hosts or is a "
        "multiple of them",
    ),
    "uneven cards": (
        [BIG + "span: {cards: {gpu-02: [0, 1]}}"],
        "gpu.yml:5:87: instances[0].span: vLLM needs as many cards on each host; here: gpu-01 4, "
        "gpu-02 2",
    ),
    "cards of a stranger": (
        [BIG + "span: {cards: {gpu-03: [0, 1, 2, 3]}}"],
        'gpu.yml:5:102: instances[0].span.cards.gpu-03: "gpu-03" is none of its hosts (gpu-01, '
        "gpu-02)",
    ),
    "card twice": (
        [BIG + "span: {cards: {gpu-02: [1, 1, 2, 3]}}"],
        "gpu.yml:5:101: instances[0].span.cards: gpu-02: names one card twice",
    ),
    "no address": (
        [BIG + "span: {addresses: {gpu-02: fabric}}"],
        'gpu.yml:5:114: instances[0].span.addresses.gpu-02: must be an IP address such as "10.1.'
        '0.11"',
    ),
    "one address": (
        [BIG + 'span: {addresses: {gpu-01: "10.1.0.1", gpu-02: "10.1.0.1"}}'],
        "gpu.yml:5:134: instances[0].span.addresses.gpu-02: 10.1.0.1 is that of gpu-01 already",
    ),
    "its own port": (
        [BIG + "span: {watch_port: 8001}"],
        "gpu.yml:5:87: instances[0].span: watch_port: port 8001 is its `port` already",
    ),
    "a port of another": (
        [BIG + "span: {}", GOOD + "port: 29501"],
        "gpu.yml:6:62: instances[1].port: port 29501 of gpu-01 is taken by big-r0 "
        "(group_vars/gpu.yml:5)",
    ),
    "a card of another": (
        [BIG + "span: {}", "name: a, hosts: [gpu-02], model: glm, cards: [3], port: 8002"],
        "gpu.yml:6:52: instances[1].cards[0]: card 3 of gpu-02 is taken by big-r1 "
        "(group_vars/gpu.yml:5)",
    ),
    "an option of it": (
        [BIG + "span: {}, vllm_args: {nnodes: 2}"],
        "gpu.yml:5:109: instances[0].vllm_args.nnodes: is set by its `span`; write it there",
    ),
    "ray without ray": (
        [BIG + "span: {executor: ray}"],
        "gpu.yml:5:104: instances[0].span.executor: gpu-01: no Ray in its release, and no vLLM "
        'depends on it: add it to vllm_extra, such as vllm_extra: ["ray==2.60.0"], and make the '
        "lock again (`fleet lock`)",
    ),
    "an executor that is none": (
        [BIG + "span: {executor: mpi}"],
        'gpu.yml:5:104: instances[0].span.executor: must be "mp" or "ray"',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_at_its_place(tmp_path: Path, mistake: str) -> None:
    instances, expected = MISTAKES[mistake]
    told = [str(one) for one in check(tmp_path, *instances).complaints]
    assert f"group_vars/{expected}" in told


def test_tensor_parallel_over_hosts_is_told_to_be_slow(tmp_path: Path) -> None:
    found = check(tmp_path, BIG + "span: {pipeline_parallel: 1}")
    assert found.complaints == ()
    assert any("every layer waits for the network" in str(one) for one in found.warnings)


def test_the_split_of_a_model_is_for_instances_without_a_span(tmp_path: Path) -> None:
    head = HEAD.replace("GLM-4.6}", "GLM-4.6, vllm_args: {tensor-parallel-size: 4}}")
    assert check(tmp_path, BIG + "span: {}", head=head).complaints == ()


def test_hosts_of_a_span_must_be_alike(tmp_path: Path) -> None:
    inventory = INVENTORY.replace('"gpu-02"', '("gpu-02", {"vllm_variant": "cu129"})')
    check(tmp_path, BIG + "span: {}")
    (tmp_path / "inventory" / "prod.py").write_text(inventory)
    told = [str(one) for one in check_inventory(str(tmp_path / "inventory/prod.py")).complaints]
    assert any(
        "gpu-02 differs from gpu-01 in vllm_variant: the ranks of a span must be alike" in one
        for one in told
    ), told
