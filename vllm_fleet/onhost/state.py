"""What a host is like now, as one JSON object on standard output.

Runs as root with the host's own Python, standard library only, and changes nothing. The one
argument is a JSON object: ``{"packages": [...], "units": [...], "disks": [...], "texts":
[paths]}``. What is looked at beyond that is fixed here, the files in our manifest above all.
Every part stands alone: what cannot be read is left out or says why, so that one odd host
never hides the rest.
"""

import glob
import grp
import hashlib
import json
import os
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

OPT = "/opt/vllm"
STATE = "/var/lib/vllm"
RUN = "/run/vllm"
ETC = "/etc/vllm"
MANIFEST = STATE + "/manifest.json"
UNIT_FIELDS = (
    "Id,ActiveState,SubState,UnitFileState,MainPID,Result,NRestarts,NeedDaemonReload,FragmentPath"
)
CARD_QUERY = "index,uuid,name,memory.total,memory.used,pci.bus_id,compute_cap,driver_version"


def output(*command: str) -> Tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command; 127 where it is missing."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=False
        )
    except FileNotFoundError:
        return 127, "", f"{command[0]}: not found"
    except subprocess.TimeoutExpired:
        return 124, "", f"{command[0]}: no answer within 60 s"
    return (
        done.returncode,
        done.stdout.decode(errors="replace"),
        done.stderr.decode(errors="replace"),
    )


def read(path: str) -> Optional[str]:
    """Text of a small file, or None."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def read_json(path: str) -> Any:
    """JSON of a small file, or None where it is missing or broken."""
    text = read(path)
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None


def os_release() -> Dict[str, str]:
    """ID, VERSION_ID and PRETTY_NAME of the distribution."""
    found = {}
    for line in (read("/etc/os-release") or "").splitlines():
        key, _, value = line.partition("=")
        found[key] = value.strip().strip('"')
    return {
        "id": found.get("ID", ""),
        "version": found.get("VERSION_ID", ""),
        "name": found.get("PRETTY_NAME", ""),
    }


def owner(uid: int, gid: int) -> Tuple[str, str]:
    """User and group names, numbers where there is no name."""
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    try:
        group = grp.getgrgid(gid).gr_name
    except KeyError:
        group = str(gid)
    return user, group


def file_state(path: str) -> Optional[List[str]]:
    """[sha256, mode, user, group] of a regular file; None where there is none."""
    try:
        if os.path.islink(path) or not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        status = os.stat(path)
    except OSError:
        return None
    return [digest, oct(status.st_mode & 0o7777), *owner(status.st_uid, status.st_gid)]


def packages(names: Sequence[str]) -> Dict[str, str]:
    """Installed version by package name; what is not installed is missing."""
    if not names:
        return {}
    _, text, _ = output(
        "dpkg-query", "-W", "-f", "${Package}\t${db:Status-Status}\t${Version}\n", *names
    )
    found = {}
    for line in text.splitlines():
        name, status, version = line.split("\t")
        if status == "installed":
            found[name] = version
    return found


def units(names: Sequence[str]) -> Dict[str, Dict[str, str]]:
    """Fields of our instances' units and of the named ones, by unit name."""
    wanted = set(names)
    for path in glob.glob("/etc/systemd/system/*.wants/vllm@*.service") + glob.glob(
        "/etc/systemd/system/vllm@*.service.d"
    ):
        name = os.path.basename(path)
        wanted.add(name[: -len(".d")] if name.endswith(".d") else name)
    _, listed, _ = output(
        "systemctl", "list-units", "--all", "--plain", "--no-legend", "vllm@*.service"
    )
    wanted.update(line.split()[0] for line in listed.splitlines() if line.strip())
    if not wanted:
        return {}
    _, text, _ = output("systemctl", "show", "-p", UNIT_FIELDS, "--", *sorted(wanted))
    found = {}
    for block in text.strip().split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("Id"):
            found[fields.pop("Id")] = fields
    return found


def unit_of(pid: int) -> Optional[str]:
    """The systemd unit that holds a process, or None."""
    for line in (read(f"/proc/{pid}/cgroup") or "").splitlines():
        for part in reversed(line.split("/")):
            if part.endswith(".service"):
                return part.replace("\\x2d", "-")
    return None


def process(pid: int) -> Dict[str, Any]:
    """Who a process is: pid, user, command line (cut), unit."""
    try:
        user = owner(os.stat(f"/proc/{pid}").st_uid, 0)[0]
    except OSError:
        user = "?"
    command = (read(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    return {"pid": pid, "user": user, "command": command[:200], "unit": unit_of(pid)}


def listening() -> Dict[str, Dict[str, Any]]:
    """Processes that listen on TCP, by port (as text, since JSON keys are)."""
    ports: Dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read(table) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                ports[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    if not ports:
        return {}
    found: Dict[str, Dict[str, Any]] = {
        str(port): {"pid": 0, "user": "?", "command": "?", "unit": None} for port in ports.values()
    }
    for folder in glob.glob("/proc/[0-9]*/fd"):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            try:
                link = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
            port = ports.get(link[len("socket:[") : -1]) if link.startswith("socket:[") else None
            if port is not None and not found[str(port)]["pid"]:
                found[str(port)] = process(int(folder.split("/")[2]))
    return found


def cards() -> Dict[str, Any]:
    """Texts of nvidia-smi: the cards, and the processes that hold them."""
    code, text, error = output(
        "nvidia-smi", f"--query-gpu={CARD_QUERY}", "--format=csv,noheader,nounits"
    )
    if code == 127:
        return {"present": bool(glob.glob("/proc/driver/nvidia/version")), "error": None, "csv": ""}
    if code != 0:
        return {"present": True, "error": (error or text).strip()[:500], "csv": ""}
    _, apps, _ = output(
        "nvidia-smi",
        "--query-compute-apps=gpu_uuid,pid,used_memory",
        "--format=csv,noheader,nounits",
    )
    holders = []
    for line in apps.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 2 and fields[1].isdigit():
            holders.append({"uuid": fields[0], **process(int(fields[1]))})
    return {"present": True, "error": None, "csv": text, "holders": holders}


def disks(paths: Sequence[str]) -> Dict[str, Dict[str, int]]:
    """Free MiB and device number of the file system that holds (or will hold) each path."""
    found = {}
    for path in paths:
        there = path
        while not os.path.exists(there):
            there = os.path.dirname(there)
        found[path] = {
            "free_mib": shutil.disk_usage(there).free // 2**20,
            "device": os.stat(there).st_dev,
        }
    return found


def stamped(pattern: str, stamp: str) -> Dict[str, Any]:
    """Parsed stamp files by the part of the path that the pattern's stars stand for."""
    found = {}
    for path in glob.glob(f"{pattern}/{stamp}"):
        name = os.path.relpath(os.path.dirname(path), pattern.split("*")[0])
        if not any(part.startswith(".") for part in name.split("/")):
            found[name] = read_json(path) or {}
    return found


def instances() -> Dict[str, Dict[str, Any]]:
    """What each instance of ours was started with, whether it is ready, and its release."""
    found = {}
    for path in sorted(glob.glob(f"{ETC}/*.env")):
        name = os.path.basename(path)[: -len(".env")]
        release = re.search(r'^FLEET_RELEASE="?([^"\n]*)', read(path) or "", re.MULTILINE)
        found[name] = {
            "running": (read(f"{STATE}/{name}/running") or "").strip(),
            "ready": os.path.exists(f"{RUN}/{name}/ready"),
            "release": os.path.basename(release.group(1)) if release else "",
        }
    return found


def weights() -> Dict[str, Dict[str, Any]]:
    """What each stamp of verified weights says, by its path, and whether the files still match.

    A file that changed size or time since it was hashed is no longer a verified one.
    """
    found = {}
    for path in glob.glob(f"{OPT}/models/*/*/.verified.json") + glob.glob(
        f"{STATE}/weights/*.json"
    ):
        stamp = read_json(path)
        if not isinstance(stamp, dict):
            continue
        folder = stamp.get("directory") or os.path.dirname(path)
        intact = True
        for name, known in (stamp.get("files") or {}).items():
            try:
                status = os.stat(os.path.join(folder, name))
                intact &= [status.st_size, status.st_mtime_ns] == [known["size"], known["mtime_ns"]]
            except (OSError, KeyError, TypeError):
                intact = False
        kept = ("source", "repo", "revision", "passed")
        found[path] = {**{key: stamp.get(key) for key in kept}, "intact": intact}
    return found


def memory() -> Dict[str, int]:
    """MemTotal and MemAvailable in MiB."""
    found = {}
    for line in (read("/proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key in ("MemTotal", "MemAvailable"):
            found[key] = int(value.split()[0]) // 1024
    return {"total_mib": found.get("MemTotal", 0), "available_mib": found.get("MemAvailable", 0)}


def tools() -> Optional[str]:
    """Name of the tools venv in use, or None."""
    link = f"{OPT}/tools/current"
    return os.path.basename(os.readlink(link)) if os.path.islink(link) else None


def main() -> None:
    """Print the state."""
    asked = json.loads(sys.argv[1])
    manifest = read_json(MANIFEST) or {}
    state = {
        "hostname": socket.gethostname(),
        "user": owner(os.geteuid(), os.getegid())[0],
        "os": os_release(),
        "arch": platform.machine(),
        "kernel": platform.release(),
        "glibc": platform.libc_ver()[1],
        "python": platform.python_version(),
        "init": (read("/proc/1/comm") or "").strip(),
        "systemd": os.path.isdir("/run/systemd/system"),
        "memory": memory(),
        "disks": disks(asked["disks"]),
        "packages": packages(asked["packages"]),
        "vllm_user": any(entry.pw_name == "vllm" for entry in pwd.getpwall()),
        "manifest": manifest,
        "files": {path: found for path in sorted(manifest) if (found := file_state(path))},
        "units": units(asked["units"]),
        "listening": listening(),
        "cards": cards(),
        "releases": stamped(f"{OPT}/releases/*", "release.json"),
        "tools": tools(),
        "weights": weights(),
        "loaded": {
            os.path.basename(path): (read(path) or "").strip()
            for path in glob.glob(f"{STATE}/loaded/*")
        },
        "instances": instances(),
        "texts": {path: read(path) for path in asked["texts"]},
    }
    json.dump(state, sys.stdout, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
