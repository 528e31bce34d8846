"""What a host is, judged for what it is to do: ok, a warning, or refused, with the remedy. Pure.

A refusal stops a deploy before anything is changed; so it is given only for what would make an
instance of this host fail. What merely is odd, or concerns cards that nobody asks for, is a
warning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal, TypeVar

from vllm_fleet import adoption, alertmanager, engine_data, paths
from vllm_fleet.cards import (
    Card,
    CardsError,
    Groups,
    Topology,
    attach,
    complaint,
    groups,
    parse_gpus,
    parse_kernel_log,
    parse_p2p,
    parse_topo,
    parse_versions,
    worst_link,
)
from vllm_fleet.smi import Process as CardProcess
from vllm_fleet.spec.inputs import Inputs, version_of
from vllm_fleet.spec.model import HostSpec, Instance
from vllm_fleet.spec.spans import span_ports
from vllm_fleet.spec.tls import ACME_PORT
from vllm_fleet.state import HostState, Process
from vllm_fleet.topo import Pair

OLDEST = {"debian": 12.0, "ubuntu": 22.04}
NGINX = "nginx.service"
PROMETHEUS = "prometheus.service"
PERSISTENCED = "nvidia-persistenced.service"
FABRIC_MANAGER = "nvidia-fabricmanager.service"
UNITS = (PERSISTENCED, FABRIC_MANAGER)
PACKAGES = ("nvidia-fabricmanager*",)

LITTLE_MEMORY_MIB = 16 * 1024  # the page cache of weights, pinned buffers, a worker a card
LITTLE_DISK_MIB = 20 * 1024
# Xid errors that a program causes by itself say nothing of the card.
# https://docs.nvidia.com/deploy/xid-errors
OF_PROGRAMS = frozenset({8, 13, 31, 32, 43, 45, 68, 69, 137})
XID_REMEDIES = {
    48: "uncorrectable memory error: reset the card, replace it if it comes back",
    63: "a memory row was remapped: reset the card when it is idle",
    64: "a memory row could not be remapped: replace the card",
    74: "NVLink error: see nvidia-smi nvlink -e, reset the card, check its seat and bridges",
    79: "the card fell off the bus: reboot; reseat it and check its power if it comes back",
    94: "contained memory error: the program was killed; reset the card when it is idle",
    95: "uncontained memory error: reset the card now",
    119: "the card's own processor does not answer: reset it; update the driver if it comes back",
    120: "the card's own processor failed: reset it; update the driver if it comes back",
    140: "uncorrected memory errors: reset the card, replace it if they come back",
    154: "the driver asks for recovery: see nvidia-smi --query-gpu=gpu_recovery_action",
}
Level = Literal["ok", "warning", "refused"]
T = TypeVar("T")
NO_GROUPS = Groups(())


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at."""

    what: str  # "driver", "card 3"
    level: Level
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail}: {self.remedy}" if self.remedy else self.detail


@dataclass(frozen=True)
class Seen:
    """The cards of a host as its tools show them."""

    cards: tuple[Card, ...] = ()  # of the maker that `device` uses
    groups: Groups = NO_GROUPS  # of these cards
    others: Groups = NO_GROUPS  # of another maker's cards, which instances here do not use
    topology: Topology | None = None
    p2p: Mapping[Pair, str] | None = None
    problems: tuple[Verdict, ...] = ()  # why cards cannot be told at all
    warnings: tuple[str, ...] = ()

    @property
    def by_index(self) -> dict[int, Card]:
        """Cards by index."""
        return {card.index: card for card in self.cards}


def examine(
    spec: HostSpec,
    state: HostState,
    placed: Mapping[str, Collection[int]] | None = None,
    inputs: Inputs | None = None,
    seen: Seen | None = None,
) -> tuple[Verdict, ...]:
    """Every verdict on one host, in the order in which to show them.

    ``placed``: card indices by instance, where `cards` is a count and kind; instances that are
    not in it (nor name indices) are taken to use no card yet. ``seen``: its cards, where they
    were looked at with the same cards wanted. A host that cannot be managed at all gets the
    verdicts on that alone: the rest would only repeat it.
    """
    inputs = inputs or Inputs()
    found = list(_basics(state))
    if not manageable(state):
        return tuple(found)
    found += _ports(spec, state)
    if "gpu" not in spec.groups:
        return tuple(found)
    found += [*_releases(spec, state), *_room(spec, state)]
    if spec.settings.device != "cpu":
        wanted = cards_wanted(spec, placed or {})
        found += _cards(spec, state, seen or look(spec, state, wanted), wanted, inputs)
    found += _network(state)
    return tuple(found)


def manageable(state: HostState) -> bool:
    """Whether a host can be deployed to at all; where not, all else would only repeat it."""
    return all(v.level != "refused" for v in _basics(state))


def cards_wanted(
    spec: HostSpec, placed: Mapping[str, Collection[int]]
) -> dict[str, tuple[int, ...]]:
    """Card indices by instance of a host; of counts and kinds those that are resolved."""
    return {
        one.name: tuple(placed.get(one.name, ())) if isinstance(one.cards, str) else one.cards
        for one in spec.instances
    }


def described(process: Process) -> str:
    """A process for a message: who, what, where it belongs."""
    if not is_seen(process):
        number = f" (pid {process['pid']} there)" if process["pid"] else ""
        return f"a process that this host does not show, the kernel's or a container's{number}"
    unit = f", unit {process['unit']}" if process.get("unit") else ", outside any unit"
    return f"pid {process['pid']} of {process['user']}{unit}: {process['command'] or '?'}"


def is_seen(process: Process) -> bool:
    """Whether the host itself shows a process; else its pid means nothing there."""
    return bool(process["pid"]) and process["user"] != "?"


def is_ours(process: Process) -> bool:
    """Whether a process is one of our instances."""
    return str(process.get("unit")).startswith("vllm@")


# -- the host itself


def _basics(state: HostState) -> Iterator[Verdict]:
    if state.user != "root":
        yield Verdict(
            "access",
            "refused",
            f"commands run as {state.user}, not root",
            "set _sudo (and _sudo_password) for it in the inventory",
        )
    if not state.systemd:
        yield Verdict(
            "init",
            "refused",
            f"PID 1 is {state.init}, not systemd",
            "instances are systemd units; use a host, or a container that boots systemd",
        )
    oldest = OLDEST.get(state.os["id"])
    try:
        version = float(".".join(state.os["version"].split(".")[:2]) or 0)
    except ValueError:
        version = 0.0
    name = state.os["name"] or "unknown system"
    if oldest is None or version < oldest:
        yield Verdict(
            "system",
            "refused",
            f"{name} is not supported",
            "Debian 12 or later, or Ubuntu 22.04 or later",
        )
    else:
        yield Verdict("system", "ok", f"{name}, Linux {state.kernel}, {state.arch}")


def _ports(spec: HostSpec, state: HostState) -> Iterator[Verdict]:
    """Ports of the plan that somebody else holds."""
    wanted = {i.port: (f"instance {i.name}", f"vllm@{i.name}.service") for i in spec.instances}
    for one in spec.instances:
        for setting, number in span_ports(one).items():
            wanted[number] = (f"span.{setting} of instance {one.name}", f"vllm@{one.name}.service")
    if "gateway" in spec.groups:
        wanted[spec.settings.gateway.listen] = ("the gateway", NGINX)
        if spec.settings.gateway.tls and spec.settings.gateway.tls.acme:
            wanted[ACME_PORT] = ("the proof for the gateway's certificate", NGINX)
    if "monitoring" in spec.groups:
        wanted[spec.settings.monitoring.listen] = ("Prometheus", PROMETHEUS)
        if spec.settings.monitoring.alerting.receivers:
            port = spec.settings.monitoring.alerting.port
            wanted[port] = ("Alertmanager", alertmanager.UNIT)
    for port, (what, unit) in sorted(wanted.items()):
        holder = state.listening.get(str(port))
        if holder and holder.get("unit") != unit and not is_ours(holder):
            remedy = "stop it, or choose another port"
            if unit.startswith("vllm@") and adoption.is_vllm(holder):
                name = unit.removeprefix("vllm@").removesuffix(".service")
                remedy = (
                    "it is a vLLM that is not ours: `deploy.py --data adopt="
                    f"{spec.name}/{name}` lets it finish its requests, ends it and starts ours in "
                    f"its place; or {remedy}"
                )
            yield Verdict(
                f"port {port}",
                "refused",
                f"port {port} of {what} is taken by {described(holder)}",
                remedy,
            )


def _releases(spec: HostSpec, state: HostState) -> Iterator[Verdict]:
    """glibc and Python against the wanted releases."""
    versions = list(dict.fromkeys(version_of(spec, one) for one in spec.instances))
    python = _python(spec, state)
    problems = [p for v in versions if python and (p := engine_data.python_problem(v, python))]
    for problem in problems:
        yield _problem("python", problem)
    if not problems:
        yield Verdict("python", "ok", f"Python {python or spec.settings.python}")
    if spec.settings.device == "cuda" and state.glibc:
        problems = [p for v in versions if (p := engine_data.glibc_problem(v, state.glibc))]
        for problem in problems:
            yield _problem("glibc", problem)
        if problems:
            return
    yield Verdict("glibc", "ok", f"glibc {state.glibc or 'unknown'}")


def _python(spec: HostSpec, state: HostState) -> str:
    """Version of the interpreter that releases are made with; "" where only the host knows."""
    if spec.settings.python_archive:
        return spec.settings.python_archive.version
    if spec.settings.python in ("python3", "/usr/bin/python3"):
        return state.python
    match = re.search(r"python(3\.\d+)$", spec.settings.python)
    return match[1] if match else ""


def _problem(what: str, sentence: str) -> Verdict:
    """A sentence of engine_data, whose remedy stands after its last semicolon."""
    detail, _, remedy = sentence.partition("; ")
    return Verdict(what, "refused", detail, remedy)


def _room(spec: HostSpec, state: HostState) -> Iterator[Verdict]:
    total, free = state.memory.get("total_mib", 0), state.memory.get("available_mib", 0)
    text = f"{total / 1024:.0f} GiB, {free / 1024:.0f} GiB of it free; {state.cpus or '?'} CPUs"
    if spec.settings.device != "cpu" and total < LITTLE_MEMORY_MIB:
        yield Verdict("memory", "warning", text, "weights are read through it: add memory")
    else:
        yield Verdict("memory", "ok", text)
    disk = state.disks.get(paths.OPT)
    if disk is not None:
        free_gib = f"{disk['free_mib'] / 1024:.0f} GiB free at {paths.OPT}"
        if disk["free_mib"] < LITTLE_DISK_MIB:
            yield Verdict("disk", "warning", free_gib, "releases and weights go there: make room")
        else:
            yield Verdict("disk", "ok", free_gib)
    if len(state.numa) > 1:
        nodes = ", ".join(f"{k}: CPUs {v['cpus']}" for k, v in sorted(state.numa.items()))
        yield Verdict("numa", "ok", f"{len(state.numa)} nodes ({nodes})")


# -- cards


def look(spec: HostSpec, state: HostState, wanted: Mapping[str, Collection[int]]) -> Seen:
    """The cards of a host and their groups; never raises, what cannot be read is a problem.

    Cards that our own instances hold are not in use by others.
    """
    if spec.settings.device == "rocm":
        return _look_amd(state)
    texts = state.cards
    if texts.get("error"):
        said = str(texts["error"])
        meaning = (complaint(said) or "").partition("; ")
        first = next((line for line in said.splitlines() if line.strip()), said).strip()
        return Seen(
            problems=(
                Verdict(
                    "driver",
                    "refused",
                    f"nvidia-smi: {first}",
                    meaning[2] or "mend the driver first",
                ),
            )
        )
    try:
        listing = parse_gpus(texts.get("csv", ""))
    except CardsError as error:
        detail = "no NVIDIA driver or card (nvidia-smi lists none)"
        if texts.get("csv"):
            detail = f"the list of cards cannot be read: {error}"
        remedy = "install the driver, or set `device` to rocm or cpu"
        return Seen(problems=(Verdict("cards", "refused", detail, remedy),))
    warnings = [w for w in listing.warnings if "no header line" not in w]
    holders: list[Process] = texts.get("holders") or []
    ours = {h["uuid"] for h in holders if is_ours(h)}
    running = {
        index
        for name, indices in wanted.items()
        if state.active(f"vllm@{name}.service")
        for index in indices
    }
    own = {c.index for c in listing.cards if c.uuid in ours} | running
    foreign = [
        CardProcess(h["pid"], str(h["command"] or "?"), h.get("memory_mib"), h["uuid"])
        for h in holders
        if not is_ours(h)
    ]
    topology = _read(parse_topo, texts.get("topo"), warnings)
    p2p = _read(parse_p2p, texts.get("p2p"), [])  # not every driver has it
    cards = attach(listing.cards, foreign)
    made = groups(cards, topology, p2p=p2p, own=own)
    amd = _look_amd(state)
    return Seen(cards, made, amd.groups, topology, p2p, (), tuple(warnings))


def _look_amd(state: HostState) -> Seen:
    texts = state.cards.get("rocm") or {}
    try:
        listing = parse_gpus(texts.get("json", ""))
    except CardsError:
        remedy = "install the ROCm driver, or set `device` to cuda or cpu"
        detail = "no AMD driver or card (rocm-smi lists none)"
        return Seen(problems=(Verdict("cards", "refused", detail, remedy),))
    warnings = list(listing.warnings)
    topology = _read(parse_topo, texts.get("topo"), warnings)
    made = groups(listing.cards, topology, own={c.index for c in listing.cards})
    return Seen(listing.cards, made, NO_GROUPS, topology, None, (), tuple(warnings))


def _read(parse: Callable[[str], T], text: str | None, warnings: list[str]) -> T | None:
    if not text:
        return None
    try:
        return parse(text)
    except CardsError as error:
        warnings.append(str(error))
        return None


def _cards(
    spec: HostSpec,
    state: HostState,
    seen: Seen,
    wanted: Mapping[str, tuple[int, ...]],
    inputs: Inputs,
) -> Iterator[Verdict]:
    if seen.problems:
        for problem in seen.problems:
            # Without instances nothing fails; the host is only not what its group says.
            level: Level = "refused" if spec.instances else "warning"
            yield Verdict(problem.what, level, problem.detail, problem.remedy)
        yield from _kernel_log(state, {})
        return
    by_index, left = seen.by_index, {o.gpu: o.why for o in seen.groups.left_out}
    cuda = spec.settings.device == "cuda"
    users: dict[int, str] = {i: name for name, indices in wanted.items() for i in indices}
    if cuda:
        yield from _driver(spec, state, seen, inputs)
    for name, indices in wanted.items():
        for index in indices:
            if index not in by_index:
                yield _missing(spec, state, name, index, by_index)
                continue
            yield from _held(state, name, by_index[index])
    for card in seen.cards:
        yield _card(card, left.get(card.index), users.get(card.index))
    if cuda:
        for one in spec.instances:
            yield from _kernels(spec, one, wanted[one.name], by_index)
    for name, indices in wanted.items():
        yield from _links(name, [i for i in indices if i in by_index], seen)
    left_out = tuple(f"GPU{index} is left out" for index in left)
    told = ("PCIe lanes", "throttled now", "marked as not run")
    for warning in (*seen.warnings, *seen.groups.warnings):
        if not warning.startswith(left_out) and not any(words in warning for words in told):
            yield Verdict("cards", "warning", warning)
    if cuda:
        yield from _services(spec, state, seen)
    yield from _kernel_log(state, by_index)
    for unit, fields in sorted(state.units.items()):
        limit = fields.get("LimitMEMLOCK", "infinity")
        if unit.startswith("vllm@") and limit != "infinity" and state.active(unit):
            yield Verdict(
                "memlock",
                "warning",
                f"{unit} may lock {limit} bytes of memory only; RDMA fails with `ibv_reg_mr`",
                f"a drop-in overrides our LimitMEMLOCK=infinity: systemctl cat {unit}",
            )


def _driver(spec: HostSpec, state: HostState, seen: Seen, inputs: Inputs) -> Iterator[Verdict]:
    driver = seen.cards[0].driver
    carries = parse_versions(str(state.cards.get("head") or ""))[1]
    text = f"driver {driver or 'unknown'}" + (f", carries CUDA {carries}" if carries else "")
    problems = []
    for version in dict.fromkeys(version_of(spec, one) for one in spec.instances):
        if driver and not (_built_for_cuda_12(spec, version, inputs) and _branch(driver) >= 525):
            problems.append(engine_data.driver_problem(version, driver))
    found = [p for p in problems if p]
    for problem in found:
        yield _problem("driver", problem)
    if not found:
        yield Verdict("driver", "ok", text)


def _branch(driver: str) -> int:
    match = re.match(r"\d+", driver)
    return int(match[0]) if match else 0


def _built_for_cuda_12(spec: HostSpec, version: str, inputs: Inputs) -> bool:
    """Whether the operator takes a build of vLLM for CUDA 12 instead of the default wheel."""
    if (spec.settings.vllm_variant or "").startswith("cu12"):
        return True
    index = spec.settings.package_index
    sources = " ".join([index.index_url or "", *index.extra_index_urls, *index.find_links, version])
    if re.search(r"\bcu12\d?", sources):
        return True
    lock = inputs.locks.get((spec.settings.vllm_lock or "").replace("{version}", version), "")
    return _locked_for_cuda_12(lock)


@lru_cache(maxsize=64)  # a lock is long, and the same for many hosts
def _locked_for_cuda_12(lock: str) -> bool:
    return bool(re.search(r"\+cu12\d|^nvidia-cuda-runtime-cu12\b", lock, re.M))


def _missing(
    spec: HostSpec, state: HostState, name: str, index: int, known: Mapping[int, Card]
) -> Verdict:
    tool = "rocm-smi" if spec.settings.device == "rocm" else "nvidia-smi"
    listed = ", ".join(map(str, known))
    detail = f"instance {name} wants card {index}; {tool} lists {listed}"
    lost = [m for m in parse_kernel_log("\n".join(state.kernel_log)) if m.xid in (79, None)]
    remedy = f"the kernel log says: {lost[-1].text}" if lost else ""
    return Verdict(f"card {index}", "refused", detail, remedy)


def _held(state: HostState, name: str, card: Card) -> Iterator[Verdict]:
    for holder in state.cards.get("holders") or ():
        if holder["uuid"] == card.uuid and not is_ours(holder):
            yield Verdict(
                f"card {card.index}",
                "refused",
                f"card {card.index} of instance {name} is held by {described(holder)}",
                "stop it, or give the instance other cards",
            )


def _card(card: Card, left: str | None, user: str | None) -> Verdict:
    """The verdict on one card; ``left`` is why no group may hold it."""
    what = f"card {card.index}"
    memory = f"{card.memory_mib / 1024:.1f} GiB" if card.memory_mib else "memory not given"
    parts = [card.short_name, memory]
    if card.capability:
        parts.append(f"capability {card.capability}")
    if card.ecc is not None:
        parts.append("ECC on" if card.ecc else "ECC off")
    if card.pcie:
        parts.append(f"PCIe {card.pcie[1]}.0 x{card.pcie[3]}")
    text = ", ".join(parts)
    if left and user:
        if left.startswith("it is in use") and card.processes:
            return Verdict(what, "ok", text)  # told already, with its owner
        return Verdict(what, "refused", f"card {card.index} of instance {user}: {left}")
    if left:
        return Verdict(what, "warning", f"{text}; left out of the groups", left)
    if card.pcie and card.pcie[2] < card.pcie[3]:
        # The generation drops when the card is idle; the width does not.
        detail = f"{text}; {card.pcie[2]} of {card.pcie[3]} PCIe lanes"
        return Verdict(what, "warning", detail, "reseat it, or see the slot's wiring")
    if card.throttled:
        detail = f"{text}; slowed down now: {', '.join(card.throttled)}"
        return Verdict(what, "warning", detail, "see its cooling and power")
    return Verdict(what, "ok", text)


def _kernels(
    spec: HostSpec, one: Instance, indices: Collection[int], known: Mapping[int, Card]
) -> Iterator[Verdict]:
    """Whether the release has kernels for the cards of an instance."""
    version = version_of(spec, one)
    for text in dict.fromkeys(known[i].capability for i in indices if i in known):
        match = re.fullmatch(r"(\d+)\.(\d)", text)
        if match is None:
            continue
        problem = engine_data.capability_problem(version, (int(match[1]), int(match[2])))
        if problem:
            detail, _, remedy = problem.partition("; ")
            yield Verdict("kernels", "refused", f"instance {one.name}: {detail}", remedy)


def _links(name: str, indices: list[int], seen: Seen) -> Iterator[Verdict]:
    """How the cards of one instance reach each other."""
    if len(indices) < 2:
        return
    shown = ", ".join(map(str, indices))
    kinds = {seen.by_index[i].name for i in indices}
    if len(kinds) > 1:
        yield Verdict(
            "links",
            "refused",
            f"cards {shown} of instance {name} are of several kinds ({', '.join(sorted(kinds))})",
            "one server needs like cards: see `fleet plan` for the groups",
        )
        return
    if seen.topology is None:
        return
    link = worst_link(indices, seen.topology)
    better = [
        g
        for g in seen.groups.groups
        if len(g.gpus) >= len(indices) and g.name == seen.by_index[indices[0]].name
    ]
    best = next((g for g in better if g.link.startswith("NV")), None)
    if link in ("SYS", "NODE") and best is not None:
        yield Verdict(
            "links",
            "warning",
            f"cards {shown} of instance {name} are linked by {link}, cards "
            f"{', '.join(map(str, best.gpus))} by {best.link}",
            "tensor parallelism is slow over the CPUs: take cards of one group",
        )
    else:
        yield Verdict("links", "ok", f"cards {shown} of instance {name}: {link}")
    bad = {s for p in combinations(sorted(indices), 2) if (s := (seen.p2p or {}).get(p, "OK"))}
    if bad - {"OK"} and not any(set(indices) <= set(g.gpus) for g in seen.groups.groups):
        yield Verdict(
            "links",
            "warning",
            f"cards {shown} of instance {name} cannot reach each other directly "
            f"({', '.join(sorted(bad - {'OK'}))})",
            "NCCL copies through host memory; add `disable-custom-all-reduce: true`",
        )


def _services(spec: HostSpec, state: HostState, seen: Seen) -> Iterator[Verdict]:
    """nvidia-persistenced and the fabric manager."""
    off = [c.index for c in seen.cards if c.persistence is False]
    if off and not state.active(PERSISTENCED):
        yield Verdict(
            "persistence",
            "warning",
            f"persistence mode is off on cards {', '.join(map(str, off))}",
            "the driver is unloaded whenever nobody uses a card, and each start waits for it: "
            f"systemctl enable --now {PERSISTENCED}",
        )
    elif any(c.persistence is not None for c in seen.cards):
        yield Verdict("persistence", "ok", "persistence mode is on")
    if not state.cards.get("nvswitches"):
        return
    level: Level = "refused" if spec.instances else "warning"
    driver = seen.cards[0].driver
    versions = {
        version.partition("-")[0].partition(":")[2] or version.partition("-")[0]
        for name, version in state.packages.items()
        if name.startswith("nvidia-fabricmanager") and "dev" not in name
    }
    if not state.active(FABRIC_MANAGER):
        yield Verdict(
            "fabric manager",
            level,
            "the host has NVSwitches and nvidia-fabricmanager does not run",
            "CUDA fails with error 802 without it: install the package of the driver's version "
            f"({driver}), then systemctl enable --now {FABRIC_MANAGER}",
        )
    elif versions and driver and driver not in versions:
        yield Verdict(
            "fabric manager",
            level,
            f"nvidia-fabricmanager is {', '.join(sorted(versions))}, the driver {driver}",
            "both must be the same version: install the matching package and restart it",
        )
    else:
        yield Verdict("fabric manager", "ok", "nvidia-fabricmanager runs")


def _kernel_log(state: HostState, known: Mapping[int, Card]) -> Iterator[Verdict]:
    """Errors of cards since boot; a reset may have mended them, so they are warnings."""
    by_bus = {_bus(c.bus_id): f"card {i}" for i, c in known.items() if c.bus_id}
    counts: Counter[tuple[str, int]] = Counter()
    for message in parse_kernel_log("\n".join(state.kernel_log)):
        card = by_bus.get(_bus(message.bus_id), message.bus_id or "a card")
        if message.xid is None:
            yield Verdict("kernel log", "warning", f"{card}: {message.text}")
        elif message.xid not in OF_PROGRAMS:
            counts[card, message.xid] += 1
    for (card, xid), count in counts.items():
        times = "once" if count == 1 else f"{count} times"
        remedy = XID_REMEDIES.get(xid, "look it up at docs.nvidia.com/deploy/xid-errors")
        yield Verdict("kernel log", "warning", f"{card}: Xid {xid}, {times} since boot", remedy)
    if any("IO_PAGE_FAULT" in line for line in state.kernel_log):
        yield Verdict(
            "kernel log",
            "warning",
            "the IOMMU blocks transfers between devices (IO_PAGE_FAULT)",
            "boot with iommu=pt, else cards hang when they reach each other directly",
        )


def _bus(text: str) -> str:
    """A bus id without its domain's leading zeros and its function: "1:3b:00"."""
    return re.sub(r"\.\d$", "", text.lower()).lstrip("0:")


# -- network


def _network(state: HostState) -> Iterator[Verdict]:
    shown = [
        f"{name} {_speed(nic.get('speed_mbit'))}, MTU {nic.get('mtu')}"
        for name, nic in state.nics.items()
        if nic.get("hardware") and nic.get("state") == "up"
    ]
    if shown:
        yield Verdict("network", "ok", "; ".join(shown))
    active = [name for name, port in state.rdma.items() if port["state"] == "ACTIVE"]
    down = [name for name, port in state.rdma.items() if port["state"] != "ACTIVE"]
    if active and down:
        yield Verdict(
            "rdma",
            "warning",
            f"{', '.join(down)} {'has' if len(down) == 1 else 'have'} no link, "
            f"{', '.join(active)} {'has' if len(active) == 1 else 'have'} one",
            "see the cable and the switch's port",
        )
    elif active:
        ports = (f"{name} {state.rdma[name]['rate']}" for name in active)
        yield Verdict("rdma", "ok", "; ".join(ports))


def _speed(mbit: int | None) -> str:
    if not mbit:
        return "speed unknown"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"
