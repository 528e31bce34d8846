"""Room on a host's disks for everything that a run puts there, counted before it begins. Pure.

What has no frozen listing has no known size: its room is looked at when its listing comes, on
the host, as is what is exact only there (files shared with the package cache, a bundle).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fleet import paths
from vllm_fleet.host_plan import HostPlan, WeightsFetch
from vllm_fleet.onhost.interpreter import ROOM as PYTHON_ROOM
from vllm_fleet.onhost.release import ROOM
from vllm_fleet.onhost.tools import ROOM as TOOLS_ROOM
from vllm_fleet.onhost.tools import gib
from vllm_fleet.onhost.weights import SPARE
from vllm_fleet.state import HostState

CACHE = "/var/cache"


@dataclass(frozen=True)
class Want:
    """Something to be written: what, where, how many bytes."""

    what: str
    place: str
    size: int


def wants(plan: HostPlan) -> Iterator[Want]:
    """All that a host is to get, as far as its size is known."""
    settings, state = plan.spec.settings, plan.state
    if plan.tools is not None and state.tools != plan.tools.id:
        yield Want("tools", paths.OPT, TOOLS_ROOM)
    venv, downloads = ROOM[settings.device]
    cache = CACHE if settings.package_cache.startswith(f"{CACHE}/") else paths.OPT
    for number, build in enumerate(plan.missing_releases):
        # A further release shares most of its files with the cache: what is new is bytecode.
        shared = bool(state.releases) and _same_disk(state, paths.OPT, cache)
        yield Want(f"release {build.id}", paths.OPT, venv // 4 if shared else venv)
        if not state.releases and not number:
            yield Want("downloads of packages", cache, downloads)
    if settings.python_archive is not None and plan.missing_releases:
        yield Want(f"Python {settings.python_archive.version}", paths.OPT, PYTHON_ROOM)
    for one in plan.weights:
        size = _weights(one, state)
        if size:
            yield Want(f"weights of {one.name}", paths.OPT, size + SPARE)


def _weights(one: WeightsFetch, state: HostState) -> int:
    """Bytes still to come of weights; 0 where they are there, or their size is not known."""
    order: Mapping[str, Any] = one.order
    if one.present or order["stamp"] in state.weights or order["source"] == "path":
        return 0  # what is spoilt is fetched over: a few files
    known = {sha256 for stamp in state.weights.values() for sha256 in stamp.get("sha256") or ()}
    new: int = sum(f["size"] for f in order.get("listing") or () if f.get("sha256") not in known)
    return max(0, new - state.fetched.get(str(order["directory"]), 0))


def refusals(plan: HostPlan) -> list[str]:
    """What finds no room, one line for each disk, with how much is missing."""
    by_disk: dict[int, list[Want]] = {}
    for want in wants(plan):
        disk = plan.state.disks.get(want.place) or plan.state.disks[paths.OPT]
        by_disk.setdefault(disk["device"], []).append(want)
    found = []
    for listed in by_disk.values():
        place = listed[0].place if listed[0].place in plan.state.disks else paths.OPT
        free = plan.state.disks[place]["free_mib"] << 20
        need = sum(want.size for want in listed)
        if need > free:
            parts = ", ".join(f"{want.what} {gib(want.size)}" for want in listed)
            found.append(
                f"{plan.spec.name}: {place} has {gib(free)} free, needed are {gib(need)} "
                f"({parts}): {gib(need - free)} are missing; make room, or mount a larger disk "
                "there"
            )
    return found


def _same_disk(state: HostState, one: str, other: str) -> bool:
    disks = state.disks
    return one in disks and other in disks and disks[one]["device"] == disks[other]["device"]
