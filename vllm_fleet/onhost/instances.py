"""Start, restart and retire instances, and wait until each is warm.

Runs as root with the host's own Python, standard library only. Reads one JSON object from
standard input: ``{"action": "start" | "restart" | "retire", "instances": [{"name", "seconds",
"pool"}]}``.
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
from typing import Any, Dict, Iterator, List, Optional, Tuple

STATE = "/var/lib/vllm"
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
    """A progress line, at once."""
    print(text, flush=True)


class Start:
    """One start that is under way."""

    def __init__(self, name: str, seconds: int, action: str) -> None:
        self.name = name
        self.unit = f"vllm@{name}.service"
        self.seconds = seconds
        self.began = time.time()
        self.outcome: Optional[str] = None
        self.said = 0.0
        systemctl("reset-failed", self.unit)
        before = show(self.unit)
        # A start that is under way already (boot, a crash) is watched, not begun again.
        under_way = action == "start" and before.get("ActiveState") in ("activating", "active")
        code, text = systemctl("enable", self.unit)
        if code == 0 and not under_way:
            code, text = systemctl(action, "--no-block", self.unit)
        if code != 0:
            self.outcome = f"systemctl {action}: {text}"
        self.restarts = int(before.get("NRestarts") or 0) if under_way else 0
        self.replaced = None if under_way else before.get("InvocationID")
        if under_way:
            say(f"{name}: is starting already")
        else:
            say(f"{name}: {'starting' if action == 'start' else 'draining, then starting'}")

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
        elif took > self.seconds:
            self.outcome = f"not ready within start_seconds ({self.seconds} s)"
        elif took - self.said >= SAY_SECONDS:
            self.said = took
            say(f"{self.name}: {active} ({now.get('SubState')}) for {took:.0f} s")
        return self.outcome is not None

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


@contextlib.contextmanager
def planned(order: Dict[str, Any]) -> Iterator[None]:
    """While it lasts hostwatch.py says that the pools are being changed, so that no alert is sent
    for what that makes look broken. It ends by itself where this run dies."""
    folder, written = os.path.join(STATE, "changes"), []
    for instance in order["instances"]:
        if order["action"] != "restart" or not instance.get("pool"):
            continue
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{instance['name']}.json")
        until = time.time() + instance["seconds"] + instance.get("drain_seconds", 0)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"pool": instance["pool"], "until": until}, file)
        written.append(path)
    try:
        yield
    finally:
        for path in written:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def start(order: Dict[str, Any]) -> int:
    """Start or restart, watch, and tell of each failure with its log."""
    with planned(order):
        return _start(order)


def _start(order: Dict[str, Any]) -> int:
    starts = [Start(i["name"], i["seconds"], order["action"]) for i in order["instances"]]
    waiting = list(starts)
    while waiting:
        waiting = [one for one in waiting if not one.look()]
        if waiting:
            time.sleep(POLL_SECONDS)
    failed = [one for one in starts if one.outcome]
    for one in failed:
        for line in journal(one.unit, one.began):
            say(f"journal {one.name} | {line}")
        # Left alone it would be tried again and again, cold and in nobody's sight.
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
