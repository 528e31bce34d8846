"""Asks every instance of this host for one token, and frees clients of a wedged engine.

    probe.py SETTINGS

One round, begun by a timer, as root. A wedged engine answers /health with 200 for hours. It is
told from a busy one by two things together: the probe's request is not answered in time, and
nothing that the engine reports has moved for `wedged_seconds`: tokens, prompts, running and
waiting requests, use of the KV cache. A saturated engine gives tokens to others meanwhile, and
one in a long prefill fills its cache. Where the server does not even show its metrics, the CPU
time of its process counts instead: what computes is not wedged.

Wedged: its ready file is taken away, so that the gate refuses and gateways ask others; put back
when it answers again. Still so after `restart_seconds`: stacks of its processes are saved
(without values of variables, root alone may read them) and it is killed; systemd starts it anew.
Never the last ready instance of its pool, one of a pool at a time, at most so often: who is ready
is asked of the gateways. Where none answers, nothing is taken out.

SETTINGS is JSON: {"instances": [{"name", "pool", "port", "task", "start_seconds"}], "host",
"gateways": ["address:port"], "deadline_seconds", "wedged_seconds", "restart_seconds", "restart",
"restarts_per_hour", "restart_last"}. Standard library alone; runs with the system's Python.
"""

import contextlib
import glob
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

RUN = "/run/vllm"
ETC = "/etc/vllm"
STATE = "/var/lib/vllm"
METRICS_FILE = "vllm_fleet_probe.prom"
KEEP_STACKS = 20
STACK_SECONDS = 20
METRICS_SECONDS = 5
LOOK_SECONDS = 30  # between two looks at the pool while all is well
# What the engine's own process reports: the API process alone changes none of them.
MOVES = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
)

Json = Dict[str, Any]


class Answer(NamedTuple):
    """How a probe went."""

    ok: bool
    silent: bool  # no answer at all in time, rather than a wrong one
    seconds: float
    said: str


class Peer(NamedTuple):
    """An instance as a gateway sees it."""

    name: str  # host/instance
    ready: bool


def main(arguments: Sequence[str]) -> int:
    """One round over all instances, side by side."""
    with open(arguments[0], encoding="utf-8") as file:
        settings = json.load(file)
    state_path = os.path.join(STATE, "probe.json")
    state = read_json(state_path)
    rounds = [Round(settings, one, state.get(one["name"]) or {}) for one in settings["instances"]]
    threads = [threading.Thread(target=one.run) for one in rounds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # One after the other: two wedged ones of this host must not both find the other ready.
    for one in rounds:
        one.act()
    write(state_path, json.dumps({one.name: one.memory for one in rounds}, indent=1), 0o600)
    folder = os.path.join(STATE, "metrics")
    os.makedirs(folder, exist_ok=True)
    write(os.path.join(folder, METRICS_FILE), metrics(rounds), 0o644)
    return 0


class Round:
    """One instance in one round. ``memory`` is what the next round must know."""

    def __init__(self, settings: Json, instance: Json, memory: Json) -> None:
        self.settings = settings
        self.instance = instance
        self.name: str = instance["name"]
        self.unit = "vllm@%s.service" % self.name
        self.run_dir = os.path.join(RUN, self.name)
        self.memory: Json = {"restarts": [], "restarts_total": 0, **memory}
        self.answer: Optional[Answer] = None
        self.wedged_for = 0.0

    @property
    def out(self) -> bool:
        """Whether it was us who took it out of rotation."""
        return os.path.exists(os.path.join(self.run_dir, "wedged"))

    def run(self) -> None:
        """Ask it, and where it is silent wait until it is known whether anything moves."""
        unit = show(self.unit)
        pid = unit.get("MainPID", "0")
        ready = os.path.exists(os.path.join(self.run_dir, "ready"))
        if unit.get("ActiveState") != "active" or pid == "0" or not (ready or self.out):
            # Starting, stopping, drained: nothing that this run may speak of.
            self.memory.update(pid=None, moved=None, changed_at=None)
            return
        if self.memory.get("pid") != pid:
            self.memory.update(pid=pid, moved=None, changed_at=None)
        self._look(pid)
        asked_at = time.monotonic()
        self.answer = self._ask()
        while True:
            self._look(pid)
            if self.answer.ok:
                self.memory["changed_at"] = time.monotonic()  # it gave a token, if none to others
            self.wedged_for = time.monotonic() - float(self.memory["changed_at"])
            missing = self.settings["wedged_seconds"] - self.wedged_for
            moved = float(self.memory["changed_at"]) >= asked_at
            if not self.answer.silent or missing <= 0 or moved:
                return
            if not alive(int(pid)):
                return
            time.sleep(min(1.0, max(0.1, missing)))

    def _look(self, pid: str) -> None:
        """Note when what the engine reports last changed."""
        now = time.monotonic()
        moved = movement(int(self.instance["port"])) or "cpu %d" % cpu_seconds(int(pid))
        changed_at = self.memory.get("changed_at")
        # monotonic begins anew with a boot
        if moved != self.memory.get("moved") or changed_at is None or changed_at > now:
            self.memory.update(moved=moved, changed_at=now)

    def _ask(self) -> Answer:
        try:
            with open(os.path.join(self.run_dir, "token"), encoding="ascii") as file:
                token = file.read().strip()
        except OSError as error:
            return Answer(False, False, 0.0, "no token of this start: %s" % error)
        key = env_value(os.path.join(ETC, self.name + ".env"), "VLLM_API_KEY")
        return ask(self.instance, token, key, float(self.settings["deadline_seconds"]))

    def act(self) -> None:
        """Put back what answers; take out, and in the end restart, what is wedged."""
        if self.answer is None:
            return
        if self.answer.ok:
            if self.out:
                self._put_back()
            # Who of the pool is there now and then: a restart of theirs is known by it.
            if abs(time.time() - self.memory.get("looked", 0)) >= LOOK_SECONDS:
                self._others()
            return
        say("%s: %s" % (self.name, self.answer.said))
        if not self.answer.silent or self.wedged_for < self.settings["wedged_seconds"]:
            return
        others = self._others()
        if not self.out:
            if not self._may_go(others):
                return
            self._take_out()
        if self.wedged_for >= self.settings["restart_seconds"] and self._may_restart(others):
            self._restart()

    def _others(self) -> Optional[List[Peer]]:
        """The other instances of the pool; None where no gateway says."""
        mine = "%s/%s" % (self.settings["host"], self.name)
        found: Optional[List[Peer]] = None
        for gateway in self.settings["gateways"]:
            peers = pool_of(gateway, self.instance["pool"])
            if peers is None:
                continue
            seen = [p for p in peers if p.name != mine]
            if found is None:
                found = seen
            else:
                # Ready is what every gateway that answers sees as ready.
                ready = {p.name for p in seen if p.ready}
                found = [Peer(p.name, p.ready and p.name in ready) for p in found]
        self.memory["looked"] = time.time()
        for peer in found or ():
            if peer.ready:
                self.memory.setdefault("seen", {})[peer.name] = time.time()
        return found

    def _may_go(self, others: Optional[List[Peer]]) -> bool:
        if self.settings["restart_last"]:
            return True
        if others is None:
            say("%s: wedged, left in rotation: no gateway says who else is ready" % self.name)
            return False
        if not any(p.ready for p in others):
            say(
                "%s: wedged, left as it is: no other instance of %s is ready; set "
                "probe.restart_last to restart it all the same" % (self.name, self.instance["pool"])
            )
            return False
        return True

    def _may_restart(self, others: Optional[List[Peer]]) -> bool:
        if not self.settings["restart"]:
            say("%s: wedged, not restarted: probe.restart is off" % self.name)
            return False
        now = time.time()
        self.memory["restarts"] = [t for t in self.memory["restarts"] if t > now - 3600]
        if len(self.memory["restarts"]) >= self.settings["restarts_per_hour"]:
            say("%s: wedged, not restarted: it was %d times in the last hour" % (
                self.name, len(self.memory["restarts"])))  # fmt: skip
            return False
        if not self._may_go(others):
            return False
        mine = "%s/%s" % (self.settings["host"], self.name)
        seen = self.memory.get("seen") or {}
        for peer in others or ():
            # Ready a while ago and not now: it is being restarted. Of two wedged at once the
            # first by name goes first; what has been away for longer is waited for no more.
            recent = now - seen.get(peer.name, 0) < self.instance["start_seconds"]
            if not peer.ready and recent and peer.name < mine:
                say("%s: wedged, waits: %s is coming up" % (self.name, peer.name))
                return False
        return True

    def _take_out(self) -> None:
        say(
            "%s: WEDGED: no answer, and nothing moved for %.0f s: out of rotation"
            % (self.name, self.wedged_for)
        )
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(self.run_dir, "ready"), os.path.join(self.run_dir, "wedged"))

    def _put_back(self) -> None:
        say("%s: answers again: back in rotation" % self.name)
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(self.run_dir, "wedged"), os.path.join(self.run_dir, "ready"))

    def _restart(self) -> None:
        unit = show(self.unit)
        if unit.get("ActiveState") != "active" or unit.get("MainPID") != self.memory["pid"]:
            return  # it ended, or somebody stops it
        path = save_stacks(self.name, self.unit)
        say("%s: wedged for %.0f s: stacks in %s; killed, to start anew" % (
            self.name, self.wedged_for, path))  # fmt: skip
        self.memory["restarts"].append(time.time())
        self.memory["restarts_total"] += 1
        # Not `restart`: that would drain, and what is wedged finishes nothing.
        subprocess.run(["systemctl", "kill", "--signal=SIGKILL", self.unit], check=False)


def ask(instance: Mapping[str, Any], token: str, key: Optional[str], deadline: float) -> Answer:
    """One request past the gate, for one token or the least that the task has."""
    model, task = instance["model"], instance["task"]
    if task == "embed":
        path, body = "/v1/embeddings", {"model": model, "input": "1"}
    elif task == "rerank":
        path, body = "/v1/rerank", {"model": model, "query": "1", "documents": ["1"]}
    else:
        path = "/v1/chat/completions"
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "1"}]}
    headers = {"Content-Type": "application/json", "X-Fleet-Token": token}
    if key:
        headers["Authorization"] = "Bearer " + key
    begun = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", int(instance["port"]), timeout=deadline)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read(65536).decode(errors="replace")
        status = response.status
    except TimeoutError:
        return Answer(False, True, deadline, "%s: no answer within %g s" % (path, deadline))
    except (OSError, http.client.HTTPException) as error:
        took = time.monotonic() - begun
        return Answer(False, False, took, "%s: %s" % (path, str(error) or type(error).__name__))
    finally:
        connection.close()
    took = time.monotonic() - begun
    if status != 200:
        return Answer(False, False, took, "%s answered %d: %s" % (path, status, text[:300]))
    return Answer(True, False, took, "")


def movement(port: int) -> Optional[str]:
    """All that the engine reports of its progress, as one text; None where it is not shown."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=METRICS_SECONDS)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        if response.status != 200:
            return None
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return "\n".join(line for line in text.splitlines() if re.split(r"[{ ]", line)[0] in MOVES)


def pool_of(gateway: str, pool: str) -> Optional[List[Peer]]:
    """The instances of a pool as a gateway's /status has them; None where it does not say."""
    host, _, port = gateway.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=3)
    try:
        connection.request("GET", "/status", headers={"Accept": "application/json"})
        response = connection.getresponse()
        status = json.loads(response.read())
        return peers_in(status, pool) if response.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def peers_in(status: Json, pool: str) -> Optional[List[Peer]]:
    """The instances of a pool in the JSON of /status."""
    for one in status.get("pools") or ():
        if one.get("name") == pool:
            return [
                Peer(
                    "%s/%s" % (i.get("host"), i.get("name")),
                    i.get("state") == "ready",  # warm, not drained, not broken
                )
                for i in one.get("instances") or ()
            ]
    return None


def save_stacks(name: str, unit: str) -> str:
    """Where each process of the unit stands, in a file that root alone may read; its path.

    Python's own frames by py-spy where there is one (never the values of variables: prompts
    are among them), and for every thread what the kernel says it waits for.
    """
    folder = os.path.join(STATE, "stacks")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    parts = ["%s at %s\n" % (unit, time.strftime("%Y-%m-%dT%H:%M:%S%z"))]
    spy = next(
        (p for p in (
            "/opt/vllm/tools/current/bin/py-spy", shutil.which("py-spy") or "",
        ) if p and os.access(p, os.X_OK)), None,
    )  # fmt: skip
    for pid in processes(unit):
        parts.append("\n== pid %d: %s\n" % (pid, command_of(pid)))
        if spy:
            # Nonblocking: a stopped process is never made to wait, nor to run.
            parts.append(output([spy, "dump", "--nonblocking", "--pid", str(pid)]))
        for task in sorted(glob.glob("/proc/%d/task/[0-9]*" % pid)):
            head = "-- thread %s %s %s\n" % (
                os.path.basename(task), read(task + "/comm").strip(), state_of(task),
            )  # fmt: skip
            parts.append(head + (read(task + "/stack") or read(task + "/wchan") + "\n"))
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = os.path.join(folder, "%s-%s.txt" % (name, stamp))
    write(path, "".join(parts), 0o600)
    for old in sorted(glob.glob(os.path.join(folder, "%s-[0-9]*.txt" % name)))[:-KEEP_STACKS]:
        os.unlink(old)
    return path


def processes(unit: str) -> List[int]:
    """The processes of a unit, by its control group."""
    group = show(unit).get("ControlGroup") or ""
    found = []
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
        for folder, _, names in os.walk(root + group) if group else ():
            if "cgroup.procs" in names:
                found += [int(p) for p in read(os.path.join(folder, "cgroup.procs")).split()]
        if found:
            break
    return sorted(set(found))


def state_of(task: str) -> str:
    """The letter of a thread's state, such as D or T."""
    return (read(task + "/stat").rpartition(")")[2].split() or ["?"])[0]


def command_of(pid: int) -> str:
    """A process's name and program; not its arguments."""
    words = read("/proc/%d/cmdline" % pid).split("\0")
    return "%s (%s)" % (read("/proc/%d/comm" % pid).strip(), words[0][:100])


def cpu_seconds(pid: int) -> int:
    """CPU time of a process, whole seconds; 0 where it is gone."""
    fields = read("/proc/%d/stat" % pid).rpartition(")")[2].split()
    if len(fields) < 13:
        return 0
    return (int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK")


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    return os.path.exists("/proc/%d" % pid)


def show(unit: str) -> Dict[str, str]:
    """Fields of a unit."""
    text = output(["systemctl", "show", "-p", "ActiveState,MainPID,ControlGroup", unit])
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def env_value(path: str, key: str) -> Optional[str]:
    """One value of an environment file of ours, unquoted; None where it is not set."""
    match = re.search(r'(?m)^%s="((?:[^"\\]|\\.)*)"$' % re.escape(key), read(path))
    return re.sub(r"\\(.)", r"\1", match[1]) if match else None


def metrics(rounds: Sequence[Round]) -> str:
    """Text for the node exporter's textfile collector."""
    now = time.time()
    rows: List[Tuple[str, str, str, List[Tuple[Round, float]]]] = []
    asked = [(r, r.answer) for r in rounds if r.answer is not None]
    rows.append(("vllm_fleet_probe_success", "gauge", "Whether one token came in time.",
                 [(r, float(a.ok)) for r, a in asked]))  # fmt: skip
    rows.append(("vllm_fleet_probe_seconds", "gauge", "Time to that token.",
                 [(r, a.seconds) for r, a in asked]))  # fmt: skip
    rows.append(("vllm_fleet_probe_time_seconds", "gauge", "When it was last probed.",
                 [(r, now) for r, _ in asked]))  # fmt: skip
    rows.append(("vllm_fleet_probe_out", "gauge", "Out of rotation because it is wedged.",
                 [(r, float(r.out)) for r in rounds]))  # fmt: skip
    rows.append(("vllm_fleet_probe_restarts_total", "counter", "Restarts of it when wedged.",
                 [(r, float(r.memory["restarts_total"])) for r in rounds]))  # fmt: skip
    lines = []
    for name, kind, text, values in rows:
        if values:
            lines += ["# HELP %s %s" % (name, text), "# TYPE %s %s" % (name, kind)]
        for one, value in values:
            labels = 'vllm_instance="%s",pool="%s"' % (one.name, escaped(one.instance["pool"]))
            lines.append("%s{%s} %.15g" % (name, labels, value))
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """A label's value."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def output(command: Sequence[str]) -> str:
    """What a command prints; its failure as text."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=STACK_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return "%s: %s\n" % (os.path.basename(command[0]), error)
    return done.stdout.decode(errors="replace")


def read(path: str) -> str:
    """A file's text; "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read_json(path: str) -> Json:
    """A JSON object; {} where there is none."""
    try:
        found = json.loads(read(path) or "{}")
    except ValueError:
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


def say(text: str) -> None:
    """One line to the journal, at once."""
    print("probe: " + text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
