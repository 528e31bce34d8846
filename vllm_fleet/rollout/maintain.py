"""Hosts out of service one after another: drained, then rebooted or held; and back again.

Free of pyinfra, like the rollout. Nothing of a host is stopped unless every pool that it serves
can do without it, and nothing gets requests again that does not answer as it did before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm_fleet.rollout import acceptance
from vllm_fleet.rollout.hosts import Failed, Hosts, Json
from vllm_fleet.rollout.lock import Lock, recorded
from vllm_fleet.rollout.policy import allowed_out
from vllm_fleet.spec.model import Rollout as Settings

Do = Literal["reboot", "hold", "return"]
DO: tuple[Do, ...] = ("reboot", "hold", "return")

REBOOT_SECONDS = 1800.0  # servers with eight cards count their memory for a long time
REBOOT_POLL_SECONDS = 2.0
UNDRAIN_SECONDS = 60


class _Untouched(Exception):
    """Why a host was not taken out of service; nothing of it was stopped."""


@dataclass(frozen=True)
class Member:
    """One instance of a host."""

    host: str
    name: str
    pool: str
    port: int
    task: str
    tools: bool
    start_seconds: int
    drain_seconds: int
    at: str = ""  # of a rank of a span the id of its rank 0, which answers for it

    @property
    def id(self) -> str:
        """``host/name``, as gateways know the server that it is, or is a part of."""
        return self.at or f"{self.host}/{self.name}"


@dataclass
class Care:
    """Maintenance of some hosts, one after another."""

    hosts: Hosts
    gateways: Sequence[str]
    settings: Settings
    lock: Lock
    members: Mapping[str, Sequence[Member]]  # by host, in the order in which they go
    why: str = ""  # the operator's own words
    sleep: Callable[[float], None] = time.sleep
    drained_before: set[str] = field(default_factory=set)  # by hand: they stay so
    before: dict[str, Json] = field(default_factory=dict)  # what the probe found, by instance
    taken_out: set[str] = field(default_factory=set)  # of the host whose turn it is

    def run(self, do: Do) -> bool:
        """Every host in turn; False where one failed, and later ones were not begun."""
        rest = [*self.members]
        while rest:
            host = rest.pop(0)
            began = time.monotonic()
            try:
                self.lock.check()
                if do != "return":
                    self._out(host, measured=do == "reboot")
                if do == "hold":
                    self._hold(host)
                elif do == "reboot":
                    self._reboot(host)
                if do != "hold":
                    self._back(host)
            except _Untouched as error:
                self._record(host, do, "failed", str(error))
                self.hosts.say(f"{host}: nothing was changed: {error}")
                self._let_in(host)
                self._tell(rest)
                return False
            except Exception as error:  # ours too: the rest is told, the lock given back
                self._record(host, do, "stuck", str(error))
                self.hosts.say(f"{host}: {error}")
                self._tell(rest)
                return False
            self._record(host, do, "done", "")
            done = {"hold": "is held", "reboot": "serves again", "return": "serves again"}[do]
            self.hosts.say(f"{host}: {done} after {time.monotonic() - began:.0f} s")
        return True

    def _tell(self, rest: Sequence[str]) -> None:
        if rest:
            self.hosts.say(f"not begun, and as they were: {', '.join(rest)}")

    # --- out

    def _out(self, host: str, *, measured: bool) -> None:
        """Out of every pool, nothing in flight, stopped. Raises _Untouched before any stop."""
        members = self.members[host]
        self.taken_out = set()
        try:
            known = self._drained(host, members)
            for one in members if measured else ():
                if known.get(one.id, {}).get("ready"):
                    self.before[one.id] = self._probe(one)
        except Failed as error:
            raise _Untouched(str(error)) from None
        for number, one in enumerate(members):
            seconds = one.drain_seconds + REBOOT_SECONDS + one.start_seconds
            order = {
                "action": "halt",
                "instance": one.name,
                "pool": one.pool,
                "seconds": seconds,  # until when it may be away, for those who watch
            }
            try:
                self.hosts.ask(host, "care", order)
            except Failed as error:
                raise (Failed if number else _Untouched)(str(error)) from None

    def _drained(self, host: str, members: Sequence[Member]) -> Mapping[str, Json]:
        """Out of every pool, nothing in flight; as gateways knew them before. Raises Failed."""
        known: Mapping[str, Json] = {}
        for gateway in self.gateways:
            known = self.hosts.ask(gateway, "gateways", {"action": "status"})["instances"]
            self._room(gateway, members, known)
            self.drained_before |= {
                one.id for one in members if known.get(one.id, {}).get("draining")
            }
        self.hosts.say(f"{host}: out of service: {', '.join(one.name for one in members)}")
        self.taken_out = {one.id for one in members}
        if members:
            for gateway in self.gateways:
                found = self.hosts.ask(
                    gateway,
                    "gateways",
                    {
                        "action": "drain",
                        "instances": [one.id for one in members],
                        "seconds": max(one.drain_seconds for one in members),
                    },
                )
                if found.get("in_flight"):
                    self.hosts.say(
                        f"{host}: {found['in_flight']} requests still run after drain_seconds"
                    )
        return known

    def _let_in(self, host: str) -> None:
        """What was taken out, and not stopped, back where it was. A lost gateway is told."""
        mine = sorted(self.taken_out - self.drained_before)
        for gateway in self.gateways if mine else ():
            order = {"action": "undrain", "instances": mine, "seconds": 0}
            try:
                self.hosts.ask(gateway, "gateways", order)
            except Failed as error:
                self.hosts.say(f"{host}: not let in again there: {error}: undrain it by hand")

    def _room(self, gateway: str, members: Sequence[Member], known: Mapping[str, Json]) -> None:
        """Whether every pool can do without this host. Raises Failed."""
        missing = [one.id for one in members if one.id not in known]
        if missing:
            raise Failed(f"{gateway} does not know {', '.join(missing)}: run deploy.py first")
        mine = {one.id for one in members}
        for pool in dict.fromkeys(one.pool for one in members):
            there = {name: one for name, one in known.items() if one["pool"] == pool}
            out = {name for name, one in there.items() if one["draining"] or not one["ready"]}
            leaves = {name for name in there if name in mine} - out
            allowed = allowed_out(self.settings.most_out, len(there))
            stays = len(there) - len(out | leaves)
            if not leaves or self.settings.allow_downtime:
                continue
            if stays < 1:
                raise Failed(
                    f"nobody else serves pool {pool}: have an instance of it "
                    "on another host, or accept the gap with rollout.allow_downtime"
                )
            if len(out | leaves) > allowed:
                others = sorted(out - mine)
                raise Failed(
                    f"pool {pool} would miss {len(out | leaves)} of "
                    f"{len(there)}, and no more than {allowed} may be out (rollout.most_out)"
                    + (f"; out already: {', '.join(others)}" if others else "")
                )

    def _hold(self, host: str) -> None:
        holder = self.lock.holder
        held = {"who": holder.who, "where": holder.where, "run": holder.run, "why": self.why}
        self.hosts.ask(host, "care", {"action": "hold", "held": held})

    # --- and back

    def _reboot(self, host: str) -> None:
        """Another boot, and a host that answers. Raises Failed."""
        before = self.hosts.ask(host, "care", {"action": "boot"})["boot"]
        self.hosts.ask(host, "care", {"action": "reboot"})
        self.hosts.say(f"{host}: reboots")
        deadline = time.monotonic() + REBOOT_SECONDS
        while True:
            self.sleep(REBOOT_POLL_SECONDS)
            try:
                now = self.hosts.ask(host, "care", {"action": "boot"})["boot"]
            except Failed as error:
                now, why = before, str(error)
            else:
                why = "it has not gone down"
            if now != before:
                self.hosts.say(f"{host}: is back")
                return
            if time.monotonic() >= deadline:
                raise Failed(
                    f"not back within {REBOOT_SECONDS:.0f} s ({why}); its instances are out of "
                    "their pools until `maintain.py --data do=return`"
                )

    def _back(self, host: str) -> None:
        """Every instance started, warm, as good as it was, and in its pools. Raises Failed."""
        self.hosts.ask(host, "care", {"action": "unhold"})
        for one in self.members[host]:
            self._started(one)
            if one.id in self.drained_before:
                self.hosts.say(f"{one.id}: was drained by hand before, and stays so")
                continue
            for gateway in self.gateways:
                order = {
                    "action": "undrain",
                    "instances": [one.id],
                    "seconds": UNDRAIN_SECONDS,
                }
                if not self.hosts.ask(gateway, "gateways", order).get("ready"):
                    raise Failed(f"{gateway}: its gateway does not find {one.id} ready")

    def _started(self, one: Member) -> None:
        """Raises Failed where it does not start, does not stay ready, or is worse than before."""
        again = "it is out of its pool; mend it, then `maintain.py --data do=return`"
        order = {"action": "resume", "instance": one.name, "seconds": one.start_seconds}
        found = self.hosts.ask(one.host, "care", order)
        if not found["ok"]:
            raise Failed(f"{one.id}: {found['why']}: {again}")
        order = {
            "action": "watch",
            "instance": one.name,
            "seconds": self.settings.minimum_healthy_seconds,
        }
        watched = self.hosts.ask(one.host, "switch", order)
        if not watched["ok"]:
            raise Failed(f"{one.id}: {watched['why']}: {again}")
        limits = self.settings.acceptance
        old, new = self.before.get(one.id) or found.get("probe"), self._probe(one)
        findings = acceptance.judge(old, new, limits)
        if acceptance.too_slow(findings):
            new = acceptance.better(new, self._probe(one))
            findings = acceptance.judge(old, new, limits)
        findings += acceptance.judge_memory(
            found.get("good_figures"), found.get("figures") or {}, limits
        )
        for finding in findings:
            self.hosts.say(f"{one.id}: {finding}")
        if why := acceptance.refused(findings):
            raise Failed(f"{one.id}: {why}: {again}")

    def _probe(self, one: Member) -> Json:
        limits = self.settings.acceptance
        host, _, name = one.id.rpartition("/")
        order = {
            "instance": name,
            "port": one.port,
            "model": one.pool,
            "task": one.task,
            "tools": one.tools,
            "probes": limits.probes,
            "answer_tokens": limits.answer_tokens,
            "seconds": limits.probe_seconds,
        }
        return self.hosts.ask(host, "acceptance", order)

    def _record(self, host: str, do: Do, result: str, why: str) -> None:
        holder = self.lock.holder
        line = {
            "run": holder.run,
            "who": holder.who,
            "where": holder.where,
            "what": f"{holder.what} {do}",
            "host": host,
            "result": result,
            "why": why or self.why,
        }
        recorded(self.hosts, [host, *self.gateways, self.lock.host], [line], {})
