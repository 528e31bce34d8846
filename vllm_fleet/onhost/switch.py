"""One instance from one version to another on its host, step by step, each of them repeatable.

Runs as root with the host's own Python, standard library and our other scripts only. Reads
``{"action", "instance", ...}`` from standard input and prints ``result`` and a JSON object as
its last line, or ``refused`` and why. A version is a release with the files that start it:
``{"release", "checksum", "files": [{"path", "content", "mode", "owner", "group"}]}``.

    stage     {"pool", "next": version}       written down beside what serves
    begin     {"run", "pool", "drained", "to", "back", "seconds"}  what serves now is remembered
    measured  {"probe"}                       what it was measured with, while it runs
    switch    {"to": checksum, "seconds"}     stop, room, files, start, until it is ready
    watch     {"seconds"}                     whether it stays ready that long
    accept    {"run", "probe"}                the version that runs is the good one from now on
    refuse    {"run", "refused": {...}}       the staged version must not come back
    settle    {"run"}                         the change is over, the good version runs
    journal   {"since", "lines"}              the last lines of its log

An operator who is killed leaves a script that ends what it does; what is left half way is told
by the record's ``step``, and the same actions go on from there.
"""

import contextlib
import glob
import grp
import http.client
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional

if __package__:
    from vllm_fleet.gate import before_start
    from vllm_fleet.onhost import apply, instances, ledger
else:  # on a host: sent along with this script
    import apply  # type: ignore[import-not-found, no-redef]
    import before_start  # type: ignore[import-not-found, no-redef]
    import instances  # type: ignore[import-not-found, no-redef]
    import ledger  # type: ignore[import-not-found, no-redef]

Json = Dict[str, Any]
Refused = ledger.Refused
say = ledger.say

RELEASES = "/opt/vllm/releases"
ETC = "/etc/vllm"
STATE = "/var/lib/vllm"
RUN = "/run/vllm"
UNITS = "/etc/systemd/system"
USER = "vllm"
POLL_SECONDS = 0.5
STOP_SLACK_SECONDS = 60
FREE_SECONDS = 60.0
ALIKE = ("FLEET_RELEASE", "FLEET_MODEL", "FLEET_DEVICE")  # of instances that compile the same
ROOM_MIB = 64  # a disk that is full half way would leave neither version


# --- looking -------------------------------------------------------------------------------


def variables(text: str) -> Dict[str, str]:
    """Variables of ours in an environment file; their values need no unquoting."""
    return dict(re.findall(r'^(FLEET_[A-Z_]+)="?([^"\n]*)"?$', text, re.MULTILINE))


def env_of(version: Json) -> Dict[str, str]:
    """Our variables in the environment file of a version. Raises Refused where it has none."""
    for file in version["files"]:
        if file["path"].endswith(".env"):
            return variables(file["content"])
    raise Refused("the version %s has no environment file" % version["release"])


def text_of(path: str) -> str:
    """Text of a file, or "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def object_of(path: str) -> Json:
    """A JSON object, empty where there is none."""
    try:
        found = json.loads(text_of(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def running(name: str) -> Json:
    """What an instance runs now, and whether it is ready."""
    unit = instances.show("vllm@%s.service" % name)
    env = variables(text_of("%s/%s.env" % (ETC, name)))
    started = text_of("%s/%s/running" % (STATE, name)).strip()
    return {
        "active": unit.get("ActiveState") == "active",
        "state": unit.get("ActiveState"),
        "invocation": unit.get("InvocationID", ""),
        "ready": os.path.exists("%s/%s/ready" % (RUN, name)),
        "checksum": started,
        # Only as long as the files are those that it was started with, they tell its release.
        "release": os.path.basename(env.get("FLEET_RELEASE", "")),
        "as_files": bool(started) and env.get("FLEET_CHECKSUM") == started,
        "port": int(env.get("FLEET_PORT") or 0),
        "rank": int(env.get("FLEET_RANK") or 0),  # of a span: rank 0 alone answers
    }


def figures(name: str, invocation: str) -> Json:
    """What the start that runs was measured with: seconds by part, memory as vLLM told it."""
    warm = object_of("%s/%s/warmup.json" % (STATE, name))
    actual = object_of("%s/%s/actual.json" % (STATE, name))
    found: Json = {
        key: warm[key] for key in ("load_seconds", "warm_seconds", "vllm_version") if key in warm
    }
    if actual.get("invocation") == invocation:
        found.update(actual.get("actual") or {})
        found["seconds"] = actual.get("seconds") or {}
    return found


def short(version: Optional[Json]) -> Optional[Json]:
    """A version without its files, which hold secrets."""
    if version is None:
        return None
    return {key: value for key, value in version.items() if key != "files"}


# --- the steps -----------------------------------------------------------------------------


def stage(order: Json) -> Json:
    """Write a version down, beside what serves. Raises Refused where something of it is missing."""
    name, version = order["instance"], order["next"]
    env = env_of(version)
    stamp = "%s/%s/release.json" % (RELEASES, version["release"])
    if not os.path.isfile(stamp):
        raise Refused("release %s is not on this host" % version["release"])
    weights = env.get("FLEET_WEIGHTS", "")
    if not os.path.isfile(os.path.join(weights, "config.json")):
        raise Refused("no verified weights in %s" % weights)
    for path in (STATE, ETC, UNITS):
        free_mib = shutil.disk_usage(path).free >> 20
        if free_mib < ROOM_MIB:
            raise Refused("%s has %d MiB free; make room" % (path, free_mib))
    record = ledger.read_record(name)
    if record["step"] is not None:
        # A change that was cut off goes to what is wanted now.
        record["step"] = {**record["step"], "to": short(version)}
    record.update(instance=name, pool=order["pool"], next=version)
    ledger.write_record(name, record)
    return {"staged": short(version)}


def begin(order: Json) -> Json:
    """Remember what serves as good, and that a change is under way."""
    name = order["instance"]
    record, now = ledger.read_record(name), running(order["instance"])
    staged = record["next"]
    step = record["step"]
    if step is None:
        if now["active"] and now["ready"] and now["as_files"]:
            remember(record, now)
        step = {
            "at": int(time.time()),
            "from": {"release": now["release"], "checksum": now["checksum"]},
            "to": order.get("to") or short(staged),
            "served": now["active"] and now["ready"],
            "drained": bool(order["drained"]),
            "back": bool(order.get("back")),
            "name": "begun",
        }
    record["step"] = {**step, "run": order["run"]}
    ledger.write_record(name, record)
    ledger.plan_change(name, order["pool"], float(order["seconds"]))
    return {
        "now": now,
        "step": record["step"],
        "goods": [short(good) for good in record["goods"]],
        "next": short(staged),
    }


def measured(order: Json) -> Json:
    """Remember what the good version that runs was measured with: a second run compares with it."""
    name = order["instance"]
    record, now = ledger.read_record(name), running(name)
    goods = record["goods"]
    fits = bool(goods) and goods[0]["checksum"] == now["checksum"]
    if fits:
        goods[0]["probe"] = order["probe"]
        ledger.write_record(name, record)
    return {"remembered": fits}


def remember(record: Json, now: Json) -> None:
    """Make what runs the first of the good versions, with its files as they are."""
    goods = record["goods"]
    if goods and goods[0]["checksum"] == now["checksum"]:
        return
    kept = [good for good in goods if good["checksum"] == now["checksum"]]
    version: Json = {**(kept[0] if kept else {}), "at": int(time.time())}
    version.update(release=now["release"], checksum=now["checksum"])
    version["files"] = files_of(record)
    version["figures"] = figures(record["instance"], now["invocation"])
    record["goods"] = [version] + [g for g in goods if g["checksum"] != now["checksum"]]


def paths_of(name: str) -> List[str]:
    """Every path that a version of an instance may have a file at, in the order to write them."""
    return [
        "%s/%s.plan.json" % (ETC, name),
        "%s/%s.sh" % (ETC, name),
        "%s/vllm@%s.service.d/10-instance.conf" % (UNITS, name),
        "%s/%s.env" % (ETC, name),
    ]


def files_of(record: Json) -> List[Json]:
    """The files of an instance as they are on this host."""
    found = []
    for path in paths_of(record["instance"]):
        saved = apply.saved(path)
        if saved is None:
            continue
        content, mode, uid, gid = saved
        found.append(
            {
                "path": path,
                "content": content.decode(),
                "mode": "%o" % mode,
                "owner": pwd.getpwuid(uid).pw_name,
                "group": grp.getgrgid(gid).gr_name,
            }
        )
    return found


def version_of(record: Json, checksum: str) -> Json:
    """The staged or remembered version of a checksum. Raises Refused where there is none."""
    for version in [record["next"], *record["goods"]]:
        if version is not None and version["checksum"] == checksum:
            found: Json = version
            return found
    raise Refused("no version %s is staged or remembered on this host" % checksum[:8])


def switch(order: Json) -> Json:
    """Stop, make room, put the files, start, and wait until it is ready."""
    name = order["instance"]
    record = ledger.read_record(name)
    version = version_of(record, order["to"])
    now = running(name)
    whole = not os.path.exists(marker(name))
    took: Dict[str, float] = {}
    if not (whole and now["active"] and now["ready"] and now["checksum"] == order["to"]):
        env = env_of(version)
        began = time.time()
        if now["state"] not in ("inactive", "failed"):
            note(name, "stopping")
            stop(name)
        free(name, env)
        took["stop"] = round(time.time() - began, 2)
        if not whole or differs(version):
            swap(name, version)
        seed(name, env)
        note(name, "starting")
        began = time.time()
        start = instances.Start(name, int(order["seconds"]))
        while not start.look():
            time.sleep(POLL_SECONDS)
        took["start"] = round(time.time() - began, 2)
        if start.outcome:
            # Left alone it would be tried again and again, cold and in nobody's sight.
            instances.systemctl("stop", start.unit)
            return {
                "ok": False,
                "why": start.outcome,
                "since": began,
                "seconds": took,
                "waits": start.waits,  # for other ranks of its span: those are the cause
            }
    note(name, "started")
    now = running(name)
    found = figures(name, now["invocation"])
    return {"ok": True, "now": now, "figures": found, "seconds": took}


def note(name: str, step: str) -> None:
    """Write down how far the change is."""
    record = ledger.read_record(name)
    record["step"] = {**(record["step"] or {"at": int(time.time())}), "name": step}
    ledger.write_record(name, record)


def stop(name: str) -> None:
    """Stop the unit, drain and all. Raises Refused where it does not end."""
    unit = "vllm@%s.service" % name
    code, text = instances.systemctl("stop", "--no-block", unit)
    if code != 0:
        raise Refused("systemctl stop: %s" % text)
    _, shown = instances.systemctl("show", "-p", "TimeoutStopUSec", "--value", unit)
    deadline = time.monotonic() + span(shown) + STOP_SLACK_SECONDS
    while instances.show(unit).get("ActiveState") not in ("inactive", "failed"):
        if time.monotonic() >= deadline:
            raise Refused("did not stop; see `systemctl status %s`" % unit)
        time.sleep(POLL_SECONDS)
    say("%s: stopped" % name)


def span(text: str) -> float:
    """Seconds of a time span as systemd writes it (`11min 30s`); an hour where it is none."""
    units = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}
    parts = re.findall(r"([\d.]+)(us|ms|s|min|h|d)\b", text)
    return sum(float(number) * units[unit] for number, unit in parts) if parts else 3600.0


def free(name: str, env: Dict[str, str], seconds: float = FREE_SECONDS) -> None:
    """Wait until port and cards are free. What our own user left outside of any unit is ended.

    Raises Refused, naming each, where somebody else's process holds one of them.
    """
    deadline = time.monotonic() + seconds
    while True:
        holders = holding(env)
        strangers = [
            process
            for process in holders
            if process.user != USER or unit_of(process.pid) is not None
        ]
        for process in holders:
            if process in strangers:
                continue
            say("%s: %s is left over from nobody's unit: ended" % (name, process))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if not holders:
            return
        if time.monotonic() >= deadline:
            told = "; ".join(
                "%s%s" % (process, " (%s)" % unit if (unit := unit_of(process.pid)) else "")
                for process in holders
            )
            raise Refused(
                "its port or cards are held by %s: end it, then run this again; what is not ours "
                "is not ended by us" % told
            )
        time.sleep(POLL_SECONDS)


def holding(env: Dict[str, str]) -> List[Any]:
    """Processes that listen on the port of an instance or compute on its cards."""
    found = list(before_start.listeners(int(env.get("FLEET_PORT") or 0)))
    uuids = [uuid for uuid in env.get("FLEET_CARD_UUIDS", "").split(",") if uuid]
    if uuids and env.get("FLEET_DEVICE") == "cuda":
        found += [
            before_start.describe(pid)
            for pid, uuid, _ in before_start.compute_processes()
            if uuid in uuids
        ]
    return list(dict.fromkeys(found))


def unit_of(pid: int) -> Optional[str]:
    """The systemd service that holds a process, or None."""
    for line in text_of("/proc/%d/cgroup" % pid).splitlines():
        for part in reversed(line.split("/")):
            if part.endswith(".service") and not part.startswith("user@"):
                return part
    return None


def marker(name: str) -> str:
    """The file that is there while the files of an instance may be mixed; see before_start."""
    return ledger.record_path(name)[: -len(".json")] + ".swapping"


def differs(version: Json) -> bool:
    """Whether a file of a version is not as it should be."""
    for file in version["files"]:
        saved = apply.saved(file["path"])
        if saved is None or saved[0] != file["content"].encode() or saved[1] != mode_of(file):
            return True
    return False


def mode_of(file: Json) -> int:
    """Mode of a file of a version."""
    return int(file["mode"], 8)


def swap(name: str, version: Json) -> None:
    """Put the files of a version in place, and none of another one."""
    note(name, "swapping")
    ledger.write(marker(name), version["checksum"])
    wanted = {file["path"] for file in version["files"]}
    for file in version["files"]:
        apply.write(
            file["path"],
            file["content"].encode(),
            mode_of(file),
            pwd.getpwnam(file["owner"]).pw_uid,
            grp.getgrnam(file["group"]).gr_gid,
        )
    for path in paths_of(name):
        if path not in wanted:
            apply.remove(path)
    with ledger.guarded():
        manifest = {p: s for p, s in apply.read_manifest().items() if p not in paths_of(name)}
        manifest.update(apply.checksums(version["files"]))
        text = json.dumps(manifest, indent=1, sort_keys=True)
        ledger.write(apply.MANIFEST, text)
    code, text = instances.systemctl("daemon-reload")
    if code != 0:
        raise Refused("systemctl daemon-reload: %s" % text)
    os.unlink(marker(name))
    say("%s: has the files of %s" % (name, version["release"]))


def seed(name: str, env: Dict[str, str]) -> None:
    """Give an instance what a sibling has compiled with the same release for the same model.

    Only what a start that ended well has left behind, and only where there is nothing yet: no
    instance ever writes into another's caches. Its failure stops nothing: it only saves time.
    """
    release = os.path.basename(env.get("FLEET_RELEASE", ""))
    mine = os.path.join(STATE, name, "cache", release)
    if not release or os.path.exists(mine):
        return
    for path in sorted(glob.glob(os.path.join(glob.escape(ETC), "*.env"))):
        other = os.path.basename(path)[: -len(".env")]
        its = variables(text_of(path))
        same = all(its.get(key) == env.get(key) for key in ALIKE) and cards(its) == cards(env)
        theirs = os.path.join(STATE, other, "cache", release)
        ready = os.path.exists(os.path.join(RUN, other, "ready"))
        if other == name or not same or not ready or not os.path.isdir(theirs):
            continue
        try:
            copy(theirs, mine)
        except (OSError, Refused, shutil.Error) as error:
            say("%s: compile caches of %s were not taken: %s" % (name, other, error))
        else:
            say("%s: has the compile caches of %s" % (name, other))
        return


def cards(env: Dict[str, str]) -> int:
    """How many cards an instance has."""
    return len([word for word in env.get("FLEET_CARDS", "").split(",") if word])


def copy(source: str, target: str) -> None:
    """A directory with owners and times, whole or not at all. Raises OSError or Refused."""
    size = sum(
        os.lstat(os.path.join(folder, file)).st_size
        for folder, _, files in os.walk(source)
        for file in files
    )
    parent = os.path.dirname(target)
    if shutil.disk_usage(STATE).free < size + (ROOM_MIB << 20):
        raise Refused("no room for %d MiB" % (size >> 20))
    part = target + ".part"
    shutil.rmtree(part, ignore_errors=True)
    above = os.stat(os.path.dirname(source))
    if not os.path.isdir(parent):
        os.makedirs(parent)
        for made in (os.path.dirname(parent), parent):
            os.chown(made, above.st_uid, above.st_gid)
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", source, part],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(part, ignore_errors=True)
        raise Refused(done.stdout.decode(errors="replace").strip()[:300])
    os.rename(part, target)


def watch(order: Json) -> Json:
    """Whether an instance stays ready for some time, without a new start."""
    name = order["instance"]
    first = running(name)
    deadline = time.monotonic() + float(order["seconds"])
    silent = 0
    while True:
        now = running(name)
        if not now["active"] or not now["ready"]:
            return {"ok": False, "why": "is not ready any more (%s)" % now["state"]}
        if now["invocation"] != first["invocation"]:
            return {"ok": False, "why": "ended and was started again by systemd"}
        # One late answer of a server that reads a long prompt is no death.
        silent = 0 if now["rank"] or answers(now["port"]) else silent + 1
        if silent >= 3:
            return {"ok": False, "why": "does not answer /fleet/ready"}
        left = deadline - time.monotonic()
        if left <= 0:
            return {"ok": True, "invocation": now["invocation"]}
        time.sleep(min(POLL_SECONDS, left))


def answers(port: int) -> bool:
    """Whether the gate of an instance says that it is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/fleet/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def accept(order: Json) -> Json:
    """The version that runs is the good one from now on; the change is over."""
    name = order["instance"]
    record, now = ledger.read_record(name), running(name)
    staged = record["next"]
    if not now["active"]:
        raise Refused("is not ready any more (%s)" % now["state"])
    if staged is None or now["checksum"] != staged["checksum"]:
        raise Refused("does not run the staged version any more")
    good = {
        **staged,
        "at": int(time.time()),
        "run": order["run"],
        "probe": order.get("probe"),
        "figures": figures(name, now["invocation"]),
    }
    others = [one for one in record["goods"] if one["checksum"] != good["checksum"]]
    record.update(goods=[good, *others], next=None, step=None)
    ledger.write_record(name, record)
    ledger.end_change(name)
    return {"good": short(good)}


def refuse(order: Json) -> Json:
    """Write down that a version must not come back until somebody clears it."""
    name = order["instance"]
    record = ledger.read_record(name)
    refused = {"at": int(time.time()), "run": order["run"], **order["refused"]}
    same = ("release", "checksum")
    kept = [one for one in record["refused"] if any(one[k] != refused[k] for k in same)]
    record["refused"] = [*kept, refused]
    if record["step"] is not None:
        record["step"]["back"] = True
    ledger.write_record(name, record)
    return {"refused": refused}


def settle(order: Json) -> Json:
    """The change is over: what runs is a good version, and it comes first among them."""
    name = order["instance"]
    record, now = ledger.read_record(name), running(name)
    goods = record["goods"]
    runs = [one for one in goods if one["checksum"] == now["checksum"]]
    others = [one for one in goods if one["checksum"] != now["checksum"]]
    record.update(goods=runs + others, next=None, step=None)
    ledger.write_record(name, record)
    ledger.end_change(name)
    return {"runs": short(runs[0]) if runs else None}


def journal(order: Json) -> Json:
    """The last lines of an instance's log."""
    unit = "vllm@%s.service" % order["instance"]
    lines = instances.journal(unit, float(order["since"]))[-int(order["lines"]) :]
    return {"lines": [line[:2000] for line in lines]}


ACTIONS: Dict[str, Callable[[Json], Json]] = {
    "stage": stage,
    "begin": begin,
    "measured": measured,
    "switch": switch,
    "watch": watch,
    "accept": accept,
    "refuse": refuse,
    "settle": settle,
    "journal": journal,
}
READS = ("watch", "journal")


def main() -> int:
    """Do what stands on standard input."""
    # The operator's end may vanish at any moment: what was begun is ended.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = json.load(sys.stdin)
    try:
        action = ledger.chosen(order, ACTIONS)
        if order["action"] in READS:
            result = action(order)
        else:
            with ledger.guarded(order["instance"]):
                result = action(order)
    except (Refused, before_start.Refused, OSError, KeyError) as error:
        say("refused %s: %s" % (order.get("instance"), error))
        return 1
    say("result %s" % json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
