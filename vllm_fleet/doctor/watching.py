"""Findings of Prometheus: targets it cannot read, alerts that fire."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from vllm_fleet.alerts import alerts
from vllm_fleet.doctor.case import Case, Finding, Json
from vllm_fleet.doctor.entries import Level
from vllm_fleet.doctor.gateways import blocked

SEVERITIES: dict[str, Level] = {"critical": "critical", "warning": "warning", "info": "info"}


def findings(case: Case) -> Iterator[Finding]:
    """Everything that the monitoring hosts say."""
    for spec, state in case.looked_at:
        seen = case.answer(spec.name).get("prometheus")
        if not seen or not state.active("prometheus.service"):
            continue  # a unit that is down is told as such
        if seen["why"]:
            port = spec.settings.monitoring.listen
            yield Finding(
                "target-down",
                spec.name,
                f"Prometheus does not answer on port {port}",
                seen["why"],
                (case.ssh(spec.name, "journalctl -u prometheus -n 50 --no-pager"),),
            )
            continue
        for target in seen["down"]:
            yield from _target(case, spec.name, target)
        for alert in seen["alerts"]:
            yield from _alert(spec.name, alert)


def _target(case: Case, monitor: str, target: Json) -> Iterator[Finding]:
    host, job = target["host"] or monitor, target["job"]
    state = case.states.get(host)
    if state is None:
        return  # the host is told as down
    port = urlsplit(target["url"]).port or 0
    if state.listening.get(str(port)):
        if any(words in target["error"] for words in ("deadline", "refused", "timeout", "route")):
            said = f"it: {target['error']}"
            yield blocked(case, host, port, f"Prometheus on {monitor}", said)
            return
    elif job in ("vllm", "node", "gateway", "gpu", "alertmanager"):
        return  # nobody listens: its unit is told as stopped
    yield Finding(
        "target-down",
        host,
        f"Prometheus on {monitor} cannot read {job} ({target['instance']})",
        f"{target['url']}: {target['error']}",
        (case.ssh(monitor, f"curl -sS -m 5 -o /dev/null {target['url']}"),),
    )


def _alert(monitor: str, alert: Json) -> Iterator[Finding]:
    labels = alert["labels"]
    severity = str(labels.get("severity", "warning"))
    if severity == "none":
        return
    anchor = str(alert["runbook"]).rpartition("#")[2]
    ours = anchor in {one.anchor for one in alerts()}
    named = {k: v for k, v in labels.items() if k not in ("alertname", "severity", "job")}
    yield Finding(
        anchor if ours else "alert-firing",
        str(labels.get("host") or labels.get("gateway") or monitor),
        f"alert {labels.get('alertname')}: {alert['summary'] or named}",
        f"Prometheus on {monitor}, since {str(alert['since'])[:19]}",
        level=SEVERITIES.get(severity, "warning"),
        instance=str(labels.get("instance") or "") if labels.get("pool") else "",
    )
