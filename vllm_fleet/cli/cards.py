"""``fleet cards``: which card groups a host makes, from what its own tools print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import IO, TypeVar

import click

from vllm_fleet import cards as module

T = TypeVar("T")
FILE = click.File("r", encoding="utf-8", errors="replace")


@click.command("cards")
@click.option(
    "--gpus",
    "gpu_files",
    type=FILE,
    required=True,
    multiple=True,
    metavar="FILE",
    help="nvidia-smi --query-gpu=... --format=csv; also -q -x, -L, the table, or rocm-smi. "
    "Twice where a host has cards of two makers.",
)
@click.option(
    "--topo",
    "topo_files",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="nvidia-smi topo -m, or rocm-smi --showtopo.",
)
@click.option("--p2p", type=FILE, metavar="FILE", help="nvidia-smi topo -p2p r.")
@click.option(
    "--apps", type=FILE, metavar="FILE", help="nvidia-smi --query-compute-apps=... --format=csv."
)
@click.option("--size", type=click.IntRange(min=1), help="Cards a group; else powers of two.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def cards(
    gpu_files: tuple[IO[str], ...],
    topo_files: tuple[IO[str], ...],
    p2p: IO[str] | None,
    apps: IO[str] | None,
    size: int | None,
    as_json: bool,
) -> None:
    """Show the card groups of a host. Nothing is run on it: the files are read.

    Exit 0: every card is in a group; 1: one is left out, or a file cannot be used.

    \b
    nvidia-smi --query-gpu=index,name,uuid,memory.total,memory.used --format=csv > gpus.csv
    nvidia-smi topo -m > topo.txt
    fleet cards --gpus gpus.csv --topo topo.txt
    """
    try:
        found = _read(gpu_files, topo_files, p2p, apps, size)
    except module.CardsError as error:
        if as_json:
            click.echo(json.dumps({"groups": [], "left_out": [], "warnings": [str(error)]}))
        else:
            click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(_object(found), ensure_ascii=False))
    else:
        _show(found)
    sys.exit(1 if found.left_out or not found.groups else 0)


def _read(
    gpu_files: tuple[IO[str], ...],
    topo_files: tuple[IO[str], ...],
    p2p: IO[str] | None,
    apps: IO[str] | None,
    size: int | None,
) -> module.Groups:
    """Groups of all makers; CardsError names the file that cannot be used."""
    topologies = {}
    for file in topo_files:
        topology = _parsed(file, module.parse_topo)
        topologies[topology.vendor] = topology
    pairs = _parsed(p2p, module.parse_p2p) if p2p else None
    processes = _parsed(apps, module.parse_compute_apps) if apps else ()
    parts, seen = [], set()
    for file in gpu_files:
        listing = _parsed(file, module.parse_gpus)
        vendor = listing.cards[0].vendor
        if vendor in seen:
            raise module.CardsError(f"{file.name}: a second list of {vendor} cards")
        seen.add(vendor)
        listed = module.attach(listing.cards, processes if vendor == "nvidia" else ())
        made = module.groups(listed, topologies.get(vendor), p2p=pairs, size=size)
        parts.append(replace(made, warnings=(*listing.warnings, *made.warnings)))
    for vendor in sorted(set(topologies) - seen):
        raise module.CardsError(
            f"--topo has {vendor} cards and --gpus has none of them: outputs of two hosts"
        )
    return module.merged(parts)


def _parsed(file: IO[str], parse: Callable[[str], T]) -> T:
    try:
        return parse(file.read())
    except module.CardsError as error:
        raise module.CardsError(f"{file.name}: {error}") from error


def _object(found: module.Groups) -> dict[str, object]:
    return {
        "groups": [
            {
                "gpus": list(g.gpus),
                "name": g.name,
                "memory_mib": g.memory_mib,
                "link": g.link,
                "vendor": g.vendor,
            }
            for g in found.groups
        ],
        "left_out": [{"gpu": o.gpu, "why": o.why} for o in found.left_out],
        "warnings": list(found.warnings),
    }


def _show(found: module.Groups) -> None:
    from rich.console import Console  # not needed for --json
    from rich.table import Table

    table = Table("cards", "kind", "memory", "link", box=None, pad_edge=False)
    for group in found.groups:
        memory = f"{group.memory_mib / 1024:.0f} GiB" if group.memory_mib else "not given"
        table.add_row(
            " ".join(map(str, group.gpus)),
            group.name,
            f"{len(group.gpus)} x {memory}" if len(group.gpus) > 1 else memory,
            "" if group.link == "single" else group.link,
        )
    console = Console()
    if found.groups:
        console.print(table)
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
