"""`fleet explain`: a log or an error as pasted, its cause and its remedy."""

from __future__ import annotations

import json
from typing import TextIO

import click

from vllm_fleet.causes import Rank, last_error, match
from vllm_fleet.causes.table import parse_version


def _version(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        try:
            parse_version(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return value


@click.command()
@click.argument("log", metavar="[FILE|-]", type=click.File(errors="replace"), default="-")
@click.option("--vllm", "version", callback=_version, help="Version of vLLM the log is from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def explain(context: click.Context, log: TextIO, version: str | None, as_json: bool) -> None:
    """Name the cause of a failure in a log, and what mends it.

    Reads FILE, or standard input:

        journalctl -u vllm@NAME -n 400 | fleet explain -

    The likeliest root comes first. Where no cause is known, the last error that the text names
    in words of its own is printed. Exits 1 where nothing in the text is known.
    """
    text = log.read()
    matches = match(text, version)
    # Nothing, or only that it failed: the text's own words say more.
    own = last_error(text) if not matches or matches[0].rank is Rank.GENERIC else ""
    if as_json:
        entries = [{"id": m.id, "cause": m.cause, "fix": m.remedy, "line": m.line} for m in matches]
        told: dict[str, object] = {"matches": entries}
        if own:
            told["error"] = own
        click.echo(json.dumps(told, ensure_ascii=False))
        context.exit(0 if matches else 1)
    if own:
        click.echo(f"error  {own}\n       (in the log's words; the table has no entry for it)\n")
    if not matches:
        click.echo(
            "unknown: no line of this text is in the table of known failures.\n"
            "The cause usually stands above the last lines: "
            "give more of the log (journalctl -u vllm@NAME -n 400)."
        )
    else:
        for number, found in enumerate(matches):
            title = "cause" if number == 0 else "also "
            click.echo(f"{title}  {found.id}: {found.cause}")
            click.echo(f"line   {found.line}")
            click.echo(f"fix    {found.remedy}")
            if number + 1 < len(matches):
                click.echo()
    context.exit(0 if matches else 1)
