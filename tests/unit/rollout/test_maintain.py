"""Hosts out of service and back, over a fleet in memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.rollout.fake_fleet import PROBE, FakeFleet, Instance
from vllm_fleet.rollout import maintain
from vllm_fleet.rollout.hosts import Failed
from vllm_fleet.rollout.lock import Holder, Lock
from vllm_fleet.rollout.maintain import Care, Do, Member
from vllm_fleet.rollout.policy import Version
from vllm_fleet.spec.model import Rollout as Settings

RUNS = Version("0.31", "1" * 64)
WHO = (("g1", "a", "glm"), ("g2", "a", "glm"), ("g3", "a", "glm"), ("g2", "q", "qwen"))
EVEN = (*WHO, ("g3", "q", "qwen"))


def fleet(*who: tuple[str, str, str], **kwargs: Any) -> FakeFleet:
    return FakeFleet(*(Instance(h, n, p, RUNS) for h, n, p in who or EVEN), **kwargs)


def care(hosts: FakeFleet, do: Do, *names: str, why: str = "", **settings: Any) -> bool:
    """One run of maintain.py for these hosts."""
    members = {
        host: [
            Member(host, one.name, one.pool, 8001, "chat", False, 60, 30)
            for one in hosts.instances.values()
            if one.host == host
        ]
        for host in names
    }
    with Lock(hosts, "gw", Holder("maintain.py", who="ann"), beat_seconds=3600) as lock:
        gateways, chosen = list(hosts.drained), Settings(**settings)
        return Care(hosts, gateways, chosen, lock, members, why, lambda _: None).run(do)


def serves(hosts: FakeFleet) -> bool:
    return all(one.ready for one in hosts.instances.values()) and not any(hosts.drained.values())


def test_hosts_are_rebooted_one_after_another_and_no_pool_misses_more_than_one() -> None:
    hosts = fleet(gateways=("gw", "gw2"))
    assert care(hosts, "reboot", "g1", "g2", "g3")
    assert hosts.boots == {"g1": 1, "g2": 1, "g3": 1}
    assert serves(hosts)
    assert hosts.most_out == {"glm": 1, "qwen": 1}
    mine = [f"{h} {a}" for h, a, _ in hosts.log if h != "gw" or a not in ("lock", "release")]
    assert [one for one in mine[: mine.index("g1 audit")] if not one.endswith("boot")] == [
        "gw status",
        "gw2 status",
        "gw drain",
        "gw2 drain",
        "g1 acceptance",
        "g1 halt",
        "g1 unhold",
        "g1 resume",
        "g1 watch",
        "g1 acceptance",
        "gw undrain",
        "gw2 undrain",
    ]
    assert "g2: serves again after 0 s" in hosts.said
    lines = [line for host, line in hosts.audit if host == "gw"]
    assert [(one["host"], one["what"], one["result"]) for one in lines] == [
        (host, "maintain.py reboot", "done") for host in ("g1", "g2", "g3")
    ]


def test_a_host_that_a_pool_cannot_do_without_is_left_alone() -> None:
    hosts = fleet(*WHO)
    assert not care(hosts, "reboot", "g2")
    assert "nobody else serves pool qwen" in "".join(hosts.said)
    assert serves(hosts)
    assert hosts.did("halt", "drain") == []
    assert care(hosts, "reboot", "g2", allow_downtime=True)
    assert serves(hosts)


def test_a_pool_that_misses_one_already_keeps_the_others() -> None:
    hosts = fleet()
    hosts.drained["gw"].add("g1/a")
    assert not care(hosts, "hold", "g2", "g3")
    told = "\n".join(hosts.said)
    assert "pool glm would miss 2 of 3, and no more than 1 may be out" in told
    assert "out already: g1/a" in told
    assert "not begun, and as they were: g3" in told
    assert hosts.did("halt") == []
    # The very host that is out already may go.
    assert care(hosts, "hold", "g1")


def test_a_held_host_stays_out_until_it_is_returned() -> None:
    hosts = fleet()
    assert care(hosts, "hold", "g1", why="memory of card 3")
    assert hosts.held["g1"]["who"] == "ann"
    assert hosts.held["g1"]["why"] == "memory of card 3"
    assert not hosts.instances["g1/a"].ready
    assert hosts.drained["gw"] == {"g1/a"}
    assert care(hosts, "hold", "g1")  # said again, nothing else happens
    assert care(hosts, "return", "g1")
    assert hosts.held == {}
    assert serves(hosts)


def test_a_drain_by_hand_stays() -> None:
    hosts = fleet()
    hosts.drained["gw"].add("g1/a")
    assert care(hosts, "reboot", "g1")
    assert hosts.drained["gw"] == {"g1/a"}
    assert hosts.instances["g1/a"].ready


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        ({**PROBE, "tokens_per_second": 20.0}, "3.0 times slower"),
        ({**PROBE, "failures": [{"name": "tools", "why": "answered 500"}]}, "answered 500"),
    ],
)
def test_what_comes_back_worse_stays_out_of_its_pool(probe: dict[str, Any], why: str) -> None:
    hosts = fleet()

    def spoil(host: str, action: str, name: str) -> None:
        if action == "reboot":
            hosts.probes["0.31"] = probe

    hosts.before = spoil
    assert not care(hosts, "reboot", "g1", "g2")
    assert hosts.drained["gw"] == {"g1/a"}
    told = "\n".join(hosts.said)
    assert why in told
    assert "maintain.py --data do=return" in told
    assert "not begun, and as they were: g2" in told
    assert hosts.boots == {"g1": 1}
    hosts.probes.clear()
    assert care(hosts, "return", "g1")
    assert serves(hosts)


def test_a_host_that_does_not_come_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintain, "REBOOT_SECONDS", 0.0)
    hosts = fleet()
    assert not care(hosts, "reboot", "g1", "g2")
    assert "g1: not back within 0 s (g1: connection lost)" in "\n".join(hosts.said)
    assert hosts.drained["gw"] == {"g1/a"}
    hosts = fleet()
    hosts.stays_up = True
    assert not care(hosts, "reboot", "g1")
    assert "(it has not gone down)" in "\n".join(hosts.said)


def test_a_change_that_was_cut_off_comes_first() -> None:
    hosts = fleet()
    hosts.instances["g1/a"].step = {"to": {}}
    assert not care(hosts, "reboot", "g1")
    assert "a change of its version was cut off" in "\n".join(hosts.said)
    assert hosts.boots == {}
    assert serves(hosts)


def test_a_lost_gateway_stops_it_before_anything_is_stopped() -> None:
    hosts = fleet(gateways=("gw", "gw2"))

    def lose(host: str, action: str, name: str) -> None:
        if (host, action) == ("gw2", "drain"):
            raise Failed("gw2: connection lost")

    hosts.before = lose
    assert not care(hosts, "reboot", "g1")
    assert hosts.did("halt") == []
    # What the other gateway was told is taken back.
    assert serves(hosts)
    assert "g1: nothing was changed: gw2: connection lost" in hosts.said
