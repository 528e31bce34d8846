"""What ``fleet plan`` shows, as plain data. Pure.

The same survey and plan as deploy.py applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fleet import placement, spans
from vllm_fleet.cards import Groups
from vllm_fleet.gate import bootlog
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import Refusal, plan_fleet
from vllm_fleet.spec.inputs import Inputs, version_of
from vllm_fleet.spec.model import CARDS_OF_KIND, Fleet, HostSpec, Instance, Rank
from vllm_fleet.spec.spans import degrees
from vllm_fleet.state import HostState
from vllm_fleet.survey import HostView, Sized, lines_of, survey

Data = dict[str, Any]


def overview(
    fleet: Fleet,
    states: Mapping[str, HostState],
    failures: Mapping[str, str],
    inputs: Inputs,
) -> Data:
    """The JSON of ``fleet plan --json``."""
    views = survey(fleet, states, inputs)
    refusals: list[str] = []
    plans: dict[str, HostPlan] = {}
    try:
        plans = plan_fleet(fleet, states, inputs)
    except Refusal as refusal:
        refusals = refusal.reasons
    stale = placement.stale(inputs.placement, fleet.hosts)
    warnings = [*stale]
    for name, why in failures.items():
        warnings.append(f"{name}: {why}")
    for name, view in views.items():
        shown = plans[name].notices if name in plans else view.notices
        warnings += [f"{name}: {notice}" for notice in shown]
    hosts = [
        _host(spec, views.get(spec.name), plans.get(spec.name), failures.get(spec.name, ""))
        for spec in fleet.hosts
        if spec.name in states or spec.name in failures
    ]
    for host in hosts:
        warnings += [f"{host['name']}: {text}" for text in _differences(host)]
    new = lines_of(views)
    return {
        "ok": not refusals,
        "hosts": hosts,
        "spans": _spans(fleet, states),
        "placement": {
            "path": inputs.placement.path,
            "new": [
                {"host": host, "instance": name, "asked": one.asked, "cards": list(one.cards)}
                for (host, name), one in new.items()
            ],
            "stale": stale,
        },
        "refusals": refusals,
        "warnings": warnings,
    }


def _host(spec: HostSpec, view: HostView | None, plan: HostPlan | None, failure: str) -> Data:
    data: Data = {
        "name": spec.name,
        "address": spec.address,
        "groups": list(spec.groups),
        "reached": view is not None,
        "failure": failure,
        "system": "",
        "driver": "",
        "verdicts": [],
        "card_groups": [],
        "left_out": [],
        "instances": [],
        "changes": _changes(plan),
    }
    if view is None:
        data["instances"] = [_unseen(spec, one) for one in spec.instances]
        return data
    found = [view.seen.groups, view.seen.others]
    return {
        **data,
        "system": view.state.os["name"],
        "driver": view.seen.cards[0].driver if view.seen.cards else "",
        "verdicts": [
            {"what": v.what, "level": v.level, "detail": v.detail, "remedy": v.remedy}
            for v in view.verdicts
        ],
        "card_groups": [group for groups in found for group in _groups(groups)],
        "left_out": [{"gpu": o.gpu, "why": o.why} for groups in found for o in groups.left_out],
        "instances": [_instance(view, one) for one in spec.instances],
    }


def _spans(fleet: Fleet, states: Mapping[str, HostState]) -> list[Data]:
    """Servers over several hosts: what is where, and how the hosts are linked."""
    found = []
    for spec in fleet.hosts:
        for one in spec.instances:
            if not isinstance(one, Rank) or one.rank or one.span is None:
                continue
            found.append(
                {
                    "name": one.of,
                    "model": one.model,
                    "executor": one.span.executor,
                    "hosts": [vars(link) for link in spans.links(fleet, states, one)],
                    "answers": "/".join(spans.first_of(one)),
                    **_split(one),
                }
            )
    return found


def _split(one: Rank) -> Data:
    """How its cards share the model; nothing where their number does not come out."""
    span = one.span
    assert span is not None
    kind = CARDS_OF_KIND.match(one.cards) if isinstance(one.cards, str) else None
    try:
        cards = int(kind["count"]) if kind else len(one.cards)
        tensor, stages = degrees(span, len(one.hosts), cards)
    except ValueError:
        return {}
    return {
        "tensor_parallel": tensor,
        "pipeline_parallel": stages,
        "data_parallel": span.data_parallel,
    }


def _groups(found: Groups) -> Iterable[Data]:
    for group in found.groups:
        yield {
            "gpus": list(group.gpus),
            "name": group.name,
            "memory_mib": group.memory_mib,
            "link": group.link,
            "vendor": group.vendor,
        }


def _unseen(spec: HostSpec, one: Instance) -> Data:
    return {
        "name": one.name,
        "model": one.model,
        "port": one.port,
        "vllm_version": version_of(spec, one),
        "cards": list(one.cards) if not isinstance(one.cards, str) else [],
        "asked": one.cards if isinstance(one.cards, str) else None,
    }


def _instance(view: HostView, one: Instance) -> Data:
    sized = view.sized.get(one.name, Sized(why_not="its cards are not known"))
    if view.spec.settings.device == "cpu":
        sized = Sized(why_not="sizing knows cards, not the memory of a CPU host")
    now = view.state.instances.get(one.name, {})
    active = view.state.active(f"vllm@{one.name}.service")
    measured = now.get("actual") if active else None
    actual = measured.get("actual", {}) if isinstance(measured, dict) else {}
    return {
        **_unseen(view.spec, one),
        "cards": list(view.cards.get(one.name, ())),
        "chosen_now": one.name in view.decided.new,
        "running": active,
        "ready": bool(now.get("ready")),
        "config": sized.source,
        "not_sized": sized.why_not,
        "applied": sized.applied,
        "settings": [
            {"name": c.name, "value": c.value, "reason": c.reason, "by": c.by}
            for c in (sized.choices.settings if sized.choices else ())
        ],
        "memory": sized.sizing.as_json() if sized.sizing else None,
        "bars": _bars(view, one, sized),
        "actual": actual,
        "differences": bootlog.compare(sized.expected, actual),
        "warnings": list(sized.warnings),
    }


def _bars(view: HostView, one: Instance, sized: Sized) -> list[Data]:
    """Memory of each card of an instance in GiB, by what takes it."""
    if sized.sizing is None:
        return []
    cards = view.cards.get(one.name, ())
    ranks = sized.sizing.ranks
    each, first = max(len(cards) // max(len(ranks), 1), 1), 0
    if isinstance(one, Rank) and one.span is not None:
        # The stages of a copy are over its hosts, in their order.
        hosts = max(len(one.hosts) // one.span.data_parallel, 1)
        each = max(len(cards) * hosts // max(len(ranks), 1), 1)
        first = one.rank % hosts * len(cards)
    bars = []
    for place, card in enumerate(cards, first):
        rank = ranks[min(place // each, len(ranks) - 1)] if ranks else sized.sizing
        parts = {
            "weights": rank.weights_gib,
            "activation": rank.activation_gib,
            "context": rank.non_torch_gib,
            "graphs": rank.graphs_gib,
            "kv_cache": max(rank.kv_cache_gib, 0.0),
        }
        rounded = {name: round(value, 2) for name, value in parts.items()}
        bars.append({"card": card, "total_gib": round(sized.total_gib, 2), **rounded})
    return bars


def _differences(host: Data) -> list[str]:
    return [
        f"instance {one['name']}: {bootlog.warning(difference)}"
        for one in host["instances"]
        for difference in one.get("differences", ())
    ]


def _changes(plan: HostPlan | None) -> Data | None:
    """What deploy.py would do on a host; None where it would do nothing at all anywhere."""
    if plan is None:
        return None
    take = plan.bundle is not None and not plan.bundle.held
    return {
        "bundle": [str(plan.bundle.order["source"])] if plan.bundle and take else [],
        "packages": list(plan.missing_packages),
        "files": [file.path for file in plan.changed_files],
        "removed_files": list(plan.removed_files),
        "releases": [build.id for build in plan.missing_releases],
        "weights": [fetch.name for fetch in plan.weights if not fetch.present],
        "start": [one.name for one in plan.to_start()],
        "restart": [one.name for one in plan.to_restart()],
        "retire": list(plan.retired),
        "prune": [*plan.prune.get("releases", ()), *plan.prune.get("weights", ())],
    }
