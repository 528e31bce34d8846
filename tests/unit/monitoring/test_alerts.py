"""Every alert fires on the series that should fire it and is silent on the nearest that should
not: asked of the real promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet import alerts, metrics

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")

A = 'host="gpu-01",instance="air-a",pool="air"'
B = 'host="gpu-02",instance="air-a",pool="air"'
UNIT = 'node_systemd_unit_state{host="gpu-01",instance="node",job="node",name="vllm@air-a.service"'
LABELS = {"host": "gpu-01", "instance": "air-a", "pool": "air"}
GATEWAY = {"pool": "air", "gateway": "gw-01"}
DISK = 'host="gpu-01",instance="node",mountpoint="/opt",fstype="ext4"'
DISK_LABELS = {"host": "gpu-01", "instance": "node", "mountpoint": "/opt", "fstype": "ext4"}


@dataclass(frozen=True)
class Case:
    """Series every 30 s; at `at` the alert fires with these labels, or (None) does not."""

    alert: str
    series: dict[str, str]
    at: str
    labels: dict[str, str] | None = None
    summary: str = ""


def requests(ok: str, failed: str) -> dict[str, str]:
    name = 'vllm_fleet_gateway_requests_total{pool="air",gateway="gw-01",host="gw-01",code='
    return {f'{name}"200"}}': ok, f'{name}"503"}}': failed}


def engine(running: int, generated: str, prompts: str = "500x60") -> dict[str, str]:
    return {
        f'vllm:num_requests_running{{{A},engine="0"}}': f"{running}x60",
        f'vllm:generation_tokens_total{{{A},engine="0"}}': generated,
        f'vllm:prompt_tokens_total{{{A},engine="0"}}': prompts,
    }


def kv(usage: float, waiting: int) -> dict[str, str]:
    return {
        f'vllm:kv_cache_usage_perc{{{A},engine="0"}}': f"{usage}x60",
        f'vllm:num_requests_waiting{{{A},engine="0"}}': f"{waiting}x60",
    }


def disk(avail: str) -> dict[str, str]:
    return {
        f"node_filesystem_avail_bytes{{{DISK}}}": avail,
        f"node_filesystem_size_bytes{{{DISK}}}": "1000x900",
    }


def first_token(le: str) -> dict[str, str]:
    name = f"vllm:time_to_first_token_seconds_bucket{{{A},le="
    return {
        f'{name}"{b}"}}': ("0+10x60" if float(b) >= float(le) else "0x60")
        for b in ("20", "40", "80", "+Inf")
    }


UP_GATEWAY = 'up{job="gateway",host="gw-01",instance="gateway",gateway="gw-01"}'
UP_NODE = 'up{job="node",host="gpu-01",instance="node"}'
UP_VLLM = f'up{{job="vllm",{A}}}'
UP_NODE_GW = 'up{job="node",host="gw-01",instance="node"}'
READY = 'vllm_fleet_gateway_instance_ready{gateway="gw-01",'
SELF = 'host="mon",instance="prometheus",job="prometheus"'
SELF_LABELS = {"host": "mon", "instance": "prometheus", "job": "prometheus"}

CASES = (
    Case("PoolDown", {f"{READY}{A}}}": "0x20", f"{READY}{B}}}": "1x2 0x20"}, "5m", GATEWAY,
         "air: no instance is ready (seen by gw-01): gpu-01/air-a gpu-02/air-a"),
    Case("PoolDown", {f"{READY}{A}}}": "0x20", f"{READY}{B}}}": "1x20"}, "5m"),
    Case("PoolDown", {f"{READY}{A}}}": "1x6 0x1 1x20"}, "4m"),
    Case("HostDown", {UP_NODE: "1x2 0x20"}, "5m",
         {"job": "node", "host": "gpu-01", "instance": "node"},
         "gpu-01: the host does not answer (its instances are not reported apart)"),
    Case("HostDown", {UP_NODE: "1x6 0x2 1x20"}, "5m"),
    Case("GatewayDown", {UP_GATEWAY: "0x20", UP_NODE_GW: "1x20"}, "2m",
         {"job": "gateway", "host": "gw-01", "instance": "gateway", "gateway": "gw-01"},
         "gw-01: the gateway does not answer"),
    Case("GatewayDown", {UP_GATEWAY: "0x20", UP_NODE_GW: "0x20"}, "5m"),
    Case("InstanceFailed", {UNIT + ',state="failed"}': "1x20"}, "2m",
         {"host": "gpu-01", "instance": "air-a", "job": "node",
          "name": "vllm@air-a.service", "state": "failed"},
         "gpu-01: instance air-a has failed and is not tried again"),
    Case("InstanceFailed", {UNIT + ',state="failed"}': "0x20",
                            UNIT + ',state="active"}': "1x20"}, "2m"),
    Case("InstanceDown", {UP_VLLM: "0x20", UP_NODE: "1x20",
                          UNIT + ',state="activating"}': "0x20"}, "3m",
         {**LABELS, "job": "vllm"}, "gpu-01: instance air-a of air does not answer"),
    # A planned start: its unit is activating.
    Case("InstanceDown", {UP_VLLM: "0x20", UP_NODE: "1x20",
                          UNIT + ',state="activating"}': "1x20"}, "5m"),
    # Another instance of the host is starting, this one is down all the same.
    Case("InstanceDown", {UP_VLLM: "0x20", UP_NODE: "1x20",
                          UNIT.replace("air-a", "small") + ',state="activating"}': "1x20"}, "5m",
         {**LABELS, "job": "vllm"}, "gpu-01: instance air-a of air does not answer"),
    # A dead host is one message.
    Case("InstanceDown", {UP_VLLM: "0x20", UP_NODE: "0x20"}, "5m"),
    Case("EngineWedged", engine(3, "900+20x4 980x60"), "10m", LABELS,
         "gpu-01: instance air-a has 3 requests running and gives no token"),
    Case("EngineWedged", engine(3, "900+1x60"), "10m"),
    Case("EngineWedged", engine(0, "900x60"), "10m"),
    # An embedding model generates nothing and works.
    Case("EngineWedged", engine(3, "0x60", "0+100x60"), "10m"),
    Case("GatewayFailures", requests("0+94x60", "0+6x60"), "10m", GATEWAY,
         "air: 6% of requests fail at gateway gw-01"),
    Case("GatewayFailures", requests("0+96x60", "0+4x60"), "10m"),
    # One failure of three requests is no outage.
    Case("GatewayFailures", requests("0x10 2x50", "0x10 1x50"), "7m"),
    Case("DiskFull", disk("40x60"), "10m", DISK_LABELS, "gpu-01: /opt has 4% left"),
    Case("DiskFull", disk("60x60"), "10m"),
    Case("DiskFullSoon", disk("400-0.25x900"), "430m", DISK_LABELS,
         "gpu-01: /opt will be full within a day"),
    Case("DiskFullSoon", disk("200x900"), "430m"),
    # A download into an empty disk: fast, but far from full.
    Case("DiskFullSoon", disk("990-0.25x900"), "430m"),
    Case("InstanceStartsLong", {UNIT + ',state="activating"}': "1x200"}, "70m",
         {"host": "gpu-01", "instance": "air-a", "job": "node",
          "name": "vllm@air-a.service", "state": "activating"},
         "gpu-01: instance air-a has been starting or stopping for an hour"),
    Case("InstanceStartsLong", {UNIT + ',state="activating"}': "1x100 0x100"}, "70m"),
    Case("InstanceFlaps",
         {f'process_start_time_seconds{{job="vllm",{A}}}': "1x9 2x9 3x9 4x60"}, "30m",
         {**LABELS, "job": "vllm"},
         "gpu-01: instance air-a was started 3 times more in the last hour"),
    Case("InstanceFlaps",
         {f'process_start_time_seconds{{job="vllm",{A}}}': "1x9 2x60"}, "30m"),
    Case("RequestsWaiting", {f'vllm:num_requests_waiting{{{A},engine="0"}}': "11x60",
                             f'vllm:num_requests_waiting{{{A},engine="1"}}': "10x60"}, "6m",
         LABELS, "gpu-01: 21 requests wait in instance air-a of air"),
    Case("RequestsWaiting", {f'vllm:num_requests_waiting{{{A},engine="0"}}': "20x60"}, "10m"),
    Case("KvCacheFull", kv(0.97, 1), "6m", LABELS,
         "gpu-01: KV cache of instance air-a is at 97% and requests wait"),
    Case("KvCacheFull", kv(1, 0), "6m"),
    Case("KvCacheFull", kv(0.94, 9), "6m"),
    Case("Preemptions", {f'vllm:num_preemptions_total{{{A},engine="0"}}': "0+6x60"}, "20m",
         LABELS, "gpu-01: instance air-a preempts 0.2 requests a second"),
    Case("Preemptions", {f'vllm:num_preemptions_total{{{A},engine="0"}}': "0+2x60"}, "20m"),
    Case("FirstTokenSlow", first_token("80"), "20m", LABELS,
         "gpu-01: one in twenty requests to instance air-a waits over 1m 18s "
         "for its first token"),
    Case("FirstTokenSlow", first_token("20"), "20m"),
    Case("RequestsHeld",
         {'vllm_fleet_gateway_held{pool="air",gateway="gw-01",host="gw-01"}': "4x60"}, "6m",
         GATEWAY, "air: 4 requests are held at gateway gw-01 for want of a ready instance"),
    Case("RequestsHeld",
         {'vllm_fleet_gateway_held{pool="air",gateway="gw-01",host="gw-01"}': "4x5 0x60"},
         "8m"),
    Case("RequestsQueued",
         {'vllm_fleet_gateway_queued{pool="air",gateway="gw-01",host="gw-01"}': "7x60"}, "6m",
         GATEWAY, "air: 7 requests are queued at gateway gw-01: every instance is full"),
    Case("RequestsQueued",
         {'vllm_fleet_gateway_queued{pool="air",gateway="gw-01",host="gw-01"}': "7x5 0x60"},
         "8m"),
    Case("RequestsRefused",
         {'vllm_fleet_gateway_refused_total{pool="air",reason="full",gateway="gw-01",host="gw-01"}':
          "0+1x60"}, "12m", {**GATEWAY, "reason": "full"},
         "air: gateway gw-01 refuses requests (full)"),
    # A burst that is over.
    Case("RequestsRefused",
         {'vllm_fleet_gateway_refused_total{pool="air",reason="full",gateway="gw-01",host="gw-01"}':
          "0x4 9x60"}, "12m"),
    Case("InstanceDrainedLong",
         {f'vllm_fleet_gateway_instance_draining{{{A},gateway="gw-01"}}': "1x900"}, "362m",
         {**LABELS, "gateway": "gw-01"},
         "gpu-01: instance air-a of air has been drained at gateway gw-01 for six hours"),
    Case("InstanceDrainedLong",
         {f'vllm_fleet_gateway_instance_draining{{{A},gateway="gw-01"}}': "1x500 0x1 1x400"},
         "362m"),
    Case("MixedVersions", {f'up{{job="vllm",{A},vllm_version="0.21.0"}}': "1x3000",
                           f'up{{job="vllm",{B},vllm_version="0.32.0"}}': "1x3000"}, "1450m",
         {"pool": "air"}, "air: 2 vLLM versions serve it for over a day"),
    Case("MixedVersions", {f'up{{job="vllm",{A},vllm_version="0.21.0"}}': "1x3000",
                           f'up{{job="vllm",{B},vllm_version="0.32.0"}}': "1x2000"}, "1450m"),
    Case("ClockOff", {'node_timex_offset_seconds{host="gpu-01",instance="node"}': "-2x60"}, "15m",
         {"host": "gpu-01", "instance": "node"}, "gpu-01: the clock is off by 2 s"),
    Case("ClockOff", {'node_timex_offset_seconds{host="gpu-01",instance="node"}': "0.4x60"},
         "15m"),
    Case("MonitoringConfigStale",
         {f"prometheus_config_last_reload_successful{{{SELF}}}": "0x60"}, "5m", SELF_LABELS,
         "mon: Prometheus refused its new configuration and runs on the old one"),
    Case("MonitoringConfigStale",
         {f"prometheus_config_last_reload_successful{{{SELF}}}": "1x60"}, "5m"),
    Case("MonitoringRulesFail",
         {f'prometheus_rule_evaluation_failures_total{{{SELF},rule_group="vllm-fleet"}}':
          "0+1x60"}, "12m", {**SELF_LABELS, "rule_group": "vllm-fleet"},
         "mon: Prometheus cannot evaluate rules of vllm-fleet"),
    Case("MonitoringRulesFail",
         {f'prometheus_rule_evaluation_failures_total{{{SELF},rule_group="vllm-fleet"}}': "3x60"},
         "12m"),
)  # fmt: skip


def promtool_test(case: Case) -> dict[str, Any]:
    """The case as an entry of promtool's test file."""
    alert = next(a for a in alerts.alerts() if a.name == case.alert)
    expected = []
    if case.labels is not None:
        expected.append(
            {
                "exp_labels": {**case.labels, "severity": alert.severity},
                "exp_annotations": {
                    "summary": case.summary,
                    "description": alert.why,
                    "runbook_url": f"docs/runbook.md#{alert.anchor}",
                },
            }
        )
    return {
        "interval": "30s",
        "input_series": [{"series": s, "values": v} for s, v in case.series.items()],
        "alert_rule_test": [
            {"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}
        ],
    }


@promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "fleet.yml").write_text(alerts.rules())
    document = {
        "rule_files": ["fleet.yml"],
        "evaluation_interval": "1m",
        "tests": [promtool_test(case) for case in CASES],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    run = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    names = {a.name for a in alerts.alerts()}
    assert {c.alert for c in CASES if c.labels is not None} == names
    assert {c.alert for c in CASES if c.labels is None} == names


@promtool
@pytest.mark.parametrize("interval", [5, 15, 60, 300])
def test_promtool_accepts_the_rules(interval: int, tmp_path: Path) -> None:
    (tmp_path / "fleet.yml").write_text(alerts.rules(interval))
    run = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "fleet.yml")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_rate_sees_four_scrapes() -> None:
    assert alerts.window(15) == "2m"
    assert alerts.window(60) == "4m"
    assert alerts.window(61) == "5m"


@pytest.mark.parametrize("version", metrics.versions())
def test_rules_use_only_metrics_of_every_known_version(version: str) -> None:
    used = set(re.findall(r"vllm:\w+", alerts.rules()))
    assert len(used) >= 6
    assert used <= metrics.series(version)


def test_summaries_name_where() -> None:
    for alert in alerts.alerts():
        per_pool = "pool" in alert.expr and "host" not in alert.expr
        assert ("$labels.pool" if per_pool else "$labels.host") in alert.summary, alert.name
