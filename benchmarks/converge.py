"""deploy.py against Ansible and against bare SSH, and how its cost grows with the fleet.

    sudo python benchmarks/converge.py [--hosts 3 10 20] [--fake 50 200 500] [--rounds 3]
                                       [--ansible ansible/bin]

On hosts of the test bed without engines: every one gets the files, units and services of a GPU
host, one those of gateway and monitoring. Their Debian packages are installed beforehand. The
playbook is made from the same plan: `copy` and `systemd` in loops, handlers, facts off,
pipelining, free strategy, as many forks as hosts, each run with connections of its own, as ours
are; of packages it only sees that they are there (its `apt` would want python3-apt on the
hosts). What both do is undone between first converges.

- no-op: a run that finds everything as wanted; first: from hosts with packages only.
- floor: `ssh HOST true` to all hosts at once.
- interpreter: starting Python and importing everything that deploy.py imports.
- fake: hosts that pyinfra only pretends to reach, each command 20 ms, eight instances a host.
- planning: spec, rendering and validation of the largest fake fleet, and of 4,000 instances.

Bounds are those of docs/benchmarks.md. The last line is one JSON object; exit 1 where a bound is
missed. Root; the bed is removed again. Without --ansible that comparison is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import yaml  # noqa: E402

from tests.integration import wide  # noqa: E402
from tests.integration.wide import WideFleet  # noqa: E402
from tests.testbed.bed import Bed  # noqa: E402
from tests.unit import large  # noqa: E402

NOOP_TIMES_ANSIBLE = 5.0  # at least
FIRST_TIMES_ANSIBLE = 1.0  # at least
NOOP_TIMES_FLOOR = 3.0  # at most, at the most hosts, the interpreter subtracted
GROWTH = 1.1  # of time or memory for one more host, at most: noise of the machine
PLAN_SECONDS, PLAN_MIB = 3.0, 500
IMPORTS = "import gevent.monkey as m; m.patch_all(); import pyinfra_cli.cli, vllm_fleet.deploys"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parent)}
STAGES = {
    "--> Loading inventory": "interpreter",
    "--> Connecting": "inventory",
    "--> Preparing": "connect",
    "--> Beginning": "look and plan",
    "--> Results": "operations",
}


class TimeOver(Exception):
    """Told to end (SIGTERM): what was measured until then is printed."""


def time_over(*_: object) -> None:
    raise TimeOver


@dataclass
class Run:
    """One program, run to its end."""

    seconds: float
    cpu: float
    mib: int
    stages: dict[str, float] = field(default_factory=dict)


def timed(words: Sequence[str], cwd: Path, **environment: str) -> Run:
    """Run a program; what it said is raised where it fails."""
    began = last = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "PYINFRA_PROGRESS": "off",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said, stages = [], {}
    for line in process.stdout:
        said.append(line)
        for head, stage in STAGES.items():
            if line.startswith(head):
                now = time.monotonic()
                stages[stage] = round(now - last, 2)
                last = now
    _, status, usage = os.wait4(process.pid, 0)
    process.stdout.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}\n{''.join(said)[-6000:]}")
    return Run(
        time.monotonic() - began,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss // 1024,
        stages,
    )


def pyinfra(root: Path, inventory: str) -> Run:
    """deploy.py without questions."""
    words = [sys.executable, "-m", "pyinfra", "-y", f"inventory/{inventory}.py", "deploy.py"]
    return timed(words, root)


def fleet_command(command: str, root: Path) -> Run:
    """`fleet status` or `fleet doctor` of the same hosts."""
    code = "from vllm_fleet.cli import main; main()"
    return timed([sys.executable, "-c", code, command, "inventory/prod.py"], root)


def interpreter(root: Path) -> Run:
    """Python and imports alone."""
    return timed([sys.executable, "-c", IMPORTS], root)


def floor(fleet: WideFleet, count: int) -> float:
    """Seconds of one bare SSH command to so many hosts at once."""
    began = time.monotonic()
    running = [subprocess.Popen([*host.ssh_argv(), "true"]) for host in taken(fleet, count)]
    if any(one.wait() for one in running):
        raise SystemExit("a host does not answer")
    return time.monotonic() - began


def taken(fleet: WideFleet, count: int) -> list[Any]:
    """The hosts that the inventory names."""
    return [*fleet.hosts[: count - 1], fleet.hosts[-1]]


# --- Ansible ---------------------------------------------------------------------------------


def wanted(inventory: str) -> dict[str, Any]:
    """What the plan wants of each host, as data; in a process of its own, for gevent's sake."""
    code = (
        "import gevent.monkey as m; m.patch_all()\n"
        "import json, sys; from dataclasses import asdict\n"
        "from vllm_fleet import plan\n"
        "from vllm_fleet.facts.read import read_states\n"
        "from vllm_fleet.spec.inputs import read_inputs\n"
        "from vllm_fleet.spec.load import load_fleet\n"
        "fleet = load_fleet(sys.argv[1])\n"
        "states, failures = read_states(sys.argv[1], plan.asked())\n"
        "assert not failures, failures\n"
        "plans = plan.plan_fleet(fleet, states, read_inputs(fleet))\n"
        "print(json.dumps({name: {\n"
        "  'packages': one.packages,\n"
        "  'files': [asdict(f) for f in one.files],\n"
        "  'services': [asdict(s) for s in (*one.firewall_services, *one.gateway_services,\n"
        "    *one.monitoring_services)]} for name, one in plans.items()}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, inventory],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


PLAYBOOK = """\
- hosts: all
  gather_facts: false
  strategy: free
  tasks:
    - name: Packages
      ansible.builtin.command: "dpkg-query -W {{ packages | join(' ') }}"
      changed_when: false
    - name: User
      ansible.builtin.user:
        {name: vllm, system: true, home: /var/lib/vllm, create_home: false,
         shell: /usr/sbin/nologin}
    - name: Directories
      ansible.builtin.file: {path: "{{ item }}", state: directory, mode: "0755"}
      loop: "{{ directories }}"
    - name: Files
      ansible.builtin.copy:
        {src: "{{ item.src }}", dest: "{{ item.path }}", owner: "{{ item.owner }}",
         group: "{{ item.group }}", mode: "{{ item.mode }}"}
      loop: "{{ files }}"
      loop_control: {label: "{{ item.path }}"}
      notify: [Read units, Restart, Reload]
    - name: Handlers
      ansible.builtin.meta: flush_handlers
    - name: Services
      ansible.builtin.systemd: {name: "{{ item }}", state: started, enabled: true}
      loop: "{{ services }}"
  handlers:
    - name: Read units
      ansible.builtin.systemd: {daemon_reload: true}
    - name: Restart
      ansible.builtin.systemd: {name: "{{ item }}", state: restarted}
      loop: "{{ restarts }}"
    - name: Reload
      ansible.builtin.systemd: {name: "{{ item }}", state: reloaded}
      loop: "{{ reloads }}"
"""


class Ansible:
    """The same files, units and services by a playbook."""

    def __init__(self, program: Path, fleet: WideFleet, folder: Path) -> None:
        self.program, self.folder = program, folder
        folder.mkdir()
        (folder / "playbook.yml").write_text(PLAYBOOK)
        hosts = {}
        for host in fleet.hosts:
            its = fleet.wanted[host.name]
            listed = []
            for number, file in enumerate(its["files"]):
                source = folder / "files" / host.name / str(number)
                source.parent.mkdir(parents=True, exist_ok=True)
                source.write_text(file["content"])
                listed.append(
                    {
                        "src": str(source),
                        "path": file["path"],
                        "owner": file["owner"],
                        "group": file["group"],
                        "mode": f"{file['mode']:04o}",
                    }
                )
            argv = host.ssh_argv()
            options = [word for word in argv[argv.index("-o") : -1] if word != "BatchMode=yes"]
            hosts[host.name] = {
                "ansible_host": host.address,
                "ansible_user": "root",
                "ansible_ssh_private_key_file": str(host.root / "id_ed25519"),
                "ansible_ssh_common_args": "-F /dev/null "
                + " ".join(f"-o {word}" for word in options if word != "-o"),
                "ansible_python_interpreter": "/usr/bin/python3",
                "packages": its["packages"],
                "directories": sorted(
                    {"/opt/vllm", "/etc/vllm", "/var/lib/vllm/loaded", "/var/lib/vllm/metrics"}
                    | {str(Path(file["path"]).parent) for file in its["files"]}
                ),
                "files": listed,
                "services": [one["unit"] for one in its["services"]],
                "restarts": [one["unit"] for one in its["services"] if one["restarts"]],
                "reloads": [one["unit"] for one in its["services"] if not one["restarts"]],
            }
        self.hosts = hosts

    def run(self, names: Sequence[str]) -> Run:
        """The playbook on these hosts, with connections of its own."""
        inventory = self.folder / "hosts.yml"
        inventory.write_text(
            yaml.safe_dump({"all": {"hosts": {name: self.hosts[name] for name in names}}})
        )
        control = tempfile.mkdtemp(prefix="cp-")
        try:
            return timed(
                [str(self.program / "ansible-playbook"), "-i", str(inventory), "playbook.yml"],
                self.folder,
                ANSIBLE_FORKS=str(len(names)),
                ANSIBLE_PIPELINING="True",
                ANSIBLE_SSH_CONTROL_PATH_DIR=control,
                ANSIBLE_LOCALHOST_WARNING="False",
                ANSIBLE_HOST_KEY_CHECKING="True",
                ANSIBLE_DEPRECATION_WARNINGS="False",
                PYTHONPATH="",
            )
        finally:
            for socket in Path(control).iterdir():
                subprocess.run(
                    ["ssh", "-q", "-o", f"ControlPath={socket}", "-O", "exit", "x"],
                    stderr=subprocess.DEVNULL,
                    check=False,
                )
            shutil.rmtree(control, ignore_errors=True)


def undo(fleet: WideFleet) -> None:
    """Have the hosts as they were before a first converge: packages alone."""

    def one(host: Any) -> None:
        its = fleet.wanted[host.name]
        ours = [s["unit"] for s in its["services"] if s["unit"] != "systemd-journald.service"]
        files = " ".join(file["path"] for file in its["files"])
        host.sh(
            f"systemctl disable -q --now {' '.join(ours)} 2>/dev/null; rm -f {files}; "
            "rm -rf /var/lib/vllm /etc/vllm /opt/vllm /usr/share/vllm-fleet; userdel vllm; "
            "systemctl daemon-reload; systemctl reset-failed",
            check=False,
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, fleet.hosts))


# --- measuring -------------------------------------------------------------------------------


def median(rounds: int, do: Callable[[], Run]) -> Run:
    """The middle one of several runs, by its seconds."""
    runs = sorted((do() for _ in range(rounds)), key=lambda run: run.seconds)
    return runs[len(runs) // 2]


def real(hosts: Sequence[int], rounds: int, ansible: Path | None, folder: Path) -> dict[str, Any]:
    """Everything on hosts of the test bed."""
    caches = HERE.parent / ".testbed"
    bed = Bed(
        Path(os.environ.get("FLEET_TESTBED") or caches / "bench"),
        Path(os.environ.get("FLEET_TESTBED_CACHE") or caches),
        say=lambda text: print(text, file=sys.stderr),
    )
    os.environ["FLEET_TESTBED"] = str(bed.root)
    found: dict[str, Any] = {"hosts": {}}
    try:
        bed.down()
        fleet = wide.make(bed, folder, max(hosts), ops=False)
        root = fleet.operator.root
        began = time.monotonic()
        pyinfra(root, "wide")  # the packages
        print(f"packages installed in {time.monotonic() - began:.0f} s", file=sys.stderr)
        fleet.wanted = wanted(str(root / "inventory/wide.py"))
        peer = Ansible(ansible, fleet, folder / "ansible") if ansible else None
        found["interpreter"] = median(3, lambda: interpreter(root)).seconds
        for count in hosts:
            fleet.take(count)
            names = [host.name for host in taken(fleet, count)]
            one: dict[str, Any] = {}
            compared = peer is not None and count in (min(hosts), max(hosts))
            undo(fleet)
            one["first"] = pyinfra(root, "wide").seconds
            one["noop"] = vars(median(rounds, lambda: pyinfra(root, "wide")))
            one["floor"] = statistics.median(floor(fleet, count) for _ in range(rounds))
            found["hosts"][count] = one
            print(f"{count} hosts: {json.dumps(one)}", file=sys.stderr, flush=True)
            if compared and peer is not None:
                undo(fleet)
                one["ansible first"] = peer.run(names).seconds
                times = rounds if count == min(hosts) else 1  # minutes each
                one["ansible noop"] = median(times, partial(peer.run, names)).seconds
                print(f"{count} hosts: {json.dumps(one)}", file=sys.stderr, flush=True)
    except TimeOver:
        print("ended before everything was measured", file=sys.stderr)
    finally:
        bed.down()
    return found


def fake(sizes: Sequence[int], rounds: int, folder: Path) -> dict[int, dict[str, Any]]:
    """A no-op on hosts that are not there."""
    found = {}
    for size in sizes:
        root = folder / f"fake-{size}"
        large.write_files(root, size)
        large.settle(root)
        for name in ("deploy.py", "config.py"):
            shutil.copy(HERE.parent / name, root)
        found[size] = vars(median(rounds, partial(pyinfra, root, "prod")))
        for command in ("status", "doctor"):
            found[size][command] = median(rounds, partial(fleet_command, command, root)).seconds
        print(f"{size} fake hosts: {json.dumps(found[size])}", file=sys.stderr)
    return found


def planning(folder: Path, rounds: int) -> dict[str, Any]:
    """Spec, rendering and validation of 500 hosts and 4,000 instances; imports are not counted."""
    root = folder / "planning"
    large.write_files(root, 500 + len(large.GATEWAYS))
    code = (
        "import json, resource, sys, time\n"
        "from tests.unit import large\n"
        "from vllm_fleet.plan import plan_fleet\n"
        "from vllm_fleet.spec.inputs import read_inputs\n"
        "from vllm_fleet.spec.load import load_fleet\n"
        "import vllm_fleet.engine_args\n"
        "began, cpu = time.monotonic(), time.process_time()\n"
        "fleet = load_fleet('inventory/prod.py'); inputs = read_inputs(fleet)\n"
        "read = time.monotonic(); cpu -= time.process_time()\n"
        "states = large.bare(fleet)\n"
        "made = time.monotonic(); cpu += time.process_time()\n"
        "plans = plan_fleet(fleet, states, inputs)\n"
        "changed = sum(len(plan.changed_files) for plan in plans.values())\n"
        "took, cpu = time.monotonic() - made + read - began, time.process_time() - cpu\n"
        "print(json.dumps({'seconds': took, 'cpu': cpu, 'hosts': len(plans), 'files': changed,\n"
        "  'instances': sum(len(p.instances) for p in plans.values()),\n"
        "  'mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))\n"
    )
    runs = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        runs.append(json.loads(done.stdout))
    result: dict[str, Any] = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
    return result


def growth(by_size: dict[int, tuple[float, float]]) -> list[tuple[str, float]]:
    """What one more host costs between the larger sizes, in times of that between the smaller."""
    sizes = sorted(by_size)
    found = []
    for which, name in enumerate(("time", "memory")):
        each = [(by_size[b][which] - by_size[a][which]) / (b - a) for a, b in pairwise(sizes)]
        if len(each) > 1 and each[0] > 0:
            found.append((name, each[-1] / each[0]))
    return found


def bounds(found: dict[str, Any]) -> list[tuple[str, float, str, float]]:
    """(what, found, sign, limit)."""
    checks: list[tuple[str, float, str, float]] = []
    if "real" in found:
        hosts = found["real"]["hosts"]
        for count, one in hosts.items():
            if "ansible noop" in one:
                ratio = one["ansible noop"] / one["noop"]["seconds"]
                checks.append(
                    (f"no-op, {count} hosts: times faster", ratio, ">", NOOP_TIMES_ANSIBLE)
                )
                ratio = one["ansible first"] / one["first"]
                checks.append(
                    (f"first, {count} hosts: times faster", ratio, ">", FIRST_TIMES_ANSIBLE)
                )
        most = hosts[max(hosts)]
        ours = most["noop"]["seconds"] - found["real"]["interpreter"]
        name = f"no-op, {max(hosts)} hosts: times the floor"
        checks.append((name, ours / most["floor"], "<", NOOP_TIMES_FLOOR))
        grown = {n: (one["noop"]["seconds"], one["noop"]["mib"]) for n, one in hosts.items()}
        for what, ratio in growth(grown):
            checks.append((f"test hosts: {what} of one more host", ratio, "<", GROWTH))
    if found["fake"]:
        grown = {n: (one["seconds"], one["mib"]) for n, one in found["fake"].items()}
        for what, ratio in growth(grown):
            checks.append((f"fake hosts: {what} of one more host", ratio, "<", GROWTH))
    checks.append(("planning: seconds", found["planning"]["seconds"], "<", PLAN_SECONDS))
    checks.append(("planning: MiB", found["planning"]["mib"], "<", PLAN_MIB))
    return checks


def table(found: dict[str, Any]) -> None:
    """The figures, as docs/benchmarks.md has them."""
    if "real" in found:
        print(f"interpreter and imports: {found['real']['interpreter']:.2f} s\n")
        print("| hosts | no-op | Ansible | first | Ansible | floor | MiB | no-op's parts |")
        print("|---|---|---|---|---|---|---|---|")
        for count, one in found["real"]["hosts"].items():
            cells = [
                *(f"{one['noop']['seconds']:.2f} s", seconds(one.get("ansible noop"))),
                *(f"{one['first']:.2f} s", seconds(one.get("ansible first"))),
                *(f"{one['floor']:.2f} s", str(one["noop"]["mib"])),
                ", ".join(f"{name} {took:.2f}" for name, took in one["noop"]["stages"].items()),
            ]
            print(f"| {count} | {' | '.join(cells)} |")
        print()
    print("| fake hosts | no-op | CPU | MiB | fleet status | fleet doctor | no-op's parts |")
    print("|---|---|---|---|---|---|---|")
    for count, one in found["fake"].items():
        parts = ", ".join(f"{name} {took:.2f}" for name, took in one["stages"].items())
        cells = [f"{one['seconds']:.2f} s", f"{one['cpu']:.2f} s", str(one["mib"])]
        cells += [f"{one['status']:.2f} s", f"{one['doctor']:.2f} s", parts]
        print(f"| {count} | {' | '.join(cells)} |")
    plan = found["planning"]
    print(
        f"\nplanning {plan['hosts']} hosts, {plan['instances']} instances, {plan['files']} files: "
        f"{plan['seconds']:.2f} s, CPU {plan['cpu']:.2f} s, {plan['mib']} MiB\n"
    )


def seconds(value: float | None) -> str:
    """A time, or a dash."""
    return "-" if value is None else f"{value:.2f} s"


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description="deploy.py against Ansible and bare SSH.")
    parser.add_argument("--hosts", type=int, nargs="*", default=[3, 10, 20], help="Test hosts.")
    parser.add_argument("--fake", type=int, nargs="*", default=[50, 200, 500], help="Fake hosts.")
    parser.add_argument("--rounds", type=int, default=3, help="Runs of which the median counts.")
    parser.add_argument("--ansible", type=Path, help="Where ansible-playbook is.")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, time_over)
    folder = Path(tempfile.mkdtemp(prefix="fleet-converge-"))
    found: dict[str, Any] = {}
    try:
        found["planning"] = planning(folder, arguments.rounds)
        found["fake"] = fake(arguments.fake, arguments.rounds, folder)
        if arguments.hosts:
            peer = arguments.ansible.resolve() if arguments.ansible else None
            found["real"] = real(arguments.hosts, arguments.rounds, peer, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table(found)
    missed = 0
    print("| Bound | Found | Limit | |\n|---|---|---|---|")
    for what, value, sign, limit in bounds(found):
        good = value > limit if sign == ">" else value < limit
        missed += not good
        print(f"| {what} | {value:.2f} | {sign} {limit:g} | {'met' if good else 'missed'} |")
    print(json.dumps(found))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
