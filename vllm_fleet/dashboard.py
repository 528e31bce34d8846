"""The fleet's Grafana dashboards, as they are put on a monitoring host. Pure.

The JSON in data/dashboards is made by `python -m tools.dashboards`, with the names of the
newest vLLM version. Here it becomes that of a fleet: names of the versions that are deployed,
without panels that nothing there has data for, runbook links with the operator's own address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cache
from importlib import resources
from typing import Any

from vllm_fleet import metrics

SOURCE = "vllm-fleet"  # uid of the data source
RUNBOOK = "runbook:"  # stands for its address in the JSON

# Names that only some exporters of cards have.
_EXPORTERS = {"nvitop": re.compile(r"\bgpu_\w+(?=\{)"), "dcgm": re.compile(r"\bDCGM_FI_\w+")}


@cache
def names() -> tuple[str, ...]:
    """The boards there are."""
    folder = resources.files("vllm_fleet") / "data" / "dashboards"
    found = (f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
    return tuple(sorted(found))


@cache
def _stored(name: str) -> str:
    folder = resources.files("vllm_fleet") / "data" / "dashboards"
    return (folder / f"{name}.json").read_text(encoding="utf-8")


def build(
    name: str,
    deployed: Collection[str] = (),
    exporters: Collection[str] = ("nvitop", "dcgm"),
    runbook: str = "",
) -> dict[str, Any]:
    """One board for these vLLM versions (none: the newest) and exporters of cards.

    `runbook` is where its page is, if that is an address.
    """
    board: dict[str, Any] = json.loads(_stored(name))
    versions = deployed or metrics.versions()[-1:]
    kept = []
    for panel in board["panels"]:
        if "targets" not in panel:
            kept.append(panel)
            continue
        targets = [
            {**target, "expr": expr}
            for target in panel["targets"]
            if (expr := metrics.adapted(target["expr"], versions)) is not None
            and _exported(target["expr"], exporters)
        ]
        if not targets:
            continue
        links = [
            {**link, "url": runbook + link["url"].removeprefix(RUNBOOK)}
            for link in panel.get("links") or ()
            if runbook.startswith(("http://", "https://"))
        ]
        kept.append({**panel, "targets": targets, "links": links})
    board["panels"] = kept
    return board


def text(
    name: str,
    deployed: Collection[str] = (),
    exporters: Collection[str] = ("nvitop", "dcgm"),
    runbook: str = "",
) -> str:
    """The board as its file holds it."""
    board = build(name, deployed, exporters, runbook)
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def _exported(expr: str, exporters: Collection[str]) -> bool:
    return all(
        exporter in exporters or not pattern.search(expr)
        for exporter, pattern in _EXPORTERS.items()
    )
