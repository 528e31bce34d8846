"""``fleet args``: is a command line of ``vllm serve`` right for a version?"""

from __future__ import annotations

import json
import re
import sys

import click

from vllm_fleet import engine_args


@click.command("args", context_settings={"ignore_unknown_options": True})
@click.argument("version")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- ARG...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def args(version: str, words: tuple[str, ...], as_json: bool) -> None:
    """Check options of `vllm serve` against what VERSION knows.

    Nothing of vLLM is needed here. Exit 0: nothing wrong; 1: something is; 2: wrong usage.

    \b
    fleet args 0.21.0 -- --max-num-seqs 64 --reasoning-parser glm45
    """
    version = version.removeprefix("v")
    if not re.match(r"^\d+\.\d+(\.\d+)?", version):
        raise click.BadParameter(f"{version!r} is no version such as 0.21.0", param_hint="VERSION")
    found = engine_args.examine(version, words)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "errors": [_object(e) for e in found.errors],
                    "hints": [_object(e) for e in found.hints],
                },
                ensure_ascii=False,
            )
        )
    else:
        for error in found.errors:
            click.echo(_line("wrong", error))
        for hint in found.hints:
            click.echo(_line("hint", hint))
        if not found.errors:
            click.echo(f"vLLM {version} takes these {len(words)} words.")
    sys.exit(1 if found.errors else 0)


def _object(error: engine_args.ArgError) -> dict[str, str]:
    return {"arg": error.arg, "problem": error.problem, "instead": error.instead}


def _line(word: str, error: engine_args.ArgError) -> str:
    instead = f"\n       write: {error.instead}" if error.instead else ""
    return f"{word}: {error.arg}: {error.problem}{instead}"
