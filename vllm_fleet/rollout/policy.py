"""Who changes when, and who not: from what runs and what is wanted to waves. Pure.

Canaries of every pool first, one at a time; then waves. Within each, the order in which the
inventory declares the instances. Never more of a pool out than `most_out` allows, and of a pool
with several instances always one stays. Everything that stands in the way is told before
anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm_fleet.spec.model import Rollout as Settings

How = Literal["rolling", "spare", "held", "downtime", "down", "back"]


@dataclass(frozen=True)
class Version:
    """What an instance is: its release, and the checksum of all that it takes in at its start."""

    release: str
    checksum: str

    def __str__(self) -> str:
        return f"{self.release} ({self.checksum[:8]})"


@dataclass(frozen=True)
class Standing:
    """One instance as it stands, and as it is wanted; in the order in which it is declared."""

    host: str
    name: str
    pool: str
    wanted: Version
    runs: Version | None = None  # None: its unit does not run
    serving: bool = False  # clients get answers from it
    start_seconds: float | None = None  # its last start, as measured
    refused: str = ""  # why the wanted version is not to come back
    cut_off: Version | None = None  # what a change that did not end was going to
    spare: tuple[int, ...] = ()  # a free card group like its own
    adopts: bool = False  # a vLLM that is not ours serves in its place until now
    span: str = ""  # instances of one span are one server over several hosts
    rank: int = 0  # within its span; rank 0 answers for all

    @property
    def id(self) -> str:
        """``host/name``, as the gateway calls it."""
        return f"{self.host}/{self.name}"

    @property
    def counts(self) -> bool:
        """Whether its pool can rely on it; what a cut-off change left may be out of its pool."""
        return self.serving and self.cut_off is None

    @property
    def as_wanted(self) -> bool:
        """Whether nothing is to be done."""
        return self.cut_off is None and self.runs == self.wanted and not self.adopts


@dataclass(frozen=True)
class Step:
    """One server that changes: an instance, or all instances of a span."""

    members: tuple[Standing, ...]
    how: How
    why: str

    @property
    def pool(self) -> str:
        """The pool that it is taken from."""
        return self.members[0].pool

    @property
    def label(self) -> str:
        """Its instances, for people."""
        return " + ".join(one.id for one in self.members)

    @property
    def serving(self) -> bool:
        """Whether its pool loses something while it is out."""
        return all(one.counts for one in self.members)


@dataclass(frozen=True)
class Wave:
    """Steps that go side by side, and how long they are watched afterwards."""

    number: int
    kind: Literal["canary", "wave"]
    steps: tuple[Step, ...]
    hold_seconds: int


@dataclass(frozen=True)
class Rollout:
    """The whole change; ``refusals`` are reasons for which nothing of it may begin."""

    waves: tuple[Wave, ...] = ()
    left: tuple[tuple[Standing, str], ...] = ()  # what is not as wanted and stays so, and why
    refusals: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in order."""
        return tuple(step for wave in self.waves for step in wave.steps)

    def lines(self) -> list[str]:
        """The plan for people, one line each."""
        told = []
        for wave in self.waves:
            held = f", then watched for {wave.hold_seconds} s" if wave.hold_seconds else ""
            told.append(f"wave {wave.number} of {len(self.waves)} ({wave.kind}{held}):")
            for step in wave.steps:
                one = step.members[0]
                runs = one.runs or ("a vLLM that is not ours" if one.adopts else "nothing")
                told.append(f"  {step.label} of {step.pool}: {runs} -> {one.wanted}; {step.why}")
        told += [f"left as it is: {one.id} of {one.pool}: {why}" for one, why in self.left]
        return told


@dataclass
class _Pool:
    """The servers of one pool while waves are made."""

    size: int
    allowed: int
    down: set[str] = field(default_factory=set)  # labels of servers that do not serve now


def plan_rollout(
    standings: Sequence[Standing],
    settings: Settings,
    hold_seconds: int,
    *,
    releases: bool = True,
) -> Rollout:
    """The waves that bring every instance to what is wanted.

    ``hold_seconds``: how long the gateway holds requests of a pool that serves nobody; 0 where
    there is none. ``releases``: whether the release of a running instance may change; deploy.py
    leaves that to upgrade.py.
    """
    servers = _servers(standings)
    pools: dict[str, _Pool] = {}
    for members in servers:
        pool = pools.setdefault(members[0].pool, _Pool(0, 0))
        pool.size += 1
        if not all(one.counts for one in members):
            pool.down.add(_label(members))
    for pool in pools.values():
        pool.allowed = allowed_out(settings.most_out, pool.size)
    left: list[tuple[Standing, str]] = []
    refusals: list[str] = []
    steps: list[Step] = []
    for members in servers:
        if all(one.as_wanted for one in members):
            continue
        if reason := _reason_to_leave(members, releases):
            left += [(one, reason) for one in members]
            continue
        step, refusal = _step(members, pools[members[0].pool].size, settings, hold_seconds)
        steps.append(step)
        refusals += [refusal] if refusal else []
    waves = _waves(steps, pools, settings, refusals)
    return Rollout(() if refusals else tuple(waves), tuple(left), tuple(refusals))


def allowed_out(most_out: int | str, size: int) -> int:
    """How many servers of a pool of this size may be out at once: one at least, never all."""
    return max(1, min(_share(most_out, size), size - 1))


def _share(value: int | str, whole: int) -> int:
    """A number, or the part of a whole that a percentage makes, rounded down."""
    if isinstance(value, int):
        return value
    return whole * int(value.removesuffix("%")) // 100


def _servers(standings: Iterable[Standing]) -> list[tuple[Standing, ...]]:
    """Instances of one span together, by rank, at the place of the first."""
    found: dict[str, list[Standing]] = {}
    for one in standings:
        found.setdefault(f"span {one.span}" if one.span else one.id, []).append(one)
    return [tuple(sorted(members, key=lambda one: one.rank)) for members in found.values()]


def _label(members: Sequence[Standing]) -> str:
    return " + ".join(one.id for one in members)


def _reason_to_leave(members: Sequence[Standing], releases: bool) -> str:
    """Why a server that is not as wanted is left alone; empty where it is not."""
    for one in members:
        if one.refused and one.cut_off is None:
            return f"{one.wanted} is refused: {one.refused}"
        if releases or one.adopts:
            continue
        if one.cut_off is not None:
            return f"a change to {one.cut_off} was cut off: run upgrade.py, or rollback.py"
        if one.runs is not None and one.runs.release != one.wanted.release:
            return f"runs {one.runs.release}, wanted is {one.wanted.release}: upgrade.py moves it"
    return ""


def _step(
    members: tuple[Standing, ...], size: int, settings: Settings, hold_seconds: int
) -> tuple[Step, str]:
    """How one server changes, and why nothing may begin because of it (or empty)."""
    one = members[0]
    if any(member.refused for member in members):
        return Step(members, "back", f"cut off on its way back: {one.refused}"), ""
    if cut := next((member.cut_off for member in members if member.cut_off), None):
        # Whatever it was doing, it is out of its pool already, or comes back into it.
        return Step(members, "down", f"an earlier change to {cut} was cut off"), ""
    if not all(member.serving for member in members):
        return Step(members, "down", "does not serve now, so nothing is lost"), ""
    if size > 1:
        return Step(members, "rolling", f"{size - 1} more in its pool"), ""
    if one.adopts:
        gap = (
            f"{_label(members)}: nobody else serves pool {one.pool} while ours starts in its place"
        )
        if settings.allow_downtime:
            return Step(members, "downtime", "nobody else serves its pool meanwhile"), ""
        return Step(members, "downtime", gap), (
            f"{gap}: add a second instance, or accept the gap with rollout.allow_downtime"
        )
    if one.spare and len(members) == 1:  # a span would need as many on every host of it
        cards = ", ".join(map(str, one.spare))
        why = f"the only one of its pool: a spare on cards {cards} takes over first"
        return Step(members, "spare", why), ""
    took = one.start_seconds
    if hold_seconds and (took is None or took <= hold_seconds):
        last = f"last start {took:.0f} s" if took is not None else "no start measured yet"
        why = f"the only one of its pool: requests are held, up to {hold_seconds} s ({last})"
        return Step(members, "held", why), ""
    if hold_seconds:
        assert took is not None
        reason = f"its last start took {took:.0f} s, the gateway holds requests {hold_seconds} s"
    else:
        reason = "no gateway holds its requests"
    if settings.allow_downtime:
        return Step(members, "downtime", f"the only one of its pool, and {reason}"), ""
    refusal = (
        f"{_label(members)}: the only instance of pool {one.pool}, and {reason}: add a second "
        "instance, raise gateway.hold_seconds, or accept the "
        "gap with rollout.allow_downtime"
    )
    return Step(members, "downtime", reason), refusal


def _waves(
    steps: list[Step], pools: dict[str, _Pool], settings: Settings, refusals: list[str]
) -> list[Wave]:
    """Canaries one by one, then waves, never more of a pool out than it allows."""
    moving = {step.label for step in steps}
    by_pool: dict[str, list[Step]] = {}
    for step in steps:
        by_pool.setdefault(step.pool, []).append(step)
    canaries: set[str] = set()
    for name, own in by_pool.items():
        pool = pools[name]
        stuck = sorted(pool.down - moving)
        if len(stuck) >= pool.allowed and pool.size > 1 and any(step.serving for step in own):
            refusals.append(
                f"pool {name}: {', '.join(stuck)} of it does not serve, and of {pool.size} no more "
                f"than {pool.allowed} may be out: bring it back first (deploy.py), or raise "
                "rollout.most_out"
            )
        # What serves nobody goes first: that gives its pool room.
        first = sorted(own, key=lambda step: step.serving)[: settings.canaries]
        canaries |= {step.label for step in first}
    if refusals:
        return []
    found: list[tuple[Literal["canary", "wave"], list[Step]]] = []
    # Of all pools too: clients of one that a cut-off run left without anybody are waiting.
    steps = sorted(steps, key=lambda step: step.serving)
    first = [step for step in steps if step.label in canaries]
    rest = [step for step in steps if step.label not in canaries]
    size = max(1, _share(settings.wave, len(rest)))
    for kind, left, most in (("canary", first, 1), ("wave", rest, size)):
        while left:
            taken = _take(left, pools, most)
            assert taken, "a server that does not serve may always go, and makes room for others"
            found.append((kind, taken))  # type: ignore[arg-type]
            left = [step for step in left if step not in taken]
            for step in taken:
                pools[step.pool].down.discard(step.label)
    return [
        Wave(number, kind, tuple(taken), settings.canary_hold_seconds if kind == "canary" else 0)
        for number, (kind, taken) in enumerate(found, 1)
    ]


def _take(left: list[Step], pools: dict[str, _Pool], most: int) -> list[Step]:
    """The next steps that may go side by side, in their order."""
    taken: list[Step] = []
    out = {name: len(pool.down) for name, pool in pools.items()}
    for step in left:
        if len(taken) == most:
            break
        if step.serving:
            if out[step.pool] + 1 > pools[step.pool].allowed:
                continue
            out[step.pool] += 1
        if step.how == "spare" and any(one.how == "spare" for one in taken):
            continue  # two of them may have been offered the same cards
        taken.append(step)
    return taken
