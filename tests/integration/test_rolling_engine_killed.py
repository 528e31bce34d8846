"""upgrade.py of the real vLLM on CPU, killed at every step under load; a second run ends it.

Five instances of two pools on three hosts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import patched
from tests.integration.rolling import INSTANCES, MOMENTS, RollingFleet, deployed, kept_serving
from tests.integration.rolling_engine import NEW, make_real, wants_patched, watched
from tests.testbed.bed import Bed

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Five engines of two pools."""
    with deployed(make_real(empty_bed, tmp_path_factory.mktemp("killed")), NEW) as fleet:
        yield fleet


def test_killed_anywhere_a_second_run_ends_it(fleet: RollingFleet) -> None:
    """The version is one that is 1.3 times slower, which is no reason to refuse it."""
    version = "0.32.30"
    wants_patched(fleet, version, patched.A_LITTLE_SLOWER)
    with watched(fleet) as seen:
        # Its release is there already, so that no operation makes it.
        fleet.killed_at_every_moment("upgrade.py", MOMENTS[1:])
    assert fleet.releases() == dict.fromkeys(INSTANCES, version)
    kept_serving(fleet, seen)
    assert all(fleet.record(name)["step"] is None for name in INSTANCES)
