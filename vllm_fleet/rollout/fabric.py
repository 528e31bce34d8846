"""Another environment for models that span hosts: staged on all, tried by all, kept or not.

Free of pyinfra, like the rollout. What serves reads nothing of it until every host has kept it,
and every host goes back where one could not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from vllm_fleet.fabric.discovery import Layer
from vllm_fleet.fabric.trial import (
    SHARED_MBYTE,
    SHARED_MIB,
    Member,
    Place,
    link_findings,
    rank_findings,
)
from vllm_fleet.rollout.hosts import Failed, Hosts, Json
from vllm_fleet.rollout.lock import Lock, Locked, recorded

SCRIPT = "fabric"
PORTS_SECONDS = 10
RANK = resources.files("vllm_fleet.onhost").joinpath("allreduce.py")


class Bad(Exception):
    """What the test found; one line for each."""


@dataclass(frozen=True)
class Wanted:
    """What a host is to have, and where it stands in the test."""

    name: str
    text: str | None  # of the file; None: it takes no part any more
    environment: Mapping[str, str] = field(default_factory=dict)
    member: Member | None = None
    place: Place = field(default_factory=lambda: Place((), False))
    python: str = ""  # of the release whose torch is tried


@dataclass(frozen=True)
class Trial:
    """How the test is made, the same for all hosts."""

    port: int
    backend: str  # nccl, gloo
    layer: Layer | None
    floor: float | None
    test_mib: int
    seconds: int


@dataclass
class Change:
    """One change of all hosts together."""

    hosts: Hosts
    lock: Lock
    wanted: Sequence[Wanted]
    trial: Trial
    clock: Callable[[], float] = time.monotonic
    figures: dict[str, Any] = field(default_factory=dict)

    def run(self) -> bool:
        """All of it; False where every host is as it was before."""
        began = self.clock()
        try:
            self._stage()
            self._test()
            self.lock.check()
            self._all("keep", {w.name: {} for w in self.wanted})
        except (Bad, Failed, Locked) as error:
            self._back(str(error))
            self.hosts.say(f"the environment was not kept, after {self.clock() - began:.0f} s")
            return False
        except BaseException:
            self._back("the run was broken off")
            raise
        names = [w.name for w in self.wanted if w.member]
        tested = {"hosts": names, "at": int(time.time()), **self.figures}
        try:
            self._all("done", {w.name: {"tested": tested} for w in self.wanted})
        except Failed as error:
            self.hosts.say(f"kept everywhere, and not written down there: {error}: run it again")
            return False
        self._record("done", "")
        self.hosts.say(f"kept on {len(self.wanted)} hosts after {self.clock() - began:.0f} s")
        return True

    # --- steps

    def _stage(self) -> None:
        answers = self._all("stage", {w.name: {"text": w.text} for w in self.wanted})
        for name, answer in answers.items():
            if answer.get("cut_off"):
                self.hosts.say(f"{name}: run {answer['cut_off']} was cut off here: begun anew")

    def _test(self) -> None:
        """Raises Bad with everything that one step found; later steps are not begun then."""
        members = [w.member for w in self.wanted if w.member]
        if not members:
            return
        began = self.clock()
        with ThreadPoolExecutor(max_workers=2) as pool:
            paths, ports = pool.map(
                lambda step: self._all(*step),
                [
                    ("path", {me.name: self._path_order(me) for me in members}),
                    ("ports", {me.name: self._ports_order(me) for me in members}),
                ],
            )
        complaints, notices = link_findings(members, paths, ports)
        self._told(notices, complaints)
        self.hosts.say(f"links, MTU and ports: good, {self.clock() - began:.1f} s")
        self.lock.check()
        began = self.clock()
        shared = sorted(w.name for w in self.wanted if w.place.shared)
        if shared:
            self.hosts.say(
                f"cards of {', '.join(shared)} serve: a small message, and not more than "
                f"{SHARED_MBYTE} MB/s; bandwidth is not judged"
            )
        found, first = self._ranks()
        complaints, notices, self.figures = rank_findings(
            found,
            first=first,
            layer=self.trial.layer,
            floor=None if shared else self.trial.floor,
            seconds=self.trial.seconds,
        )
        self._told(notices, complaints)
        figures = self.figures
        transports = ", ".join(f"{n} x {t}" for t, n in figures["transports"].items())
        self.hosts.say(
            f"all-reduce of {figures['ranks']} ranks by {figures['backend']}: right sums, "
            f"{figures['busbw_gbyte']} GB/s bus bandwidth, point to point "
            f"{figures['point_to_point_gbyte']} GB/s"
            + (f"; {transports}" if transports else "")
            + f"; {self.clock() - began:.1f} s"
        )

    def _path_order(self, me: Member) -> Json:
        return {"interface": me.interface, "mtu": me.mtu, "peers": self._peers(me)}

    def _ports_order(self, me: Member) -> Json:
        return {
            "name": me.name,
            "address": me.address,
            "port": self.trial.port,
            "peers": self._peers(me),
            "seconds": PORTS_SECONDS,
        }

    def _peers(self, me: Member) -> list[Json]:
        return [
            {"name": w.name, "address": w.member.address, "mtu": w.member.mtu}
            for w in self.wanted
            if w.member and w.name != me.name
        ]

    def _told(self, notices: Sequence[str], complaints: Sequence[str]) -> None:
        for notice in notices:
            self.hosts.say(notice)
        if complaints:
            raise Bad("\n".join(dict.fromkeys(complaints)))

    def _ranks(self) -> tuple[dict[str, Json | str], str]:
        """What the ranks of every host said, a text where one was lost; and who failed first.

        The first one that fails ends all others: they would wait for it until their time is over.
        """
        orders = self._rank_orders()
        found: dict[str, Json | str] = {}
        first = ""
        with ThreadPoolExecutor(max_workers=2 * len(orders)) as pool:
            jobs = {pool.submit(self._ask, name, "rank", one): name for name, one in orders.items()}
            for job in as_completed(jobs):
                name = jobs[job]
                try:
                    found[name] = job.result()
                except Failed as error:
                    found[name] = _without(name, str(error))
                if not first and _failed(found[name]):
                    first = name
                    for other in orders:
                        if other not in found:
                            pool.submit(self._end, other)
        return {name: found[name] for name in orders}, first

    def _rank_orders(self) -> dict[str, Json]:
        testing = [w for w in self.wanted if w.member]
        each = max(1, len(testing[0].place.cards))
        shared = any(w.place.shared for w in testing)
        mib = min(self.trial.test_mib, SHARED_MIB) if shared else self.trial.test_mib
        assert testing[0].member is not None
        address = testing[0].member.address
        master = f"[{address}]" if ":" in address else address
        source = RANK.read_text(encoding="utf-8")
        orders: dict[str, Json] = {}
        for number, one in enumerate(testing):
            environment = dict(one.environment)
            if one.place.cards:
                environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, one.place.cards))
            ranks = [
                {
                    "rank": number * each + local,
                    "environment": environment,
                    "arguments": [
                        *("--rank", str(number * each + local)),
                        *("--world", str(len(testing) * each), "--local-rank", str(local)),
                        *("--master", f"{master}:{self.trial.port}"),
                        *("--backend", self.trial.backend, "--bytes", str(mib * 2**20)),
                        *("--seconds", str(self.trial.seconds)),
                        *(("--limit-mbyte", str(SHARED_MBYTE), "--rounds", "4") if shared else ()),
                    ],
                }
                for local in range(each)
            ]
            orders[one.name] = {
                "ranks": ranks,
                "python": one.python,
                "source": source,
                "seconds": self.trial.seconds,
            }
        return orders

    # --- hosts

    def _ask(self, host: str, action: str, order: Mapping[str, Any]) -> Json:
        run = self.lock.holder.run
        return self.hosts.ask(host, SCRIPT, {"action": action, "run": run, **order})

    def _end(self, host: str) -> None:
        try:
            self._ask(host, "end", {})
        except Failed as error:
            self.hosts.say(f"{error}: its ranks end by themselves after {self.trial.seconds} s")

    def _each(
        self, action: str, orders: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Json | Failed]:
        """What every host answered, all side by side."""

        def ask(name: str) -> Json | Failed:
            try:
                return self._ask(name, action, orders[name])
            except Failed as error:
                return error

        with ThreadPoolExecutor(max_workers=max(1, len(orders))) as pool:
            answers = list(pool.map(ask, orders))
        return dict(zip(orders, answers, strict=True))

    def _all(self, action: str, orders: Mapping[str, Mapping[str, Any]]) -> dict[str, Json]:
        """The same. Raises Failed, naming every host that could not."""
        found = self._each(action, orders)
        if lost := [str(one) for one in found.values() if isinstance(one, Failed)]:
            raise Failed("\n".join(lost))
        return {name: one for name, one in found.items() if not isinstance(one, Failed)}

    def _back(self, why: str) -> None:
        """Every host as it was; who could not be told is named, and told by the next run."""
        for line in why.splitlines():
            self.hosts.say(line)
        found = self._each("back", {w.name: {} for w in self.wanted})
        for name, one in found.items():
            if isinstance(one, Failed):
                self.hosts.say(
                    f"{name}: not put back ({one}): what serves there goes on; run nccl.py again "
                    "when it is reached"
                )
            elif one.get("changed"):
                self.hosts.say(f"{name}: put back")
        self._record("failed", why)

    def _record(self, result: str, why: str) -> None:
        holder = self.lock.holder
        line: dict[str, Any] = {
            "run": holder.run,
            "who": holder.who,
            "where": holder.where,
            "what": holder.what,
            "hosts": [w.name for w in self.wanted],
            "result": result,
            "why": why,
            **{k: self.figures[k] for k in ("busbw_gbyte", "transports") if k in self.figures},
        }
        recorded(self.hosts, [*(w.name for w in self.wanted), self.lock.host], [line], {})


def _without(name: str, text: str) -> str:
    return text.removeprefix(f"{name}: ")


def _failed(found: Json | str) -> bool:
    return isinstance(found, str) or any(r["result"] is None for r in found["ranks"])
