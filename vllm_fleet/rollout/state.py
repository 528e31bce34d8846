"""What hosts remember of changes, and each instance as the policy looks at it. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_fleet.rollout.policy import Standing, Version
from vllm_fleet.state import HostState


@dataclass(frozen=True)
class Refused:
    """A version that must not come back to a pool until somebody clears it."""

    pool: str
    version: Version
    why: str
    by_release: bool  # the release as a whole, not only these settings


@dataclass(frozen=True)
class Good:
    """A version that served well, since when, and the run that brought it."""

    version: Version
    at: float = 0.0
    run: str = ""


@dataclass(frozen=True)
class Record:
    """What one host remembers of one instance."""

    goods: tuple[Good, ...] = ()  # that served well, the last one first
    refused: tuple[Refused, ...] = ()
    step: Mapping[str, Any] | None = None  # a change under way, or cut off

    @property
    def cut_off(self) -> Version | None:
        """What a change that did not end was going to."""
        if self.step is None:
            return None
        return _version(self.step.get("to")) or Version("an unknown version", "")

    @property
    def on_its_way_back(self) -> bool:
        """Whether that change had failed and was being undone."""
        return bool(self.step and self.step.get("back"))


def record_of(state: HostState, name: str) -> Record:
    """The record of an instance, empty where its host has none."""
    found = state.rollout.get(name) or {}
    return Record(
        tuple(
            Good(version, float(one.get("at") or 0), str(one.get("run") or ""))
            for one in found.get("goods") or ()
            if (version := _version(one)) is not None
        ),
        tuple(
            Refused(
                str(found.get("pool") or ""), version, str(one.get("why")), bool(one["by_release"])
            )
            for one in found.get("refused") or ()
            if (version := _version(one)) is not None
        ),
        found.get("step"),
    )


def _version(found: Mapping[str, Any] | None) -> Version | None:
    if not found or not found.get("checksum"):
        return None
    return Version(str(found.get("release")), str(found["checksum"]))


def refusals(states: Iterable[HostState]) -> tuple[Refused, ...]:
    """What any host of the fleet remembers as refused."""
    return tuple(
        one for state in states for name in state.rollout for one in record_of(state, name).refused
    )


def refusal_of(pool: str, wanted: Version, known: Sequence[Refused]) -> str:
    """Why a version is not to come back to a pool; empty where it may."""
    for one in known:
        if one.pool != pool:
            continue
        if one.version == wanted or (one.by_release and one.version.release == wanted.release):
            return one.why
    return ""


def standing(
    state: HostState,
    host: str,
    name: str,
    pool: str,
    wanted: Version,
    known: Sequence[Refused],
    spare: tuple[int, ...] = (),
) -> Standing:
    """One instance as the policy looks at it."""
    now = state.instances.get(name, {})
    record = record_of(state, name)
    active = state.active(f"vllm@{name}.service")
    runs = None
    if active:
        runs = Version(str(now.get("release") or "?"), str(now.get("running") or "?"))
    if state.held:
        # Left alone, and missing in its pool.
        return Standing(host, name, pool, wanted, wanted, serving=False)
    seconds = now.get("start_seconds")
    return Standing(
        host=host,
        name=name,
        pool=pool,
        wanted=wanted,
        runs=runs,
        serving=active and bool(now.get("ready")),
        start_seconds=float(seconds) if isinstance(seconds, int | float) else None,
        refused=refusal_of(pool, wanted, known),
        cut_off=record.cut_off,
        spare=spare,
    )


def together(standings: Sequence[Standing], known: Container[str]) -> list[Standing]:
    """The same, with the ranks of a span that can only be changed with all of them left alone.

    ``known``: ids of what takes part in the change. Where a rank does not, the others stay.
    """
    missing = {one.span for one in standings if one.span and one.id not in known}
    return [
        replace(
            one,
            wanted=one.runs or one.wanted,
            runs=one.runs or one.wanted,
            cut_off=None,
            serving=one.counts,
        )
        if one.span in missing
        else one
        for one in standings
    ]


def goes_back(standings: Sequence[Standing], records: Mapping[str, Record]) -> list[Standing]:
    """What rollback.py undoes: the last change of the fleet, instance by instance.

    ``standings`` of all instances; ``records`` by their id. What comes back has the version as
    ``wanted`` that served before. The last change is the one that the youngest good version
    came by: of release, where that changed, so that a change of several runs is undone whole;
    else that run's. A change that was cut off on its way belongs to it.
    """
    known = [one for record in records.values() for one in record.refused]
    last: tuple[float, Standing] | None = None
    for one in standings:
        goods = records[one.id].goods
        if (
            len(goods) > 1
            and goods[0].version == one.runs
            and (last is None or goods[0].at > last[0])
        ):
            last = goods[0].at, one
    found = []
    for one in standings:
        record = records[one.id]
        good = _before(one, record, known)
        if good is None:
            continue
        if one.cut_off is not None or (last is not None and _same(one, last[1], records)):
            found.append(replace(one, wanted=good, refused=""))
    return found


def _before(one: Standing, record: Record, known: Sequence[Refused]) -> Version | None:
    """The version that served before what runs now; None where none is remembered."""
    goods = [good.version for good in record.goods if not refusal_of(one.pool, good.version, known)]
    if record.step is None:
        goods = [good for good in goods if good != one.runs]
    elif record.on_its_way_back and record.cut_off in goods:
        return record.cut_off
    # Of a change that was cut off the last good version is what served before it.
    return goods[0] if goods else None


def _same(one: Standing, last: Standing, records: Mapping[str, Record]) -> bool:
    """Whether what an instance runs came by the same change as the last one."""
    goods, other = records[one.id].goods, records[last.id].goods
    if len(goods) < 2 or goods[0].version != one.runs:
        return False
    if other[0].version.release != other[1].version.release:
        before = {good.version.release for good in goods[1:]} - {goods[0].version.release}
        return goods[0].version.release == other[0].version.release and bool(before)
    return goods[0].run == other[0].run
