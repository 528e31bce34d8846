"""The lock of a change, what is known of each instance, and the audit log, on a host.

Runs as root with the host's own Python, standard library only. Reads one JSON object from
standard input, ``{"action": ...}`` and what the action needs, and prints ``result`` and a JSON
object as its last line. Exit code 1 where it could not be done; the reason is the last line.

    lock      {"holder": {"run", "who", "where", "what"}, "stale": seconds}
    beat      {"run"}            the holder lives; says whether it still holds the lock
    release   {"run"}            the holder gives it back
    unlock    {"run", "by"}      somebody takes it from a holder that is gone
    look      {"stale"}          who holds it
    audit     {"lines": [{...}], "marks": {name: text}}
    forget    {"instances": [name], "release", "by"}    refused versions may come back

The lock stands on one host of the fleet, records and audit log on every host. Everything is
written beside its place and renamed into it, below a lock of this host, so that a script that
is killed leaves what was there before or what was to be.
"""

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

Json = Dict[str, Any]

STATE = "/var/lib/vllm"
ROOT = STATE + "/_rollout"  # "_": no instance can be called so
METRICS = STATE + "/metrics"
HOSTWATCH = "vllm-fleet-hostwatch.service"
GOODS = 3  # versions that served well and are remembered
MARK = re.compile(r"vllm_fleet_[A-Za-z0-9._-]+\.prom")


class Refused(Exception):
    """Why it is not done, in words for the operator."""


def say(text: str) -> None:
    """A progress line, at once; an operator who is gone is no reason to stop half way."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


@contextlib.contextmanager
def guarded(name: str = "") -> Iterator[None]:
    """One script at a time reads and writes what all instances share, or one instance's own.

    A script of an operator who is gone ends what it began: the next one waits for it here.
    """
    os.makedirs(ROOT + "/instances", mode=0o700, exist_ok=True)
    path = record_path(name) + ".guard" if name else ROOT + "/.guard"
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if name:
                say("%s: waiting for what an earlier run does on it" % name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: str, text: str, mode: int = 0o600) -> None:
    """Put a file in place at once, and on disk before anything relies on it."""
    temporary = path + ".new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str) -> Optional[Json]:
    """A JSON object, or None where there is none. Raises Refused where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Refused(
            "%s cannot be read (%s): look at it, then remove it" % (path, error)
        ) from None
    if not isinstance(found, dict):
        raise Refused("%s holds no JSON object: look at it, then remove it" % path)
    return found


# --- the lock ------------------------------------------------------------------------------


def _lock_path() -> str:
    return ROOT + "/lock.json"


def _told(holder: Json, stale: float) -> Json:
    """A holder as it is reported, with its age by this host's clock."""
    silent = max(0.0, time.time() - float(holder.get("beat") or 0))
    return {**holder, "silent": round(silent, 1), "stale": silent > stale}


def lock(order: Json) -> Json:
    """Take the lock, unless somebody has it. A stale one is reported like any other."""
    held = read(_lock_path())
    if held is not None and held.get("run") != order["holder"]["run"]:
        return {"taken": False, "holder": _told(held, float(order["stale"]))}
    now = time.time()
    write(_lock_path(), json.dumps({"since": now, **order["holder"], "beat": now}))
    return {"taken": True}


def beat(order: Json) -> Json:
    """Say that the holder lives. Where it holds the lock no more, who does."""
    held = read(_lock_path())
    if held is None or held.get("run") != order["run"]:
        return {"held": False, "holder": held}
    write(_lock_path(), json.dumps({**held, "beat": time.time()}))
    return {"held": True}


def release(order: Json) -> Json:
    """Give the lock back; nothing where it is another's by now."""
    held = read(_lock_path())
    if held is None or held.get("run") != order["run"]:
        return {"released": False}
    os.unlink(_lock_path())
    return {"released": True}


def unlock(order: Json) -> Json:
    """Take the lock from the run that is named. Raises Refused where another one holds it."""
    held = read(_lock_path())
    if held is None:
        return {"unlocked": False}
    if held.get("run") != order["run"]:
        raise Refused(
            "the lock is held by run %s of %s, not by %s: nothing was unlocked"
            % (held.get("run"), held.get("who"), order["run"])
        )
    append([{"result": "unlocked", "who": order["by"], "run": held.get("run"), "holder": held}])
    os.unlink(_lock_path())
    return {"unlocked": True, "holder": held}


def look(order: Json) -> Json:
    """Who holds the lock, if anybody."""
    held = read(_lock_path())
    return {"holder": _told(held, float(order["stale"])) if held is not None else None}


# --- audit ---------------------------------------------------------------------------------


def append(lines: List[Json]) -> None:
    """Add lines to the audit log, whole, and on disk."""
    text = "".join(
        json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line}) + "\n"
        for line in lines
    )
    path = ROOT + "/audit.log"
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o640)
    try:
        size = os.fstat(descriptor).st_size
        # A line that a power cut left without its end must not swallow the next one.
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            text = "\n" + text
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def audit(order: Json) -> Json:
    """Lines for the log, and text files that the node exporter reads."""
    append(order.get("lines") or [])
    os.makedirs(METRICS, exist_ok=True)
    for name, text in (order.get("marks") or {}).items():
        if not MARK.fullmatch(name):
            raise Refused("%r is no name of a text file of ours" % name)
        # Beside its place its name ends in ".new": the node exporter reads what ends in ".prom".
        write(os.path.join(METRICS, name), text, 0o644)
    return {}


# --- what is known of an instance ----------------------------------------------------------


def record_path(name: str) -> str:
    """Where the record of an instance is."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise Refused("%r is no name of an instance" % name)
    return "%s/instances/%s.json" % (ROOT, name)


def read_record(name: str) -> Json:
    """What is known of an instance; an empty record where nothing is.

    ``goods``: versions that served well, the last one first, each with its files;
    ``refused``: versions that did not; ``next``: the version that is staged; ``step``: the
    change that is under way, or was when somebody was killed.
    """
    empty: Json = {"format": 1, "goods": [], "refused": [], "next": None, "step": None}
    return {**empty, **(read(record_path(name)) or {})}


def write_record(name: str, record: Json) -> None:
    """Keep what is known of an instance."""
    record["goods"] = record["goods"][:GOODS]
    write(record_path(name), json.dumps(record))


def plan_change(name: str, pool: str, seconds: float) -> None:
    """Say until when a pool is being changed on purpose: onhost/hostwatch.py tells Prometheus,
    so that no alert is sent for what that makes look broken. It ends by itself."""
    change = {"pool": pool, "until": int(time.time() + seconds)}
    os.makedirs(os.path.join(STATE, "changes"), exist_ok=True)
    write(change_path(name), json.dumps(change), 0o644)
    tell()


def end_change(name: str) -> None:
    """Say that it is over."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(change_path(name))
        tell()


def tell() -> None:
    """Have it told at once, rather than with the timer's next round: an alert may be faster."""
    with contextlib.suppress(OSError):
        words = ["systemctl", "start", "--no-block", HOSTWATCH]
        subprocess.run(words, capture_output=True, check=False)


def change_path(name: str) -> str:
    """The file of the change that an instance is in."""
    return os.path.join(STATE, "changes", name + ".json")


def forget(order: Json) -> Json:
    """Let refused versions of a release come back."""
    cleared = []
    names = order.get("instances") or sorted(
        name[: -len(".json")] for name in os.listdir(ROOT + "/instances") if name.endswith(".json")
    )
    for name in names:
        with guarded(name):
            record = read_record(name)
            kept = [one for one in record["refused"] if one["release"] != order["release"]]
            if len(kept) == len(record["refused"]):
                continue
            line = {"result": "cleared", "instance": name, "release": order["release"]}
            append([{**line, "who": order["by"]}])
            write_record(name, {**record, "refused": kept})
            cleared.append(name)
    return {"cleared": cleared}


ACTIONS: Dict[str, Callable[[Json], Json]] = {
    "lock": lock,
    "beat": beat,
    "release": release,
    "unlock": unlock,
    "look": look,
    "audit": audit,
    "forget": forget,
}


def chosen(order: Json, actions: Dict[str, Callable[[Json], Json]]) -> Callable[[Json], Json]:
    """What an order asks for. Raises Refused where there is no such thing."""
    if order.get("action") not in actions:
        raise Refused("%r is none of %s" % (order.get("action"), ", ".join(actions)))
    return actions[order["action"]]


def main() -> int:
    """Do what stands on standard input."""
    order = json.load(sys.stdin)
    try:
        action = chosen(order, ACTIONS)
        with guarded():
            result = action(order)
    except (Refused, OSError) as error:
        say("refused %s" % error)
        return 1
    say("result %s" % json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
