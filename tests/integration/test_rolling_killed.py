"""upgrade.py killed at every step, on real hosts under load; a second run ends what it began.

The engine is the stand-in, which starts within seconds; everything around it is real.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.rolling import INSTANCES, RollingFleet, deployed, kept_serving, make
from tests.testbed.bed import Bed
from tests.testbed.standin_wheel import Behaviour

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Three hosts that serve 0.31.0."""
    with deployed(make(empty_bed, tmp_path_factory.mktemp("killed")), "0.31.0") as fleet:
        yield fleet


def test_killed_anywhere_a_second_run_ends_it(fleet: RollingFleet) -> None:
    fleet.wants("0.32.2", Behaviour(start_seconds=2))
    with fleet.watched() as watched:
        fleet.killed_at_every_moment("upgrade.py")
    assert fleet.releases() == dict.fromkeys(INSTANCES, "0.32.2")
    kept_serving(fleet, watched)
    assert len(watched.load.answers) > 100
    assert all(fleet.record(name)["step"] is None for name in INSTANCES)
