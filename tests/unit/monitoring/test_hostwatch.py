"""What no exporter tells: cards by nvidia-smi, Xid errors of the kernel log, certificates."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet import metrics, watch
from vllm_fleet.onhost import hostwatch, ledger

SMI = """\
0, GPU-a, 70000, 81559, 99, 61, 400.5, 0, [N/A], No, No, Not Active, Not Active, Not Active, Active
1, GPU-b, 69000, 81559, 98, 60, 401.5, 3, [N/A], Yes, No, Not Active, Active, Not Active, Not Active
2, GPU-c, [GPU is lost], ERR!, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], \
[N/A], [N/A]
"""
NVLINK = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
GPU 2: NVIDIA L4 (UUID: GPU-c)
"""


# What an H200 answered to the same question (driver 580.159.04; its UUID is another).
H200 = "0, GPU-a, 0, 143771, 0, 33, 88.00, 0, [N/A], No, No" + ", Not Active" * 4 + "\n"


def entry(at: float, text: str) -> str:
    return json.dumps({"__REALTIME_TIMESTAMP": str(int(at * 1e6)), "MESSAGE": text})


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hostwatch, "STATE", str(tmp_path))
    monkeypatch.setattr(hostwatch, "ETC", str(tmp_path / "etc"))
    (tmp_path / "etc").mkdir()
    monkeypatch.setattr(hostwatch, "RUN", str(tmp_path / "run"))
    (tmp_path / "run" / "air-a").mkdir(parents=True)
    (tmp_path / "air-a").mkdir()
    return tmp_path


def settings(root: Path, **more: Any) -> dict[str, Any]:
    one = {
        "name": "air-a",
        "pool": "air",
        "release": "0.32.0-1234",
        "weights_stamp": str(root / "stamp"),
        "cards": [0, 1, 5],
        "uuids": ["GPU-a", "GPU-b", "GPU-lost"],
    }
    return {"instances": [one], "certificates": [], "device": "cuda", **more}


def of(samples: hostwatch.Samples, name: str, key: str = "card") -> dict[str, float]:
    return {dict(labels)[key]: value for labels, value in samples[name].items()}


def test_cards_are_read_whatever_a_cell_says(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smi(command: list[str]) -> str:
        return NVLINK if "nvlink" in command else SMI

    monkeypatch.setattr(hostwatch, "output", smi)
    samples: hostwatch.Samples = {}
    hostwatch.nvidia(settings(watched), samples)
    assert of(samples, "vllm_fleet_card_memory_used_bytes") == {
        "0": 70000 * 2**20,
        "1": 69000 * 2**20,
    }
    assert of(samples, "vllm_fleet_card_utilization_ratio") == {"0": 0.99, "1": 0.98}
    assert of(samples, "vllm_fleet_card_ecc_uncorrected_total") == {"0": 0, "1": 3}
    assert of(samples, "vllm_fleet_card_repair_pending") == {"0": 0, "1": 1}
    assert of(samples, "vllm_fleet_card_present") == {"0": 1, "1": 1, "5": 0}
    assert of(samples, "vllm_fleet_card_nvlinks_active") == {"0": 2, "1": 1}
    throttled = {
        (dict(labels)["card"], dict(labels)["reason"])
        for labels, value in samples["vllm_fleet_card_throttled"].items()
        if value
    }
    assert throttled == {("0", "sw_thermal"), ("1", "hw_thermal")}
    owner = next(iter(samples["vllm_fleet_card_memory_used_bytes"]))
    assert dict(owner)["vllm_instance"] == "air-a"
    assert set(samples) <= metrics.own_series()


def test_a_real_h200_is_read(watched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no retired pages (rows are remapped instead), and, alone, no lines of NVLink."""
    monkeypatch.setattr(hostwatch, "output", lambda words: "" if "nvlink" in words else H200)
    samples: hostwatch.Samples = {}
    hostwatch.nvidia(settings(watched), samples)
    found = {name: set(rows.values()) for name, rows in samples.items()}
    assert found == {
        "vllm_fleet_card_memory_used_bytes": {0},
        "vllm_fleet_card_memory_total_bytes": {143771 * 2**20},
        "vllm_fleet_card_utilization_ratio": {0},
        "vllm_fleet_card_temperature_celsius": {33},
        "vllm_fleet_card_power_watts": {88.0},
        "vllm_fleet_card_ecc_uncorrected_total": {0},
        "vllm_fleet_card_repair_pending": {0},
        "vllm_fleet_card_remap_failed": {0},
        "vllm_fleet_card_throttled": {0},
        "vllm_fleet_card_present": {0, 1},
    }
    assert len(samples["vllm_fleet_card_throttled"]) == 4


def test_a_field_that_the_driver_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(command: list[str]) -> str:
        if "remapped_rows.failure" in command[1]:
            return 'Field "remapped_rows.failure" is not a valid field to query.\n'
        return "0, GPU-a, 5\n"

    monkeypatch.setattr(hostwatch, "output", smi)
    assert hostwatch.query(["memory.used", "remapped_rows.failure"]) == [
        {"index": "0", "uuid": "GPU-a", "memory.used": "5"}
    ]


def test_no_answer_of_the_driver_means_that_all_cards_are_gone(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostwatch, "output", lambda _command: None)
    samples: hostwatch.Samples = {}
    hostwatch.nvidia(settings(watched), samples)
    assert of(samples, "vllm_fleet_card_present") == {"0": 0, "1": 0, "5": 0}


def test_xids_are_counted_once_each(watched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = [
        entry(1000, "NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus."),
        entry(1001, "NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus."),
        entry(1002, "eth0: link up"),
        "no JSON",
    ]
    asked: list[list[str]] = []

    def journal(command: list[str]) -> str:
        asked.append(command)
        return "\n".join(log)

    monkeypatch.setattr(hostwatch, "output", journal)
    for _ in range(2):
        samples: hostwatch.Samples = {}
        hostwatch.xids(samples)
        labels = (("pci", "0000:17:00"), ("xid", "79"), ("action", "reboot"))
        assert samples["vllm_fleet_xid_total"] == {labels: 2}
        assert samples["vllm_fleet_xid_time_seconds"] == {labels: 1001}
    assert "-b" in asked[0]
    assert "--since=@1002" in asked[1]
    # The same code again, which DCGM's gauge does not show.
    log.append(entry(1010, "NVRM: Xid (PCI:0000:17:00): 79, pid=2, GPU has fallen off the bus."))
    samples = {}
    hostwatch.xids(samples)
    assert list(samples["vllm_fleet_xid_total"].values()) == [3]


def test_no_xid_asks_for_two_things() -> None:
    codes = [code for found in hostwatch.XID_ACTIONS.values() for code in found]
    assert len(codes) == len(set(codes))
    assert hostwatch.action_of(999) == "unknown"


def test_instances_as_their_own_scripts_left_them(watched: Path) -> None:
    (watched / "run" / "air-a" / "ready").write_text("1 1")
    (watched / "stamp").write_text("{}")
    os.utime(watched / "stamp", (5000, 5000))
    report = {"ready_at": 7000, "load_seconds": 61.5, "warm_seconds": 8.25}
    (watched / "air-a" / "warmup.json").write_text(json.dumps(report))
    parts = {"weights": 31.5, "compile": 20.0}
    (watched / "air-a" / "actual.json").write_text(json.dumps({"seconds": parts}))
    samples: hostwatch.Samples = {}
    hostwatch.instances(settings(watched), samples)
    assert of(samples, "vllm_fleet_instance_start_part_seconds", "part") == parts
    assert list(samples["vllm_fleet_instance_ready"].values()) == [1]
    assert list(samples["vllm_fleet_instance_ready_time_seconds"].values()) == [7000]
    assert list(samples["vllm_fleet_weights_verified_time_seconds"].values()) == [5000]
    assert of(samples, "vllm_fleet_instance_start_seconds", "phase") == {
        "load": 61.5,
        "warm": 8.25,
    }
    assert of(samples, "vllm_fleet_instance_info", "release") == {"0.32.0-1234": 1}


def test_a_planned_change_is_told_until_it_is_over(watched: Path) -> None:
    folder = watched / "changes"
    folder.mkdir()
    (folder / "air.json").write_text(json.dumps({"pool": "air", "until": time.time() + 60}))
    (folder / "old.json").write_text(json.dumps({"pool": "old", "until": 5}))
    (folder / "odd.json").write_text("{")
    samples: hostwatch.Samples = {}
    hostwatch.changes(settings(watched), samples)
    assert list(of(samples, "vllm_fleet_change_until_seconds", "pool")) == ["air"]
    assert [p.name for p in folder.iterdir()] == ["air.json"]


def test_a_host_that_is_held_is_being_changed_until_it_is_returned(watched: Path) -> None:
    (watched / "_rollout").mkdir()
    (watched / "_rollout" / "held.json").write_text("{}")
    samples: hostwatch.Samples = {}
    hostwatch.changes(settings(watched), samples)
    told = of(samples, "vllm_fleet_change_until_seconds", "pool")
    assert set(told) == {one["pool"] for one in settings(watched)["instances"]}
    assert min(told.values()) > time.time() + 60


def test_the_end_of_a_certificate(watched: Path) -> None:
    pem = watched / "tls.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "30"),
            *("-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=x"),
            *("-keyout", "/dev/null", "-out", str(pem)),
        ],
        check=True,
        capture_output=True,
    )
    samples: hostwatch.Samples = {}
    missing = str(watched / "missing.pem")
    hostwatch.certificates(settings(watched, certificates=[str(pem), missing]), samples)
    found = of(samples, "vllm_fleet_certificate_expires_time_seconds", "file")
    assert list(found) == [str(pem)]
    assert abs(found[str(pem)] - time.time() - 30 * 86400) < 600


def test_a_round_writes_what_the_node_exporter_reads(watched: Path) -> None:
    order = watched / "hostwatch.json"
    order.write_text(json.dumps(settings(watched, device="cpu")))
    assert hostwatch.main([str(order)]) == 0
    text = (watched / "metrics" / hostwatch.METRICS_FILE).read_text()
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) .+|\w+(\{(\w+="[^"]*",?)+\})? [\d.e+]+', line), line
    assert 'vllm_fleet_instance_ready{vllm_instance="air-a",pool="air"} 0' in text


def test_what_runs_is_told_rather_than_what_was_planned(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> dict[str, str]:
        samples: hostwatch.Samples = {}
        hostwatch.instances(settings(watched), samples)
        (labels,) = samples["vllm_fleet_instance_info"]
        return {k: v for k, v in labels if k in ("release", "vllm_version")}

    monkeypatch.setattr(hostwatch, "output", lambda _words: None)  # no such unit
    assert told() == {"release": "0.32.0-1234", "vllm_version": "0.32.0"}
    script = watched / "etc" / "air-a.sh"
    script.write_text("#!/bin/sh\nexec /opt/vllm/releases/0.33.0+cpu-77/bin/vllm serve x\n")
    assert told() == {"release": "0.33.0+cpu-77", "vllm_version": "0.33.0"}
    words = ["/opt/vllm/releases/0.31.0-99/bin/python", "/opt/vllm/releases/0.31.0-99/bin/vllm"]
    code = "import time; time.sleep(60)"
    with subprocess.Popen([*words[:1], "-c", code, *words], executable=sys.executable) as process:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)  # it is just becoming that program
        monkeypatch.setattr(hostwatch, "output", lambda _words: f"{process.pid}\n")
        assert told() == {"release": "0.31.0-99", "vllm_version": "0.31.0"}
        process.kill()


def test_what_the_rollout_writes_is_what_is_told(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "STATE", str(watched))

    def told() -> dict[str, float]:
        samples: hostwatch.Samples = {}
        hostwatch.changes(settings(watched), samples)
        name = "vllm_fleet_change_until_seconds"
        return of(samples, name, "pool") if name in samples else {}

    asked: list[Any] = []
    monkeypatch.setattr(ledger.subprocess, "run", lambda words, **_: asked.append(words))
    ledger.plan_change("air-a", "air", 660)
    assert told()["air"] == pytest.approx(time.time() + 660, abs=60)
    # Not with the next round of the timer, which an alert may outrun.
    at_once = ["systemctl", "start", "--no-block", f"{watch.HOSTWATCH}.service"]
    assert asked == [at_once]
    ledger.end_change("air-a")
    assert told() == {}
    ledger.end_change("air-a")  # said again
    assert asked == [at_once] * 2


def test_a_probe_that_was_turned_off_is_told_of_no_more(watched: Path) -> None:
    (watched / "metrics").mkdir()
    left = watched / "metrics" / "vllm_fleet_probe.prom"
    left.write_text("vllm_fleet_probe_time_seconds 1\n")
    (watched / "etc" / "probe.json").write_text("{}")
    order = watched / "hostwatch.json"
    order.write_text(json.dumps(settings(watched, device="cpu")))
    assert hostwatch.main([str(order)]) == 0
    assert left.exists()
    (watched / "etc" / "probe.json").unlink()
    assert hostwatch.main([str(order)]) == 0
    assert not left.exists()
