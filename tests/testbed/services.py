"""Processes that serve the hosts from the fabric: the model hub and the wheels."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.testbed.shell import BedError, until

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Process:
    """A process of ours that outlives the command: a pid, and when it started (clock ticks)."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Whether it still runs; another process that got its pid later does not count."""
        return _start_time(self.pid) == self.started

    def stop(self) -> None:
        """End it: asked first, killed after 5 s."""
        for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            if not self.alive():
                return
            os.kill(self.pid, number)
            if until(lambda: not self.alive(), seconds):
                return
        raise BedError(f"process {self.pid} does not end")

    def as_json(self) -> dict[str, int]:
        return asdict(self)


def start(
    module: str, root: Path, address: str, port: int, prefix: list[str], log: Path
) -> Process:
    """Run ``python -m module --root ROOT --listen ADDRESS:PORT`` and wait until it listens.

    ``prefix`` is put before it, to enter the fabric's namespace.
    """
    root.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", module, "--root", str(root), "--listen", f"{address}:{port}"]
    with log.open("ab") as out:
        child = subprocess.Popen(
            [*prefix, *argv],
            cwd=REPO,
            # no name server answers in there: a look-up must not hold up a server
            env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    process = Process(child.pid, _start_time(child.pid) or 0)
    ready = until(lambda: child.poll() is not None or _listens(address, port), 120, 0.1)
    if not ready or child.poll() is not None:
        if child.poll() is None:
            process.stop()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        raise BedError(f"{module} does not listen on {address}:{port}; {log} ends:\n{tail}")
    return process


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def _start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None where it does not run (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    words = text.rpartition(")")[2].split()
    return None if words[0] == "Z" else int(words[19])
