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
from vllm_fleet.spec.model import Objectives

pytestmark = pytest.mark.slow

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

NODE = 'host="gpu-01",instance="node"'
NODE_LABELS = {"host": "gpu-01", "instance": "node"}
CARD = 'host="gpu-01",instance="air-a",card="3",uuid="GPU-3"'
CARD_LABELS = {"host": "gpu-01", "instance": "air-a", "card": "3", "uuid": "GPU-3"}
CERTIFICATE = {"host": "gw-01", "instance": "node", "file": "/etc/vllm/tls.pem"}


def slow(metric: str, target: float, all_of: int, fast: int) -> dict[str, str]:
    """Every 30 s so many requests, of which so many keep to the target."""
    le = f"{target:g}" if target < 1 else f"{target:.1f}"
    return {
        f'vllm:{metric}_bucket{{{A},le="{le}"}}': f"0+{fast}x900",
        f"vllm:{metric}_count{{{A}}}": f"0+{all_of}x900" if all_of else "0x20 1x900",
    }


def xid(code: str, action: str) -> dict[str, str]:
    labels = ",".join(f'{k}="{v}"' for k, v in xid_labels(code, action).items())
    return {f"vllm_fleet_xid_time_seconds{{{labels}}}": "_x10 300x90"}


def xid_labels(code: str, action: str) -> dict[str, str]:
    return {**NODE_LABELS, "pci": "0000:17:00", "xid": code, "action": action}


def memory(most: int, least: int, instance: str) -> dict[str, str]:
    """Two cards of 80 GiB."""
    labels = f'host="gpu-01",instance="{instance}",card='
    return {
        f'vllm_fleet_card_memory_used_bytes{{{labels}"0"}}': f"{most}x90",
        f'vllm_fleet_card_memory_used_bytes{{{labels}"1"}}': f"{least}x90",
        f'vllm_fleet_card_memory_total_bytes{{{labels}"0"}}': "80x90",
        f'vllm_fleet_card_memory_total_bytes{{{labels}"1"}}': "80x90",
    }


def certificate(ends: int) -> dict[str, str]:
    labels = ",".join(f'{k}="{v}"' for k, v in CERTIFICATE.items())
    return {f"vllm_fleet_certificate_expires_time_seconds{{{labels}}}": f"{ends}x300"}


CASES = (
    Case("PoolDown", {f"{READY}{A}}}": "0x20", f"{READY}{B}}}": "1x2 0x20"}, "5m", GATEWAY,
         "air: no instance is ready (seen by gw-01): gpu-01/air-a gpu-02/air-a"),
    Case("PoolDown", {f"{READY}{A}}}": "0x20", f"{READY}{B}}}": "1x20"}, "5m"),
    Case("PoolDown", {f"{READY}{A}}}": "1x6 0x1 1x20"}, "4m"),
    Case("HostDown", {UP_NODE: "1x2 0x20", UP_VLLM: "1x2 0x20"}, "5m", {"host": "gpu-01"},
         "gpu-01: the host does not answer (its instances are not reported apart)"),
    Case("HostDown", {UP_NODE: "1x6 0x2 1x20"}, "5m"),
    # Its exporter alone is silent: the host is there, and what else it tells is not held back.
    Case("HostDown", {UP_NODE: "0x20", UP_VLLM: "1x20"}, "5m"),
    # As Debian's own configuration left it, minutes before ours came.
    Case("HostDown", {'up{job="node",instance="localhost:9100"}': "0x20"}, "5m"),
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
    Case("MixedVersions", {f'vllm_fleet_instance_info{{{A},vllm_version="0.21.0"}}': "1x3000",
                           f'vllm_fleet_instance_info{{{B},vllm_version="0.32.0"}}': "1x3000"},
         "1450m",
         {"pool": "air"}, "air: 2 vLLM versions serve it for over a day"),
    Case("MixedVersions", {f'vllm_fleet_instance_info{{{A},vllm_version="0.21.0"}}': "1x3000",
                           f'vllm_fleet_instance_info{{{B},vllm_version="0.32.0"}}': "1x2000"},
         "1450m"),
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
    Case("InstanceNotReady", {UP_VLLM: "1x60", f'{READY}{A}}}': "0x60"}, "4m", LABELS,
         "gpu-01: instance air-a of air runs and is not ready"),
    # Drained by an operator.
    Case("InstanceNotReady", {UP_VLLM: "1x60", f'{READY}{A}}}': "0x60",
                              f'vllm_fleet_gateway_instance_draining{{{A},gateway="gw-01"}}':
                              "1x60"}, "10m"),
    # It is warming up: its server answers, its unit is not active yet.
    Case("InstanceNotReady", {UP_VLLM: "1x60", f'{READY}{A}}}': "0x60",
                              UNIT + ',state="activating"}': "1x60"}, "10m"),
    Case("EngineTakenOut", {f"vllm_fleet_probe_out{{{A}}}": "0x4 1x60"}, "8m", LABELS,
         "gpu-01: instance air-a of air gives no token, is out of rotation, and has not been "
         "restarted"),
    # Restarted within two minutes.
    Case("EngineTakenOut", {f"vllm_fleet_probe_out{{{A}}}": "0x4 1x4 0x60"}, "8m"),
    Case("EngineRestarted", {f"vllm_fleet_probe_restarts_total{{{A}}}": "0x10 1x60"}, "10m",
         LABELS, "gpu-01: instance air-a of air was wedged and was restarted by the probe"),
    Case("EngineRestarted", {f"vllm_fleet_probe_restarts_total{{{A}}}": "3x200"}, "90m"),
    Case("ProbeFails", {f"vllm_fleet_probe_success{{{A}}}": "1x2 0x60"}, "5m", LABELS,
         "gpu-01: instance air-a of air does not answer a request for one token in time"),
    Case("ProbeFails", {f"vllm_fleet_probe_success{{{A}}}": "1x2 0x1 1x1 0x1 1x60"}, "5m"),
    Case("ProbeFails", {f"vllm_fleet_probe_success{{{A}}}": "0x60",
                        UNIT + ',state="deactivating"}': "1x60"}, "5m"),
    Case("ProbeSilent", {f"vllm_fleet_probe_time_seconds{{{A}}}": "0x60"}, "12m", LABELS,
         "gpu-01: instance air-a has not been probed for 12m 0s"),
    Case("ProbeSilent", {f"vllm_fleet_probe_time_seconds{{{A}}}": "0+30x60"}, "12m"),
    Case("EngineRejects",
         {f'vllm:admission_rejections_total{{{A},engine="0",reason="max_num_queued_reqs"}}':
          "0+1x60"}, "12m", LABELS,
         "gpu-01: instance air-a of air turns requests away: its own queue is full"),
    Case("EngineRejects",
         {f'vllm:admission_rejections_total{{{A},engine="0",reason="max_num_queued_reqs"}}':
          "7x60"}, "12m"),
    Case("PlanDiffers", {f"vllm_fleet_plan_differences{{{A}}}": "2x60"}, "12m", LABELS,
         "gpu-01: instance air-a of air came up with other memory than planned (2 figures)"),
    Case("PlanDiffers", {f"vllm_fleet_plan_differences{{{A}}}": "0x60"}, "12m"),
    Case("PlannedChange", {f"vllm_fleet_change_until_seconds{{{A}}}": "600x60"}, "9m",
         {"pool": "air"}, "air: a planned change is under way"),
    # The run that began it has died: it ends all the same.
    Case("PlannedChange", {f"vllm_fleet_change_until_seconds{{{A}}}": "600x60"}, "11m"),
    Case("FirstTokenBudgetFast", slow("time_to_first_token_seconds", 10, 20, 2), "70m",
         {"pool": "air"},
         "air: first token over 10 s in 90% of cases for an hour"),
    # Six in ten are slow: the slow burn's affair.
    Case("FirstTokenBudgetFast", slow("time_to_first_token_seconds", 10, 20, 8), "70m"),
    # One request in that hour, and it was slow.
    Case("FirstTokenBudgetFast", slow("time_to_first_token_seconds", 10, 0, 0), "70m"),
    Case("FirstTokenBudgetSlow", slow("time_to_first_token_seconds", 10, 20, 12), "420m",
         {"pool": "air"},
         "air: first token over 10 s in 40% of cases for six hours"),
    Case("FirstTokenBudgetSlow", slow("time_to_first_token_seconds", 10, 20, 15), "420m"),
    Case("TokenGapBudgetFast", slow("inter_token_latency_seconds", 0.2, 20, 4), "70m",
         {"pool": "air"},
         "air: time between tokens over 0.2 s in 80% of cases for an hour"),
    Case("TokenGapBudgetFast", slow("inter_token_latency_seconds", 0.2, 20, 6), "70m"),
    Case("TokenGapBudgetSlow", slow("inter_token_latency_seconds", 0.2, 20, 12), "420m",
         {"pool": "air"},
         "air: time between tokens over 0.2 s in 40% of cases for six hours"),
    Case("TokenGapBudgetSlow", slow("inter_token_latency_seconds", 0.2, 20, 15), "420m"),
    Case("DiskBroken", {f"node_filesystem_device_error{{{DISK}}}": "0x4 1x60"}, "5m", DISK_LABELS,
         "gpu-01: /opt cannot be read"),
    Case("DiskBroken", {f"node_filesystem_device_error{{{DISK}}}": "0x60"}, "5m"),
    # A mount below a directory that the exporter may not enter.
    Case("DiskBroken", {f"node_filesystem_device_error{{{DISK}}}": "1x60"}, "5m"),
    Case("OomKill", {f"node_vmstat_oom_kill{{{NODE}}}": "4x10 5x60"}, "8m", NODE_LABELS,
         "gpu-01: the kernel killed a process for want of memory"),
    Case("OomKill", {f"node_vmstat_oom_kill{{{NODE}}}": "4x60"}, "8m"),
    Case("InterfaceDown", {f'node_network_up{{{NODE},device="eth1"}}': "1x10 0x60"}, "8m",
         {**NODE_LABELS, "device": "eth1"}, "gpu-01: network interface eth1 is down"),
    # Never in use.
    Case("InterfaceDown", {f'node_network_up{{{NODE},device="eth1"}}': "0x60"}, "8m"),
    Case("InterfaceDown", {f'node_network_up{{{NODE},device="veth7"}}': "1x10 0x60"}, "8m"),
    Case("InfinibandDown",
         {f'node_infiniband_state_id{{{NODE},device="mlx5_0",port="1"}}': "4x10 1x60"}, "8m",
         {**NODE_LABELS, "device": "mlx5_0", "port": "1"},
         "gpu-01: InfiniBand mlx5_0 port 1 is not active"),
    Case("InfinibandDown",
         {f'node_infiniband_state_id{{{NODE},device="mlx5_0",port="1"}}': "1x60"}, "8m"),
    Case("CardGone", {f"vllm_fleet_card_present{{{CARD}}}": "1x4 0x60"}, "4m", CARD_LABELS,
         "gpu-01: card 3 of instance air-a is gone"),
    Case("CardGone", {f"vllm_fleet_card_present{{{CARD}}}": "1x60"}, "4m"),
    Case("XidError", xid("79", "reboot"), "10m", xid_labels("79", "reboot"),
         "gpu-01: Xid 79 of card 0000:17:00: reboot"),
    Case("XidError", xid("31", "application"), "10m"),
    # An hour ago, and mended since.
    Case("XidError", xid("79", "reboot"), "30m"),
    Case("XidOfProgram", xid("31", "application"), "10m", xid_labels("31", "application"),
         "gpu-01: Xid 31 of card 0000:17:00: the program that used it failed"),
    Case("XidOfProgram", xid("79", "reboot"), "10m"),
    Case("CardMemoryErrors", {f"vllm_fleet_card_ecc_uncorrected_total{{{CARD}}}": "0x10 1x60"},
         "8m", CARD_LABELS, "gpu-01: card 3 has uncorrectable memory errors"),
    # Old ones, and a reboot, which resets the count.
    Case("CardMemoryErrors", {f"vllm_fleet_card_ecc_uncorrected_total{{{CARD}}}": "5x10 0x60"},
         "8m"),
    Case("CardNeedsReset", {f"vllm_fleet_card_repair_pending{{{CARD}}}": "1x60"}, "12m",
         CARD_LABELS, "gpu-01: card 3 waits for a reset to replace bad memory"),
    Case("CardNeedsReset", {f"vllm_fleet_card_repair_pending{{{CARD}}}": "1x10 0x60"}, "12m"),
    Case("CardMemoryWornOut", {f"vllm_fleet_card_remap_failed{{{CARD}}}": "1x60"}, "12m",
         CARD_LABELS, "gpu-01: card 3 has no spare memory rows left"),
    Case("CardMemoryWornOut", {f"vllm_fleet_card_remap_failed{{{CARD}}}": "0x60"}, "12m"),
    Case("CardThrottled", {f'vllm_fleet_card_throttled{{{CARD},reason="hw_thermal"}}': "1x60"},
         "17m", {"host": "gpu-01", "instance": "air-a", "card": "3", "reason": "hw_thermal"},
         "gpu-01: card 3 is slowed down (hw_thermal)"),
    # A peak of power now and then.
    Case("CardThrottled",
         {f'vllm_fleet_card_throttled{{{CARD},reason="hw_thermal"}}': "0x3 1 0x3 1 0x3 1 0x60"},
         "17m"),
    Case("NvlinkDown", {f"vllm_fleet_card_nvlinks_active{{{CARD}}}": "18x10 17x60"}, "9m",
         CARD_LABELS, "gpu-01: card 3 has 17 NVLinks, fewer than today before"),
    # A bridge between two cards uses only some of the links.
    Case("NvlinkDown", {f"vllm_fleet_card_nvlinks_active{{{CARD}}}": "4x60"}, "9m"),
    Case("GroupMemoryUneven", memory(70, 40, "air-a"), "20m",
         {"host": "gpu-01", "instance": "air-a"},
         "gpu-01: memory in use differs by 37.5% between the cards of instance air-a"),
    Case("GroupMemoryUneven", memory(70, 66, "air-a"), "20m"),
    # Cards of no instance may hold what they like.
    Case("GroupMemoryUneven", memory(70, 0, "node"), "20m"),
    Case("ClockUnsynchronised", {f"node_timex_sync_status{{{NODE}}}": "0x90",
                                 f"node_timex_maxerror_seconds{{{NODE}}}": "16x90"}, "35m",
         NODE_LABELS, "gpu-01: nothing keeps the clock right"),
    Case("ClockUnsynchronised", {f"node_timex_sync_status{{{NODE}}}": "0x90",
                                 f"node_timex_maxerror_seconds{{{NODE}}}": "0.4x90"}, "35m"),
    Case("CertificateExpires", certificate(86400 + 600), "10m", CERTIFICATE,
         "gw-01: the certificate /etc/vllm/tls.pem ends in 1d 0h 0m 0s"),
    Case("CertificateExpires", certificate(3 * 86400), "10m"),
    Case("CertificateExpiresSoon", certificate(10 * 86400 + 4200), "70m", CERTIFICATE,
         "gw-01: the certificate /etc/vllm/tls.pem ends in 10d 0h 0m 0s"),
    Case("CertificateExpiresSoon", certificate(20 * 86400), "70m"),
    Case("ExporterDown", {'up{job="gpu",host="gpu-01",instance="gpu"}': "0x60", UP_NODE: "1x60"},
         "6m", {"job": "gpu", "host": "gpu-01", "instance": "gpu"},
         "gpu-01: gpu of gpu is not read"),
    Case("ExporterDown", {'up{job="gpu",host="gpu-01",instance="gpu"}': "0x60", UP_NODE: "0x60"},
         "6m"),
    Case("ExporterDown", {UP_NODE: "0x60", UP_VLLM: "1x60"}, "6m",
         {"job": "node", "host": "gpu-01", "instance": "node"},
         "gpu-01: node of node is not read"),
    Case("ExporterDown", {'up{job="node",instance="localhost:9100"}': "0x60"}, "6m"),
    Case("HostwatchSilent", {f"vllm_fleet_hostwatch_time_seconds{{{NODE}}}": "0x90"}, "20m",
         NODE_LABELS, "gpu-01: cards, kernel log and certificates have not been looked at for "
         "20m 0s"),
    Case("HostwatchSilent", {f"vllm_fleet_hostwatch_time_seconds{{{NODE}}}": "0+30x90"}, "20m"),
    Case("TextfileUnreadable", {f"node_textfile_scrape_error{{{NODE}}}": "1x90"}, "12m",
         NODE_LABELS, "gpu-01: the node exporter cannot read a file of metrics"),
    Case("TextfileUnreadable", {f"node_textfile_scrape_error{{{NODE}}}": "1x10 0x90"}, "12m"),
    Case("GatewayMetricsDropped",
         {'vllm_fleet_gateway_series_dropped_total{gateway="gw-01",host="gw-01"}': "0x4 3x60"},
         "5m", {"gateway": "gw-01", "host": "gw-01"},
         "gw-01: the gateway has no room for new series of metrics"),
    Case("GatewayMetricsDropped",
         {'vllm_fleet_gateway_series_dropped_total{gateway="gw-01",host="gw-01"}': "3x90"},
         "20m"),
    Case("AlertsNotSent",
         {'alertmanager_notifications_failed_total{host="mon",integration="webhook"}': "0+1x60"},
         "15m", {"host": "mon", "integration": "webhook"},
         "mon: Alertmanager could not send alerts (webhook)"),
    # One try in between.
    Case("AlertsNotSent",
         {'alertmanager_notifications_failed_total{host="mon",integration="webhook"}': "4x60"},
         "15m"),
    Case("AlertsDropped", {f"prometheus_notifications_dropped_total{{{SELF}}}": "0+1x60"}, "15m",
         SELF_LABELS, "mon: Prometheus could not hand alerts to Alertmanager"),
    Case("AlertsDropped", {f"prometheus_notifications_dropped_total{{{SELF}}}": "2x60"}, "15m"),
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
    # One rule file for each alert: promtool evaluates every rule of a file at every minute.
    whole = yaml.safe_load(alerts.rules())
    files = []
    for rule in whole["groups"][0]["rules"]:
        name = rule["alert"]
        alone = {"groups": [{"name": "vllm-fleet", "rules": [rule]}]}
        (tmp_path / f"{name}.rules.yml").write_text(yaml.safe_dump(alone))
        document = {
            "rule_files": [f"{name}.rules.yml"],
            "evaluation_interval": "1m",
            "tests": [promtool_test(case) for case in CASES if case.alert == name],
        }
        files.append(f"{name}.test.yml")
        (tmp_path / files[-1]).write_text(yaml.safe_dump(document))
    run = subprocess.run(
        ["promtool", "test", "rules", *files], cwd=tmp_path, capture_output=True, text=True
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
def test_rules_ask_a_version_only_for_what_it_exports(version: str) -> None:
    used = set(re.findall(r"vllm:\w+", alerts.rules(15, (version,))))
    assert len(used) >= 6
    assert used <= metrics.series(version)
    kept = {a.name for a in alerts.deployed_alerts(15, (version,))}
    assert {a.name for a in alerts.alerts()} - kept <= {"EngineRejects"}  # from 0.32 on


def test_a_fleet_in_mid_upgrade_keeps_the_alerts_of_both_versions() -> None:
    versions = ("0.21.0", "0.32.0")
    for alert in alerts.deployed_alerts(15, versions):
        for name in metrics.named(alert.expr):
            assert any(name in metrics.series(v) for v in versions), alert.name
    assert "EngineRejects" in alerts.rules(15, versions)


def test_rules_use_only_metrics_that_somebody_exports() -> None:
    known = metrics.gateway_series() | metrics.own_series() | metrics.OTHERS
    for alert in alerts.alerts():
        names = set(re.findall(r"[a-z_]+_[a-z_]+(?=[{\[ )]|$)", alert.expr))
        ours = {
            n for n in names if n.startswith(("vllm_", "node_", "prometheus_", "alertmanager_"))
        }
        assert ours <= known | {"vllm_version"}, (alert.name, ours - known)


@pytest.mark.parametrize("bound", [5.0, 2.5, 0.1])
def test_targets_find_their_bucket_however_it_is_written(bound: float) -> None:
    expr = alerts.fleet.burn_rates(Objectives(first_token_seconds=bound))[0].expr
    pattern = re.search(r'le=~"([^"]+)"', expr)
    assert pattern
    for text in {f"{bound:g}", str(bound)}:
        assert re.fullmatch(pattern[1], text)
    assert not re.fullmatch(pattern[1], "50.0")


def test_summaries_name_where() -> None:
    for alert in alerts.alerts():
        per_pool = "pool" in alert.expr and "host" not in alert.expr
        assert ("$labels.pool" if per_pool else "$labels.host") in alert.summary, alert.name
