"""An operator's own directory for a test: its inventory, its settings, its runs of pyinfra."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
DEPLOY_SECONDS = 900


class Operator:
    """A directory with inventory/demo.py and group_vars, changed by a test, run for real."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self.seconds = DEPLOY_SECONDS  # how long one run may take
        root.mkdir(parents=True, exist_ok=True)
        (root / ".testbed").symlink_to(cache)  # group_vars/demo.yml names lock and keys in it
        for name in ("inventory", "group_vars"):
            shutil.copytree(REPO / name, root / name)
        scripts = (
            "deploy.py",
            "upgrade.py",
            "rollback.py",
            "maintain.py",
            "nccl.py",
            "bench.py",
            "config.py",
        )
        for name in scripts:
            shutil.copy(REPO / name, root / name)

    def change(self, how: Callable[[dict[str, Any]], None]) -> None:
        """Change group_vars/demo.yml as data."""
        path = self.root / "group_vars" / "demo.yml"
        data = yaml.safe_load(path.read_text())
        how(data)
        path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    def deploy(self, *flags: str, inventory: str = "demo") -> subprocess.CompletedProcess[str]:
        """Run deploy.py without questions; what was printed is in `stdout`."""
        return self.run("deploy.py", *flags, inventory=inventory)

    def run(
        self, script: str, *flags: str, inventory: str = "demo"
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the deploy files without questions; what was printed is in `stdout`."""
        return subprocess.run(
            self._words(script, flags, inventory),
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=self.seconds,
        )

    def start(self, script: str, *flags: str, inventory: str = "demo") -> subprocess.Popen[str]:
        """The same, under way: what it prints is read from its `stdout`."""
        return subprocess.Popen(
            self._words(script, flags, inventory),
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _words(self, script: str, flags: tuple[str, ...], inventory: str) -> list[str]:
        program = [sys.executable, "-m", "pyinfra", "-y"]
        return [*program, f"inventory/{inventory}.py", script, *flags]

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(REPO), "PYINFRA_PROGRESS": "off"}


def changes(output: str) -> dict[str, tuple[str, str, str]]:
    """(success, error, no change) by operation, from the table of results that pyinfra prints."""
    found = {}
    table = output[output.index("--> Results:") :]
    for line in table.splitlines()[2:]:
        fields = line.rsplit(maxsplit=4)
        if len(fields) == 5 and fields[1].isdigit():
            found[fields[0].strip()] = (fields[2], fields[3], fields[4])
    return found
