"""Findings about hosts: reach, exam, units, processes, disks, clocks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from vllm_fleet import watch
from vllm_fleet.doctor.case import Case, Finding, Json
from vllm_fleet.exam import described, is_ours, is_seen
from vllm_fleet.host_plan import HostPlan, Service
from vllm_fleet.spec.model import HostSpec
from vllm_fleet.state import HostState, Process

CLOCK_SECONDS = 2.0
# Share and MiB that are left; the alert disk-full begins at the first share. Of a very large disk a
# small share is still room enough.
DISK_SHORT, DISK_FULL = (0.05, 100 * 1024), (0.03, 20 * 1024)
UNEVEN_MIB = 1024  # memory in use of like cards of one instance
EXPORTERS = ("prometheus-node-exporter.service", f"{watch.GPU_EXPORTER}.service")

# Finding by the first word of what the exam looked at.
VERDICTS = {
    "access": "host-access",
    "init": "host-unsupported",
    "system": "host-unsupported",
    "python": "host-unsupported",
    "port": "port-in-use",
    "glibc": "glibc-too-old",
    "memory": "little-room",
    "disk": "little-room",
    "driver": "driver-unfit",
    "cards": "card-unfit",
    "card": "card-unfit",
    "kernels": "no-kernel-image",
    "links": "card-links",
    "persistence": "persistenced",
    "fabric": "fabric-manager",
    "kernel": "xid-error",
    "memlock": "nccl-memlock",
    "rdma": "infiniband-down",
}


def findings(case: Case) -> Iterator[Finding]:
    """Everything about the hosts themselves."""
    for name, why in case.failures.items():
        yield Finding(
            "host-down",
            name,
            "not looked at: nothing is known of it",
            why,
            (case.ssh(name, "uptime"),),
        )
    for name, why in case.silent.items():
        yield Finding(
            "not-looked-at",
            name,
            "gave its state and no more",
            why,
            remedy=(case.ssh(name, "dmesg | tail -n 50"),),
        )
    plans, _ = case.planned
    for spec, state in case.looked_at:
        yield from _exam(case, spec, state)
        yield from _uneven(case, spec)
        if spec.name in plans:
            yield from _units(case, spec, state, plans[spec.name])
        yield from _strangers(case, spec, state)
        yield from _disks(case, spec)
    yield from _clocks(case)


# --- exam


def _exam(case: Case, spec: HostSpec, state: HostState) -> Iterator[Finding]:
    for verdict in case.views[spec.name].verdicts:
        if verdict.level == "ok":
            continue
        word = verdict.what.split()[0]
        found = "iommu-faults" if "IO_PAGE_FAULT" in verdict.detail else VERDICTS[word]
        commands: tuple[str, ...] = ()
        note = verdict.remedy
        if word == "port":
            holder = state.listening[verdict.what.split()[1]]
            if is_seen(holder):
                commands, note = (_end(case, spec.name, holder),), "or choose another port"
        elif word == "card" and "is held by" in verdict.detail:
            found = "card-memory-taken"
            pid = re.search(r"\bpid (\d+)\b", verdict.detail)
            holders = {str(h["pid"]): h for h in state.cards.get("holders") or ()}
            if pid and pid[1] in holders and is_seen(holders[pid[1]]):
                commands = (_end(case, spec.name, holders[pid[1]]),)
        elif word == "persistence":
            commands = (case.ssh(spec.name, "systemctl enable --now nvidia-persistenced"),)
        elif word == "fabric":
            commands = (case.ssh(spec.name, "systemctl enable --now nvidia-fabricmanager"),)
        yield Finding(
            found,
            spec.name,
            verdict.detail,
            f"exam of its {verdict.what}",
            commands,
            note=note,
            level=None if verdict.level == "refused" or found == "little-room" else "warning",
        )


def _end(case: Case, host: str, process: Process) -> str:
    """What ends a process: its unit, where it has one, else itself."""
    unit = process.get("unit")
    # A shell that was logged in over SSH belongs to sshd's unit, and stopping that cuts us off.
    if unit and unit not in ("ssh.service", "sshd.service") and not str(unit).startswith("user@"):
        return case.ssh(host, f"systemctl stop {unit}")
    return case.ssh(host, f"kill {process['pid']}")


def _uneven(case: Case, spec: HostSpec) -> Iterator[Finding]:
    view = case.views[spec.name]
    for name, indices in view.cards.items():
        used = {
            i: card.memory_used_mib
            for i in indices
            if (card := view.seen.by_index.get(i)) and card.memory_used_mib is not None
        }
        active = view.state.units.get(f"vllm@{name}.service", {}).get("ActiveState") == "active"
        if not active or len(used) < 2 or max(used.values()) - min(used.values()) <= UNEVEN_MIB:
            continue
        shown = ", ".join(f"card {i}: {mib} MiB" for i, mib in sorted(used.items()))
        fullest = max(used, key=lambda i: used[i])
        yield Finding(
            "group-memory-uneven",
            spec.name,
            f"memory of its cards differs by {max(used.values()) - min(used.values())} MiB",
            shown,
            (case.ssh(spec.name, f"nvidia-smi -i {fullest} -q -d PIDS"),),
            instance=name,
        )


# --- units


def _units(case: Case, spec: HostSpec, state: HostState, plan: HostPlan) -> Iterator[Finding]:
    services: tuple[Service, ...] = (
        *plan.bundle_services,
        *plan.firewall_services,
        *plan.gateway_services,
        *plan.monitoring_services,
    )
    reload_told = False
    for service in services:
        yield from _service(case, spec, state, service, current=not plan.changed_files)
    for one in plan.instances:
        kept = plan.kept.get(one.name)
        if not state.held and not (kept and not kept.startable):
            yield from _instance_unit(case, spec, state, one.name)
    for unit, fields in sorted(state.units.items()):
        if fields.get("NeedDaemonReload") == "yes" and not reload_told:
            reload_told = True
            yield Finding(
                "unit-changed-on-disk",
                spec.name,
                f"{unit} was changed on disk and systemd runs it as it was",
                "NeedDaemonReload=yes",
                (case.ssh(spec.name, "systemctl daemon-reload"),),
            )
    if state.held:
        who, why = state.held.get("who"), state.held.get("why")
        command = f"pyinfra {case.inventory} maintain.py --limit {spec.name} --data do=return"
        text = f"held by {who}{f' ({why})' if why else ''}"
        yield Finding("host-held", spec.name, text, "/var/lib/vllm/_rollout/held.json", (command,))


def _service(
    case: Case, spec: HostSpec, state: HostState, service: Service, current: bool
) -> Iterator[Finding]:
    """One daemon; ``current``: the files on disk are the plan's."""
    unit = service.unit
    fields = state.units.get(unit)
    if fields is None:
        return
    now = fields.get("ActiveState", "inactive")
    if now in ("inactive", "failed"):
        if fields.get("LoadState") == "not-found":
            return  # not deployed yet: told by the plan
        found = "service-stopped"
        if unit == "nginx.service":
            found = "gateway-down"
        elif unit in EXPORTERS:
            found = "exporter-stopped"
        elif unit.startswith("vllm-fleet-firewall"):
            found = "firewall-off"
        elif unit.endswith((".timer", ".path")):
            found = "timer-stopped"
        yield Finding(
            found,
            spec.name,
            f"{unit} is not running ({now})",
            f"systemctl: {now}/{fields.get('SubState', '?')}, result {fields.get('Result', '?')}",
            (case.ssh(spec.name, f"systemctl enable --now {unit}"),),
        )
    elif not state.enabled(unit):
        yield Finding(
            "unit-disabled",
            spec.name,
            f"{unit} runs and would not start after a reboot",
            f"systemctl: {fields.get('UnitFileState') or 'not enabled'}",
            (case.ssh(spec.name, f"systemctl enable {unit}"),),
        )
    elif current:
        read = state.loaded.get(unit, "").partition(":")
        if (service.restarts and read[0] != service.restarts) or (
            service.reloads and read[2] != service.reloads
        ):
            yield Finding(
                "files-not-read",
                spec.name,
                f"{unit} runs with older files than the plan's",
                f"it read {read[2][:8] or read[0][:8] or 'nothing that was noted'}",
                (case.deploy(spec.name),),
            )


def _instance_unit(case: Case, spec: HostSpec, state: HostState, name: str) -> Iterator[Finding]:
    unit = f"vllm@{name}.service"
    fields = state.units.get(unit, {})
    now = fields.get("ActiveState", "inactive")
    start = f"systemctl reset-failed {unit}; systemctl enable --now --no-block {unit}"
    if now == "failed":
        text = f"{unit} has failed and is not tried again"
        remedy = (
            case.ssh(spec.name, f"journalctl -u {unit} -n 400 --no-pager") + " | fleet explain -",
            case.ssh(spec.name, start),
        )
        seen = f"systemctl: failed, result {fields.get('Result', '?')}"
        yield Finding("instance-failed", spec.name, text, seen, remedy, instance=name)
    elif now == "inactive":
        yield Finding(
            "instance-stopped",
            spec.name,
            f"{unit} is not running",
            f"systemctl: inactive, {fields.get('UnitFileState') or 'never enabled'}",
            (case.ssh(spec.name, start),) if fields else (case.deploy(spec.name),),
            instance=name,
        )
    elif not state.enabled(unit):
        yield Finding(
            "unit-disabled",
            spec.name,
            f"{unit} runs and would not start after a reboot",
            f"systemctl: {fields.get('UnitFileState') or 'not enabled'}",
            (case.ssh(spec.name, f"systemctl enable {unit}"),),
            instance=name,
        )
    elif now != "active" or not state.instances.get(name, {}).get("ready"):
        seen = f"systemctl: {now}/{fields.get('SubState', '?')}"
        if now == "active":
            text = "it runs and is not ready: nobody sends it anything"
            restart = case.ssh(spec.name, f"systemctl restart {unit}")
            yield Finding("instance-not-ready", spec.name, text, seen, (restart,), instance=name)
            return
        doing = "stopping" if now == "deactivating" else "starting"
        yield Finding(
            "instance-starting",
            spec.name,
            f"it is {doing} and gets no requests",
            seen,
            (case.ssh(spec.name, f"journalctl -u {unit} -n 50 --no-pager"),),
            instance=name,
        )


# --- processes


def _strangers(case: Case, spec: HostSpec, state: HostState) -> Iterator[Finding]:
    held = {str(h["pid"]): h for h in state.cards.get("holders") or () if not is_ours(h)}
    for one in case.answer(spec.name).get("strangers") or ():
        cards = _held_by(one["pid"], held)
        seen = " ".join(described(one).split()) + (f"; holds {cards}" if cards else "")
        if one["kind"] == "engine":
            command = case.ssh(spec.name, f"kill -9 {one['pid']}")
            text = "an engine runs outside any unit"
            yield Finding("orphan-engine", spec.name, text, seen, (command,))
        else:
            text = "a vLLM server was started by hand"
            # A unit of somebody's that serves would do so again after a reboot.
            remedy = _end(case, spec.name, one).replace("systemctl stop", "systemctl disable --now")
            if one["workers"] and " kill " in remedy.replace("'", " "):
                # A server that is killed may leave its engine behind, which keeps the card.
                left = " ".join(map(str, one["workers"]))
                wait = f"timeout 60 tail --pid={one['pid']} -f /dev/null"
                command = f"kill {one['pid']} && {wait}; kill -9 {left} 2>/dev/null; true"
                remedy = case.ssh(spec.name, command)
            yield Finding("started-by-hand", spec.name, text, seen, (remedy,))


def _held_by(pid: int, holders: dict[str, Json]) -> str:
    found = holders.get(str(pid))
    return f"{found.get('memory_mib') or '?'} MiB of {found['uuid']}" if found else ""


# --- disks and clocks


def _disks(case: Case, spec: HostSpec) -> Iterator[Finding]:
    for disk in case.answer(spec.name).get("disks") or ():
        free, inodes, mib = disk["free"], disk["inodes_free"], disk["free_mib"]
        short, full = (
            (free < share and mib < least) or inodes < share
            for share, least in (DISK_SHORT, DISK_FULL)
        )
        if not short:
            continue
        what = "inodes" if inodes < free else "bytes"
        share = min(free, inodes) if what == "inodes" else free
        look = f"du -xh --max-depth=2 {disk['mount']} | sort -h | tail"
        yield Finding(
            "disk-full" if full else "disk-short",
            spec.name,
            f"{disk['mount']} has {share:.0%} of its {what} left",
            f"{mib} MiB free, {inodes:.0%} of inodes",
            (case.ssh(spec.name, look),),
        )


def _clocks(case: Case) -> Iterator[Finding]:
    """Clocks against each other: all of them off by the same is this machine's own clock."""
    off: dict[str, float] = {}
    for name, (sent, received) in case.asked_at.items():
        then = case.answer(name).get("time")
        if isinstance(then, float | int):
            # It was read at some moment between the two.
            off[name] = (
                min(max(then - received, 0.0), then - sent, key=abs)
                if (then < sent or then > received)
                else 0.0
            )
    if not off:
        return
    usual = statistics.median(off.values())
    for name, seconds in off.items():
        if abs(seconds - usual) > CLOCK_SECONDS:
            yield Finding(
                "clock-off",
                name,
                f"its clock is {seconds - usual:+.0f} s off that of the others",
                "time of its answer against this machine's",
                (case.ssh(name, "timedatectl set-ntp true"),),
            )
        elif case.answer(name).get("synchronised") is False:
            yield Finding(
                "clock-unsynchronised",
                name,
                "its clock follows no other",
                "timedatectl: NTPSynchronized=no",
                (case.ssh(name, "timedatectl set-ntp true"),),
            )
