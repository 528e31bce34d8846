"""ExecStop of an instance: no new request, wait for those in flight, then end the server.

Environment: FLEET_INSTANCE, FLEET_RUN, FLEET_PORT, FLEET_DRAIN_SECONDS, FLEET_RANK of a span,
and MAINPID while the server lives. Requests of a span are at its rank 0: another rank has it
drain before the span ends with this rank.
Exits 0 also when requests were cut: a stop must go through. It says how many.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
import time
from typing import Mapping

SHUTDOWN_SECONDS = 30.0  # from SIGTERM to SIGKILL; vLLM alone may hang there for ever
# Gateways ask every instance about twice a second. Ending the server before they know would
# break requests that it had accepted and not yet read: those are not safe to send again.
TOLD_SECONDS = 2.0
POLL_SECONDS = 0.2
SAY_SECONDS = 15.0


def main(env: Mapping[str, str]) -> int:
    """Drain and end one instance; the exit code."""
    name = env["FLEET_INSTANCE"]
    told = 0.0
    if int(env.get("FLEET_RANK") or 0) > 0:
        return leave(env)
    if remove_ready(env["FLEET_RUN"]):
        told = TOLD_SECONDS
        say("%s: not ready any more, draining" % name)
    if not env.get("MAINPID", "").isdigit():
        # systemd stops what is left of a server that ended by itself: nothing can be finished
        say("%s: the server has ended already" % name)
        return 0
    pid = int(env["MAINPID"])
    begun = time.monotonic()
    left = drain(name, pid, int(env["FLEET_PORT"]), float(env["FLEET_DRAIN_SECONDS"]), told)
    seconds = time.monotonic() - begun
    if left:
        say(
            "%s: %d requests still ran after drain_seconds (%.0f s) and are cut; raise "
            "drain_seconds in group_vars where answers take longer" % (name, left, seconds)
        )
    else:
        say("%s: drained in %.1f s" % (name, seconds))
    end(name, pid)
    return 0


def leave(env: Mapping[str, str]) -> int:
    """End a rank that answers nobody itself: rank 0 is told first, and drains; the exit code."""
    name, run = env["FLEET_INSTANCE"], env["FLEET_RUN"]
    if not env.get("MAINPID", "").isdigit():
        say("%s: it has ended already" % name)
        return 0
    pid = int(env["MAINPID"])
    with open(os.path.join(run, "leaving"), "w"):
        say("%s: rank 0 is told, and drains" % name)
    begun = time.monotonic()
    deadline = begun + float(env["FLEET_DRAIN_SECONDS"]) + 2 * TOLD_SECONDS
    while alive(pid) and not os.path.exists(os.path.join(run, "drained")):
        if time.monotonic() >= deadline:
            say("%s: rank 0 has not drained within drain_seconds" % name)
            break
        time.sleep(POLL_SECONDS)
    say("%s: drained after %.1f s" % (name, time.monotonic() - begun))
    end(name, pid)
    return 0


def remove_ready(run: str) -> bool:
    """From here on the gate refuses every new request. Whether it let any in before."""
    try:
        os.unlink(os.path.join(run, "ready"))
    except FileNotFoundError:
        return False
    return True


def drain(name: str, pid: int, port: int, seconds: float, told_seconds: float) -> int:
    """Wait until nothing is in flight, the server is gone or the time is over.

    At least ``told_seconds``, for gateways to learn of it.

    Returns how many requests were in flight at the end, 0 where the server is gone.
    """
    told = time.monotonic() + told_seconds
    deadline = max(told, time.monotonic() + seconds)
    said = time.monotonic()
    last = 0
    while True:
        if not alive(pid):
            return 0
        try:
            last = in_flight(port)
        except ConnectionRefusedError:
            return 0
        except (OSError, ValueError, http.client.HTTPException) as error:
            # A server too busy to answer has requests: wait, never cut them for this.
            last = max(last, 1)
            state = "does not answer (%s)" % error
        else:
            state = "%d requests in flight" % last
        now = time.monotonic()
        if not last and now >= told:
            return 0
        if now >= deadline:
            return last
        if now - said >= SAY_SECONDS:
            said = now
            say("%s: %s; %.0f s left to drain" % (name, state, deadline - now))
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - now)))


def in_flight(port: int) -> int:
    """What the gate counts. Raises OSError, ValueError or HTTPException where it cannot tell."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/fleet/ready")
        count = json.loads(connection.getresponse().read())["in_flight"]
    except KeyError:
        raise ValueError("no in_flight in the answer of /fleet/ready") from None
    finally:
        connection.close()
    return int(count)


def end(name: str, pid: int) -> None:
    """SIGTERM, and SIGKILL when the server has not gone by then."""
    send_signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while time.monotonic() < deadline:
        if not alive(pid):
            return
        time.sleep(0.1)
    say("%s: hangs %.0f s after SIGTERM: killed" % (name, SHUTDOWN_SECONDS))
    send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, number: int) -> None:
    """Send a signal; no error when the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def say(text: str) -> None:
    """One line to the journal, at once."""
    print("stop: " + text, flush=True)


if __name__ == "__main__":
    sys.exit(main(os.environ))
