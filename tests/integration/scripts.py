"""Scripts of vllm_fleet/onhost, run on this machine as a host runs them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONHOST = ROOT / "vllm_fleet/onhost"
BED = Path(os.environ.get("FLEET_TESTBED_CACHE") or ROOT / ".testbed")
PYTHON = "/usr/bin/python3"


def run_script(name: str, settings: dict[str, object], place: Path) -> tuple[int, str]:
    process = start_script(name, settings, place)
    output, _ = process.communicate(timeout=580)
    print(output)
    return process.returncode, output


def start_script(name: str, settings: dict[str, object], place: Path) -> subprocess.Popen[str]:
    file = place / f"{name}.json"
    file.write_text(json.dumps(settings))
    return subprocess.Popen(
        [PYTHON, str(ONHOST / name), "build", "--settings", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
