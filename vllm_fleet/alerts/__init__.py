"""The alerts: what is asked of Prometheus, how bad an answer is, and what to do about it.

One table; the rule file and the runbook are both made from it, so that no alert is without
an entry and no entry without an alert. Labels: `host` and `instance` come from the targets
(:mod:`vllm_fleet.monitoring`); series of the gateway carry those of the instance they speak
of, and `gateway` for the one that speaks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import yaml

from vllm_fleet import metrics, paths
from vllm_fleet.alerts import fleet, hosts
from vllm_fleet.alerts.table import DISKS, RUNBOOK, Alert, Severity, window
from vllm_fleet.spec.model import Objectives

__all__ = [
    "DISKS",
    "RUNBOOK",
    "Alert",
    "Severity",
    "alerts",
    "deployed_alerts",
    "rules",
    "window",
]


def alerts(
    scrape_interval_seconds: int = 15, objectives: Objectives | None = None
) -> tuple[Alert, ...]:
    """Every alert, the worst first."""
    found = (
        *fleet.alerts(scrape_interval_seconds),
        *fleet.burn_rates(objectives or Objectives()),
        *hosts.alerts(),
    )
    order = ("critical", "warning", "info", "none")
    return tuple(sorted(found, key=lambda a: order.index(a.severity)))


def deployed_alerts(
    scrape_interval_seconds: int,
    deployed: Collection[str],
    objectives: Objectives | None = None,
) -> tuple[Alert, ...]:
    """Every alert, with the names of the deployed vLLM versions; none that has no series there."""
    found = []
    for alert in alerts(scrape_interval_seconds, objectives):
        expr = metrics.adapted(alert.expr, deployed)
        if expr is not None:
            found.append(replace(alert, expr=expr))
    return tuple(found)


def rules(
    scrape_interval_seconds: int = 15,
    deployed: Collection[str] = (),
    objectives: Objectives | None = None,
    runbook: str = RUNBOOK,
) -> str:
    """The rule file, as Prometheus reads it, for these versions of vLLM; none: the newest."""
    versions = deployed or metrics.versions()[-1:]
    entries = [
        {
            "alert": a.name,
            "expr": a.expr,
            "for": a.wait,
            "labels": {"severity": a.severity},
            "annotations": {
                "summary": a.summary,
                "description": a.why,
                "runbook_url": f"{runbook}#{a.anchor}",
            },
        }
        for a in deployed_alerts(scrape_interval_seconds, versions, objectives)
    ]
    body = {"groups": [{"name": "vllm-fleet", "rules": entries}]}
    text = yaml.safe_dump(body, sort_keys=False, width=10_000, allow_unicode=True)
    return f"# {paths.MARK}; changes here are overwritten.\n{text}"
