"""Instances of vLLM: start what does not run, replace what runs with something else."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from pyinfra import host
from pyinfra.api import operation

from vllm_fleet.causes import match
from vllm_fleet.operations.remote import Script, inline
from vllm_fleet.plan import HostPlan
from vllm_fleet.planned import PlannedInstance

JOURNAL = "journal "
FAILED = "failed "


@operation()
def started(plan: HostPlan) -> Generator[Script, None, None]:
    """Start the instances that do not run, all at once, and wait until each is warm."""
    waiting = plan.to_start()
    if not waiting:
        host.noop("every instance runs")
        return
    yield change("start", plan.spec.name, waiting)


@operation()
def replaced(plan: HostPlan, instance: PlannedInstance) -> Generator[Script, None, None]:
    """Drain one instance, start it with the settings of the plan, wait until it is warm."""
    yield change("restart", plan.spec.name, [instance])


@operation()
def retired(plan: HostPlan) -> Generator[Script, None, None]:
    """Drain, stop and remove instances that are no longer in the plan."""
    if not plan.retired:
        host.noop("no instance is left over")
        return
    order = {"action": "retire", "instances": [{"name": name} for name in plan.retired]}
    yield Script(*inline("instances.py"), order=order)


def change(action: str, where: str, instances: Iterable[PlannedInstance]) -> Script:
    """The script that starts or restarts instances and explains a failure."""
    order = {
        "action": action,
        "instances": [
            {
                "name": i.name,
                "seconds": i.start_seconds,
                "drain_seconds": i.drain_seconds,
                "pool": i.model_name,
            }
            for i in instances
        ],
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
        found = match("\n".join(logs.get(name, ())))
        for one in found[:1]:
            told += [
                f"  cause: {one.cause} ({one.id})",
                f"  log line: {one.line}",
                f"  remedy: {one.remedy}",
            ]
        if not found:
            told.append(f"  cause unknown: read `journalctl -u vllm@{name}` on {where}")
    return told
