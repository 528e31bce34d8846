"""nvitop-exporter as the tools venv of a host holds it: its own names of metrics.

Without a card here: the exporter's collectors are asked, not a card.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.unit.monitoring.test_dashboard import EXPORTERS
from vllm_fleet import dashboard

pytestmark = [pytest.mark.long, pytest.mark.integration]

# What asks the driver for its version is answered here.
NAMES = """\
from nvitop import Device
from nvitop_exporter.exporter import PrometheusExporter
from prometheus_client import CollectorRegistry
for name in ("count", "driver_version", "cuda_driver_version"):
    setattr(Device, name, staticmethod(lambda: "0"))
registry = CollectorRegistry()
PrometheusExporter([], registry=registry, hostname="host")
print(*(family.name for family in registry.collect()))
"""


def test_what_the_board_of_cards_asks_is_what_the_exporter_calls_it(tools: Path) -> None:
    done = subprocess.run(
        [tools / "bin/python", "-c", NAMES], capture_output=True, text=True, check=True
    )
    exported = set(done.stdout.split())
    asked = {name for name in EXPORTERS if name.startswith("gpu_")}
    assert len(asked) == 3
    assert asked <= exported
    board = dashboard.text("card", exporters=("nvitop",))
    assert all(name in board for name in asked)
