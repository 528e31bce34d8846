"""A measurement as tables: for a terminal, and as one HTML page with its pictures in it. Pure."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vllm_fleet.bench.report import Level
from vllm_fleet.bench.result import Result, capacity_table

STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:78rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.6rem 0 1.6rem;font-size:.9rem}
.w{overflow-x:auto}
th,td{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}
th:first-child,td:first-child,td.t,th.t{text-align:left}td.t{white-space:normal}
img{max-width:100%;margin:.4rem 0}code{background:#f3f3f3;padding:.1rem .3rem}
.bad{color:#a3202c}
"""

LEVEL_HEAD = (
    "streams",
    "answered",
    "refused",
    "TTFT p50",
    "p95",
    "p99",
    "ITL p50",
    "p95",
    "p99",
    "answer p50",
    "p95",
    "p99",
    "in tok/s",
    "out tok/s",
    "req/s",
)
ENGINE_HEAD = (
    "streams",
    "TTFT mean",
    "ITL mean",
    "answer mean",
    "tokens in",
    "tokens out",
    "preempted",
    "KV cache at most",
    "waiting at most",
)
COMPARED_HEAD = (
    "configuration",
    "TTFT p50, 1 stream",
    "answer p50, 1 stream",
    "most out tok/s",
    "at streams",
    "TTFT p95 there",
    "knee",
    "keeps targets",
    "weights GiB",
    "KV cache GiB",
    "KV tokens",
    "start s",
)
CAPACITY_HEAD = ("cards", "model", "use", "asks", "streams", "out tok/s", "TTFT p95", "ITL p95")


def level_row(level: Level) -> tuple[str, ...]:
    """One level in words: seconds for answers, milliseconds for tokens."""
    times = [
        _ms(getattr(spread, name))
        for spread in (level.first_token, level.between_tokens)
        for name in ("p50", "p95", "p99")
    ]
    whole = [_s(getattr(level.whole, name)) for name in ("p50", "p95", "p99")]
    answered = f"{level.answered}/{level.sent}"
    return (
        str(level.streams),
        answered,
        str(level.refused),
        *times,
        *whole,
        f"{level.in_per_second:.0f}",
        f"{level.out_per_second:.0f}",
        f"{level.requests_per_second:.2f}",
    )


def compared_row(one: Result) -> tuple[str, ...]:
    """One configuration among several, in words."""
    alone = min(one.levels, key=lambda level: level.streams)
    best = max(one.levels, key=lambda level: level.out_per_second)
    seconds = [one.figures.get(key) for key in ("load_seconds", "warm_seconds")]
    return (
        one.name,
        _ms(alone.first_token.p50) if alone.streams == 1 else "-",
        _s(alone.whole.p50) if alone.streams == 1 else "-",
        f"{best.out_per_second:.0f}",
        str(best.streams),
        _ms(best.first_token.p95),
        str(one.bend.level.streams) if one.bend and one.bend.reached else "-",
        str(one.kept.streams) if one.kept else "none" if one.targets else "-",
        _number(one.figures.get("weights_gib"), 2),
        _number(one.figures.get("kv_cache_gib"), 2),
        _number(one.figures.get("kv_cache_tokens"), 0),
        _number(sum(known) if (known := [x for x in seconds if x is not None]) else None, 0),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def capacity_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the capacity table in words."""
    if row["streams"] is None:
        return (row["cards"], row["model"], row["use"], row["asks"], "none", "-", "-", "-")
    return (
        row["cards"],
        row["model"],
        row["use"],
        row["asks"],
        str(row["streams"]),
        f"{row['out_per_second']:.0f}",
        _ms(row["first_token_p95"]),
        _ms(row["between_tokens_p95"]),
    )


def _ms(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "-"
    value = seconds * 1000
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _s(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds:.2f} s"


def conclusions(one: Result) -> list[str]:
    """What a result says, one sentence each."""
    said = []
    if one.bend is None:
        said.append("Nothing was answered.")
    elif not one.load.soak and one.bend.reached:
        said.append(f"Knee at {one.bend.level.streams} streams: {one.bend.why}.")
    elif not one.load.soak:
        said.append(f"No knee: {one.bend.why}.")
    if one.targets:
        told = ", ".join(str(target) for target in one.targets)
        said.append(
            f"Kept up to {one.kept.streams} streams: {told}."
            if one.kept
            else f"No level keeps: {told}."
        )
    for level in one.levels:
        if level.failed:
            kinds = ", ".join(f"{count} x {why}" for why, count in level.failed.items())
            said.append(f"At {level.streams} streams {sum(level.failed.values())} failed: {kinds}.")
        if level.cut:
            said.append(
                f"At {level.streams} streams {level.cut} were still open when the time was over."
            )
    said += [f"{finding}." for finding in one.findings]
    if one.load.soak and not one.findings and one.levels:
        said.append("Nothing drifted: errors, times and memory as at the beginning.")
    return said


def html(
    results: Sequence[Result], pictures: Sequence[Path], others: Sequence[Mapping[str, Any]] = ()
) -> str:
    """One page; ``others`` are results of earlier runs, for the capacity table."""
    load = results[0].load
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>Bench of {escape(load.model)}</title><style>{STYLE}</style>",
        f"<h1>Bench of {escape(load.model)}</h1><p>{escape(load.told())}</p>",
    ]
    if len(results) > 1:
        parts.append(_table(COMPARED_HEAD, [compared_row(one) for one in results]))
        parts += [_picture(picture) for picture in pictures]
    for one in results:
        cards = f" on {escape(one.cards)}" if one.cards else ""
        parts.append(f"<h2>{escape(one.name)}{cards}</h2>")
        parts.append(_table(LEVEL_HEAD, [level_row(level) for level in one.levels]))
        parts.append("<ul>" + "".join(f"<li>{escape(s)}</li>" for s in conclusions(one)) + "</ul>")
        parts.append(_engine(one))
        if one.proposals:
            parts.append("<h3>Proposed for group_vars</h3><ul>")
            for proposal in one.proposals:
                line = f"<code>{escape(proposal.line)}</code>: " if proposal.line else ""
                parts.append(f"<li>{line}{escape(proposal.why)}</li>")
            parts.append("</ul>")
        parts += [f"<p>{escape(note)}</p>" for note in one.notes]
    if len(results) == 1:
        parts += [_picture(picture) for picture in pictures]
    rows = capacity_table([*others, *(one.as_json() for one in results if not one.load.soak)])
    if rows:
        parts.append("<h2>Capacity of a card group</h2>")
        parts.append(_table(CAPACITY_HEAD, [capacity_row(row) for row in rows], text=4))
    return "\n".join(parts) + "\n"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></p>'


def _engine(one: Result) -> str:
    rows: list[tuple[str, ...]] = []
    for level, seen in zip(one.levels, one.seen, strict=True):
        if seen is None:
            continue
        rows.append(
            (
                str(level.streams),
                *(_ms(seen.means.get(what)) for what in ("first_token", "between_tokens", "whole")),
                f"{seen.tokens_in:.0f}",
                f"{seen.tokens_out:.0f}",
                f"{seen.preemptions:.0f}",
                "-" if seen.kv_usage is None else f"{seen.kv_usage:.1%}",
                "-" if seen.waiting is None else f"{seen.waiting:.0f}",
            )
        )
    if not rows:
        return ""
    return "<h3>As the engine counted it</h3>" + _table(ENGINE_HEAD, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=t' if number < text else ''}>{escape(cell)}</{tag}>"
            for number, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=w><table><tr>{cells('th', head)}</tr>{body}</table></div>"
