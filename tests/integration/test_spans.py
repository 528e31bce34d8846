"""Spans over real hosts: deployed, closed to others, upgraded under load, and what goes wrong.

The engine is the stand-in, which meets its other ranks and hangs without them as vLLM does;
everything around it is real. The tests share one fleet and run in the order in which they stand.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.integration.operators import changes
from tests.integration.rolling import GATEWAY, MANY, ONE, make, served, told
from tests.integration.spans import BIG, LONE, SERVERS, SILENT, Row, Spans, spanned
from tests.testbed.bed import Bed
from tests.testbed.standin_wheel import Behaviour

pytestmark = [
    pytest.mark.long,
    pytest.mark.multinode,
    pytest.mark.faults,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def spans(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spans]:
    """Two spans and an instance that serve 0.31.0."""
    fleet = make(empty_bed, tmp_path_factory.mktemp("spans"), spanned)
    with served(fleet):
        fleet.wants("0.31.0")
        done = fleet.run("deploy.py")
        assert done.returncode == 0, done.stdout
        found = Spans(fleet)
        yield found
        print(found.table())
    for name in [*fleet.bed.hosts]:
        if name.startswith("roll-"):
            fleet.bed.remove(name)


def test_a_deploy_brings_up_every_rank_and_the_gateway_knows_one_server_each(spans: Spans) -> None:
    spans.all_ready()
    for host, name in (*BIG.items(), *LONE.items()):
        assert spans.state(host, name)["state"] == "ready"
        assert spans.sh(host, f"systemctl is-active vllm@{name}").strip() == "active"
    assert "big-r1" not in spans.sh(GATEWAY, "curl -s http://127.0.0.1:9145/status")
    again = spans.fleet.run("deploy.py")
    assert again.returncode == 0, again.stdout
    assert all(done[0] == "-" or done[0] == "0" for done in changes(again.stdout).values()), (
        again.stdout
    )


def test_ports_of_a_span_are_open_to_its_hosts_alone(spans: Spans) -> None:
    listen = "python3 -m http.server -b 0.0.0.0 %d >/dev/null 2>&1 & echo $! >/tmp/listener"
    spans.sh("roll-3", listen % 45678)  # as NCCL and vLLM's queues do, at a port of Linux's own
    try:
        for port in (29500, 45678):
            address = spans.bed.host("roll-3").address
            connect = f"timeout 3 bash -c '</dev/tcp/{address}/{port}' && echo open"
            spans.until(
                lambda connect=connect: "open" in spans.sh("roll-1", connect),  # type: ignore[misc]
                f"roll-1 reaches {port}",
                10,
            )
            assert "open" not in spans.sh("roll-2", connect), f"roll-2 reaches {port}"
            assert "open" not in spans.sh(GATEWAY, connect), f"the gateway reaches {port}"
    finally:
        spans.sh("roll-3", "kill $(cat /tmp/listener)")


@pytest.mark.parametrize(
    ("version", "script"), [("0.32.0", "upgrade.py"), ("0.31.0", "rollback.py")]
)
def test_a_span_goes_whole_to_another_version_and_loses_no_request(
    spans: Spans, version: str, script: str
) -> None:
    if script == "upgrade.py":
        spans.fleet.wants(version)
    with spans.fleet.watched() as watched:
        done = spans.fleet.run(script)
    assert done.returncode == 0, done.stdout
    assert not watched.load.bad, told(watched.load.bad)
    assert watched.most_out(MANY) <= 1
    held = [a.ended - a.sent for a in watched.load.answers if a.model == ONE]
    print(f"{script}: {len(watched.load.answers)} requests, longest held {max(held):.1f} s")
    for host, name in (*BIG.items(), *LONE.items()):
        text = spans.command(host, name)
        assert f"/opt/vllm/releases/{version}" in text, (host, text)
        assert spans.fleet.record(f"{host}/{name}")["step"] is None


def test_a_worse_version_of_a_span_goes_back_whole(spans: Spans) -> None:
    spans.fleet.wants("0.31.1", Behaviour(fault="no start"))
    with spans.fleet.watched() as watched:
        done = spans.fleet.run("upgrade.py")
    assert done.returncode == 1, done.stdout
    assert re.search("told not to start", done.stdout), done.stdout
    assert not watched.load.bad, told(watched.load.bad)
    spans.all_ready()
    for host, name in BIG.items():
        assert "/0.31.0" in spans.command(host, name)
    spans.fleet.wants("0.31.0")


# --- faults --------------------------------------------------------------------------------


def fails(spans: Spans, fault: str, words: str, began: float, *, on: str) -> None:
    """See a fault of span big from a rank that is left: named, out, nothing running; and write."""
    name = BIG[on]
    limit = SILENT + 25
    detected = spans.until(
        lambda: re.search(words, spans.journal(on, name, began - 1)), f"{words} is said", limit
    )
    spans.until(lambda: not spans.ready(SERVERS[0]), "the gateway sends nobody there", limit)
    spans.until(lambda: not spans.engines(on, name), f"nothing runs on {on}", limit)
    match = re.search(f".*{words}.*", spans.journal(on, name, began - 1))
    assert match
    spans.rows.append(Row(fault, detected, 0.0, match[0].removeprefix("span: big: ")))


def recovers(spans: Spans, since: float) -> None:
    spans.all_ready()
    spans.rows[-1].recovered = time.monotonic() - since


@pytest.mark.parametrize("dead", ["roll-1", "roll-3"])
def test_a_host_loses_its_power(spans: Spans, dead: str) -> None:
    spans.all_ready()
    host, left = spans.bed.host(dead), next(one for one in BIG if one != dead)
    began = time.time()
    host.powercut()
    rank = 0 if dead == "roll-3" else 1
    fails(spans, f"power cut of rank {rank}", "LOST: .*roll-", began, on=left)
    spans.until(
        lambda: spans.state(left, BIG[left]).get("state") == "waiting", "the other waits", 30
    )
    host.boot()
    since = time.monotonic()
    host.wait(60)
    recovers(spans, since)


def test_the_network_of_a_host_is_cut(spans: Spans) -> None:
    spans.all_ready()
    host, began = spans.bed.host("roll-1"), time.time()
    host.cut()
    fails(spans, "link of rank 1 down", "LOST: .*says nothing", began, on="roll-3")
    time.sleep(SILENT + 3)  # the one without a link notices too, unseen
    mended, since = time.time(), time.monotonic()
    host.mend()
    recovers(spans, since)
    said = spans.journal("roll-1", "big-r1", began, mended)
    assert "LOST: rank 0 on roll-3 (" in said
    assert "vllm@big-r1.service: Failed with result" in said, said  # its processes are gone then


def test_a_host_is_frozen(spans: Spans) -> None:
    spans.all_ready()
    host, began = spans.bed.host("roll-1"), time.time()
    host.freeze()
    fails(spans, "host of rank 1 frozen", "LOST: .*says nothing", began, on="roll-3")
    host.thaw()
    recovers(spans, time.monotonic())


@pytest.mark.parametrize(
    ("number", "words"), [("KILL", "has died|ended with"), ("STOP", "stopped")]
)
def test_a_worker_of_another_rank_dies_or_stops(spans: Spans, number: str, words: str) -> None:
    spans.all_ready()
    began = time.time()
    spans.sh("roll-1", f"pkill -{number} -f '^VLLM::Worker_PP1'")
    since = time.monotonic()
    fails(spans, f"SIG{number} to a worker of rank 1", f"LOST: .*({words})", began, on="roll-3")
    recovers(spans, since)


def test_one_host_is_down_at_the_start(spans: Spans) -> None:
    spans.all_ready()
    host = spans.bed.host("roll-1")
    host.powercut()
    spans.until(
        lambda: spans.state("roll-3", "big-r0").get("state") == "waiting", "rank 0 waits", 60
    )
    began = time.time()
    spans.sh("roll-3", "systemctl restart --no-block vllm@big-r0")
    fails(
        spans,
        "host of rank 1 down at start",
        "rank 1 on roll-1 .* has not come",
        began,
        on="roll-3",
    )
    done = spans.fleet.run("deploy.py")
    assert "roll-1 of span big takes no part in this run" in done.stdout, done.stdout
    host.boot()
    since = time.monotonic()
    host.wait(60)
    recovers(spans, since)


def test_ranks_of_different_versions_do_not_start(spans: Spans) -> None:
    spans.all_ready()
    env = "/etc/vllm/big-r1.env"
    spans.sh("roll-1", f"cp -p {env} /root/kept; sed -i 's,releases/0.31.0,releases/9.31.0,' {env}")
    spans.sh(
        "roll-1",
        "ln -s $(ls -d /opt/vllm/releases/0.31.0*) $(ls -d /opt/vllm/releases/0.31.0* "
        "| sed 's,/0.31.0,/9.31.0,')",
    )
    began = time.time()
    spans.sh("roll-1", "systemctl restart --no-block vllm@big-r1")
    words = r"rank 1 on roll-1 .* differs from this one: release 9\.31\.0"
    fails(spans, "rank 1 has another release", words, began, on="roll-3")
    assert not spans.engines("roll-1", "big-r1")
    spans.sh("roll-1", f"cp -p /root/kept {env}; systemctl restart --no-block vllm@big-r1")
    recovers(spans, time.monotonic())
    spans.sh("roll-1", "rm /opt/vllm/releases/9.31.0*")


def test_the_master_port_is_taken(spans: Spans) -> None:
    spans.all_ready()
    spans.sh("roll-3", "systemctl stop vllm@big-r0")
    spans.sh("roll-3", "python3 -m http.server 29501 >/dev/null 2>&1 & echo $! >/tmp/listener")
    began = time.time()
    spans.sh("roll-3", "systemctl start --no-block vllm@big-r0")
    words = r"port 29501 is held by pid \d+ of root: .*`span.master_port`"
    fails(spans, "master port taken", words, began, on="roll-3")
    spans.until(
        lambda: "does not run there" in spans.state("roll-1", "big-r1").get("why", ""),
        "rank 1 says why it waits",
        30,
    )
    assert not spans.engines("roll-1", "big-r1")
    spans.sh("roll-3", "kill $(cat /tmp/listener)")
    recovers(spans, time.monotonic())


def test_a_stop_of_any_rank_drains_the_span(spans: Spans) -> None:
    spans.all_ready()
    with spans.fleet.watched(rate=4) as watched:
        time.sleep(2)
        spans.sh("roll-1", "systemctl stop vllm@big-r1")
        spans.until(lambda: not spans.ready(SERVERS[0]), "it is out of its pool", 30)
        time.sleep(2)
        spans.sh("roll-1", "systemctl start --no-block vllm@big-r1")
        spans.all_ready()
    assert not watched.load.bad, told(watched.load.bad)
