"""A span in a rollout: all its ranks at once, from one version to another and back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.rollout.fake_fleet import FakeFleet, Instance
from vllm_fleet.rollout import roll as rolling
from vllm_fleet.rollout.hosts import Json
from vllm_fleet.rollout.lock import Holder, Lock
from vllm_fleet.rollout.policy import Standing, Version, plan_rollout
from vllm_fleet.rollout.roll import Roll, Target
from vllm_fleet.rollout.state import together
from vllm_fleet.spec.model import Rollout as Settings

RANKS = ("g1/big-r0", "g2/big-r1")


def version(release: str, name: str) -> Version:
    """Of one rank: every rank has files, and so a checksum, of its own."""
    return Version(release, f"{release}-{name}")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "ROOM_SECONDS", 0.0)


class SpanFleet(FakeFleet):
    """Two ranks that are ready together or not at all, and one instance of the same pool."""

    def __init__(self) -> None:
        super().__init__(
            Instance("g1", "big-r0", "glm", version("0.31", "big-r0")),
            Instance("g2", "big-r1", "glm", version("0.31", "big-r1")),
            Instance("g3", "a", "glm", version("0.31", "a")),
        )
        self.meeting = threading.Barrier(2, timeout=10)

    def gateways_status(self, host: str, order: Json) -> Json:
        found = super().gateways_status(host, order)
        del found["instances"]["g2/big-r1"]  # rank 0 stands for the span
        return found

    def switch_switch(self, host: str, order: Json) -> Json:
        if not order["instance"].startswith("big"):
            return super().switch_switch(host, order)
        one = self._one(host, order)
        assert "g1/big-r0" in self.drained["gw"] or not one.ready, "stopped while it served"
        known = [v for v in [one.next, *one.goods] if v and v["checksum"] == order["to"]]
        one.ready, one.runs = False, None
        one.starts.append(known[0]["release"])
        if known[0]["release"] in self.no_start:
            cause = host == "g2"  # the other one only waits for it
            return {
                "ok": False,
                "why": "failed to start" if cause else "waits for its span",
                "waits": not cause,
            }
        one.ready, one.runs = True, Version(known[0]["release"], known[0]["checksum"])
        return {"ok": True, "figures": {}}

    def ask(self, host: str, script: str, order: Mapping[str, Any]) -> Json:
        if order.get("action") == "switch" and str(order["instance"]).startswith("big"):
            self.meeting.wait()  # asked one after the other, no rank would ever be ready
        return super().ask(host, script, order)

    def standings(self, wanted: Version) -> list[Standing]:
        return [
            replace(
                one,
                wanted=version(wanted.release, one.name),
                span="big" if one.name.startswith("big") else "",
                rank=int(one.name[-1]) if one.name.startswith("big") else 0,
            )
            for one in super().standings(wanted)
        ]


def upgrade(hosts: SpanFleet, release: str) -> bool:
    settings = Settings(canaries=0)
    rollout = plan_rollout(hosts.standings(Version(release, "")), settings, 900)
    targets = {
        one.id: Target(
            standing=one,
            version=dict(vars(one.wanted)),
            to=one.wanted,
            port=8001,
            model=one.pool,
            task="chat",
            tools=False,
            start_seconds=60,
            drain_seconds=30,
            command={"release": release, "late": True, "files": []},
        )
        for step in rollout.steps
        for one in step.members
    }
    lock = Lock(hosts, "gw", Holder("upgrade", who="ann"), beat_seconds=3600)
    roll = Roll(hosts, list(hosts.drained), settings, lock, targets)
    with lock:
        roll.stage(rollout)
        return roll.run(rollout)


def releases(hosts: SpanFleet) -> dict[str, str]:
    return {name: one.runs.release if one.runs else "" for name, one in hosts.instances.items()}


def test_every_rank_goes_at_once_and_is_accepted_by_itself() -> None:
    hosts = SpanFleet()
    assert upgrade(hosts, "0.32")
    assert set(releases(hosts).values()) == {"0.32"}
    for name in RANKS:
        one = hosts.instances[name]
        assert one.step is None
        assert one.goods[0]["checksum"] == version("0.32", one.name).checksum
        assert one.starts == ["0.32"]
    assert hosts.drained["gw"] == set()
    drains = [who for _, action, who in hosts.log if action == "drain"]
    assert drains == ["g1/big-r0", "g3/a"]  # the gateway knows rank 0 alone


def test_a_span_that_does_not_start_goes_back_whole() -> None:
    hosts = SpanFleet()
    hosts.no_start = {"0.32"}
    assert not upgrade(hosts, "0.32")
    assert set(releases(hosts).values()) == {"0.31"}
    for name in RANKS:
        one = hosts.instances[name]
        assert one.step is None
        assert one.starts == ["0.32", "0.31"]
        assert one.refused[0]["checksum"] == version("0.32", one.name).checksum
    assert hosts.drained["gw"] == set()
    # The rank that is the cause is named, not the one that waited for it, and its log is read.
    assert any("g2/big-r1: failed to start" in one for one in hosts.said)
    assert list(hosts.saved) == ["g2-big-r1.log"]


def test_a_lost_host_of_a_span_leaves_its_pool_served_by_others() -> None:
    hosts = SpanFleet()
    hosts.before = lambda host, action, name: (
        hosts.lost.add("g2") if action == "switch" and name == "big-r1" else None
    )
    assert not upgrade(hosts, "0.32")
    assert hosts.instances["g3/a"].ready
    assert releases(hosts)["g3/a"] == "0.31"  # not begun
    assert "g1/big-r0" in hosts.drained["gw"]  # nobody is sent to half a span


def test_ranks_are_left_alone_where_one_takes_no_part() -> None:
    hosts = SpanFleet()
    found = together(hosts.standings(Version("0.32", "")), {"g1/big-r0", "g3/a"})
    assert [one.id for one in found if not one.as_wanted] == ["g3/a"]


def test_rank_0_stands_for_a_span_wherever_its_host_is_declared() -> None:
    hosts = SpanFleet()
    found = list(reversed(hosts.standings(Version("0.32", ""))))
    step = next(s for s in plan_rollout(found, Settings(canaries=0), 900).steps if s.members[1:])
    assert [one.id for one in step.members] == [*RANKS]
