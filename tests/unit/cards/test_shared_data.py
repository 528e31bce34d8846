"""Every real output of the shared data, read; expected groups written by hand."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.shared_data import HERE, files, needs_shared_data
from vllm_fleet.cards import (
    Card,
    CardsError,
    Topology,
    groups,
    parse_compute_apps,
    parse_gpus,
    parse_kernel_log,
    parse_nvlink_status,
    parse_p2p,
    parse_topo,
    parse_versions,
)

pytestmark = needs_shared_data

ALL8 = [([0, 1, 2, 3, 4, 5, 6, 7], "NV18")]
ONE = [([0], "single")]
PAIR_QUADS = [([0, 1, 2, 3], "NODE"), ([4, 5, 6, 7], "NODE")]

# File -> groups (cards, worst link), with all cards alike; and cards left out.
TOPOLOGIES: dict[str, tuple[list[tuple[list[int], str]], list[int]]] = {
    "a01_amd_4gpu_PCIE_52": ([([0, 1, 2, 3], "PCIE")], []),
    "a02_amd_mi300a_x4_XGMI": ([([0, 1, 2, 3], "XGMI")], []),
    "a03_amd_8gpu_two_xgmi_hives_TRUNC": (
        [([0, 1, 2, 3], "XGMI"), ([4, 5, 6, 7], "XGMI")],
        [],
    ),
    "a04_amd_setonix_mi250_gpu_space_numa": ([([n], "single") for n in range(4)], []),
    "a05_amd_single_gpu_type_only": (ONE, []),
    "a06_amd_8gpu_showtoponuma": ([([0, 1, 2, 3], "NUMA"), ([4, 5, 6, 7], "NUMA")], []),
    "f01_rtxpro6000x8_asus_ANSI": (
        [([0, 1], "PIX"), ([2, 3], "PIX"), ([4, 5], "PIX"), ([6, 7], "PIX")],
        [],
    ),
    "f02_2080s_single_ANSI": (ONE, []),
    "f03_4080s_single_ANSI": (ONE, []),
    "f04_h100_single_and_mig_ANSI": (ONE, []),
    "f05_l40s_single_ANSI": (ONE, []),
    "f06_windows_blank_affinity_ANSI": (ONE, []),
    "f07_2gpu_NV2": ([([0, 1], "NV2")], []),
    "f08_2gpu_PHB": ([([0, 1], "PHB")], []),
    "f10_h100x8_NV18_compact": (ALL8, []),
    "f12_h200x8_gke_nics_full_legend": (ALL8, []),
    "t01_rtxpro6000x2_NODE": ([([0, 1], "NODE")], []),
    "t02_4090x8_SYS_nics": ([([0, 1, 2, 3], "SYS"), ([4, 5, 6, 7], "SYS")], []),
    "t03_h100x8_NV18_nonic": (ALL8, []),
    "t05_5090x2_PHB": ([([0, 1], "PHB")], []),
    "t06_3090x2_PHB_patchedP2P": ([([0, 1], "PHB")], []),
    "t07_3090x2_NV4_5900X": ([([0, 1], "NV4")], []),
    "t08_3090x2_NV4_vm_cpuset": ([([0, 1], "NV4")], []),
    "t09_a6000x3_NV4_pair_plus_single": ([([0, 1], "NV4"), ([2], "single")], []),
    "t10_a100pcie_pairs_NV12_4numa": ([([0, 1], "NV12"), ([2, 3], "NV12")], []),
    "t12_a100x4_NV4_blank_affinity": ([([0, 1, 2, 3], "NV4")], []),
    "t14_della_a100x4_mlx5_0": ([([0, 1, 2, 3], "NV4")], []),
    "t15_numa_range_0-3": ([([0, 1, 2, 3], "NV4")], []),
    "t17_v100x4_NV1_NV2_mlx5": ([([0, 1, 2, 3], "NV1")], []),
    "t19_8gpu_NODE_PHB_SYS_uneven_sockets": (
        [([0, 5], "NODE"), ([1, 2], "PHB"), ([3, 4], "PHB"), ([6, 7], "PHB")],
        [],
    ),
    "t20_4gpu_PIX_PHB": ([([0, 1], "PIX"), ([2, 3], "PIX")], []),
    "t21_4gpu_allPIX_sm75": ([([0, 1, 2, 3], "PIX")], []),
    "t22_gb10_nics_NODE": (ONE, []),
    "t23_rtxpro6000_single": (ONE, []),
    "t25_gb200x4_gpu_numa_ids_TRUNC": ([([0, 1, 2, 3], "NV18")], []),
    "t26_b200_gpu2_lost_nvlink_TRUNC": (
        [([0, 1, 3, 4], "NV18"), ([5, 6], "NV18"), ([7], "single")],
        [2],
    ),
    "t29_h100x4_NV6_nics_8numa": ([([0, 1, 2, 3], "NV6")], []),
    "t30_h200_topo_mp_even_odd_TRUNC": (PAIR_QUADS, []),
    "t31_b300x8_ansi_nics_TRUNC": (ALL8, []),
    "t32_glued_header_columns": (ONE, [1, 2, 3, 4, 5, 6, 7]),
    "t33_emulated_nvlink_degraded_NV16": ([([0, 1, 2, 3], "NV16")], []),
    "t34_b200_NIC11NIC12_glued_TRUNC": ([([0, 1, 2, 3], "NV18")], [4, 5, 6, 7]),
    "t35_a100x2_slurm_NV12_nics_TRUNC": ([([0, 1], "NV12")], []),
    "t36_2gpu_NODE_vllm_issue": ([([0, 1], "NODE")], []),
}
NO_TOPOLOGY = {"t06b_3090x2_p2p_rw_OK"}

# File of smi/ -> index, name, memory and memory used of its cards.
CARDS: dict[str, list[tuple[int, str, int | None, int | None]]] = {
    "h200-580-nvidia-smi": [(0, "NVIDIA H200", 143771, 0)],
    "h200-580-q": [(0, "NVIDIA H200", 143771, 0)],
    "odd_610_header_proxmox": [(0, "NVIDIA RTX PRO 4500 Blac...", 32623, 29268)],
    "odd_gb10_csv_580.173": [(0, "unknown card", None, None)],
    "odd_gb10_csv_probe_580.142": [(0, "NVIDIA GB10", None, None)],
    "odd_gb10_table_580.126": [(0, "NVIDIA GB10", None, None)],
    "odd_mig_list": [
        (0, "NVIDIA H100 80GB HBM3", None, None),
        (1, "NVIDIA H100 80GB HBM3", None, None),
    ],
    "odd_mig_nvlink_status": [(0, "NVIDIA H100 80GB HBM3", None, None)],
    "odd_nvlink_inactive": [(2, "NVIDIA RTX A6000", None, None)],
    "odd_old415_2linerow": [(0, "GeForce GTX TIT...", 12209, 1019)],
}
MACHINES = {  # stem -> name, name in the table, memory, used idle, used under load
    "nvidia-geforce-rtx-2080-super__595.71.05": (
        "NVIDIA GeForce RTX 2080 SUPER", "NVIDIA GeForce RTX 2080 ...", 8192, 214, 819,
    ),
    "nvidia-geforce-rtx-2080-super__610.57.04": (
        "NVIDIA GeForce RTX 2080 SUPER", "NVIDIA GeForce RTX 2080 ...", 8192, 211, 815,
    ),
    "nvidia-geforce-rtx-4080-super__595.71.05": (
        "NVIDIA GeForce RTX 4080 SUPER", "NVIDIA GeForce RTX 4080 ...", 16376, 596, 1474,
    ),
    "nvidia-h100-80gb-hbm3__590.48.01": (
        "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", 81559, 0, 19818,
    ),
    "nvidia-h100-mig__590.48.01": (
        "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", 81559, 59, 11125,
    ),
    "nvidia-h200__590.48.01": ("NVIDIA H200", "NVIDIA H200", 143771, 0, 32362),
    "nvidia-h200-mig__590.48.01": ("NVIDIA H200", "NVIDIA H200", 143771, 55, 16959),
    "nvidia-l40s__595.80": ("NVIDIA L40S", "NVIDIA L40S", 46068, 0, 1235),
}  # fmt: skip
for _stem, (_name, _short, _memory, _idle, _load) in MACHINES.items():
    CARDS[f"{_stem}__csv_full"] = [(0, _name, _memory, _idle)]
    CARDS[f"{_stem}__csv_full_load"] = [(0, _name, _memory, _load)]
    CARDS[f"{_stem}__table_idle"] = [(0, _short, _memory, _idle)]
    CARDS[f"{_stem}__table_load"] = [(0, _short, _memory, _load)]
    CARDS[f"{_stem}__L"] = [(0, _name, None, None)]

# File of smi/ that names no card -> a word of the sentence.
REFUSED = {
    "odd_device_handle_bad_bdf": "000:BA:80.0",
    "odd_device_handle_not_found": "0000:01:00.0",
    "odd_device_handle_unknown": "0000:07:00.0",
    "odd_driver_lib_mismatch_new": "reload the modules or reboot",
    "odd_driver_lib_mismatch_old": "reload the modules or reboot",
    "odd_no_devices": "finds no card",
    "odd_no_driver": "modprobe nvidia",
    "odd_topo_i_flag_error": "without it",
    "odd_dmesg_xid_samples": "no list of cards",
    "odd_proc_driver_version": "no list of cards",
    "odd_proc_driver_version_open": "no list of cards",
    "odd_gb10_compute_apps_noheader": "no list of cards",
}


def text(path: Path) -> str:
    return path.read_text("utf-8", "replace")


@pytest.mark.parametrize("path", files("topo"), ids=lambda p: p.stem)
def test_every_topology_makes_the_groups_expected(path: Path) -> None:
    if path.stem in NO_TOPOLOGY:
        with pytest.raises(CardsError, match="peer-to-peer"):
            parse_topo(text(path))
        assert parse_p2p(text(path)) == {(0, 1): "OK"}
        return
    topology = parse_topo(text(path))
    cards = [Card(i, "a card", topology.vendor, memory_mib=81920) for i in topology.cards]
    found = groups(cards, topology)
    expected, left_out = TOPOLOGIES[path.stem]
    assert [(list(g.gpus), g.link) for g in found.groups] == expected
    assert [o.gpu for o in found.left_out] == left_out
    assert len([w for w in found.warnings if "is left out" in w]) == len(left_out)
    if topology.unknown():  # nothing that is missing goes unsaid
        assert topology.warnings


@pytest.mark.parametrize("path", files("smi"), ids=lambda p: p.stem)
def test_every_listing_gives_the_cards_expected(path: Path) -> None:
    if path.stem in CARDS:
        cards = parse_gpus(text(path)).cards
        seen = [(c.index, c.name, c.memory_mib, c.memory_used_mib) for c in cards]
        assert seen == CARDS[path.stem]
        return
    with pytest.raises(CardsError) as refused:
        parse_gpus(text(path))
    if path.stem.endswith("topo"):
        assert "matrix of links" in str(refused.value)
        assert parse_topo(text(path)).cards == (0,)
    elif "csv_apps" in path.stem:
        assert "list of processes" in str(refused.value)
    elif path.stem.endswith("version"):
        assert "no list of cards" in str(refused.value)
    else:
        assert REFUSED[path.stem] in str(refused.value)


@pytest.mark.parametrize(
    ("stem", "free"),
    [
        *((f"{s}__csv_full", "mig" not in s) for s in MACHINES),
        *((f"{s}__csv_full_load", False) for s in MACHINES),
        *((f"{s}__table_load", False) for s in MACHINES),
        ("odd_610_header_proxmox", False),
        ("h200-580-nvidia-smi", True),
        ("odd_gb10_csv_probe_580.142", True),
    ],
)
def test_busy_and_mig_cards_are_left_out_and_said(stem: str, free: bool) -> None:
    listing = parse_gpus(text(HERE / "smi" / f"{stem}.txt"))
    found = groups(listing.cards, None)
    assert [g.gpus for g in found.groups] == ([(0,)] if free else [])
    if not free:
        word = "MIG" if "-mig_" in stem else "in use"
        assert word in found.left_out[0].why


def test_processes_of_every_machine() -> None:
    counts = {
        p.stem.rsplit("__", 1)[0]: len(parse_compute_apps(text(p)))
        for p in files("smi")
        if p.stem.endswith("csv_apps_loadquerycompu")
    }
    assert counts == {s: 2 if "2080" in s or "l40s" in s else 3 for s in MACHINES}
    (one,) = parse_compute_apps(text(HERE / "smi" / "odd_gb10_compute_apps_noheader.txt"))
    assert (one.pid, one.name, one.memory_mib) == (114687, "/usr/local/bin/python", 19135)


def test_versions_of_every_machine() -> None:
    found = {p.stem: parse_versions(text(p)) for p in files("smi") if "version" in p.stem}
    cuda = {"590": "13.1", "595": "13.2", "610": "13.3"}
    for stem in MACHINES:
        driver = stem.rsplit("__", 1)[1]
        assert found[f"{stem}__version"] == (driver, cuda[driver[:3]])
    assert found["odd_proc_driver_version"] == ("580.173.02", "")
    assert found["odd_proc_driver_version_open"] == ("610.43.02", "")
    assert parse_versions(text(HERE / "smi" / "odd_610_header_proxmox.txt")) == (
        "610.57.04", "13.3",
    )  # fmt: skip


def test_kernel_log_and_nvlink_status() -> None:
    messages = parse_kernel_log(text(HERE / "smi" / "odd_dmesg_xid_samples.txt"))
    assert [m.xid for m in messages] == [79, 79, 154, None, None, None, None]
    assert messages[3].bus_id == "0000:b3:00.0"
    assert parse_nvlink_status(text(HERE / "smi" / "odd_nvlink_inactive.txt")) == {2: "inactive"}
    assert parse_nvlink_status(text(HERE / "smi" / "odd_mig_nvlink_status.txt")) == {0: "mig"}


@pytest.mark.parametrize("path", [*files("topo"), *files("smi")], ids=lambda p: p.stem)
def test_no_truncation_ends_in_a_traceback(path: Path) -> None:
    whole = text(path)
    for end in range(0, len(whole), max(1, len(whole) // 60)):
        for parse in (parse_gpus, parse_topo, parse_p2p, parse_compute_apps):
            # Anything but CardsError is the traceback that must not be.
            with suppress(CardsError):
                found = parse(whole[:end])
                if isinstance(found, Topology):
                    assert_all_placed(found)


def assert_all_placed(topology: Topology) -> None:
    cards = [Card(i, "a card", topology.vendor, memory_mib=81920) for i in topology.cards]
    made = groups(cards, topology)
    placed = [i for g in made.groups for i in g.gpus] + [o.gpu for o in made.left_out]
    assert sorted(placed) == sorted(topology.cards)
