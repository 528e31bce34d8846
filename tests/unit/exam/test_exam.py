"""Verdicts on hosts: what stops a deploy, what is only said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cards.made import gpus, matrix, uniform, with_lost
from tests.unit.fleets import ALL, CARDS, fleet, state, unit
from tests.unit.shared_data import files, needs_shared_data
from vllm_fleet.exam import Verdict, examine, look
from vllm_fleet.spec.inputs import Inputs
from vllm_fleet.spec.model import HostSpec

HEADER, *ROWS = CARDS.splitlines()


def host(root: Path, text: str = ALL, name: str = "gpu-1") -> HostSpec:
    return fleet(root, all=text).host(name)


def cards(**changes: Any) -> dict[str, Any]:
    return {"cards": {**state().cards, **changes}}


def verdicts(
    root: Path, text: str = ALL, inputs: Inputs | None = None, **changes: Any
) -> tuple[Verdict, ...]:
    return examine(host(root, text), state(**changes), {}, inputs)


def of(found: tuple[Verdict, ...], level: str) -> list[str]:
    return [f"{v.what}: {v}" for v in found if v.level == level]


def test_a_sound_host_is_ok_in_everything(tmp_path: Path) -> None:
    found = verdicts(tmp_path)
    assert {v.level for v in found} == {"ok"}
    assert {"system", "glibc", "python", "memory", "disk", "driver", "card 0", "links"} <= {
        v.what for v in found
    }


def test_an_unfit_host_gets_no_further_verdicts(tmp_path: Path) -> None:
    found = verdicts(tmp_path, user="ops", **cards(error="dead", csv=""))
    assert [v.what for v in found] == ["access", "system"]


def test_a_gateway_is_not_asked_for_cards(tmp_path: Path) -> None:
    spec = fleet(tmp_path).host("gw-1")
    found = examine(spec, state(**cards(present=False, csv="")))
    assert [v.what for v in found] == ["system"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "3.9.2"}, ("python", "3.9.2", "`python`")),
        ({"glibc": "2.17"}, ("glibc", "2.17", "Debian 12")),
        (
            cards(csv=CARDS.replace("580.95.05", "550.54.14")),
            ("driver", "580", "550.54.14", "0.19.1"),
        ),
        (
            cards(csv=CARDS.replace(" 8.9,", " 7.0,").replace("L40S", "V100")),
            ("kernels", "glm-a", "7.0"),
        ),
        (
            cards(
                error="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
                "driver. Make sure that the latest NVIDIA driver is installed.",
                csv="",
            ),
            ("driver", "couldn't communicate", "modprobe nvidia"),
        ),
        (cards(nvswitches=4), ("fabric manager", "802", "580.95.05")),
        (
            {
                **cards(nvswitches=4),
                "units": {"nvidia-fabricmanager.service": unit()},
                "packages": {"nvidia-fabricmanager-570": "570.86.15-1"},
            },
            ("fabric manager", "570.86.15", "580.95.05"),
        ),
    ],
)
def test_what_no_instance_can_run_on_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused = of(verdicts(tmp_path, **changes), "refused")
    assert refused
    for word in words:
        assert word in refused[0], refused


def test_a_matching_fabric_manager_is_ok(tmp_path: Path) -> None:
    found = verdicts(
        tmp_path,
        **cards(nvswitches=4),
        units={"nvidia-fabricmanager.service": unit()},
        packages={"nvidia-fabricmanager-580": "580.95.05-1"},
    )
    assert not of(found, "refused")


def test_a_build_for_cuda_12_runs_on_an_older_driver(tmp_path: Path) -> None:
    older = cards(csv=CARDS.replace("580.95.05", "550.54.14"))
    index = "package_index: {extra_index_urls: ['https://wheels.example/cu129']}\n"
    assert of(verdicts(tmp_path, **older), "refused")
    assert not of(verdicts(tmp_path, ALL + index, **older), "refused")
    too_old = cards(csv=CARDS.replace("580.95.05", "515.65.01"))
    assert of(verdicts(tmp_path, ALL + index, **too_old), "refused")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory": {"total_mib": 8000, "available_mib": 7000}}, ("memory", "8 GiB")),
        (
            {"disks": {"/opt/vllm": {"free_mib": 5 * 1024, "device": 1}}},
            ("disk", "5 GiB", "make room"),
        ),
        (cards(csv=CARDS.replace("Enabled", "Disabled")), ("persistence", "nvidia-persistenced")),
        (
            {"kernel_log": ["[12.3] NVRM: Xid (PCI:0000:11:00): 63, pid=1, row remapped"] * 2},
            ("kernel log: card 1: Xid 63, 2 times since boot", "reset the card"),
        ),
        (
            {"kernel_log": ["AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:41:00.0]"]},
            ("IO_PAGE_FAULT", "iommu=pt"),
        ),
        (
            {
                "rdma": {
                    "mlx5_0:1": {"state": "ACTIVE", "rate": "400 Gb/sec"},
                    "mlx5_1:1": {"state": "DOWN", "rate": ""},
                }
            },
            ("rdma", "mlx5_1:1 has no link", "cable"),
        ),
        (
            {"units": {"vllm@glm-a.service": unit(LimitMEMLOCK="65536")}},
            ("memlock", "65536", "systemctl cat vllm@glm-a.service"),
        ),
    ],
)
def test_what_is_odd_is_a_warning_with_a_remedy(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    found = verdicts(tmp_path, **changes)
    assert not of(found, "refused")
    (warning,) = of(found, "warning")
    for word in words:
        assert word in warning


def test_errors_that_programs_cause_say_nothing_of_the_card(tmp_path: Path) -> None:
    log = ["[1.0] NVRM: Xid (PCI:0000:11:00): 31, pid=77, MMU Fault", "[2.0] eth0: link up"]
    assert not of(verdicts(tmp_path, kernel_log=log), "warning")


PCIE = ", pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.current, pcie.link.width.max"


def with_pcie(*cells: str) -> dict[str, Any]:
    lines = [HEADER + PCIE, *(f"{row}, {cell}" for row, cell in zip(ROWS, cells, strict=True))]
    return cards(csv="\n".join(lines))


def test_a_slow_generation_is_idle_and_a_narrow_link_is_a_fault(tmp_path: Path) -> None:
    found = verdicts(tmp_path, **with_pcie(*["1, 4, 16, 16"] * 3, "1, 4, 8, 16"))
    (warning,) = of(found, "warning")
    assert warning.startswith("card 3: ")
    assert "8 of 16 PCIe lanes" in warning


def eight(links: list[list[str]], **changes: Any) -> dict[str, Any]:
    found = gpus(8, used=changes.pop("used", None))
    extra = ["compute_cap, driver_version"] + ["8.0, 580.95.05"] * 8
    csv = "\n".join(f"{a}, {b}" for a, b in zip(found.splitlines(), extra, strict=True))
    return cards(csv=csv, topo=matrix(links), **changes)


WHOLE = (
    ALL.replace("cards: [0, 1]", "cards: [0, 1, 2, 3, 4, 5, 6, 7]")
    .replace("  - {name: qwen-a, hosts: [gpu-1], model: qwen, cards: [2], port: 8002}\n", "")
    .replace("  qwen: {repo: Qwen/Qwen3-8B, revision: v2}\n", "")
)
HALF = WHOLE.replace("2, 3, 4, 5, 6, 7]", "2, 3]")


def test_a_card_that_lost_its_links_is_refused_to_who_wants_it_and_else_left_out(
    tmp_path: Path,
) -> None:
    broken = eight(with_lost(8, "NV18", 5, "SYS"))
    (refused,) = of(verdicts(tmp_path, WHOLE, **broken), "refused")
    assert refused.startswith("card 5: card 5 of instance glm-a: its NVLink is broken: SYS")
    found = verdicts(tmp_path, HALF, **broken)
    assert not of(found, "refused")
    (warning,) = [w for w in of(found, "warning") if w.startswith("card 5: ")]
    assert "left out of the groups" in warning


def test_a_mig_card_is_refused_to_who_wants_it(tmp_path: Path) -> None:
    csv = "\n".join(
        [HEADER + ", mig.mode.current", ROWS[0] + ", Enabled", *(r + ", [N/A]" for r in ROWS[1:])]
    )
    (refused,) = of(verdicts(tmp_path, **cards(csv=csv)), "refused")
    assert "card 0 of instance glm-a: it is in MIG mode" in refused
    assert "nvidia-smi -i 0 -mig 0" in refused


def test_foreign_memory_without_a_process_is_somebody_s_and_our_own_is_not(
    tmp_path: Path,
) -> None:
    busy = cards(csv=CARDS.replace("46068 MiB, 4 MiB", "46068 MiB, 40000 MiB", 1))
    (refused,) = of(verdicts(tmp_path, **busy), "refused")
    assert "in use: 40000 MiB held by another process" in refused
    ours = {"units": {"vllm@glm-a.service": unit()}}
    assert not of(verdicts(tmp_path, **busy, **ours), "refused")


def test_a_process_that_the_host_does_not_show_has_no_number_of_its_own(tmp_path: Path) -> None:
    nobody = {"pid": 0, "user": "?", "command": "?", "unit": None}
    (port,) = of(verdicts(tmp_path, listening={"8001": nobody}), "refused")
    assert "port 8001 of instance glm-a is taken by a process that this host does not show" in port
    assert "pid 0" not in port
    held = {**nobody, "pid": 77, "uuid": "GPU-0000", "memory_mib": 9}
    (card,) = of(verdicts(tmp_path, **cards(holders=[held])), "refused")
    assert "card 0 of instance glm-a is held by a process that this host does not show" in card
    assert "(pid 77 there)" in card


def test_a_foreign_process_is_named_once_with_its_owner_and_unit(tmp_path: Path) -> None:
    holder = {
        "uuid": "GPU-0000",
        "pid": 77,
        "user": "bob",
        "command": "python train.py",
        "unit": "jupyter.service",
        "memory_mib": 30000,
    }
    (refused,) = of(verdicts(tmp_path, **cards(holders=[holder])), "refused")
    assert "card 0 of instance glm-a is held by pid 77 of bob, unit jupyter.service" in refused
    ours = {**holder, "unit": "vllm@glm-a.service"}
    assert not of(verdicts(tmp_path, **cards(holders=[ours])), "refused")


def test_a_lost_card_is_told_with_what_the_kernel_says(tmp_path: Path) -> None:
    log = ["[9.9] NVRM: Xid (PCI:0000:21:00): 79, pid=0, GPU has fallen off the bus."]
    csv = "\n".join([HEADER, *ROWS[:2]])
    found = verdicts(tmp_path, kernel_log=log, **cards(csv=csv, topo=matrix(uniform(2, "PIX"))))
    (refused,) = of(found, "refused")
    assert "instance qwen-a wants card 2; nvidia-smi lists 0, 1" in refused
    assert "fallen off the bus" in refused


def test_cards_over_the_cpus_are_said_where_better_ones_are(tmp_path: Path) -> None:
    links = [["NV12" if a // 4 == b // 4 else "SYS" for b in range(8)] for a in range(8)]
    crossed = HALF.replace("[0, 1, 2, 3]", "[2, 3, 4, 5]")
    (warning,) = of(verdicts(tmp_path, crossed, **eight(links)), "warning")
    assert "cards 2, 3, 4, 5 of instance glm-a are linked by SYS" in warning
    assert not of(verdicts(tmp_path, HALF, **eight(links)), "warning")


def test_unlike_cards_in_one_instance_are_refused(tmp_path: Path) -> None:
    csv = "\n".join([HEADER, ROWS[0], ROWS[1].replace("L40S", "L4"), *ROWS[2:]])
    (refused,) = of(verdicts(tmp_path, **cards(csv=csv)), "refused")
    assert "cards 0, 1 of instance glm-a are of several kinds" in refused


def test_amd_cards_beside_nvidia_ones_make_groups_of_their_own(tmp_path: Path) -> None:
    rocm = {
        "json": '{"card0": {"Card Series": "AMD Instinct MI300X", '
        '"VRAM Total Memory (B)": "206141652992", '
        '"VRAM Total Used Memory (B)": "0"}}'
    }
    seen = look(host(tmp_path), state(**cards(rocm=rocm)), {})
    assert [g.vendor for g in seen.groups.groups] == ["nvidia"]
    assert [g.name for g in seen.others.groups] == ["AMD Instinct MI300X"]


def test_a_rocm_host_without_cards_is_refused(tmp_path: Path) -> None:
    text = ALL + "device: rocm\n"
    (refused,) = of(verdicts(tmp_path, text), "refused")
    assert "rocm-smi lists none" in refused


@needs_shared_data
def test_every_list_of_cards_there_is_gets_verdicts_and_never_a_traceback(
    tmp_path: Path,
) -> None:
    spec = host(tmp_path)
    texts = [file.read_text(errors="replace") for file in files("smi")]
    topologies = [file.read_text(errors="replace") for file in files("topo")]
    assert len(texts) > 60
    for number, text in enumerate(texts):
        topo = topologies[number % len(topologies)]
        for broken in (text, text[: len(text) // 2]):
            found = examine(spec, state(**cards(csv=broken, topo=topo)), {}, Inputs())
            assert any(v.what == "system" for v in found)
            found = examine(spec, state(**cards(error=broken[:500], csv="")), {}, Inputs())
            assert of(found, "refused")
