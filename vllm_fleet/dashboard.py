"""The fleet's Grafana dashboard, as plain data. The same code gives the same file, always.

Ids of panels are counted from the top, the grid is laid out here (24 columns), and every
query uses metrics that all supported vLLM versions export (tested).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from vllm_fleet.alerts.table import DISKS

SOURCE = "vllm-fleet"  # uid of the data source
UID = "vllm-fleet"
WIDTH = 24
HEIGHT = 7

_OF = '{pool=~"$pool",host=~"$host",instance=~"$instance"}'
_RATE = "[$__rate_interval]"
_BY = "pool, host, instance"
_NAMED = "{{host}}/{{instance}}"


@dataclass(frozen=True)
class Panel:
    """One panel: its queries as (expression, legend), the unit in Grafana's words."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    text: str = ""  # what to make of it
    red_below: float | None = None  # for a stat: red under this value, green from it on
    red_from: float | None = None  # for a stat: green under this value, red from it on
    most: float | None = None  # upper end of the axis


def _quantile(q: float, metric: str) -> tuple[str, str]:
    inner = f"sum by (pool, le) (rate(vllm:{metric}_bucket{_OF}{_RATE}))"
    return f"histogram_quantile({q}, {inner})", f"{{{{pool}}}} p{round(q * 100)}"


def _gateway_quantile(q: float, metric: str) -> tuple[str, str]:
    series = f"vllm_fleet_gateway_{metric}_bucket"
    inner = f'sum by (pool, le) (rate({series}{{pool=~"$pool"}}{_RATE}))'
    return f"histogram_quantile({q}, {inner})", f"{{{{pool}}}} p{round(q * 100)}"


def _each(metric: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({_BY}) (vllm:{metric}{_OF})", _NAMED),)


def _speed(metric: str, words: str) -> tuple[str, str]:
    return f"sum by (pool) (rate(vllm:{metric}{_OF}{_RATE}))", f"{{{{pool}}}} {words}"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Fleet",
        (
            Panel(
                "Instances ready",
                (
                    (
                        "sum by (pool) (max by (pool, host, instance) "
                        '(vllm_fleet_gateway_instance_ready{pool=~"$pool"}))',
                        "{{pool}}",
                    ),
                ),
                kind="stat",
                width=6,
                red_below=1,
                text="Warm and in rotation, as the gateways see it. Red: pool-down in the runbook.",
            ),
            Panel(
                "Instances answering",
                (('sum by (pool) (up{job="vllm",pool=~"$pool"})', "{{pool}}"),),
                kind="stat",
                width=6,
                red_below=1,
            ),
            Panel(
                "Alerts firing",
                (('count(ALERTS{alertstate="firing"}) or vector(0)', "firing"),),
                kind="stat",
                width=6,
                red_from=1,
                text="The page of Prometheus lists them, each with its runbook entry.",
            ),
            Panel(
                "Hosts up",
                (('sum(up{job="node"})', "up"), ('count(up{job="node"})', "of")),
                kind="stat",
                width=6,
            ),
        ),
    ),
    (
        "Requests",
        (
            Panel(
                "Requests at the gateways",
                (
                    (
                        "sum by (pool, code) (rate(vllm_fleet_gateway_requests_total"
                        f'{{pool=~"$pool"}}{_RATE}))',
                        "{{pool}} {{code}}",
                    ),
                ),
                unit="reqps",
            ),
            Panel(
                "In flight, by instance",
                ((f"sum by ({_BY}) (vllm_fleet_gateway_in_flight{_OF})", _NAMED),),
            ),
            Panel(
                "Held, queued, retried and refused",
                (
                    ('sum by (pool) (vllm_fleet_gateway_held{pool=~"$pool"})', "{{pool}} held"),
                    (
                        'sum by (pool) (vllm_fleet_gateway_queued{pool=~"$pool"})',
                        "{{pool}} queued",
                    ),
                    (
                        "sum by (pool) (rate(vllm_fleet_gateway_retries_total"
                        f'{{pool=~"$pool"}}{_RATE}))',
                        "{{pool}} retries/s",
                    ),
                    (
                        "sum by (pool) (rate(vllm_fleet_gateway_refused_total"
                        f'{{pool=~"$pool"}}{_RATE})) or vector(0)',
                        "{{pool}} refused/s",
                    ),
                ),
                text="Held: no instance is ready. Queued: every instance is full.",
            ),
            Panel(
                "First byte at the gateways",
                tuple(_gateway_quantile(q, "first_byte_seconds") for q in (0.5, 0.95)),
                unit="s",
                text="As clients wait for it, holds and queues included.",
            ),
            Panel(
                "Whole answer at the gateways",
                tuple(_gateway_quantile(q, "duration_seconds") for q in (0.5, 0.95)),
                unit="s",
            ),
            Panel(
                "Tokens a second, by owner of the key",
                (
                    (
                        "sum by (key) (rate(vllm_fleet_gateway_tokens_total"
                        f'{{pool=~"$pool"}}{_RATE}))',
                        "{{key}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "What users feel",
        (
            Panel(
                "Time to first token",
                tuple(_quantile(q, "time_to_first_token_seconds") for q in (0.5, 0.95)),
                unit="s",
            ),
            Panel(
                "Between tokens",
                tuple(_quantile(q, "inter_token_latency_seconds") for q in (0.5, 0.95)),
                unit="s",
            ),
            Panel(
                "Whole answer",
                tuple(_quantile(q, "e2e_request_latency_seconds") for q in (0.5, 0.95)),
                unit="s",
            ),
        ),
    ),
    (
        "Engines",
        (
            Panel(
                "Tokens a second",
                (_speed("generation_tokens_total", "out"), _speed("prompt_tokens_total", "in")),
            ),
            Panel("Running", _each("num_requests_running")),
            Panel(
                "Waiting",
                _each("num_requests_waiting"),
                text="Over 20 for five minutes: requests-waiting in the runbook.",
            ),
            Panel(
                "KV cache in use",
                ((f"max by ({_BY}) (vllm:kv_cache_usage_perc{_OF})", _NAMED),),
                unit="percentunit",
                most=1,
            ),
            Panel(
                "Preemptions",
                ((f"sum by ({_BY}) (rate(vllm:num_preemptions_total{_OF}{_RATE}))", _NAMED),),
                unit="cps",
            ),
            Panel(
                "Prefix cache hits",
                (
                    (
                        f"sum by (pool) (rate(vllm:prefix_cache_hits_total{_OF}{_RATE}))"
                        f" / sum by (pool) (rate(vllm:prefix_cache_queries_total{_OF}{_RATE}))",
                        "{{pool}}",
                    ),
                ),
                unit="percentunit",
                most=1,
            ),
        ),
    ),
    (
        "Hosts",
        (
            Panel(
                "CPU",
                (
                    (
                        "1 - avg by (host) (rate(node_cpu_seconds_total"
                        f'{{mode="idle",host=~"$host"}}{_RATE}))',
                        "{{host}}",
                    ),
                ),
                unit="percentunit",
                most=1,
            ),
            Panel(
                "Memory",
                (
                    (
                        '1 - node_memory_MemAvailable_bytes{host=~"$host"}'
                        ' / node_memory_MemTotal_bytes{host=~"$host"}',
                        "{{host}}",
                    ),
                ),
                unit="percentunit",
                most=1,
            ),
            Panel(
                "Disk",
                (
                    (
                        f'1 - node_filesystem_avail_bytes{{host=~"$host",{DISKS}}}'
                        f' / node_filesystem_size_bytes{{host=~"$host",{DISKS}}}',
                        "{{host}} {{mountpoint}}",
                    ),
                ),
                unit="percentunit",
                most=1,
            ),
        ),
    ),
)


def build() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model (schema 38, Grafana 10 and later)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = 0
        height = 4 if all(p.kind == "stat" for p in row) else HEIGHT
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            panels.append(_panel(len(panels) + 1, panel, x, y, height))
            x += panel.width
        y += height
    return {
        "uid": UID,
        "title": "vLLM fleet",
        "tags": ["vllm-fleet"],
        "schemaVersion": 38,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                _variable("pool", 'label_values(up{job="vllm"}, pool)'),
                _variable("host", 'label_values(up{job="node"}, host)'),
                _variable("instance", 'label_values(up{job="vllm",pool=~"$pool"}, instance)'),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def text() -> str:
    """The dashboard as its file holds it."""
    return json.dumps(build(), indent=2, ensure_ascii=False) + "\n"


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": SOURCE}


def _panel(number: int, panel: Panel, x: int, y: int, height: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.red_below is not None:
        defaults["thresholds"] = _thresholds("red", "green", panel.red_below)
    if panel.red_from is not None:
        defaults["thresholds"] = _thresholds("green", "red", panel.red_from)
    options: dict[str, Any] = (
        {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
        if panel.kind == "stat"
        else {"legend": {"displayMode": "list", "placement": "bottom"}}
    )
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _source(),
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "expr": expr,
                "legendFormat": legend,
                "datasource": _source(),
            }
            for n, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _thresholds(below: str, above: str, limit: float) -> dict[str, Any]:
    steps = [{"color": below, "value": None}, {"color": above, "value": limit}]
    return {"mode": "absolute", "steps": steps}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _source(),
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
