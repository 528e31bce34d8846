"""``fleet doctor INVENTORY``: what is wrong with a fleet, and what mends it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import click

COLOURS = {"critical": "red", "warning": "yellow", "info": "cyan"}


@click.command()
@click.argument("inventory", type=click.Path(exists=True, dir_okay=False))
@click.option("--limit", multiple=True, metavar="HOST", help="Look at these hosts only.")
@click.option("--deep", is_flag=True, help="Read every byte of the weights.")
@click.option(
    "--seconds",
    type=click.IntRange(min=5),
    help="How long one host may take; 60, with --deep 3600.",
)
@click.option(
    "--key-file",
    type=click.File(),
    help="File with a key of a client, where keys are kept as sha256 alone.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(
    inventory: str,
    limit: tuple[str, ...],
    deep: bool,
    seconds: int | None,
    key_file: Any,
    as_json: bool,
) -> None:
    """Look at every host, instance, gateway and monitor, and name what is wrong; changes nothing.

    The checklist before a launch, and the first thing to run when something is broken. Findings
    come with their evidence and the commands that mend them, the likeliest causes first; each
    id is an entry of docs/runbook.md. All hosts are asked side by side, and each has its own
    time. Exit 1 where something is found that matters.
    """
    from gevent import monkey

    monkey.patch_all()  # before anything opens a socket

    from vllm_fleet import plan as planning
    from vllm_fleet.doctor.case import Case
    from vllm_fleet.doctor.diagnosis import diagnose, report
    from vllm_fleet.doctor.questions import SCRIPTS, question
    from vllm_fleet.facts.read import ReadError, look
    from vllm_fleet.operations.remote import bundled
    from vllm_fleet.spec.addresses import resolved
    from vllm_fleet.spec.complaints import SpecError
    from vllm_fleet.spec.inputs import read_inputs
    from vllm_fleet.spec.load import load_fleet

    now = datetime.now(UTC)
    limit_seconds = seconds or (3600 if deep else 60)
    key = key_file.read().strip() if key_file else None
    try:
        fleet = resolved(load_fleet(inventory))
        inputs = read_inputs(fleet)
        if unknown := sorted(set(limit) - {host.name for host in fleet.hosts}):
            raise click.UsageError(f"{', '.join(unknown)}: no host of {inventory}")
        looked = look(
            inventory,
            planning.asked(),
            lambda name: bundled(
                ("doctor",),
                question(
                    fleet,
                    fleet.host(name),
                    inputs,
                    now,
                    deep=deep,
                    key=key,
                    seconds=limit_seconds,
                ),
                *SCRIPTS,
            ),
            limit,
            limit_seconds,
        )
    except (SpecError, ReadError) as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "error": str(error).splitlines()}))
        else:
            click.echo(str(error), err=True)
        raise SystemExit(1) from None
    case = Case(
        inventory=inventory,
        fleet=fleet,
        inputs=inputs,
        states=looked.states,
        answers=looked.answers,
        failures=looked.failures,
        silent=looked.silent,
        asked_at=looked.asked_at,
        deep=deep,
        now=now,
    )
    data = report(case, diagnose(case))
    if as_json:
        click.echo(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        show(data)
    raise SystemExit(0 if data["ok"] else 1)


def show(data: dict[str, Any]) -> None:
    """Print it: the checklist, then what was found; plain text where it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=160, highlight=False, no_color=True)

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style or None, markup=False, soft_wrap=True)

    for check in data["checklist"]:
        seen = f" ({check['seen']})" if check["seen"] else ""
        word, style = ("ok   ", "green") if check["ok"] else ("LOOK ", "bold red")
        line(f"{word} {check['area']:<12}  {check['what']}{seen}", "" if check["ok"] else style)
    for number, one in enumerate(data["findings"], 1):
        where = f"{one['host']}/{one['instance']}" if one["instance"] else one["host"]
        line("")
        line(f"{number}. {one['level']}: {where}: {one['cause']}", COLOURS[one["level"]])
        if one["evidence"]:
            line(f"   seen    {one['evidence']}")
        for place, command in enumerate(one["remedy"]):
            line(f"   {'remedy ' if not place else '       '} {command}")
        if one["note"]:
            line(f"   note    {one['note']}")
        line(f"   more    {one['runbook']}")
    matter = sum(one["level"] != "info" for one in data["findings"])
    line("")
    line(f"{matter} to look at" if matter else "nothing that matters")
    if away := [host for host in data["hosts"] if host["why"]]:
        line("not looked at: " + "; ".join(f"{h['name']} ({h['why']})" for h in away))
