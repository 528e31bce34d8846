"""Start and retire instances, and wait until each is warm.

Runs as root with the host's own Python, standard library only. Reads one JSON object from
standard input: ``{"action": "start" | "retire", "instances": [{"name", "seconds"}]}``.
Starts are asked for without blocking and then watched, so that a start that takes half an hour
shows where it is, and one that fails is seen at once. Exit code 1 when any instance failed.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

STATE = "/var/lib/vllm"
RUN = "/run/vllm"
POLL_SECONDS = 0.5
SAY_SECONDS = 10
JOURNAL_LINES = 300
# The unit tries again by itself: a first failure may be a card that another process had not
# let go of yet, a second one is not.
TRIES = 2


def systemctl(*words: str) -> Tuple[int, str]:
    """Exit code and output of systemctl."""
    done = subprocess.run(
        ["systemctl", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode, done.stdout.decode(errors="replace").strip()


def show(unit: str) -> Dict[str, str]:
    """Fields of a unit."""
    fields = "ActiveState,SubState,Result,NRestarts,MainPID,InvocationID"
    return dict(
        line.split("=", 1)
        for line in systemctl("show", "-p", fields, unit)[1].splitlines()
        if "=" in line
    )


def journal(unit: str, since: float) -> List[str]:
    """What a unit logged since a moment (seconds since the epoch), its last lines."""
    words = ["journalctl", "-u", unit, f"--since=@{int(since)}", "-n", str(JOURNAL_LINES)]
    done = subprocess.run(
        [*words, "-o", "cat", "--no-pager"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout.decode(errors="replace").splitlines()


def say(text: str) -> None:
    """A progress line, at once; an operator who is gone is no reason to stop half way."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


class Start:
    """One start that is under way."""

    def __init__(self, name: str, seconds: int) -> None:
        self.name = name
        self.unit = f"vllm@{name}.service"
        self.seconds = seconds
        self.began = time.time()
        self.outcome: Optional[str] = None
        self.said = 0.0
        self.waits = False  # of a span: whether it failed for want of other ranks
        systemctl("reset-failed", self.unit)
        before = show(self.unit)
        # A start that is under way already (boot, a crash) is watched, not begun again.
        under_way = before.get("ActiveState") in ("activating", "active")
        code, text = systemctl("enable", self.unit)
        if code == 0 and not under_way:
            code, text = systemctl("start", "--no-block", self.unit)
        if code != 0:
            self.outcome = f"systemctl start: {text}"
        self.restarts = int(before.get("NRestarts") or 0) if under_way else 0
        # A new start has another id; until systemd has begun it, the old state is shown.
        self.replaced = None if under_way else before.get("InvocationID")
        say(f"{name}: {'is starting already' if under_way else 'starting'}")

    def look(self) -> bool:
        """Whether the start has ended; ``outcome`` is then "" or why it failed."""
        if self.outcome is not None:
            return True
        now = show(self.unit)
        active, took = now.get("ActiveState"), time.time() - self.began
        if self.replaced and now.get("InvocationID") == self.replaced and active != "failed":
            active = "deactivating"  # still the process that is to be replaced
        failures = int(now.get("NRestarts") or 0) - self.restarts
        if active == "active":
            self.outcome = ""
            say(f"{self.name}: ready after {took:.0f} s")
            self.tell_memory(now.get("InvocationID", ""))
        elif active == "failed" or failures >= TRIES:
            result = now.get("Result")  # "success" while systemd waits to try again
            why = "" if result in (None, "", "success") else f"{result}, "
            self.outcome = f"failed to start ({why}{max(failures, 1)} tries)"
        elif active == "inactive" and took > 5:
            self.outcome = "stopped by somebody else while starting"
        elif (lacking := self.lacking()) and lacking["for"] > lacking["join_seconds"]:
            self.waits = True
            self.outcome = f"waits for its span for {lacking['for']:.0f} s: {lacking['why']}"
        elif took > self.seconds:
            self.outcome = f"not ready within start_seconds ({self.seconds} s)"
        elif took - self.said >= SAY_SECONDS:
            self.said = took
            words = f"{active} ({now.get('SubState')})"
            say(f"{self.name}: {lacking.get('why') or words} for {took:.0f} s")
        return self.outcome is not None

    def lacking(self) -> Dict[str, Any]:
        """Of a span: which ranks it waits for, and since when; empty where for none."""
        try:
            with open(os.path.join(RUN, self.name, "span.json"), encoding="utf-8") as file:
                found: Dict[str, Any] = json.load(file)
            if found["state"] != "waiting":
                return {}
            return {**found, "for": time.time() - max(self.began, float(found["since"]))}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def tell_memory(self, invocation: str) -> None:
        """What bootlog.py found of this very start, differences from the plan first."""
        try:
            with open(os.path.join(STATE, self.name, "actual.json"), encoding="utf-8") as file:
                report = json.load(file)
        except (OSError, ValueError):
            return
        if report.get("invocation") != invocation:
            return
        for one in report.get("differences", ()):
            say(
                f"{self.name}: warning: {one['what']}: planned {one['planned']:,}, "
                f"found {one['actual']:,} ({one['percent']:+} %): {one['cause']}"
            )


def start(order: Dict[str, Any]) -> int:
    """Start, watch, and tell of each failure with its log."""
    starts = [Start(i["name"], i["seconds"]) for i in order["instances"]]
    waiting = list(starts)
    while waiting:
        waiting = [one for one in waiting if not one.look()]
        if waiting:
            time.sleep(POLL_SECONDS)
    failed = [one for one in starts if one.outcome]
    for one in failed:
        for line in journal(one.unit, one.began):
            say(f"journal {one.name} | {line}")
        # Left alone it would be tried again and again, cold and in nobody's sight. What waits
        # for other ranks has loaded nothing, and goes on by itself when they come.
        if not one.waits:
            systemctl("stop", one.unit)
        say(f"failed {one.name} | {one.outcome}")
    return 1 if failed else 0


def retire(order: Dict[str, Any]) -> int:
    """Drain, stop and disable instances that are no longer wanted; remove their state."""
    code = 0
    for instance in order["instances"]:
        name, unit = instance["name"], f"vllm@{instance['name']}.service"
        say(f"{name}: no longer in the plan: draining and stopping")
        failed, text = systemctl("disable", "--now", unit)
        if failed and "does not exist" not in text:
            say(f"{name}: systemctl disable --now: {text}")
            code = 1
            continue
        systemctl("reset-failed", unit)
        exported = os.path.join(STATE, "metrics", f"vllm_fleet_plan_{name}.prom")
        if os.path.exists(exported):
            os.unlink(exported)
        # What served well here is of no use to another instance of this name, one day.
        record = os.path.join(STATE, "_rollout", "instances", name + ".json")
        if os.path.exists(record):
            os.unlink(record)
        folder = os.path.join(STATE, name)
        if os.path.isdir(folder) and not os.path.islink(folder):
            shutil.rmtree(folder)
        say(f"{name}: stopped and removed")
    return code


def main() -> int:
    """Do what stands on standard input."""
    order = json.load(sys.stdin)
    return retire(order) if order["action"] == "retire" else start(order)


if __name__ == "__main__":
    sys.exit(main())
