"""What no exporter tells of this host, as metrics for the node exporter.

    hostwatch.py SETTINGS

One round, begun by a timer, as root: cards that are gone, throttled, or have errors in memory;
NVLinks; Xid errors, counted in the kernel log with what each asks for (DCGM's own gauge holds
the last code alone and never resets); certificates' ends; and of each instance whether it is
ready, since when, how long its start took and when its weights were last verified.

SETTINGS is JSON: {"instances": [{"name", "pool", "release", "weights_stamp", "cards", "uuids"}],
"certificates": [paths], "device": "cuda" | "rocm" | "cpu"}. Standard library alone; runs with
the system's Python. What cannot be read is left out; the rest is written all the same.
"""

import calendar
import contextlib
import csv
import glob
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

RUN = "/run/vllm"
ETC = "/etc/vllm"
STATE = "/var/lib/vllm"
METRICS_FILE = "vllm_fleet_host.prom"
SMI_SECONDS = 30
HELD_SECONDS = 600  # a host that is held says so anew with every round
RELEASE = re.compile(r"/opt/vllm/releases/([^/\s\0]+)/bin/")
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")

# What an Xid asks for, after NVIDIA's catalogue. The rest is "unknown": look it up.
XID_ACTIONS: Dict[str, Tuple[int, ...]] = {
    "application": (
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84),
        *(85, 86, 88, 89, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105),
        *(126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 139),
    ),
    "memory": (48, 64, 94, 95, 140, 171, 172),
    "reset": (46, 62, 109, 110, 119, 120, 136, 143, 155, 156, 158),
    "reboot": (79, 154),
    "hardware": (54,),
    "nvlink": (74, *range(144, 151)),
    # Follows another one, or tells of a repair that worked.
    "none": (43, 44, 45, 63, 92),
}

# nvidia-smi's name, our metric. What a driver does not know is taken out and asked without.
CARD_FIELDS: Tuple[Tuple[str, str], ...] = (
    ("memory.used", "vllm_fleet_card_memory_used_bytes"),
    ("memory.total", "vllm_fleet_card_memory_total_bytes"),
    ("utilization.gpu", "vllm_fleet_card_utilization_ratio"),
    ("temperature.gpu", "vllm_fleet_card_temperature_celsius"),
    ("power.draw", "vllm_fleet_card_power_watts"),
    ("ecc.errors.uncorrected.volatile.total", "vllm_fleet_card_ecc_uncorrected_total"),
    ("retired_pages.pending", "vllm_fleet_card_repair_pending"),
    ("remapped_rows.pending", "vllm_fleet_card_repair_pending"),
    ("remapped_rows.failure", "vllm_fleet_card_remap_failed"),
    ("clocks_throttle_reasons.hw_slowdown", "vllm_fleet_card_throttled"),
    ("clocks_throttle_reasons.hw_thermal_slowdown", "vllm_fleet_card_throttled"),
    ("clocks_throttle_reasons.hw_power_brake_slowdown", "vllm_fleet_card_throttled"),
    ("clocks_throttle_reasons.sw_thermal_slowdown", "vllm_fleet_card_throttled"),
)
FACTORS = {
    "vllm_fleet_card_memory_used_bytes": 2.0**20,
    "vllm_fleet_card_memory_total_bytes": 2.0**20,
    "vllm_fleet_card_utilization_ratio": 0.01,
}
COUNTERS = ("vllm_fleet_card_ecc_uncorrected_total", "vllm_fleet_xid_total")
HELP = {
    "vllm_fleet_card_present": "Whether the driver lists a card that an instance is planned on.",
    "vllm_fleet_card_throttled": "Whether the card is slowed down, by reason.",
    "vllm_fleet_card_repair_pending": "Rows or pages of memory wait for a reset.",
    "vllm_fleet_xid_time_seconds": "When the kernel log last held it.",
    "vllm_fleet_xid_total": "Times that the kernel log held it.",
    "vllm_fleet_instance_start_seconds": "The last start: until it served, and its warm-up.",
    "vllm_fleet_instance_start_part_seconds": "Parts of the load, as vLLM printed them.",
    "vllm_fleet_certificate_expires_time_seconds": "The end of a certificate.",
}

Json = Dict[str, Any]
Labels = Tuple[Tuple[str, str], ...]
# By metric, by labels: a second value for the same labels takes the larger one.
Samples = Dict[str, Dict[Labels, float]]


def main(arguments: Sequence[str]) -> int:
    """One round; the exit code."""
    with open(arguments[0], encoding="utf-8") as file:
        settings = json.load(file)
    samples: Samples = {}
    add(samples, "vllm_fleet_hostwatch_time_seconds", (), time.time())
    for part in (instances, certificates, changes):
        part(settings, samples)
    if settings.get("device") == "cuda" and shutil.which("nvidia-smi"):
        nvidia(settings, samples)
        xids(samples)
    folder = os.path.join(STATE, "metrics")
    os.makedirs(folder, exist_ok=True)
    write(os.path.join(folder, METRICS_FILE), exposition(samples), 0o644)
    if not os.path.exists(os.path.join(ETC, "probe.json")):
        # The probe was turned off: its last words would be told for ever.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, "vllm_fleet_probe.prom"))
    return 0


def add(samples: Samples, name: str, labels: Iterable[Tuple[str, str]], value: float) -> None:
    """One sample."""
    rows = samples.setdefault(name, {})
    key = tuple(labels)
    rows[key] = max(value, rows.get(key, value))


def instances(settings: Json, samples: Samples) -> None:
    """What our own scripts left behind of each instance."""
    for one in settings["instances"]:
        labels = [("vllm_instance", one["name"]), ("pool", one["pool"])]
        release = running_release(one["name"]) or one["release"]
        version = re.split("[+-]", release)[0]
        info = [*labels, ("release", release), ("vllm_version", version)]
        add(samples, "vllm_fleet_instance_info", info, 1)
        ready = os.path.join(RUN, one["name"], "ready")
        add(samples, "vllm_fleet_instance_ready", labels, float(os.path.exists(ready)))
        report = read_json(os.path.join(STATE, one["name"], "warmup.json"))
        for key, name, more in (
            ("ready_at", "vllm_fleet_instance_ready_time_seconds", []),
            ("load_seconds", "vllm_fleet_instance_start_seconds", [("phase", "load")]),
            ("warm_seconds", "vllm_fleet_instance_start_seconds", [("phase", "warm")]),
        ):
            if isinstance(report.get(key), (int, float)):
                add(samples, name, [*labels, *more], report[key])
        parts = read_json(os.path.join(STATE, one["name"], "actual.json")).get("seconds")
        for part, seconds in parts.items() if isinstance(parts, dict) else ():
            more = [("part", str(part))]
            add(samples, "vllm_fleet_instance_start_part_seconds", [*labels, *more], seconds)
        with contextlib.suppress(OSError):
            verified = os.stat(one["weights_stamp"]).st_mtime
            add(samples, "vllm_fleet_weights_verified_time_seconds", labels, verified)


def running_release(name: str) -> str:
    """The release of the process that runs, else of the next start: while a fleet is rolled,
    not the one of the last deploy. Empty where neither says."""
    pid = (output(["systemctl", "show", "-P", "MainPID", "vllm@%s.service" % name]) or "").strip()
    for path in ("/proc/%s/cmdline" % pid, os.path.join(ETC, name + ".sh")):
        with contextlib.suppress(OSError):
            with open(path, encoding="utf-8", errors="replace") as file:
                found = RELEASE.search(file.read())
            if found:
                return found[1]
    return ""


def changes(settings: Json, samples: Samples) -> None:
    """Until when a planned change of a pool may last, as whoever makes it wrote down.

    Files STATE/changes/<name>.json: {"pool", "until" (unix time)}. One that is over by a day is
    removed. A host that is held is being changed until it is returned.
    """
    if os.path.exists(os.path.join(STATE, "_rollout", "held.json")):
        for one in settings["instances"]:
            labels = [("pool", one["pool"])]
            add(samples, "vllm_fleet_change_until_seconds", labels, time.time() + HELD_SECONDS)
    for path in glob.glob(os.path.join(STATE, "changes", "*.json")):
        change = read_json(path)
        until = change.get("until")
        if not isinstance(until, (int, float)) or until < time.time() - 86400:
            with contextlib.suppress(OSError):
                os.unlink(path)
            continue
        labels = [("pool", str(change.get("pool", "")))]
        add(samples, "vllm_fleet_change_until_seconds", labels, until)


def certificates(settings: Json, samples: Samples) -> None:
    """The end of every certificate, of the first in a chain."""
    for path in settings["certificates"]:
        text = output(["openssl", "x509", "-noout", "-enddate", "-in", path])
        match = re.search(r"notAfter=(.+)", text or "")
        if match:
            with contextlib.suppress(ValueError):
                end = time.strptime(match[1].strip(), "%b %d %H:%M:%S %Y %Z")
                name = "vllm_fleet_certificate_expires_time_seconds"
                add(samples, name, [("file", path)], calendar.timegm(end))


def nvidia(settings: Json, samples: Samples) -> None:
    """Cards, by nvidia-smi."""
    owner = {u: one for one in settings["instances"] for u in one["uuids"]}
    # Where it hangs or fails, no card can be used: all are told as missing.
    rows = query([field for field, _ in CARD_FIELDS]) or []
    for row in rows:
        labels = card_labels(row["index"], row["uuid"], owner.get(row["uuid"]))
        for field, name in CARD_FIELDS:
            value = number(row.get(field))
            if value is None:
                continue
            more = []
            if name == "vllm_fleet_card_throttled":
                reason = field.rpartition(".")[2].replace("_slowdown", "")
                more = [("reason", "hw_slowdown" if reason == "hw" else reason)]
            value = min(1.0, value) if name.endswith("_pending") else value
            add(samples, name, [*labels, *more], value * FACTORS.get(name, 1.0))
    listed = {row["uuid"] for row in rows}
    for one in settings["instances"]:
        for index, uuid in zip(one["cards"], one["uuids"], strict=True):
            labels = card_labels(str(index), uuid, one)
            add(samples, "vllm_fleet_card_present", labels, float(uuid in listed))
    for uuid, active in nvlinks(output(["nvidia-smi", "nvlink", "-s"]) or "").items():
        index = next((row["index"] for row in rows if row["uuid"] == uuid), "")
        labels = card_labels(index, uuid, owner.get(uuid))
        add(samples, "vllm_fleet_card_nvlinks_active", labels, active)


def card_labels(index: str, uuid: str, one: Optional[Mapping[str, Any]]) -> List[Tuple[str, str]]:
    """Labels of a card; with its instance where one is planned on it."""
    labels = [("card", index), ("uuid", uuid)]
    if one is not None:
        labels += [("vllm_instance", one["name"]), ("pool", one["pool"])]
    return labels


def query(fields: Sequence[str]) -> Optional[List[Dict[str, str]]]:
    """Rows of nvidia-smi by field; None where it does not answer."""
    wanted = ["index", "uuid", *fields]
    while True:
        text = output(
            ["nvidia-smi", "--query-gpu=" + ",".join(wanted), "--format=csv,noheader,nounits"]
        )
        unknown = re.search(r'Field "([\w.]+)" is not a valid field', text or "")
        if unknown is None or unknown[1] not in wanted:
            break
        wanted.remove(unknown[1])
    if text is None:
        return None
    rows = []
    for cells in csv.reader(io.StringIO(text)):
        if len(cells) == len(wanted):
            rows.append(dict(zip(wanted, (cell.strip() for cell in cells), strict=True)))
    return rows


def number(text: Optional[str]) -> Optional[float]:
    """A cell as a number; None for `[N/A]`, `ERR!` and the like."""
    words = {"Active": 1.0, "Not Active": 0.0, "Yes": 1.0, "No": 0.0}
    if text is None or text in words:
        return words.get(text or "")
    try:
        return float(text)
    except ValueError:
        return None


def nvlinks(text: str) -> Dict[str, int]:
    """Links that are up, by card, of `nvidia-smi nvlink -s`."""
    found: Dict[str, int] = {}
    uuid = ""
    for line in text.splitlines():
        card = re.search(r"UUID: (\S+?)\)", line)
        if card:
            uuid = card[1]
        elif uuid and re.match(r"\s*Link \d+:", line):  # a card without NVLink has no line
            up = re.search(r"[\d.]+ GB/s", line) is not None
            found[uuid] = found.get(uuid, 0) + up
    return found


def action_of(xid: int) -> str:
    """What this Xid asks for, in a word."""
    return next((action for action, codes in XID_ACTIONS.items() if xid in codes), "unknown")


def xids(samples: Samples) -> None:
    """Xid errors, counted since we first looked."""
    path = os.path.join(STATE, "xids.json")
    memory = read_json(path)
    seen: Dict[str, List[float]] = memory.get("seen") or {}
    since = float(memory.get("since") or 0)
    words = ["journalctl", "-k", "-o", "json", "--no-pager", "--output-fields=MESSAGE"]
    # The first time: of this boot.
    words += ["--since=@%d" % int(since)] if since else ["-b"]
    newest = since
    for line in (output(words) or "").splitlines():
        try:
            entry = json.loads(line)
            at = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
            match = XID.search(entry["MESSAGE"])
        except (ValueError, KeyError, TypeError):
            continue
        newest = max(newest, at)
        if match and at > since:
            key = "%s %s" % (match[1], match[2])
            count = seen.get(key, [0, 0])[0]
            seen[key] = [count + 1, at]
    write(path, json.dumps({"since": newest or time.time(), "seen": seen}), 0o600)
    for key, (count, at) in seen.items():
        pci, _, code = key.partition(" ")
        labels = [("pci", pci), ("xid", code), ("action", action_of(int(code)))]
        add(samples, "vllm_fleet_xid_total", labels, count)
        add(samples, "vllm_fleet_xid_time_seconds", labels, at)


def exposition(samples: Samples) -> str:
    """Text for the node exporter's textfile collector."""
    lines = []
    for name, rows in samples.items():
        if name in HELP:
            lines.append("# HELP %s %s" % (name, HELP[name]))
        lines.append("# TYPE %s %s" % (name, "counter" if name in COUNTERS else "gauge"))
        for labels, value in rows.items():
            inner = ",".join('%s="%s"' % (k, escaped(v)) for k, v in labels)
            lines.append("%s%s %.15g" % (name, "{%s}" % inner if inner else "", value))
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """A label's value."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def output(command: Sequence[str]) -> Optional[str]:
    """What a command prints on both channels; None where it cannot be run or hangs."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SMI_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def read_json(path: str) -> Json:
    """A JSON object; {} where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(path: str, text: str, mode: int) -> None:
    """Put a file in place at once."""
    temporary = "%s.%d" % (path, os.getpid())
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    os.rename(temporary, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
