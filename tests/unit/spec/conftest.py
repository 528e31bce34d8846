"""An operator's directory in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_fleet.spec.load import Result, check_inventory

INVENTORY = """\
gpu = ["gpu-01", "gpu-02"]
gateway = ["gw-01"]
monitoring = ["gw-01"]
"""
GOOD = """\
vllm_version: "0.21.0"
models:
  glm:
    repo: ZhipuAI/GLM-4.5-Air
instances:
  - name: a
    hosts: [gpu-01, gpu-02]
    model: glm
    cards: [0, 1]
    port: 8001
"""


class Project:
    """inventory/prod.py and group_vars/, good until a test writes something else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("inventory/prod.py", INVENTORY)
        self.write("group_vars/prod.yml", GOOD)

    def write(self, name: str, text: str) -> Path:
        """Write a file, by its name below the root."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def good(self, *changes: tuple[str, str], then: str = "") -> None:
        """Write prod.yml: the good one with each first text replaced, and more after it."""
        text = GOOD
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} must stand once"
            text = text.replace(old, new)
        self.write("group_vars/prod.yml", text + then)

    def check(self) -> Result:
        """What ``fleet check`` finds."""
        return check_inventory(str(self.root / "inventory/prod.py"))

    def complaints(self) -> list[str]:
        """The complaints as an operator reads them."""
        return [str(complaint) for complaint in self.check().complaints]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)
