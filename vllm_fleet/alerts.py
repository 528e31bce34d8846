"""The alerts: what is asked of Prometheus, how bad an answer is, and what to do about it.

One table; the rule file and the runbook are both made from it, so that no alert is without
an entry and no entry without an alert. Labels: `host` and `instance` come from the targets
(:mod:`vllm_fleet.monitoring`); series of the gateway carry those of the instance they speak
of, and `gateway` for the one that speaks.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import yaml

from vllm_fleet import metrics, paths

Severity = Literal["critical", "warning", "info"]

RUNBOOK = "docs/runbook.md"
DISKS = 'fstype!~"tmpfs|ramfs|overlay|squashfs|iso9660"'
EACH = "host, instance, pool"  # labels that tell one vLLM server from all others


@dataclass(frozen=True)
class Alert:
    """One alert. ``wait`` is Prometheus' `for`; ``why`` and ``remedy`` are its runbook entry."""

    name: str
    expr: str
    wait: str
    severity: Severity
    summary: str  # names host and instance; Go template over $labels and $value
    why: str
    remedy: str

    @property
    def anchor(self) -> str:
        """Heading of its runbook entry, as a link target: PoolDown is pool-down."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", self.name).lower()


def window(scrape_interval_seconds: int) -> str:
    """Shortest range in which a rate sees at least four scrapes, and no less than two minutes."""
    return f"{max(2, -(-scrape_interval_seconds * 4 // 60))}m"


def alerts(scrape_interval_seconds: int = 15) -> tuple[Alert, ...]:
    """Every alert, the worst first."""
    w = window(scrape_interval_seconds)
    # A host that is away is one message, not one for each thing that ran on it.
    host_up = 'unless on (host) up{job="node"} == 0'
    # systemd says that the unit is on its way up or down: planned, and its own timeout bounds it.
    moving = (
        'label_replace(node_systemd_unit_state{name=~"vllm@.+",state=~"activating|deactivating"}'
        ' == 1, "instance", "$1", "name", "vllm@(.+)[.]service")'
    )
    return (
        Alert(
            "PoolDown",
            "max by (pool, gateway) (vllm_fleet_gateway_instance_ready) == 0",
            "1m",
            "critical",
            "{{ $labels.pool }}: no instance is ready (seen by {{ $labels.gateway }}):"
            # An answer comes in no order; a text that changes would be sent as a new alert.
            "{{ range query (printf `label_join(vllm_fleet_gateway_instance_ready"
            '{pool=%q,gateway=%q}, "at", "/", "host", "instance")`'
            ' $labels.pool $labels.gateway) | sortByLabel "at" }} {{ .Labels.at }}{{ end }}',
            "Every instance of the pool is starting, draining, stopped or broken. The gateway "
            "holds requests for `gateway.hold_seconds`, then answers 503.",
            "`systemctl status 'vllm@*'` on the hosts named. Starting: wait for the warm-up "
            "(`journalctl -fu vllm@NAME`). Failed: "
            "`journalctl -u vllm@NAME -n 400 | fleet explain -`.",
        ),
        Alert(
            "HostDown",
            'up{job="node"} == 0',
            "2m",
            "critical",
            "{{ $labels.host }}: the host does not answer (its instances are not reported apart)",
            "The host is off, cut from the network, or its node exporter has stopped.",
            "Reach it by SSH or its management port. Up, but not answering on 9100: "
            "`systemctl status prometheus-node-exporter`. Lost: the pools go on without it; "
            "deploy again when it is back.",
        ),
        Alert(
            "GatewayDown",
            f'up{{job="gateway"}} == 0 {host_up}',
            "1m",
            "critical",
            "{{ $labels.host }}: the gateway does not answer",
            "nginx on this host is stopped or hung. Clients that use its address are cut off.",
            "`nginx -t && systemctl status nginx`; the error log: "
            "`tail -n 50 /var/log/nginx/error.log | fleet explain -`.",
        ),
        Alert(
            "InstanceFailed",
            'label_replace(node_systemd_unit_state{name=~"vllm@.+",state="failed"} == 1,'
            ' "instance", "$1", "name", "vllm@(.+)[.]service")',
            "1m",
            "critical",
            "{{ $labels.host }}: instance {{ $labels.instance }} has failed and is not tried again",
            "The unit ran into its start limit or was killed; systemd has given up on it.",
            "`journalctl -u vllm@NAME -n 400 | fleet explain -` names the cause. When it is "
            "mended: deploy again, or `systemctl reset-failed vllm@NAME` and start it.",
        ),
        Alert(
            "InstanceDown",
            f'up{{job="vllm"}} == 0 unless on (host, instance) {moving} {host_up}',
            "2m",
            "critical",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} "
            "does not answer",
            "The server's port is closed or hung while its unit is neither starting nor stopping. "
            "The pool has lost this instance's share of capacity.",
            "`systemctl status vllm@NAME`, then `journalctl -u vllm@NAME -n 400 | "
            "fleet explain -`. Inactive: deploy again. Active and silent: restart it.",
        ),
        Alert(
            "EngineWedged",
            f"sum by ({EACH}) (vllm:num_requests_running) > 0"
            f" and sum by ({EACH}) (rate(vllm:generation_tokens_total[{w}])) == 0"
            f" and sum by ({EACH}) (rate(vllm:prompt_tokens_total[{w}])) == 0",
            "3m",
            "critical",
            "{{ $labels.host }}: instance {{ $labels.instance }} has {{ $value }} requests "
            "running and gives no token",
            "The engine hangs in a kernel or a collective while its API process still answers "
            "/health with 200. A single prompt of several minutes looks the same.",
            "Take it out and restart it: `systemctl restart vllm@NAME` (the gateway sends its "
            "requests elsewhere). Before that, keep `journalctl -u vllm@NAME -n 400`, "
            "`journalctl -k | grep Xid` and `nvidia-smi -q`.",
        ),
        Alert(
            "GatewayFailures",
            'sum by (pool, gateway) (rate(vllm_fleet_gateway_requests_total{code=~"5.."}[5m]))'
            " / sum by (pool, gateway) (rate(vllm_fleet_gateway_requests_total[5m])) > 0.05"
            " and sum by (pool, gateway)"
            ' (increase(vllm_fleet_gateway_requests_total{code=~"5.."}[5m])) >= 5',
            "2m",
            "critical",
            "{{ $labels.pool }}: {{ $value | humanizePercentage }} of requests fail at gateway "
            "{{ $labels.gateway }}",
            "Counted at the gateway: vLLM 0.21 counts a client's 400 as 5xx of its own.",
            "Which instance: the access log holds the upstream of every failure "
            "(`grep '\"status\":5' /var/log/nginx/*access*.log`). 503: no instance ready, or "
            "too many held. 502 and 504: look at the instance's journal.",
        ),
        Alert(
            "DiskFull",
            f"node_filesystem_avail_bytes{{{DISKS}}} / node_filesystem_size_bytes{{{DISKS}}}"
            " < 0.05",
            "5m",
            "critical",
            "{{ $labels.host }}: {{ $labels.mountpoint }} has {{ $value | humanizePercentage }} "
            "left",
            "Logs, releases, weights or compile caches fill it. New starts and downloads fail.",
            "`du -xhd1 MOUNT | sort -h`. Old releases below /opt/vllm/releases and revisions "
            "below /opt/vllm/models that no instance uses can go; `journalctl --vacuum-size=1G`.",
        ),
        Alert(
            "DiskFullSoon",
            f"predict_linear(node_filesystem_avail_bytes{{{DISKS}}}[6h], 86400) < 0"
            f" and node_filesystem_avail_bytes{{{DISKS}}} / node_filesystem_size_bytes{{{DISKS}}}"
            " < 0.25",
            "30m",
            "warning",
            "{{ $labels.host }}: {{ $labels.mountpoint }} will be full within a day",
            "It fills at a rate that leaves less than a day.",
            "See disk-full; a download under way ends by itself.",
        ),
        Alert(
            "InstanceStartsLong",
            f"{moving} == 1",
            "1h",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} has been starting or stopping "
            "for an hour",
            "Weights are read slowly, kernels compile, the warm-up does not succeed, or requests "
            "do not end.",
            "`journalctl -fu vllm@NAME`: the warm-up prints what it waits for. `start_seconds` "
            "and `drain_seconds` bound both.",
        ),
        Alert(
            "InstanceFlaps",
            'changes(process_start_time_seconds{job="vllm"}[1h]) > 2',
            "0m",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} was started {{ $value }} times "
            "more in the last hour",
            "It comes up and dies again: often memory, a card that is lost, or the host's OOM "
            "killer.",
            "`journalctl -u vllm@NAME --since -2h | fleet explain -`; "
            "`journalctl -k --since -2h | grep -E 'Xid|oom-kill'`.",
        ),
        Alert(
            "RequestsWaiting",
            f"sum by ({EACH}) (vllm:num_requests_waiting) > 20",
            "5m",
            "warning",
            "{{ $labels.host }}: {{ $value }} requests wait in instance {{ $labels.instance }} "
            "of {{ $labels.pool }}",
            "The instance gets more than it can start: time to first token grows.",
            "KV cache near 100 %: see kv-cache-full. Else raise `max-num-seqs` where memory "
            "allows, or add an instance to the pool.",
        ),
        Alert(
            "KvCacheFull",
            f"max by ({EACH}) (vllm:kv_cache_usage_perc) > 0.95"
            f" and sum by ({EACH}) (vllm:num_requests_waiting) > 0",
            "5m",
            "warning",
            "{{ $labels.host }}: KV cache of instance {{ $labels.instance }} is at "
            "{{ $value | humanizePercentage }} and requests wait",
            "Requests wait for memory, not for compute. Full without waiting is normal.",
            "Shorter `max_model_len`, `kv-cache-dtype: fp8`, fewer `max-num-seqs`, more cards "
            "per instance, or one more instance. `fleet size` says what fits.",
        ),
        Alert(
            "Preemptions",
            f"sum by ({EACH}) (rate(vllm:num_preemptions_total[5m])) > 0.1",
            "10m",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} preempts "
            "{{ printf `%.1f` $value }} requests a second",
            "More sequences run than their KV cache bears; preempted ones are computed again.",
            "Lower `max-num-seqs` or see kv-cache-full.",
        ),
        Alert(
            "FirstTokenSlow",
            f"histogram_quantile(0.95, sum by ({EACH}, le)"
            " (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 30",
            "10m",
            "warning",
            "{{ $labels.host }}: one in twenty requests to instance {{ $labels.instance }} waits "
            "over {{ $value | humanizeDuration }} for its first token",
            "Queueing, very long prompts, or a card that throttles.",
            "Waiting above 0: see requests-waiting. Else look at the prompt lengths and at "
            "`nvidia-smi -q -d PERFORMANCE`.",
        ),
        Alert(
            "RequestsHeld",
            "max by (pool, gateway) (vllm_fleet_gateway_held) > 0",
            "5m",
            "warning",
            "{{ $labels.pool }}: {{ $value }} requests are held at gateway {{ $labels.gateway }} "
            "for want of a ready instance",
            "The gateway keeps requests while no instance of the pool is ready.",
            "See pool-down. During a change of a pool with one instance this is meant.",
        ),
        Alert(
            "RequestsQueued",
            "max by (pool, gateway) (vllm_fleet_gateway_queued) > 0",
            "5m",
            "warning",
            "{{ $labels.pool }}: {{ $value }} requests are queued at gateway "
            "{{ $labels.gateway }}: every instance is full",
            "Each instance of the pool has as many requests as it may have at once.",
            "See requests-waiting: more instances, or shorter requests. `/status` on the gateway "
            "shows who has how many; an instance that is drained or not ready is missing there.",
        ),
        Alert(
            "RequestsRefused",
            "sum by (pool, gateway, reason) (increase(vllm_fleet_gateway_refused_total[5m])) > 0",
            "5m",
            "warning",
            "{{ $labels.pool }}: gateway {{ $labels.gateway }} refuses requests "
            "({{ $labels.reason }})",
            "Clients got 429 or 503: a hold or a queue was full or took too long, or a key is over "
            "its limits.",
            "The reason stands in the summary. `full`, `time`, `empty`, `tries`: see pool-down and "
            "requests-queued. A key's limit: the access log holds its owner.",
        ),
        Alert(
            "InstanceDrainedLong",
            "max by (host, instance, pool, gateway) (vllm_fleet_gateway_instance_draining) == 1",
            "6h",
            "info",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} has been "
            "drained at gateway {{ $labels.gateway }} for six hours",
            "An operator took it out and has not put it back.",
            "Still wanted? Else, on the gateway: "
            "`curl -X POST '127.0.0.1:9145/undrain?instance=HOST/NAME'`.",
        ),
        Alert(
            "MixedVersions",
            'count by (pool) (count by (pool, vllm_version) (up{job="vllm"})) > 1',
            "1d",
            "info",
            "{{ $labels.pool }}: {{ $value }} vLLM versions serve it for over a day",
            "An upgrade stopped half way, or an instance sets its own `vllm_version`.",
            "`fleet status` shows who runs what; run upgrade.py again, or rollback.py.",
        ),
        Alert(
            "ClockOff",
            "abs(node_timex_offset_seconds) > 0.5",
            "10m",
            "warning",
            "{{ $labels.host }}: the clock is off by {{ $value }} s",
            "Certificates, logs and rates of several hosts no longer agree.",
            "`timedatectl`; start chrony or systemd-timesyncd and check that it reaches a server.",
        ),
        Alert(
            "MonitoringConfigStale",
            "prometheus_config_last_reload_successful == 0",
            "1m",
            "warning",
            "{{ $labels.host }}: Prometheus refused its new configuration and runs on the old one",
            "A file below /etc/prometheus does not parse.",
            "`promtool check config /etc/prometheus/vllm-fleet.yml`, then deploy again.",
        ),
        Alert(
            "MonitoringRulesFail",
            "increase(prometheus_rule_evaluation_failures_total[5m]) > 0",
            "5m",
            "warning",
            "{{ $labels.host }}: Prometheus cannot evaluate rules of {{ $labels.rule_group }}",
            "Alerts of that group may be silent.",
            "`journalctl -u prometheus | grep -i rule` names the rule and the reason.",
        ),
    )


def deployed_alerts(
    scrape_interval_seconds: int, deployed: Collection[str]
) -> tuple[Alert, ...]:
    """Every alert, with the names of the deployed vLLM versions; none that has no series there."""
    found = []
    for alert in alerts(scrape_interval_seconds):
        expr = metrics.adapted(alert.expr, deployed)
        if expr is not None:
            found.append(replace(alert, expr=expr))
    return tuple(found)


def rules(scrape_interval_seconds: int = 15, deployed: Collection[str] = ()) -> str:
    """The rule file, as Prometheus reads it, for these versions of vLLM; none: the newest."""
    entries = [
        {
            "alert": a.name,
            "expr": a.expr,
            "for": a.wait,
            "labels": {"severity": a.severity},
            "annotations": {
                "summary": a.summary,
                "description": a.why,
                "runbook_url": f"{RUNBOOK}#{a.anchor}",
            },
        }
        for a in deployed_alerts(scrape_interval_seconds, deployed or metrics.versions()[-1:])
    ]
    body = {"groups": [{"name": "vllm-fleet", "rules": entries}]}
    text = yaml.safe_dump(body, sort_keys=False, width=10_000, allow_unicode=True)
    return f"# {paths.MARK}; changes here are overwritten.\n{text}"
