"""Files of what watches a host from within, and how the plan wires them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import fleet, state
from tests.unit.monitoring.test_files import instance
from vllm_fleet import paths, watch
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import read_inputs
from vllm_fleet.spec.model import HostSettings, HostSpec
from vllm_fleet.state import HostState


def gpu(**settings: Any) -> HostSpec:
    return HostSpec(
        name="gpu-01",
        groups=("gpu",),
        address="10.0.0.1",
        settings=HostSettings.model_validate(settings),
    )


def test_the_probe_knows_each_instance_and_its_bounds() -> None:
    spec = gpu(probe={"restarts_per_hour": 5})
    files = {f.path: f for f in watch.probe_files(spec, [instance("air-a", "gpu-01")], ["g:1"])}
    order = json.loads(files[f"{paths.ETC}/probe.json"].content)
    assert order["instances"] == [
        {
            "name": "air-a",
            "pool": "glm-4.5-air",
            "model": "glm-4.5-air",
            "port": 8001,
            "task": "chat",
            "start_seconds": 600,
        }
    ]
    assert order["gateways"] == ["g:1"]
    assert order["host"] == "gpu-01"
    assert order["restarts_per_hour"] == 5
    assert order["restart_last"] is False
    timer = files["/etc/systemd/system/vllm-fleet-probe.timer"].content
    assert "OnUnitInactiveSec=5s" in timer


def test_the_probe_is_off_by_a_setting_and_without_instances() -> None:
    one = [instance("air-a", "gpu-01")]
    assert watch.probe_files(gpu(probe={"enabled": False}), one, []) == []
    assert watch.probe_files(gpu(), [], []) == []


@pytest.mark.parametrize(
    ("settings", "exporter", "port"),
    [
        ({}, "nvitop", 9146),
        ({"device": "cpu"}, None, 0),
        ({"device": "rocm"}, None, 0),
        ({"device": "rocm", "gpu_metrics": {"exporter": "amd"}}, "amd", 5000),
        ({"gpu_metrics": {"exporter": "dcgm"}}, "dcgm", 9400),
        ({"gpu_metrics": {"exporter": "dcgm", "port": 9401}}, "dcgm", 9401),
        ({"gpu_metrics": {"exporter": "none"}}, None, 0),
    ],
)
def test_who_exports_the_cards(settings: dict[str, Any], exporter: str | None, port: int) -> None:
    spec = gpu(**settings)
    found = watch.gpu_metrics(spec)
    assert (found.exporter if found else None) == exporter
    if found:
        assert watch.gpu_port(found) == port
    assert bool(watch.exporter_files(spec, ["10.0.0.9"])) == (exporter == "nvitop")


def test_the_exporter_lets_nobody_in_but_monitoring() -> None:
    unit = watch.exporter_files(gpu(), ["10.0.0.9", "10.0.0.8", "10.0.0.9"])[0].content
    assert "IPAddressDeny=any\nIPAddressAllow=localhost 10.0.0.8 10.0.0.9\n" in unit
    assert "--port 9146" in unit
    assert "User=vllm" in unit


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_every_unit(tmp_path: Path) -> None:
    spec = gpu()
    one = [instance("air-a", "gpu-01")]
    files = [
        *watch.probe_files(spec, one, []),
        *watch.host_files(spec, one),
        *watch.exporter_files(spec, ["10.0.0.9"]),
    ]
    units = []
    for file in files:
        if file.path.startswith("/etc/systemd/system/"):
            place = tmp_path / file.path.rpartition("/")[2]
            text = file.content.replace(f"{paths.TOOLS}/current/bin/nvitop-exporter", "/bin/true")
            place.write_text(text)
            units.append(str(place))
    assert len(units) == 5
    run = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    ours = [line for line in run.stderr.splitlines() if "vllm-fleet" in line]
    # The user of the exporter is not there on this machine.
    assert [line for line in ours if "not found" not in line and "Failed to" not in line] == []


def plans(tmp_path: Path, **group_vars: str) -> dict[str, HostPlan]:
    planned = fleet(tmp_path, **group_vars)
    states: dict[str, HostState] = {h.name: state(hostname=h.name) for h in planned.hosts}
    return plan_fleet(planned, states, read_inputs(planned))


def test_the_plan_puts_and_runs_what_watches(tmp_path: Path) -> None:
    found = plans(tmp_path)
    units = {s.unit for s in found["gpu-1"].monitoring_services}
    assert {
        "vllm-fleet-probe.timer",
        "vllm-fleet-hostwatch.timer",
        "vllm-fleet-gpu-exporter.service",
    } <= units
    gateway = {s.unit for s in found["gw-1"].monitoring_services}
    assert "vllm-fleet-hostwatch.timer" in gateway
    assert "vllm-fleet-probe.timer" not in gateway
    files = {f.path: f.content for f in found["gpu-1"].files}
    assert json.loads(files["/etc/vllm/probe.json"])["gateways"] == ["10.0.0.9:9145"]
    # The gateway lets the probe ask who is ready, and nobody else.
    nginx = "".join(f.content for f in found["gw-1"].files if "nginx" in f.path)
    assert re.search(r"allow 10\.0\.0\.1[;/]", nginx)
    gpus = next(f for f in found["gw-1"].files if f.path.endswith("targets/gpu.json"))
    assert [t["targets"] for t in json.loads(gpus.content)] == [
        ["10.0.0.1:9146"],
        ["10.0.0.2:9146"],
    ]


def test_without_the_probe_gpu_hosts_may_not_read_the_gateways_status(tmp_path: Path) -> None:
    found = plans(tmp_path, gpu="probe: {enabled: false}\n")
    nginx = "".join(f.content for f in found["gw-1"].files if "nginx" in f.path)
    assert not re.search(r"allow 10\.0\.0\.1[;/]", nginx)


def test_alertmanager_comes_with_its_first_receiver(tmp_path: Path) -> None:
    assert "prometheus-alertmanager" not in plans(tmp_path)["gw-1"].packages
    (tmp_path / "ding").write_text("https://robot.example.org/send?access_token=t")
    receivers = "monitoring: {alerting: {receivers: {d: {kind: dingtalk, url_file: ding}}}}\n"

    planned = fleet(tmp_path, monitoring=receivers)
    states = {h.name: state(hostname=h.name) for h in planned.hosts}
    plan = plan_fleet(planned, states, read_inputs(planned))["gw-1"]
    assert "prometheus-alertmanager" in plan.packages
    units = [s.unit for s in plan.monitoring_services]
    assert {"prometheus-alertmanager.service", "vllm-fleet-relay.service"} <= set(units)
    config = next(f for f in plan.files if f.path == "/etc/prometheus/vllm-fleet.yml").content
    assert '"localhost:9093"' in config
    edited = {
        h.name: state(
            hostname=h.name,
            texts={"/etc/prometheus/alertmanager.yml": "receivers: [{name: ours}]\n"},
        )
        for h in planned.hosts
    }
    plan = plan_fleet(planned, edited, read_inputs(planned))["gw-1"]
    assert not any(f.path == "/etc/prometheus/alertmanager-vllm-fleet.yml" for f in plan.files)
    assert any("Alertmanager is set up by somebody" in n for n in plan.notices)
