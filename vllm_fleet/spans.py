"""Spans in a plan: one server over several hosts, each of which runs one rank of it. Pure.

A rank is an instance of its host like any other: files, unit, record. What makes one server of
them is here, and in gate/span.py, which runs around the engine of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vllm_fleet import fabric, firewall, paths
from vllm_fleet.fabric.nodes import differences, versions_of
from vllm_fleet.planned import PlannedInstance, PlannedSpan
from vllm_fleet.spec.model import (
    RAY_PORTS,
    RAY_WORKER_PORTS,
    Fleet,
    Instance,
    Rank,
    Span,
    rank_name,
)
from vllm_fleet.spec.spans import degrees
from vllm_fleet.state import HostState


@dataclass(frozen=True)
class Link:
    """How one host of a span reaches the others; "" and 0 where it is not known."""

    host: str
    address: str
    interface: str
    speed_mbit: int
    mtu: int


def planned(
    fleet: Fleet, one: Instance, cards: int, fabric_text: str | None = None
) -> PlannedSpan | None:
    """What an instance is of a span; None where it is a server of its own.

    ``cards``: on its host; ``fabric_text``: of fabric.env there. Raises ValueError where the cards
    do not come out.
    """
    if not isinstance(one, Rank) or one.span is None:
        return None
    try:
        tensor, stages = degrees(one.span, len(one.hosts), cards)
    except ValueError as error:
        raise ValueError(f"instance {one.of}: {error}") from None
    return PlannedSpan(
        name=one.of,
        rank=one.rank,
        hosts=one.hosts,
        addresses=addresses(fleet, one.hosts, one.span),
        settings=one.span,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        fabric=tuple(sorted(fabric.environment_of(fabric_text).items())),
    )


def addresses(fleet: Fleet, hosts: Iterable[str], span: Span) -> tuple[str, ...]:
    """At which the ranks reach each other, in their order."""
    return tuple(span.addresses.get(name) or fleet.host(name).address for name in hosts)


def ranks(
    instances: Mapping[str, Iterable[PlannedInstance]],
) -> dict[str, list[PlannedInstance]]:
    """The ranks of every span over all hosts, by its name, in their order."""
    found: dict[str, list[PlannedInstance]] = {}
    for host_instances in instances.values():
        for one in host_instances:
            if one.span is not None:
                found.setdefault(one.span.name, []).append(one)
    for members in found.values():
        members.sort(key=lambda one: one.span.rank if one.span else 0)
    return found


def apart(
    instances: Mapping[str, Iterable[PlannedInstance]], seen: Iterable[str]
) -> dict[tuple[str, str], str]:
    """Ranks that are left alone, by (host, name): other hosts of theirs take no part in a run."""
    there, found = set(seen), {}
    for name, members in ranks(instances).items():
        missing = [one.host for one in members if one.host not in there]
        for one in members if missing else ():
            found[one.host, one.name] = (
                f"{', '.join(missing)} of span {name} takes no part in this run, and a span is "
                "started and changed as one: as it was, until all its hosts do"
            )
    return found


def differing(instances: Mapping[str, Iterable[PlannedInstance]]) -> dict[tuple[str, str], str]:
    """Ranks that would not meet, by (host, name): another release than that of their rank 0."""
    found = {}
    for name, members in ranks(instances).items():
        first = members[0]
        if all(one.release == first.release for one in members):
            continue
        told = ", ".join(f"{one.host} {one.release}" for one in members)
        for one in members:
            found[one.host, one.name] = (
                f"the ranks of span {name} have different releases ({told}): run upgrade.py, which "
                "moves all of them together"
            )
    return found


def unlike(
    instances: Mapping[str, Iterable[PlannedInstance]], states: Mapping[str, HostState]
) -> dict[tuple[str, str], str]:
    """Ranks whose hosts differ in a driver or, by the facts, in what their release holds."""
    found = {}
    for name, members in ranks(instances).items():
        if any(one.host not in states for one in members):
            continue
        seen = {one.host: versions_of(states[one.host], one.release) for one in members}
        if not all(versions.libraries for versions in seen.values()):
            # Not built yet on some: then each gets what the lock says.
            seen = {host: replace(versions, libraries={}) for host, versions in seen.items()}
        told = differences({host: replace(one, release="") for host, one in seen.items()})
        for one in members if told else ():
            found[one.host, one.name] = f"span {name}: {'; '.join(told)}"
    return found


def ranks_of(fleet: Fleet, host: str) -> firewall.Ranks:
    """Where the ranks on a host listen, and where the others of their spans come from."""
    ports: set[int] = set()
    peers: dict[str, list[str]] = {}
    for one in fleet.host(host).instances:
        if not isinstance(one, Rank) or one.span is None:
            continue
        span = one.span
        ports |= {span.watch_port, span.master_port, span.data_port}
        if span.executor == "ray":
            ports |= {*range(span.ray_port, span.ray_port + RAY_PORTS + RAY_WORKER_PORTS)}
        for name, address in zip(one.hosts, addresses(fleet, one.hosts, span), strict=True):
            peers.setdefault(name, []).append(address)
    return firewall.Ranks(tuple(sorted(ports)), peers)


def closed_to_others(fleet: Fleet, state: HostState, host: str, nodes: firewall.Nodes) -> list[str]:
    """What else listens on a host at ports that the firewall closes for the sake of its spans."""
    if not nodes.ports or not any(isinstance(one, Rank) for one in fleet.host(host).instances):
        return []
    first, _, last = nodes.ports[-1].partition("-")
    told = [
        f"{port} ({holder.get('command') or '?'})"
        for port, holder in sorted(state.listening.items())
        if int(first) <= int(port) <= int(last)
        and int(port) not in nodes.ssh_ports
        and holder.get("user") != paths.USER
    ]
    if not told:
        return []
    return [
        f"firewall: ports {first}-{last} are open to the hosts of its spans alone, and somebody "
        f"else listens at {', '.join(told[:5])}: who is to reach that needs a port below {first}"
    ]


def links(fleet: Fleet, states: Mapping[str, HostState], one: Rank) -> list[Link]:
    """The network interface of each rank of a span at its address, of hosts that were seen."""
    found = []
    assert one.span is not None
    for host, address in zip(one.hosts, addresses(fleet, one.hosts, one.span), strict=True):
        nics = states[host].nics if host in states else {}
        name, nic = next(
            (
                (name, nic)
                for name, nic in nics.items()
                if address in {a.partition("/")[0] for a in nic.get("addresses", ())}
            ),
            ("", {}),
        )
        found.append(
            Link(host, address, name, int(nic.get("speed_mbit") or 0), int(nic.get("mtu") or 0))
        )
    return found


def link_notices(fleet: Fleet, states: Mapping[str, HostState], host: str) -> list[str]:
    """What is odd about the network of the spans whose rank 0 is on a host."""
    told = []
    for one in fleet.host(host).instances:
        if not isinstance(one, Rank) or one.rank:
            continue
        seen = [link for link in links(fleet, states, one) if link.host in states]
        for link in seen:
            if not link.interface and states[link.host].nics:
                told.append(
                    f"span {one.of}: {link.host} has no interface with {link.address}: name the "
                    "right one in span.addresses"
                )
        for what, unit in (("mtu", ""), ("speed_mbit", " Mbit/s")):
            values = {link.host: getattr(link, what) for link in seen if getattr(link, what)}
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{name} {value}{unit}" for name, value in values.items())
                told.append(
                    f"span {one.of}: its hosts differ in {what.removesuffix('_mbit')}: {listed}"
                )
    return told


def first_of(one: Rank) -> tuple[str, str]:
    """(host, name) of the rank that answers for a span."""
    return one.hosts[0], rank_name(one.of, 0)
