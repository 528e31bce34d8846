"""Hosts for scripts of ours that need a network and no more: network and mount namespaces.

Each has an interface in one switch, an /etc and /var/lib of its own, and no systemd. The scripts
run as they do on a host, by this machine's Python.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.testbed.shell import run
from vllm_fleet.operations.remote import BOOT
from vllm_fleet.rollout.hosts import SCRIPTS, Failed, Json, result_of

ONHOST = Path(__file__).parents[2] / "vllm_fleet"
# In a mount namespace of its own: what is written to /etc and /var/lib stays in it.
PID_ONE = """
set -eu
mount -t tmpfs tmpfs "$1"
mkdir "$1/u" "$1/w"
mount -t overlay overlay -o lowerdir=/etc,upperdir="$1/u",workdir="$1/w" /etc
mount -t tmpfs tmpfs /var/lib
mkdir -p /var/lib/vllm/_rollout
echo up
exec sleep infinity
"""


class Namespaces:
    """Some hosts; also what a change asks of hosts (vllm_fleet.rollout.hosts.Hosts)."""

    def __init__(self, folder: Path, names: Sequence[str], tag: str = "vfn") -> None:
        self.names, self.tag = list(names), f"{tag}{os.getpid() % 10000}"
        self.said: list[str] = []
        self.first: dict[str, subprocess.Popen[str]] = {}
        run(["ip", "netns", "add", self.tag])
        run(["ip", "-n", self.tag, "link", "add", "br0", "mtu", "1500", "type", "bridge"])
        run(["ip", "-n", self.tag, "link", "set", "br0", "up"])
        for number, name in enumerate(self.names, 1):
            space = self.space(name)
            run(["ip", "netns", "add", space])
            pair = ["type", "veth", "peer", "name", f"p{number}", "netns", self.tag]
            run(["ip", "-n", space, "link", "add", "eth0", *pair])
            run(["ip", "-n", self.tag, "link", "set", f"p{number}", "master", "br0", "up"])
            self.ip(name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self.ip(name, "link", "set", "eth0", "up")
            self.ip(name, "link", "set", "lo", "up")
            place = folder / name
            place.mkdir()
            words = ["ip", "netns", "exec", space, "unshare", "--mount", "bash", "-c", PID_ONE]
            process = subprocess.Popen(
                [*words, "bash", str(place)], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            self.first[name] = process

    def space(self, name: str) -> str:
        return f"{self.tag}-{self.names.index(name) + 1}"

    def address(self, name: str) -> str:
        return f"10.81.0.{self.names.index(name) + 1}"

    def ip(self, name: str, *words: str) -> None:
        run(["ip", "-n", self.space(name), *words])

    def inside(self, name: str, *words: str) -> list[str]:
        """The command line that runs words on a host."""
        return ["nsenter", "-t", str(self.first[name].pid), "-m", "-n", *words]

    def sh(self, name: str, command: str) -> str:
        done = subprocess.run(
            self.inside(name, "sh", "-c", command), capture_output=True, text=True, check=False
        )
        return done.stdout

    def pids(self, name: str) -> set[int]:
        """What runs on a host, its first process left out."""
        listed = run(["ip", "netns", "pids", self.space(name)]).stdout.split()
        return {int(pid) for pid in listed} - {self.first[name].pid}

    def settled(self, seconds: float = 3.0) -> dict[str, list[str]]:
        """What still runs on each host, once whatever ends has ended."""
        deadline = time.monotonic() + seconds
        while any(self.pids(name) for name in self.names) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {
            name: [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]
            for name in self.names
            if (pids := self.pids(name))
        }

    def power_cut(self, name: str) -> None:
        """Everything on a host is gone at once, and its cable is out."""
        self.ip(name, "link", "set", "eth0", "down")
        self.signal(name, signal.SIGKILL)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Give a signal to all that runs on a host."""
        for pid in self.pids(name):
            os.kill(pid, number)

    def close(self) -> None:
        for name, process in self.first.items():
            self.signal(name, signal.SIGKILL)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            run(["ip", "netns", "del", self.space(name)])
        run(["ip", "netns", "del", self.tag])

    # --- as a change sees them

    def start(self, host: str, script: str, order: Mapping[str, Any]) -> subprocess.Popen[str]:
        """A script of ours under way on a host; its output is read from its `stdout`."""
        sources = []
        for name in SCRIPTS[script]:
            folder, _, module = name.rpartition("/")
            text = (ONHOST / (folder or "onhost") / f"{module}.py").read_text()
            sources.append((module, text))
        process = subprocess.Popen(
            self.inside(host, "python3", "-u", "-c", BOOT, script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(f"{json.dumps(sources)}\n{json.dumps(dict(order))}\n")
        return process

    def ask(self, host: str, script: str, order: Mapping[str, Any]) -> Json:
        process = self.start(host, script, order)
        assert process.stdout is not None
        with process.stdout as stdout:
            lines = stdout.read().splitlines()
        if process.wait() < 0:
            raise Failed(f"{host}: connection lost")
        return result_of(host, lines)

    def say(self, text: str) -> None:
        self.said.append(text)

    def save(self, name: str, lines: Sequence[str]) -> str:
        return name
