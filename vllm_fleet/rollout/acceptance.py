"""Whether a changed instance is as good as it was: what both were measured with, old -> new. Pure.

Compared is what the same probe found on the old process, just before it was stopped, and on the
new one, both out of their pool. Where nothing is known of the old one, only what must hold of
any instance is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet.spec.model import Acceptance

# Times so short that a busy moment of the host doubles them: no slowness that anybody feels.
LEAST_FIRST_TOKEN_SECONDS = 0.02

Seen = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One thing that was compared."""

    what: str
    old: str
    new: str
    bad: str = ""  # why it is refused; empty where it passes

    def __str__(self) -> str:
        text = f"{self.what}: {self.old} -> {self.new}"
        return f"{text}: REFUSED, {self.bad}" if self.bad else text


def judge(old: Seen | None, new: Seen, limits: Acceptance) -> list[Finding]:
    """Every comparison that can be made. ``old``, ``new``: what onhost/acceptance.py found."""
    before = old or {}
    found = [_answered(before, new), *_ended(before, new)]
    found += _kept(before, new, "tool_called", "tool calls", "calls no tool any more")
    found += _kept(before, new, "reasoning", "reasoning", "shows no reasoning any more")
    found += _first_token(before, new, limits)
    found += _rate(before, new, limits)
    return found


def judge_memory(old: Seen | None, new: Seen, limits: Acceptance) -> list[Finding]:
    """What vLLM said of its memory at both starts (bootlog's figures)."""
    for name, unit in (("kv_cache_tokens", "tokens"), ("kv_cache_gib", "GiB")):
        before, after = (old or {}).get(name), new.get(name)
        if not before or after is None:
            continue
        share = after / before
        bad = ""
        if share < limits.kv_cache_least:
            bad = f"{share:.0%} of what it was; at least {limits.kv_cache_least:.0%} must be left"
        return [Finding("KV cache", f"{before:,} {unit}", f"{after:,} {unit}", bad)]
    return []


def judge_errors(answered: int, failed: int, limits: Acceptance) -> Finding:
    """Requests of clients while it was watched in its pool."""
    share = failed / answered if answered else 0.0
    bad = ""
    if share > limits.error_rate:
        bad = f"{share:.1%} of them failed; {limits.error_rate:.1%} is the limit"
    return Finding("requests while watched", "-", f"{answered}, {failed} failed", bad)


def refused(findings: Sequence[Finding]) -> str:
    """All reasons in one line; empty where everything passes."""
    return "; ".join(f"{one.what} {one.old} -> {one.new}: {one.bad}" for one in findings if one.bad)


def too_slow(findings: Sequence[Finding]) -> bool:
    """Whether slowness alone is what speaks against it: worth a second look."""
    bad = [one for one in findings if one.bad]
    return bool(bad) and all(one.what in (FIRST_TOKEN, RATE) for one in bad)


def better(first: Seen, second: Seen) -> dict[str, Any]:
    """The second probe, with the better of both in what a busy host spoils."""
    merged = {**first, **second}
    for name, choose in (("first_token_seconds", min), ("tokens_per_second", max)):
        values = [one[name] for one in (first, second) if one.get(name)]
        if values:
            merged[name] = choose(values)
    return merged


FIRST_TOKEN = "time to first token"
RATE = "tokens a second"


def _answered(old: Seen, new: Seen) -> Finding:
    failed_before = {one["name"] for one in old.get("failures") or ()}
    failures = [one for one in new.get("failures") or () if one["name"] not in failed_before]
    bad = "; ".join(f"{one['name']}: {one['why']}" for one in failures)
    return Finding("questions answered", _count(old), _count(new), bad)


def _count(seen: Seen) -> str:
    if not seen:
        return "-"
    asked = int(seen.get("asked") or 0)
    return f"{asked - len(seen.get('failures') or ())} of {asked}"


def _ended(old: Seen, new: Seen) -> list[Finding]:
    """A model that ended all its answers by itself still ends some. Others end a few by chance."""
    if not new.get("answers"):
        return []
    bad = ""
    if old.get("answers") and old.get("ended") == old["answers"] and not new["ended"]:
        bad = "its answers go on until they are cut"
    was = f"{old['ended']} of {old['answers']}" if old.get("answers") else "-"
    return [
        Finding("answers that end by themselves", was, f"{new['ended']} of {new['answers']}", bad)
    ]


def _kept(old: Seen, new: Seen, key: str, what: str, bad: str) -> list[Finding]:
    if key not in new:
        return []
    was = ("yes" if old[key] else "no") if key in old else "-"
    lost = bool(old.get(key)) and not new[key]
    return [Finding(what, was, "yes" if new[key] else "no", bad if lost else "")]


def _first_token(old: Seen, new: Seen, limits: Acceptance) -> list[Finding]:
    before, after = old.get("first_token_seconds"), new.get("first_token_seconds")
    if after is None:
        return []
    bad = ""
    if before:
        times = after / before
        if times > limits.first_token_times and after - before > LEAST_FIRST_TOKEN_SECONDS:
            bad = f"{times:.1f} times; {limits.first_token_times:g} is the limit"
    was = f"{before * 1000:.0f} ms" if before else "-"
    return [Finding(FIRST_TOKEN, was, f"{after * 1000:.0f} ms", bad)]


def _rate(old: Seen, new: Seen, limits: Acceptance) -> list[Finding]:
    before, after = old.get("tokens_per_second"), new.get("tokens_per_second")
    if not after:
        return []
    bad = ""
    if before and before / after > limits.tokens_times:
        bad = f"{before / after:.1f} times slower; {limits.tokens_times:g} is the limit"
    was = f"{before:.1f}" if before else "-"
    return [Finding(RATE, was, f"{after:.1f}", bad)]
