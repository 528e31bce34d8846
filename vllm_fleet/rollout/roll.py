"""The rollout itself: every step of every wave, and the way back of what got worse.

Free of pyinfra: hosts are reached through :class:`~vllm_fleet.rollout.hosts.Hosts`. Every step
is one script on one host that may be run again; where a run was killed, the record on the host
says so, and the next run goes on from there.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from vllm_fleet.rollout import acceptance
from vllm_fleet.rollout.audit import MEANING, Change, Result, run_mark
from vllm_fleet.rollout.hosts import CAUSE, JOURNAL, LINE, Failed, Hosts, Json
from vllm_fleet.rollout.lock import Lock, Locked, recorded
from vllm_fleet.rollout.policy import Rollout, Standing, Step, Version, Wave, allowed_out
from vllm_fleet.rollout.rehearsal import as_rehearsed
from vllm_fleet.spec.model import Rollout as Settings

T = TypeVar("T")
R = TypeVar("R")

JOURNAL_LINES = 400
ROOM_SECONDS = 60.0  # for an instance that comes back just now
ROOM_POLL_SECONDS = 2.0
PARTS = ("weights", "compile", "graphs")  # of a load, in the order in which they pass
UNDRAIN_SECONDS = 60  # gateways ask instances twice a second; nginx may be reloading


class Worse(Exception):
    """The new version is not as good as the old one was; why."""


@dataclass(frozen=True)
class Target:
    """One instance that changes: as it stands, and what is done with it."""

    standing: Standing
    version: Json | None  # what is staged; None: the version `to` is remembered on its host
    to: Version
    port: int
    model: str  # the name that clients use
    task: str
    tools: bool
    start_seconds: int
    drain_seconds: int
    command: Json = field(default_factory=dict)  # for the rehearsal

    @property
    def id(self) -> str:
        """``host/name``."""
        return self.standing.id


class Spares(Protocol):
    """Makes and takes away the spare of an instance; see vllm_fleet/spares.py."""

    def put(self, one: Standing) -> Target:
        """Its files and unit in place, known to gateways, not started. Raises Failed."""

    def take(self, one: Standing) -> None:
        """Unknown to gateways, stopped, its files gone. Raises Failed."""


@dataclass
class Roll:
    """A rollout under way."""

    hosts: Hosts
    gateways: Sequence[str]
    settings: Settings
    lock: Lock
    targets: Mapping[str, Target]
    explain: Callable[[str, list[str]], list[str]] = lambda where, lines: []
    back: bool = False  # rollback.py: nothing is compared, no canary is watched
    spares: Spares | None = None
    changes: list[Change] = field(default_factory=list)

    def stage(self, rollout: Rollout) -> None:
        """Every version written down on its host, and its command line tried there.

        Nothing that serves is touched. Raises Failed with every reason.
        """
        by_host: dict[str, list[Target]] = {}
        for step in rollout.steps:
            for one in step.members:
                by_host.setdefault(one.host, []).append(self.targets[one.id])
        # One at a time on a host: a rehearsal takes memory and time of what serves there.
        reasons = _each(self._staged_together, [*by_host.values()])
        if refused := [reason for found in reasons for reason in found if reason]:
            raise Failed("; ".join(refused))

    def _staged_together(self, targets: Sequence[Target]) -> list[str]:
        """Why versions of one host cannot be staged. What starts alike is rehearsed once."""
        found: dict[tuple[str, ...], Json] = {}
        return [self._staged(target, found) for target in targets]

    def _staged(self, target: Target, rehearsed: dict[tuple[str, ...], Json]) -> str:
        """Why one version cannot be staged; empty where it is."""
        host, name = target.standing.host, target.standing.name
        if target.version is None:
            return ""
        try:
            self._switch(host, name, "stage", pool=target.standing.pool, next=target.version)
            if not target.command:
                return ""
            like = as_rehearsed(name, target.command["files"])
            if like not in rehearsed:
                order = {"instance": name, **target.command}
                rehearsed[like] = self.hosts.ask(host, "rehearse", order)
            found = rehearsed[like]
        except Failed as error:
            return f"{target.id}: {error}"
        why = "" if found.get("ok") else found["why"]
        return f"{target.id}: {target.to.release} refuses its options: {why}" if why else ""

    def run(self, rollout: Rollout) -> bool:
        """Every wave in turn; False where one failed, and later ones were not begun."""
        self._mark("running")
        good = False
        try:
            good = all(self._wave(wave, len(rollout.waves)) for wave in rollout.waves)
        finally:
            self._mark("done" if good else "failed")
            self._tell_end(rollout, good)
        return good

    # --- waves

    def _wave(self, wave: Wave, of: int) -> bool:
        self.lock.check()
        names = ", ".join(step.label for step in wave.steps)
        self.hosts.say(f"wave {wave.number} of {of} ({wave.kind}): {names}")
        if not self._hook(self.settings.before_wave, wave, ""):
            return False
        hold = 0 if self.back else wave.hold_seconds

        # Spares come and go one at a time, between waves: gateways are told of each.
        spared = [step for step in wave.steps if step.how == "spare"]
        mine = [change for step in spared for change in self._spare(step)]
        refused = {change.instance.id for change in mine}
        steps = [step for step in wave.steps if step.members[0].id not in refused]
        results = _each(lambda step: self._server(step, hold), steps)
        mine += [change for changes in results for change in changes]
        for step in spared:
            self._take(step, mine)
        self.changes += mine
        good = all(one.result == "done" for one in mine)
        return self._hook(self.settings.after_wave, wave, "done" if good else "failed") and good

    def _hook(self, program: str | None, wave: Wave, result: str) -> bool:
        """Run a program of the operator's; False where it fails."""
        if not program:
            return True
        members = [one for step in wave.steps for one in step.members]
        environment = {
            "FLEET_RUN": self.lock.holder.run,
            "FLEET_WAVE": str(wave.number),
            "FLEET_HOSTS": " ".join(one.host for one in members),
            "FLEET_INSTANCES": " ".join(one.id for one in members),
            "FLEET_FROM": " ".join(one.runs.release if one.runs else "-" for one in members),
            "FLEET_TO": " ".join(self.targets[one.id].to.release for one in members),
            "FLEET_RESULT": result,
        }
        done = run_hook(program, environment)
        for line in done[1].splitlines():
            self.hosts.say(f"{program}: {line}")
        if done[0] != 0:
            self.hosts.say(f"{program} failed (exit code {done[0]}): no further wave is begun")
        return done[0] == 0

    # --- one server

    def _server(self, step: Step, hold: int) -> list[Change]:
        """Change one server, an instance or all ranks of a span; a change each, of one end."""
        targets = [self.targets[one.id] for one in step.members]
        began = time.monotonic()
        if len(targets) > 1:
            move: _Move = _SpanMove(self, targets, step, hold)
        else:
            move = _Move(self, targets[0], step, hold)
        try:
            result, why = move.run()
        except Exception as error:  # ours, and no reason to keep the others untold
            result, why = "stuck", f"{type(error).__name__}: {error}: run this again"
        seconds = time.monotonic() - began
        changes = [Change(t.standing, t.to, result, seconds, why, move.parts) for t in targets]
        for change in changes:
            self._record(change)
        told = f" ({changes[0].told_parts()})" if move.parts else ""
        self.hosts.say(f"{step.label}: {MEANING[result]} after {seconds:.0f} s{told}")
        return changes

    # --- a spare

    def _spare(self, step: Step) -> list[Change]:
        """The new version on spare cards, serving before the old one is stopped.

        Nothing where that went well, else what became of the instance: it serves as it did.
        """
        one = step.members[0]
        target, began = self.targets[one.id], time.monotonic()
        result, why = _Spare(self, target, step).run()
        if result == "done":
            return []
        change = Change(one, target.to, result, time.monotonic() - began, why)
        self._record(change)
        self.hosts.say(f"{one.id}: {MEANING[result]} after {change.seconds:.0f} s")
        return [change]

    def _take(self, step: Step, changes: Sequence[Change]) -> None:
        """A spare away again, unless it is what its pool has."""
        one = step.members[0]
        if any(change.instance.id == one.id and change.result == "stuck" for change in changes):
            self.hosts.say(f"{one.id}: its spare stays and serves: run this again")
            return
        assert self.spares is not None, "its step is a spare's"
        try:
            self.spares.take(one)
        except Failed as error:
            self.hosts.say(f"{one.id}: its spare was not taken away, run this again: {error}")

    def _record(self, change: Change) -> None:
        line = change.line(self.lock.holder)
        recorded(self.hosts, [change.instance.host], [line], dict([change.mark(time.time())]))
        recorded(self.hosts, [*self.gateways, self.lock.host], [line], {})

    def _mark(self, result: str) -> None:
        mark = dict([run_mark(self.lock.holder, result, time.time())])
        recorded(self.hosts, [self.lock.host], [], mark)

    def _tell_end(self, rollout: Rollout, good: bool) -> None:
        began = {one.instance.id for one in self.changes}
        rest = [step.label for step in rollout.steps if not {m.id for m in step.members} & began]
        for one in self.changes:
            if one.result != "done":
                self.hosts.say(f"{one.instance.id}: {MEANING[one.result]}: {one.why}")
        if rest:
            self.hosts.say(f"not begun, and as they were: {', '.join(rest)}")
        if good:
            self.hosts.say(f"{len(began)} instances changed")

    def _switch(self, host: str, name: str, action: str, **order: Any) -> Json:
        return self.hosts.ask(host, "switch", {"action": action, "instance": name, **order})


class _Move:
    """One instance from the version that serves to another one."""

    def __init__(self, roll: Roll, target: Target, step: Step, hold: int) -> None:
        self.roll = roll
        self.hosts = roll.hosts
        self.target = target
        self.how = step.how
        self.hold = hold
        self.host, self.name = target.standing.host, target.standing.name
        self.ends = time.monotonic() + roll.settings.progress_deadline_seconds
        self.since = 0.0  # of the log that matters
        self.begun: Json = {}
        self.parts: dict[str, float] = {}  # seconds by what they went into
        self.good: Json = {}  # the last good version: release, checksum, probe, figures

    def run(self) -> tuple[Result, str]:
        """What became of it, and why."""
        try:
            self._begin()
            if self.how in ("held", "downtime"):
                # Clients wait from the moment it is out: what can be done before is.
                self._measure_old()
                self._out()
            else:
                self._out()
                self._measure_old()
        except (Failed, Worse) as error:
            return self._leave(str(error))
        if self.how == "back":
            return self._return(self.target.standing.refused, refuse=False)
        try:
            self.roll.lock.check()
            self._change()
            probe = self._accept_figures()
            self._in()
            self._watch_in_pool()
            self._ask(
                "settle" if self.roll.back else "accept",
                run=self.roll.lock.holder.run,
                probe=probe,
            )
        except Worse as error:
            return self._return(str(error), refuse=True)
        except Locked as error:
            return self._leave(str(error))
        except _NotIn as error:
            return "stuck", f"runs the new version, but {error}: run this again"
        except Failed as error:
            return self._return(str(error), refuse=False)
        return "done", ""

    # --- the steps, in order

    def _begin(self) -> None:
        drained = False
        for gateway in self.roll.gateways:
            known = self._room(gateway)
            drained = drained or bool(known[self.target.id]["draining"])
        to = self.target.to
        self.begun = self._ask(
            "begin",
            run=self.roll.lock.holder.run,
            pool=self.target.standing.pool,
            seconds=self._left(),
            drained=drained,
            to={"release": to.release, "checksum": to.checksum},
            back=self.roll.back,
        )
        # What it goes back to: for rollback.py that is what it goes to.
        self.good = next(
            (
                good
                for good in self.begun.get("goods") or []
                if (good["checksum"] == to.checksum) == (self.target.version is None)
            ),
            {},
        )
        if self.roll.back and (refused := self._left_behind()):
            self._ask("refuse", run=self.roll.lock.holder.run, refused=refused)

    def _left_behind(self) -> Json | None:
        """The version that rollback.py goes back from, which must not come back by itself."""
        one, to = self.target.standing, self.target.to
        for version in (one.runs, one.cut_off):
            if version is not None and version != to:
                why = f"rolled back by {self.roll.lock.holder.who}"
                return _refused(version, why, by_release=version.release != to.release)
        return None

    def _room(self, gateway: str) -> dict[str, Json]:
        """What a gateway knows, once its pool can do without this instance. Raises Failed."""
        pool = self.target.standing.pool
        deadline = time.monotonic() + ROOM_SECONDS
        while True:
            known = self.hosts.ask(gateway, "gateways", {"action": "status"})["instances"]
            if self.target.id not in known:
                raise Failed(
                    f"{gateway}: its gateway does not know {self.target.id}: deploy it first"
                )
            members = {name: one for name, one in known.items() if one["pool"] == pool}
            out = [
                name
                for name, one in members.items()
                if name != self.target.id and (one["draining"] or not one["ready"])
            ]
            allowed = allowed_out(self.roll.settings.most_out, len(members))
            if self.how not in ("rolling", "spare") or len(out) < allowed:
                return dict(known)
            if self.target.standing.adopts and self._others(members):
                return dict(known)
            if time.monotonic() >= deadline:
                raise Failed(
                    f"{gateway}: out of pool {pool} already: {', '.join(out)}; of {len(members)} "
                    f"no more than {allowed} may be: bring that back first"
                )
            time.sleep(ROOM_POLL_SECONDS)

    def _others(self, members: Mapping[str, Json]) -> bool:
        """Whether anybody else of a pool serves: one of ours, or one that is yet to be adopted."""
        changed = {change.instance.id for change in self.roll.changes}
        foreign = {
            name
            for name, target in self.roll.targets.items()
            if target.standing.adopts and name not in changed
        }
        return any(
            (one["ready"] and not one["draining"]) or name in foreign
            for name, one in members.items()
            if name != self.target.id
        )

    def _out(self) -> None:
        """Out of its pool at every gateway, and nothing in flight through them."""
        waited = min(self.target.drain_seconds, self._left())
        for gateway in self.roll.gateways:
            order = {"action": "drain", "instances": [self.target.id], "seconds": waited}
            with self._part("drain"):
                found = self.hosts.ask(gateway, "gateways", order)
            if found.get("in_flight"):
                self.hosts.say(
                    f"{self.target.id}: {found['in_flight']} requests still run after drain_seconds"
                )

    def _measure_old(self) -> None:
        """The probe on the version that serves, to compare with."""
        now = self.begun["now"]
        if self.roll.back or now["checksum"] != self.good.get("checksum"):
            return
        if not (now["active"] and now["ready"]):
            return
        self.good["probe"] = self._probe()
        self._ask("measured", probe=self.good["probe"])

    def _change(self) -> None:
        if self.target.standing.adopts:
            waited = min(self.target.drain_seconds, self._left())
            order = {"action": "adopt", "instance": self.name, "port": self.target.port}
            with self._part("adopt"):
                self.hosts.ask(self.host, "adopt", {**order, "seconds": waited})
        self.since = time.time()
        seconds = min(self._start_seconds(), self._left())
        found = self._switch(self.target.to.checksum, seconds)
        if not found["ok"]:
            self.since = float(found.get("since") or self.since)
            raise Worse(found["why"])
        self.begun["figures"] = found.get("figures") or {}
        self._tell_parts(self.begun["figures"])
        self._stay(0 if self.roll.back else self.roll.settings.minimum_healthy_seconds)

    def _accept_figures(self) -> Json | None:
        """The probe on the new version, judged. Raises Worse."""
        if self.roll.back:
            return self.good.get("probe")
        limits = self.roll.settings.acceptance
        old, new = self.good.get("probe"), self._probe()
        findings = acceptance.judge(old, new, limits)
        if acceptance.too_slow(findings):
            # A busy moment of the host is no slower version: asked once more, the better counts.
            new = acceptance.better(new, self._probe())
            findings = acceptance.judge(old, new, limits)
        findings += acceptance.judge_memory(self.good.get("figures"), self.begun["figures"], limits)
        for one in findings:
            self.hosts.say(f"{self.target.id}: {one}")
        if why := acceptance.refused(findings):
            raise Worse(why)
        return new

    def _in(self, *, ready: bool = True) -> None:
        """Back into its pool at every gateway, unless somebody had taken it out by hand before."""
        if (self.begun.get("step") or {}).get("drained"):
            self.hosts.say(f"{self.target.id}: was drained by hand before, and stays so")
            return
        seconds = UNDRAIN_SECONDS if ready else 0
        for gateway in self.roll.gateways:
            order = {"action": "undrain", "instances": [self.target.id], "seconds": seconds}
            try:
                found = self.hosts.ask(gateway, "gateways", order)
            except Failed as error:
                raise _NotIn(str(error)) from None
            if ready and not found.get("ready"):
                raise _NotIn(f"{gateway}: its gateway does not find {self.target.id} ready")

    def _watch_in_pool(self) -> None:
        """A canary under the requests of clients. Raises Worse."""
        if not self.hold:
            return
        self.hosts.say(f"{self.target.id}: serves; watched for {self.hold} s")
        before = self._counts()
        self._stay(self.hold)
        after = self._counts()
        answered, failed = after[0] - before[0], after[1] - before[1]
        found = acceptance.judge_errors(answered, failed, self.roll.settings.acceptance)
        self.hosts.say(f"{self.target.id}: {found}")
        if found.bad:
            raise Worse(acceptance.refused([found]))

    # --- and back

    def _leave(self, why: str) -> tuple[Result, str]:
        """Nothing was changed yet: back into its pool."""
        if self.target.standing.cut_off is not None:
            # What runs there was not accepted by anybody: its record stays for the next run.
            return "stuck", f"{why}; its change was cut off before, and still is: run this again"
        now = self.begun.get("now") or {}
        try:
            if self.begun:
                self._in(ready=bool(now.get("ready")))
                self._ask("settle", run=self.roll.lock.holder.run)
        except (Failed, _NotIn) as error:
            return "stuck", f"{why}; and it could not be let back in ({error}): run this again"
        return "failed", why

    def _return(self, why: str, *, refuse: bool) -> tuple[Result, str]:
        """To the last good version, through the same gates."""
        self.hosts.say(f"{self.target.id}: {why}")
        saved, cause = self._save_log()
        why += f": {cause}" if cause else ""
        why += f" (log: {saved})" if saved else ""
        if self.roll.back:
            return "stuck", f"{why}: it is out of its pool and does not serve"
        served = bool((self.begun.get("step") or {}).get("served"))
        if not self.good:
            return "stuck", f"{why}; no version is remembered that served here before"
        good = Version(str(self.good["release"]), str(self.good["checksum"]))
        try:
            self._out_again()
            # What did not serve before says nothing about the version.
            if refuse and served and not self.roll.back:
                self._ask("refuse", run=self.roll.lock.holder.run, refused=self._refusal(why))
            self.hosts.say(f"{self.target.id}: back to {good}")
            found = self._switch(good.checksum, self._start_seconds())
            if not found["ok"]:
                return "stuck", f"{why}; and {good} does not come back: {found['why']}"
            self._stay(self.roll.settings.minimum_healthy_seconds)
            self._in()
            self._ask("settle", run=self.roll.lock.holder.run)
        except (Failed, Worse, _NotIn) as error:
            return "stuck", f"{why}; and on the way back to {good}: {error}: run this again"
        return "returned", why

    def _refusal(self, why: str) -> Json:
        """The new version, which must not come back by itself; as a release, if that changed."""
        old = ((self.begun.get("step") or {}).get("from") or {}).get("release")
        to = self.target.to
        return _refused(to, why, by_release=bool(old) and old != to.release)

    def _out_again(self) -> None:
        """Out of its pool once more. A gateway that is lost sends nothing any more."""
        for gateway in self.roll.gateways:
            order = {
                "action": "drain",
                "instances": [self.target.id],
                "seconds": self.target.drain_seconds,
            }
            try:
                self.hosts.ask(gateway, "gateways", order)
            except Failed as error:
                self.hosts.say(f"{self.target.id}: not taken out of its pool there: {error}")

    def _save_log(self) -> tuple[str, str]:
        """The end of its log, kept on the operator's machine; where, and the cause it tells of."""
        order = {"since": self.since or time.time() - 3600, "lines": JOURNAL_LINES}
        try:
            found = self._ask("journal", **order)
        except Failed as error:
            self.hosts.say(f"{self.target.id}: its log could not be read: {error}")
            return "", ""
        lines = [str(line) for line in found.get("lines") or ()]
        if not lines:
            return "", ""
        marked = [f"{JOURNAL}{self.name} | {line}" for line in lines]
        told = self.roll.explain(self.host, [*marked, f"failed {self.name} | its log says"])
        for line in told:
            self.hosts.say(line)
        # The log's own words where they are told, else ours.
        causes = [
            line[len(mark) :] for mark in (LINE, CAUSE) for line in told if line.startswith(mark)
        ]
        saved = self.hosts.save(f"{self.host}-{self.name}.log".replace("/", "_"), lines)
        return saved, causes[0] if causes else ""

    # --- small things

    def _ask(self, action: str, **order: Any) -> Json:
        return self.roll._switch(self.host, self.name, action, **order)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Count the seconds of the block as a part of this change."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - began

    def _switch(self, checksum: str, seconds: int) -> Json:
        """Stop, files, start; what the host says of it."""
        found = self._ask("switch", to=checksum, seconds=seconds)
        for name, took in (found.get("seconds") or {}).items():
            self.parts[name] = self.parts.get(name, 0.0) + float(took)
        return found

    def _stay(self, seconds: float) -> None:
        """Raises Worse where it does not stay ready so long."""
        with self._part("watched"):
            found = self._ask("watch", seconds=seconds)
        if not found["ok"]:
            raise Worse(f"after its start it {found['why']}")

    def _probe(self) -> Json:
        limits = self.roll.settings.acceptance
        order = {
            "instance": self.name,
            "port": self.target.port,
            "model": self.target.model,
            "task": self.target.task,
            "tools": self.target.tools,
            "probes": limits.probes,
            "answer_tokens": limits.answer_tokens,
            "seconds": limits.probe_seconds,
        }
        with self._part("probes"):
            return self.hosts.ask(self.host, "acceptance", order)

    def _counts(self) -> tuple[int, int]:
        """(answered, failed) by all gateways."""
        answered = failed = 0
        for gateway in self.roll.gateways:
            order = {"action": "counts", "instances": [self.target.id]}
            try:
                found = self.hosts.ask(gateway, "gateways", order)
            except Failed as error:
                self.hosts.say(f"{self.target.id}: its errors are not counted there: {error}")
                continue
            answered += int(found["answered"])
            failed += int(found["failed"])
        return answered, failed

    def _start_seconds(self) -> int:
        return min(self.target.start_seconds, self.roll.settings.healthy_deadline_seconds)

    def _left(self) -> int:
        """Seconds until the progress deadline. Raises Worse where there are none."""
        left = self.ends - time.monotonic()
        if left <= 0:
            seconds = self.roll.settings.progress_deadline_seconds
            raise Worse(f"was not through within progress_deadline_seconds ({seconds} s)")
        return max(1, int(left))

    def _tell_parts(self, figures: Json) -> None:
        """The parts of its start, against those of the good version."""
        if told := started(self.good.get("figures") or {}, figures):
            self.hosts.say(f"{self.target.id}: started: {told}")


def started(old: Json, new: Json) -> str:
    """Seconds of a start by part, old -> new; empty where nothing was measured."""
    before, after = (one.get("seconds") or {} for one in (old, new))
    inside = ", ".join(
        _both(part, before, after, part) for part in PARTS if before.get(part) or after.get(part)
    )
    told = []
    if "load_seconds" in new:
        load = _both("load", old, new, "load_seconds")
        told.append(f"{load} (of it {inside})" if inside else load)
    if "warm_seconds" in new:
        told.append(_both("warm-up", old, new, "warm_seconds"))
    return ", ".join(told)


def _both(name: str, old: Json, new: Json, key: str) -> str:
    before, after = (f"{float(one[key]):.0f} s" if key in one else "-" for one in (old, new))
    return f"{name} {before} -> {after}"


class _SpanMove(_Move):
    """All ranks of a span from one version to another: stopped on all hosts, started on all.

    Rank 0 stands for the span: its gateways, probes and good versions are looked at. What is
    written on a host is written for each rank on its own, and what waits for the span to be ready
    runs on all hosts side by side.
    """

    def __init__(self, roll: Roll, targets: Sequence[Target], step: Step, hold: int) -> None:
        super().__init__(roll, targets[0], step, hold)
        self.targets = targets
        self.worst = targets[0]
        self.goods: dict[str, list[Json]] = {}  # versions to go back to, by rank

    def _ask(self, action: str, **order: Any) -> Json:
        """Asked of every rank; the answer of rank 0, or of the first that is not well."""
        if action == "journal":
            return self.roll._switch(self.host, self.name, action, **order)

        def ask(target: Target) -> Json:
            host, name = target.standing.host, target.standing.name
            return self.roll._switch(host, name, action, **self._own(target, order))

        found = _each(ask, self.targets)
        bad = [
            (target, one)
            for target, one in zip(self.targets, found, strict=True)
            if one.get("ok") is False
        ]
        if bad:
            target, answer = next((b for b in bad if not b[1].get("waits")), bad[0])
            self.worst = target
            return {**answer, "why": f"{target.id}: {answer['why']}"}
        if action == "begin":
            self.goods = {
                target.id: one.get("goods") or []
                for target, one in zip(self.targets, found, strict=True)
            }
        return found[0]

    def _own(self, target: Target, order: Mapping[str, Any]) -> Json:
        """An order with the versions of one rank: rank 0's are named in it."""
        own = dict(order)
        if isinstance(own.get("to"), dict):
            own["to"] = {"release": target.to.release, "checksum": target.to.checksum}
        elif isinstance(own.get("to"), str):
            own["to"] = self._checksum(target, own["to"])
        if isinstance(own.get("refused"), dict):
            first, one = self.target.standing, target.standing
            pairs = ((first.runs, one.runs), (first.cut_off, one.cut_off))
            same = (b for a, b in pairs if a and b and a.checksum == own["refused"]["checksum"])
            own["refused"] = {**own["refused"], "checksum": next(same, target.to).checksum}
        return own

    def _checksum(self, target: Target, checksum: str) -> str:
        """What a version of rank 0 is on another rank: the wanted one, or that of its release."""
        if checksum == self.target.to.checksum:
            return target.to.checksum
        release = self.good.get("release")
        goods = [
            [good["checksum"] for good in self.goods.get(one.id, ()) if good["release"] == release]
            for one in (self.target, target)
        ]
        # Remembered together, so the same place on each.
        place = goods[0].index(checksum) if checksum in goods[0] else 0
        if place >= len(goods[1]):
            raise Failed(f"{target.id}: remembers no version of {release} to go back to")
        return str(goods[1][place])

    def _save_log(self) -> tuple[str, str]:
        """Of the rank that did not go well."""
        self.host, self.name = self.worst.standing.host, self.worst.standing.name
        try:
            return super()._save_log()
        finally:
            self.host, self.name = self.target.standing.host, self.target.standing.name


class _Spare(_Move):
    """The spare of an instance: made, tried, and let in before the instance itself changes."""

    def __init__(self, roll: Roll, target: Target, step: Step) -> None:
        super().__init__(roll, target, step, 0)
        self.of = target

    def run(self) -> tuple[Result, str]:
        """What became of it, and why; "done": it serves."""
        assert self.roll.spares is not None, "its step is a spare's"
        try:
            old = None if self.roll.back else self._probe()
            self.target = self.roll.spares.put(self.of.standing)
            self.host, self.name = self.target.standing.host, self.target.standing.name
            self._known()
            self._out()
            self.hosts.say(f"{self.target.id}: starting {self.of.to} on spare cards")
            self._started(old)
            self._in()
        except Worse as error:
            return self._refused_early(str(error))
        except (Failed, _NotIn) as error:
            return "failed", f"its spare: {error}"
        return "done", ""

    def _known(self) -> None:
        """Gateways read their new files. Raises Failed."""
        for gateway in self.roll.gateways:
            deadline = time.monotonic() + UNDRAIN_SECONDS
            order = {"action": "status"}
            while self.target.id not in self.hosts.ask(gateway, "gateways", order)["instances"]:
                if time.monotonic() >= deadline:
                    raise Failed(f"{gateway}: its gateway does not know {self.target.id}")
                time.sleep(ROOM_POLL_SECONDS)

    def _started(self, old: Json | None) -> None:
        """Raises Worse where it does not start, does not stay ready, or is worse."""
        self.since = time.time()
        seconds = min(self._start_seconds(), self._left())
        order = {"action": "resume", "instance": self.name, "seconds": seconds}
        order["pool"] = self.of.standing.pool
        found = self.hosts.ask(self.host, "care", order)
        if not found["ok"]:
            self.since = float(found.get("since") or self.since)
            raise Worse(found["why"])
        self._stay(self.roll.settings.minimum_healthy_seconds)
        if old is None:
            return
        limits, new = self.roll.settings.acceptance, self._probe()
        findings = acceptance.judge(old, new, limits)
        if acceptance.too_slow(findings):
            new = acceptance.better(new, self._probe())
            findings = acceptance.judge(old, new, limits)
        for one in findings:
            self.hosts.say(f"{self.target.id}: {one}")
        if why := acceptance.refused(findings):
            raise Worse(why)

    def _refused_early(self, why: str) -> tuple[Result, str]:
        """The new version is not as good; the old one has served all the while."""
        self.hosts.say(f"{self.target.id}: {why}")
        saved, cause = self._save_log()
        why += f": {cause}" if cause else ""
        why += f" (log: {saved})" if saved else ""
        if not self.roll.back:
            runs, to = self.of.standing.runs, self.of.to
            by_release = runs is not None and runs.release != to.release
            order = {"action": "refuse", "instance": self.of.standing.name}
            order |= {"run": self.roll.lock.holder.run}
            try:
                self.hosts.ask(
                    self.host,
                    "switch",
                    {**order, "refused": _refused(to, why, by_release=by_release)},
                )
            except Failed as error:
                return "failed", f"{why}; and that could not be written down: {error}"
        return "returned", why


class _NotIn(Exception):
    """It serves, but a gateway does not know."""


def _refused(version: Version, why: str, *, by_release: bool) -> Json:
    """A refused version as records have it."""
    return {
        "release": version.release,
        "checksum": version.checksum,
        "why": why,
        "by_release": by_release,
    }


def _each(do: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """What it gives for each of them, all side by side."""
    if len(items) <= 1:
        return [do(item) for item in items]
    with ThreadPoolExecutor(max_workers=len(items)) as pool:
        return list(pool.map(do, items))


def run_hook(program: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """(exit code, output) of a program of the operator's."""
    try:
        done = subprocess.run(
            [os.path.abspath(program)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        return 126, str(error)
    return done.returncode, done.stdout
