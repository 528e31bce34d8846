"""What the generator of `fleet bench` costs: its ceiling, and what it adds to each time.

    python benchmarks/generator.py [--generator .bench/bin/guidellm] [--engine 120]

The stub engine of the tests (tests/stubs) answers at once for the ceiling, and at a set pace for
what is added. Both run on this machine, side by side with the generator, so that the ceiling is
one of the two together: the generator's own is higher. `--engine N`: tokens a second that an
engine was measured with; the ceiling must be ten times that. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.ports import free_port  # noqa: E402
from vllm_fleet.bench.generator import find  # noqa: E402
from vllm_fleet.bench.load import Length, Load  # noqa: E402
from vllm_fleet.bench.measure import measure  # noqa: E402
from vllm_fleet.bench.result import Result  # noqa: E402

FIRST, GAP, CHUNKS = 0.2, 0.02, 64
CEILING_FACTOR = 10


@contextmanager
def stub(first: float, gap: float) -> Iterator[str]:
    """The stub engine in a process of its own; its address."""
    port = free_port()
    words = ["--port", str(port), "--first-byte", str(first), "--chunk-gap", str(gap)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stubs.engine", *words, "--chunks", str(CHUNKS)],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout
        process.stdout.readline()  # it says so when it listens
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def run(program: str, url: str, streams: tuple[int, ...], requests: int) -> Result:
    """One ramp against the stub."""
    load = Load(url, "stub", "", streams, Length(64), Length(CHUNKS), requests_per_stream=requests)
    with tempfile.TemporaryDirectory() as folder:
        return measure(program, load, Path(folder), name="stub")


def main() -> int:
    """Measure, print a table and the JSON line; 1 where the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generator")
    parser.add_argument("--engine", type=float, help="tokens a second that an engine gave")
    args = parser.parse_args()
    program, load = find(args.generator), os.getloadavg()[0]
    began = time.monotonic()
    with stub(0.0, 0.0) as url:
        fast = run(program, url, (1, 8, 32), 20)
    with stub(FIRST, GAP) as url:
        paced = run(program, url, (1, 16), 4)
    ceiling = max(level.out_per_second for level in fast.levels)
    print(f"load before {load:.1f}, {os.cpu_count()} cores, {time.monotonic() - began:.0f} s\n")
    print(f"{'streams':>8}{'tokens/s':>10}{'TTFT p50 ms':>13}{'ITL mean ms':>13}")
    for level in (*fast.levels, *paced.levels):
        print(
            f"{level.streams:>8}{level.out_per_second:>10.0f}{level.first_token.p50 * 1e3:>13.1f}"
            f"{level.between_tokens.mean * 1e3:>13.2f}"
        )
    added = {
        str(level.streams): {
            "first_token_ms": round((level.first_token.p50 - FIRST) * 1e3, 2),
            "between_tokens_ms": round((level.between_tokens.mean - GAP) * 1e3, 3),
        }
        for level in paced.levels
    }
    found: dict[str, object] = {"ceiling_tokens_per_second": round(ceiling), "added": added}
    good = True
    if args.engine:
        found["times_the_engine"] = round(ceiling / args.engine, 1)
        good = ceiling >= CEILING_FACTOR * args.engine
        found["met"] = good
    print(json.dumps(found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
