"""Two gateways with one address: real nginx and keepalived in network namespaces of their own.

The instance behind them is the stand-in of tests/stubs/engine.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from tests.stubs.gateway import Nginx, available, wait_for
from tests.unit.gateway.fleet import pool
from vllm_fleet import gateway
from vllm_fleet.gateway import keepalived
from vllm_fleet.spec.model import Gateway, HostSettings, HostSpec, Keepalived

pytestmark = [
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.skipif(
        not available() or not shutil.which("keepalived"),
        reason="needs root, nginx with its Lua module and keepalived",
    ),
    pytest.mark.timeout(180),
]

ROOT = Path(__file__).resolve().parents[2]
NET = "10.99.77"
SHARED, CLIENT = f"{NET}.100", f"{NET}.9"
PORT, STATUS = 8080, 9145


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


class Namespace:
    """A network namespace; the first one carries the switch."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = f"fleet-{os.getpid()}-{name}", address
        self.short = f"f{os.getpid() % 100000}{name}"
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        run("ip", "netns", "add", self.name)
        self.run("ip", "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        run("ip", "netns", "del", self.name)

    def plug(self, switch: Namespace) -> None:
        """A cable from `eth0` here to the switch."""
        run("ip", "link", "add", self.short, "netns", switch.name, "type", "veth",
            "peer", "name", "eth0", "netns", self.name)  # fmt: skip
        switch.run("ip", "link", "set", self.short, "master", "switch", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def run(self, *words: str) -> str:
        return run("ip", "netns", "exec", self.name, *words)

    def start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *words], stdout=out, stderr=out, cwd=ROOT
            )
        self.started.append(process)
        return process

    def addresses(self) -> str:
        return self.run("ip", "-o", "addr", "show", "dev", "eth0")


class There(Nginx):
    """nginx in a namespace."""

    def __init__(self, place: Namespace) -> None:
        super().__init__(PORT, STATUS)
        self.place = place

    def start(self) -> Self:
        self.place.run("nginx", "-c", str(self.conf))
        return self


class Gate:
    """One gateway: its namespace, nginx and keepalived."""

    def __init__(self, spec: HostSpec, place: Namespace, folder: Path) -> None:
        self.spec, self.place, self.folder = spec, place, folder
        folder.mkdir()
        self.nginx = There(place)
        model = pool("m", [8001], address=CLIENT)
        self.nginx.put(gateway.files(spec, [model], {}, (), status_port=STATUS))

    def keepalived(self, gateways: list[HostSpec]) -> None:
        nics = {"eth0": {"addresses": [f"{self.spec.address}/24"]}}
        files = {f.path: f.content for f in keepalived.files(self.spec, gateways, nics, "s3cret")}
        # nobody must reach it; pytest's folders are closed
        check = self.nginx.root / "check-gateway"
        check.write_text(files[keepalived.CHECK])
        check.chmod(0o755)
        conf = self.folder / "keepalived.conf"
        conf.write_text(files[keepalived.CONF].replace(keepalived.CHECK, str(check)))
        unit = files[keepalived.UNIT_FILE].replace("\\\n", " ")
        line = next(x for x in unit.splitlines() if x.startswith("ExecStart="))
        words = line.removeprefix("ExecStart=").replace(keepalived.CONF, str(conf))
        words = words.replace("/run/", f"{self.folder}/")
        self.process = self.place.start(*words.split(), log=self.folder / "keepalived.log")

    @property
    def holds(self) -> bool:
        return f" {SHARED}/24 " in self.place.addresses()

    def kill_nginx(self) -> None:
        pids = [self.nginx.pid, *self.nginx.workers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        (self.nginx.root / "nginx.pid").unlink()


def spec(name: str, number: int) -> HostSpec:
    settings = Gateway(listen=PORT, keepalived=Keepalived(address=f"{SHARED}/24"))
    return HostSpec(
        name=name,
        groups=("gateway",),
        address=f"{NET}.{number}",
        settings=HostSettings(gateway=settings),
    )


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[tuple[Namespace, list[Gate]]]:
    """The clients' namespace with the one instance, and two gateways."""
    specs = [spec("gw-01", 1), spec("gw-02", 2)]
    with ExitStack() as stack:
        client = stack.enter_context(Namespace("c", CLIENT))
        client.run("ip", "link", "add", "switch", "type", "bridge")
        client.run("ip", "addr", "add", f"{CLIENT}/24", "dev", "switch")
        client.run("ip", "link", "set", "switch", "up")
        client.start(
            *(sys.executable, "-m", "tests.stubs.engine"),
            *("--host", CLIENT, "--port", "8001", "--chunks", "3"),
            log=tmp_path / "engine.log",
        )
        found = []
        for name, one in zip("ab", specs, strict=True):
            place = stack.enter_context(Namespace(name, one.address))
            place.plug(client)
            gate = Gate(one, place, tmp_path / name)
            stack.callback(gate.nginx.stop)
            gate.nginx.start()
            found.append(gate)
        for gate in found:
            gate.keepalived(specs)
        yield client, found
        for gate in found:  # shown where the test has failed
            print((gate.folder / "keepalived.log").read_text())


def asked(client: Namespace, seconds: float) -> list[tuple[float, str]]:
    """(time, status) of one request after the other to the shared address; 000 is no answer."""
    found = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found.append((time.monotonic(), ask(client)))
        time.sleep(0.1)
    return found


def ask(client: Namespace, path: str = "/v1/chat/completions") -> str:
    done = subprocess.run(
        ["ip", "netns", "exec", client.name, "curl", "-s", "-m", "2", "-o", "/dev/null",
         "-w", "%{http_code}", "-d", '{"model":"m","messages":[]}',
         f"http://{SHARED}:{PORT}{path}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout


def test_either_gateway_can_die(gates: tuple[Namespace, list[Gate]]) -> None:
    client, both = gates
    wait_for(lambda: any(gate.holds for gate in both), 30)
    wait_for(lambda: ask(client) == "200", 15)
    # which of the two is a matter of milliseconds at their start; never both for long
    wait_for(lambda: sum(gate.holds for gate in both) == 1, 10)
    first, second = sorted(both, key=lambda gate: not gate.holds)

    # nginx of the holder is killed: its host lives, and lets go of the address
    began = time.monotonic()
    first.kill_nginx()
    wait_for(lambda: second.holds and not first.holds, 30)
    wait_for(lambda: ask(client) == "200", 15)
    assert {status for _, status in asked(client, 2)} == {"200"}
    print(f"nginx killed: served again after {time.monotonic() - began:.1f} s, less two of asking")

    # it comes back and takes nothing away: a move would cut what runs
    first.nginx.start()
    assert {status for _, status in asked(client, 5)} == {"200"}
    assert second.holds
    assert not first.holds

    # the other host dies as a whole: its cable is cut and it never says goodbye
    began = time.monotonic()
    client.run("ip", "link", "set", second.place.short, "down")
    wait_for(lambda: first.holds, 30)
    wait_for(lambda: ask(client) == "200", 15)
    print(f"host lost: served again after {time.monotonic() - began:.1f} s")
    assert {status for _, status in asked(client, 2)} == {"200"}


def test_each_gateway_is_seen_by_its_own_address(gates: tuple[Namespace, list[Gate]]) -> None:
    """Monitors read both, whoever holds the shared one."""
    for gate in gates[1]:
        text = gate.place.run("curl", "-s", f"http://127.0.0.1:{STATUS}/status")
        assert json.loads(text)["gateway"] == gate.spec.name
