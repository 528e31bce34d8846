"""Cards by name."""

from __future__ import annotations

import pytest

from vllm_fleet.sizing.gpus import find, from_smi, names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090-24GB"),
        ("3090", "RTX-3090-24GB"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX-4080-SUPER-16GB"),
        ("NVIDIA GeForce RTX 2080 SUPER", "RTX-2080-SUPER-8GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("NVIDIA L4", "L4-24GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-96GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA GB10", "GB10-128GB"),
    ],
)
def test_names_of_nvidia_smi(text: str, name: str) -> None:
    assert find(text).name == name


def test_every_name_finds_itself() -> None:
    assert [find(n).name for n in names()] == names()


def test_numbers_are_what_torch_sees() -> None:
    gpu = find("47.4 GiB")
    assert (gpu.gib, gpu.known) == (47.4, False)


def test_torch_sees_less_than_nvidia_smi() -> None:
    assert from_smi("NVIDIA H200", 143771).gib == pytest.approx(139.8)
    assert from_smi("NVIDIA H100 80GB HBM3", 81559).gib == pytest.approx(79.19)
