"""Main process of one rank of a span: meets the others, runs vLLM, ends it when one is lost.

A span is one server over several hosts. vLLM neither notices that a host of it has died nor
recovers from it: what is left goes on, hangs, and says 200 on /health. So each rank runs this
around its vLLM. Rank 0 listens; the others connect to it and keep the connection. Nothing is
started before all are there with the same release and settings; then all start at once. Each
end says every second that it lives. Where one is lost, stopped or frozen, every rank ends its
vLLM and exits, systemd starts it anew, and it waits for the others with nothing loaded.

    python3 -s -E span.py COMMAND...      what to run, as the launch script has it

Environment: FLEET_SPAN, FLEET_RANK, FLEET_RANKS (host=address,...; rank 0 first),
FLEET_WATCH_PORT, FLEET_SILENT_SECONDS, FLEET_JOIN_SECONDS, FLEET_SETTINGS, FLEET_EXECUTOR,
FLEET_RAY_PORT, FLEET_RELEASE, FLEET_RUN, FLEET_PORT, FLEET_DRAIN_SECONDS, VLLM_HOST_IP.
Writes FLEET_RUN/span.json, how far it is; on other ranks than 0 also FLEET_RUN/ready.
Exits with 0 when it was told to stop, else with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

if __package__:
    from vllm_fleet.gate import stop
else:  # on a host: beside this script
    import stop  # type: ignore[import-not-found, no-redef]

BEAT_SECONDS = 1.0
CONNECT_SECONDS = 3.0
AGAIN_SECONDS = 1.0
SAY_SECONDS = 30.0
LAG_SECONDS = 2.0  # this process itself was not run for so long: nobody else's silence counts
GONE_SECONDS = 3.0  # vLLM's server ends by itself when a process of it has died, or soon after
END_SECONDS = 20.0  # from SIGTERM to SIGKILL of vLLM, within stop.py's own limit
LONGEST_LINE = 1 << 16
RAY_NAMED = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)  # behind the port at which rank 0 is asked

Json = Dict[str, Any]


class Rank:
    """One host of the span."""

    def __init__(self, number: int, host: str, address: str) -> None:
        self.number = number
        self.host = host
        self.address = address

    def __str__(self) -> str:
        return "rank %d on %s (%s)" % (self.number, self.host, self.address)


class Lost(Exception):
    """Why vLLM must not go on; exit code 1."""


class Stopped(Exception):
    """This rank, or rank 0, was told to stop; exit code 0."""


class Settings:
    """What the environment says."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.name = env["FLEET_SPAN"]
        listed = [one.partition("=") for one in env["FLEET_RANKS"].split(",")]
        self.ranks = [Rank(n, host, address) for n, (host, _, address) in enumerate(listed)]
        self.me = self.ranks[int(env["FLEET_RANK"])]
        self.port = int(env["FLEET_WATCH_PORT"])
        self.silent = float(env["FLEET_SILENT_SECONDS"])
        self.join = float(env["FLEET_JOIN_SECONDS"])
        self.run = env["FLEET_RUN"]
        self.ray_port = int(env["FLEET_RAY_PORT"]) if env["FLEET_EXECUTOR"] == "ray" else 0
        self.release = env["FLEET_RELEASE"]
        self.http = int(env["FLEET_PORT"])
        self.drain = float(env["FLEET_DRAIN_SECONDS"])
        self.same = same(env)

    def path(self, name: str) -> str:
        """A file of this start."""
        return os.path.join(self.run, name)


def same(env: Mapping[str, str]) -> Dict[str, str]:
    """What all ranks must have alike, by what it is called."""
    found = {
        "release": os.path.basename(env["FLEET_RELEASE"]),
        "settings": env["FLEET_SETTINGS"],
    }
    # A release without a lock is the same in name alone.
    for folder in glob.glob(env["FLEET_RELEASE"] + "/lib/python3*/site-packages/*.dist-info"):
        name, _, version = os.path.basename(folder)[: -len(".dist-info")].partition("-")
        if re.match(r"(vllm|torch|ray|nvidia_nccl_cu\d+|rccl)$", name):
            found[name] = version
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        if match := re.search(r"Kernel Module\D*([\d.]+)", file.read()):
            found["driver"] = match.group(1)
    return found


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """In what two ranks differ, mine first; empty where in nothing."""
    return "; ".join(
        "%s %s, not %s" % (key, theirs.get(key, "none"), mine.get(key, "none"))
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    )


def why_not(error: BaseException) -> str:
    """Why nobody answers, in words that say where to look."""
    if isinstance(error, ConnectionRefusedError):
        return "the host answers, but its unit does not run there"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer: the host is down, or the network between is"
    return str(error) or type(error).__name__


class Wire:
    """A connection to another rank: one JSON object a line, and when the last one came."""

    def __init__(
        self, rank: Rank, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.rank = rank
        self.heard = time.monotonic()
        self._reader = reader
        self._writer = writer

    def send(self, **message: Any) -> None:
        """Say something; a lost connection is noticed by whoever reads it."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def read(self) -> Json:
        """The next message. Raises OSError or ValueError where there will be none."""
        line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("the connection was closed")
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        self.heard = time.monotonic()
        return found

    def close(self) -> None:
        """No more of it; what was said last is sent."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()


class Engine:
    """vLLM of this rank, and Ray where it computes by that."""

    def __init__(self, settings: Settings, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._settings = settings
        self._command = list(command)
        self._env = dict(env)
        self.running: List[subprocess.Popen[bytes]] = []
        self._names: Dict[int, str] = {}  # of vLLM's own processes, as long as they were seen
        self._odd: Dict[Tuple[int, str], float] = {}  # since when one is gone, or stopped

    def start(self, token: str) -> None:
        """Start it; `token` is what Ray's processes know each other by."""
        settings, env = self._settings, self._env
        own = interface(settings.me.address)
        if own:  # the operator's own words, or those of the tested fabric, come first
            env.setdefault("GLOO_SOCKET_IFNAME", own)
            env.setdefault("NCCL_SOCKET_IFNAME", "=" + own)
        commands = [self._command]
        if settings.ray_port:
            env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_USAGE_STATS_ENABLED="0")
            commands = [ray_command(settings, env.get("FLEET_CARDS", ""))]
            if settings.me.number == 0:
                env["VLLM_CONFIG_ROOT"] = keep_at_home(settings.run, env)
                commands.append(self._command)
        for words in commands:
            self.running.append(subprocess.Popen(words, env=env))
            # For what asks the cluster; `ray start` would take it for an order to join one.
            env["RAY_ADDRESS"] = "%s:%d" % (settings.ranks[0].address, settings.ray_port)

    def look(self) -> None:
        """Raises Lost where a process of it has ended, or does not run any more."""
        for process in self.running:
            if process.poll() is not None:
                raise Lost("%s ended with %d" % (program(process.args), process.returncode))
        now = time.monotonic()
        states = descendants(os.getpid())
        for pid, (state, title) in states.items():
            if title.startswith("VLLM::") and state != "Z":
                self._names[pid] = title
        odd = {
            (pid, what): name
            for pid, name in self._names.items()
            for what, is_so in (
                ("has died", states.get(pid, ("Z", ""))[0] == "Z"),
                ("was stopped (SIGSTOP) and does not go on", states.get(pid, " ")[0] == "T"),
            )
            if is_so
        }
        for process in self.running:
            if states.get(process.pid, (" ", ""))[0] == "T":
                odd[process.pid, "was stopped (SIGSTOP) and does not go on"] = "vLLM"
        self._odd = {key: self._odd.get(key, now) for key in odd}
        for key, since in self._odd.items():
            if now - since >= GONE_SECONDS:
                raise Lost("%s (pid %d) %s" % (odd[key], *key))

    def end(self, seconds: float) -> None:
        """Ask it to end, and kill what is left; systemd kills what that leaves."""
        for process in reversed(self.running):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        for process in reversed(self.running):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def program(args: Any) -> str:
    """The name of a program, for people."""
    words = [os.path.basename(str(word)) for word in args[:2]]
    return words[-1] if words[0].startswith("python") else words[0]


def descendants(root: int) -> Dict[int, Tuple[str, str]]:
    """(state, title) of every process below one, by pid."""
    parents: Dict[int, Tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open("/proc/%s/stat" % name) as file:
                fields = file.read().rpartition(")")[2].split()
                parents[int(name)] = int(fields[1]), fields[0]
    found: Dict[int, Tuple[str, str]] = {}
    below = {root}
    while below:
        below = {pid for pid, (parent, _) in parents.items() if parent in below} - set(found)
        for pid in below:
            title = b""
            with contextlib.suppress(OSError), open("/proc/%d/cmdline" % pid, "rb") as raw:
                title = raw.read(200).split(b"\0")[0]
            found[pid] = parents[pid][1], title.decode(errors="replace")
    return found


def interface(address: str) -> str:
    """The network interface that has an address; empty where it cannot be told."""
    words = ["ip", "-o", "addr", "show", "to", address]
    with contextlib.suppress(OSError):
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        fields = done.stdout.decode(errors="replace").split()
        if len(fields) > 1:
            return fields[1].partition("@")[0]
    return ""


def keep_at_home(run: str, env: Mapping[str, str]) -> str:
    """Names of variables that are this host's own, written down for vLLM; the folder of the file.

    vLLM gives its workers on other hosts the environment of rank 0: names of its network
    interfaces, folders that only this instance has. Those have them from their own rank.
    """
    home, folder = env.get("HOME") or "/nowhere", os.path.join(run, "config")
    network = ("NCCL_", "GLOO_", "UCX_", "FLEET_", "RAY_")
    own = [name for name, value in env.items() if name.startswith(network) or home in value]
    os.makedirs(folder, exist_ok=True)
    names = json.dumps(sorted({*own, "VLLM_HOST_IP", "VLLM_CONFIG_ROOT"}))
    write(os.path.join(folder, "ray_non_carry_over_env_vars.json"), names)
    return folder


def ray_command(settings: Settings, cards: str) -> List[str]:
    """The words that start Ray on this host: in front of the others, or beside them.

    Every port is given, so that a firewall can know it: whoever reaches one and has the token
    gives orders. No dashboard.
    """
    base = settings.ray_port
    words = [settings.release + "/bin/ray", "start", "--block", "--disable-usage-stats"]
    if settings.me.number == 0:
        words += ["--head", "--port=%d" % base, "--include-dashboard=false"]
        # Ray's server for clients starts wherever it can, so its port must be ours; without
        # gRPC it cannot, and ray refuses the option.
        if glob.glob(settings.release + "/lib/python3*/site-packages/grpc"):
            words += ["--ray-client-server-port=%d" % (base + 7)]
    else:
        words += ["--address=%s:%d" % (settings.ranks[0].address, base)]
    words += ["--%s=%d" % (name, base + 1 + n) for n, name in enumerate(RAY_NAMED)]
    words += ["--min-worker-port=%d" % (base + 8), "--max-worker-port=%d" % (base + 39)]
    if cards:
        words += ["--num-gpus=%d" % len(cards.split(","))]
    return [*words, "--node-ip-address=" + settings.me.address]


class Member:
    """What every rank does; rank 0 and the others differ in whom they hear."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.stopping = asyncio.Event()
        self.began = 0.0  # when vLLM was started
        self.state = ""
        self._why = ""
        self._since = time.time()
        self._said = 0.0
        self._ticked = time.monotonic()

    def tell(self, state: str, why: str = "") -> None:
        """How far it is, for people and for who waits for it."""
        now = time.monotonic()
        if state != self.state:
            self._since = time.time()
        if (state, why) != (self.state, self._why) or now - self._said >= SAY_SECONDS:
            self._said = now
            if state != self.state or why != self._why or state == "waiting":
                say("%s: %s%s" % (self.settings.name, state, ": " + why if why else ""))
        self.state, self._why = state, why
        write(
            self.settings.path("span.json"),
            json.dumps(
                {
                    "state": state,
                    "why": why,
                    "since": int(self._since),
                    "join_seconds": self.settings.join,
                }
            ),
        )

    def lag(self) -> float:
        """For how long this process was kept from running, beyond one beat."""
        now = time.monotonic()
        late, self._ticked = now - self._ticked - BEAT_SECONDS, now
        return late if late > LAG_SECONDS else 0.0

    async def beat(self) -> None:
        """Wait for the next beat. Raises Stopped where it is to end."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), BEAT_SECONDS)
        if self.stopping.is_set():
            raise Stopped("told to stop")

    def silent(self, wire: Wire, late: float) -> bool:
        """Whether another rank has not been heard of for too long."""
        wire.heard += late
        return time.monotonic() - wire.heard > self.settings.silent


class First(Member):
    """Rank 0: everybody connects to it, and it says when to begin and when it is over."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(settings, engine)
        self.wires: Dict[int, Wire] = {}
        self.reasons: Dict[int, str] = {}  # why a rank is not there
        self.lost = ""
        self.stopped = ""  # which other rank was told to stop
        self.drained: "Optional[asyncio.Future[Any]]" = None

    async def run(self) -> None:
        """Raises Lost or Stopped at the end of it."""
        server = await self.listen()
        try:
            await self.gather()
            token = secrets.token_hex(32)
            self.began = time.monotonic()
            self.engine.start(token)
            for wire in self.wires.values():
                wire.send(go=token if self.settings.ray_port else "")
            await self.watch()
        finally:
            server.close()

    async def listen(self) -> asyncio.AbstractServer:
        """The port at which the others come. Raises Lost where it is taken."""
        me = self.settings.me
        while True:
            try:
                return await asyncio.start_server(
                    self.met, me.address, self.settings.port, limit=LONGEST_LINE
                )
            except OSError as error:
                if "address already in use" in str(error).lower():
                    raise Lost(
                        "port %d (watch_port) is taken: stop who listens there, or choose another"
                        % self.settings.port
                    ) from None
                self.tell("waiting", "this host has no address %s yet: %s" % (me.address, error))
                await self.beat()

    async def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of another rank, from its greeting to its end."""
        nobody = Rank(-1, "?", "%s" % (writer.get_extra_info("peername") or ["?"])[0])
        wire = Wire(nobody, reader, writer)
        number = -1
        try:
            hello = await asyncio.wait_for(wire.read(), CONNECT_SECONDS)
            number = int(hello.get("rank", -1))
            if hello.get("span") != self.settings.name or not 0 < number < len(self.settings.ranks):
                wire.send(refused="this is rank 0 of span %s" % self.settings.name)
                return
            wire.rank = self.settings.ranks[number]
            if found := difference(self.settings.same, hello.get("same") or {}):
                self.reasons[number] = "%s differs from this one: %s" % (wire.rank, found)
                wire.send(refused="differs from rank 0 on %s: %s" % (self.settings.me.host, found))
                return
            if self.began:
                wire.send(refused="the span runs without it and begins anew")
                self.lost = self.lost or "%s has begun anew" % wire.rank
                return
            if old := self.wires.pop(number, None):
                old.close()
            self.wires[number] = wire
            skew = abs(time.time() - float(hello.get("clock") or 0))
            if skew > 5:
                say("warning: the clock of %s differs by %.0f s" % (wire.rank, skew))
            while True:
                self.heard(wire, await wire.read())
        except (OSError, ValueError, TypeError, asyncio.TimeoutError) as error:
            if self.wires.get(number) is wire:
                self.reasons[number] = "%s is gone again: %s" % (wire.rank, error)
                if self.began:
                    self.lost = self.lost or "%s is lost: %s" % (wire.rank, error)
        except asyncio.CancelledError:
            pass  # at the end of it all; asyncio would print it as a failure
        finally:
            if self.wires.get(number) is wire and not self.began:
                del self.wires[number]
            wire.close()

    def heard(self, wire: Wire, message: Json) -> None:
        """What another rank says."""
        if "stopped" in message:
            self.stopped = "%s %s" % (wire.rank, message["stopped"])
        if "lost" in message:
            self.lost = self.lost or "%s: %s" % (wire.rank, message["lost"])
        if "leaving" in message and self.drained is None:
            say("%s is to stop: draining" % wire.rank)
            loop = asyncio.get_event_loop()
            self.drained = loop.run_in_executor(None, self.drain)

    def drain(self) -> int:
        """No new request, and those in flight answered; how many were left."""
        told = stop.TOLD_SECONDS if stop.remove_ready(self.settings.run) else 0.0
        name, port = self.settings.name, self.settings.http
        left: int = stop.drain(name, os.getpid(), port, self.settings.drain, told)
        return left

    async def gather(self) -> None:
        """Wait until all are there."""
        others = self.settings.ranks[1:]
        while True:
            late = self.lag()
            for number, wire in list(self.wires.items()):
                if self.silent(wire, late):
                    self.reasons[number] = "%s has become silent" % wire.rank
                    del self.wires[number]
                    wire.close()
            missing = [one for one in others if one.number not in self.wires]
            if not missing:
                return
            told = "; ".join(
                self.reasons.get(one.number)
                or "%s has not come: is its host up, and does vllm@%s-r%d run there?"
                % (one, self.settings.name, one.number)
                for one in missing
            )
            self.tell("waiting", told)
            for wire in self.wires.values():
                wire.send(wait=told)
            await self.beat()

    async def watch(self) -> None:
        """Until one is lost. Raises Lost, or Stopped."""
        self.tell("starting")
        try:
            while True:
                await self.beat()
                if self.stopped:
                    raise Stopped(self.stopped)
                late = self.lag()
                self.engine.look()
                for wire in self.wires.values():
                    if self.silent(wire, late):
                        raise Lost(
                            "%s says nothing for %.0f s: its host is down or frozen, or the "
                            "network between is" % (wire.rank, self.settings.silent)
                        )
                if self.lost:
                    raise Lost(self.lost)
                ready = os.path.exists(self.settings.path("ready"))
                if ready and self.state != "ready":
                    self.tell("ready", "all %d ranks" % len(self.settings.ranks))
                drained = self.drained is not None and self.drained.done()
                for wire in self.wires.values():
                    wire.send(beat=ready, drained=drained)
        except (Lost, Stopped) as end:
            remove(self.settings.path("ready"))  # at once: the gate sends nobody any more
            for wire in self.wires.values():
                wire.send(end=str(end), stopped=isinstance(end, Stopped))
            await asyncio.sleep(0.1)  # for these words to leave
            raise


class Other(Member):
    """Any other rank: connects to rank 0 and goes by what that says."""

    async def run(self) -> None:
        """Raises Lost or Stopped at the end of it."""
        settings, first = self.settings, self.settings.ranks[0]
        while True:
            await self.beat()
            self.leave_early()
            try:
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection(first.address, settings.port, limit=LONGEST_LINE),
                    CONNECT_SECONDS,
                )
            except (OSError, asyncio.TimeoutError) as error:
                self.tell("waiting", "%s: %s" % (first, why_not(error)))
                continue
            wire = Wire(first, reader, writer)
            try:
                await self.talk(wire)
            finally:
                wire.close()

    def leave_early(self) -> None:
        """Nothing runs here that would have to be drained."""
        if os.path.exists(self.settings.path("leaving")):
            write(self.settings.path("drained"), "0")

    async def talk(self, wire: Wire) -> None:
        """One connection; returns where it ended before vLLM was started."""
        hello = {"span": self.settings.name, "rank": self.settings.me.number}
        wire.send(**hello, same=self.settings.same, clock=time.time())
        reading = asyncio.ensure_future(wire.read())
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=BEAT_SECONDS)
                if self.stopping.is_set():
                    wire.send(stopped="was told to stop")
                    await asyncio.sleep(0.1)
                    raise Stopped("told to stop")
                late = self.lag()
                try:
                    if done:
                        self.heard(wire, reading.result())
                        reading = asyncio.ensure_future(wire.read())
                    elif self.silent(wire, late):
                        raise Lost(
                            "%s says nothing for %.0f s: its host is down or frozen, or the "
                            "network between is" % (wire.rank, self.settings.silent)
                        )
                    if self.began:
                        self.engine.look()
                except Lost as lost:
                    wire.send(lost=str(lost))
                    await asyncio.sleep(0.1)
                    raise
                except (OSError, ValueError) as error:
                    raise Lost("%s is lost: %s" % (wire.rank, error)) from None
                if os.path.exists(self.settings.path("leaving")):
                    if self.began:
                        wire.send(leaving=True)
                    else:
                        self.leave_early()
                wire.send(beat=True)
        except Lost as lost:
            if self.began:
                raise
            self.tell("waiting", str(lost))
            await asyncio.sleep(AGAIN_SECONDS)
        finally:
            reading.cancel()

    def heard(self, wire: Wire, message: Json) -> None:
        """What rank 0 says. Raises Lost, or Stopped where rank 0 was."""
        if message.get("stopped") and self.began:
            raise Stopped("%s was told to stop" % wire.rank)
        if "refused" in message or "end" in message:
            raise Lost("%s: %s" % (wire.rank, message.get("refused") or message["end"]))
        if "wait" in message:
            self.tell("waiting", str(message["wait"]))
        if "go" in message and not self.began:
            self.began = time.monotonic()
            self.engine.start(str(message["go"]))
            self.tell("starting")
        if message.get("beat") and self.state == "starting":
            self.tell("ready")
            write(self.settings.path("ready"), "%d %d" % (os.getpid(), time.time()))
        if message.get("beat") is False and self.state == "ready":
            remove(self.settings.path("ready"))
            self.tell("starting", "rank 0 is not ready any more")
        if message.get("drained"):
            write(self.settings.path("drained"), "0")


def remove(path: str) -> None:
    """Take a file away, where there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def write(path: str, text: str) -> None:
    """Put a file in place at once."""
    temporary = "%s.%d" % (path, os.getpid())
    with open(temporary, "w") as file:
        file.write(text + "\n")
    os.rename(temporary, path)


def say(text: str) -> None:
    """One line to the journal, at once."""
    print("span: " + text, flush=True)


async def supervise(settings: Settings, engine: Engine) -> int:
    """All of it; the exit code."""
    kind = First if settings.me.number == 0 else Other
    member: Any = kind(settings, engine)
    loop = asyncio.get_event_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, member.stopping.set)
    try:
        await member.run()
    except Stopped as stopped:
        remove(settings.path("ready"))
        say("%s: %s" % (settings.name, stopped))
        engine.end(END_SECONDS)
        return 0
    except Lost as lost:
        remove(settings.path("ready"))
        if engine.running:
            say("%s: LOST: %s; all ranks begin anew" % (settings.name, lost))
            # What hangs on a rank that is gone does not end by being asked to.
            engine.end(0.0)
        else:
            say("%s: FAILED: %s" % (settings.name, lost))
        return 1
    return 1


def main(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run one rank; the exit code."""
    settings = Settings(env)
    remove(settings.path("leaving"))
    remove(settings.path("drained"))
    return asyncio.run(supervise(settings, Engine(settings, command, env)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
