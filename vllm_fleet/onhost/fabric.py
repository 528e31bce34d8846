"""The environment of models that span hosts, on one of them: staged, tried, kept or put back.

Runs as root with the host's own Python, standard library and our other scripts only. Reads one
JSON object from standard input and prints ``result`` and a JSON object as its last line, or
``refused`` and why.

    stage     {"run", "text": file or null}   beside its place; nothing that serves reads it
    path      {"interface", "mtu", "peers": [{"name", "address", "mtu"}]}   link and MTU
    ports     {"name", "address", "port", "peers": [{"name", "address"}], "seconds"}
    rank      {"run", "ranks": [{"rank", "arguments", "environment"}], "python", "source",
               "seconds"}                     processes of the test, to their end
    end       {"run"}                         the processes of it, if they still run
    keep      {"run"}                         in place; what was there is remembered
    back      {"run"}                         as it was before this change began
    done      {"run", "tested": {...}}        the change is over

Each may be said again and again. Nothing that this starts outlives it: its children are killed
with it by the kernel, and it ends itself when its time is over.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

if __package__:
    from vllm_fleet.gate import before_start
    from vllm_fleet.onhost import ledger
else:  # on a host: sent along with this script
    import before_start  # type: ignore[import-not-found, no-redef]
    import ledger  # type: ignore[import-not-found, no-redef]

Json = Dict[str, Any]
Refused = ledger.Refused
say = ledger.say

FILE = "/etc/vllm/fabric.env"
USER = "vllm"
SLACK_SECONDS = 10  # from the end of a rank's time until it is killed
ECHO_SECONDS = 1.0
ECHOES = 3
# Not in Python's socket module; Linux gives them these numbers.
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PMTUDISC_PROBE = 10, 23, 3


# --- the file ------------------------------------------------------------------------------


def folder() -> str:
    """Where the change is written down."""
    return ledger.ROOT + "/fabric"


def record_path() -> str:
    """The change that is under way, or was when somebody was killed."""
    return folder() + "/change.json"


def tested_path() -> str:
    """What was tested last, and with which hosts."""
    return folder() + "/tested.json"


def current() -> Optional[str]:
    """The file as it is; None where there is none."""
    try:
        with open(FILE, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def put(text: Optional[str]) -> None:
    """Have the file hold this, by one rename; None takes it away."""
    if text is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FILE)
        return
    os.makedirs(os.path.dirname(FILE), exist_ok=True)
    ledger.write(FILE, text, 0o644)


def stage(order: Json) -> Json:
    """Write what is wanted down, beside its place.

    Of a change that was cut off after it was kept here, what is put back is what was there
    before it: only that was ever tested to the end.
    """
    os.makedirs(folder(), mode=0o700, exist_ok=True)
    before = ledger.read(record_path())
    old = current() if before is None else before["old"]
    record = {"run": order["run"], "at": int(time.time()), "old": old, "new": order["text"]}
    ledger.write(record_path(), json.dumps({**record, "kept": False}))
    return {"cut_off": before["run"] if before else None}


def mine(order: Json) -> Json:
    """The change of this run. Raises Refused where it is another's."""
    record = ledger.read(record_path())
    if record is None or record["run"] != order["run"]:
        other = "run %s has" % record["run"] if record else "nobody has"
        raise Refused("%s staged an environment here, not run %s" % (other, order["run"]))
    return record


def keep(order: Json) -> Json:
    """Put what is staged in place."""
    record = mine(order)
    ledger.write(record_path(), json.dumps({**record, "kept": True}))
    put(record["new"])
    return {}


def back(order: Json) -> Json:
    """As it was before; nothing to do where this run staged nothing."""
    record = ledger.read(record_path())
    if record is None or record["run"] != order["run"]:
        return {"changed": False}
    changed = current() != record["old"]
    put(record["old"])
    os.unlink(record_path())
    return {"changed": changed}


def done(order: Json) -> Json:
    """Remember what was tested; the change is over."""
    record = mine(order)
    text = record["new"]
    sha256 = hashlib.sha256(text.encode()).hexdigest() if text is not None else None
    ledger.write(tested_path(), json.dumps({**order["tested"], "sha256": sha256}))
    os.unlink(record_path())
    return {}


# --- link and MTU --------------------------------------------------------------------------


def path(order: Json) -> Json:
    """Whether each peer answers through the interface, also to the largest packet."""
    name = order["interface"]
    if not os.path.isdir("/sys/class/net/" + name):
        return {"why": "interface %s is not there" % name, "peers": {}}
    found: Dict[str, Json] = {}

    def look(peer: Json) -> None:
        mtu = int(order["mtu"])
        small = echo(peer["address"], name, 100)
        large = small if small else echo(peer["address"], name, mtu)
        found[peer["name"]] = {
            "why": small,
            "mtu_why": large,
            "through": through(peer["address"]),
        }

    threads = [threading.Thread(target=look, args=(p,), daemon=True) for p in order["peers"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"why": "", "peers": found}


def through(address: str) -> str:
    """The interface that the kernel itself would send through; "" where it has no route."""
    done = subprocess.run(
        ["ip", "-o", "route", "get", address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    words = done.stdout.decode(errors="replace").split()
    return words[words.index("dev") + 1] if "dev" in words[:-1] else ""


def echo(address: str, interface: str, size: int) -> str:
    """Why a packet of this size (headers and all) got no answer; "" where it got one.

    It must not be cut in pieces on the way. The kernel of the peer answers by itself, so
    nothing needs to run there.
    """
    six = ":" in address
    family = socket.AF_INET6 if six else socket.AF_INET
    protocol = socket.getprotobyname("ipv6-icmp") if six else socket.IPPROTO_ICMP
    headers = 48 if six else 28
    number = threading.get_ident() & 0xFFFF
    try:
        with socket.socket(family, socket.SOCK_RAW, protocol) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
            level = socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP
            option = IPV6_MTU_DISCOVER if six else IP_MTU_DISCOVER
            link.setsockopt(level, option, PMTUDISC_PROBE)
            link.connect((address, 0))
            for sequence in range(ECHOES):
                link.send(asking(six, number, sequence, max(0, size - headers)))
                if answered(link, six, number):
                    return ""
    except OSError as error:
        if error.errno == errno.EMSGSIZE:
            return "the interface itself takes no packet of %d bytes" % size
        return (error.strerror or str(error)).lower()
    return "no answer"


def asking(six: bool, number: int, sequence: int, payload: int) -> bytes:
    """An echo request."""
    kind = 128 if six else 8
    body = struct.pack("!HH", number, sequence) + b"v" * payload
    if six:
        return struct.pack("!BBH", kind, 0, 0) + body  # the kernel adds the checksum
    padded = struct.pack("!BBH", kind, 0, 0) + body + b"\0" * (len(body) % 2)
    total = sum(struct.unpack("!%dH" % (len(padded) // 2), padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!BBH", kind, 0, ~total & 0xFFFF) + body


def answered(link: socket.socket, six: bool, number: int) -> bool:
    """Whether the answer to one of our requests comes in time."""
    deadline = time.monotonic() + ECHO_SECONDS
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        link.settimeout(left)
        try:
            packet = link.recv(65536)
        except socket.timeout:
            return False
        answer = packet if six else packet[(packet[0] & 15) * 4 :]
        if answer[0] == (129 if six else 0) and answer[4:6] == struct.pack("!H", number):
            return True


# --- ports ---------------------------------------------------------------------------------


class Listeners:
    """Ports of this host, one by chance, that answer with what it knows: its clock, and both."""

    def __init__(self, address: str, meeting: int) -> None:
        self.seen: Dict[str, int] = {}  # connections by who made them
        self.taken: Dict[int, str] = {}
        self._sockets: List[socket.socket] = []
        self._told: Json = {"ports": []}
        for port in (meeting, 0):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.socket(family, socket.SOCK_STREAM)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((address, port))
            except OSError as error:
                server.close()
                holders = ", ".join(str(one) for one in before_start.listeners(port))
                self.taken[port] = holders or (error.strerror or str(error)).lower()
                continue
            server.listen(128)
            self._sockets.append(server)
            self._told["ports"].append(server.getsockname()[1])
        for server in self._sockets:  # only now: the first answer tells of all ports
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return  # closed
            with contextlib.suppress(OSError), peer:
                peer.settimeout(5)
                who = peer.recv(256).decode(errors="replace").strip()
                self.seen[who] = self.seen.get(who, 0) + 1
                peer.sendall(json.dumps({**self._told, "now": time.time()}).encode() + b"\n")

    def close(self) -> None:
        """No port is open any more."""
        for server in self._sockets:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()


def ports(order: Json) -> Json:
    """Whether this host reaches each peer's ports; meanwhile it answers theirs.

    Peers begin a moment earlier or later: what is refused is tried again until the time is over.
    """
    deadline = time.monotonic() + float(order["seconds"])
    meeting = int(order["port"])
    listeners = Listeners(order["address"], meeting)
    found: Dict[str, Json] = {}
    me = order["name"]

    def look(peer: Json) -> None:
        problems: Dict[str, str] = {}
        clock: Optional[Tuple[float, float]] = None
        wanted = [meeting]
        for port in wanted:
            why, told = reach(order["address"], peer["address"], port, me, deadline)
            if why:
                problems[str(port)] = why
                continue
            clock = min((told["clock"], clock or told["clock"]), key=lambda one: one[0])
            # Ports by chance are what the ranks of an engine listen on.
            wanted += [p for p in told["ports"] if p not in wanted]
        found[peer["name"]] = {"problems": problems, "clock": clock}

    threads = [threading.Thread(target=look, args=(p,), daemon=True) for p in order["peers"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Those who have not come yet are waited for: without us they would find nobody.
    names = {peer["name"] for peer in order["peers"]}
    both = 2  # ports of ours that each of them asks
    while time.monotonic() < deadline and not all(
        listeners.seen.get(name, 0) >= both for name in names
    ):
        time.sleep(0.1)
    listeners.close()
    return {"taken": {str(p): why for p, why in listeners.taken.items()}, "peers": found}


def reach(own: str, address: str, port: int, me: str, deadline: float) -> Tuple[str, Json]:
    """(why a port was not reached, what it told)."""
    why = ""
    while True:
        left = deadline - time.monotonic()
        if left <= 0.5:  # too short for an answer
            return why or "no answer", {}
        began = time.time()
        try:
            with socket.create_connection((address, port), min(left, 3.0), (own, 0)) as link:
                link.settimeout(3.0)
                began = time.time()
                link.sendall(me.encode() + b"\n")
                text = b""
                while not text.endswith(b"\n"):
                    got = link.recv(4096)
                    if not got:
                        raise OSError(errno.ECONNRESET, "ended without an answer")
                    text += got
            ended = time.time()
            told = json.loads(text.decode())
            # (seconds that it may be wrong by, seconds that the peer is ahead)
            clock = (round((ended - began) / 2, 4), round(told["now"] - (began + ended) / 2, 4))
            return "", {"clock": clock, "ports": told["ports"]}
        except socket.timeout:
            pass  # a refusal that was told before says more: the kernel tells only some of them
        except (OSError, ValueError) as error:
            why = (getattr(error, "strerror", None) or str(error)).lower()
        time.sleep(0.2)


# --- ranks ---------------------------------------------------------------------------------


def pids_path() -> str:
    """Process groups of a test that runs."""
    return folder() + "/ranks.json"


def rank(order: Json) -> Json:
    """Run this host's ranks of the test to their end; what each of them said."""
    os.makedirs(folder(), mode=0o700, exist_ok=True)
    end({"run": ""})  # of a run that was killed
    scratch = tempfile.mkdtemp(prefix="vllm-fleet-fabric-")
    user = account()
    try:
        script = os.path.join(scratch, "allreduce.py")
        with open(script, "w", encoding="utf-8") as file:
            file.write(order["source"])
        os.chmod(scratch, 0o755)
        home = os.path.join(scratch, "home")
        os.mkdir(home)
        if user is not None:
            os.chown(home, user.pw_uid, user.pw_gid)
        running = [
            (one, start([order["python"], "-u", script, *one["arguments"]], one, home, user))
            for one in order["ranks"]
        ]
        groups = [process.pid for _, process in running]
        ledger.write(pids_path(), json.dumps({"run": order["run"], "groups": groups}))
        found = followed(running, time.monotonic() + float(order["seconds"]) + SLACK_SECONDS)
        return {"ranks": found}
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(pids_path())
        shutil.rmtree(scratch, ignore_errors=True)


def account() -> "Optional[pwd.struct_passwd]":
    """The user that instances run as: its rights are tried, too. None where there is none yet."""
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        return None


def start(
    words: List[str], one: Json, home: str, user: "Optional[pwd.struct_passwd]"
) -> "subprocess.Popen[str]":
    """Begin a rank, in the environment that is staged and nothing else."""
    libc = ctypes.CDLL(None, use_errno=True)

    def before() -> None:
        os.setsid()
        unlimited = resource.RLIM_INFINITY
        with contextlib.suppress(OSError, ValueError):  # as the units of instances have it
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (unlimited, unlimited))
        if user is not None:
            os.initgroups(user.pw_name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with this script

    environment = {"HOME": home, "TMPDIR": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    return subprocess.Popen(
        words,
        env={**environment, **one["environment"]},
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=before,
    )


def followed(running: List[Tuple[Json, "subprocess.Popen[str]"]], deadline: float) -> List[Json]:
    """What each rank said, until all have ended. One that failed ends the others of this host."""
    said: List[List[str]] = [[] for _ in running]

    def read(number: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said[number].append(line.rstrip("\n"))

    readers = [
        threading.Thread(target=read, args=(number, process), daemon=True)
        for number, (_, process) in enumerate(running)
    ]
    for reader in readers:
        reader.start()
    ended = set()  # by us
    try:
        while any(process.poll() is None for _, process in running):
            failed = any(process.returncode not in (None, 0) for _, process in running)
            if failed or time.monotonic() >= deadline:
                for _, process in running:
                    if process.returncode is None:
                        ended.add(process.pid)
                        kill(process.pid)
            print("waiting", flush=True)  # fails where the operator is gone: then nobody waits
            time.sleep(0.5)
    finally:
        for _, process in running:
            if process.poll() is None:
                kill(process.pid)
    for reader in readers:
        reader.join(5)
    return [
        {
            **heard(one["rank"], process.returncode, said[number]),
            "ended": process.pid in ended,
        }
        for number, (one, process) in enumerate(running)
    ]


def heard(number: int, code: Optional[int], lines: List[str]) -> Json:
    """What a rank said, put together: its last step, its result, or why it failed."""
    found: Json = {"rank": number, "code": code, "step": "", "result": None, "why": "", "tail": []}
    for line in lines:
        word, _, text = line.partition(" ")
        if word not in ("step", "result", "failed"):
            found["tail"] = [*found["tail"], line[:300]][-15:]
            continue
        try:
            told = json.loads(text)
        except ValueError:
            continue
        if word == "step":
            found["step"] = told["step"]
        elif word == "result":
            found["result"] = told
        else:
            found["why"], found["nccl"] = told["why"], told.get("nccl")
    return found


def kill(group: int) -> None:
    """End a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def end(order: Json) -> Json:
    """End the ranks of a run; of any run where none is named."""
    known = ledger.read(pids_path())
    if known is None or (order["run"] and known["run"] != order["run"]):
        return {"ended": 0}
    groups = [group for group in known["groups"] if ours(group)]
    for group in groups:
        kill(group)
    return {"ended": len(groups)}


def ours(pid: int) -> bool:
    """Whether a process is a rank of the test: its number may be another's by now."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return b"allreduce.py" in file.read()
    except OSError:
        return False


ACTIONS: Dict[str, Callable[[Json], Json]] = {
    "stage": stage,
    "path": path,
    "ports": ports,
    "rank": rank,
    "end": end,
    "keep": keep,
    "back": back,
    "done": done,
}
# They wait for others, or end what waits.
UNGUARDED = ("path", "ports", "rank", "end")


@contextlib.contextmanager
def alone(action: str) -> Iterator[None]:
    """One script at a time changes what is written down."""
    if action in UNGUARDED:
        yield
    else:
        with ledger.guarded():
            yield


def main() -> int:
    """Do what stands on standard input."""
    order = json.load(sys.stdin)
    try:
        action = ledger.chosen(order, ACTIONS)
        if order["action"] in ("stage", "keep", "back", "done"):
            # What was begun is ended, also where the operator's end has vanished.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with alone(order["action"]):
            result = action(order)
    except (Refused, before_start.Refused, OSError, KeyError) as error:
        say("refused %s" % error)
        return 1
    say("result %s" % json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
