"""Faults provoked on hosts, and how long it takes until somebody is told: prints a table.

The engine is the stand-in; everything else is real, from systemd to the message that arrives.
All faults are there at once, each on something of its own, with the waits that alerts have.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.load import Load
from tests.integration.monitored import Monitored, monitored
from tests.integration.rolling import GATEWAY, MANY, ONE
from tests.testbed import receiver
from tests.testbed.bed import Bed

pytestmark = [pytest.mark.long, pytest.mark.faults, pytest.mark.timeout(1200)]

BUSY = "busy-tiny"
BAD_RULES = "/etc/prometheus/vllm-fleet/rules/broken.yml"
LONGEST = 540  # seconds; the longest wait of these alerts is 5 minutes


@dataclass(frozen=True)
class Fault:
    """What is done, and the alert that must tell it, with these labels."""

    what: str
    do: Callable[[Monitored], None]
    alert: str
    labels: dict[str, str]
    before: Callable[[Monitored], None] = lambda site: None  # takes time, and is no fault yet


@pytest.fixture(scope="module")
def site(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    def more(values: dict[str, Any]) -> None:
        busy = {**values["models"][MANY], "vllm_args": {"dtype": "bfloat16", "max-num-seqs": 2}}
        values["models"][BUSY] = busy
        values["instances"] += [
            {"name": "d", "hosts": ["roll-1", "roll-3"], "model": MANY, "port": 8004},
            {"name": "e", "hosts": ["roll-1"], "model": BUSY, "port": 8005},
        ]
        values["probe"] = {"restart_seconds": 30}

    folder = tmp_path_factory.mktemp("alerts")
    with small_disk(folder) as disk:
        binds = {GATEWAY: ((str(disk / "full"), "/srv/full"), (str(disk), "/srv/private/disk"))}
        with monitored(empty_bed, folder, more, binds) as site:
            yield site


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MiB."""
    image, place = folder / "small.img", folder / "small"
    place.mkdir()
    subprocess.run(["truncate", "-s", "64M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def on(host: str, command: str) -> Callable[[Monitored], None]:
    """Run a command on a host."""
    return lambda site: (site.fleet.bed.host(host).sh(command), None)[1]


def main_pid(site: Monitored, host: str, instance: str) -> int:
    text = site.fleet.bed.host(host).sh(f"systemctl show -P MainPID vllm@{instance}").stdout
    return int(text.strip() or 0)


def freeze(site: Monitored) -> None:
    """Stop the engine's process, as a kernel that hangs does."""
    script = (
        "for p in $(cat /sys/fs/cgroup$(systemctl show -P ControlGroup vllm@a)/cgroup.procs); do"
        " tr '\\0' ' ' </proc/$p/cmdline | grep -q VLLM::EngineCore && kill -STOP $p; done; true"
    )
    site.fleet.bed.host("roll-3").sh(script)


def kill_twice(site: Monitored) -> None:
    """The server, each time until it has come back; the fault is there with the third."""
    host = site.fleet.bed.host("roll-3")
    for _ in range(2):
        host.sh("systemctl kill -s KILL vllm@b")
        time.sleep(2)
        host.sh(
            "for i in $(seq 120); do test -e /run/vllm/b/ready && exit; sleep 0.5; done; exit 1"
        )
        time.sleep(12)  # two scrapes see this process


def let_the_others_be_told(site: Monitored) -> None:
    """Those that need what a host's exporter has to tell."""
    time.sleep(120)


def spoil_weights(site: Monitored) -> None:
    """A shard that cannot be read any more, and a start that looks at it."""
    site.fleet.bed.host("roll-1").sh(
        f"chmod 000 $(readlink -f /opt/vllm/models/{MANY}/*/model-00002*); "
        "systemctl kill -s KILL vllm@a"
    )


def drain(site: Monitored) -> None:
    site.fleet.bed.host(GATEWAY).sh(
        "curl -s -f -X POST '127.0.0.1:9145/drain?instance=roll-1/c' >/dev/null"
    )


def break_rules(site: Monitored) -> None:
    site.fleet.bed.host(GATEWAY).sh(f"echo 'groups: [' >{BAD_RULES}; systemctl reload prometheus")


FAULTS = (
    Fault("a host is cut off its power", lambda s: s.fleet.bed.host("roll-2").powercut(),
          "HostDown", {"host": "roll-2"}),
    Fault("an engine is frozen (SIGSTOP)", freeze, "EngineRestarted", {"host": "roll-3",
          "instance": "a"}),
    Fault("a server is killed three times", on("roll-3", "systemctl kill -s KILL vllm@b"),
          "InstanceFlaps", {"host": "roll-3", "instance": "b"}, kill_twice),
    Fault("a file of weights cannot be read any more, and the server is killed", spoil_weights,
          "InstanceFailed", {"host": "roll-1", "instance": "a"}),
    Fault("an instance is stopped by hand", on("roll-3", "systemctl stop vllm@d"),
          "InstanceDown", {"host": "roll-3", "instance": "d"}),
    Fault("the last instance of a pool is drained", drain, "PoolDown", {"pool": ONE}),
    Fault("40 clients ask an instance that runs two requests at once", lambda s: None,
          "RequestsQueued", {"pool": BUSY}),
    Fault("a disk is filled", on(GATEWAY, "fallocate -l 1G /srv/full/x || dd if=/dev/zero "
          "of=/srv/full/x bs=1M 2>/dev/null || true"), "DiskFull",
          {"host": GATEWAY, "mountpoint": "/srv/full"}),
    Fault("a disk cannot be read any more", on(GATEWAY, "chmod 700 /srv/private"),
          "DiskBroken", {"host": GATEWAY, "mountpoint": "/srv/private/disk"}),
    Fault("a certificate ends tomorrow", lambda s: s.put_certificate(s.ending),
          "CertificateExpires", {"host": GATEWAY}),
    Fault("a node exporter is stopped: nobody reads its host's figures",
          on("roll-3", "systemctl stop prometheus-node-exporter"),
          "ExporterDown", {"host": "roll-3", "job": "node"}, let_the_others_be_told),
    Fault("Prometheus is given rules that do not parse", break_rules,
          "MonitoringConfigStale", {"host": GATEWAY}),
)  # fmt: skip


@contextmanager
def crowd(site: Monitored, clients: int = 40) -> Iterator[None]:
    """So many clients that each ask the busy instance again as soon as it has answered."""
    over = threading.Event()

    def client() -> None:
        body = {"model": BUSY, "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {site.fleet.key}", "Content-Type": "application/json"}
        url = f"{site.fleet.url}/v1/chat/completions"
        while not over.is_set():
            try:
                request = urllib.request.Request(url, json.dumps(body).encode(), headers)
                urllib.request.urlopen(request, timeout=180).close()
            except OSError:
                over.wait(1)

    for _ in range(clients):
        threading.Thread(target=client, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def matches(labels: dict[str, str], fault: Fault) -> bool:
    wanted = {"alertname": fault.alert, **fault.labels}
    return wanted.items() <= labels.items()


def test_every_fault_is_told_and_a_dead_host_once(site: Monitored) -> None:
    fleet = site.fleet
    time.sleep(30)  # all is scraped twice, and well
    assert site.firing() == set()
    begun: dict[str, float] = {}
    fired: dict[str, float] = {}

    def provoke(fault: Fault) -> None:
        fault.before(site)
        begun[fault.alert] = time.time()
        fault.do(site)

    threads = [threading.Thread(target=provoke, args=(fault,)) for fault in FAULTS]
    deadline = time.monotonic() + LONGEST
    with Load(fleet.url, fleet.key, (MANY,), rate=4) as load, crowd(site):
        for thread in threads:
            thread.start()
        while time.monotonic() < deadline:
            for one in site.prometheus.get("alerts")["alerts"]:
                for fault in FAULTS:
                    if one["state"] == "firing" and matches(one["labels"], fault):
                        fired.setdefault(fault.alert, time.time())
            told = {f.alert for f in FAULTS if first(site, f) is not None}
            if len(told) == len(FAULTS):
                break
            time.sleep(1)
        for thread in threads:
            thread.join()
    print(f"\n| {'fault':62} | alert | fires after, s | message after, s |\n|---|---|---|---|")
    for fault in FAULTS:
        came = first(site, fault)
        cells = [
            f"{moment - begun[fault.alert]:.0f}" if moment else "-"
            for moment in (fired.get(fault.alert), came)
        ]
        print(f"| {fault.what} | `{fault.alert}` | {cells[0]} | {cells[1]} |")
    untold = {f.alert for f in FAULTS if first(site, f) is None}
    assert untold == set(), site.prometheus.get("alerts")["alerts"]
    # Whatever ran on the dead host is no message of its own.
    dead = {
        a["labels"]["alertname"] for a in site.messages() if a["labels"].get("host") == "roll-2"
    }
    assert dead == {"HostDown"}
    # The same goes to the robot, in its own words and signed.
    robot = receiver.posts(site.inbox, "/robot")
    assert all("timestamp=" in post["path"] and "sign=" in post["path"] for post in robot)
    texts = json.dumps([post["body"] for post in robot], ensure_ascii=False)
    assert all(fault.alert in texts for fault in FAULTS)
    failed = [a for a in load.answers if not a.good]
    print(f"{len(load.answers)} requests meanwhile, {len(failed)} of them failed")
    assert len(failed) < len(load.answers) / 10  # those at what died


def first(site: Monitored, fault: Fault) -> float | None:
    """When its first message came."""
    came = [m["at"] for m in site.messages() if matches(m["labels"], fault)]
    return min(came, default=None)
