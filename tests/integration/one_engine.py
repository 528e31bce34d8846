"""One instance of the real vLLM on CPU, started by the files that a deploy makes for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.systemd_env import read_env_file
from vllm_fleet import instance, paths
from vllm_fleet.planned import PlannedInstance
from vllm_fleet.spec.model import Model

START_SECONDS = 300
# Threads that spin while they wait would take the cores from whatever else runs beside the test.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
ARGS: dict[str, object] = {"enforce-eager": True, "max-num-seqs": 8, "dtype": "bfloat16"}


@dataclass
class Server:
    """One started instance."""

    process: subprocess.Popen[bytes]
    env: dict[str, str]
    run: Path
    state: Path
    lib: Path
    log: Path

    @property
    def port(self) -> int:
        return int(self.env["FLEET_PORT"])

    def script(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """One of our scripts, as the unit runs it."""
        return subprocess.Popen(
            ["/usr/bin/python3", "-I", str(self.lib / f"{name}.py"), *arguments],
            env={**self.env, "MAINPID": str(self.process.pid)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        content = None if body is None else json.dumps(body)
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, content, sent)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, text

    def ready(self) -> tuple[int, dict[str, object]]:
        status, _, text = self.ask("GET", "/fleet/ready")
        return status, json.loads(text)

    def wait_for_http(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                self.ready()
                return
            except OSError:
                time.sleep(0.2)
        pytest.fail(f"not up after {START_SECONDS} s: {self.log.read_text()[-3000:]}")


@contextmanager
def started(
    venv: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    args: Mapping[str, object],
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """The instance ``tiny``, below a folder of the test: checked before its start, not warm."""
    for name in ("OPT", "RELEASES", "LIB", "ETC", "RUN", "STATE"):
        place = folder / name.lower()
        place.mkdir()
        monkeypatch.setattr(paths, name, str(place))
    monkeypatch.setattr(paths, "USER", "root")
    (folder / "releases" / "cpu").symlink_to(venv)
    (folder / "run" / "tiny").mkdir()
    (folder / "state" / "tiny").mkdir()
    planned = PlannedInstance(
        host="here",
        address="127.0.0.1",
        name="tiny",
        model_name="tiny",
        model=model,
        port=free_port(),
        device="cpu",
        cards=(),
        uuids=(),
        release="cpu",
        vllm_version="0.32.0",
        weights=model.repo,
        args=dict(args),
        env={**ENVIRONMENT, **(env or {})},
        start_seconds=START_SECONDS,
        drain_seconds=300,
    )
    env_file, script = folder / "etc" / "tiny.env", folder / "etc" / "tiny.sh"
    for file in instance.files(planned) + instance.host_files("cpu"):
        if file.path.startswith(str(folder)):
            Path(file.path).write_text(file.content)
            Path(file.path).chmod(file.mode)
    environment = read_env_file(env_file)
    environment |= {"FLEET_START_SECONDS": str(START_SECONDS), "FLEET_DRAIN_SECONDS": "300"}
    lib = folder / "lib"
    checked = ["/usr/bin/python3", "-I", str(lib / "before_start.py")]
    subprocess.run(checked, env=environment, check=True, timeout=60)
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(script)], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    state = folder / "state" / "tiny"
    server = Server(process, environment, folder / "run" / "tiny", state, lib, log)
    assert (state / "running").read_text().strip() == instance.running_checksum(planned)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
