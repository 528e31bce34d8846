"""Pictures of a measurement. matplotlib is imported here alone: it is no package of fleet's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_fleet import cost
from vllm_fleet.bench.report import Spread
from vllm_fleet.bench.result import Result

COLOURS = ("#1f6f8b", "#d1495b", "#66a182", "#edae49", "#574b90", "#8d6a9f")
PERCENTILES = (("p50", "-"), ("p95", "--"), ("p99", ":"))


class NoPlots(Exception):
    """matplotlib is not installed; says how."""


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the pictures of some results of the same load; their files. Raises NoPlots."""
    plt = _matplotlib()
    files = []
    if len(results) == 1 and results[0].load.soak:
        files.append(_soak(plt, results[0], folder / "soak.png"))
        return files
    files.append(_throughput(plt, results, folder / "throughput.png"))
    for what, title, name in (
        ("first_token", "Time to first token", "first-token.png"),
        ("between_tokens", "Time between tokens", "between-tokens.png"),
        ("whole", "Whole answer", "whole.png"),
    ):
        files.append(_times(plt, results, what, title, folder / name))
    return files


def draw_cost(prices: cost.Prices, path: Path) -> None:
    """A day's cost over its tokens, own fleet against API. Raises NoPlots."""
    plt = _matplotlib()
    even, today = cost.break_even(prices), prices.traffic.tokens_a_day
    marks = [one for one in (even and even.tokens, even and even.always_from, today) if one]
    most = 1.6 * max([*marks, 2 * cost.tokens_of_host(prices)])
    tokens = [most * number / 1000 for number in range(1, 1001)]
    figure, axes = plt.subplots(figsize=(8, 4.6), dpi=120, layout="constrained")
    millions = [one / cost.MILLION for one in tokens]
    axes.plot(millions, [cost.day(prices, one) for one in tokens], color=COLOURS[0],
              label="own fleet (each step is a host more)")  # fmt: skip
    axes.plot(millions, [cost.api_price(prices) * one for one in tokens], color=COLOURS[1],
              label="API")  # fmt: skip
    if even:
        axes.plot(even.tokens / cost.MILLION, cost.day(prices, even.tokens), marker="o",
                  markersize=11, markerfacecolor="none", color="#222222", linestyle="none",
                  label=f"break-even: {even.tokens / cost.MILLION:,.0f} million a day")  # fmt: skip
    if today:
        axes.axvline(today / cost.MILLION, color="#888888", linestyle="--", linewidth=1,
                     label=f"today: {today / cost.MILLION:,.0f} million")  # fmt: skip
    axes.set_title("What a day costs", fontsize=10, loc="left")
    axes.set_xlabel("million tokens a day")
    axes.set_ylabel(f"{prices.currency} a day")
    axes.set_xlim(0, most / cost.MILLION)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _saved(plt, figure, axes, path)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise NoPlots(
            "no pictures: matplotlib is not installed (pip install 'vllm-fleet[bench]')"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _axes(plt: Any, title: str, results: Sequence[Result]) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(8, 4.6), dpi=120, layout="constrained")
    load = results[0].load
    axes.set_title(f"{title}\n{load.model}: {load.told()}", fontsize=10, loc="left")
    axes.set_xlabel("streams at once")
    streams = sorted({level.streams for one in results for level in one.levels})
    axes.set_xscale("log", base=2)
    axes.set_xticks(streams, [str(number) for number in streams])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _throughput(plt: Any, results: Sequence[Result], path: Path) -> Path:
    figure, axes = _axes(plt, "Tokens out per second", results)
    for number, one in enumerate(results):
        colour = COLOURS[number % len(COLOURS)]
        levels = one.levels
        axes.plot(
            [level.streams for level in levels],
            [level.out_per_second for level in levels],
            marker="o",
            color=colour,
            label=one.name,
        )
        if one.bend and one.bend.reached:
            axes.plot(
                one.bend.level.streams,
                one.bend.level.out_per_second,
                marker="o",
                markersize=15,
                markerfacecolor="none",
                color=colour,
                linestyle="none",
                label=f"knee at {one.bend.level.streams}",
            )
        if one.kept:
            axes.axvline(
                one.kept.streams,
                color=colour,
                alpha=0.5,
                linestyle="--",
                label=f"targets kept up to {one.kept.streams}",
            )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s")
    return _saved(plt, figure, axes, path)


def _times(plt: Any, results: Sequence[Result], what: str, title: str, path: Path) -> Path:
    figure, axes = _axes(plt, title, results)
    targets = {"first_token": "ttft", "between_tokens": "itl", "whole": "e2e"}
    for number, one in enumerate(results):
        colour = COLOURS[number % len(COLOURS)]
        for percentile, style in PERCENTILES if len(results) == 1 else (("p95", "-"),):
            spreads: list[Spread] = [getattr(level, what) for level in one.levels]
            points = [
                (level.streams, value)
                for level, spread in zip(one.levels, spreads, strict=True)
                if not math.isnan(value := float(getattr(spread, percentile)))
            ]
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                marker="o",
                markersize=4,
                linestyle=style,
                color=colour,
                label=f"{one.name} {percentile}" if len(results) > 1 else percentile,
            )
    for target in results[0].targets:
        if target.what == targets[what]:
            axes.axhline(target.bound, color="#444444", linewidth=1, label=f"target {target.of}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds")
    return _saved(plt, figure, axes, path)


def _soak(plt: Any, one: Result, path: Path) -> Path:
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6), dpi=120, layout="constrained", sharex=True
    )
    level, seen = one.levels[0], one.seen[0]
    above.set_title(
        f"{level.streams} streams for {level.seconds:.0f} s\n{one.load.model}: {one.load.told()}",
        fontsize=10,
        loc="left",
    )
    points = sorted(level.points)
    above.scatter([x for x, _ in points], [y for _, y in points], s=6, color=COLOURS[0], alpha=0.6)
    above.set_ylabel("whole answer, seconds")
    above.set_ylim(bottom=0)
    if seen and seen.memory:
        below.plot(
            [x for x, _ in seen.memory], [y / 2**30 for _, y in seen.memory], color=COLOURS[1]
        )
        below.set_ylim(bottom=0)
    else:
        below.text(0.5, 0.5, "the server's memory was not to be seen", ha="center", va="center",
                   transform=below.transAxes)  # fmt: skip
    below.set_ylabel("memory of the server's\nprocess, GiB")
    below.set_xlabel("seconds")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
    return path


def _saved(plt: Any, figure: Any, axes: Any, path: Path) -> Path:
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    plt.close(figure)
    return path
