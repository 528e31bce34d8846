"""GuideLLM, run as a program of its own: it has its own packages and its own processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_fleet.bench.load import Load, scenario

PROGRAM = "guidellm"
PROCESSES = 4  # that send; each bears hundreds of streams, and each takes seconds to start
LAST_LINES = 15

MISSING = (
    "fleet bench needs GuideLLM, which makes the load. It is a program of its own, in an "
    "environment of its own (1.3 GB with a torch for processors):\n"
    "    python3.11 -m venv .bench\n"
    "    .bench/bin/pip install --require-hashes -r requirements-bench.lock\n"
    "where pip knows PyTorch's index for processors (--extra-index-url); with another Python:\n"
    "    uv venv .bench && uv pip install --python .bench/bin/python --torch-backend cpu "
    "guidellm==0.8.1\n"
    "Then run again here, or say --generator /path/to/guidellm."
)


class GeneratorError(Exception):
    """The load could not be made; says why, and what to do."""


def find(program: str | None) -> str:
    """The program to run. Raises GeneratorError where there is none."""
    beside = Path(sys.executable).with_name(PROGRAM)
    candidates = [program] if program else [str(beside), ".bench/bin/guidellm", PROGRAM]
    for one in candidates:
        if found := shutil.which(one):
            return found
    raise GeneratorError(f"{program} cannot be run. {MISSING}" if program else MISSING)


def run(program: str, load: Load, folder: Path, api_key: str = "") -> dict[str, Any]:
    """Send a load; what GuideLLM wrote down of it. Raises GeneratorError.

    ``folder`` keeps its report and its own words. The scenario, which may hold the key, is gone
    afterwards.
    """
    report, log = folder / "guidellm.json", folder / "guidellm.log"
    plan = folder / "scenario.json"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "GUIDELLM__MAX_WORKER_PROCESSES": str(min(PROCESSES, os.cpu_count() or 1)),
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "200",
    }
    if Path(load.tokenizer).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    try:
        with open(os.open(plan, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(scenario(load, str(report), api_key), file)
        with log.open("w") as out:
            done = subprocess.run(
                [program, "run", "--config", str(plan), "--disable-console-interactive"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
    finally:
        plan.unlink(missing_ok=True)
    words = log.read_text(errors="replace").splitlines()
    if done.returncode or not report.is_file():
        raise GeneratorError(
            f"GuideLLM ended with exit code {done.returncode} and no report; it said last "
            f"(all of it: {log}):\n" + "\n".join(f"    {line}" for line in _last(words))
        )
    found = json.loads(report.read_text())
    if not isinstance(found, dict):
        raise GeneratorError(f"{report} is no report of GuideLLM")
    return found


def _last(words: Sequence[str]) -> list[str]:
    return [line[:200] for line in words if line.strip()][-LAST_LINES:]
