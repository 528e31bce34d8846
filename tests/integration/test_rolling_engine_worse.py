"""Worse versions of the real vLLM on CPU, refused at the canary while the others serve.

Each is a patched copy of the release that serves. Two instances of one pool on two hosts; the
tests share them and run in the order in which they stand here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.integration import patched
from tests.integration.rolling import RollingFleet, deployed, kept_serving, tried
from tests.integration.rolling_engine import NEW, one_pool, wants_patched, watched
from tests.stubs.gateway import wait_for
from tests.testbed.bed import Bed

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Two engines of one pool."""
    with deployed(one_pool(empty_bed, tmp_path_factory.mktemp("worse")), NEW) as fleet:
        yield fleet


WORSE: dict[str, tuple[patched.Patch, str, dict[str, int]]] = {
    "does not start": (patched.NO_START, "patched: this engine does not start", {}),
    "answers 500": (patched.ANSWERS_500, "patched: no chat is answered|answered 500", {}),
    "never ends": (
        patched.NEVER_ENDS,
        "was not over after|not ready within|start_seconds are over|failed to start",
        {"start_seconds": 240},
    ),
    "3 times slower": (patched.SLOWER, "tokens a second", {}),
    "half the KV": (patched.HALF_THE_KV, "KV cache .* -> .*: [45]\\d% of what it was", {}),
    "an option less": (patched.AN_OPTION_LESS, "unrecognized arguments: --max-num-seqs", {}),
    "crashes": (
        patched.CRASHES,
        "is not ready any more|ended and was started",
        {"canary_hold_seconds": 40},
    ),
}


@pytest.mark.parametrize("how", WORSE)
def test_a_worse_version_stops_at_the_canary_which_goes_back(fleet: RollingFleet, how: str) -> None:
    patch, cause, changes = WORSE[how]
    canary, other = fleet.instances
    wants_patched(fleet, f"0.32.{11 + [*WORSE].index(how)}", patch, **changes)
    before = fleet.invocation(other)
    with watched(fleet) as seen:
        done = fleet.run("upgrade.py")
        # An option is missed within seconds: the load goes on until it says something.
        wait_for(lambda: len(seen.load.answers) > 20, 120, 1)
    said = [line for line in done.stdout.splitlines() if canary in line or "refuse" in line]
    print(how, *said, sep="\n  ")
    assert done.returncode == 1, done.stdout
    assert re.search(cause, done.stdout), done.stdout
    assert set(fleet.releases().values()) == {NEW}
    assert fleet.invocation(other) == before
    if how != "an option less":
        assert f"{canary}: the new version was refused, the last good one serves" in done.stdout
    if how == "crashes":
        by_id = {line["request_id"]: tried(line) for line in fleet.access_log(seen.began)}
        print(f"{len(seen.load.answers)} requests, {len(seen.load.bad)} failed")
        assert all(by_id.get(one.id, [""])[-1] == canary for one in seen.load.bad)
    else:
        kept_serving(fleet, seen)


def test_a_version_that_is_1_3_times_slower_passes(fleet: RollingFleet) -> None:
    wants_patched(fleet, "0.32.30", patched.A_LITTLE_SLOWER)
    with watched(fleet) as seen:
        done = fleet.run("upgrade.py")
    print(*re.findall(r".*tokens a second: .*", done.stdout), sep="\n")
    assert done.returncode == 0, done.stdout
    assert set(fleet.releases().values()) == {"0.32.30"}
    kept_serving(fleet, seen)
