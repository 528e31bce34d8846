"""Configurations of one instance tried over a fleet in memory, and what served put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.rollout.fake_fleet import FakeFleet, Instance, Killed
from vllm_fleet.rollout.lock import Holder, Lock
from vllm_fleet.rollout.policy import Version
from vllm_fleet.rollout.trial import Candidate, Trial
from vllm_fleet.spec.model import Rollout as Settings

RUNS = Version("0.32", "1" * 64)
FAST, SLOW = Version("0.32", "f" * 64), Version("0.32+s", "5" * 64)


def fleet(*names: str, **kwargs: Any) -> FakeFleet:
    hosts = names or ("g1", "g2", "g3")
    return FakeFleet(*(Instance(host, "a", "glm", RUNS) for host in hosts), **kwargs)


def candidate(name: str, version: Version) -> Candidate:
    return Candidate(name, {**vars(version), "files": []}, 8001)


def trial(
    hosts: FakeFleet,
    measure: Callable[[Candidate, Any], str] = lambda one, figures: "",
    host: str = "g1",
    **settings: Any,
) -> tuple[bool, Trial]:
    with Lock(hosts, "gw", Holder("bench.py", who="ann"), beat_seconds=3600) as lock:
        one = Trial(
            hosts=hosts,
            gateways=list(hosts.drained),
            settings=Settings(**settings),
            lock=lock,
            host=host,
            name="a",
            pool="glm",
            start_seconds=60,
            drain_seconds=30,
            candidates=[candidate("fast", FAST), candidate("slow", SLOW)],
            measure=measure,
        )
        return one.run(), one


def as_before(hosts: FakeFleet) -> bool:
    """Whether every instance serves what it served, is in its pool, and no change is under way."""
    return all(
        one.ready and one.runs == RUNS and one.step is None for one in hosts.instances.values()
    ) and not any(hosts.drained.values())


def test_each_configuration_is_measured_while_it_runs_alone_and_out_of_the_pool() -> None:
    hosts = fleet(gateways=("gw", "gw2"))
    seen = []

    def measure(one: Candidate, figures: Any) -> str:
        runs = hosts.instances["g1/a"].runs
        assert runs is not None
        assert all("g1/a" in drained for drained in hosts.drained.values())
        seen.append((one.name, runs.checksum))
        return ""

    good, found = trial(hosts, measure)
    assert good
    assert seen == [("fast", FAST.checksum), ("slow", SLOW.checksum)]
    assert [(one.name, one.why) for one in found.tried] == [("fast", ""), ("slow", "")]
    assert as_before(hosts)
    assert hosts.most_out == {"glm": 1}
    assert "g1/a: serves as before" in hosts.said
    lines = dict(hosts.audit)
    assert set(lines) == {"g1", "gw", "gw2"}
    assert (lines["gw"]["what"], lines["gw"]["result"]) == ("bench.py", "done")


def test_one_that_does_not_start_is_told_and_the_others_are_measured() -> None:
    hosts = fleet()
    hosts.no_start.add(SLOW.release)
    good, found = trial(hosts)
    assert good
    assert found.tried[0].why == ""
    assert "failed to start" in found.tried[1].why
    assert as_before(hosts)


def test_one_that_cannot_be_measured_is_told() -> None:
    hosts = fleet()
    good, found = trial(hosts, lambda one, figures: "no answer" if one.name == "fast" else "")
    assert good
    assert [one.why for one in found.tried] == ["no answer", ""]
    assert as_before(hosts)


@pytest.mark.parametrize("allow", [False, True])
def test_the_last_ready_instance_of_a_pool_is_left_alone(allow: bool) -> None:
    alone = fleet("g1")
    good, _ = trial(alone, allow_downtime=allow)
    assert not good
    assert "it is the last ready instance of pool glm" in "".join(alone.said)
    others_out = fleet("g1", "g2")
    others_out.instances["g2/a"].ready = False
    good, _ = trial(others_out)
    assert not good
    assert "(g2/a are out)" in "".join(others_out.said)
    for hosts in (alone, others_out):
        assert hosts.did("drain", "switch", "stage", "begin") == []


def test_no_more_than_the_pool_bears_are_out() -> None:
    hosts = fleet("g1", "g2", "g3", "g4")
    hosts.drained["gw"].add("g2/a")
    good, _ = trial(hosts)
    assert not good
    assert "pool glm would miss 2 of 4 (rollout.most_out)" in "".join(hosts.said)
    assert hosts.did("drain", "switch") == []


def test_what_does_not_serve_is_not_begun_with() -> None:
    hosts = fleet()
    hosts.instances["g1/a"].ready = False
    hosts.instances["g1/a"].goods = [{**vars(RUNS)}]
    good, _ = trial(hosts)
    assert not good
    assert "nothing to put back: run deploy.py first" in "".join(hosts.said)
    assert hosts.did("drain", "switch") == []
    assert hosts.instances["g1/a"].step is None


def test_an_instance_that_was_drained_by_hand_stays_so() -> None:
    hosts = fleet()
    hosts.drained["gw"].add("g1/a")
    good, _ = trial(hosts)
    assert good
    assert hosts.drained["gw"] == {"g1/a"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed, ValueError])
def test_whatever_ends_it_what_served_is_put_back(error: type[BaseException]) -> None:
    hosts = fleet()

    def measure(one: Candidate, figures: Any) -> str:
        raise error

    with pytest.raises(error):
        trial(hosts, measure)
    assert as_before(hosts)


def test_a_lost_gateway_stops_it_before_anything_is_stopped() -> None:
    hosts = fleet(gateways=("gw", "gw2"))

    def before(host: str, action: str, name: str) -> None:
        if action == "drain" and host == "gw2":
            hosts.lost.add("gw2")

    hosts.before = before
    good, _ = trial(hosts)
    assert not good
    assert hosts.did("switch") == []
    assert hosts.drained["gw"] == set()
    assert hosts.instances["g1/a"].step is None


def test_what_does_not_come_back_is_told_with_what_to_do() -> None:
    hosts = fleet()
    hosts.before = lambda host, action, name: (
        hosts.no_start.add(RUNS.release) if action == "stopped" else None
    )
    good, _ = trial(hosts)
    assert not good
    told = "".join(hosts.said)
    assert "g1/a: 0.32 does not come back" in told
    assert "it is out of its pool; run upgrade.py" in told
    assert "g1/a" in hosts.drained["gw"]
