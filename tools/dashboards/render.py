"""Boards in Grafana's own JSON, by the builders of grafana-foundation-sdk.

Ids of panels are counted from the top and the grid is laid out here (24 columns), so that the
same code gives the same file, always.
"""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from tools.dashboards.boards import BOARDS, VARIABLES, Board, Panel
from vllm_fleet.alerts import Alert, alerts
from vllm_fleet.dashboard import RUNBOOK, SOURCE

WIDTH = 24
HEIGHT = 7
STAT_HEIGHT = 4
ALERTS = {alert.name: alert for alert in alerts()}


def text(board: Board) -> str:
    """The dashboard as its file holds it."""
    return json.dumps(_board(board), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid=SOURCE)


def _board(board: Board) -> dict[str, Any]:
    builder = (
        dashboard.Dashboard(board.title)
        .uid(f"vllm-fleet-{board.name}")
        .tags(["vllm-fleet"])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .version(1)
    )
    for name in board.variables:
        builder.with_variable(_variable(name))
    builder.link(
        dashboard.DashboardLink("vLLM")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["vllm-fleet"])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    number = y = 0
    for title, panels in board.rows:
        number += 1
        builder.with_row(
            dashboard.Row(title).id(number).grid_pos(models.GridPos(x=0, y=y, w=WIDTH, h=1))
        )
        y += 1
        x = 0
        height = STAT_HEIGHT if all(p.kind == "stat" for p in panels) else HEIGHT
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            number += 1
            place = models.GridPos(x=x, y=y, w=panel.width, h=height)
            builder.with_panel(_panel(number, panel, place))
            x += panel.width
        y += height
    result: dict[str, Any] = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    result["annotations"] = {"list": [_annotation(*one) for one in _annotations(board)]}
    return result


def _panel(number: int, panel: Panel, place: models.GridPos) -> Any:
    if panel.kind == "stat":
        one: Any = (
            stat.Panel()
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .text_mode(common_models.BigValueTextMode.VALUE_AND_NAME)
        )
    else:
        one = (
            timeseries.Panel()
            .legend(
                common.VizLegendOptions()
                .display_mode(common_models.LegendDisplayMode.LIST)
                .placement(common_models.LegendPlacement.BOTTOM)
                .show_legend(True)
            )
            .fill_opacity(20 if panel.stacked else 0)
        )
        if panel.stacked:
            one.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    one.id(number).title(panel.title).datasource(_source()).grid_pos(place).unit(panel.unit).min(0)
    words = [panel.text] if panel.text else []
    if panel.alert:
        alert: Alert = ALERTS[panel.alert]
        words.append(f"Runbook: {alert.anchor}.")
        # A deploy puts the runbook's address here, or takes the link out where it has none.
        one.links(
            [
                dashboard.DashboardLink(f"Runbook: {alert.anchor}")
                .type(models.DashboardLinkType.LINK)
                .url(f"{RUNBOOK}#{alert.anchor}")
                .target_blank(True)
            ]
        )
    one.description(" ".join(words))
    if panel.most is not None:
        one.max(panel.most)
    for below, above, limit in (
        ("red", "green", panel.red_below),
        ("green", "red", panel.red_from),
    ):
        if limit is not None:
            one.thresholds(
                dashboard.ThresholdsConfig()
                .mode(models.ThresholdsMode.ABSOLUTE)
                .steps(
                    [
                        models.Threshold(color=below, value=None),
                        models.Threshold(color=above, value=limit),
                    ]
                )
            )
    for place_in_alphabet, (expr, legend) in enumerate(panel.queries):
        one.with_target(
            prometheus.Dataquery()
            .expr(expr)
            .legend_format(legend)
            .ref_id(chr(ord("A") + place_in_alphabet))
            .datasource(_source())
        )
    return one


def _variable(name: str) -> Any:
    return (
        dashboard.QueryVariable(name)
        .datasource(_source())
        .query({"query": VARIABLES[name], "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text=["All"], value=["$__all"]))
    )


def _annotations(board: Board) -> list[tuple[str, str, str, str, bool]]:
    """Name, query, title, colour, and whether the value is the moment."""
    pool = '{pool=~"$pool"}' if "pool" in board.variables else ""
    return [
        (
            "Instance ready",
            f"vllm_fleet_instance_ready_time_seconds{pool} * 1000",
            "{{host}}/{{instance}} ready",
            "green",
            True,
        ),
        (
            "New release",
            f"vllm_fleet_instance_info{pool} unless vllm_fleet_instance_info{pool} offset 2m",
            "{{host}}/{{instance}}: {{release}}",
            "blue",
            False,
        ),
        (
            "Changed",
            f"vllm_fleet_change_timestamp_seconds{pool} * 1000",
            "{{host}}/{{instance}}: {{result}}, {{from}} to {{to}}",
            "purple",
            True,
        ),
        (
            "Planned change",
            f"max by (pool) (vllm_fleet_change_until_seconds{pool}) > time()",
            "{{pool}}: planned change",
            "orange",
            False,
        ),
    ]


def _annotation(name: str, expr: str, title: str, colour: str, moment: bool) -> dict[str, Any]:
    # The builders have no words for queries of Prometheus here.
    return {
        "name": name,
        "datasource": {"type": "prometheus", "uid": SOURCE},
        "enable": True,
        "expr": expr,
        "iconColor": colour,
        "step": "60s",
        "titleFormat": title,
        "useValueForTime": "on" if moment else False,
    }


__all__ = ["BOARDS", "text"]
