"""What a Prometheus has no data for: every panel of the dashboards, every rule that it runs.

    python -m tools.unanswered http://mon-01:9090

Panels and marks are those of a fleet as this Prometheus watches it: with the vLLM versions and the
exporters of cards among its targets. A panel is asked as Grafana asks it, with everything
chosen, over the last minutes; one that has nothing but NaN counts as empty. A rule is silent
while all is well, so each series that it looks at is asked for instead.

Said apart, and no fault: what begins with its first event (an Xid, a change), and what the fleet
has no hardware for. Ends with 1 where anything else is without data.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from vllm_fleet import dashboard

LOOK_BACK = 600  # seconds that a panel shows here
STEP = 15
RATE_INTERVAL = "1m"  # as Grafana has it with a scrape every 15 s; 4 scrapes at least

# Series of ours and others', alone or with matchers, of an expression.
_SELECTOR = re.compile(
    r"\b((?:vllm:|vllm_fleet_|node_|prometheus_|alertmanager_|process_|gpu_|DCGM_)[\w:]+"
    r"|(?:up|ALERTS)\b)(\{[^}]*\})?"
    r"|(\{__name__[^}]*\})"
)
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"')
# Names of series, and what there must be for them.
_NEEDS = {
    "vllm_fleet_card_": "cards",
    "node_infiniband_": "InfiniBand",
    "vllm_fleet_certificate_": "certificate of a gateway",
    "alertmanager_": "Alertmanager of ours",
}
# They have no series before the first event, and which event is in their labels.
EVENTS = frozenset(
    {
        "vllm_fleet_xid_total",
        "vllm_fleet_xid_time_seconds",
        "vllm_fleet_change_until_seconds",
        "vllm_fleet_change_timestamp_seconds",
        "vllm_fleet_gateway_refused_total",
        "vllm_fleet_gateway_limited_total",
        "vllm_fleet_gateway_key_refused_total",
        "vllm_fleet_gateway_retries_total",
        "vllm:admission_rejections_total",
    }
)


@dataclass
class Found:
    """What was asked, and what had no answer, each as a line."""

    panels: int = 0
    rules: int = 0
    variables: int = 0
    empty: list[str] = field(default_factory=list)
    not_yet: list[str] = field(default_factory=list)
    not_here: list[str] = field(default_factory=list)


class Prometheus:
    """The HTTP interface of one."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def get(self, path: str, **query: str) -> Any:
        """`data` of an answer; raises ValueError with its own words where it refuses."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{query}: {error.read().decode(errors='replace')}") from None

    def labels(self, selector: str, name: str) -> list[str]:
        """Values that a label has now; the index would tell past ones too."""
        rows = self.get("query", query=f"count by ({name}) ({selector})")["result"]
        return sorted(row["metric"].get(name, "") for row in rows)

    def has(self, expr: str, seconds: float) -> bool:
        """Whether there is a number now, or was in the last seconds."""
        if not seconds:
            samples = [r["value"] for r in self.get("query", query=expr)["result"]]
        else:
            now = time.time()
            at = {"start": str(now - seconds), "end": str(now), "step": str(STEP)}
            rows = self.get("query_range", query=expr, **at)["result"]
            samples = [sample for row in rows for sample in row["values"]]
        return any(not math.isnan(float(value)) for _, value in samples)


def main() -> int:
    """Ask, print; 1 where something is without data."""
    parser = argparse.ArgumentParser(description="What a Prometheus has no data for.")
    parser.add_argument("url", help="of Prometheus, http://host:9090")
    found = unanswered(Prometheus(parser.parse_args().url))
    for words, lines in (
        ("without data", found.empty),
        ("not yet", found.not_yet),
        ("not here", found.not_here),
    ):
        for line in lines:
            print(f"{words}: {line}")
    print(
        f"{found.panels} queries of panels, {found.variables} variables, {found.rules} rules: "
        f"{len(found.empty)} without data"
    )
    return 1 if found.empty else 0


def unanswered(prometheus: Prometheus, seconds: float = LOOK_BACK) -> Found:
    """What has no data; `seconds`: how far panels look back, 0 for this moment alone."""
    found = Found()
    parts = _parts(prometheus)
    versions = tuple(sorted(prometheus.labels("vllm_fleet_instance_info", "vllm_version")))
    exporters = tuple(prometheus.labels('up{job="gpu"}', "exporter"))
    for name in dashboard.names():
        if name == "card" and "cards" not in parts:
            found.not_here.append("the board of cards (no cards)")
            continue
        board = dashboard.build(name, versions, exporters)
        _ask_variables(prometheus, name, board, found)
        for one in board["annotations"]["list"]:
            for selector in selectors(resolved(one["expr"])):
                _ask_series(prometheus, f"{name}: {one['name']}", selector, parts, found)
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                found.panels += 1
                expr = resolved(target["expr"])
                if not prometheus.has(expr, seconds):
                    found.empty.append(f"{name}: {panel['title']}: {expr}")
    for group in prometheus.get("rules")["groups"]:
        for rule in group["rules"]:
            found.rules += 1
            if rule["health"] != "ok":
                found.empty.append(f"{rule['name']}: {rule['health']}: {rule.get('lastError')}")
            for selector in selectors(rule["query"]):
                _ask_series(prometheus, rule["name"], selector, parts, found)
    return found


def resolved(expr: str, chosen: str = ".*") -> str:
    """A panel's query as Grafana sends it, with all chosen."""
    expr = expr.replace("$__rate_interval", RATE_INTERVAL)
    return re.sub(r"\$[a-z]\w*", chosen, expr)


def selectors(expr: str) -> list[str]:
    """The series that an expression looks at, each once, without ranges."""
    found = [
        (match[1] + (match[2] or "")) if match[1] else match[3]
        for match in _SELECTOR.finditer(expr)
    ]
    return list(dict.fromkeys(found))


def any_value(selector: str) -> str:
    """The selector with every matcher but that of the name asking for the label alone."""

    def loosened(match: re.Match[str]) -> str:
        return match[0] if match[1] in ("__name__", "job") else f'{match[1]}!=""'

    return _MATCHER.sub(loosened, selector)


def _parts(prometheus: Prometheus) -> set[str]:
    """What there is of what a fleet need not have."""
    asked = {
        "cards": 'up{job="gpu"} or vllm_fleet_card_present',
        "InfiniBand": "node_infiniband_state_id",
        "certificate of a gateway": "vllm_fleet_certificate_expires_time_seconds",
        "Alertmanager of ours": 'up{job="alertmanager"}',
    }
    return {part for part, expr in asked.items() if prometheus.has(expr, 0)}


def _ask_variables(prometheus: Prometheus, name: str, board: dict[str, Any], found: Found) -> None:
    for variable in board["templating"]["list"]:
        found.variables += 1
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        if query is None or not prometheus.labels(resolved(query[1]), query[2]):
            found.empty.append(f"{name}: ${variable['name']}: {variable['query']['query']}")


def _ask_series(
    prometheus: Prometheus, rule: str, selector: str, parts: set[str], found: Found
) -> None:
    if prometheus.has(selector, 0):
        return
    line = f"{rule}: {selector}"
    missing = next((part for begin, part in _NEEDS.items() if selector.startswith(begin)), None)
    if missing is not None and missing not in parts:
        found.not_here.append(f"{line} (no {missing})")
    elif selector.partition("{")[0] in EVENTS:
        found.not_yet.append(f"{line} (begins with the first event)")
    elif any_value(selector) != selector and prometheus.has(any_value(selector), 0):
        found.not_yet.append(f"{line} (none in this state)")
    else:
        found.empty.append(line)


if __name__ == "__main__":
    sys.exit(main())
