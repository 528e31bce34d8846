"""The dashboard: the same from run to run, every query parsed, every name exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet import alerts, dashboard, metrics

GOLDEN = Path(__file__).parent / "dashboard.txt"
LUA = Path(__file__).parents[3] / "vllm_fleet/gateway/lua/fleet/metrics.lua"

# What else the fleet exports: the gateway's own, the node exporter's and Prometheus' series.
OTHERS = {
    *metrics.gateway_series(),
    "node_cpu_seconds_total",
    "node_memory_MemAvailable_bytes",
    "node_memory_MemTotal_bytes",
    "node_filesystem_avail_bytes",
    "node_filesystem_size_bytes",
    "up",
    "ALERTS",
}


def queries() -> list[tuple[str, str]]:
    return [
        (panel["title"], target["expr"])
        for panel in dashboard.build()["panels"]
        for target in panel.get("targets", [])
    ]


def resolved(expr: str) -> str:
    """The query as Grafana sends it with all chosen."""
    return re.sub(r"\$(pool|host|instance)\b", ".*", expr.replace("$__rate_interval", "1m"))


def outline(board: dict[str, Any]) -> str:
    """Structure and queries, one line each: what a reviewer should see change."""
    lines = [f"{v['name']}: {v['query']['query']}" for v in board["templating"]["list"]]
    for panel in board["panels"]:
        grid = panel["gridPos"]
        where = f"{grid['x']},{grid['y']} {grid['w']}x{grid['h']}"
        lines.append(f"{panel['id']} {panel['type']} {where} {panel['title']}")
        lines += [f"  {t['refId']} {t['expr']}" for t in panel.get("targets", [])]
    return "\n".join(lines) + "\n"


def test_structure_is_as_reviewed() -> None:
    """After a change that is meant: look at the difference and write the outline anew."""
    assert outline(dashboard.build()) == GOLDEN.read_text()
    assert dashboard.text() == dashboard.text()
    assert json.loads(dashboard.text()) == dashboard.build()


def test_ids_are_unique_and_the_grid_has_no_overlap() -> None:
    panels = dashboard.build()["panels"]
    assert [p["id"] for p in panels] == list(range(1, len(panels) + 1))
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                assert (x, y) not in taken, f"{panel['title']} over {taken.get((x, y))}"
                taken[x, y] = panel["title"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_parses_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{n}", "expr": resolved(expr)} for n, (_, expr) in enumerate(queries())
    ]
    (tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    )
    run = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "panels.yml")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(queries())} rules found" in run.stdout


@pytest.mark.parametrize("version", metrics.versions())
def test_every_metric_is_exported(version: str) -> None:
    known = metrics.series(version) | OTHERS
    for title, expr in queries():
        # A selector is a name followed by { or [; none of ours stands bare.
        used = set(re.findall(r"([a-zA-Z_:][\w:]*)(?=[{\[])", expr))
        assert used, title
        assert used <= known, f"{title}: {used - known}"


@pytest.mark.skipif(not LUA.exists(), reason="the gateway's Lua modules are not in this tree")
def test_the_gateway_exports_what_is_asked_of_it() -> None:
    written = set(re.findall(r'"(?:# TYPE )?(vllm_fleet_gateway_\w+[a-z])', LUA.read_text()))
    assert written == set(metrics.GATEWAY)
    used = set(re.findall(r"vllm_fleet_gateway_\w+", dashboard.text() + alerts.rules()))
    assert len(used) >= 10
    assert used <= metrics.gateway_series()


def test_variables_are_those_that_queries_use() -> None:
    names = {v["name"] for v in dashboard.build()["templating"]["list"]}
    used = {n for _, expr in queries() for n in re.findall(r"\$([a-z]\w*)", expr)}
    assert used == names


def test_known_metrics_hold_what_a_page_of_the_server_shows() -> None:
    for version in metrics.versions():
        assert "vllm:time_to_first_token_seconds_bucket" in metrics.series(version)
        assert "vllm:gpu_cache_usage_perc" not in metrics.series(version)
    assert "vllm:admission_rejections_total" not in metrics.series("0.21.0")
    assert "vllm:admission_rejections_total" in metrics.series("0.32.0")
