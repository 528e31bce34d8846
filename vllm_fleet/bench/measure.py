"""One measurement from beginning to end: load, engine watched, conclusions drawn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from vllm_fleet.bench import generator, tokenizer
from vllm_fleet.bench.advice import drift, proposals
from vllm_fleet.bench.knee import Target, keeps, knee
from vllm_fleet.bench.load import Load
from vllm_fleet.bench.report import Level, levels_of
from vllm_fleet.bench.result import Result
from vllm_fleet.bench.watch import Seen, Watch, between


def measure(
    program: str,
    load: Load,
    folder: Path,
    *,
    name: str,
    cards: str = "",
    targets: Sequence[Target] = (),
    metrics: str = "",
    metrics_wanted: bool = True,
    api_key: str = "",
) -> Result:
    """Send a load and say what came of it. Raises GeneratorError, ReportError.

    ``metrics`` is the address of an engine's page of metrics; empty where there is none to read.
    Where it cannot be read, that is told if it was ``metrics_wanted``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    notes = []
    sent = load
    if not load.tokenizer:
        sent = tokenizer.stretched(load)
        sent = Load(**{**vars(sent), "tokenizer": tokenizer.write(folder / "tokenizer")})
        notes.append(
            "No tokenizer was given: prompts are about as long as asked for; the figures count "
            "the tokens that the engine counted."
        )
    watch = Watch(metrics) if metrics else None
    with watch or nullcontext():
        report = generator.run(program, sent, folder, api_key)
    levels = levels_of(report)
    notes += unreported(load, levels)
    seen = _seen(levels, watch, notes if metrics_wanted else [])
    bend, kept = knee(levels), keeps(levels, targets) if targets else None
    return Result(
        name=name,
        cards=cards,
        load=load,
        levels=levels,
        seen=seen,
        bend=bend,
        kept=kept,
        targets=targets,
        proposals=proposals(load, levels, seen, bend, kept, targets),
        findings=drift(levels[0], seen[0]) if load.soak and levels else (),
        notes=notes,
    )


def unreported(load: Load, levels: Sequence[Level]) -> list[str]:
    """Levels that ended before their time with fewer requests than were to be sent.

    GuideLLM 0.8.1 now and then tells nothing of one that the engine has answered.
    """
    if load.soak:
        return []
    return [
        f"At {level.streams} streams GuideLLM tells of {level.sent + level.cut} of "
        f"{load.requests(level.streams)} requests: the others are in no figure but the engine's."
        for level in levels
        if level.sent + level.cut < load.requests(level.streams) and level.seconds < load.seconds
    ]


def _seen(levels: Sequence[Level], watch: Watch | None, notes: list[str]) -> list[Seen | None]:
    """What the engine counted, for each level."""
    if watch is None or not watch.of_vllm:
        if watch is not None and watch.lost:
            notes.append(f"The engine's own figures could not be read: {watch.url}: {watch.lost}")
        return [None for _ in levels]
    return [between(watch.samples, level.began, level.ended) for level in levels]
