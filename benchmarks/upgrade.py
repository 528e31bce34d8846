"""An upgrade under load against restarts as they are done without us: failed requests and time.

    sudo python benchmarks/upgrade.py [--rate 6] [--start-seconds 20]

Three hosts of the test bed, five instances of two pools (one with a single instance), all behind
the same gateway, one load for all three ways: a plain loop of `systemctl restart` without
waiting; one restart after another, each waited for, as Ansible's `serial: 1` does; and
upgrade.py, with canaries, probes and holds as they are by default in the tests. The engine is
the stand-in, which takes --start-seconds to start. Units and gateway are ours in all three: they
drain before a stop and hold requests that nobody can serve, so the loops do better here than
they would elsewhere. The last line is one JSON object. Root; the bed is removed again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.integration import rolling  # noqa: E402
from tests.integration.rolling import INSTANCES, RollingFleet  # noqa: E402
from tests.testbed.bed import Bed  # noqa: E402
from tests.testbed.standin_wheel import Behaviour  # noqa: E402

SETTLE_SECONDS = 5.0


@dataclass
class Outcome:
    """One way, measured."""

    way: str
    seconds: float
    requests: int
    failed: int
    longest: float  # seconds of the answer that took longest
    least_ready: int  # of the pool of four, at the worst moment


def restart(fleet: RollingFleet, *, wait: bool) -> None:
    """`systemctl restart` of every instance, one after another."""
    for name in INSTANCES:
        host, _, instance = name.partition("/")
        flag = "" if wait else "--no-block "
        fleet.bed.host(host).sh(f"systemctl restart {flag}vllm@{instance}", timeout=300)


def upgrade(fleet: RollingFleet) -> None:
    """upgrade.py to the version that group_vars want."""
    done = fleet.run("upgrade.py")
    if done.returncode:
        raise SystemExit(done.stdout)


def measured(fleet: RollingFleet, way: str, do: Callable[[], None], rate: float) -> Outcome:
    """Do it under load, and wait until everything is ready again."""
    with fleet.watched(rate) as watched:
        time.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        do()
        while time.monotonic() - began < 600:
            time.sleep(0.5)
            last = watched.seen[-1]
            if not last.out(rolling.MANY) and not last.out(rolling.ONE):
                break
        took = time.monotonic() - began
        time.sleep(SETTLE_SECONDS)
    answers = watched.load.answers
    return Outcome(
        way,
        round(took, 1),
        len(answers),
        len(watched.load.bad),
        round(max(one.ended - one.sent for one in answers), 1),
        4 - watched.most_out(rolling.MANY),
    )


def main() -> int:
    """Run all three and print them; 1 where upgrade.py lost a request."""
    parser = argparse.ArgumentParser(description="Upgrade under load against plain restarts.")
    parser.add_argument("--rate", type=float, default=6, help="Requests a second.")
    parser.add_argument("--start-seconds", type=float, default=20, help="Of the stand-in.")
    arguments = parser.parse_args()
    slow = Behaviour(start_seconds=arguments.start_seconds)
    folder = Path(tempfile.mkdtemp(prefix="fleet-upgrade-"))
    caches = HERE.parent / ".testbed"
    bed = Bed(
        Path(os.environ.get("FLEET_TESTBED") or caches / "bench"),
        Path(os.environ.get("FLEET_TESTBED_CACHE") or caches),
    )
    os.environ["FLEET_TESTBED"] = str(bed.root)
    found = []
    try:
        bed.up([], uplink=False)
        fleet = rolling.make(bed, folder)
        with rolling.served(fleet):
            fleet.wants("0.31.0", slow)
            done = fleet.run("deploy.py")
            if done.returncode:
                raise SystemExit(done.stdout)
            ways: dict[str, Callable[[], None]] = {
                "systemctl restart": lambda: restart(fleet, wait=False),
                "one after another": lambda: restart(fleet, wait=True),
                "upgrade.py": lambda: upgrade(fleet),
            }
            for way, do in ways.items():
                if way == "upgrade.py":
                    fleet.wants("0.32.0", slow)
                found.append(measured(fleet, way, do, arguments.rate))
    finally:
        bed.down()
        subprocess.run(["rm", "-rf", str(folder)], check=False)
    print(f"{'way':20} {'seconds':>8} {'requests':>9} {'failed':>7} {'longest':>8} {'ready':>6}")
    for one in found:
        print(
            f"{one.way:20} {one.seconds:8.1f} {one.requests:9} {one.failed:7} "
            f"{one.longest:7.1f}s {one.least_ready:4}/4"
        )
    print(json.dumps([asdict(one) for one in found]))
    return 1 if found[-1].failed else 0


if __name__ == "__main__":
    sys.exit(main())
