"""Findings about the plan: what was edited by hand, what was not deployed, what was cut off."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_fleet import instance as vllm
from vllm_fleet.doctor.case import Case, Finding
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.rollout.lock import STALE_SECONDS, lock_host
from vllm_fleet.rollout.state import record_of
from vllm_fleet.spec.model import HostSpec
from vllm_fleet.state import HostState

SHOWN = 4


def findings(case: Case) -> Iterator[Finding]:
    """Everything in which hosts differ from what is written."""
    plans, reasons = case.planned
    for reason in reasons:
        host = reason.partition(":")[0]
        yield Finding("plan-refused", host, reason, "from the plan that deploy.py would make")
    for spec, state in case.looked_at:
        yield from _edited(case, spec, state)
        if spec.name in plans:
            yield from _not_deployed(case, spec, state, plans[spec.name])
        yield from _cut_off(case, spec, state)
    yield from _mixed(case)
    yield from _lock(case)


def _edited(case: Case, spec: HostSpec, state: HostState) -> Iterator[Finding]:
    changed, gone = [], []
    for path, checksum in sorted(state.manifest.items()):
        now = state.files.get(path)
        if now is None:
            gone.append(path)
        elif now[0] != checksum:
            changed.append(path)
    if not changed and not gone:
        return
    seen = [*(f"{p} was edited" for p in changed), *(f"{p} is gone" for p in gone)]
    yield Finding(
        "file-edited",
        spec.name,
        f"{len(seen)} of our files {'is' if len(seen) == 1 else 'are'} not as deploy wrote "
        f"{'it' if len(seen) == 1 else 'them'}",
        _some(seen),
        (case.deploy(spec.name),),
    )


def _not_deployed(
    case: Case, spec: HostSpec, state: HostState, plan: HostPlan
) -> Iterator[Finding]:
    if _unsure(case, spec):
        return
    by_hand = {p for p, c in state.manifest.items() if (state.files.get(p) or [""])[0] != c}
    files = [f.path for f in plan.changed_files if f.path not in by_hand]
    if spec.instances and not state.instances and not state.manifest:
        text = "nothing was deployed to it yet"
        seen_none = "it has no file of ours"
        yield Finding("not-deployed", spec.name, text, seen_none, (case.deploy(spec.name),))
        return
    seen = [
        *(f"package {name} is missing" for name in plan.missing_packages),
        *(f"{path} differs" for path in files),
        *(f"{path} is no longer wanted" for path in plan.removed_files),
        *(f"release {build.id} is not built" for build in plan.missing_releases),
        *(
            f"weights of {fetch.name} are not there"
            for fetch in plan.weights
            if not fetch.present and not state.weights.get(str(fetch.order["stamp"]))
        ),
        *(
            f"instance {one.name} runs with older settings"
            for one in plan.to_restart()
            if not by_hand.intersection(vllm.paths_of(one.name))
        ),
        *(f"instance {name} is no longer in the plan" for name in plan.retired),
    ]
    if seen:
        text = f"{len(seen)} {'thing differs' if len(seen) == 1 else 'things differ'} from the plan"
        yield Finding("not-deployed", spec.name, text, _some(seen), (case.deploy(spec.name),))
    for name, kept in plan.kept.items():
        if not state.held and record_of(state, name).step is None:
            command = f"pyinfra {case.inventory} upgrade.py"
            seen_now = f"runs {kept.release or 'nothing'}"
            yield Finding(
                "release-differs", spec.name, kept.why, seen_now, (command,), instance=name
            )


def _unsure(case: Case, spec: HostSpec) -> bool:
    """Whether cards or links of a host could not be told, so that its plan says nothing."""
    view = case.views[spec.name]
    sizes = [reason for one in view.sized.values() for reason in one.reasons]
    return bool(view.decided.reasons or view.seen.problems or sizes)


def _some(seen: list[str]) -> str:
    more = f" and {len(seen) - SHOWN} more" if len(seen) > SHOWN else ""
    return "; ".join(seen[:SHOWN]) + more


def _cut_off(case: Case, spec: HostSpec, state: HostState) -> Iterator[Finding]:
    for one in spec.instances:
        record = record_of(state, one.name)
        if record.cut_off:
            yield Finding(
                "change-cut-off",
                spec.name,
                f"a change to {record.cut_off.release} was cut off, or is under way",
                "its record in /var/lib/vllm/_rollout/instances",
                remedy=(f"pyinfra {case.inventory} upgrade.py",),
                instance=one.name,
                level="info" if _changing(case) else None,
            )


def _changing(case: Case) -> bool:
    """Whether somebody changes the fleet just now."""
    place = case.states.get(lock_host(case.fleet))
    return bool(place and place.lock and place.lock.get("silent", 0) <= STALE_SECONDS)


def _mixed(case: Case) -> Iterator[Finding]:
    pools: dict[str, dict[str, list[str]]] = {}
    for spec, state in case.looked_at:
        for one in spec.instances:
            release = str(state.instances.get(one.name, {}).get("release") or "")
            if release:
                pools.setdefault(one.model, {}).setdefault(release, []).append(
                    f"{spec.name}/{one.name}"
                )
    for pool, releases in pools.items():
        if len(releases) > 1:
            seen = "; ".join(f"{name}: {', '.join(who)}" for name, who in releases.items())
            first = next(iter(releases.values()))[0].partition("/")[0]
            text = f"pool {pool} runs {len(releases)} releases"
            command = f"pyinfra {case.inventory} upgrade.py"
            yield Finding("mixed-versions", first, text, seen, (command,), level="info")


def _lock(case: Case) -> Iterator[Finding]:
    place = lock_host(case.fleet)
    lock = case.states[place].lock if place in case.states else {}
    if lock and lock.get("silent", 0) > STALE_SECONDS:
        run = lock.get("run")
        yield Finding(
            "lock-left",
            place,
            f"run {run} of {lock.get('who')} ({lock.get('what')}) keeps the lock",
            f"silent for {lock.get('silent')} s, began on {lock.get('where')}",
            (f"pyinfra {case.inventory} upgrade.py --data unlock={run}",),
            "first make sure that it is gone",
        )
