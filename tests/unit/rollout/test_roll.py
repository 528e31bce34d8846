"""The rollout over a fleet in memory: order, gates, the way back, kills and losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import state
from tests.unit.rollout.fake_fleet import PROBE, FakeFleet, Instance, Killed
from vllm_fleet.rollout import roll as rolling
from vllm_fleet.rollout.hosts import Failed
from vllm_fleet.rollout.lock import Holder, Lock, Locked
from vllm_fleet.rollout.policy import Rollout, Standing, Version, plan_rollout
from vllm_fleet.rollout.roll import Roll, Target
from vllm_fleet.rollout.state import goes_back, record_of
from vllm_fleet.spec.model import Rollout as Settings

OLD, NEW = Version("0.31", "1" * 64), Version("0.32", "2" * 64)
FIVE = (("g1", "a", "glm"), ("g2", "a", "glm"), ("g3", "a", "glm"), ("g1", "q", "qwen"))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "ROOM_SECONDS", 0.0)


def fleet(*who: tuple[str, str, str], **kwargs: Any) -> FakeFleet:
    return FakeFleet(*(Instance(h, n, p, OLD) for h, n, p in who or FIVE), **kwargs)


def begin(hosts: FakeFleet, wanted: Version = NEW, **settings: Any) -> tuple[Roll, Rollout, Lock]:
    chosen = Settings(**{"canary_hold_seconds": 20, **settings})
    rollout = plan_rollout(hosts.standings(wanted), chosen, 900)
    assert not rollout.refusals
    version = {"release": wanted.release, "checksum": wanted.checksum}
    targets = {
        one.id: Target(
            standing=one,
            version=version,
            to=wanted,
            port=8001,
            model=one.pool,
            task="chat",
            tools=False,
            start_seconds=60,
            drain_seconds=30,
            command={"release": wanted.release, "late": True},
        )
        for step in rollout.steps
        for one in step.members
    }
    lock = Lock(hosts, "gw", Holder("upgrade", who="ann"), beat_seconds=3600)
    return Roll(hosts, list(hosts.drained), chosen, lock, targets), rollout, lock


def upgrade(hosts: FakeFleet, wanted: Version = NEW, **settings: Any) -> bool:
    """One run of upgrade.py."""
    roll, rollout, lock = begin(hosts, wanted, **settings)
    with lock:
        roll.stage(rollout)
        return roll.run(rollout)


def releases(hosts: FakeFleet) -> list[str]:
    return [one.runs.release if one.runs else "-" for one in hosts.instances.values()]


def settled(hosts: FakeFleet) -> None:
    """Nothing is left half done, and everybody gets requests."""
    assert all(not drained for drained in hosts.drained.values())
    assert all(one.step is None for one in hosts.instances.values())
    assert all(one.ready for one in hosts.instances.values())
    assert hosts.holder is None


def test_an_upgrade_in_order_through_every_gate() -> None:
    hosts = fleet(gateways=("gw", "gw2"))
    assert upgrade(hosts)
    assert releases(hosts) == ["0.32"] * 4
    settled(hosts)
    assert hosts.did("switch") == ["switch a", "switch q", "switch a", "switch a"]
    assert [h for h, action, _ in hosts.log if action == "switch"] == ["g1", "g1", "g2", "g3"]
    first = [f"{h} {a}" for h, a, _ in hosts.log if a not in ("audit", "lock", "stage", "rehearse")]
    assert first[: first.index("g1 accept") + 1] == [
        "gw status",
        "gw2 status",
        "g1 begin",
        "gw drain",
        "gw2 drain",
        "g1 acceptance",
        "g1 measured",
        "g1 switch",
        "g1 watch",
        "g1 acceptance",
        "gw undrain",
        "gw2 undrain",
        "gw counts",
        "gw2 counts",
        "g1 watch",
        "gw counts",
        "gw2 counts",
        "g1 accept",
    ]
    assert hosts.most_out == {"glm": 1, "qwen": 1}
    told = "\n".join(hosts.said)
    assert "g1/a: time to first token: 100 ms -> 100 ms" in told
    assert "4 instances changed" in told


def test_the_only_one_of_a_pool_is_measured_before_its_clients_wait() -> None:
    hosts = fleet(("g1", "q", "qwen"))
    assert upgrade(hosts)
    assert hosts.did("acceptance", "drain", "switch", "undrain") == [
        "acceptance q",
        "drain g1/q",
        "switch q",
        "acceptance q",
        "undrain g1/q",
    ]
    settled(hosts)


def test_everything_is_staged_and_rehearsed_before_anything_is_touched() -> None:
    hosts = fleet()
    upgrade(hosts)
    actions = [action for _, action, _ in hosts.log]
    last = max(i for i, action in enumerate(actions) if action in ("stage", "rehearse"))
    assert last < actions.index("begin")
    assert actions.count("stage") == actions.count("rehearse") == 4


def test_options_that_the_release_refuses_stop_it_with_every_reason() -> None:
    hosts = fleet()
    hosts.no_start.add("0.32")
    roll, rollout, lock = begin(hosts)
    for target in roll.targets.values():
        del target.command["late"]
    with (
        lock,
        pytest.raises(Failed, match=r"g1/a: 0\.32 refuses .*; g1/q: .*; g2/a: .*; g3/a"),
    ):
        roll.stage(rollout)
    assert not hosts.did("begin", "drain", "switch")


def test_a_second_run_does_nothing() -> None:
    hosts = fleet()
    upgrade(hosts)
    hosts.log.clear()
    _, rollout, _ = begin(hosts)
    assert rollout == Rollout()


WORSE: dict[str, Any] = {
    "does not start": {"no_start": {"0.32"}},
    "answers 500": {
        "probes": {"0.32": {**PROBE, "failures": [{"name": "timed streams", "why": "500"}]}}
    },
    "never ends": {"probes": {"0.32": {**PROBE, "ended": 0}}},
    "three times slower": {"probes": {"0.32": {**PROBE, "tokens_per_second": 20.0}}},
    "half the KV cache": {
        "figures": {"0.31": {"kv_cache_tokens": 1000}, "0.32": {"kv_cache_tokens": 500}}
    },
    "dies before admission": {"crashes": {"0.32": 0}},
    "dies after admission": {"crashes": {"0.32": 1}},
    "fails clients": {"errors": {"0.32": 9}},
}
WORDS = {
    "does not start": "failed to start (exit-code, 2 tries)",
    "answers 500": "questions answered 3 of 3 -> 2 of 3: timed streams: 500",
    "never ends": "answers that end by themselves 3 of 3 -> 0 of 3",
    "three times slower": "tokens a second 60.0 -> 20.0: 3.0 times slower; 2 is the limit",
    "half the KV cache": "KV cache 1,000 tokens -> 500 tokens: 50% of what it was",
    "dies before admission": "after its start it ended and was started again by systemd",
    "dies after admission": "after its start it ended and was started again by systemd",
    "fails clients": "requests while watched - -> 100, 9 failed: 9.0% of them failed",
}


@pytest.mark.parametrize("how", WORSE)
def test_a_worse_version_stops_at_the_canary_and_goes_back(how: str) -> None:
    hosts = fleet()
    for name, value in WORSE[how].items():
        setattr(hosts, name, value)
    assert not upgrade(hosts)
    assert releases(hosts) == ["0.31"] * 4
    settled(hosts)
    canary, *others = hosts.instances.values()
    assert canary.starts == ["0.32", "0.31"]
    assert all(not other.starts for other in others)
    assert [bad["release"] for bad in canary.refused] == ["0.32"]
    assert canary.refused[0]["by_release"]
    assert WORDS[how] in canary.refused[0]["why"]
    told = "\n".join(hosts.said)
    assert WORDS[how] in told
    assert "not begun, and as they were: g1/q, g2/a, g3/a" in told
    assert hosts.saved == {"g1-a.log": ["engine: it broke"]}
    line = dict(hosts.audit)["gw"]
    assert (line["instance"], line["result"], line["who"]) == ("a", "returned", "ann")
    # Neither comes it back by itself, nor does its pool go on; another pool may.
    again = begin(hosts)[1]
    assert [step.label for step in again.steps] == ["g1/q"]
    assert len(again.left) == 3


def test_a_little_slower_passes() -> None:
    hosts = fleet()
    hosts.probes["0.32"] = {**PROBE, "tokens_per_second": 60 / 1.3, "first_token_seconds": 0.13}
    assert upgrade(hosts)


def test_one_busy_moment_is_not_taken_for_a_slow_version() -> None:
    hosts = fleet(("g1", "a", "glm"), ("g2", "a", "glm"))
    slow, seen = {**PROBE, "first_token_seconds": 0.9}, []

    def before(host: str, action: str, name: str) -> None:
        if action == "acceptance":
            seen.append(host)
            hosts.probes["0.32"] = slow if len(seen) == 2 else PROBE

    hosts.before = before
    assert upgrade(hosts)
    assert seen[:3] == ["g1"] * 3  # old, new, and new once more


def test_what_did_not_serve_before_says_nothing_about_the_version() -> None:
    hosts = fleet()
    broken = hosts.instances["g1/a"]
    broken.ready, broken.runs = False, None
    broken.goods = [dict(vars(OLD))]
    hosts.no_start |= {"0.32", "0.31"}
    assert not upgrade(hosts)
    assert not broken.refused
    assert hosts.audit[0][1]["result"] == "stuck"
    told = "\n".join(hosts.said)
    assert "g1/a: serves neither" in told
    assert "and 0.31 (11111111) does not come back: failed to start" in told
    assert "not begun, and as they were: g1/q, g2/a, g3/a" in told


def test_a_drain_by_hand_stays() -> None:
    hosts = fleet()
    hosts.drained["gw"].add("g2/a")
    assert not upgrade(hosts)  # of three, one is out already
    assert "out of pool glm already: g2/a" in "\n".join(hosts.said)
    assert releases(hosts) == ["0.31"] * 4
    assert upgrade(hosts, most_out=2)
    assert hosts.drained["gw"] == {"g2/a"}
    assert releases(hosts) == ["0.32"] * 4


def test_a_lost_gateway_stops_it_before_anything_is_stopped() -> None:
    hosts = fleet(gateways=("gw", "gw2"))

    def before(host: str, action: str, name: str) -> None:
        if action == "drain":
            hosts.lost.add("gw2")

    hosts.before = before
    assert not upgrade(hosts)
    assert releases(hosts) == ["0.31"] * 4
    assert not hosts.did("switch")
    assert hosts.drained["gw"] == set()


def test_a_host_that_dies_in_mid_wave_stops_it_and_is_named() -> None:
    hosts = fleet()

    def before(host: str, action: str, name: str) -> None:
        if (host, action) == ("g2", "switch"):
            hosts.lost.add("g2")
            hosts.instances["g2/a"].ready = False

    hosts.before = before
    assert not upgrade(hosts)
    assert releases(hosts) == ["0.32", "0.31", "0.31", "0.32"]
    told = "\n".join(hosts.said)
    assert "g2/a: serves neither" in told
    assert "g2: connection lost" in told
    assert "not begun, and as they were: g3/a" in told
    # It comes back; the next run ends it.
    hosts.lost.clear()
    hosts.before = lambda *_: None
    hosts.instances["g2/a"].ready = True
    assert upgrade(hosts)
    assert releases(hosts) == ["0.32"] * 4
    settled(hosts)


def test_killed_at_every_step_the_next_run_ends_it_and_each_pool_keeps_serving() -> None:
    points = 0
    for calls in range(1, 500):
        hosts = fleet()
        left = [calls]

        def before(host: str, action: str, name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        hosts.before = before
        try:
            done = upgrade(hosts)
        except Killed:
            points += 1
        else:
            assert done
            break
        assert hosts.most_out.get("glm", 0) <= 1, calls
        hosts.before = lambda *_: None
        hosts.holder = None  # by --data unlock
        assert upgrade(hosts) or begin(hosts)[1] == Rollout(), calls
        assert releases(hosts) == ["0.32"] * 4, calls
        settled(hosts)
        assert hosts.most_out.get("glm", 0) <= 1, calls
        for one in hosts.instances.values():
            assert one.starts == ["0.32"], calls
            assert [good["release"] for good in one.goods] == ["0.32", "0.31"], calls
    assert points > 60


def test_killed_on_the_way_back_the_next_run_brings_it_back() -> None:
    points = 0
    for calls in range(1, 500):
        hosts = fleet(("g1", "a", "glm"), ("g2", "a", "glm"))
        hosts.probes["0.32"] = {**PROBE, "ended": 0}
        left = [calls]

        def before(host: str, action: str, name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        hosts.before = before
        try:
            upgrade(hosts)
        except Killed:
            points += 1
        else:
            break
        hosts.before = lambda *_: None
        hosts.holder = None
        for _ in range(2):  # once to end what was cut off, once to be told of the refusal
            upgrade(hosts)
        assert releases(hosts) == ["0.31"] * 2, calls
        settled(hosts)
        assert hosts.instances["g1/a"].starts.count("0.32") == 1, calls
        assert "0.32" not in hosts.instances["g2/a"].starts, calls
    assert points > 25


def test_a_lock_that_is_taken_away_begins_nothing_further() -> None:
    hosts = fleet()
    roll, rollout, lock = begin(hosts)
    with lock:
        lock._lost = "the lock was taken away by run r2 of bob"
        with pytest.raises(Locked):
            roll.run(rollout)
    assert releases(hosts) == ["0.31"] * 4


def test_a_lock_that_is_lost_while_requests_end_stops_nothing() -> None:
    hosts = fleet()
    roll, rollout, lock = begin(hosts)

    def before(host: str, action: str, name: str) -> None:
        if action == "drain":
            lock._lost = "the lock was taken away by run r2 of bob"

    hosts.before = before
    with lock:
        assert not roll.run(rollout)
    assert not hosts.did("switch")
    settled(hosts)


def test_what_was_cut_off_is_not_let_in_by_a_run_that_cannot_go_on() -> None:
    hosts = fleet(gateways=("gw", "gw2"))

    def killed(host: str, action: str, name: str) -> None:
        if action == "watch":
            raise Killed

    def lost(host: str, action: str, name: str) -> None:
        if action == "drain":
            hosts.lost.add("gw2")

    hosts.before = killed
    with pytest.raises(Killed):
        upgrade(hosts)
    hosts.before = lost
    assert not upgrade(hosts)
    one = hosts.instances["g1/a"]
    assert one.step is not None
    assert "g1/a" in hosts.drained["gw"]  # nobody has accepted what it runs
    hosts.before = lambda *_: None
    hosts.lost.clear()
    assert upgrade(hosts)
    settled(hosts)
    assert one.starts == ["0.32"]


def test_what_is_down_and_does_not_come_up_is_not_tried_twice() -> None:
    hosts = fleet(("g1", "a", "glm"), ("g2", "a", "glm"))
    one = hosts.instances["g1/a"]
    one.ready, one.runs, one.goods = False, None, [dict(vars(NEW))]
    hosts.no_start.add("0.32")
    assert not upgrade(hosts)
    assert one.starts == ["0.32"]
    assert "no version is remembered that served here before" in "\n".join(hosts.said)


def test_a_fault_of_our_own_is_told_and_the_others_are_not_begun() -> None:
    hosts = fleet()
    found = hosts.switch_switch
    hosts.switch_switch = lambda host, order: {"odd": found(host, order)}  # type: ignore[method-assign]
    assert not upgrade(hosts)
    told = "\n".join(hosts.said)
    assert "g1/a: serves neither: KeyError: 'ok': run this again" in told
    assert "not begun, and as they were: g1/q, g2/a, g3/a" in told
    hosts.switch_switch = found  # type: ignore[method-assign]
    assert upgrade(hosts)
    settled(hosts)


def test_waves_go_side_by_side_and_a_failure_in_one_stops_the_later_ones() -> None:
    many = [(f"g{i}", "a", "glm") for i in range(1, 8)]
    hosts = fleet(*many)

    def before(host: str, action: str, name: str) -> None:
        if (host, action) == ("g3", "stopped") and not hosts.instances["g3/a"].starts:
            hosts.instances["g3/a"].starts.append("cut off")
            raise Failed("g3: disk full")

    hosts.before = before
    assert not upgrade(hosts, canaries=1, wave=3, most_out=3)
    assert releases(hosts) == ["0.32", "0.32", "0.31", "0.32", "0.31", "0.31", "0.31"]
    assert hosts.most_out["glm"] <= 3
    assert "not begun, and as they were: g5/a, g6/a, g7/a" in "\n".join(hosts.said)
    # A full disk says nothing about the version.
    assert not hosts.instances["g3/a"].refused


def hook(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def adopting(hosts: FakeFleet, **settings: Any) -> bool:
    """One run of deploy.py that is told to take over what is not ours."""
    standings = [
        replace(one, runs=None, serving=True, adopts=True) if one.id in hosts.foreign else one
        for one in hosts.standings(OLD)
    ]
    chosen = Settings(**{"canary_hold_seconds": 0, **settings})
    rollout = plan_rollout(standings, chosen, 900, releases=False)
    assert not rollout.refusals
    targets = {
        one.id: Target(one, vars(OLD), OLD, 8001, one.pool, "chat", False, 60, 30)
        for step in rollout.steps
        for one in step.members
    }
    with Lock(hosts, "gw", Holder("deploy"), beat_seconds=3600) as lock:
        roll = Roll(hosts, list(hosts.drained), chosen, lock, targets)
        roll.stage(rollout)
        return roll.run(rollout)


@pytest.mark.parametrize("foreign", [("g1/a",), ("g1/a", "g2/a")])
def test_what_is_not_ours_is_taken_over_one_after_another(foreign: tuple[str, ...]) -> None:
    hosts = fleet(("g1", "a", "glm"), ("g2", "a", "glm"))
    hosts.foreign = {*foreign}
    for name in foreign:
        hosts.instances[name].runs, hosts.instances[name].ready = None, False
    least: list[int] = []
    hosts.before = lambda host, action, name: least.append(
        serving(hosts, "glm") + len(hosts.foreign)
    )
    assert adopting(hosts)
    assert min(least) == 1  # of two somebody always answers clients
    assert not hosts.foreign
    assert hosts.did("adopt", "switch", "undrain")[:3] == ["adopt a", "switch a", "undrain g1/a"]
    assert releases(hosts) == ["0.31", "0.31"]
    settled(hosts)


def test_nothing_is_taken_over_while_nobody_else_serves() -> None:
    hosts = fleet(("g1", "a", "glm"), ("g2", "a", "glm"))
    hosts.foreign = {"g1/a"}
    hosts.instances["g1/a"].runs, hosts.instances["g1/a"].ready = None, False

    def fails(host: str, action: str, name: str) -> None:
        if action == "stage":
            hosts.instances["g2/a"].ready = False

    hosts.before = fails
    assert not adopting(hosts)
    assert "out of pool glm already: g2/a" in "\n".join(hosts.said)
    assert hosts.foreign == {"g1/a"}
    assert not hosts.did("adopt")


class FakeSpares:
    """Spares of a fleet in memory; ``goes`` is called where one is taken away."""

    def __init__(self, hosts: FakeFleet, wanted: Version) -> None:
        self.hosts, self.wanted = hosts, wanted
        self.told: list[str] = []

    def put(self, one: Standing) -> Target:
        self.told.append(f"put {one.id}")
        name = f"{one.name}.spare"
        there = Instance(one.host, name, one.pool, self.wanted, ready=False)
        self.hosts.instances[there.id] = there
        standing = Standing(one.host, name, one.pool, self.wanted)
        return Target(standing, {}, self.wanted, 8009, one.pool, "chat", False, 60, 30)

    def take(self, one: Standing) -> None:
        self.told.append(f"take {one.id}")
        self.hosts.instances.pop(f"{one.id}.spare", None)


def with_spare(hosts: FakeFleet, **settings: Any) -> tuple[bool, FakeSpares]:
    """One run of upgrade.py where the qwen's host has free cards."""
    standings = [
        replace(one, spare=(2, 3)) if one.name == "q" else one for one in hosts.standings(NEW)
    ]
    roll, _, lock = begin(hosts, **settings)
    rollout = plan_rollout(standings, roll.settings, 900)
    spares = FakeSpares(hosts, NEW)
    roll.spares = spares
    with lock:
        roll.stage(rollout)
        return roll.run(rollout), spares


def serving(hosts: FakeFleet, pool: str) -> int:
    return sum(
        one.ready and all(one.id not in drained for drained in hosts.drained.values())
        for one in hosts.instances.values()
        if one.pool == pool
    )


def test_a_spare_serves_before_the_only_one_of_a_pool_stops() -> None:
    hosts = fleet()
    least = [9]

    def watch(host: str, action: str, name: str) -> None:
        least.append(serving(hosts, "qwen"))

    hosts.before = watch
    good, spares = with_spare(hosts)
    assert good
    assert min(least) == 1  # of one: never held
    assert spares.told == ["put g1/q", "take g1/q"]
    # Out at the gateway before it is ready, in once it was tried; then the declared one.
    order = hosts.did("drain", "resume", "acceptance", "undrain", "switch")
    mine = [line for line in order if line.endswith(("q", "q.spare"))]
    assert mine == [
        "acceptance q",
        "drain g1/q.spare",
        "resume q.spare",
        "acceptance q.spare",
        "undrain g1/q.spare",
        "drain g1/q",
        "acceptance q",
        "switch q",
        "acceptance q",
        "undrain g1/q",
    ]
    assert releases(hosts) == ["0.32"] * 4
    settled(hosts)


@pytest.mark.parametrize("how", ["does not start", "three times slower", "dies before admission"])
def test_a_worse_version_is_found_on_the_spare_and_the_old_one_never_stops(how: str) -> None:
    hosts = fleet(("g1", "q", "qwen"))
    for name, value in WORSE[how].items():
        setattr(hosts, name, value)
    good, spares = with_spare(hosts)
    assert not good
    only = hosts.instances["g1/q"]
    assert only.starts == []
    assert only.ready
    assert [bad["release"] for bad in only.refused] == ["0.32"]
    assert WORDS[how] in only.refused[0]["why"]
    assert spares.told == ["put g1/q", "take g1/q"]
    assert [line["result"] for _, line in hosts.audit[:1]] == ["returned"]


def test_a_spare_stays_where_the_declared_one_comes_back_with_neither_version() -> None:
    hosts = fleet(("g1", "q", "qwen"))

    def lost(host: str, action: str, name: str) -> None:
        if action == "switch" and name == "q":
            hosts.lost.add("g1")

    hosts.before = lost
    good, spares = with_spare(hosts)
    assert not good
    assert spares.told == ["put g1/q"]
    assert hosts.instances["g1/q.spare"].ready
    assert "g1/q: its spare stays and serves: run this again" in hosts.said


def test_hooks_get_the_wave_and_may_stop_it(tmp_path: Path) -> None:
    hosts = fleet()
    out = tmp_path / "out"
    line = "$FLEET_WAVE|$FLEET_HOSTS|$FLEET_INSTANCES|$FLEET_FROM|$FLEET_TO|$FLEET_RESULT"
    program = hook(tmp_path / "hook", f'echo "{line}" >> {out}; echo hello')
    assert upgrade(hosts, before_wave=program, after_wave=program)
    assert out.read_text().splitlines()[:3] == [
        "1|g1|g1/a|0.31|0.32|",
        "1|g1|g1/a|0.31|0.32|done",
        "2|g1|g1/q|0.31|0.32|",
    ]
    assert f"{program}: hello" in hosts.said
    hosts = fleet()
    stopping = hook(tmp_path / "stop", '[ "$FLEET_WAVE" = 1 ]')
    assert not upgrade(hosts, before_wave=stopping)
    assert releases(hosts) == ["0.32", "0.31", "0.31", "0.31"]
    assert "failed (exit code 1): no further wave is begun" in "\n".join(hosts.said)
    hosts = fleet()
    assert not upgrade(hosts, before_wave=str(tmp_path / "missing"))
    assert not hosts.did("begin")


def test_a_start_that_takes_too_long_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = fleet()
    clock = [0.0]
    monkeypatch.setattr(rolling.time, "monotonic", lambda: clock[0])

    def before(host: str, action: str, name: str) -> None:
        if action == "drain":
            clock[0] += 8000

    hosts.before = before
    assert not upgrade(hosts)
    assert "progress_deadline_seconds (7200 s)" in "\n".join(hosts.said)
    assert releases(hosts) == ["0.31"] * 4


# --- rollback.py


def takes_back(hosts: FakeFleet) -> tuple[Roll, Rollout, Lock]:
    standings = hosts.standings(Version("", ""))
    records = {}
    for one in hosts.instances.values():
        kept = {"pool": one.pool, "goods": one.goods, "refused": one.refused, "step": one.step}
        records[one.id] = record_of(state(rollout={one.name: kept}), one.name)
    chosen = Settings(canaries=0, allow_downtime=True)
    back = {one.id: one for one in goes_back(standings, records)}
    rest = [replace(one, wanted=one.runs or one.wanted, cut_off=None) for one in standings]
    rollout = plan_rollout([back.get(one.id, one) for one in rest], chosen, 900)
    targets = {
        one.id: Target(one, None, one.wanted, 8001, one.pool, "chat", False, 60, 30)
        for step in rollout.steps
        for one in step.members
    }
    lock = Lock(hosts, "gw", Holder("rollback", who="ann"), beat_seconds=3600)
    return Roll(hosts, list(hosts.drained), chosen, lock, targets, back=True), rollout, lock


def roll_back(hosts: FakeFleet) -> bool:
    """One run of rollback.py."""
    roll, rollout, lock = takes_back(hosts)
    with lock:
        roll.stage(rollout)
        return roll.run(rollout)


def upgraded() -> FakeFleet:
    hosts = fleet()
    assert upgrade(hosts)
    for at, one in enumerate(hosts.instances.values()):
        one.goods[0]["at"] = 100 + at
    hosts.log.clear()
    return hosts


def test_a_rollback_brings_everything_back_with_no_probe_and_no_download() -> None:
    hosts = upgraded()
    assert roll_back(hosts)
    assert releases(hosts) == ["0.31"] * 4
    settled(hosts)
    assert hosts.most_out["glm"] == 1
    assert hosts.did("acceptance", "stage", "accept", "rehearse") == []
    assert all(one.refused[0]["why"] == "rolled back by ann" for one in hosts.instances.values())
    # Neither does a second one do anything, nor an upgrade to what was refused.
    assert takes_back(hosts)[1] == Rollout()
    assert begin(hosts)[1].waves == ()


def test_a_rollback_of_an_upgrade_that_stopped_takes_back_what_was_done() -> None:
    hosts = fleet()

    def before(host: str, action: str, name: str) -> None:
        if (host, action) == ("g2", "stopped"):
            hosts.no_start.add("0.32")

    hosts.before = before
    assert not upgrade(hosts)
    assert releases(hosts) == ["0.32", "0.31", "0.31", "0.32"]
    hosts.instances["g1/a"].goods[0]["at"] = hosts.instances["g1/q"].goods[0]["at"] = 9
    assert roll_back(hosts)
    assert releases(hosts) == ["0.31"] * 4
    assert hosts.instances["g3/a"].starts == []


def test_killed_in_a_rollback_a_second_one_ends_it() -> None:
    points = 0
    for calls in range(1, 500):
        hosts = upgraded()
        left = [calls]

        def before(host: str, action: str, name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        hosts.before = before
        try:
            roll_back(hosts)
        except Killed:
            points += 1
        else:
            break
        hosts.before = lambda *_: None
        hosts.holder = None
        assert roll_back(hosts), calls
        assert releases(hosts) == ["0.31"] * 4, calls
        settled(hosts)
        assert hosts.most_out["glm"] <= 1
    assert points > 30


def test_an_upgrade_that_was_killed_can_be_taken_back_at_every_point() -> None:
    points = 0
    for calls in range(1, 500):
        hosts = fleet()
        left = [calls]

        def before(host: str, action: str, name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        hosts.before = before
        try:
            upgrade(hosts)
        except Killed:
            points += 1
        else:
            break
        hosts.before = lambda *_: None
        hosts.holder = None
        for one in hosts.instances.values():
            if len(one.goods) > 1:
                one.goods[0]["at"] = 9
        assert roll_back(hosts) or takes_back(hosts)[1] == Rollout(), calls
        assert releases(hosts) == ["0.31"] * 4, calls
        settled(hosts)
        assert all(bad["release"] == "0.32" for i in hosts.instances.values() for bad in i.refused)
    assert points > 60


def test_a_change_that_took_several_runs_is_taken_back_whole() -> None:
    hosts = fleet()

    def before(host: str, action: str, name: str) -> None:
        if (host, action) == ("g2", "begin"):
            raise Killed

    hosts.before = before
    with pytest.raises(Killed):
        upgrade(hosts)
    hosts.before = lambda *_: None
    assert upgrade(hosts)
    runs = {one.goods[0]["run"] for one in hosts.instances.values()}
    assert len(runs) == 2
    for at, one in enumerate(hosts.instances.values()):
        one.goods[0]["at"] = 100 + at
    assert roll_back(hosts)
    assert releases(hosts) == ["0.31"] * 4


def test_other_settings_of_one_run_are_taken_back_those_of_an_older_one_are_not() -> None:
    hosts = fleet(("g1", "a", "glm"), ("g2", "a", "glm"), ("g3", "a", "glm"))
    flags = Version("0.31", "3" * 64)
    for at, one in enumerate(hosts.instances.values()):
        run = "r1" if one.host == "g1" else "r2"
        old = {**vars(OLD), "at": 1, "run": "r0"}
        one.goods = [{**vars(flags), "at": 10 + at, "run": run}, old]
        one.runs = flags
    assert roll_back(hosts)
    assert [one.runs for one in hosts.instances.values()] == [flags, OLD, OLD]
    assert [bad["by_release"] for one in hosts.instances.values() for bad in one.refused] == [
        False,
        False,
    ]


def test_a_rollback_that_does_not_start_is_said_and_stops() -> None:
    hosts = upgraded()
    hosts.no_start.add("0.31")
    assert not roll_back(hosts)
    assert releases(hosts) == ["-", "0.32", "0.32", "0.32"]
    assert "g1/a: serves neither: failed to start" in "\n".join(hosts.said)
