"""Results told: tables for a terminal, and the files that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_fleet.bench import page
from vllm_fleet.bench.plots import NoPlots, draw
from vllm_fleet.bench.result import Result, capacity_table


def keep(folder: Path, results: list[Result], others: list[dict[str, Any]]) -> str:
    """Write everything of some results into a folder; what to tell of it."""
    data = [one.as_json() for one in results]
    name = folder / "result.json"
    name.write_text(json.dumps(data[0] if len(data) == 1 else {"results": data}, indent=1))
    pictures: list[Path] = []
    missing = ""
    try:
        pictures = draw(results, folder)
    except NoPlots as error:
        missing = f"\n{error}"
    (folder / "report.html").write_text(page.html(results, pictures, others))
    return f"written: {folder}/report.html, result.json{', pictures' if pictures else ''}{missing}"


def show(results: list[Result], others: list[dict[str, Any]]) -> None:
    """Print results as tables and sentences; plain text where the output is no terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=180, highlight=False, no_color=True)
    for one in results:
        console.print(f"{one.name}: {one.load.model}, {one.load.told()}", markup=False)
        table = Table(*page.LEVEL_HEAD, box=None, pad_edge=False, header_style="dim")
        for level in one.levels:
            table.add_row(*page.level_row(level))
        console.print(table)
        for sentence in page.conclusions(one):
            console.print(sentence, markup=False)
        for proposal in one.proposals:
            line = f"{proposal.line}  # " if proposal.line else ""
            console.print(f"proposed: {line}{proposal.why}", markup=False)
        for note in one.notes:
            console.print(note, markup=False)
    if len(results) > 1:
        table = Table(*page.COMPARED_HEAD, box=None, pad_edge=False, header_style="dim")
        for one in results:
            table.add_row(*page.compared_row(one))
        console.print(table)
    rows = capacity_table([*others, *(one.as_json() for one in results if not one.load.soak)])
    if rows:
        table = Table(*page.CAPACITY_HEAD, box=None, pad_edge=False, header_style="dim")
        for row in rows:
            table.add_row(*page.capacity_row(row))
        console.print(table)
