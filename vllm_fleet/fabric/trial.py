"""What the test of a fabric runs on, and what it found: who is at fault, and why. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet.fabric.discovery import Layer
from vllm_fleet.fabric.nodes import Clock, clocks_apart
from vllm_fleet.smi import CardsError, parse_gpus
from vllm_fleet.state import HostState

Json = Mapping[str, Any]

STEPS = ("", "torch", "memory", "rendezvous", "point to point", "all-reduce", "leave")
# As onhost/allreduce.py counts them: buffers of the largest size, and CUDA's and NCCL's own.
BUFFERS, CONTEXT_MIB = 4, 2048
# Beside an engine that serves: a small message, and a part of the links' time.
SHARED_MIB = 16
SHARED_MBYTE = 500
# What a deploy leaves of cards that nobody uses: the driver's own.
IDLE_MIB = 1024
FLOOR_SHARE = 0.25


@dataclass(frozen=True)
class Place:
    """The cards of one host that take part in the test; none without cards, one rank then."""

    cards: tuple[int, ...]
    shared: bool  # something serves on them


def place(state: HostState, test_mib: int) -> Place:
    """The free cards of a host; else its emptiest one. Raises ValueError where none has room."""
    listed = parse_gpus(str(state.cards.get("csv") or "")).cards
    held = {one.get("uuid") for one in state.cards.get("holders") or ()}
    free = {c.index: (c.memory_mib or 0) - (c.memory_used_mib or 0) for c in listed if not c.faults}
    idle = [
        c.index
        for c in listed
        if c.index in free and c.uuid not in held and (c.memory_used_mib or 0) <= IDLE_MIB
    ]
    if idle:
        if min(free[i] for i in idle) < CONTEXT_MIB + BUFFERS * test_mib:
            raise ValueError(f"nccl.test_mib {test_mib} does not fit its cards: make it smaller")
        return Place(tuple(idle), False)
    if not free:
        raise ValueError("no card that the test could use: see `fleet plan`")
    best = max(free, key=lambda index: free[index])
    needed = CONTEXT_MIB + BUFFERS * SHARED_MIB
    if free[best] < needed:
        raise ValueError(
            f"every card serves, and none has {needed} MiB left for the test (card {best}: "
            f"{free[best]}): take the host out of service first, maintain.py --data do=hold"
        )
    return Place((best,), True)


def places(states: Mapping[str, HostState], cuda: bool, test_mib: int) -> dict[str, Place]:
    """As many cards on each host; ValueError, with all hosts that have no room."""
    if not cuda:
        return {name: Place((), False) for name in states}
    found, problems = {}, []
    for name, state in states.items():
        try:
            found[name] = place(state, test_mib)
        except (ValueError, CardsError) as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    least = min(len(one.cards) for one in found.values())
    return {name: Place(one.cards[:least], one.shared) for name, one in found.items()}


@dataclass(frozen=True)
class Member:
    """A host of the test."""

    name: str
    address: str
    interface: str
    mtu: int


def link_findings(
    members: Sequence[Member], paths: Mapping[str, Json], ports: Mapping[str, Json]
) -> tuple[list[str], list[str]]:
    """(complaints, notices) of how hosts see each other: links, MTU, ports, clocks."""
    complaints: list[str] = []
    notices: list[str] = []
    by_name = {one.name: one for one in members}
    dead: dict[tuple[str, str], str] = {}  # who does not reach whom at all, and why
    for name, found in ports.items():
        for number, who in found["taken"].items():
            complaints.append(
                f"{name}: port {number} is taken by {who}: end that, or set another nccl.port"
            )
    taken = {name for name, found in ports.items() if found["taken"]}
    for name, me in by_name.items():
        found = paths[name]
        if found["why"]:
            complaints.append(f"{name}: {found['why']}")
            continue
        for peer, other in by_name.items():
            if peer == name:
                continue
            seen = found["peers"][peer]
            reached = ports[name]["peers"][peer]
            way = f"{name} → {peer} ({other.address} through {me.interface})"
            if reached["clock"] is None and seen["why"] and peer not in taken:
                dead[name, peer] = f"{seen['why']}{_route(seen, me)}"
                continue
            for number, why in reached["problems"].items() if peer not in taken else ():
                complaints.append(
                    f"{way}: port {number}: {why}; open it between these hosts (the ranks of an "
                    "engine listen on ports that the kernel gives, and on nccl.port)"
                )
            if seen["why"]:
                notices.append(f"{way}: {seen['why']} to an echo request: MTU was not tried")
            elif seen["mtu_why"]:
                complaints.append(
                    f"{way}: {seen['mtu_why']} to packets of {me.mtu} bytes, smaller ones pass; "
                    f"MTU is {me.mtu} on {name} and {other.mtu} on {peer}: give both, and every "
                    "switch between them, the same"
                )
            elif seen["through"] and seen["through"] != me.interface:
                notices.append(
                    f"{way}: the kernel's own route leads through {seen['through']}: two "
                    "interfaces are in one network"
                )
    complaints += _unreached(members, dead)
    complaints += clocks_apart(
        [
            Clock(name, peer, seen["clock"][1], seen["clock"][0])
            for name, found in ports.items()
            for peer, seen in found["peers"].items()
            if seen["clock"]
        ]
    )
    return complaints, notices


def _route(seen: Json, me: Member) -> str:
    if not seen["through"]:
        return "; it has no route there: see `ip route` and the netmasks"
    if seen["through"] != me.interface:
        return f"; its route leads through {seen['through']}: see `ip route get`"
    return ""


def _unreached(members: Sequence[Member], dead: Mapping[tuple[str, str], str]) -> list[str]:
    """Few lines for many pairs: one for the hosts that nobody reaches, or that reach nobody."""
    if not dead:
        return []
    by_name = {one.name: one for one in members}
    (first, second), why = next(iter(dead.items()))
    if len(members) > 2 and len(dead) == len(members) * (len(members) - 1):
        through = sorted({one.interface for one in members})
        return [
            f"no host reaches another through {', '.join(through)}: {first} → {second} "
            f"({by_name[second].address}): {why}: nothing is at its other end, or a firewall drops "
            "all of it"
        ]
    lines, told = [], set()
    for name in by_name if len(members) > 2 else ():
        others = [one for one in by_name if one != name]
        if all((other, name) in dead for other in others):
            told.add(name)
            lines.append(
                f"{name}: none of the others reaches it ({by_name[name].address} through "
                f"{by_name[name].interface}): {dead[others[0], name]}; look at its interface, "
                "firewall and switch port"
            )
    lines += [
        f"{name} → {peer} ({by_name[peer].address} through {by_name[name].interface}): {why}"
        for (name, peer), why in dead.items()
        if not told & {name, peer}
    ]
    return lines


def rank_findings(
    found: Mapping[str, Json | str],
    *,
    first: str,
    layer: Layer | None,
    floor: float | None,
    seconds: int,
) -> tuple[list[str], list[str], dict[str, Any]]:
    """(complaints, notices, figures) of the ranks of all hosts; a text stands for a lost host.

    ``first``: the host that failed first, "" where none did; others were ended then.
    """
    complaints: list[str] = []
    notices: list[str] = []
    waited: dict[str, str] = {}
    results: list[Json] = []
    for name, one in found.items():
        if isinstance(one, str):
            complaints.append(f"{name}: {one}")
            continue
        for rank in one["ranks"]:
            result = rank["result"]
            if result is not None:
                results.append({**result, "host": name})
            elif rank["why"] and not _waits(rank["why"]):
                complaints.append(f"{name}: rank {rank['rank']}, {rank['step']}: {rank['why']}")
            elif rank["code"] == -signal.SIGKILL and name == first and not rank["ended"]:
                complaints.append(
                    f"{name}: rank {rank['rank']} was killed at {rank['step'] or 'its start'}: "
                    "see the kernel's log there (out of memory?)"
                )
            elif rank["why"] or (rank["code"] or 0) < 0:
                waited[name] = rank["step"]
            else:
                said = " / ".join(rank["tail"][-3:]) or "it said nothing"
                complaints.append(
                    f"{name}: rank {rank['rank']} ended with {rank['code']} at "
                    f"{rank['step'] or 'its start'}: {said}"
                )
    if waited and not complaints:
        complaints.append(_late(waited, seconds))
    for result in results:
        if result["wrong"]:
            complaints.append(
                f"{result['host']}: rank {result['rank']}: {result['wrong']} numbers came wrong: "
                "memory, card or link are broken; see its ECC counters and the link's errors"
            )
        for warning in result["nccl"]["warnings"][:3]:
            notices.append(f"{result['host']}: NCCL: {warning}")
    if complaints or not results:
        return complaints, notices, {}
    transports: dict[str, int] = {}
    for result in results:
        for transport, channels in result["transports"].items():
            transports[transport] = transports.get(transport, 0) + channels
    sockets = sorted({r["host"] for r in results if _by_sockets(r)})
    if layer and sockets:
        complaints.append(
            f"{', '.join(sockets)}: NCCL took NET/Socket where {layer} was promised: see that "
            "memlock, /dev/infiniband and NCCL_IB_HCA let it, or set nccl.rdma to off"
        )
    elif layer and not any(t.endswith("GDRDMA") for t in transports):
        notices.append(
            f"{layer} without GPUDirect: data goes through the host's memory; load "
            "nvidia_peermem, or a kernel and driver with DMA-BUF"
        )
    bandwidth = min(result["busbw_gbyte"] for result in results)
    if floor is not None and bandwidth < floor:
        complaints.append(
            f"all-reduce over all hosts reaches {bandwidth:.2f} GB/s bus bandwidth, less than "
            f"{floor:.2f}: see the links' speed and errors, or set nccl.floor_gbyte"
        )
    figures = {
        "busbw_gbyte": round(bandwidth, 3),
        "point_to_point_gbyte": round(min(r["point_to_point"]["gbyte"] for r in results), 3),
        "ranks": len(results),
        "backend": results[0]["backend"],
        "torch": results[0]["torch"],
        "nccl": results[0]["nccl"]["version"],
        "transports": transports,
    }
    return complaints, notices, figures


def _late(waited: Mapping[str, str], seconds: int) -> str:
    """Who held up the others, by how far each of them came."""
    order = {step: number for number, step in enumerate(STEPS)}
    least = min(waited.values(), key=lambda step: order.get(step, 0))
    slow = [name for name, step in waited.items() if step == least]
    if len(slow) < len(waited):
        return (
            f"{', '.join(slow)}: stood still at {least or 'its start'} while the others waited, "
            f"{seconds} s: hung, or overloaded"
        )
    return (
        f"the ranks did not get through within {seconds} s, all at {least or 'their start'}: see "
        "firewalls beyond these ports, and NCCL's warnings above"
    )


def _by_sockets(result: Json) -> bool:
    return (
        any(t.startswith("NET/Socket") for t in result["transports"])
        or result["nccl"]["network"] == "Socket"
    )


def _waits(why: str) -> bool:
    """Whether a rank only tells that others did not come, or went: the cause is another's."""
    text = why.lower()
    return any(
        word in text
        for word in (
            "timed out",
            "timeout",
            "connection closed by peer",
            "connection reset by peer",
            "remote process exited",
            "broken pipe",
            "recvvalue failed",
            "connection was likely closed",  # torch's store, where rank 0 is gone
        )
    )


def floor_of(asked: float | None, gbits: Sequence[float | None], *, nccl: bool) -> float | None:
    """Least bus bandwidth in GB a second; None where nothing is promised.

    gloo is no measure of a link: it gets none that is not asked for.
    """
    if asked is not None:
        return asked
    known = [g for g in gbits if g]
    if not nccl or len(known) < len(gbits) or not known:
        return None
    return min(known) / 8 * FLOOR_SHARE
