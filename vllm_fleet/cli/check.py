"""``fleet check INVENTORY``: is what the operator wrote good? Offline, under a second."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from vllm_fleet.spec.load import Result, check_inventory
from vllm_fleet.spec.model import Fleet


@click.command()
@click.argument("inventory", type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(inventory: str, as_json: bool) -> None:
    """Check an inventory file and its group_vars; touches no host.

    Every mistake is one line with file, line and column. Exit 1 where there is one.
    """
    result = check_inventory(inventory)
    if as_json:
        click.echo(json.dumps(as_data(result), indent=2, ensure_ascii=False))
    else:
        for warning in result.warnings:
            click.echo(f"warning: {warning}", err=True)
        for complaint in result.complaints:
            click.echo(str(complaint), err=True)
        if result.fleet is None:
            count = len(result.complaints)
            click.echo(f"{count} {'mistake' if count == 1 else 'mistakes'}", err=True)
        else:
            click.echo(summary(result.fleet))
    raise SystemExit(0 if result.fleet is not None else 1)


def as_data(result: Result) -> dict[str, object]:
    """The JSON of ``--json``: what is wrong, and what the fleet is where nothing is."""
    fleet = result.fleet
    return {
        "ok": fleet is not None,
        "complaints": [asdict(c) for c in result.complaints],
        "warnings": [asdict(c) for c in result.warnings],
        "hosts": [
            {"name": h.name, "groups": list(h.groups), "address": h.address}
            for h in (fleet.hosts if fleet else ())
        ],
        "models": _models(fleet) if fleet else [],
        "instances": [
            {
                "host": h.name,
                "name": i.name,
                "model": i.model,
                "port": i.port,
                "cards": i.cards if isinstance(i.cards, str) else list(i.cards),
            }
            for h in (fleet.hosts if fleet else ())
            for i in h.instances
        ],
    }


def _models(fleet: Fleet) -> list[str]:
    """The models that are served, in the order they are met."""
    return list(dict.fromkeys(i.model for h in fleet.hosts for i in h.instances))


def summary(fleet: Fleet) -> str:
    """One paragraph: hosts by group, models with their instances."""
    groups: dict[str, int] = {}
    for host in fleet.hosts:
        for group in host.groups:
            groups[group] = groups.get(group, 0) + 1
    stem = fleet.inventory.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    groups.pop(stem, None)
    by_group = ", ".join(f"{group} {count}" for group, count in groups.items())
    placed = [(host, i) for host in fleet.hosts for i in host.instances]
    served = [f"{model} ({sum(i.model == model for _, i in placed)})" for model in _models(fleet)]
    hosts = _count(len(fleet.hosts), "host")
    text = f"{stem}: {hosts}" + (f" ({by_group})" if by_group else "")
    text += f"; {_count(len(placed), 'instance')} of {_count(len(served), 'model')}"
    return text + (f": {', '.join(served)}." if served else ".")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
