"""A fleet in memory that keeps the contract of our scripts: for the order of steps and failures.

The scripts themselves are tested against real files (test_switch) and a real port
(test_gateways). Time does not pass here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_fleet.rollout.hosts import Failed
from vllm_fleet.rollout.policy import Standing, Version

Json = dict[str, Any]
PROBE: Json = {
    "asked": 3,
    "failures": [],
    "first_token_seconds": 0.1,
    "tokens_per_second": 60.0,
    "answers": 3,
    "ended": 3,
    "reasoning": False,
}


class Killed(BaseException):
    """The operator's process is gone."""


@dataclass
class Instance:
    """One instance on its host, its record included."""

    host: str
    name: str
    pool: str
    runs: Version | None
    ready: bool = True
    goods: list[Json] = field(default_factory=list)
    refused: list[Json] = field(default_factory=list)
    next: Json | None = None
    step: Json | None = None
    starts: list[str] = field(default_factory=list)  # releases

    @property
    def id(self) -> str:
        return f"{self.host}/{self.name}"


class FakeFleet:
    """Hosts, gateways and what happens to them."""

    def __init__(self, *instances: Instance, gateways: Sequence[str] = ("gw",)) -> None:
        self.instances = {one.id: one for one in instances}
        self.drained = {gateway: set[str]() for gateway in gateways}
        self.holder: Json | None = None
        self.log: list[tuple[str, str, str]] = []  # host, script action, instance
        self.said: list[str] = []
        self.saved: dict[str, Sequence[str]] = {}
        self.audit: list[tuple[str, Json]] = []
        self.lost: set[str] = set()
        # By release: how it behaves.
        self.no_start: set[str] = set()
        self.probes: dict[str, Json] = {}
        self.figures: dict[str, Json] = {}
        self.crashes: dict[str, int] = {}  # watches that go well before it dies
        self.errors: dict[str, int] = {}  # requests of 100 that fail
        self.before: Callable[[str, str, str], None] = lambda host, action, name: None
        self.most_out: dict[str, int] = {}
        self.foreign: set[str] = set()  # ports that a vLLM which is not ours holds
        self.held: dict[str, Json] = {}
        self.boots: dict[str, int] = {}
        self.gone: dict[str, int] = {}  # by host: questions for its boot that get no answer
        self.stays_up = False  # whether a reboot that was asked for does not come
        self._guard = threading.RLock()

    def say(self, text: str) -> None:
        self.said.append(text)

    def save(self, name: str, lines: Sequence[str]) -> str:
        self.saved[name] = lines
        return f"logs/{name}"

    def ask(self, host: str, script: str, order: Mapping[str, Any]) -> Json:
        action = str(order.get("action", script))
        name = str(order.get("instance") or " ".join(order.get("instances") or ()))
        self.before(host, action, name)
        if host in self.lost:
            raise Failed(f"{host}: connection lost")
        with self._guard:
            self.log.append((host, action, name))
            found: Json = getattr(self, f"{script}_{action}")(host, dict(order))
            self._count()
            return found

    def _count(self) -> None:
        for pool in {one.pool for one in self.instances.values()}:
            members = [one for one in self.instances.values() if one.pool == pool]
            out = [
                one
                for one in members
                if not one.ready or any(one.id in drained for drained in self.drained.values())
            ]
            self.most_out[pool] = max(self.most_out.get(pool, 0), len(out))

    def did(self, *actions: str) -> list[str]:
        """``action instance`` of what was asked, in order."""
        return [f"{action} {name}" for _, action, name in self.log if action in actions]

    # --- ledger

    def ledger_lock(self, host: str, order: Json) -> Json:
        if self.holder and self.holder["run"] != order["holder"]["run"]:
            return {"taken": False, "holder": {**self.holder, "silent": 5.0, "stale": False}}
        self.holder = order["holder"]
        return {"taken": True}

    def ledger_beat(self, host: str, order: Json) -> Json:
        return {"held": bool(self.holder and self.holder["run"] == order["run"])}

    def ledger_release(self, host: str, order: Json) -> Json:
        self.holder = None
        return {"released": True}

    def ledger_audit(self, host: str, order: Json) -> Json:
        self.audit += [(host, line) for line in order["lines"]]
        return {}

    # --- gateways

    def gateways_status(self, host: str, order: Json) -> Json:
        return {
            "instances": {
                one.id: {
                    "pool": one.pool,
                    "ready": one.ready,
                    "draining": one.id in self.drained[host],
                    "in_flight": 0,
                }
                for one in self.instances.values()
            }
        }

    def gateways_drain(self, host: str, order: Json) -> Json:
        self.drained[host] |= set(order["instances"])
        return {"in_flight": 0, "seconds": 0.1}

    def gateways_undrain(self, host: str, order: Json) -> Json:
        self.drained[host] -= set(order["instances"])
        return {"ready": all(self.instances[one].ready for one in order["instances"])}

    def gateways_counts(self, host: str, order: Json) -> Json:
        one = self.instances[order["instances"][0]]
        asked = sum(action == "counts" for _, action, _ in self.log)
        bad = self.errors.get(one.runs.release if one.runs else "", 0)
        return {"answered": 100 * asked, "failed": bad * asked}

    # --- one instance

    def _now(self, one: Instance) -> Json:
        return {
            "active": one.runs is not None,
            "ready": one.ready,
            "checksum": one.runs.checksum if one.runs else "",
        }

    def _one(self, host: str, order: Json) -> Instance:
        return self.instances[f"{host}/{order['instance']}"]

    def switch_stage(self, host: str, order: Json) -> Json:
        self._one(host, order).next = order["next"]
        return {}

    def switch_begin(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        if one.step is None:
            if (
                one.runs
                and one.ready
                and (not one.goods or one.goods[0]["checksum"] != one.runs.checksum)
            ):
                good = {**vars(one.runs), "figures": self.figures.get(one.runs.release, {})}
                one.goods.insert(0, good)
            served = one.runs is not None and one.ready
            old = dict(vars(one.runs)) if one.runs else {}
            one.step = {
                "drained": order["drained"],
                "served": served,
                "from": old,
                "to": order["to"],
                "back": order["back"],
            }
        return {
            "now": self._now(one),
            "step": dict(one.step),
            "goods": [dict(g) for g in one.goods],
        }

    def switch_measured(self, host: str, order: Json) -> Json:
        self._one(host, order).goods[0]["probe"] = order["probe"]
        return {}

    def switch_switch(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        for drained in self.drained.values():
            assert one.id in drained or not one.ready, "stopped while it served"
        known = [v for v in [one.next, *one.goods] if v and v["checksum"] == order["to"]]
        to = Version(known[0]["release"], known[0]["checksum"])
        if one.runs == to and one.ready:
            return {"ok": True, "figures": self.figures.get(to.release, {})}
        assert one.id not in self.foreign, "started on a port that is held"
        one.ready, one.runs = False, None
        self._count()
        self.before(host, "stopped", one.name)
        one.starts.append(to.release)
        if to.release in self.no_start:
            return {"ok": False, "why": "failed to start (exit-code, 2 tries)", "since": 5.0}
        one.ready, one.runs = True, to
        return {"ok": True, "figures": self.figures.get(to.release, {})}

    def switch_watch(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        assert one.runs is not None
        left = self.crashes.get(one.runs.release)
        if left is not None:
            self.crashes[one.runs.release] = left - 1
            if left <= 0:
                return {"ok": False, "why": "ended and was started again by systemd"}
        return {"ok": one.ready, "why": "is not ready any more (failed)"}

    def switch_accept(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        assert one.next is not None
        assert one.runs is not None
        assert one.next["checksum"] == one.runs.checksum
        good = {**one.next, "run": order["run"], "probe": order["probe"]}
        one.goods = [good, *(g for g in one.goods if g["checksum"] != good["checksum"])]
        one.next = one.step = None
        return {}

    def switch_settle(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        assert one.runs is None or any(g["checksum"] == one.runs.checksum for g in one.goods)
        one.goods.sort(key=lambda g: not one.runs or g["checksum"] != one.runs.checksum)
        one.next = one.step = None
        return {}

    def switch_refuse(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        one.refused.append(order["refused"])
        if one.step is not None:
            one.step["back"] = True
        return {}

    def switch_journal(self, host: str, order: Json) -> Json:
        return {"lines": ["engine: it broke"]}

    def adopt_adopt(self, host: str, order: Json) -> Json:
        self._one(host, order)
        self.foreign.discard(f"{host}/{order['instance']}")
        return {"adopted": [7]}

    def acceptance_acceptance(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        assert one.ready
        return self.probes.get(one.runs.release if one.runs else "", PROBE)

    def rehearse_rehearse(self, host: str, order: Json) -> Json:
        return {
            "ok": order["release"] not in self.no_start or "late" in order,
            "why": "no such option",
        }

    # --- maintenance of a host

    def care_halt(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        if one.step is not None:
            raise Failed(f"{host}: a change of its version was cut off")
        for drained in self.drained.values():
            assert one.id in drained or not one.ready, "stopped while it served"
        served, one.ready = one.ready, False
        return {"served": served}

    def care_resume(self, host: str, order: Json) -> Json:
        one = self._one(host, order)
        assert one.runs is not None
        if one.runs.release in self.no_start:
            return {"ok": False, "why": "failed to start (exit-code, 2 tries)"}
        one.ready = True
        one.starts.append(one.runs.release)
        return {"ok": True, "probe": PROBE, "good_figures": {}, "figures": {}}

    def care_hold(self, host: str, order: Json) -> Json:
        self.held[host] = order["held"]
        return {}

    def care_unhold(self, host: str, order: Json) -> Json:
        self.held.pop(host, None)
        return {}

    def care_reboot(self, host: str, order: Json) -> Json:
        assert all(not one.ready for one in self.instances.values() if one.host == host)
        if not self.stays_up:
            self.boots[host] = self.boots.get(host, 0) + 1
            self.gone[host] = 3
        return {}

    def care_boot(self, host: str, order: Json) -> Json:
        if self.gone.get(host):
            self.gone[host] -= 1
            raise Failed(f"{host}: connection lost")
        return {"boot": str(self.boots.get(host, 0))}

    # --- for the policy

    def standings(self, wanted: Version) -> list[Standing]:
        """As a new run finds them: what one instance refused is refused for its pool."""
        refused = {
            one.pool: bad["why"]
            for one in self.instances.values()
            for bad in one.refused
            if bad["release"] == wanted.release
        }
        return [
            Standing(
                host=one.host,
                name=one.name,
                pool=one.pool,
                wanted=wanted,
                runs=one.runs,
                serving=one.ready and one.runs is not None,
                start_seconds=10.0,
                refused=refused.get(one.pool, ""),
                cut_off=Version(**one.step["to"]) if one.step else None,
            )
            for one in self.instances.values()
        ]
