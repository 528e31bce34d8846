"""Who runs what in a fleet, from the states of its hosts: for `fleet status`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_fleet.rollout.lock import STALE_SECONDS, lock_host
from vllm_fleet.rollout.state import record_of
from vllm_fleet.spares import is_spare, name_of
from vllm_fleet.spec.inputs import version_of
from vllm_fleet.spec.model import Fleet, HostSpec, Instance, Rank
from vllm_fleet.state import HostState

Json = dict[str, Any]
NAMED = 10  # instances of one release in a mixed pool; the others are counted


def running(fleet: Fleet, states: Mapping[str, HostState], failures: Mapping[str, str]) -> Json:
    """Hosts, instances, pools and the lock, and what of it needs a hand.

    ``states``: of the hosts that were looked at; ``failures``: why others gave none. A host that
    is in neither was not asked.
    """
    hosts: list[Json] = []
    instances: list[Json] = []
    for spec in fleet.hosts:
        if spec.name not in states and spec.name not in failures:
            continue
        state = states.get(spec.name)
        hosts.append(
            {
                "name": spec.name,
                "reached": state is not None,
                "why": failures.get(spec.name, ""),
                "held": (state.held or None) if state else None,
            }
        )
        for one in spec.instances:
            instances.append(_instance(spec, one, state))
            if state is not None and name_of(one.name) in state.instances:
                spare = one.model_copy(update={"name": name_of(one.name)})
                instances.append(_instance(spec, spare, state))
    pools = _pools(instances)
    place = lock_host(fleet)
    lock = dict(states[place].lock) if place in states else {}
    if lock:
        lock = {"host": place, **lock, "stale": lock.get("silent", 0) > STALE_SECONDS}
    refused = sorted(
        {
            (str(one.get("pool") or ""), str(bad.get("release")), str(bad.get("why")))
            for state in states.values()
            for one in state.rollout.values()
            for bad in one.get("refused") or ()
        }
    )
    findings = _findings(hosts, instances, pools, lock)
    return {
        "ok": not findings,
        "findings": findings,
        "hosts": hosts,
        "pools": pools,
        "instances": instances,
        "lock": lock or None,
        "refused": [{"pool": p, "release": r, "why": why} for p, r, why in refused],
    }


def _instance(spec: HostSpec, one: Instance, state: HostState | None) -> Json:
    wanted = version_of(spec, one)
    found: Json = {
        "id": f"{spec.name}/{one.name}",
        "host": spec.name,
        "name": one.name,
        "pool": one.model,
        "state": "unknown",
        "release": "",
        "vllm_version": "",
        "wanted_version": wanted,
        "cut_off": "",
        "last_good": "",
        "span": one.of if isinstance(one, Rank) else "",
        "rank": one.rank if isinstance(one, Rank) else 0,
    }
    if state is None:
        return found
    now, record = state.instances.get(one.name, {}), record_of(state, one.name)
    release = str(now.get("release") or "")
    unit = state.units.get(f"vllm@{one.name}.service", {}).get("ActiveState", "inactive")
    if unit == "active":
        found["state"] = "ready" if now.get("ready") else "not ready"
    else:
        words = {"activating": "starting", "deactivating": "stopping", "inactive": "not running"}
        found["state"] = words.get(unit, unit)
    found["release"] = release
    found["vllm_version"] = str(state.releases.get(release, {}).get("version") or "")
    found["cut_off"] = str(record.cut_off.release) if record.cut_off else ""
    found["last_good"] = record.goods[0].version.release if record.goods else ""
    return found


def _pools(instances: list[Json]) -> list[Json]:
    found: dict[str, Json] = {}
    for one in instances:
        empty = {"name": one["pool"], "instances": 0, "ready": 0, "releases": {}}
        pool = found.setdefault(one["pool"], empty)
        if not one["rank"]:  # of a span rank 0 answers, for all of them
            pool["instances"] += 1
            pool["ready"] += one["state"] == "ready"
        if one["release"]:
            pool["releases"].setdefault(one["release"], []).append(one["id"])
    return [{**pool, "mixed": len(pool["releases"]) > 1} for pool in found.values()]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _findings(hosts: list[Json], instances: list[Json], pools: list[Json], lock: Json) -> list[str]:
    """One line for each thing that is not as it should be."""
    told = [f"{one['name']}: {one['why']}" for one in hosts if not one["reached"]]
    held = {one["name"] for one in hosts if one["held"]}
    for one in hosts:
        if one["held"]:
            why = one["held"].get("why")
            told.append(
                f"{one['name']}: held by {one['held'].get('who')}{f' ({why})' if why else ''}: "
                "`maintain.py --data do=return` brings it back"
            )
    for pool in pools:
        if pool["mixed"]:
            parts = "; ".join(f"{name}: {_listed(who)}" for name, who in pool["releases"].items())
            told.append(f"pool {pool['name']} runs several releases: {parts}")
        if not pool["ready"]:
            told.append(f"pool {pool['name']}: no instance is ready")
    for one in instances:
        if is_spare(one["name"]):
            told.append(
                f"{one['id']}: a spare, of a rollout that is under way or was cut off: the next "
                "upgrade.py takes it away"
            )
        elif one["cut_off"]:
            told.append(
                f"{one['id']}: a change to {one['cut_off']} was cut off, or is under way: "
                "upgrade.py goes on there, rollback.py undoes it"
            )
        elif one["state"] not in ("ready", "unknown") and one["host"] not in held:
            told.append(f"{one['id']}: {one['state']}")
        if one["vllm_version"] and one["vllm_version"].partition("+")[0] != one["wanted_version"]:
            told.append(
                f"{one['id']}: runs {one['vllm_version']}, group_vars want {one['wanted_version']}"
            )
    if lock.get("stale"):
        told.append(
            f"run {lock.get('run')} of {lock.get('who')} ({lock.get('what')}) has the lock on "
            f"{lock['host']} and was silent for {lock['silent']} s: if it is gone for certain, "
            f"--data unlock={lock.get('run')}"
        )
    return told
