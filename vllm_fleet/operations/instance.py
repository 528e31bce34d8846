"""Instances of vLLM: start what does not run, end what is no longer wanted."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from pyinfra import host
from pyinfra.api import operation

from vllm_fleet.causes import Rank, last_error, match
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations.remote import Script, inline
from vllm_fleet.planned import PlannedInstance
from vllm_fleet.rollout.hosts import CAUSE, LINE

JOURNAL = "journal "
FAILED = "failed "


@operation()
def started(plan: HostPlan) -> Generator[Script, None, None]:
    """Start the instances that do not run, all at once, and wait until each is warm."""
    waiting = plan.to_start()
    if not waiting:
        host.noop("every instance runs")
        return
    yield change(plan.spec.name, waiting)


@operation()
def retired(plan: HostPlan) -> Generator[Script, None, None]:
    """Drain, stop and remove instances that are no longer in the plan."""
    if not plan.retired:
        host.noop("no instance is left over")
        return
    order = {"action": "retire", "instances": [{"name": name} for name in plan.retired]}
    yield Script(*inline("instances.py"), order=order)


def change(where: str, instances: Iterable[PlannedInstance]) -> Script:
    """The script that starts instances and explains a failure."""
    order = {
        "action": "start",
        "instances": [{"name": i.name, "seconds": i.start_seconds} for i in instances],
    }
    return Script(
        *inline("instances.py"), order=order, explain=lambda lines: explained(where, lines)
    )


def explained(where: str, lines: Iterable[str]) -> list[str]:
    """Cause and remedy for each instance that failed, from its own log lines."""
    logs: dict[str, list[str]] = {}
    outcomes: dict[str, str] = {}
    for line in lines:
        head, separator, text = line.partition(" | ")
        if separator and head.startswith(JOURNAL):
            logs.setdefault(head[len(JOURNAL) :], []).append(text)
        elif separator and head.startswith(FAILED):
            outcomes[head[len(FAILED) :]] = text
    told = []
    for name, outcome in outcomes.items():
        told.append(f"{where}: instance {name}: {outcome}")
        text = "\n".join(logs.get(name, ()))
        found = match(text)
        # What only says that something failed says less than the log's own words.
        own = last_error(text) if not found or found[0].rank is Rank.GENERIC else ""
        if own:
            told += [f"{CAUSE}{own}", f"  read `journalctl -u vllm@{name}` on {where}"]
            continue
        for one in found[:1]:
            told += [
                f"{CAUSE}{one.cause} ({one.id})",
                f"{LINE}{one.line}",
                f"  remedy: {one.remedy}",
            ]
        if not found:
            told.append(f"  cause unknown: read `journalctl -u vllm@{name}` on {where}")
    return told
