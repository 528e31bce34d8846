"""deploy.py on real hosts without engines: how little a second run asks, and a host that dies.

The hosts are shared; the last test switches one of them off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.integration import wide
from tests.integration.operators import changes
from tests.integration.wide import WideFleet
from tests.testbed.bed import Bed
from vllm_fleet.operations.alive import ANSWER_SECONDS, PULSE_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

MOST_COMMANDS = 6
SCRIPT = "/opt/vllm/lib/hostwatch.py"
EXPORTER = "prometheus-node-exporter.service"
SLOW = f"/etc/systemd/system/{EXPORTER}.d/90-slow.conf"


@pytest.fixture(scope="module", params=[3, pytest.param(20, marks=pytest.mark.long)])
def fleet(
    request: pytest.FixtureRequest, empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WideFleet]:
    """So many hosts after a first deploy."""
    made = wide.make(empty_bed, tmp_path_factory.mktemp("wide"), request.param)
    done, took = made.deploy()
    assert done.returncode == 0, done.stdout
    print(f"first deploy of {request.param} hosts: {took:.0f} s")
    yield made
    for name in made.names:
        empty_bed.remove(name)


def test_a_run_that_changes_nothing_asks_each_host_once_and_uploads_nothing(
    fleet: WideFleet,
) -> None:
    fleet.listen()
    began = time.time()
    done, took = fleet.deploy()
    assert done.returncode == 0, done.stdout
    assert f"{len(fleet.names)} hosts looked at: everything on them is as wanted" in done.stdout
    assert changes(done.stdout) == {}
    for host in fleet.hosts:
        heard = fleet.heard(host, began)
        print(f"{host.name}: {heard}; run of {took:.1f} s")
        assert heard.connections == 1
        # For sudo's password pyinfra makes a file on the host, and removes it.
        assert heard.commands == (3 if host.spec.user == wide.OPS_USER else 1) <= MOST_COMMANDS
        assert heard.uploads == 0


def test_what_sshd_heard_counts_every_command_and_upload(fleet: WideFleet) -> None:
    """The counting itself: a run that changes something asks more than once."""
    host = fleet.hosts[0]
    fleet.listen()
    host.sh(f"rm {SCRIPT}")
    began = time.time()
    done, _ = fleet.deploy("--limit", host.name)
    assert done.returncode == 0, done.stdout
    assert changes(done.stdout)["Files of ours"][0] == "1"
    assert fleet.heard(host, began).commands == 2
    host.sh(f"test -e {SCRIPT}")


def disturb(fleet: WideFleet) -> None:
    """Have something to do on every host, in two steps."""
    for host in fleet.hosts:
        host.sh(f"rm -f {SCRIPT}; systemctl stop {EXPORTER}")


@pytest.mark.parametrize("death", ["freezes", "loses power"])
def test_a_host_that_dies_in_mid_run_is_named_and_delays_the_others_by_its_deadline_only(
    fleet: WideFleet, death: str
) -> None:
    """One that freezes says nothing more, while its kernel still answers TCP."""
    disturb(fleet)
    done, usual = fleet.deploy()
    assert done.returncode == 0, done.stdout
    disturb(fleet)
    victim, others = fleet.hosts[0], fleet.hosts[1:]
    victim.sh(f"printf '[Service]\\nExecStartPre=sleep 60\\n' >{SLOW}; systemctl daemon-reload")
    began = time.monotonic()
    process = fleet.operator.start("deploy.py", inventory="wide")
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Starting operation: Monitoring" in line:
            time.sleep(2)  # its command runs by now
            victim.freeze() if death == "freezes" else victim.powercut()
    code = process.wait(60)
    process.stdout.close()
    took, text = time.monotonic() - began, "".join(said)
    if death == "freezes":
        victim.thaw()
        victim.sh(f"rm {SLOW}; systemctl daemon-reload; systemctl stop {EXPORTER}")
    assert code == 1, text
    print(f"usually {usual:.1f} s, with a host that died {took:.1f} s\n{text[-1500:]}")
    named = text[text.index("--> Failed hosts:") :]
    deadline = PULSE_SECONDS + ANSWER_SECONDS
    why = f", no answer for {deadline} s" if death == "freezes" else ""
    assert f"{victim.name}: connection lost{why}: Monitoring" in named
    assert not any(host.name in named for host in others)
    assert "Starting operation: Everything serves" in text
    for host in others:
        host.sh(f"test -e {SCRIPT} && systemctl is-active -q {EXPORTER}")
    # Twice the deadline, since other work on this machine makes all of it slower.
    assert took < usual + 2 * deadline
