"""``fleet cards`` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.cards.made import gpus, matrix, uniform, with_lost
from vllm_fleet.cli.cards import cards


def run(folder: Path, arguments: list[str], **texts: str) -> tuple[int, str]:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    result = CliRunner().invoke(
        cards, [a.replace("@", f"{folder}/") for a in arguments], catch_exceptions=False
    )
    return result.exit_code, result.output


def test_json(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        ["--gpus", "@g.txt", "--topo", "@t.txt", "--json"],
        g=gpus(2),
        t=matrix(uniform(2, "NV12")),
    )
    assert code == 0
    assert json.loads(output) == {
        "groups": [
            {
                "gpus": [0, 1],
                "name": "NVIDIA A100-SXM4-80GB",
                "memory_mib": 81920,
                "link": "NV12",
                "vendor": "nvidia",
            }
        ],
        "left_out": [],
        "warnings": [],
    }


def test_a_card_left_out_is_a_finding(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        ["--gpus", "@g.txt", "--topo", "@t.txt"],
        g=gpus(4),
        t=matrix(with_lost(4, "NV18", 2, "SYS")),
    )
    assert code == 1
    assert "GPU2 is left out: its NVLink is broken" in output
    assert "NVIDIA A100-SXM4-80GB" in output


def test_processes_of_others(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        ["--gpus", "@g.txt", "--topo", "@t.txt", "--apps", "@a.txt", "--json"],
        g=gpus(2),
        t=matrix(uniform(2, "NV12")),
        a="gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-00000001, 7, train, 9000 MiB\n",
    )
    assert code == 1
    found = json.loads(output)
    assert [g["gpus"] for g in found["groups"]] == [[0]]
    assert "train (pid 7)" in found["left_out"][0]["why"]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, as_json: bool) -> None:
    code, output = run(
        tmp_path,
        ["--gpus", "@g.txt", *(["--json"] if as_json else [])],
        g="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
    )
    assert code == 1
    said = json.loads(output)["warnings"][0] if as_json else output
    assert f"{tmp_path}/g.txt: nvidia-smi failed: the NVIDIA kernel module is not loaded" in said


def test_outputs_of_two_makers_stay_apart(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        ["--gpus", "@g.txt", "--gpus", "@r.txt", "--topo", "@t.txt", "--json"],
        g=gpus(2),
        t=matrix(uniform(2, "NV12")),
        r="device,Card Series,VRAM Total Memory (B)\ncard0,AMD Instinct MI210,68702699520\n",
    )
    assert code == 0
    assert [(g["vendor"], g["gpus"]) for g in json.loads(output)["groups"]] == [
        ("nvidia", [0, 1]),
        ("amd", [0]),
    ]


def test_wrong_usage(tmp_path: Path) -> None:
    assert run(tmp_path, [])[0] == 2
    assert run(tmp_path, ["--gpus", "@absent.txt"])[0] == 2
