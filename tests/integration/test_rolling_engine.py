"""The real vLLM on CPU from one version to another while it serves, and back.

Five instances of two pools on three hosts. The tests share one fleet and run in the order in
which they stand here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest

from tests.integration.operators import changes
from tests.integration.rolling import INSTANCES, RollingFleet, deployed, kept_serving
from tests.integration.rolling_engine import NEW, OLD, make_real, watched
from tests.testbed.bed import Bed

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Five engines of two pools that serve the older version."""
    with deployed(make_real(empty_bed, tmp_path_factory.mktemp("real")), OLD) as fleet:
        yield fleet


def parts(fleet: RollingFleet) -> list[dict[str, float]]:
    """Where the seconds of each instance of the last run went."""
    found = []
    for line in fleet.audit(fleet.audit()[-1]["run"]):
        rest = line["seconds"] - sum(line["parts"].values())
        print(
            f"{line['host']}/{line['instance']}: {line['seconds']} s: {line['parts']}, {rest:.1f}"
        )
        found.append({"all": line["seconds"], "rest": rest, **line["parts"]})
    return found


def test_an_upgrade_loses_no_request_and_keeps_its_order(fleet: RollingFleet) -> None:
    fleet.wants(NEW)
    began = time.monotonic()
    with watched(fleet) as seen:
        done = fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    took = time.monotonic() - began
    assert fleet.releases() == dict.fromkeys(INSTANCES, NEW)
    kept_serving(fleet, seen)
    lines = fleet.audit(fleet.audit()[-1]["run"])
    order = ["roll-3/a", "roll-1/c", "roll-3/b", "roll-1/a", "roll-2/a"]
    assert [f"{line['host']}/{line['instance']}" for line in lines] == order
    assert {name for name in INSTANCES if seen.spells_out(name)} == {*INSTANCES}
    spent = parts(fleet)
    starts = sum(one["start"] for one in spent)
    print(f"upgrade.py: {took:.0f} s in all, {starts:.0f} s of it engine starts")
    # 5 s each on a machine that has nothing else to do.
    assert statistics.median(one["rest"] for one in spent) < 10


def test_a_second_upgrade_does_nothing(fleet: RollingFleet) -> None:
    before, began = fleet.audit(), time.monotonic()
    done = fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    print(f"second upgrade.py: {time.monotonic() - began:.1f} s")
    assert fleet.audit() == before
    for name, (success, error, _) in changes(done.stdout).items():
        assert (success, error) == ("-", "-"), name


def test_rollback_is_one_command_and_deploy_leaves_it_so(fleet: RollingFleet) -> None:
    with watched(fleet) as seen:
        # What a restart takes, beside the same load.
        began = time.monotonic()
        fleet.bed.host("roll-2").sh("systemctl restart vllm@a", timeout=600)
        restart = time.monotonic() - began
        done = fleet.run("rollback.py")
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == dict.fromkeys(INSTANCES, OLD)
    kept_serving(fleet, seen)
    spent = parts(fleet)
    print(f"a restart: {restart:.1f} s; rolled back in {[one['all'] for one in spent]} s")
    # A start on two cores beside four engines varies; what rollback.py adds to it does not.
    over = [one["all"] / (one["stop"] + one["start"]) for one in spent]
    assert statistics.median(over) < 1.2, over
    done = fleet.run("deploy.py")
    assert done.returncode == 0, done.stdout
    assert "is refused" in done.stdout
    for name, (success, error, _) in changes(done.stdout).items():
        assert (success, error) == ("-", "-"), name
    assert fleet.releases() == dict.fromkeys(INSTANCES, OLD)
