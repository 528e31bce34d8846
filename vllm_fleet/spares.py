"""A second instance for a while, of a pool that has one alone: on free cards like its own. Pure.

It is an instance like any other, ``NAME.spare``, declared by the rollout instead of the operator:
plan, files, gateways and firewall treat it so. It serves the new version while the declared one
changes, and is taken away again: nothing moves for good by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from vllm_fleet.cards import CardsError, resolve
from vllm_fleet.rollout.state import record_of
from vllm_fleet.spec.model import Fleet, HostSpec, Instance
from vllm_fleet.state import HostState
from vllm_fleet.survey import HostView

SUFFIX = ".spare"
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Spare:
    """Where the spare of an instance runs."""

    host: str
    name: str  # of the instance that it stands in for
    cards: tuple[int, ...]
    port: int


def name_of(name: str) -> str:
    """What the spare of an instance is called."""
    return name + SUFFIX


def is_spare(name: str) -> bool:
    """Whether an instance is a spare."""
    return name.endswith(SUFFIX)


def found(view: HostView, name: str) -> tuple[int, ...]:
    """Free cards like those of an instance, as many; none where there are none."""
    cards = view.cards.get(name, ())
    known = view.seen.by_index
    if not cards or any(index not in known for index in cards):
        return ()
    taken = {index for one, its in view.cards.items() if one != name_of(name) for index in its}
    for one, there in view.state.instances.items():  # also those that are to leave
        if one != name_of(name) and view.state.active(f"vllm@{one}.service"):
            taken.update(there.get("cards") or ())
    first = known[cards[0]]
    try:
        group = resolve(f"{len(cards)} x {first.name}", view.seen.groups, taken)
    except CardsError:
        return ()
    like = all(known[index].memory_mib == first.memory_mib for index in group.gpus)
    return group.gpus if like else ()


def free_port(spec: HostSpec, state: HostState) -> int:
    """A port above those of the instances that nobody listens on."""
    ports = {one.port for one in spec.instances}
    taken = ports | {int(port) for port in state.listening}
    return next(port for port in range(max(ports) + 1, 65536) if port not in taken)


def kept(fleet: Fleet, states: Mapping[str, HostState]) -> list[Spare]:
    """Spares that stand on hosts and are needed: what they stand in for does not serve as it
    should, since a rollout was cut off. Without them their pools would serve nobody."""
    spares = []
    for spec in fleet.hosts:
        state = states.get(spec.name)
        for one in spec.instances if state else ():
            assert state is not None
            there = state.instances.get(name_of(one.name))
            if not there or not there.get("port"):
                continue
            now = state.instances.get(one.name, {})
            serves = state.active(f"vllm@{one.name}.service") and bool(now.get("ready"))
            if not serves or record_of(state, one.name).step is not None:
                cards = tuple(there.get("cards") or ())
                spares.append(Spare(spec.name, one.name, cards, int(there["port"])))
    return spares


def with_spares(fleet: Fleet, spares: list[Spare]) -> Fleet:
    """The fleet with spares declared, each after the instance that it stands in for."""
    by_host: dict[str, list[Spare]] = {}
    for spare in spares:
        by_host.setdefault(spare.host, []).append(spare)
    if not by_host:
        return fleet
    return _changed(
        fleet, hosts=tuple(_with(spec, by_host.get(spec.name, [])) for spec in fleet.hosts)
    )


def _with(spec: HostSpec, spares: list[Spare]) -> HostSpec:
    declared: list[Instance] = []
    by_name = {spare.name: spare for spare in spares}
    for one in spec.settings.instances:
        declared.append(one)
        spare = by_name.get(one.name) if spec.name in one.hosts else None
        if spare is not None:
            more = {"name": name_of(one.name), "hosts": (spec.name,), "port": spare.port}
            declared.append(one.model_copy(update={**more, "cards": spare.cards}))
    return _changed(spec, settings=_changed(spec.settings, instances=tuple(declared)))


def _changed(model: M, **fields: object) -> M:
    """A copy with other fields, and without what the original remembers as following from its
    own, which ``model_copy`` would take along."""
    kept = {name: getattr(model, name) for name in type(model).model_fields}
    return type(model).model_construct(**{**kept, **fields})
