"""From plans to a change of the fabric's environment and through it, for nccl.py."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyinfra import inventory, logger, state
from pyinfra.api import Host, State
from pyinfra.api.exceptions import DeployError

from vllm_fleet import fabric, paths
from vllm_fleet.deploys import rolling
from vllm_fleet.deploys.fleet import asked, begun_once, made, plan_again, read_spec
from vllm_fleet.fabric.discovery import discover
from vllm_fleet.fabric.environment import Choice, Node, environments
from vllm_fleet.fabric.nodes import differences, versions_of
from vllm_fleet.fabric.trial import Member, floor_of, places
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations.reach import Reached
from vllm_fleet.rollout.fabric import Change, Trial, Wanted
from vllm_fleet.rollout.lock import Lock
from vllm_fleet.spec.model import Nccl


@dataclass(frozen=True)
class Prepared:
    """What every host is to have, and whether that is anything new."""

    wanted: list[Wanted]
    trial: Trial
    lines: list[str] = field(default_factory=list)  # for the operator
    needed: bool = False


def begun() -> bool:
    """Whether there is anything to test or change; what it is, is told once, also by `--dry`.

    Raises DeployError where it may not begin, before anything is changed.
    """

    def ask() -> bool:
        prepared = _prepared(made().plans)
        for line in prepared.lines:
            logger.info("%s", line)
        return prepared.needed

    return begun_once("nccl", ask)


def change(state: State, host: Host) -> bool:
    """Test on all hosts together, then keep or put back; what uses it is rolled."""

    def do(reached: Reached, gateways: list[str], lock: Lock) -> bool:
        # Releases were built since, and somebody else may have changed the fleet.
        prepared = _prepared(plan_again())
        if not Change(reached, lock, prepared.wanted, prepared.trial).run():
            return False
        # What was started with the old environment is rolled as for any changed setting.
        return rolling.below_lock("deploy", reached, gateways, lock)

    return rolling.locked(state, "nccl.py", do)


def _prepared(plans: Mapping[str, HostPlan]) -> Prepared:
    """Raises DeployError with every complaint of every host."""
    nodes = _nodes(plans)
    gone = [
        name
        for name, plan in plans.items()
        if fabric.taken_part(plan.spec) is None and plan.state.texts.get(fabric.FILE) is not None
    ]
    if not nodes and not gone:
        raise DeployError(
            "nothing was changed: no host has `nccl` set: give the hosts of models that span "
            "hosts `nccl: {}` in group_vars"
        )
    complaints = _missing(plans)
    if len(nodes) == 1:
        complaints.append(f"{nodes[0].name} is alone: a fabric has two hosts at least")
    alike = ("port", "test_mib", "test_seconds", "floor_gbyte")
    complaints += [
        f"nccl.{key} is one for all hosts of the fabric, and differs between them: set it for all "
        "of them alike, in one file"
        for key in alike
        if len({getattr(node.settings, key) for node in nodes}) > 1
    ]
    choices: dict[str, Choice] = {}
    if nodes and not complaints:
        choices, complaints = environments(nodes)
    releases = _releases({node.name: plans[node.name] for node in nodes})
    built = all(releases[n.name] in plans[n.name].state.releases for n in nodes)
    if built and not complaints:
        complaints = differences(
            {n.name: versions_of(plans[n.name].state, releases[n.name]) for n in nodes}
        )
    cuda = bool(nodes) and all(node.cuda for node in nodes)
    settings = nodes[0].settings if nodes else Nccl()
    found = {}
    try:
        found = places({n.name: plans[n.name].state for n in nodes}, cuda, settings.test_mib)
    except ValueError as error:
        complaints += str(error).splitlines()
    if complaints:
        raise DeployError("nothing was changed:\n" + "\n".join(complaints))
    wanted = [
        Wanted(
            name,
            fabric.text_of(choice.environment),
            choice.environment,
            Member(name, choice.address, choice.interface, choice.mtu),
            found[name],
            f"{paths.RELEASES}/{releases[name]}/bin/python",
        )
        for name, choice in choices.items()
    ] + [Wanted(name, None) for name in gone]
    layers = [choice.layer for choice in choices.values()]
    trial = Trial(
        port=settings.port,
        backend="nccl" if cuda else "gloo",
        layer=layers[0] if layers else None,
        floor=floor_of(settings.floor_gbyte, [c.gbit for c in choices.values()], nccl=cuda),
        test_mib=settings.test_mib,
        seconds=settings.test_seconds,
    )
    lines = [line for one in wanted for line in _shown(one, choices, plans[one.name])]
    again = bool(asked("test"))
    needed = bool(lines) or again or any(_untested(one, plans[one.name]) for one in wanted)
    if not lines:
        what = "tested again" if needed else "and was tested"
        lines = [f"the environment of {len(wanted)} hosts is as it should be, {what}"]
    return Prepared(wanted, trial, lines, needed)


def _nodes(plans: Mapping[str, HostPlan]) -> list[Node]:
    return [
        Node(
            name,
            plan.spec.address,
            settings,
            plan.spec.settings.device == "cuda",
            discover(plan.state),
        )
        for name, plan in plans.items()
        if (settings := fabric.taken_part(plan.spec)) is not None
    ]


def _missing(plans: Mapping[str, HostPlan]) -> list[str]:
    """Hosts of the fabric that could not be looked at; those that `--limit` left out are told."""
    by_name = {one.name: one for one in inventory}
    complaints = []
    for spec in read_spec()[0].hosts:
        if fabric.taken_part(spec) is None or spec.name in plans:
            continue
        if state.is_host_in_limit(by_name[spec.name]):
            complaints.append(
                f"{spec.name} is part of the fabric and was not reached: bring it back, or leave "
                "it out by --limit"
            )
        else:
            logger.warning("%s: left out by --limit: neither tested nor changed", spec.name)
    return complaints


def _releases(plans: Mapping[str, HostPlan]) -> dict[str, str]:
    """The release whose torch is tried, by host: one that all have, the wanted one first."""
    has = {}
    for name, plan in plans.items():
        built = [r for r in plan.state.releases if "torch" in plan.state.libraries.get(r, {})]
        wanted = [b.id for b in plan.releases if b.id in built or b.id not in plan.state.releases]
        has[name] = [*wanted, *sorted(built, reverse=True)]
        if not has[name]:
            raise DeployError(
                f"nothing was changed: {name} has no release of vLLM whose torch could be tried: "
                "place an instance on it and run deploy.py"
            )
    own = list(has.values())
    common = [one for one in own[0] if all(one in each for each in own)] if own else []
    return {name: (common or each)[0] for name, each in has.items()}


def _shown(one: Wanted, choices: Mapping[str, Choice], plan: HostPlan) -> list[str]:
    """Old → new of one host, with the reasons; nothing where nothing changes."""
    old = fabric.environment_of(plan.state.texts.get(fabric.FILE))
    new, reasons = dict(one.environment), choices[one.name].reasons if one.text else {}
    lines = []
    for key in sorted({*old, *new}):
        if old.get(key) == new.get(key):
            continue
        why = reasons.get(key)
        lines.append(
            f"{one.name}: {key}: {old.get(key, 'unset')} → {new.get(key, 'unset')}"
            + (f"  ({why})" if why else "")
        )
    if not lines and one.text != plan.state.texts.get(fabric.FILE):
        lines.append(f"{one.name}: {fabric.FILE}: written anew")
    return lines


def _untested(one: Wanted, plan: HostPlan) -> bool:
    """Whether a change was cut off on a host, or what it has was never tested to the end."""
    known = plan.state.fabric
    if one.text is None:
        return "change" in known
    sha256 = hashlib.sha256(one.text.encode()).hexdigest()
    return "change" in known or known.get("tested", {}).get("sha256") != sha256
