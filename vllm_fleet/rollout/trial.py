"""Several configurations of one instance tried one after another, and the first one put back.

Free of pyinfra, like the rollout, and by the same scripts: out of the pool at every gateway, then
for each configuration stop, files, start and warm-up as in a rollout, measured, and at the end
what served before, through the same gates. A run that is killed leaves the record of a change
under way, which the next upgrade.py or deploy.py brings to what group_vars want.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_fleet.rollout.hosts import CAUSE, JOURNAL, LINE, Failed, Hosts, Json
from vllm_fleet.rollout.lock import Lock, recorded
from vllm_fleet.rollout.policy import allowed_out
from vllm_fleet.spec.model import Rollout as Settings

JOURNAL_LINES = 400
UNDRAIN_SECONDS = 60
HOURS_OUT = 4 * 3600  # until when those who watch take it for planned


class Untouched(Exception):
    """Why nothing was begun; what serves was not stopped."""


@dataclass(frozen=True)
class Candidate:
    """A configuration by its name, as the instance would be started with it."""

    name: str
    version: Json  # as for a rollout: release, checksum, files
    port: int


@dataclass(frozen=True)
class Tried:
    """What became of a configuration; ``why`` is empty where it was measured."""

    name: str
    why: str = ""


@dataclass
class Trial:
    """The candidates of one instance, measured."""

    hosts: Hosts
    gateways: Sequence[str]
    settings: Settings
    lock: Lock
    host: str
    name: str
    pool: str
    start_seconds: int
    drain_seconds: int
    candidates: Sequence[Candidate]
    # Why it could not be measured, empty where it was; told what its start was measured with.
    measure: Callable[[Candidate, Json], str]
    explain: Callable[[str, list[str]], list[str]] = lambda where, lines: []
    tried: list[Tried] = field(default_factory=list)
    drained_before: set[str] = field(default_factory=set)  # gateways where it was out already

    @property
    def id(self) -> str:
        """``host/name``."""
        return f"{self.host}/{self.name}"

    def run(self) -> bool:
        """All of it; False where it was not begun, or what served before is not back."""
        try:
            good = self._begin()
        except (Failed, Untouched) as error:
            self.hosts.say(f"{self.id}: nothing was changed: {error}")
            self._record("failed", str(error))
            return False
        try:
            for candidate in self.candidates:
                self.lock.check()
                self._try(candidate)
        except BaseException as error:
            self.hosts.say(f"{self.id}: {error or type(error).__name__}")
            self._put_back(good)
            raise
        return self._put_back(good)

    # --- out

    def _begin(self) -> Json:
        """Out of its pool, with what serves remembered. Raises before anything is stopped."""
        for gateway in self.gateways:
            self._room(gateway)
        self._switch("stage", pool=self.pool, next=self.candidates[0].version)
        begun = self._switch(
            "begin",
            run=self.lock.holder.run,
            pool=self.pool,
            seconds=HOURS_OUT,
            drained=bool(self.drained_before),
            back=False,
            to={key: self.candidates[0].version[key] for key in ("release", "checksum")},
        )
        now = begun["now"]
        good = next(
            (one for one in begun.get("goods") or () if one["checksum"] == now["checksum"]), None
        )
        if good is None or not (now["active"] and now["ready"]):
            self._switch("settle", run=self.lock.holder.run)
            raise Untouched(
                "it is not ready, or its files are not those that it runs with, so that there is "
                "nothing to put back: run deploy.py first"
            )
        for gateway in self.gateways:
            order = {"action": "drain", "instances": [self.id], "seconds": self.drain_seconds}
            try:
                found = self.hosts.ask(gateway, "gateways", order)
            except Failed:
                self._let_in()
                self._switch("settle", run=self.lock.holder.run)
                raise
            if found.get("in_flight"):
                self.hosts.say(
                    f"{self.id}: {found['in_flight']} requests still run after drain_seconds"
                )
        return dict(good)

    def _room(self, gateway: str) -> None:
        """Whether its pool can do without it for hours. Raises Untouched."""
        known = self.hosts.ask(gateway, "gateways", {"action": "status"})["instances"]
        if self.id not in known:
            raise Untouched(f"{gateway} does not know {self.id}: run deploy.py first")
        members = {name: one for name, one in known.items() if one["pool"] == self.pool}
        out = {
            name
            for name, one in members.items()
            if name != self.id and (one["draining"] or not one["ready"])
        }
        if len(members) - len(out) - 1 < 1:
            others = f" ({', '.join(sorted(out))} are out)" if out else ""
            raise Untouched(
                f"it is the last ready instance of pool {self.pool}{others}: a trial takes it "
                "away for as long as it lasts"
            )
        if len(out) + 1 > allowed_out(self.settings.most_out, len(members)):
            raise Untouched(
                f"pool {self.pool} would miss {len(out) + 1} of {len(members)} "
                f"(rollout.most_out); out already: {', '.join(sorted(out))}"
            )
        if known[self.id]["draining"]:
            self.drained_before.add(gateway)

    # --- each

    def _try(self, candidate: Candidate) -> None:
        """Start it with a configuration and measure. What does not start is told, and left."""
        self.hosts.say(f"{self.id}: {candidate.name}")
        began = time.time()
        try:
            self._switch("stage", pool=self.pool, next=candidate.version)
            checksum = candidate.version["checksum"]
            found = self._switch("switch", to=checksum, seconds=self.start_seconds)
        except Failed as error:
            found = {"ok": False, "why": str(error)}
        if not found["ok"]:
            why = f"{found['why']}{self._cause(float(found.get('since') or began))}"
            self.hosts.say(f"{self.id}: {candidate.name}: not measured: {why}")
            self.tried.append(Tried(candidate.name, why))
            return
        why = self.measure(candidate, dict(found.get("figures") or {}))
        if why:
            self.hosts.say(f"{self.id}: {candidate.name}: not measured: {why}")
        self.tried.append(Tried(candidate.name, why))

    def _cause(self, since: float) -> str:
        """What its log says of a start that failed."""
        try:
            found = self._switch("journal", since=since, lines=JOURNAL_LINES)
        except Failed:
            return ""
        lines = [f"{JOURNAL}{self.name} | {line}" for line in found.get("lines") or ()]
        told = self.explain(self.host, [*lines, f"failed {self.name} | its log says"])
        causes = [
            line[len(mark) :] for mark in (LINE, CAUSE) for line in told if line.startswith(mark)
        ]
        return f": {causes[0]}" if causes else ""

    # --- and back

    def _put_back(self, good: Mapping[str, Any]) -> bool:
        """What served before, ready and in its pool; False where it is not, with why told."""
        again = "run upgrade.py, which brings it to what group_vars want"
        try:
            found = self._switch("switch", to=good["checksum"], seconds=self.start_seconds)
            if found["ok"]:
                found = self._switch("watch", seconds=self.settings.minimum_healthy_seconds)
            if not found["ok"]:
                raise Failed(f"{good['release']} does not come back: {found['why']}")
            self._let_in(told=True)
            self._switch("settle", run=self.lock.holder.run)
        except Failed as error:
            self.hosts.say(f"{self.id}: {error}: it is out of its pool; {again}")
            self._record("stuck", str(error))
            return False
        self.hosts.say(f"{self.id}: serves as before")
        self._record("done", "; ".join(f"{one.name}: {one.why or 'ok'}" for one in self.tried))
        return True

    def _let_in(self, *, told: bool = False) -> None:
        """Into its pool where it was before. Raises Failed where ``told``, else says so."""
        for gateway in self.gateways:
            if gateway in self.drained_before:
                continue
            order = {
                "action": "undrain",
                "instances": [self.id],
                "seconds": UNDRAIN_SECONDS if told else 0,
            }
            try:
                found = self.hosts.ask(gateway, "gateways", order)
            except Failed as error:
                if told:
                    raise
                self.hosts.say(f"{self.id}: not let in again there: {error}")
                continue
            if told and not found.get("ready"):
                raise Failed(f"{gateway}: its gateway does not find {self.id} ready")

    def _switch(self, action: str, **order: Any) -> Json:
        return self.hosts.ask(
            self.host, "switch", {"action": action, "instance": self.name, **order}
        )

    def _record(self, result: str, why: str) -> None:
        holder = self.lock.holder
        line = {
            "run": holder.run,
            "who": holder.who,
            "where": holder.where,
            "what": holder.what,
            "host": self.host,
            "instance": self.name,
            "pool": self.pool,
            "result": result,
            "why": why,
        }
        recorded(self.hosts, [self.host, *self.gateways, self.lock.host], [line], {})
