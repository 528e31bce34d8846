"""Waits until every host of a span is in its Ray cluster, then becomes vLLM.

    python ray_nodes.py COUNT COMMAND...      run by the release's own Python, which has Ray

vLLM asks a cluster for cards once and gives up where a host is late. gate/span.py, around this,
ends it where a host never comes.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Sequence

POLL_SECONDS = 1.0


def alive() -> int:
    """How many hosts are in the cluster; 0 while there is none."""
    import ray  # type: ignore[import-not-found]

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")
    return sum(1 for node in ray.nodes() if node.get("Alive"))


def main(count: int, command: Sequence[str]) -> None:
    """Never returns."""
    said = -1
    while True:
        try:
            found = alive()
        except Exception as error:  # of Ray's many kinds; while it starts all of them come
            if said < 0:
                print("ray_nodes: not up yet: %s" % error, flush=True)
            found = 0
        if found != said:
            said = found
            print("ray_nodes: %d of %d hosts" % (found, count), flush=True)
        if found >= count:
            os.execv(command[0], list(command))
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
