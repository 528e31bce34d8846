"""The dashboards: made from code, every query parsed, every name exported, nothing overlaps."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet import alerts, dashboard, metrics

ROOT = Path(__file__).parents[3]
LUA = ROOT / "vllm_fleet/gateway/lua/fleet/metrics.lua"
DATA = ROOT / "vllm_fleet/data/dashboards"

# nvitop-exporter 1.7.2 (its metrics carry their unit) and DCGM's default counters: those asked for.
EXPORTERS = {
    "gpu_clock_sm_MHz",
    "gpu_pcie_tx_throughput_MiBps",
    "gpu_pcie_rx_throughput_MiBps",
    "DCGM_FI_DEV_SM_CLOCK",
}
# Of vLLM's process, without a prefix of its own.
PROCESS = {"process_start_time_seconds", "process_resident_memory_bytes"}


def panels(boards: Iterable[str] | None = None, **how: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in boards or dashboard.names():
        for panel in dashboard.build(name, **how)["panels"]:
            yield name, panel


def queries(**how: Any) -> list[tuple[str, str]]:
    return [
        (f"{name}: {panel['title']}", target["expr"])
        for name, panel in panels(**how)
        for target in panel.get("targets", [])
    ]


def resolved(expr: str) -> str:
    """The query as Grafana sends it with all chosen."""
    return re.sub(
        r"\$(pool|host|instance|gateway|owner)\b", ".*", expr.replace("$__rate_interval", "1m")
    )


def test_there_is_a_board_for_each_question() -> None:
    assert dashboard.names() == ("card", "fleet", "gateway", "instance", "pool", "upgrade")


def test_the_stored_json_is_what_the_code_makes() -> None:
    """Else: python -m tools.dashboards"""
    pytest.importorskip("grafana_foundation_sdk")
    from tools.dashboards.boards import BOARDS
    from tools.dashboards.render import text

    assert {f"{board.name}.json" for board in BOARDS} == {p.name for p in DATA.glob("*.json")}
    for board in BOARDS:
        assert text(board) == (DATA / f"{board.name}.json").read_text(encoding="utf-8"), board.name


def test_ids_are_unique_and_the_grid_has_no_overlap() -> None:
    for name in dashboard.names():
        board = dashboard.build(name)
        ids = [p["id"] for p in board["panels"]]
        assert len(set(ids)) == len(ids)
        taken: dict[tuple[int, int], str] = {}
        for panel in board["panels"]:
            grid = panel["gridPos"]
            assert grid["x"] + grid["w"] <= 24
            for x in range(grid["x"], grid["x"] + grid["w"]):
                for y in range(grid["y"], grid["y"] + grid["h"]):
                    assert (x, y) not in taken, f"{panel['title']} over {taken.get((x, y))}"
                    taken[x, y] = panel["title"]
    uids = {dashboard.build(name)["uid"] for name in dashboard.names()}
    assert len(uids) == len(dashboard.names())


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("versions", [("0.18.0",), ("0.21.0", "0.33.0")])
def test_promtool_parses_every_query(versions: tuple[str, ...], tmp_path: Path) -> None:
    asked = [*queries(deployed=versions), *annotations()]
    rules = [{"record": f"panel:{n}", "expr": resolved(expr)} for n, (_, expr) in enumerate(asked)]
    (tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    )
    run = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "panels.yml")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(asked)} rules found" in run.stdout


def annotations() -> list[tuple[str, str]]:
    return [
        (f"{name}: {one['name']}", one["expr"])
        for name in dashboard.names()
        for one in dashboard.build(name)["annotations"]["list"]
    ]


@pytest.mark.parametrize("version", metrics.versions())
def test_every_metric_is_exported(version: str) -> None:
    ours = metrics.gateway_series() | metrics.own_series() | metrics.OTHERS
    known = metrics.series(version) | ours | EXPORTERS | PROCESS
    for title, expr in [*queries(deployed=(version,)), *annotations()]:
        used = set(
            re.findall(r"\b((?:vllm:|vllm_|node_|gpu_|DCGM_|process_)\w+)(?=[{\[ )]|$)", expr)
        )
        used -= {"vllm_version"}
        assert used or "up{" in expr or "ALERTS{" in expr, title
        assert used <= known, f"{title}: {used - known}"


def test_what_no_deployed_version_has_is_not_shown() -> None:
    def titles(*versions: str) -> set[str]:
        return {panel["title"] for _, panel in panels(["pool"], deployed=versions)}

    assert titles("0.18.0") == titles("0.32.0") - {"Waiting, by reason", "Turned away by engines"}
    assert titles("0.21.0", "0.32.0") == titles("0.32.0")


def test_only_exporters_that_there_are_are_asked() -> None:
    def asked(*exporters: str) -> str:
        return json.dumps(dashboard.build("card", exporters=exporters))

    assert "gpu_clock" in asked("nvitop")
    assert "DCGM" not in asked("nvitop")
    assert "DCGM" in asked("dcgm")
    assert "gpu_clock" not in asked("dcgm")


def test_a_panel_that_may_be_red_links_to_its_entry_in_the_runbook() -> None:
    known = {a.anchor for a in alerts.alerts()}
    page = "https://git.example.org/runbook.md"
    linked = 0
    for _, panel in panels(runbook=page):
        if "red" in json.dumps(panel.get("fieldConfig", {})) and panel["title"] != "Alerts firing":
            assert panel["links"], panel["title"]
        for link in panel.get("links") or ():
            address, _, anchor = link["url"].partition("#")
            assert address == page
            assert anchor in known
            linked += 1
    assert linked > 30
    # Where the runbook is only a file beside the settings, a link would lead nowhere.
    assert not any(panel.get("links") for _, panel in panels(runbook="docs/runbook.md"))


@pytest.mark.skipif(not LUA.exists(), reason="the gateway's Lua modules are not in this tree")
def test_the_gateway_exports_what_is_asked_of_it() -> None:
    written = set(re.findall(r'"(?:# TYPE )?(vllm_fleet_gateway_\w+[a-z])', LUA.read_text()))
    assert written == set(metrics.GATEWAY)
    boards = "".join(dashboard.text(name) for name in dashboard.names())
    used = set(re.findall(r"vllm_fleet_gateway_\w+", boards + alerts.rules()))
    assert len(used) >= 15
    assert used <= metrics.gateway_series()


@pytest.mark.parametrize(
    "script", ["onhost/probe", "onhost/hostwatch", "gate/bootlog", "rollout/audit"]
)
def test_our_scripts_write_what_is_asked_of_them(script: str) -> None:
    source = (ROOT / f"vllm_fleet/{script}.py").read_text()
    if script == "rollout/audit":
        written = set(re.findall(r"# TYPE (vllm_fleet_\w+) ", source))
        written |= set(re.findall(r'name = "(vllm_fleet_\w+)"', source))
        assert len(written) == 3
        assert written <= set(metrics.OWN)
        return
    if script == "gate/bootlog":
        written = {
            f"vllm_fleet_plan_{n}" for n in re.findall(r'"(\w+_(?:bytes|tokens))", "', source)
        }
        assert written <= set(metrics.OWN)
        return
    written = set(re.findall(r"vllm_fleet_(?!host\b|probe\b)\w+(?=\")", source))
    assert len(written) >= 5
    assert written <= set(metrics.OWN), written - set(metrics.OWN)


def test_variables_are_those_that_queries_use() -> None:
    for name in dashboard.names():
        board = dashboard.build(name)
        names = {v["name"] for v in board["templating"]["list"]}
        chained = {
            n
            for v in board["templating"]["list"]
            for n in re.findall(r"\$([a-z]\w*)", v["query"]["query"])
        }
        used = {
            n
            for panel in board["panels"]
            for target in panel.get("targets", [])
            for n in re.findall(r"\$([a-z]\w*)", target["expr"])
        }
        assert used | chained == names, name


def test_known_metrics_hold_what_a_page_of_the_server_shows() -> None:
    assert "vllm:admission_rejections_total" not in metrics.series("0.21.0")
    assert "vllm:admission_rejections_total" in metrics.series("0.32.0")
