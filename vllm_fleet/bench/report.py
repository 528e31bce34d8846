"""What came of a load: one level of concurrency after another. Pure.

Times are seconds; percentiles are of requests, those between tokens of tokens.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_STATUS = re.compile(r"\b([45]\d\d)\b")


class ReportError(ValueError):
    """A report that cannot be read; says what is missing."""


@dataclass(frozen=True)
class Spread:
    """A time as it was over all requests."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float], weights: Sequence[float] | None = None) -> Spread:
        """Mean and percentiles; all NaN where there is no value."""
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan)
        counts = weights or [1.0] * len(values)
        pairs = sorted(zip(values, counts, strict=True))
        total = sum(counts)
        mean = sum(value * weight for value, weight in pairs) / total
        return cls(mean, *(_percentile(pairs, total, q) for q in (0.50, 0.95, 0.99)))


def _percentile(pairs: Sequence[tuple[float, float]], total: float, q: float) -> float:
    """The smallest value that a share ``q`` of the weight does not exceed."""
    reached = 0.0
    for value, weight in pairs:
        reached += weight
        if reached >= q * total - 1e-9:
            return value
    return pairs[-1][0]


@dataclass(frozen=True)
class Level:
    """So many streams at once."""

    streams: int
    began: float  # as time.time() tells it
    ended: float
    answered: int
    failed: Mapping[str, int]  # by HTTP status or kind of failure
    cut: int  # still open when the time of the level was over
    tokens_in: int
    tokens_out: int
    first_token: Spread
    between_tokens: Spread
    whole: Spread
    points: tuple[tuple[float, float], ...] = ()  # (seconds since it began, time of a request)

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 1e-9)

    @property
    def sent(self) -> int:
        """Requests that came to an end of their own."""
        return self.answered + sum(self.failed.values())

    @property
    def success(self) -> float:
        """Share of answered ones."""
        return self.answered / self.sent if self.sent else 0.0

    @property
    def refused(self) -> int:
        """Requests that were turned away because of load: 429 and 503."""
        return self.failed.get("429", 0) + self.failed.get("503", 0)

    @property
    def out_per_second(self) -> float:
        return self.tokens_out / self.seconds

    @property
    def in_per_second(self) -> float:
        return self.tokens_in / self.seconds

    @property
    def requests_per_second(self) -> float:
        return self.answered / self.seconds

    def as_json(self) -> dict[str, Any]:
        """For `--json`; NaN, which JSON does not know, is null."""
        found = asdict(self)
        del found["points"]
        found |= {
            "seconds": self.seconds,
            "success": self.success,
            "refused": self.refused,
            "out_per_second": self.out_per_second,
            "in_per_second": self.in_per_second,
            "requests_per_second": self.requests_per_second,
        }
        for name in ("first_token", "between_tokens", "whole"):
            found[name] = {
                key: None if math.isnan(value) else value for key, value in found[name].items()
            }
        return found


def levels_of(report: Mapping[str, Any]) -> list[Level]:
    """The levels of a report of GuideLLM, in the order in which they were run."""
    try:
        return [_level(one) for one in report["benchmarks"]]
    except (KeyError, TypeError) as error:
        raise ReportError(f"not a report of GuideLLM 0.8: {error!r} is missing or empty") from None


def _level(found: Mapping[str, Any]) -> Level:
    requests = found["requests"]
    answered = list(requests["successful"] or [])
    between = [
        (one["inter_token_latency_ms"] / 1000, one["output_tokens"] - 1)
        for one in answered
        if one["inter_token_latency_ms"] is not None and (one["output_tokens"] or 0) > 1
    ]
    began, ended = float(found["start_time"]), float(found["end_time"])
    return Level(
        streams=int(found["config"]["strategy"]["streams"]),
        began=began,
        ended=ended,
        answered=len(answered),
        failed=dict(sorted(Counter(_why(one) for one in requests["errored"] or []).items())),
        cut=len(requests["incomplete"] or []),
        tokens_in=_total(one["prompt_tokens"] for one in answered),
        tokens_out=_total(one["output_tokens"] for one in answered),
        first_token=Spread.of(
            [
                one["time_to_first_token_ms"] / 1000
                for one in answered
                if one["time_to_first_token_ms"] is not None
            ]
        ),
        between_tokens=Spread.of([value for value, _ in between], [n for _, n in between]),
        whole=Spread.of([one["request_latency"] for one in answered]),
        points=tuple((one["request_end_time"] - began, one["request_latency"]) for one in answered),
    )


def _total(counts: Iterable[int | None]) -> int:
    return sum(count or 0 for count in counts)


def _why(errored: Mapping[str, Any]) -> str:
    """The HTTP status of a failed request, or the kind of its failure."""
    words = str((errored.get("info") or {}).get("error") or "")
    if status := _STATUS.search(words):
        return status[1]
    return (words.split(":")[0].split("(")[0].strip() or "no answer")[:60]
