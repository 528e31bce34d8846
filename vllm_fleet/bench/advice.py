"""Settings that follow from a measurement, for group_vars, each with its reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_fleet.bench.knee import Knee, Target
from vllm_fleet.bench.load import Load
from vllm_fleet.bench.report import Level
from vllm_fleet.bench.watch import Seen

KV_FULL = 0.95


@dataclass(frozen=True)
class Proposal:
    """One line for group_vars and why; an empty ``line`` is advice without a setting."""

    line: str
    why: str


def proposals(
    load: Load,
    levels: Sequence[Level],
    seen: Sequence[Seen | None],
    bend: Knee | None,
    kept: Level | None,
    targets: Sequence[Target],
) -> list[Proposal]:
    """What to set for ``models.<name>`` of the load's model."""
    found: list[Proposal] = []
    if bend is None:
        return [Proposal("", "nothing was answered: look at the failures first")]
    found += _concurrency(bend, kept, targets)
    preempted = [
        (level, one) for level, one in zip(levels, seen, strict=True) if one and one.preemptions > 0
    ]
    if preempted:
        level, one = preempted[0]
        found.append(
            Proposal(
                "vllm_args: {kv-cache-dtype: fp8}",
                f"at {level.streams} streams {one.preemptions:.0f} sequences were thrown out of "
                "the KV cache and computed again; more room, fewer streams, or a shorter "
                "max_model_len avoid it (FP8 wants compute capability 8.9)",
            )
        )
    full = [one.kv_usage for one in seen if one and one.kv_usage is not None]
    if full and max(full) >= KV_FULL and not preempted:
        found.append(
            Proposal("", f"the KV cache was up to {max(full):.0%} full: it bounds this load")
        )
    answered = sum(level.answered for level in levels)
    if answered and not load.soak:
        tokens_in = sum(level.tokens_in for level in levels) / answered
        tokens_out = sum(level.tokens_out for level in levels) / answered
        found.append(
            Proposal(
                f"traffic: {{mean_in: {tokens_in:.0f}, mean_out: {tokens_out:.0f}}}",
                "these lengths were measured with; with them, max_model_len: auto follows from "
                "what clients send (put your own in where they differ)",
            )
        )
    refused = sum(level.refused for level in levels)
    if refused:
        found.append(
            Proposal(
                "",
                f"{refused} requests were turned away (429 or 503): a limit of the gateway or of "
                "the key was met before the engine's own; measure an instance, or with a key "
                "without limits",
            )
        )
    return found


def _concurrency(bend: Knee, kept: Level | None, targets: Sequence[Target]) -> list[Proposal]:
    if targets and kept is None:
        return [
            Proposal(
                "",
                f"no level keeps {', '.join(str(one) for one in targets)}: more cards for each "
                "instance, a smaller or quantised model, or other targets",
            )
        ]
    level = kept if targets and kept is not None else bend.level
    seqs = max(1, level.streams)
    why = (
        f"{level.streams} streams are the most that keep {', '.join(str(one) for one in targets)}"
        if targets
        else bend.why
        if bend.reached
        else f"{bend.why}; {level.streams} is the most that was measured, no limit found"
    )
    if not targets and not bend.reached:
        return [Proposal("", why)]
    return [
        Proposal(
            f"vllm_args: {{max-num-seqs: {seqs}}}",
            f"{why}; what comes above waits in the queue instead of slowing all",
        )
    ]


def drift(level: Level, seen: Seen | None) -> list[str]:
    """What a soak brought to light; empty where nothing changed over its time."""
    found = []
    if level.success < 1:
        kinds = ", ".join(f"{count} x {why}" for why, count in level.failed.items())
        found.append(f"{level.success:.2%} of the requests were answered: {kinds}")
    points = sorted(level.points)
    if len(points) >= 40:
        half = points[len(points) // 2][0]
        early = sorted(value for at, value in points if at < half)
        late = sorted(value for at, value in points if at >= half)
        before, after = (
            early[math.ceil(len(early) * 0.95) - 1],
            late[math.ceil(len(late) * 0.95) - 1],
        )
        if after > 1.25 * before:
            found.append(
                f"answers became slower: p95 {before:.2f} s in the first half, {after:.2f} s in "
                "the second"
            )
    if seen and len(seen.memory) >= 4:
        quarter = len(seen.memory) // 4
        start = max(value for _, value in seen.memory[:quarter])
        end = max(value for _, value in seen.memory[-quarter:])
        if end > 1.05 * start:
            found.append(
                f"the server's memory grew from {start / 2**30:.2f} to {end / 2**30:.2f} GiB"
            )
    if seen and seen.preemptions:
        found.append(f"{seen.preemptions:.0f} sequences were preempted")
    return found
