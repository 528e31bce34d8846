"""A host out of service and back: its instances stopped and started, itself rebooted or held.

Runs as root with the host's own Python, standard library and our other scripts only. Reads one
JSON object from standard input and prints ``result`` and a JSON object as its last line, or
``refused`` and why. No version changes here; see switch.py.

    halt      {"instance", "pool", "seconds"}   stopped, whatever it runs stays in place
    resume    {"instance", "seconds", "pool"?}  started with what is in place, until it is ready;
                                        with a pool: a planned change of it, as halt's
    hold      {"held": {who, ...}}      deploy.py and upgrade.py leave this host alone from now on
    unhold    {}                        no more
    reboot    {}                        asked for, and not waited for
    boot      {}                        the id of this boot of the kernel

Each may be said again and again.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict

if __package__:
    from vllm_fleet.gate import before_start
    from vllm_fleet.onhost import instances, ledger, switch
else:  # on a host: sent along with this script
    import before_start  # type: ignore[import-not-found, no-redef]
    import instances  # type: ignore[import-not-found, no-redef]
    import ledger  # type: ignore[import-not-found, no-redef]
    import switch  # type: ignore[import-not-found, no-redef]

Json = Dict[str, Any]
Refused = ledger.Refused
say = ledger.say

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def held_path() -> str:
    """The file that says that this host is held."""
    return os.path.join(ledger.ROOT, "held.json")


def halt(order: Json) -> Json:
    """Stop an instance. Raises Refused in the middle of a change of its version."""
    name = order["instance"]
    if ledger.read_record(name)["step"] is not None:
        raise Refused("a change of its version was cut off: run upgrade.py, or rollback.py, first")
    now = switch.running(name)
    ledger.plan_change(name, order["pool"], float(order["seconds"]))
    if now["state"] not in ("inactive", "failed"):
        switch.stop(name)
    return {"served": now["active"] and now["ready"]}


def resume(order: Json) -> Json:
    """Start an instance, or watch a start that is under way, until it is ready."""
    name = order["instance"]
    now = switch.running(name)
    if order.get("pool"):
        ledger.plan_change(name, order["pool"], float(order["seconds"]))
    if not (now["active"] and now["ready"]):
        if now["state"] in ("inactive", "failed"):
            env = switch.variables(switch.text_of("%s/%s.env" % (switch.ETC, name)))
            switch.free(name, env)
        began = time.time()
        start = instances.Start(name, int(order["seconds"]))
        while not start.look():
            time.sleep(switch.POLL_SECONDS)
        if start.outcome:
            instances.systemctl("stop", start.unit)
            if order.get("pool"):
                ledger.end_change(name)
            return {"ok": False, "why": start.outcome, "since": began}
    ledger.end_change(name)
    now = switch.running(name)
    goods = ledger.read_record(name)["goods"]
    good = next((one for one in goods if one["checksum"] == now["checksum"]), None)
    return {
        "ok": True,
        "probe": (good or {}).get("probe"),
        "good_figures": (good or {}).get("figures"),
        "figures": switch.figures(name, now["invocation"]),
    }


def hold(order: Json) -> Json:
    """Write down that nobody is to start anything here."""
    ledger.write(held_path(), json.dumps({**order["held"], "at": int(time.time())}))
    return {}


def unhold(order: Json) -> Json:
    """Take that back."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(held_path())
    return {}


def reboot(order: Json) -> Json:
    """Ask systemd for a reboot, in a moment: this answer is still to get through."""
    words = ["systemd-run", "--quiet", "--on-active=1", "--timer-property=AccuracySec=100ms"]
    done = subprocess.run(
        [*words, "systemctl", "reboot"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        raise Refused("systemd-run: %s" % done.stdout.decode(errors="replace").strip())
    return {}


def boot(order: Json) -> Json:
    """Which boot this is."""
    return {"boot": switch.text_of(BOOT_ID).strip()}


ACTIONS: Dict[str, Callable[[Json], Json]] = {
    "halt": halt,
    "resume": resume,
    "hold": hold,
    "unhold": unhold,
    "reboot": reboot,
    "boot": boot,
}


def main() -> int:
    """Do what stands on standard input."""
    # The operator's end may vanish at any moment: what was begun is ended.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = json.load(sys.stdin)
    try:
        action = ledger.chosen(order, ACTIONS)
        if order.get("instance"):
            with ledger.guarded(order["instance"]):
                result = action(order)
        else:
            result = action(order)
    except (Refused, before_start.Refused, OSError, KeyError) as error:
        say("refused %s%s" % ("%s: " % order["instance"] if order.get("instance") else "", error))
        return 1
    say("result %s" % json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
