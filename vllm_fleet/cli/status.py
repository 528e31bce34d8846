"""``fleet status INVENTORY``: who runs which version, and what is half done or held."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from vllm_fleet.clients import Name, Page

MANY = 100  # instances; of more, those that are as wanted are counted
COLOURS = {"ready": "green", "starting": "yellow", "stopping": "yellow", "unknown": "yellow"}


@click.command()
@click.argument("inventory", type=click.Path(exists=True, dir_okay=False))
@click.option("--limit", multiple=True, metavar="HOST", help="Look at these hosts only.")
@click.option("--all", "every", is_flag=True, help="List every instance, however many.")
@click.option(
    "--clients",
    is_flag=True,
    help="Print settings for clients instead: addresses, names, ready snippets; asks no host.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(
    inventory: str, limit: tuple[str, ...], every: bool, clients: bool, as_json: bool
) -> None:
    """Look at every host and show who runs what; changes no host.

    Exit 1 where anything is not as it should be: mixed releases in a pool, a change that was
    cut off, an instance that is not ready, a host that is held or was not reached.
    """
    if clients:
        client_page(inventory, as_json)
        return
    from gevent import monkey

    monkey.patch_all()  # before anything opens a socket

    from vllm_fleet import plan as planning
    from vllm_fleet.facts.read import ReadError, read_states
    from vllm_fleet.running import running
    from vllm_fleet.spec.addresses import resolved
    from vllm_fleet.spec.complaints import SpecError
    from vllm_fleet.spec.load import load_fleet

    try:
        fleet = resolved(load_fleet(inventory))
        if unknown := sorted(set(limit) - {host.name for host in fleet.hosts}):
            raise click.UsageError(f"{', '.join(unknown)}: no host of {inventory}")
        states, failures = read_states(inventory, planning.asked(), limit)
    except (SpecError, ReadError) as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "findings": str(error).splitlines()}))
        else:
            click.echo(str(error), err=True)
        raise SystemExit(1) from None
    data = running(fleet, states, failures)
    if as_json:
        click.echo(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        show(data, every)
    raise SystemExit(0 if data["ok"] else 1)


def client_page(inventory: str, as_json: bool) -> None:
    """Print what clients need; exit 1 where the settings are wrong or there is no gateway."""
    from dataclasses import asdict

    from vllm_fleet.clients import page
    from vllm_fleet.spec.complaints import SpecError
    from vllm_fleet.spec.load import load_fleet

    try:
        found = page(load_fleet(inventory))
    except SpecError as error:
        click.echo(str(error), err=True)
        raise SystemExit(1) from None
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1, ensure_ascii=False))
    elif found.bases:
        show_clients(found)
    else:
        click.echo(
            f"{inventory}: no host is in group gateway, so clients have no address", err=True
        )
    raise SystemExit(0 if found.bases else 1)


def show_clients(page: Page) -> None:
    """Print the page as text, so that a part of it can be copied."""
    say = click.echo
    for base in page.bases:
        say(f"address    {base} (OpenAI's kind: {base}/v1)")
    key = "one of yours for YOUR_KEY" if page.asks_key else "none is asked for; any text will do"
    say(f"key        {key}")
    say("models     " + ", ".join(_named(one) for one in page.names))
    for snippet in page.snippets:
        tested = "" if snippet.tested else "  (untested: its shape is checked, it was not run)"
        say(f"\n--- {snippet.client}{tested}")
        if snippet.note:
            say(f"# {snippet.note}")
        say(snippet.text, nl=False)
    say("\n--- What clients show, and what it means")
    for seen in page.errors:
        say(f"{seen.shows}\n    {seen.cause}\n    {seen.remedy} (docs/runbook.md#{seen.id})")


def _named(one: Name) -> str:
    if one.kind == "model":
        return one.name if one.task == "chat" else f"{one.name} ({one.task})"
    return f"{one.name} ({'' if one.kind == 'alias' else 'adapter on '}{one.of})"


def show(data: dict[str, Any], every: bool = False) -> None:
    """Print it as a table and lines; plain text where the output is no terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=160, highlight=False, no_color=True)
    table = Table(
        "pool",
        "instance",
        "state",
        "release",
        "wanted",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    names = [pool["name"] for pool in data["pools"]]
    shown = data["instances"]
    if len(shown) > MANY and not every:
        shown = [one for one in shown if not as_wanted(one)]
    for one in sorted(shown, key=lambda one: names.index(one["pool"])):
        colour = COLOURS.get(one["state"], "red")
        table.add_row(
            one["pool"],
            one["id"],
            f"[{colour}]{one['state']}[/]",
            one["release"] or "-",
            one["wanted_version"],
        )
    if shown:
        console.print(table)
    if left := len(data["instances"]) - len(shown):
        console.print(f"{left} instances are ready, with what is wanted: --all lists them")
    for pool in data["pools"]:
        text = f"{pool['name']}: {pool['ready']} of {pool['instances']} ready"
        console.print(text, markup=False)
    if lock := data["lock"]:
        console.print(
            f"\nbeing changed: {lock.get('what')} by {lock.get('who')} ({lock.get('where')}), run "
            f"{lock.get('run')}, last sign of life {lock.get('silent')} s ago",
            markup=False,
            soft_wrap=True,
        )
    for bad in data["refused"]:
        console.print(
            f"refused: {bad['release']} for {bad['pool']}: {bad['why']}",
            markup=False,
            soft_wrap=True,
        )
    if data["findings"]:
        console.print("\n[bold red]Not as it should be[/bold red]")
    for finding in data["findings"]:
        console.print(f"  {finding}", markup=False, soft_wrap=True)


def as_wanted(one: dict[str, Any]) -> bool:
    """Whether an instance serves the version that it should, with nothing half done."""
    version = str(one["vllm_version"]).partition("+")[0]
    return one["state"] == "ready" and version == one["wanted_version"] and not one["cut_off"]
