"""What is written down of each change: a line for the audit log, marks for Prometheus. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_fleet.rollout.lock import Holder
from vllm_fleet.rollout.policy import Standing, Version

Result = Literal["done", "returned", "failed", "stuck"]
MEANING: dict[str, str] = {
    "done": "serves the new version",
    "returned": "the new version was refused, the last good one serves",
    "failed": "nothing was changed",
    "stuck": "serves neither",
}


@dataclass(frozen=True)
class Change:
    """What became of one instance."""

    instance: Standing
    to: Version
    result: Result
    seconds: float
    why: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds by what they went into

    def told_parts(self) -> str:
        """Where its seconds went, for people; "rest" is what no part accounts for."""
        rest = max(0.0, self.seconds - sum(self.parts.values()))
        parts = {**self.parts, "rest": rest}
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())

    def line(self, holder: Holder) -> dict[str, object]:
        """Its line in the audit log."""
        one = self.instance
        return {
            "run": holder.run,
            "who": holder.who,
            "where": holder.where,
            "what": holder.what,
            "host": one.host,
            "instance": one.name,
            "pool": one.pool,
            "from": str(one.runs) if one.runs else "nothing",
            "to": str(self.to),
            "result": self.result,
            "seconds": round(self.seconds, 1),
            "parts": {name: round(seconds, 1) for name, seconds in self.parts.items()},
            "why": self.why,
        }

    def mark(self, at: float) -> tuple[str, str]:
        """(file, text) for the node exporter of its host."""
        one = self.instance
        labels = f'vllm_instance="{one.name}",pool="{one.pool}"'
        lines = [
            "# HELP vllm_fleet_change_timestamp_seconds When this instance was last changed.",
            "# TYPE vllm_fleet_change_timestamp_seconds gauge",
            f'vllm_fleet_change_timestamp_seconds{{{labels},result="{self.result}",'
            f'from="{one.runs.release if one.runs else ""}",to="{self.to.release}"}} {at:.0f}',
            "# HELP vllm_fleet_change_seconds How long that change took.",
            "# TYPE vllm_fleet_change_seconds gauge",
            f"vllm_fleet_change_seconds{{{labels}}} {self.seconds:.1f}",
        ]
        return f"vllm_fleet_change_{one.name}.prom", "\n".join(lines) + "\n"


def run_mark(holder: Holder, result: str, at: float) -> tuple[str, str]:
    """(file, text) for the host that holds the lock: how the last run ended, or that one is on."""
    name = "vllm_fleet_rollout_timestamp_seconds"
    lines = [
        f"# HELP {name} When the last rollout of this fleet began or ended.",
        f"# TYPE {name} gauge",
        f'{name}{{what="{escaped(holder.what)}",result="{result}"}} {at:.0f}',
    ]
    return "vllm_fleet_rollout.prom", "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """A label's value as Prometheus reads it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
