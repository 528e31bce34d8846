"""What operators see of a fleet that serves and is rolled: no panel empty, no false alert.

The engine is the stand-in, the cards are those of an nvidia-smi made here; units, probe, gateway,
Prometheus and Alertmanager are the real ones. The tests share one fleet, in this order.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.monitored import Monitored, monitored
from tests.integration.operators import changes
from tests.integration.rolling import GATEWAY, HOSTS, MANY, ONE, told
from tests.testbed import receiver
from tests.testbed.bed import Bed
from tools.unanswered import Found, unanswered

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(900)]

# Two cards, as nvidia-smi of an H200 answered (driver 580); the second has no instance.
SMI = """\
#!/bin/sh
case "$1" in
nvlink) printf 'GPU 0: NVIDIA H200 (UUID: GPU-0)\\n\\t Link 0: 26.562 GB/s\\n'; exit;;
esac
echo '0, GPU-0, 120000, 143771, 90, 61, 480.00, 0, [N/A], No, No, Not Active, Not Active, Not Active, Not Active'
echo '1, GPU-1, 0, 143771, 0, 33, 88.00, 0, [N/A], No, No, Not Active, Not Active, Not Active, Not Active'
"""  # noqa: E501
# What nothing here brings about: errors of cards, and requests that fail or are turned away.
NOT_YET = {
    "vllm_fleet_change_timestamp_seconds",
    "vllm_fleet_change_until_seconds",
    "vllm_fleet_gateway_refused_total",
    "vllm_fleet_gateway_requests_total",  # with a status of failure
    "vllm_fleet_xid_time_seconds",
}
NOT_HERE = ["InfinibandDown: node_infiniband_state_id (no InfiniBand)"]


@pytest.fixture(scope="module")
def site(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    def slow(values: dict[str, Any]) -> None:
        # The only one of its pool is away for longer than an alert waits.
        values["models"][ONE]["env"] = {"STANDIN_START_SECONDS": "75"}
        values["start_seconds"] = 150
        values["gateway"]["hold_seconds"] = 240

    with monitored(empty_bed, tmp_path_factory.mktemp("monitored"), slow) as site:
        yield site


def put_cards(site: Monitored) -> None:
    """A host with cards, as far as its own metrics go."""
    host = site.fleet.bed.host("roll-1")
    host.sh("cat >/usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi", stdin=SMI)
    edit = (
        "import json; p = '/etc/vllm/hostwatch.json'; s = json.load(open(p)); s['device'] = 'cuda';"
        "s['instances'][0].update(cards=[0], uuids=['GPU-0']); json.dump(s, open(p, 'w'))"
    )
    host.sh(f'python3 -c "{edit}"; systemctl start vllm-fleet-hostwatch')


def test_no_panel_and_no_rule_is_without_data(site: Monitored) -> None:
    put_cards(site)
    found = Found()
    with site.fleet.watched(rate=6, tokens=(4, 200, 32)) as watched:
        until = time.monotonic() + 150
        while time.monotonic() < until:
            time.sleep(10)
            found = unanswered(site.prometheus, 60)
            if not found.empty and found.not_here == NOT_HERE:
                break
    assert found.empty == []
    assert found.panels > 90
    assert found.rules > 50
    assert set(re.findall(r": (vllm_fleet_\w+)", "\n".join(found.not_yet))) <= NOT_YET
    assert found.not_here == NOT_HERE
    assert not watched.load.bad, told(watched.load.bad)
    print(f"{found.panels} queries, {found.variables} variables, {found.rules} rules: all answered")
    assert site.firing() == set()


def test_a_second_deploy_changes_nothing(site: Monitored) -> None:
    done = site.fleet.run("deploy.py")  # takes the made cards away again
    assert done.returncode == 0, done.stdout
    done = site.fleet.run("deploy.py", "--debug")
    assert done.returncode == 0, done.stdout
    for name, (success, error, _) in changes(done.stdout).items():
        assert (success, error) == ("-", "-"), name
    for host in (*HOSTS, GATEWAY):
        commands = re.findall(rf"Running command on {host}: ", done.stdout)
        assert 1 <= len(commands) <= 6, host


def test_a_planned_roll_empties_no_panel_and_tells_nobody(site: Monitored) -> None:
    fleet = site.fleet
    before = len(receiver.posts(site.inbox))
    fleet.wants("0.32.0")
    empty: list[str] = []
    fired: set[tuple[str, str]] = set()
    held_back: set[str] = set()
    mixed = looks = 0
    with fleet.watched(rate=6, tokens=(4, 200, 32)) as watched:
        time.sleep(30)  # rates have something to go by
        roll = fleet.operator.start("upgrade.py", inventory="rolling")
        while roll.poll() is None:
            found = unanswered(site.prometheus, 60)
            empty += found.empty
            looks += 1
            mixed += len(site.prometheus.labels("vllm_fleet_instance_info", "vllm_version")) == 2
            fired |= site.firing()
            held_back |= site.held_back()
            time.sleep(2)
        said = roll.stdout.read() if roll.stdout else ""
    assert roll.returncode == 0, said
    assert not watched.load.bad, told(watched.load.bad)
    assert mixed >= 3
    assert empty == []
    assert {("PlannedChange", MANY), ("PlannedChange", ONE)} <= fired
    # The pool with one instance was down for over a minute, which is held back.
    assert ("PoolDown", ONE) in fired
    assert "PoolDown" in held_back
    assert {name for name, _ in fired} - {"PlannedChange"} <= held_back
    time.sleep(20)  # what would have been sent had its time
    assert receiver.posts(site.inbox)[before:] == []
    print(f"{looks} looks, {mixed} of them at two versions; fired and held back: {held_back}")
