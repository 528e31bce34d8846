"""Weights looked at again: `weights.py verify` against sha256sum, and a run on complete weights.

    python benchmarks/verify.py [--mib 2048] [--files 16] [--rounds 3]

A model of random shards is fetched from the test bed's hub by what runs on hosts
(vllm_fleet/onhost/weights.py). Then, in turns: sha256sum over all files on one core, sha256sum on
all cores (xargs -P), and ours. All files are in the page cache, so that it is the hash that is
compared; from a disk, its speed is the limit of all three. For each: MiB in a second, and in a
second of a core (user and system time), which other programs on the machine disturb less. A
second run on complete weights is timed, and what it reads is counted by the kernel. Bounds: a
core hashes at least nine tenths of what sha256sum does on it; a second run ends within a second
and reads less than a hundredth of the data. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from fanout import REPO, SCRIPT, make_model  # noqa: E402

from tests.testbed import hub  # noqa: E402

HASH_BOUND, AGAIN_BOUND, READ_BOUND = 0.9, 1.0, 0.01
# Runs a script and says how many bytes the process asked the kernel to read, beside its start.
COUNTED = """\
import os.path, runpy, sys
def read():
    return int(open("/proc/self/io").read().split()[1])
script, sys.argv[:] = sys.argv[1], sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
before = read()
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as ended:
    print("bytes read:", read() - before, flush=True)
    raise
"""


def timed(argv: list[str], stdin: str = "") -> tuple[float, float, str]:
    """(seconds, seconds of a core, output) of a command."""
    began, before = time.monotonic(), cores_used()
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{argv}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - began, cores_used() - before, done.stdout


def cores_used() -> float:
    """Seconds of cores that the commands took so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run the comparison; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the files lie; default: the temporary directory")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    root = Path(tempfile.mkdtemp(prefix="verify-", dir=options.folder))
    try:
        make_model(root / "hub" / REPO, options.mib, options.files)
        final = root / "models/bench/main"
        with hub.running(root / "hub") as endpoint:
            listing = f"{endpoint}/api/v1/models/{REPO}/repo/files?Revision=master"
            urllib.request.urlopen(listing, timeout=600).read()  # once, so that it has hashed them
            order = json.dumps(
                {
                    "name": "bench", "source": "huggingface", "repo": REPO, "revision": "main",
                    "directory": str(final), "stamp": str(final / ".verified.json"), "needs": [],
                    "endpoint": endpoint, "state": str(root / "state"),
                }
            )  # fmt: skip
            fetch = [sys.executable, "-c", COUNTED, str(SCRIPT), "fetch", "--settings", "-"]
            timed(fetch, order)
            asked = len(hub.requests(root / "hub"))
            shutil.rmtree(root / "hub" / REPO)  # nobody asks for it any more
            again, _, output = timed(fetch, order)
            if "stands" not in output or len(hub.requests(root / "hub")) != asked:
                sys.exit(f"the second run did more than look:\n{output}")
        read = int(output.rsplit("bytes read: ", 1)[1])
        shards = [str(path) for path in sorted(final.glob("*.safetensors"))]
        size = sum(os.stat(path).st_size for path in shards)
        each = "\0".join(shards)
        ways: dict[str, list[str]] = {
            "sha256sum, one core": ["sha256sum", *shards],
            f"sha256sum, {cores} at once": [
                "xargs", "-0", "-P", str(cores), "-n", "1", "sha256sum",
            ],
            "weights.py verify": [
                sys.executable, str(SCRIPT), "verify", "--models", str(root / "models"),
            ],
        }  # fmt: skip
        for path in shards:  # into the page cache
            with open(path, "rb") as file:
                while file.read(8 << 20):
                    pass
        rates: dict[str, list[float]] = {way: [] for way in ways}
        by_core: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, argv in ways.items():
                seconds, used, _ = timed(argv, each if argv[0] == "xargs" else "")
                rates[way].append(size / seconds / (1 << 20))
                by_core[way].append(size / used / (1 << 20))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    middle = {way: statistics.median(values) for way, values in rates.items()}
    core = {way: statistics.median(values) for way, values in by_core.items()}
    one, _, ours = core.values()
    for way in ways:
        print(
            f"{way:28} {middle[way]:6.0f} MiB/s {core[way]:6.0f} MiB/s of a core "
            f"{core[way] / one:5.2f} x"
        )
    print(
        f"a second run on complete weights: {again:.2f} s, {read / (1 << 20):.1f} MiB read of "
        f"{size / (1 << 20):.0f}"
    )
    met = ours / one >= HASH_BOUND and again < AGAIN_BOUND and read < READ_BOUND * size
    print(
        json.dumps(
            {
                "mib": options.mib, "cores": cores,
                "mib_per_second": {way: round(rate) for way, rate in middle.items()},
                "mib_per_second_of_a_core": {way: round(rate) for way, rate in core.items()},
                "ratio": round(ours / one, 2),
                "again_seconds": round(again, 2), "again_read_share": round(read / size, 5),
                "met": met,
            }
        )
    )  # fmt: skip
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
