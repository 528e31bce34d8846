"""A whole measurement, as it is kept in a file, and the capacity table over several. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_fleet.bench.advice import Proposal
from vllm_fleet.bench.knee import Knee, Target, keeps
from vllm_fleet.bench.load import Load
from vllm_fleet.bench.report import Level
from vllm_fleet.bench.watch import Seen

# What people use a model for, and what that asks of it; each with the measure of the documents.
USES: tuple[tuple[str, tuple[Target, ...]], ...] = (
    ("chat and code", (Target("ttft", "p95", 1.0), Target("itl", "p95", 0.05))),
    ("documents, retrieval, agents", (Target("ttft", "p95", 5.0), Target("itl", "p95", 0.1))),
    ("batch work at night", ()),
)


@dataclass(frozen=True)
class Result:
    """One ramp or soak, and what it tells."""

    name: str  # the endpoint, or the configuration
    cards: str  # the card group that it was measured on; empty where nobody said
    load: Load
    levels: Sequence[Level]
    seen: Sequence[Seen | None]
    bend: Knee | None
    kept: Level | None
    targets: Sequence[Target]
    proposals: Sequence[Proposal] = ()
    findings: Sequence[str] = ()  # of a soak
    notes: Sequence[str] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)  # of its start: memory, seconds

    @property
    def ok(self) -> bool:
        """Whether everything was answered and the targets, if any, are kept somewhere."""
        answered = bool(self.levels) and all(level.answered for level in self.levels)
        return answered and not self.findings and (not self.targets or self.kept is not None)

    def as_json(self) -> dict[str, Any]:
        """For files and `--json`."""
        return {
            "name": self.name,
            "model": self.load.model,
            "url": self.load.url,
            "cards": self.cards,
            "load": self.load.told(),
            "levels": [
                level.as_json() | {"engine": one.as_json() if one else None}
                for level, one in zip(self.levels, self.seen, strict=True)
            ],
            "knee": self.bend
            and {
                "streams": self.bend.level.streams,
                "reached": self.bend.reached,
                "why": self.bend.why,
            },
            "targets": [str(one) for one in self.targets],
            "keeps_targets": self.kept.streams if self.kept else None,
            "capacity": capacity(self),
            "proposals": [{"line": one.line, "why": one.why} for one in self.proposals],
            "findings": list(self.findings),
            "notes": list(self.notes),
            "start": dict(self.figures),
            "ok": self.ok,
        }


def capacity(result: Result) -> list[dict[str, Any]]:
    """How many streams a card group bears, for each use."""
    rows = []
    for use, targets in USES:
        level = keeps(result.levels, targets) if targets else result.bend and result.bend.level
        rows.append(
            {
                "cards": result.cards or result.name,
                "model": result.load.model,
                "use": use,
                "asks": ", ".join(str(one) for one in targets) or "tokens for the least money",
                "streams": level.streams if level else None,
                "out_per_second": round(level.out_per_second, 1) if level else None,
                "first_token_p95": _known(level.first_token.p95) if level else None,
                "between_tokens_p95": _known(level.between_tokens.p95) if level else None,
            }
        )
    return rows


def capacity_table(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of several results, as read from their files, by use and then by cards."""
    rows = [row for one in results for row in one.get("capacity") or ()]
    uses = [use for use, _ in USES]
    return sorted(rows, key=lambda row: (uses.index(row["use"]), row["model"], row["cards"]))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
