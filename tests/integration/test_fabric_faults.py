"""What can be wrong between hosts: each named in bounded time, nothing left running, nothing kept.

The ranks are the real ones, torch over gloo between network namespaces; the scripts run as on a
host. Times to detection are printed as the table of docs/operations.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.namespaces import Namespaces
from tests.integration.scripts import BED
from tests.testbed.shell import until
from vllm_fleet.fabric import FILE, text_of
from vllm_fleet.fabric.trial import Member
from vllm_fleet.rollout.fabric import Change, Trial, Wanted
from vllm_fleet.rollout.hosts import Failed
from vllm_fleet.rollout.lock import Holder, Lock

pytestmark = [
    pytest.mark.long,
    pytest.mark.integration,
    pytest.mark.multinode,
    pytest.mark.faults,
    pytest.mark.timeout(300),
]
NAMES = ("n1", "n2", "n3")
PORT, SECONDS = 29400, 25
OLD = "# of before\n"
HOOK = "{ type filter hook input priority 0; }"
times: dict[str, tuple[float, str]] = {}


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> Path:
    """The Python of a release with torch; built where there is none yet."""
    for there in sorted((BED / "engine").glob("0.*+cpu-*/bin/python")):
        return there
    return Path(str(request.getfixturevalue("engine"))) / "bin/python"


class Nodes(Namespaces):
    """Three hosts, each with an environment from before."""

    python: Path

    def wanted(self, interface: str = "eth0", **by_name: str) -> list[Wanted]:
        """What all of them are to have; addresses by name where they are others."""
        found = []
        for name in self.names:
            address = by_name.get(name, self.address(name))
            environment = {
                "GLOO_SOCKET_IFNAME": interface,
                "NCCL_SOCKET_IFNAME": f"={interface}",
                "VLLM_HOST_IP": address,
            }
            mtu = int(self.sh(name, f"cat /sys/class/net/{interface}/mtu") or 1500)
            member = Member(name, address, interface, mtu)
            text = text_of(environment)
            found.append(Wanted(name, text, environment, member, python=str(self.python)))
        return found

    def change(self, wanted: list[Wanted] | None = None, **trial: Any) -> bool:
        """One run of nccl.py's own part; whether it was kept."""
        self.said.clear()
        values: dict[str, Any] = {
            "port": PORT,
            "backend": "gloo",
            "layer": None,
            "floor": None,
            "test_mib": 4,
            "seconds": SECONDS,
        }
        with Lock(self, "n1", Holder("nccl.py", who="ann"), beat_seconds=3600) as lock:
            return Change(self, lock, wanted or self.wanted(), Trial(**(values | trial))).run()

    def files(self) -> dict[str, str]:
        return {name: self.sh(name, f"cat {FILE}") for name in self.names}

    def told(self) -> str:
        return "\n".join(self.said)

    def refused(self, fault: str, wanted: list[Wanted] | None = None, **trial: Any) -> str:
        """What is said of a fault; all hosts are as they were, and nothing runs on any."""
        began = time.monotonic()
        assert not self.change(wanted, **trial)
        took = time.monotonic() - began
        print(f"--- {fault}: {took:.1f} s\n{self.told()}")
        times[fault] = took, self.said[0]
        assert self.settled() == {}
        assert self.files() == dict.fromkeys(self.names, OLD)
        return self.told()


@pytest.fixture
def nodes(tmp_path: Path, python: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, NAMES)
    made.python = python
    try:
        for name in NAMES:
            made.sh(name, f"mkdir -p /etc/vllm; printf '{OLD}' >{FILE}")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    for fault, (seconds, told) in times.items():
        print(f"| {fault} | {seconds:.1f} s | {told} |")


def test_a_good_environment_is_kept_by_all(nodes: Nodes) -> None:
    wanted = nodes.wanted()
    assert nodes.change(wanted), nodes.told()
    print(nodes.told())
    assert nodes.files() == {one.name: one.text for one in wanted}
    assert "all-reduce of 3 ranks by gloo: right sums" in nodes.told()
    assert nodes.settled() == {}
    tested = json.loads(nodes.sh("n3", "cat /var/lib/vllm/_rollout/fabric/tested.json"))
    assert tested["hosts"] == [*NAMES]
    assert nodes.sh("n2", "ls /var/lib/vllm/_rollout/fabric").split() == ["tested.json"]
    audit = json.loads(nodes.sh("n2", "tail -1 /var/lib/vllm/_rollout/audit.log"))
    assert (audit["result"], audit["hosts"]) == ("done", [*NAMES])


def test_an_interface_without_a_route(nodes: Nodes) -> None:
    for number, name in enumerate(NAMES, 1):
        # A cable whose other end lies on the floor.
        nodes.ip(name, "link", "add", "fab9", "type", "veth", "peer", "name", "floor")
        nodes.ip(name, "link", "set", "floor", "up")
        nodes.ip(name, "addr", "add", f"10.99.0.{number}/24", "dev", "fab9")
        nodes.ip(name, "link", "set", "fab9", "up")
    told = nodes.refused(
        "interface without a route",
        nodes.wanted("fab9", n1="10.99.0.1", n2="10.99.0.2", n3="10.99.0.3"),
    )
    assert "no host reaches another through fab9: n1 → n2 (10.99.0.2): no answer: nothing" in told


@pytest.mark.long
def test_an_interface_that_is_gone(nodes: Nodes) -> None:
    told = nodes.refused("interface that is not there", nodes.wanted("eth7"))
    assert "n2: interface eth7 is not there" in told


@pytest.mark.long
def test_a_host_in_another_network(nodes: Nodes) -> None:
    nodes.ip("n3", "addr", "flush", "dev", "eth0")
    nodes.ip("n3", "addr", "add", "10.82.0.3/24", "dev", "eth0")
    told = nodes.refused("hosts in two networks", nodes.wanted(n3="10.82.0.3"))
    assert "n3: none of the others reaches it (10.82.0.3 through eth0): " in told
    assert "n1 → n2" not in told


def test_an_mtu_that_differs(nodes: Nodes) -> None:
    nodes.ip("n2", "link", "set", "eth0", "mtu", "1300")
    told = nodes.refused("MTU that differs")
    assert "n1 → n2 (10.81.0.2 through eth0): no answer to packets of 1500 bytes" in told
    assert "MTU is 1500 on n1 and 1300 on n2" in told


@pytest.mark.long
def test_the_meeting_port_is_blocked(nodes: Nodes) -> None:
    nodes.sh("n2", f"nft add table ip t; nft add chain ip t c '{HOOK}'")
    nodes.sh("n2", f"nft add rule ip t c ip saddr 10.81.0.3 tcp dport {PORT} drop")
    told = nodes.refused("port blocked")
    assert f"n3 → n2 (10.81.0.2 through eth0): port {PORT}: no answer; open it between" in told
    assert "n1 → n2" not in told


@pytest.mark.long
def test_ports_that_the_kernel_gives_are_blocked(nodes: Nodes) -> None:
    nodes.sh("n1", f"nft add table ip t; nft add chain ip t c '{HOOK}'")
    opens = "tcp dport 32768-60999 tcp flags '& (fin | syn | rst | ack) == syn' reject"
    nodes.sh("n1", f"nft add rule ip t c {opens}")
    told = nodes.refused("ports of ranks blocked")
    assert "n2 → n1 (10.81.0.1 through eth0): port " in told
    assert "connection refused; open it between these hosts" in told


@pytest.mark.long
def test_the_meeting_port_is_taken(nodes: Nodes) -> None:
    words = nodes.inside("n1", "python3", "-m", "http.server", str(PORT), "--bind", "10.81.0.1")
    taker = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: f":{PORT}" in nodes.sh("n1", "ss -ltn"), 10)
        began = time.monotonic()
        assert not nodes.change()
        times["port taken"] = time.monotonic() - began, nodes.said[0]
        told = nodes.told()
        print(told)
        assert f"n1: port {PORT} is taken by " in told
        assert "http.server" in told
        assert "n2 → n1" not in told
        assert len(nodes.pids("n1")) == 1
        assert nodes.files() == dict.fromkeys(NAMES, OLD)
    finally:
        taker.kill()
        taker.wait()


@pytest.mark.long
def test_a_host_that_is_down_at_the_start(nodes: Nodes) -> None:
    lost = nodes.ask

    def ask(host: str, script: str, order: Any) -> Any:
        if host == "n3":
            raise Failed("n3: connection lost (no route to host)")
        return lost(host, script, order)

    nodes.power_cut("n3")
    nodes.ask = ask  # type: ignore[method-assign]
    told = nodes.refused("host down at the start")
    assert "n3: connection lost" in told
    assert "n3: not put back" in told


def in_the_test(nodes: Nodes, name: str, do: Callable[[], None]) -> threading.Thread:
    """Do something once the ranks of a host have begun."""

    def wait() -> None:
        assert until(lambda: any("allreduce.py" in c for c in commands(nodes, name)), 30)
        time.sleep(1.0)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def commands(nodes: Nodes, name: str) -> list[str]:
    found = []
    for pid in nodes.pids(name):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_text())
        except OSError:
            continue
    return found


def test_a_host_that_dies_in_the_test(nodes: Nodes) -> None:
    thread = in_the_test(nodes, "n2", lambda: nodes.power_cut("n2"))
    told = nodes.refused("power cut in the test")
    thread.join()
    assert told.splitlines()[1] == "n2: connection lost"


@pytest.mark.long
def test_a_rank_that_is_killed(nodes: Nodes) -> None:
    def kill() -> None:
        for pid in nodes.pids("n2"):
            if "allreduce.py" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)

    thread = in_the_test(nodes, "n2", kill)
    told = nodes.refused("rank killed in the test")
    thread.join()
    assert told.splitlines()[1].startswith("n2: rank 1 was killed at ")


@pytest.mark.long
def test_a_host_that_is_frozen_in_the_test(nodes: Nodes) -> None:
    thread = in_the_test(nodes, "n3", lambda: nodes.signal("n3", signal.SIGSTOP))
    # Its own alarm does not come either while it is frozen: the operator's end gives it up.
    thaw = threading.Timer(SECONDS + 12, lambda: nodes.signal("n3", signal.SIGCONT))
    thaw.start()
    told = nodes.refused("host frozen in the test")
    thread.join()
    thaw.cancel()
    assert "n3: stood still at " in told


@pytest.mark.parametrize("how", ["its connection is gone", "the script is killed"])
def test_ranks_end_with_whoever_waits_for_them(nodes: Nodes, how: str) -> None:
    """A rank that waits for others who never come, when its operator or its script is gone."""
    words = ["--rank", "0", "--world", "2", "--master", f"10.81.0.1:{PORT}"]
    ranks = [{"rank": 0, "arguments": [*words, "--seconds", "60"], "environment": {}}]
    source = (Path(__file__).parents[2] / "vllm_fleet/onhost/allreduce.py").read_text()
    order = {"action": "rank", "run": "r", "ranks": ranks, "source": source, "seconds": 60}
    script = nodes.start("n1", "fabric", {**order, "python": str(nodes.python)})
    assert until(lambda: any("allreduce.py" in c for c in commands(nodes, "n1")), 30)
    time.sleep(1.0)
    began = time.monotonic()
    assert script.stdout is not None
    if how == "the script is killed":
        script.kill()
    script.stdout.close()  # as sshd does it
    script.wait(20)
    assert nodes.settled(10) == {}
    print(f"{how}: nothing runs any more after {time.monotonic() - began:.1f} s")


@pytest.mark.long
def test_less_bandwidth_than_the_floor(nodes: Nodes) -> None:
    told = nodes.refused("less bandwidth than the floor", floor=1000.0)
    assert "GB/s bus bandwidth, less than 1000.00" in told


def test_a_run_that_was_killed_is_begun_anew(nodes: Nodes) -> None:
    """Killed between keeping on the first and on the last host: what was tested comes back."""
    wanted = nodes.wanted()
    for one in wanted:
        nodes.ask(one.name, "fabric", {"action": "stage", "run": "gone", "text": "# half\n"})
    nodes.ask("n1", "fabric", {"action": "keep", "run": "gone"})
    assert nodes.files() == {"n1": "# half\n", "n2": OLD, "n3": OLD}
    told = nodes.refused("begun anew, too slow", floor=1000.0)
    assert "n1: run gone was cut off here: begun anew" in told
    assert "n1: put back" in told
    assert nodes.change(wanted), nodes.told()
    assert nodes.files() == {one.name: one.text for one in wanted}
