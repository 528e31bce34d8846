"""Who changes when: order, canaries, waves, capacity, pools of one, and what is left alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from vllm_fleet.rollout.policy import Rollout, Standing, Version, allowed_out, plan_rollout
from vllm_fleet.spec.model import Rollout as Settings

OLD, NEW = Version("0.31.0-aaa", "1" * 64), Version("0.32.0-bbb", "2" * 64)


def one(name: str, pool: str = "glm", **changes: Any) -> Standing:
    """`gpu-1/a`: it serves the old version, the new one is wanted."""
    host, _, instance = name.partition("/")
    values: dict[str, Any] = {"wanted": NEW, "runs": OLD, "serving": True, "start_seconds": 60}
    return Standing(host, instance, pool, **{**values, **changes})


def rolled(
    *standings: Standing, hold: int = 900, releases: bool = True, **settings: Any
) -> Rollout:
    return plan_rollout(standings, Settings(**settings), hold, releases=releases)


def order(rollout: Rollout) -> list[list[str]]:
    return [[step.label for step in wave.steps] for wave in rollout.waves]


FIVE = (
    one("g1/a"),
    one("g2/a"),
    one("g3/a"),
    one("g1/q", "qwen"),
    one("g2/q", "qwen"),
)


def test_canaries_of_each_pool_go_first_and_alone_then_waves_in_declared_order() -> None:
    found = rolled(*FIVE, wave=2, most_out=2)
    assert order(found) == [["g1/a"], ["g1/q"], ["g2/a", "g3/a"], ["g2/q"]]
    assert [(w.kind, w.hold_seconds) for w in found.waves] == [
        ("canary", 60),
        ("canary", 60),
        ("wave", 0),
        ("wave", 0),
    ]


def test_without_canaries_everything_is_a_wave() -> None:
    assert order(rolled(*FIVE, canaries=0)) == [[s.id] for s in FIVE]


def test_more_canaries_than_instances_is_one_by_one() -> None:
    found = rolled(*FIVE, canaries=9)
    assert [w.kind for w in found.waves] == ["canary"] * 5


@pytest.mark.parametrize(
    ("wave", "sizes"), [(1, [1] * 8), (3, [3, 3, 2]), ("50%", [4, 4]), ("10%", [1] * 8)]
)
def test_waves_by_number_or_percent(wave: int | str, sizes: list[int]) -> None:
    many = [one(f"g{i}/a") for i in range(8)]
    found = rolled(*many, canaries=0, wave=wave, most_out="100%")
    # of eight, seven may be out at once
    assert [len(w.steps) for w in found.waves] == sizes


@pytest.mark.parametrize(
    ("most", "size", "allowed"),
    [(1, 1, 1), (1, 5, 1), (3, 2, 1), ("50%", 4, 2), ("10%", 4, 1), ("100%", 4, 3), (9, 1, 1)],
)
def test_one_of_several_always_stays(most: int | str, size: int, allowed: int) -> None:
    assert allowed_out(most, size) == allowed


def test_a_wave_takes_no_more_of_a_pool_than_may_be_out() -> None:
    found = rolled(*FIVE, canaries=0, wave=5)
    assert order(found) == [["g1/a", "g1/q"], ["g2/a", "g2/q"], ["g3/a"]]


def test_capacity_holds_for_any_fleet() -> None:
    """Random fleets: order within a pool, everyone once, never more out than allowed."""
    dice = random.Random(7)
    for _ in range(300):
        fleet = []
        for pool in range(dice.randint(1, 4)):
            for i in range(dice.randint(1, 6)):
                serving = dice.random() < 0.85
                fleet.append(one(f"g{i}/p{pool}", f"p{pool}", serving=serving))
        dice.shuffle(fleet)
        settings = Settings(
            canaries=dice.randint(0, 2),
            wave=dice.choice([1, 2, 5, "30%"]),
            most_out=dice.choice([1, 2, "50%", "100%"]),
        )
        found = plan_rollout(fleet, settings, 900)
        assert not found.refusals
        assert sorted(s.label for s in found.steps) == sorted(f.id for f in fleet)
        down = {one.id for one in fleet if not one.serving}
        for wave in found.waves:
            for pool, steps in itertools.groupby(
                sorted(wave.steps, key=lambda s: s.pool), key=lambda s: s.pool
            ):
                members = {one.id for one in fleet if one.pool == pool}
                moving = list(steps)
                taken = [step for step in moving if step.serving]
                out = len(taken) + len(down & members)
                if taken:
                    assert out <= allowed_out(settings.most_out, len(members))
            down -= {step.label for step in wave.steps}


def test_what_is_as_wanted_is_not_touched() -> None:
    found = rolled(*(replace(s, runs=NEW) for s in FIVE))
    assert found == Rollout()
    assert found.lines() == []


def test_what_does_not_serve_goes_before_others_of_its_pool() -> None:
    found = rolled(one("g1/a"), one("g2/a", runs=None, serving=False), one("g3/a"))
    assert order(found) == [["g2/a"], ["g1/a"], ["g3/a"]]
    assert found.waves[0].steps[0].how == "down"


def test_a_pool_that_a_run_left_without_anybody_goes_before_all_others() -> None:
    left = one("g1/q", "qwen", runs=NEW, cut_off=NEW)
    assert order(rolled(*FIVE[:3], left)) == [["g1/q"], ["g1/a"], ["g2/a"], ["g3/a"]]


def test_a_broken_instance_that_stays_so_takes_the_room_of_its_pool() -> None:
    broken = one("g2/a", wanted=OLD, serving=False)
    found = rolled(one("g1/a"), broken, one("g3/a"))
    assert found.waves == ()
    assert "g2/a of it does not serve" in found.refusals[0]
    assert not rolled(one("g1/a"), broken, one("g3/a"), most_out=2).refusals


@pytest.mark.parametrize(
    ("changes", "hold", "how"),
    [
        ({}, 900, "held"),
        ({"start_seconds": None}, 900, "held"),
        ({"start_seconds": 900}, 900, "held"),
        ({"start_seconds": 2000, "spare": (4, 5)}, 900, "spare"),
        ({"serving": False, "start_seconds": 2000}, 900, "down"),
    ],
)
def test_the_only_one_of_a_pool(changes: dict[str, Any], hold: int, how: str) -> None:
    found = rolled(one("g1/a", **changes), hold=hold)
    assert [step.how for step in found.steps] == [how]


@pytest.mark.parametrize(("start", "hold"), [(901, 900), (1, 0), (None, 0)])
def test_the_only_one_of_a_pool_that_starts_too_slowly_needs_a_word(
    start: float | None, hold: int
) -> None:
    lonely = one("g1/a", start_seconds=start)
    refused = rolled(lonely, *(replace(s, pool="qwen") for s in FIVE[1:]), hold=hold)
    assert refused.waves == ()
    assert "g1/a: the only instance of pool glm" in refused.refusals[0]
    assert "rollout.allow_downtime" in refused.refusals[0]
    allowed = rolled(lonely, hold=hold, allow_downtime=True)
    assert [step.how for step in allowed.steps] == ["downtime"]


def test_spare_cards_are_offered_to_one_at_a_time() -> None:
    lonely = [one(f"g1/{name}", name, spare=(4, 5)) for name in ("x", "y")]
    found = rolled(*lonely, one("g2/z", "z"), canaries=0, wave=3)
    assert order(found) == [["g1/x", "g2/z"], ["g1/y"]]


def test_a_span_has_no_spare() -> None:
    span = [one(f"g{n}/big", span="big", spare=(4, 5)) for n in (1, 2)]
    assert [step.how for step in rolled(*span).steps] == ["held"]


def test_what_is_to_be_adopted_serves_until_it_is_its_turn() -> None:
    foreign = one("g1/a", runs=None, adopts=True)
    found = rolled(foreign, one("g2/a", runs=NEW), releases=False)
    assert [(step.label, step.how) for step in found.steps] == [("g1/a", "rolling")]
    assert "a vLLM that is not ours -> 0.32.0-bbb" in "\n".join(found.lines())
    # The same release does not make it ours.
    assert rolled(replace(foreign, runs=NEW), one("g2/a", runs=NEW)).steps
    alone = rolled(foreign, releases=False)
    assert "nobody else serves pool glm while ours starts in its place" in alone.refusals[0]
    allowed = rolled(foreign, releases=False, allow_downtime=True)
    assert [step.how for step in allowed.steps] == ["downtime"]


def test_a_span_moves_as_one() -> None:
    span = [one("g1/big", span="big"), one("g2/big", span="big")]
    found = rolled(*span, one("g3/a", "glm"))
    assert order(found) == [["g1/big + g2/big"], ["g3/a"]]


def test_deploy_leaves_releases_to_upgrade_and_rolls_the_rest() -> None:
    flags = one("g2/a", runs=Version(NEW.release, "3" * 64))
    found = rolled(one("g1/a"), flags, releases=False)
    assert order(found) == [["g2/a"]]
    assert found.left[0][0].id == "g1/a"
    assert found.left[0][1] == "runs 0.31.0-aaa, wanted is 0.32.0-bbb: upgrade.py moves it"


def test_a_refused_version_is_left_and_told() -> None:
    found = rolled(*(replace(s, refused="half the KV cache") for s in FIVE[:3]), *FIVE[3:])
    assert order(found) == [["g1/q"], ["g2/q"]]
    assert [reason for _, reason in found.left] == [f"{NEW} is refused: half the KV cache"] * 3


def test_what_was_cut_off_is_finished_first_and_counts_as_out() -> None:
    cut = one("g3/a", runs=NEW, cut_off=NEW)
    assert order(rolled(one("g1/a"), one("g2/a"), cut)) == [["g3/a"], ["g1/a"], ["g2/a"]]
    back = one("g1/a", refused="never ends", cut_off=NEW)
    assert [step.how for step in rolled(back, one("g2/a", refused="never ends")).steps] == ["back"]
    assert "run upgrade.py" in rolled(cut, releases=False).left[0][1]


def test_the_plan_is_told_in_lines() -> None:
    lines = rolled(*FIVE[:2], replace(FIVE[2], refused="slow")).lines()
    assert lines == [
        "wave 1 of 2 (canary, then watched for 60 s):",
        "  g1/a of glm: 0.31.0-aaa (11111111) -> 0.32.0-bbb (22222222); 2 more in its pool",
        "wave 2 of 2 (wave):",
        "  g2/a of glm: 0.31.0-aaa (11111111) -> 0.32.0-bbb (22222222); 2 more in its pool",
        "left as it is: g3/a of glm: 0.32.0-bbb (22222222) is refused: slow",
    ]
