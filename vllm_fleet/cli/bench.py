"""``fleet bench URL --model M``: how much an endpoint bears, and which settings follow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from vllm_fleet.bench.generator import GeneratorError, find
from vllm_fleet.bench.knee import Target, TargetError
from vllm_fleet.bench.load import Length, Load, LoadError, prefix_of, ramp, seconds_of
from vllm_fleet.bench.measure import measure
from vllm_fleet.bench.report import ReportError
from vllm_fleet.bench.tell import keep, show

T = TypeVar("T")

KEY_VARIABLE = "FLEET_API_KEY"


def _read(parse: Callable[[str], T]) -> Callable[..., Any]:
    """A callback that reads an option's text, or each of several."""

    def read(_context: click.Context, _option: click.Parameter, value: Any) -> Any:
        try:
            if isinstance(value, tuple):
                return tuple(parse(one) for one in value)
            return None if value is None else parse(value)
        except (LoadError, TargetError) as error:
            raise click.BadParameter(str(error)) from error

    return read


def _levels(text: str) -> tuple[int, ...]:
    if text.isdigit() and int(text):
        return ramp(int(text))
    numbers = text.split(",")
    if not all(number.strip().isdigit() and int(number) for number in numbers):
        raise LoadError(f"{text!r}: write 64 for 1, 2, 4 ... 64, or the levels: 1,8,24")
    return tuple(int(number) for number in numbers)


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="The name that clients use.")
@click.option(
    "--streams",
    callback=_read(_levels),
    default="32",
    show_default=True,
    help="Ramp 1, 2, 4 ... up to this many at once; or the levels: 1,8,24.",
)
@click.option(
    "--input",
    "length_in",
    callback=_read(Length.parse),
    default="512",
    show_default=True,
    help="Tokens of a prompt; 512~128 samples them.",
)
@click.option(
    "--output",
    "length_out",
    callback=_read(Length.parse),
    default="128",
    show_default=True,
    help="Tokens of an answer; 128~32 samples them.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Requests of each stream at a level.",
)
@click.option(
    "--seconds",
    callback=_read(seconds_of),
    default="120s",
    show_default=True,
    help="A level ends then, whatever is open.",
)
@click.option(
    "--soak",
    callback=_read(seconds_of),
    metavar="TIME",
    help="One level for so long (10m); needs --streams with one number of streams.",
)
@click.option(
    "--prefix",
    callback=_read(prefix_of),
    metavar="TOKENS[xKINDS]",
    help="Prompts share a beginning: 2000, or 2000x8 for 8 kinds of it.",
)
@click.option(
    "--turns", type=click.IntRange(1), default=1, show_default=True, help="Turns of a conversation."
)
@click.option("--path", type=click.Choice(("chat", "completions")), default="chat")
@click.option(
    "--tokenizer",
    default="",
    metavar="DIR|NAME",
    help="The model's tokenizer, for prompts of exact lengths.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    callback=_read(Target.parse),
    help="ttft-p95=800ms, itl-p95=50ms, e2e-p99=30s, success=99%.",
)
@click.option(
    "--metrics",
    metavar="URL",
    default="",
    help="The engine's own /metrics; by default those beside URL, where there are any.",
)
@click.option("--cards", default="", help="What it runs on, for the capacity table: '2 x H200'.")
@click.option(
    "--with",
    "others",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="result.json of another run, for the capacity table.",
)
@click.option(
    "--key-file",
    type=click.Path(exists=True, dir_okay=False),
    help=f"File with the API key; else the variable {KEY_VARIABLE}.",
)
@click.option("--insecure", is_flag=True, help="Take any certificate.")
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Where files go.  [default: bench-<model>-<time>]",
)
@click.option("--generator", metavar="PROGRAM", help="guidellm, where it is not beside fleet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def bench(
    context: click.Context,
    url: str,
    model: str,
    streams: tuple[int, ...],
    length_in: Length,
    length_out: Length,
    requests: int,
    seconds: float,
    soak: float | None,
    prefix: tuple[int, int] | None,
    turns: int,
    path: str,
    tokenizer: str,
    targets: tuple[Target, ...],
    metrics: str,
    cards: str,
    others: tuple[str, ...],
    key_file: str | None,
    insecure: bool,
    out: str | None,
    generator: str | None,
    as_json: bool,
) -> None:
    """Measure how much an endpoint bears: more and more streams, until it pays no longer.

    URL is a gateway or one instance. Writes result.json, pictures and report.html. Exit 1 where
    the targets are kept at no level, a soak found something, or nothing was answered.

    \b
        fleet bench https://gateway/v1 --model glm-4.5-air --streams 64 \\
            --target ttft-p95=1s --target itl-p95=50ms --cards "4 x A100"
    """
    if soak is not None:
        if context.get_parameter_source("streams") is click.core.ParameterSource.DEFAULT:
            raise click.UsageError("--soak needs --streams with the number of streams.")
        streams, seconds = (max(streams),), soak
    shared, kinds = prefix or (0, 1)
    load = Load(
        url=url,
        model=model,
        tokenizer=tokenizer,
        streams=streams,
        input=length_in,
        output=length_out,
        requests_per_stream=requests,
        seconds=seconds,
        soak=soak is not None,
        prefix_tokens=shared,
        prefixes=kinds,
        turns=turns,
        path=path,
        verify_tls=not insecure,
    )
    folder = Path(out or f"bench-{model.replace('/', '-')}-{time.strftime('%m%d-%H%M%S')}")
    key = Path(key_file).read_text().strip() if key_file else os.environ.get(KEY_VARIABLE, "")
    try:
        program = find(generator)
        result = measure(
            program,
            load,
            folder,
            name=load.target,
            cards=cards,
            targets=targets,
            metrics=metrics or f"{load.target}/metrics",
            metrics_wanted=bool(metrics),
            api_key=key,
        )
    except (GeneratorError, ReportError) as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "error": str(error)}))
        else:
            click.echo(str(error), err=True)
        raise SystemExit(1) from None
    earlier = [json.loads(Path(one).read_text()) for one in others]
    written = keep(folder, [result], earlier)
    if as_json:
        click.echo(json.dumps(result.as_json(), ensure_ascii=False))
    else:
        show([result], earlier)
        click.echo(written)
    raise SystemExit(0 if result.ok else 1)
