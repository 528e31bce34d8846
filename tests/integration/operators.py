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
        root.mkdir(parents=True, exist_ok=True)
        (root / ".testbed").symlink_to(cache)  # group_vars/demo.yml names lock and keys in it
        for name in ("inventory", "group_vars"):
            shutil.copytree(REPO / name, root / name)
        for name in ("deploy.py", "config.py"):
            shutil.copy(REPO / name, root / name)

    def change(self, how: Callable[[dict[str, Any]], None]) -> None:
        """Change group_vars/demo.yml as data."""
        path = self.root / "group_vars" / "demo.yml"
        data = yaml.safe_load(path.read_text())
        how(data)
        path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    def deploy(self, *flags: str, inventory: str = "demo") -> subprocess.CompletedProcess[str]:
        """Run deploy.py without questions; what was printed is in `stdout`."""
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pyinfra",
                "-y",
                *flags,
                f"inventory/{inventory}.py",
                "deploy.py",
            ],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(REPO), "PYINFRA_PROGRESS": "off"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=DEPLOY_SECONDS,
        )


def changes(output: str) -> dict[str, tuple[str, str, str]]:
    """(success, error, no change) by operation, from the table of results that pyinfra prints."""
    found = {}
    table = output[output.index("--> Results:") :]
    for line in table.splitlines()[2:]:
        fields = line.rsplit(maxsplit=4)
        if len(fields) == 5 and fields[1].isdigit():
            found[fields[0].strip()] = (fields[2], fields[3], fields[4])
    return found
