"""Take over from a vLLM that somebody started by hand: let it finish, keep its command, end it.

Runs as root with the host's own Python, standard library and our other scripts only. Reads one
JSON object from standard input, ``{"action": "adopt", "instance", "port", "seconds"}``, and prints
``result`` and a JSON object as its last line, or ``refused`` and why. What listens on the port is
ended, and what belongs to it: its unit, else all processes of its session. A process that is no
vLLM, or that runs in a container, is named and left alone. May be said again: where nobody
listens, all is done.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from typing import Any, Dict, List, Optional

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

VLLM = re.compile(r"(^|[/ ])vllm( |$)|\bvllm\.entrypoints\b|^VLLM::")
# Of units that people's own processes stay in where no session is kept for each login.
LOGIN = re.compile(r"(sshd?|crond?|atd|getty|serial-getty|console-getty)(@.*)?\.service")
CONTAINER = re.compile(r"docker|containerd|libpod|kubepods|lxc|crio")
POLL_SECONDS = 0.5
END_SECONDS = 60.0  # from SIGTERM to SIGKILL
LEFT_SECONDS = 10.0  # for its workers, once the server itself is gone


def adopt(order: Json) -> Json:
    """End what listens on the port of an instance."""
    name, port = order["instance"], int(order["port"])
    found = [one for one in before_start.listeners(port) if ours(one.pid) != name]
    if not found:
        return {"adopted": []}
    for one in found:
        if not VLLM.search(words(one.pid)):
            raise Refused("port %d is held by %s, which is no vLLM: end it by hand" % (port, one))
        if CONTAINER.search(switch.text_of("/proc/%d/cgroup" % one.pid)):
            raise Refused(
                "port %d is held by %s in a container: stop the container, which would start it "
                "again" % (port, one)
            )
        service(one.pid)  # before anything is ended
        say("%s: takes over from %s" % (name, one))
    kept = keep(name, [one.pid for one in found])
    waited = idle(port, float(order["seconds"]))
    for one in found:
        end(one.pid)
    say("%s: it has ended; its command, folder and environment are in %s" % (name, kept))
    return {"adopted": [one.pid for one in found], "waited": waited, "kept": kept}


def words(pid: int) -> str:
    """The command line of a process."""
    return switch.text_of("/proc/%d/cmdline" % pid).replace("\0", " ").strip()


def ours(pid: int) -> Optional[str]:
    """The instance of ours that a process belongs to, or None."""
    match = re.fullmatch(r"vllm@(.+)\.service", switch.unit_of(pid) or "")
    return match[1] if match else None


def keep(name: str, pids: List[int]) -> str:
    """Write down how it was started, for whoever wants it back; the path. Root's alone."""
    path = os.path.join(ledger.ROOT, "adopted-%s.json" % name)
    seen = []
    for pid in pids:
        folder = ""
        with contextlib.suppress(OSError):
            folder = os.readlink("/proc/%d/cwd" % pid)
        seen.append(
            {
                "pid": pid,
                "unit": service(pid),
                "command": switch.text_of("/proc/%d/cmdline" % pid).rstrip("\0").split("\0"),
                "folder": folder,
                "environment": switch.text_of("/proc/%d/environ" % pid).rstrip("\0").split("\0"),
            }
        )
    os.makedirs(ledger.ROOT, mode=0o700, exist_ok=True)
    ledger.write(path, json.dumps({"at": int(time.time()), "processes": seen}, indent=1))
    return path


def idle(port: int, seconds: float) -> float:
    """Wait until it has no request, by its own figures; the seconds that took."""
    began = time.monotonic()
    said = False
    while time.monotonic() - began < seconds:
        left = requests(port)
        if not left:
            break
        if not said:
            say("port %d: %d requests run or wait there" % (port, left))
            said = True
        time.sleep(POLL_SECONDS)
    return round(time.monotonic() - began, 1)


def requests(port: int) -> int:
    """Requests that it has; 0 where it does not tell."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open("http://127.0.0.1:%d/metrics" % port, timeout=5) as answer:
            text = answer.read().decode("utf-8", "replace")
    except OSError:
        return 0
    names = r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([\d.e+]+)$"
    return int(sum(float(value) for value in re.findall(names, text, re.M)))


def end(pid: int) -> None:
    """End a server and what belongs to it. Raises Refused where it stays."""
    unit = service(pid)
    if unit is not None:
        code, text = instances.systemctl("disable", "--now", unit)
        if code != 0:
            raise Refused("systemctl disable --now %s: %s" % (unit, text))
        return
    together = session(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)  # to the server: it ends its workers
    deadline = time.monotonic() + END_SECONDS
    while left := [one for one in together if alive(one)]:
        if pid not in left:
            deadline = min(deadline, time.monotonic() + LEFT_SECONDS)
        if time.monotonic() >= deadline:
            for one in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
            if any(alive(one) for one in left):
                raise Refused("pid %s did not end" % ", ".join(map(str, left)))
            return
        time.sleep(POLL_SECONDS)


def service(pid: int) -> Optional[str]:
    """The unit that would start a server again; None where it was started by hand.

    Raises Refused where that is not plain: a unit that does more is not ours to stop.
    """
    unit = switch.unit_of(pid)
    if unit is None or LOGIN.fullmatch(unit):
        return None
    main = int(instances.show(unit).get("MainPID") or 0)
    if main != pid and not VLLM.search(words(main)):
        raise Refused(
            "pid %d runs in %s, whose main process is %s: stop that unit by hand, if it is for "
            "vLLM alone (systemctl disable --now %s)"
            % (pid, unit, before_start.describe(main), unit)
        )
    return unit


def session(pid: int) -> List[int]:
    """The server and its descendants, and what else of vLLM was started in its session."""
    try:
        its = os.getsid(pid)
    except ProcessLookupError:
        return []
    parents = {one: parent(one) for one in before_start.pids()}
    found = [pid]
    for one in sorted(parents):
        above: Optional[int] = one
        while above and above not in found:
            above = parents.get(above)
        if above or (sid(one) == its and VLLM.search(words(one))):
            found.append(one)
    return list(dict.fromkeys(found))


def sid(pid: int) -> int:
    """The session of a process; 0 where it is gone."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return 0


def parent(pid: int) -> int:
    """The parent of a process; 0 where it is gone."""
    text = switch.text_of("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return int(text[1]) if len(text) > 1 else 0


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent does not."""
    text = switch.text_of("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return bool(text) and text[0] not in ("Z", "X")


def main() -> int:
    """Do what stands on standard input."""
    # The operator's end may vanish at any moment: what was begun is ended.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = json.load(sys.stdin)
    try:
        action = ledger.chosen(order, {"adopt": adopt})
        with ledger.guarded(order["instance"]):
            result = action(order)
    except (Refused, OSError, KeyError) as error:
        say("refused %s: %s" % (order.get("instance"), error))
        return 1
    say("result %s" % json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
