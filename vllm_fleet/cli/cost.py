"""``fleet cost PRICES``: an own fleet against an API, and from how many tokens a day it pays."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import click

from vllm_fleet import cost as costs

TIMEOUT_SECONDS = 30
STEP = "5m"


@click.command()
@click.argument("prices", type=click.File(errors="replace"))
@click.option(
    "--bench",
    "result",
    type=click.Path(exists=True, dir_okay=False),
    help="result.json of `fleet bench`: capacity is taken from it.",
)
@click.option(
    "--instances",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many instances like the one of --bench a host has.",
)
@click.option(
    "--prometheus",
    metavar="URL",
    help="Tokens a day, input's share and utilisation of the last days come from it.",
)
@click.option(
    "--days",
    type=click.IntRange(1),
    default=7,
    show_default=True,
    help="Days that --prometheus looks back.",
)
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE.png", help="Draw it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def cost(
    prices: Any,
    result: str | None,
    instances: int,
    prometheus: str | None,
    days: int,
    plot: str | None,
    as_json: bool,
) -> None:
    """Compare what a day costs on hosts of your own and at an API.

    PRICES is a YAML file; an example stands in docs/operations.md. Exit 1 where it cannot be
    used or nothing could be asked.
    """
    changes: dict[str, dict[str, Any]] = {}
    try:
        if result:
            found = json.loads(Path(result).read_text())
            changes["capacity"] = dict(costs.of_bench(found, instances))
        if prometheus:
            seen = _seen(prometheus, days)
            changes["traffic"] = {key: seen[key] for key in ("tokens_a_day", "input_share")}
            changes.setdefault("capacity", {})["utilisation"] = seen["utilisation"]
        known = costs.parse(prices.read(), changes)
    except (costs.CostError, OSError, ValueError) as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "error": str(error)}))
        else:
            click.echo(f"{prices.name}: {error}", err=True)
        raise SystemExit(1) from None
    data = costs.summary(known)
    if plot:
        from vllm_fleet.bench.plots import NoPlots, draw_cost

        try:
            draw_cost(known, Path(plot))
            data["plot"] = plot
        except NoPlots as error:
            click.echo(str(error), err=True)
    if as_json:
        click.echo(json.dumps(data, ensure_ascii=False))
    else:
        for line in lines(data):
            click.echo(line)


def lines(data: dict[str, Any]) -> list[str]:
    """The summary in words."""
    money = data["currency"]
    told = [
        f"API           {data['api_per_million']:.2f} {money} a million tokens of this mixture",
        f"one host      bears {_tokens(data['tokens_a_day_of_a_host'])} tokens a day",
    ]
    even = data["break_even"]
    if even is None:
        told.append("break-even    never: the API is cheaper at any load with these prices")
    else:
        told.append(
            f"break-even    {_tokens(even['tokens_a_day'])} tokens a day ({_hosts(even['hosts'])})"
        )
        if even["always_from"] and even["always_from"] > even["tokens_a_day"] * 1.001:
            told.append(
                f"              always from {_tokens(even['always_from'])}: below it a further "
                "host can make the own fleet dearer again"
            )
    today = data.get("today")
    if today:
        spare = f" and {today['spare']} spare" if today["spare"] else ""
        told += [
            f"today         {_tokens(today['tokens_a_day'])} tokens a day: {_hosts(today['hosts'])}"
            f"{spare}, {today['load']:.0%} of what they bear",
            *(
                f"  {name:<12}{value:>12.2f} {money} a day"
                for name, value in today["parts_a_day"].items()
            ),
            f"  {'own fleet':<12}{today['own_a_day']:>12.2f} {money} a day, "
            f"{today['own_per_million']:.2f} a million tokens",
            f"  {'API':<12}{today['api_a_day']:>12.2f} {money} a day",
            f"cheaper       {'the own fleet' if today['cheaper'] == 'own' else 'the API'}, by "
            f"{abs(today['own_a_day'] - today['api_a_day']) * 365:,.0f} {money} a year",
        ]
    return told


def _hosts(number: int) -> str:
    return "1 host" if number == 1 else f"{number} hosts"


def _tokens(number: float) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return f"{number:,.0f}"


def _seen(url: str, days: int) -> dict[str, float]:
    """What Prometheus knows of the last days. Raises CostError, OSError."""
    rates = {
        what: f"sum(rate(vllm:{name}_tokens_total[{STEP}]))"
        for what, name in (("in", "prompt"), ("out", "generation"))
    }
    both = f"({rates['in']} + {rates['out']})"
    mean_in = _ask(url, f"avg_over_time({rates['in']}[{days}d:{STEP}])")
    mean = _ask(url, f"avg_over_time({both}[{days}d:{STEP}])")
    peak = _ask(url, f"max_over_time({both}[{days}d:{STEP}])")
    if not mean or not peak:
        raise costs.CostError(f"{url} counted no tokens in the last {days} days")
    return {
        "tokens_a_day": mean * 86400,
        "input_share": (mean_in or 0.0) / mean,
        "utilisation": mean / peak,
    }


def _ask(url: str, query: str) -> float | None:
    address = f"{url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
        found = json.load(answer)["data"]["result"]
    return float(found[0]["value"][1]) if found else None
