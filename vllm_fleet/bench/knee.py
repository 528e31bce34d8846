"""What a ramp tells: where more streams stop to pay, and what keeps the targets. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_fleet.bench.report import Level

# More streams pay as long as doubling them brings a quarter more tokens.
LEAST_GAIN = 0.25
LEAST_SUCCESS = 0.99

_TARGET = re.compile(
    r"(ttft|itl|e2e)-(mean|p50|p95|p99)=(\d+(?:\.\d+)?)(ms|s)|success=(\d+(?:\.\d+)?)%?"
)
_FIELDS = {"ttft": "first_token", "itl": "between_tokens", "e2e": "whole"}
WORDS = {"ttft": "time to first token", "itl": "time between tokens", "e2e": "whole answer"}


class TargetError(ValueError):
    """A target that cannot be read; says how to write it."""


@dataclass(frozen=True)
class Target:
    """An upper bound of a time, or a lower one of the share of answered requests."""

    what: str  # ttft, itl, e2e or success
    of: str  # mean, p50, p95, p99; empty for success
    bound: float  # seconds, or a share

    @classmethod
    def parse(cls, text: str) -> Target:
        """``ttft-p95=800ms``, ``itl-p99=50ms``, ``e2e-p95=20s``, ``success=99%``."""
        found = _TARGET.fullmatch(text.strip())
        if not found:
            raise TargetError(
                f"{text!r} is no target: write ttft-p95=800ms, itl-p95=50ms, e2e-p99=30s "
                "(mean, p50, p95, p99) or success=99%"
            )
        if found[5]:
            return cls("success", "", float(found[5]) / 100)
        return cls(found[1], found[2], float(found[3]) / (1000 if found[4] == "ms" else 1))

    def value(self, level: Level) -> float:
        """What a level reached."""
        if self.what == "success":
            return level.success
        return float(getattr(getattr(level, _FIELDS[self.what]), self.of))

    def kept(self, level: Level) -> bool:
        """Whether a level keeps it; a level without figures does not."""
        value = self.value(level)
        if math.isnan(value):
            return False
        return value >= self.bound if self.what == "success" else value <= self.bound

    def __str__(self) -> str:
        if self.what == "success":
            return f"success {self.bound:.1%}"
        return f"{WORDS[self.what]} {self.of} {self.bound:g} s"


@dataclass(frozen=True)
class Knee:
    """Where more streams stop to pay; ``reached`` is false where they paid to the last."""

    level: Level
    reached: bool
    why: str


def knee(levels: Sequence[Level]) -> Knee | None:
    """The last level that was worth its streams; None where nothing was answered."""
    good = [one for one in levels if one.answered]
    if not good:
        return None
    for here, further in pairwise(good):
        if further.success < LEAST_SUCCESS <= here.success:
            return Knee(
                here, True, f"at {further.streams} streams only {further.success:.1%} are answered"
            )
        more = further.streams / here.streams - 1
        gain = (further.out_per_second / here.out_per_second - 1) / more if more > 0 else 0.0
        if gain < LEAST_GAIN:
            return Knee(
                here,
                True,
                f"{further.streams} streams bring {further.out_per_second:.0f} tokens/s after "
                f"{here.out_per_second:.0f}, and a whole answer takes {further.whole.p95:.2f} s "
                f"(p95) after {here.whole.p95:.2f}",
            )
    return Knee(good[-1], False, "more streams paid up to the last level: ramp further")


def keeps(levels: Sequence[Level], targets: Sequence[Target]) -> Level | None:
    """The highest level that keeps all targets, as all below it do; None where none does."""
    best = None
    for level in sorted(levels, key=lambda one: one.streams):
        if not level.answered or not all(target.kept(level) for target in targets):
            break
        best = level
    return best
