"""The only instance of a pool changed by way of a spare card: its clients never wait.

nvidia-smi and the engine are stand-ins here (no host of the bed has a card). The tests share one
host and run in the order in which they stand here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.operators import changes
from tests.integration.rolling import (
    ONE,
    RollingFleet,
    Watched,
    deployed,
    make,
    told,
    tried,
)
from tests.stubs import nvidia_smi
from tests.testbed.bed import Bed
from tests.testbed.standin_wheel import Behaviour

pytestmark = [pytest.mark.long, pytest.mark.faults, pytest.mark.timeout(600)]

ONLY, SPARE = "roll-1/c", "roll-1/c.spare"
CARDS = [nvidia_smi.card(n, "NVIDIA L40S", 46068, "8.9") for n in range(2)]


def with_cards(values: dict[str, Any]) -> None:
    """One instance of one pool on the first of two cards; nobody is held for long."""
    values["device"] = "cuda"
    values["models"] = {ONE: values["models"][ONE]}
    values["instances"] = [
        {"name": "c", "hosts": ["roll-1"], "model": ONE, "cards": [0], "port": 8003}
    ]
    values["gateway"]["hold_seconds"] = 1


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """One host with two cards that serves 0.31.0 on the first."""
    fleet = make(empty_bed, tmp_path_factory.mktemp("spare"), with_cards, ("roll-1",))
    fleet.instances = (ONLY,)
    nvidia_smi.put(fleet.bed.host("roll-1"), CARDS)
    with deployed(fleet, "0.31.0"):
        yield fleet


def nobody_waited(fleet: RollingFleet, watched: Watched) -> None:
    """Whether every request was answered, and none was held."""
    assert len(watched.load.answers) > 20
    assert not watched.load.bad, told(watched.load.bad)
    held = [line for line in fleet.access_log(watched.began) if line["held_ms"]]
    assert held == []


def gone(fleet: RollingFleet) -> None:
    """Whether nothing is left of the spare."""
    host = fleet.bed.host("roll-1")
    assert host.sh("systemctl is-active vllm@c.spare", check=False).stdout.strip() == "inactive"
    left = host.sh("ls /etc/vllm /var/lib/vllm /etc/systemd/system").stdout
    assert "c.spare" not in left
    assert "c.spare" not in fleet.bed.host("roll-gw").sh("curl -s 127.0.0.1:9145/status").stdout


def test_the_spare_serves_while_the_only_one_changes(fleet: RollingFleet) -> None:
    fleet.wants("0.32.0", Behaviour(start_seconds=5))
    with fleet.watched(models=(ONE,)) as watched:
        done = fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    assert "a spare on cards 1 takes over first" in done.stdout
    assert fleet.releases() == {ONLY: "0.32.0"}
    nobody_waited(fleet, watched)
    # It got requests while the declared one was out, and the declared one has its own card again.
    names = {name for line in fleet.access_log(watched.began) for name in tried(line)}
    assert names == {ONLY, SPARE}
    assert "0" in fleet.bed.host("roll-1").sh("grep CUDA_VIS /etc/vllm/c.env").stdout
    gone(fleet)
    again = fleet.run("upgrade.py")
    for name, (success, error, _) in changes(again.stdout).items():
        assert (success, error) == ("-", "-"), name


def test_a_worse_version_never_stops_the_only_one(fleet: RollingFleet) -> None:
    host = fleet.bed.host("roll-1")
    before = host.sh("systemctl show -P InvocationID vllm@c").stdout
    fleet.wants("0.32.1", Behaviour(tokens_per_second=60))
    with fleet.watched(models=(ONE,)) as watched:
        done = fleet.run("upgrade.py")
    assert done.returncode == 1, done.stdout
    assert "tokens a second" in done.stdout
    assert "roll-1/c: the new version was refused, the last good one serves" in done.stdout
    assert host.sh("systemctl show -P InvocationID vllm@c").stdout == before
    nobody_waited(fleet, watched)
    gone(fleet)
    again = fleet.run("upgrade.py")
    assert again.returncode == 1
    assert "is refused" in again.stdout


@pytest.mark.parametrize(
    "moment",
    [
        "systemctl -q is-active vllm@c.spare",
        "[ $(systemctl show -P ActiveState vllm@c) = activating ]",
    ],
)
def test_killed_with_a_spare_the_next_run_ends_it(fleet: RollingFleet, moment: str) -> None:
    version = f"0.32.{3 + ('activating' in moment)}"
    fleet.wants(version, Behaviour(start_seconds=5))
    with fleet.watched(models=(ONE,)) as watched:
        fleet.killed_when("upgrade.py", "roll-1", moment)
        run = fleet.lock_holder()
        done = fleet.run("upgrade.py", "--data", f"unlock={run}")
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == {ONLY: version}
    nobody_waited(fleet, watched)
    gone(fleet)
