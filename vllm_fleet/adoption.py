"""A vLLM that somebody started by hand where the plan wants an instance: named, and taken over
only when told. Pure; vllm_fleet/onhost/adopt.py does it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from vllm_fleet.spec.model import Fleet, HostSpec
from vllm_fleet.state import HostState, Process

VLLM = re.compile(r"(^|[/ ])vllm( |$)|\bvllm\.entrypoints\b|^VLLM::")


class AdoptionError(ValueError):
    """What was asked for cannot be taken over; says why."""


def is_vllm(process: Process) -> bool:
    """Whether a process is a server of vLLM, by its command line."""
    return bool(VLLM.search(str(process.get("command") or "")))


def asked(text: str, fleet: Fleet) -> frozenset[str]:
    """``host/instance``, several with commas between. Raises AdoptionError for an unknown one."""
    names = frozenset(word.strip() for word in text.split(",") if word.strip())
    known = {f"{spec.name}/{one.name}" for spec in fleet.hosts for one in spec.instances}
    if unknown := sorted(names - known):
        raise AdoptionError(
            f"adopt={','.join(unknown)}: no such instance; say HOST/INSTANCE of the plan: "
            f"{', '.join(sorted(known))}"
        )
    return names


def as_if_gone(
    fleet: Fleet, states: Mapping[str, HostState], names: Collection[str]
) -> dict[str, HostState]:
    """The states of hosts in which what is to be taken over stands in nobody's way."""
    return {
        spec.name: _one(spec, states[spec.name], names)
        for spec in fleet.hosts
        if spec.name in states
    }


def _one(spec: HostSpec, state: HostState, names: Collection[str]) -> HostState:
    listening, adopted = dict(state.listening), dict(state.adopted)
    holders = list(state.cards.get("holders") or ())
    for one in spec.instances:
        process = listening.get(str(one.port))
        unit = f"vllm@{one.name}.service"
        if f"{spec.name}/{one.name}" not in names or not process or process.get("unit") == unit:
            continue
        if not is_vllm(process):
            raise AdoptionError(
                f"{spec.name}: port {one.port} of instance {one.name} is held by pid "
                f"{process['pid']} of {process['user']}: {process['command'] or '?'}: no vLLM, so "
                "it is not taken over: stop it, or choose another port"
            )
        adopted[one.name] = process
        listening[str(one.port)] = {**process, "unit": unit}
        holders = [{**held, "unit": unit} if _together(held, process) else held for held in holders]
    if not adopted:
        return state
    cards = {**state.cards, "holders": holders} if holders else state.cards
    return replace(state, listening=listening, cards=cards, adopted=adopted)


def _together(one: Process, other: Process) -> bool:
    """Whether two processes belong to one server: both were started in one session, as those of a
    unit are too. The unit tells less: who logs in by SSH may have all processes in that of sshd."""
    return one.get("session") is not None and one.get("session") == other.get("session")
