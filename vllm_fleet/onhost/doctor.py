"""What `fleet doctor` asks of a host beside its state: does it work, and who is in the way?

Runs as root with the host's own Python, standard library and our other scripts only; changes
nothing. Reads one JSON object from standard input::

    {"instances": [{"name", "port", "model", "names", "task", "template", "weights"}],
     "stamps": [path],             stamps of the weights that are to be there
     "deep": bool,                 read every byte of them
     "gateway": null | {"port", "tls", "server_name", "key", "models": {name: task},
                        "reach": {"host/instance": [address, port]}},
     "prometheus": null | port,
     "watched": [port],            ports that others must reach
     "seconds": 20}                how long one answer may take

and prints ``result`` and what it found as its last line. No text of a secret is printed: of
environments only the variables of NCCL, Gloo, UCX and debugging, and never a key.
"""

import contextlib
import glob
import hashlib
import http.client
import json
import os
import re
import shlex
import socket
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

if __package__:
    from vllm_fleet.onhost import acceptance, state, structure
else:  # sent to a host, one module after the other
    import acceptance  # type: ignore[import-not-found,no-redef]
    import state  # type: ignore[import-not-found,no-redef]
    import structure  # type: ignore[import-not-found,no-redef]

Json = Dict[str, Any]

JOURNAL_LINES = 400
TURN_TOKENS = 32
LOG_SECONDS = 86400
HASH_BLOCK = 8 << 20
SERVER = re.compile(r"(^|[\s/])vllm\s+serve\b|vllm\.entrypoints\.|(^|\s)-m\s+vllm\b")
WORKER = re.compile(r"^VLLM::")
# What names a server in its arguments and is none: it starts one, or looks for one.
SPEAKERS = frozenset({
    "ssh", "sudo", "su", "sh", "bash", "dash", "zsh", "fish", "env", "nohup", "setsid",
    "timeout", "nice", "taskset", "numactl", "tmux", "screen", "docker", "podman", "nerdctl",
    "kubectl", "grep", "pgrep", "pkill", "journalctl", "tail", "less", "more", "cat", "vi",
    "vim", "nano", "emacs", "watch",
})  # fmt: skip
# What may be told of an environment: it holds keys and tokens too.
TOLD = re.compile(
    r"^(NCCL_\w+|GLOO_\w+|UCX_\w+|CUDA_LAUNCH_BLOCKING|CUDA_VISIBLE_DEVICES|TORCH_\w*DEBUG\w*"
    r"|TORCH_CPP_LOG_LEVEL|VLLM_LOGGING_LEVEL|VLLM_TRACE_FUNCTION|VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
    r"|TP_SOCKET_IFNAME)$"
)
_ASSIGNED = re.compile(r'(?:^|[\s"\'=])([A-Z_][A-Z0-9_]*)=("(?:[^"\\]|\\.)*"|[^\s"\']*)')
OUR_DROP_IN = "10-instance.conf"
REAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "nfs4"})


def failure(error: BaseException) -> str:
    """An error in words that tell a blocked port from a closed one."""
    inner = getattr(error, "reason", None)  # of urllib's own class
    if isinstance(inner, BaseException):
        error = inner
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return str(error) or type(error).__name__


# --- processes


def processes() -> Dict[int, Tuple[int, str]]:
    """Parent and command line of every process."""
    found = {}
    for folder in glob.glob("/proc/[0-9]*"):
        stat = state.read(folder + "/stat")
        command = (state.read(folder + "/cmdline") or "").replace("\0", " ").strip()
        if stat and command:
            found[int(os.path.basename(folder))] = (
                int(stat.rpartition(")")[2].split()[1]),
                command,
            )
    return found


def strangers(table: Mapping[int, Tuple[int, str]]) -> List[Json]:
    """Processes of vLLM outside our units: servers started by hand, and engines without one."""
    found: Dict[int, Json] = {}
    for pid, (_, command) in table.items():
        server, worker = bool(SERVER.search(command)), bool(WORKER.match(command))
        if not (server or worker) or pid == os.getpid():
            continue
        program = os.path.basename(command.split()[0])
        if program in SPEAKERS:
            continue
        one = state.process(pid)
        if one is None or str(one["unit"]).startswith("vllm@"):
            continue
        found[pid] = {**one, "kind": "server" if server else "engine"}
    servers = {pid for pid, one in found.items() if one["kind"] == "server"}
    workers = {pid for pid, one in found.items() if one["kind"] == "engine"}
    return [
        {**one, "workers": sorted(w for w in workers if pid in ancestors(w, table))}
        for pid, one in sorted(found.items())
        # An engine of a server that is told already goes with it; so does a shell's child.
        if not (set(ancestors(pid, table)) & servers)
    ]


def ancestors(pid: int, table: Mapping[int, Tuple[int, str]]) -> List[int]:
    """Parents of a process, the nearest first."""
    found: List[int] = []
    while pid in table and table[pid][0] not in found:
        pid = table[pid][0]
        found.append(pid)
    return found


# --- one instance


def instance(order: Json, seconds: float) -> Json:
    """What one instance answers, past its gate, and what its next start would take in."""
    name, port = order["name"], int(order["port"])
    unit = "vllm@%s.service" % name
    fields = show(
        unit, "ActiveState,MainPID,NRestarts,DropInPaths,EnvironmentFiles,ActiveEnterTimestamp"
    )
    pid = int(fields.get("MainPID") or 0)
    found: Json = {
        "script_names": script_names(state.read("%s/%s.sh" % (state.ETC, name)) or ""),
        "environment": environment(name, fields, pid),
        "restarts": restarts(unit, int(fields.get("NRestarts") or 0), fields),
        "names": None,
        "answer": None,
        "turns": None,
        "why": "",
    }
    if order.get("template"):
        found["template"] = template(order["weights"])
    if fields.get("ActiveState") not in ("active", "activating", "reloading") or not pid:
        return found
    token = acceptance.text_of("%s/%s/token" % (state.RUN, name)).strip()
    key = acceptance.api_key(name)
    try:
        headers = {"X-Fleet-Token": token}
        if key:
            headers["Authorization"] = "Bearer " + key
        listed = get_json("http://127.0.0.1:%d/v1/models" % port, seconds, headers)
        found["names"] = [str(one["id"]) for one in listed["data"]]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        found["why"] = "/v1/models: %s" % failure(error)
        return found
    if fields.get("ActiveState") != "active":
        return found
    client = acceptance.Client(port, token, key, seconds)
    begun = time.monotonic()
    asked = found["names"][0] if order["model"] not in found["names"] else order["model"]
    try:
        client.post(*question(order["task"], asked))
        found["answer"] = {"ok": True, "seconds": round(time.monotonic() - begun, 2), "why": ""}
    except acceptance.Failure as error:
        found["answer"] = {"ok": False, "why": str(error), "waiting": waiting(port, seconds)}
        return found
    if order["task"] == "chat":
        # Three answers in the time of one: a busy engine is not to use up the host's time.
        found["turns"] = turns(acceptance.Client(port, token, key, seconds / 3), asked)
    return found


def waiting(port: int, seconds: float) -> Optional[int]:
    """Requests that wait in an engine; None where it does not say."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open("http://127.0.0.1:%d/metrics" % port, timeout=seconds) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return None
    found = re.findall(r"^vllm:num_requests_waiting(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return int(sum(float(value) for value in found)) if found else None


def question(task: str, model: str) -> Tuple[str, Json]:
    """Path and body of the smallest request of a task."""
    if task == "embed":
        return "/v1/embeddings", {"model": model, "input": "hello"}
    if task == "rerank":
        return "/v1/rerank", {"model": model, "query": "hello", "documents": ["hello"]}
    messages = [{"role": "user", "content": "hello"}]
    return "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1}


def turns(client: Any, model: str) -> Json:
    """A talk of three turns: how many answers came, how many ended by themselves."""
    probe = acceptance.Probe(
        client, {"model": model, "answer_tokens": TURN_TOKENS, "probes": 1, "task": "chat"}
    )
    try:
        probe.conversation()
    except acceptance.Failure as error:
        return {"ok": False, "why": str(error)}
    return {"ok": True, "why": "", **probe.found}


def script_names(text: str) -> List[str]:
    """The names that a launch script has the server answer to."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return []
    names: List[str] = []
    taking = False
    for word in words:
        if word.startswith("--"):
            taking = word == "--served-model-name"
            if word.startswith("--served-model-name="):
                names.append(word.partition("=")[2])
        elif taking:
            names.append(word)
    return names


def template(directory: str) -> bool:
    """Whether the weights on disk bring a chat template."""
    names = [
        os.path.relpath(path, directory)
        for pattern in ("*", "additional_chat_templates/*")
        for path in glob.glob("%s/%s" % (glob.escape(directory), pattern))
    ]
    try:
        return structure.has_chat_template(Path(directory), names)
    except ValueError:  # tokenizer_config.json is no JSON
        return False


def show(unit: str, fields: str) -> Dict[str, str]:
    """Fields of a unit."""
    _, text, _ = state.output("systemctl", "show", "-p", fields, "--", unit)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def environment(name: str, fields: Mapping[str, str], pid: int) -> Dict[str, Json]:
    """Variables that may be told, each with its value and the files that set it.

    From the files, which the next start takes in, and from the process that runs.
    """
    found: Dict[str, Json] = {}
    files = ["%s/%s.env" % (state.ETC, name), "/etc/nccl.conf"]
    files += [path for path in (fields.get("DropInPaths") or "").split() if path]
    files += re.findall(r"(/\S+) \(ignore", fields.get("EnvironmentFiles") or "")
    for path in dict.fromkeys(files):
        for line in (state.read(path) or "").splitlines():
            if line.lstrip().startswith(("#", ";")):
                continue
            for key, value in _ASSIGNED.findall(line):
                if TOLD.match(key):
                    one = found.setdefault(key, {"value": "", "files": [], "running": None})
                    one["value"] = value.strip('"')
                    one["files"].append(path)
    for pair in (state.read("/proc/%d/environ" % pid) or "").split("\0") if pid else ():
        key, _, value = pair.partition("=")
        if TOLD.match(key):
            found.setdefault(key, {"value": value, "files": [], "running": None})["running"] = value
    return found


def restarts(unit: str, count: int, fields: Mapping[str, str]) -> Json:
    """How often systemd restarted an instance, and the log that tells why it ended."""
    found: Json = {"count": count, "log": "", "last": None}
    if not count and fields.get("ActiveState") not in ("failed", "activating"):
        return found
    _, text, _ = state.output(
        *("journalctl", "-u", unit, "-q", "--no-pager", "--no-hostname", "-o", "short-unix"),
        *("-n", str(JOURNAL_LINES), "--since", "@%d" % (time.time() - LOG_SECONDS)),
    )
    lines = [line.partition(" ") for line in text.splitlines()]
    ends = [
        number
        for number, (_, _, message) in enumerate(lines)
        if "Main process exited" in message or "Scheduled restart job" in message
    ]
    if ends:
        with contextlib.suppress(ValueError):
            found["last"] = float(lines[ends[-1]][0])
        lines = lines[: ends[-1] + 3]  # what came after belongs to the process that runs
    found["log"] = "\n".join(message for _, _, message in lines)[-60000:]
    return found


# --- weights


def weights(path: str, deep: bool) -> Json:
    """Files of a stamp that are missing, changed since, or (deep) not what was verified."""
    stamp = state.read_json(path)
    if not isinstance(stamp, dict):
        return {"there": False, "changed": [], "wrong": [], "bytes": 0}
    folder = stamp.get("directory") or os.path.dirname(path)
    changed, wrong, read = [], [], 0
    for name, known in sorted((stamp.get("files") or {}).items()):
        file = os.path.join(folder, name)
        try:
            status = os.stat(file)
        except OSError:
            changed.append([name, "is gone"])
            continue
        if status.st_size != known.get("size"):
            changed.append([name, "has %d bytes, not %s" % (status.st_size, known.get("size"))])
        elif status.st_mtime_ns != known.get("mtime_ns"):
            changed.append([name, "was written since it was verified"])
        if deep and known.get("sha256"):
            read += status.st_size
            if sha256(file) != known["sha256"]:
                wrong.append(name)
    return {"there": True, "changed": changed, "wrong": wrong, "bytes": read}


def sha256(path: str) -> str:
    """Checksum of a file, in hex; "" where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while True:
                block = file.read(HASH_BLOCK)
                if not block:
                    return digest.hexdigest()
                digest.update(block)
    except OSError:
        return ""


# --- the gateway


def get_json(url: str, seconds: float, headers: Optional[Mapping[str, str]] = None) -> Any:
    """JSON of an address on this host; no proxy is asked. Raises OSError, ValueError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(
        urllib.request.Request(url, headers=dict(headers or {})), timeout=seconds
    ) as a:
        return json.load(a)


def gateway(order: Json, seconds: float) -> Json:
    """What clients get here: names, one answer of each pool; and whether instances are reached."""
    found: Json = {"why": "", "names": None, "answers": {}, "status": None, "certificate": None}
    jobs: Dict[str, Callable[[], Any]] = {
        "reach": lambda: reach(order["reach"]),
        "status": lambda: get_json("http://127.0.0.1:9145/status", seconds),
    }
    if order.get("tls"):
        jobs["certificate"] = lambda: certificate(order, seconds)
    found.update(state.side_by_side(jobs))
    headers = {"Content-Type": "application/json"}
    if order.get("key"):
        headers["Authorization"] = "Bearer " + order["key"]
    status, text = ask(order, "GET", "/v1/models", None, headers, seconds)
    if status == 200:
        try:
            found["names"] = [str(one["id"]) for one in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError):
            found["why"] = "/v1/models gave no list"
    elif status == 401 and not order.get("key"):
        found["why"] = "asks for a key"
    else:
        found["why"] = "/v1/models: %s" % (
            text[:300] if not status else "%d %s" % (status, text[:300])
        )

    def answer(name: str, task: str) -> Callable[[], Json]:
        def run() -> Json:
            path, body = question(task, name)
            begun = time.monotonic()
            status, text = ask(order, "POST", path, body, headers, seconds)
            took = round(time.monotonic() - begun, 2)
            return {"ok": status == 200, "why": "%d %s" % (status, text[:300]), "seconds": took}

        return run

    if found["names"] is not None:
        found["answers"] = state.side_by_side(
            {name: answer(name, task) for name, task in order["models"].items()}
        )
    return found


def ask(
    order: Json, method: str, path: str, body: Any, headers: Mapping[str, str], seconds: float
) -> Tuple[int, str]:
    """Status and text of the gateway's answer; 0 and why where none came."""
    port = int(order["port"])
    connection: http.client.HTTPConnection
    if order.get("tls"):
        context = ssl.create_default_context()
        context.check_hostname = False  # the certificate is judged apart
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=seconds, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        text = json.dumps(body) if body is not None else None
        host = {"Host": order["server_name"]} if order.get("server_name") else {}
        connection.request(method, path, text, {**headers, **host})
        response = connection.getresponse()
        return response.status, response.read(1 << 20).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, failure(error)
    finally:
        connection.close()


def reach(instances: Mapping[str, Sequence[Any]]) -> Dict[str, str]:
    """By instance, why this host cannot connect to it; "" where it can."""

    def connect(address: str, port: int) -> Callable[[], str]:
        def run() -> str:
            try:
                socket.create_connection((address, port), timeout=4).close()
                return ""
            except OSError as error:
                return failure(error)

        return run

    return state.side_by_side(
        {name: connect(str(where[0]), int(where[1])) for name, where in instances.items()}
    )


def certificate(order: Json, seconds: float) -> Optional[str]:
    """The certificate that clients are shown, as PEM."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", int(order["port"])), timeout=seconds) as plain:
        name = order.get("server_name") or "localhost"
        with context.wrap_socket(plain, server_hostname=name) as wrapped:
            shown = wrapped.getpeercert(binary_form=True)
    return ssl.DER_cert_to_PEM_cert(shown) if shown else None


# --- Prometheus


def prometheus(port: int, seconds: float) -> Json:
    """Targets that are down, and alerts that fire."""
    base = "http://127.0.0.1:%d/api/v1" % port
    try:
        targets = get_json(base + "/targets?state=active", seconds)["data"]["activeTargets"]
        alerts = get_json(base + "/alerts", seconds)["data"]["alerts"]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        return {"why": failure(error), "targets": 0, "down": [], "alerts": []}
    return {
        "why": "",
        "targets": len(targets),
        "down": [
            {
                "job": one["labels"].get("job", ""),
                "host": one["labels"].get("host", ""),
                "instance": one["labels"].get("instance", ""),
                "url": one.get("scrapeUrl", ""),
                "error": one.get("lastError", ""),
            }
            for one in targets
            if one.get("health") == "down"
        ],
        "alerts": [
            {
                "labels": one["labels"],
                "summary": one["annotations"].get("summary", ""),
                "runbook": one["annotations"].get("runbook_url", ""),
                "since": one.get("activeAt", ""),
            }
            for one in alerts
            if one.get("state") == "firing"
        ],
    }


# --- the host


def disks() -> List[Json]:
    """Room on the file systems that hold something of ours or the system."""
    found: Dict[str, Json] = {}
    kinds = {}
    for line in (state.read("/proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) > 2:
            kinds[fields[1]] = fields[2]
    for path in ("/", "/opt/vllm", "/var/lib/vllm", "/var/log", "/var/cache", "/tmp", "/etc"):
        place = path
        while not os.path.exists(place) or (place != "/" and not os.path.ismount(place)):
            place = os.path.dirname(place)
        if place in found or kinds.get(place, "ext4") not in REAL_DISKS:
            continue
        room = os.statvfs(place)
        found[place] = {
            "mount": place,
            "free_mib": room.f_bavail * room.f_frsize // 2**20,
            "free": round(room.f_bavail / room.f_blocks, 4) if room.f_blocks else 1.0,
            "inodes_free": round(room.f_favail / room.f_files, 4) if room.f_files else 1.0,
        }
    return list(found.values())


def synchronised() -> Optional[bool]:
    """Whether the clock follows others; None where that cannot be told."""
    code, text, _ = state.output("timedatectl", "show", "-p", "NTPSynchronized")
    word = text.strip().partition("=")[2]
    return {"yes": True, "no": False}.get(word) if code == 0 else None


def blocking(ports: Iterable[int]) -> List[Json]:
    """Rules of firewalls other than ours that drop or refuse one of these ports."""
    code, text, _ = state.output("nft", "-a", "list", "ruleset")
    if code != 0:
        return []
    wanted = set(ports)
    found: List[Json] = []
    table = chain = ""
    for line in text.splitlines():
        opened = re.match(r"\s*(table (\S+) (\S+)|chain (\S+)) \{", line)
        if opened:
            if opened.group(2):
                table = "%s %s" % (opened.group(2), opened.group(3))
            else:
                chain = opened.group(4)
            continue
        rule = re.match(r"\s*(.*\bdport\b.*\b(?:drop|reject)\b.*?)\s*# handle (\d+)", line)
        if rule is None or table == "inet vllm_fleet":
            continue
        for port in sorted(wanted & ports_of(rule.group(1))):
            found.append(
                {
                    "port": port,
                    "rule": rule.group(1),
                    "at": "%s %s" % (table, chain),
                    "handle": int(rule.group(2)),
                }
            )
    return found


def ports_of(rule: str) -> "set[int]":
    """The ports that a rule of nftables names, ranges included."""
    found: "set[int]" = set()
    named = re.search(r"dport\s+(\{[^}]*\}|[\d-]+)", rule)
    for first, _, last in re.findall(r"(\d+)(-(\d+))?", named.group(1) if named else ""):
        found.update(range(int(first), int(last or first) + 1))
    return found


def main() -> int:
    """Look, and print what was seen."""
    order = json.load(sys.stdin)
    seconds = float(order["seconds"])
    jobs: Dict[str, Callable[[], Any]] = {
        "strangers": lambda: strangers(processes()),
        "disks": disks,
        "synchronised": synchronised,
        "interfaces": lambda: sorted(os.listdir("/sys/class/net")),
        "blocking": lambda: blocking(order["watched"]),
    }
    for one in order["instances"]:
        jobs["instance " + one["name"]] = lambda one=one: instance(one, seconds)  # type: ignore[misc]
    for path in order["stamps"]:
        jobs["stamp " + path] = lambda path=path: weights(path, bool(order["deep"]))  # type: ignore[misc]
    if order.get("gateway"):
        jobs["gateway"] = lambda: gateway(order["gateway"], seconds)
    if order.get("prometheus"):
        jobs["prometheus"] = lambda: prometheus(int(order["prometheus"]), seconds)
    found = state.side_by_side(jobs)
    result = {
        "time": time.time(),
        "instances": {
            name[len("instance ") :]: seen
            for name, seen in found.items()
            if name.startswith("instance ")
        },
        "stamps": {
            name[len("stamp ") :]: seen for name, seen in found.items() if name.startswith("stamp ")
        },
        **{
            name: seen
            for name, seen in found.items()
            if not name.startswith(("instance ", "stamp "))
        },
    }
    print("result " + json.dumps(result), flush=True)
    # A thread that hangs in a dead disk must not hold this process.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
