"""``fleet plan INVENTORY``: what the hosts are, what goes where and why, before a deploy."""

from __future__ import annotations

import json
from typing import Any

import click

BAR = 40
PARTS = (
    ("weights", "█"),
    ("activation", "▓"),
    ("context", "▒"),
    ("graphs", "▒"),
    ("kv_cache", "░"),
)
LEVELS = {"refused": "red", "warning": "yellow", "ok": "green"}


@click.command()
@click.argument("inventory", type=click.Path(exists=True, dir_okay=False))
@click.option("--limit", multiple=True, metavar="HOST", help="Look at these hosts only.")
@click.option("--all", "every", is_flag=True, help="Show what is in order, too.")
@click.option(
    "--fetch-configs",
    is_flag=True,
    help="Fetch missing config.json of models to configs/ beside group_vars.",
)
@click.option(
    "--fetch-listings",
    is_flag=True,
    help="Freeze which files models have: listings/ beside group_vars.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    inventory: str,
    limit: tuple[str, ...],
    every: bool,
    fetch_configs: bool,
    fetch_listings: bool,
    as_json: bool,
) -> None:
    """Look at every host and show what deploy.py would do; changes no host.

    Exit 1 where something is refused, or a host gave no facts.
    """
    from gevent import monkey

    monkey.patch_all()  # before anything opens a socket

    from vllm_fleet import plan as planning
    from vllm_fleet.configs import complete, freeze
    from vllm_fleet.facts.read import ReadError, read_states
    from vllm_fleet.overview import overview
    from vllm_fleet.spec.addresses import resolved
    from vllm_fleet.spec.complaints import SpecError
    from vllm_fleet.spec.inputs import read_inputs
    from vllm_fleet.spec.load import load_fleet

    try:
        fleet = resolved(load_fleet(inventory))
        inputs = read_inputs(fleet)
        unknown = sorted(set(limit) - {host.name for host in fleet.hosts})
        if unknown:
            raise click.UsageError(f"{', '.join(unknown)}: no host of {inventory}")
        states, failures = read_states(inventory, planning.asked(), limit)
    except (SpecError, ReadError) as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "refusals": str(error).splitlines()}))
        else:
            click.echo(str(error), err=True)
        raise SystemExit(1) from None
    written: list[str] = []
    failed: list[str] = []
    if fetch_configs:
        written, failed = complete(fleet, states, inputs)
    if fetch_listings:
        more, lost = freeze(fleet, inputs)
        written, failed = [*written, *more], [*failed, *lost]
    if written or failed:
        for path in written:
            click.echo(f"{path}: written; commit it", err=True)
        for problem in failed:
            click.echo(f"warning: {problem}", err=True)
    data = overview(fleet, states, failures, inputs)
    if as_json:
        click.echo(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        show(data, every)
    raise SystemExit(0 if data["ok"] and not failures else 1)


def show(data: dict[str, Any], every: bool = False) -> None:
    """Print the overview as tables; plain text where the output is no terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=160, highlight=False, no_color=True)

    def table(title: str, *columns: str) -> Table:
        console.print(f"\n[bold]{title}[/bold]")
        return Table(*columns, box=None, pad_edge=False, header_style="dim")

    hosts = table("Hosts", "host", "groups", "system", "driver", "cards", "verdict")
    for host in data["hosts"]:
        levels = [v["level"] for v in host["verdicts"]]
        worst = next((level for level in LEVELS if level in levels), "ok")
        verdict = f"[{LEVELS[worst]}]{worst}[/]" if host["reached"] else "[red]no facts[/]"
        hosts.add_row(
            host["name"],
            " ".join(host["groups"]),
            host["system"],
            host["driver"],
            _kinds(host),
            verdict,
        )
    console.print(hosts)
    _exam(data, every, table, console)
    _card_groups(data, table, console)
    _instances(data, table, console)
    _spans(data, table, console)
    _memory(data, console)
    _settings(data, table, console)
    _changes(data, table, console)
    for line in data["placement"]["new"]:
        cards = ", ".join(map(str, line["cards"]))
        console.print(
            f"\ndeploy.py will write {data['placement']['path']}: {line['host']}: "
            f"{line['instance']}: {line['asked']} = cards {cards}",
            markup=False,
        )
    told = {f"{h['name']}: {v['what']}" for h in data["hosts"] for v in h["verdicts"]}
    rest = [w for w in data["warnings"] if not any(w.startswith(f"{t}: ") for t in told)]
    if rest:
        console.print("\n[bold]Warnings[/bold]")
    for warning in rest:
        console.print(f"  {warning}", markup=False, soft_wrap=True)
    if data["refusals"]:
        console.print("\n[bold red]Refused: deploy.py would change nothing[/bold red]")
    for refusal in data["refusals"]:
        console.print(f"  {refusal}", markup=False, soft_wrap=True)


def _kinds(host: dict[str, Any]) -> str:
    counts: dict[str, int] = {}
    for group in host["card_groups"]:
        counts[group["name"]] = counts.get(group["name"], 0) + len(group["gpus"])
    left = len(host["left_out"])
    shown = [f"{count} x {name}" for name, count in counts.items()]
    return ", ".join(shown) + (f" ({left} left out)" if left else "")


def _exam(data: dict[str, Any], every: bool, table: Any, console: Any) -> None:
    rows = [
        (host["name"], v)
        for host in data["hosts"]
        for v in host["verdicts"]
        if every or v["level"] != "ok"
    ]
    if not rows:
        return
    found = table("Exam", "host", "what", "verdict", "found", "remedy")
    for name, v in rows:
        level = f"[{LEVELS[v['level']]}]{v['level']}[/]"
        found.add_row(name, v["what"], level, _plain(v["detail"]), _plain(v["remedy"]))
    console.print(found)


def _card_groups(data: dict[str, Any], table: Any, console: Any) -> None:
    rows = [(host["name"], g) for host in data["hosts"] for g in host["card_groups"]]
    if not rows:
        return
    users = {
        (host["name"], card): one["name"]
        for host in data["hosts"]
        for one in host["instances"]
        for card in one["cards"]
    }
    found = table("Card groups", "host", "cards", "kind", "memory", "link", "used by")
    for name, group in rows:
        memory = f"{group['memory_mib'] / 1024:.0f} GiB" if group["memory_mib"] else "not given"
        used = dict.fromkeys(users[name, i] for i in group["gpus"] if (name, i) in users)
        found.add_row(
            name,
            " ".join(map(str, group["gpus"])),
            _plain(group["name"]),
            memory,
            "" if group["link"] == "single" else group["link"],
            ", ".join(used),
        )
    console.print(found)


def _instances(data: dict[str, Any], table: Any, console: Any) -> None:
    rows = [(host, one) for host in data["hosts"] for one in host["instances"]]
    if not rows:
        return
    found = table("Instances", "host", "instance", "model", "vLLM", "cards", "port", "now")
    for host, one in rows:
        cards = " ".join(map(str, one["cards"])) or (one["asked"] or "")
        now = "ready" if one.get("ready") else "running" if one.get("running") else "not running"
        if not host["reached"]:
            now = "unknown"
        found.add_row(
            host["name"],
            one["name"],
            one["model"],
            one["vllm_version"],
            _plain(cards + (" (chosen now)" if one.get("chosen_now") else "")),
            str(one["port"]),
            now,
        )
    console.print(found)


def _spans(data: dict[str, Any], table: Any, console: Any) -> None:
    if not data["spans"]:
        return
    found = table("Servers over several hosts", "span", "model", "split", "by", "hosts")
    for one in data["spans"]:
        split = "".join(
            f"{short} {one[key]} "
            for short, key in (
                ("TP", "tensor_parallel"),
                ("PP", "pipeline_parallel"),
                ("DP", "data_parallel"),
            )
            if one.get(key)
        )
        hosts = []
        for link in one["hosts"]:
            speed = f" {link['speed_mbit'] // 1000}G" if link["speed_mbit"] else ""
            by = f" {link['interface']}{speed}" if link["interface"] else ""
            hosts.append(f"{link['host']} {link['address']}{by}")
        found.add_row(
            one["name"], one["model"], split.strip(), one["executor"], _plain("; ".join(hosts))
        )
    console.print(found)


def _memory(data: dict[str, Any], console: Any) -> None:
    shown = [
        (host["name"], one)
        for host in data["hosts"]
        for one in host["instances"]
        if one.get("bars")
    ]
    unsized = [
        (host["name"], one)
        for host in data["hosts"]
        for one in host["instances"]
        if one.get("not_sized")
    ]
    if shown or unsized:
        console.print("\n[bold]Memory of each card[/bold] (GiB)")
    if shown:
        console.print("  █ weights  ▓ activations  ▒ context and CUDA graphs  ░ KV cache  · free")
    for name, one in shown:
        memory = one["memory"]
        console.print(
            f"  {name} {one['name']}: {memory['kv_cache_tokens']:,} tokens of KV cache, "
            f"{memory['max_concurrency']:.1f} requests of {memory['max_model_len']:,} tokens at "
            f"once" + ("" if memory["fits"] else f"; DOES NOT FIT: {memory['reason']}"),
            markup=False,
            soft_wrap=True,
        )
        for bar in one["bars"]:
            parts = ", ".join(
                f"{part.replace('_', ' ')} {bar[part]:.1f}" for part, _ in PARTS if bar[part]
            )
            console.print(
                f"    card {bar['card']}  {drawn(bar)}  {parts} of {bar['total_gib']:.1f}",
                markup=False,
                soft_wrap=True,
            )
    for name, one in unsized:
        console.print(
            f"  {name} {one['name']}: not sized: {one['not_sized']}", markup=False, soft_wrap=True
        )


def drawn(bar: dict[str, Any]) -> str:
    """One card's memory as a bar of BAR characters; every part that is there is seen."""
    total = max(bar["total_gib"], sum(bar[part] for part, _ in PARTS), 0.001)
    text = ""
    for part, sign in PARTS:
        if bar[part] > 0:
            text += sign * max(round(bar[part] / total * BAR), 1)
    return text[:BAR].ljust(BAR, "·")


def _settings(data: dict[str, Any], table: Any, console: Any) -> None:
    rows = [
        (host["name"], one, setting)
        for host in data["hosts"]
        for one in host["instances"]
        for setting in one.get("settings", ())
    ]
    if not rows:
        return
    found = table("Settings", "host", "instance", "setting", "value", "why")
    advice = False
    for name, one, setting in rows:
        used = one["applied"] or setting["by"] == "operator"
        advice = advice or not used
        value = "" if setting["value"] is None else str(setting["value"])
        found.add_row(
            name,
            one["name"],
            setting["name"],
            _plain(value + ("" if used else " *")),
            _plain(setting["reason"]),
        )
    console.print(found)
    if advice:
        console.print(
            "  * advice, not used: vLLM's own default holds. `fleet plan --fetch-configs` writes "
            "the config.json to configs/, from then on these are used",
            markup=False,
            soft_wrap=True,
        )


def _changes(data: dict[str, Any], table: Any, console: Any) -> None:
    rows = []
    for host in data["hosts"]:
        for what, names in (host["changes"] or {}).items():
            if names:
                shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if names[6:] else "")
                rows.append((host["name"], what.replace("_", " "), shown))
    if not rows:
        if any(host["changes"] is not None for host in data["hosts"]):
            console.print("\ndeploy.py would change nothing")
        return
    found = table("deploy.py would change", "host", "what", "which")
    for row in rows:
        found.add_row(*map(_plain, row))
    console.print(found)


def _plain(text: str) -> str:
    """Text of others, with nothing in it that rich reads as markup."""
    return text.replace("[", "\\[")
