"""From plans to a rollout and through it: what deploy.py, upgrade.py and rollback.py share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from pyinfra import logger, state
from pyinfra.api import Host, State
from pyinfra.api.exceptions import DeployError, NestedOperationError
from pyinfra.context import ctx_config, ctx_host

from vllm_fleet import engine, spans, spares
from vllm_fleet.deploys.fleet import (
    asked,
    begun_once,
    made,
    plan_again,
    read_spec,
    states_of,
    taking_part,
)
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.instance import paths_of
from vllm_fleet.operations import host as hosts
from vllm_fleet.operations import instance as instances
from vllm_fleet.operations.instance import explained
from vllm_fleet.operations.reach import Reached
from vllm_fleet.planned import PlannedInstance
from vllm_fleet.rollout.hosts import Failed
from vllm_fleet.rollout.lock import Holder, Lock, Locked, lock_host, operator, unlocked
from vllm_fleet.rollout.maintain import DO, Care, Do, Member
from vllm_fleet.rollout.policy import Rollout, Standing, Version, plan_rollout
from vllm_fleet.rollout.roll import Roll, Target
from vllm_fleet.rollout.state import goes_back, record_of, refusals, standing, together
from vllm_fleet.spec.model import Fleet, Instance, Rank
from vllm_fleet.spec.model import Rollout as Settings
from vllm_fleet.state import HostState

Mode = Literal["deploy", "upgrade", "rollback"]


@dataclass(frozen=True)
class Prepared:
    """What is to change, and what that needs to be known of each instance."""

    rollout: Rollout
    targets: dict[str, Target]
    settings: Settings


def begun(mode: Mode) -> bool:
    """Whether there is anything to roll; what it is, is told once, also by `--dry`.

    Raises DeployError where it may not begin, before anything is changed.
    """

    def ask() -> bool:
        rollout = _prepare(mode).rollout
        if rollout.refusals:
            raise DeployError("nothing was changed:\n" + "\n".join(rollout.refusals))
        for line in rollout.lines():
            logger.info("%s", line)
        return (
            bool(rollout.waves or asked("unlock") or asked("clear"))
            or _stays_refused(mode, rollout)
            or (mode == "upgrade" and bool(_leftovers(made().plans)))
        )

    return begun_once(mode, ask)


def deploy(state: State, host: Host) -> bool:
    """Roll what runs with old settings; releases stay."""
    return _roll(state, "deploy")


def upgrade(state: State, host: Host) -> bool:
    """Roll what is not as wanted."""
    return _roll(state, "upgrade")


def rollback(state: State, host: Host) -> bool:
    """Roll back the last change."""
    return _roll(state, "rollback")


def maintained() -> bool:
    """Whether there is a host to be cared for; which, is told once, also by `--dry`.

    Raises DeployError where it is not said what to do with it.
    """

    def ask() -> bool:
        do, members = asked("do"), _cared_for()
        if do not in DO:
            raise DeployError(
                f"nothing was changed: say what to do: --data do={' or '.join(DO)}"
                + (f", not {do!r}" if do else "")
            )
        if not members:
            raise DeployError("nothing was changed: no host of group gpu takes part")
        names = ", then ".join(
            f"{host} ({', '.join(one.name for one in ours) or 'no instances'})"
            for host, ours in members.items()
        )
        logger.info("%s: %s", do, names)
        return True

    return begun_once("maintain", ask)


def maintain(state: State, host: Host) -> bool:
    """Hosts out of service and back, one after another."""

    def do(reached: Reached, gateways: list[str], lock: Lock) -> bool:
        care = Care(reached, gateways, _settings(read_spec()[0]), lock, _cared_for(), asked("why"))
        return care.run(cast(Do, asked("do")))

    return locked(state, "maintain.py", do)


def _cared_for() -> dict[str, list[Member]]:
    """The GPU hosts that take part in this run, and their instances."""
    names = {one.name for one in taking_part()}
    return {
        spec.name: [
            Member(
                host=spec.name,
                name=one.name,
                pool=one.model,
                port=one.port,
                task=spec.settings.models[one.model].task,
                tools=False,
                start_seconds=spec.settings.start_seconds,
                drain_seconds=spec.settings.drain_seconds,
                at="/".join(spans.first_of(one)) if isinstance(one, Rank) else "",
            )
            for one in spec.instances
        ]
        for spec in read_spec()[0].group("gpu")
        if spec.name in names
    }


def _roll(state: State, mode: Mode) -> bool:
    """All of a rollout; False where it failed, with everything said."""

    def do(reached: Reached, gateways: list[str], lock: Lock) -> bool:
        return below_lock(mode, reached, gateways, lock)

    return locked(state, f"{mode}.py", do)


def locked(state: State, what: str, do: Callable[[Reached, list[str], Lock], bool]) -> bool:
    """Do something below the lock of the fleet; False where it failed, with everything said.

    pyinfra books the result on the host that carries this call: the lines name the real one.
    """
    fleet = read_spec()[0]
    holder = Holder(what)
    reached = Reached(state, Path(fleet.root), holder.run)
    gateways = [one.name for one in fleet.group("gateway")]
    place = lock_host(fleet)
    try:
        reached.connect([place, *gateways])
    except Failed as error:
        logger.error(
            f"nothing was changed: gateways and the host of the lock must be reached, also with "
            f"--limit: {error}"
        )
        return False
    failed = sorted(one.name for one in state.failed_hosts)
    if failed:
        logger.error(f"nothing further is changed: {', '.join(failed)} failed earlier in this run")
        return False
    try:
        if run := asked("unlock"):
            reached.say(unlocked(reached, place, run))
        with Lock(reached, place, holder) as lock:
            return do(reached, gateways, lock)
    except (Failed, Locked, DeployError) as error:
        logger.error(f"{error}")
        return False


def below_lock(mode: Mode, reached: Reached, gateways: list[str], lock: Lock) -> bool:
    if release := asked("clear"):
        _clear(reached, release)
    # Somebody else may have changed the fleet since this run looked at it.
    prepared = _prepare(mode, again=True)
    rollout = prepared.rollout
    for refusal in rollout.refusals:
        logger.error(f"nothing was changed: {refusal}")
    for one, why in rollout.left:
        logger.warning(f"left as it is: {one.id}: {why}")
    if rollout.refusals:
        return False
    roll = Roll(
        reached,
        gateways,
        prepared.settings,
        lock,
        prepared.targets,
        explain=explained,
        back=mode == "rollback",
        spares=_Spares(reached),
    )
    try:
        roll.stage(rollout)
    except Failed as error:
        logger.error(f"nothing was changed: {error}")
        return False
    good = roll.run(rollout) if rollout.waves else True
    _labels()
    _take_leftovers()
    return good and not _stays_refused(mode, rollout)


def _stays_refused(mode: Mode, rollout: Rollout) -> bool:
    """Whether upgrade.py cannot bring the fleet to what is wanted: no success, then."""
    return mode == "upgrade" and any(one.refused for one, _ in rollout.left)


def _clear(reached: Reached, release: str) -> None:
    order = {"action": "forget", "instances": [], "release": release, "by": operator()}
    for one in taking_part():
        cleared = reached.ask(one.name, "ledger", order)["cleared"]
        if cleared:
            reached.say(f"{one.name}: {release} is refused no more: {', '.join(cleared)}")


def _labels() -> None:
    """Gateways and monitors learn what runs now: their files follow from it."""
    try:
        plans = plan_again()
    except DeployError as error:
        logger.warning(f"files were not brought up to date, deploy.py does it: {error}")
        return
    for name in _followed(plans):
        logger.warning(f"{name}: not brought up to date; deploy.py does it")


def _followed(plans: Mapping[str, HostPlan]) -> list[str]:
    """Have the files of plans in place, and read; names of the hosts where that failed."""
    by_name = {one.name: one for one in state.inventory}
    failed = []
    for plan in plans.values():
        services = (
            *plan.firewall_services,
            *plan.gateway_services,
            *plan.monitoring_services,
        )
        if not plan.changed_files:
            continue
        try:
            with ctx_config.use(state.config.copy()), ctx_host.use(by_name[plan.spec.name]):
                hosts.files(name="Files that follow from it", plan=plan)
                hosts.services(name="Services that read them", plan=plan, services=services)
        except NestedOperationError:
            failed.append(plan.spec.name)
    return failed


# --- spares --------------------------------------------------------------------------------


class _Spares:
    """Spares of a rollout, by the plan of a fleet in which they are declared."""

    def __init__(self, reached: Reached) -> None:
        self._reached = reached

    def put(self, one: Standing) -> Target:
        """Its files and unit in place, known to gateways, not started. Raises Failed."""
        plan = _plans_or_failed().get(one.host)
        if plan is None:
            raise Failed(f"{one.host} takes no part in this run")
        name = spares.name_of(one.name)
        if name in plan.retired:
            # Of a run that was cut off, and perhaps of another version.
            self._retire(plan, name)
        port = spares.free_port(plan.spec, plan.state)
        spare = spares.Spare(one.host, one.name, one.spare, port)
        plans = _plans_or_failed([spare])
        if failed := _followed(plans):
            raise Failed(f"{', '.join(failed)}: does not know the spare of {one.id}")
        plan = plans[one.host]
        planned = next(each for each in plan.wanted if each.name == name)
        version = Version(planned.release, plan.checksums[name])
        standing = Standing(one.host, name, one.pool, version)
        return _target(standing, plan, planned)

    def take(self, one: Standing) -> None:
        """Unknown to gateways, stopped, its files gone. Raises Failed."""
        plans = _plans_or_failed()
        if failed := _followed(plans):
            raise Failed(f"{', '.join(failed)}: still knows the spare of {one.id}")
        self._retire(plans[one.host], spares.name_of(one.name))

    def _retire(self, plan: HostPlan, name: str) -> None:
        if failure := _retired(plan, (name,)):
            raise Failed(failure)


def _plans_or_failed(more: list[spares.Spare] | None = None) -> dict[str, HostPlan]:
    try:
        return plan_again(more or [])
    except DeployError as error:
        raise Failed(str(error)) from None


def _retired(plan: HostPlan, names: tuple[str, ...]) -> str:
    """Drain, stop and remove instances of a host, and their files; "" or what failed."""
    by_name = {one.name: one for one in state.inventory}
    gone = {path for name in names for path in paths_of(name)}
    manifest = {path: put for path, put in plan.state.manifest.items() if path in gone}
    only = replace(plan, retired=names, state=replace(plan.state, manifest=manifest))
    try:
        with ctx_config.use(state.config.copy()), ctx_host.use(by_name[plan.spec.name]):
            instances.retired(name="Spares that are no longer needed", plan=only)
            hosts.files(name="Files of spares", plan=only, keep_removed=False)
    except NestedOperationError:
        return f"{plan.spec.name}: {', '.join(names)} was not removed"
    return ""


def _leftovers(plans: Mapping[str, HostPlan]) -> dict[str, tuple[str, ...]]:
    """Spares that a run which was cut off left behind, by host: nobody needs them any more."""
    return {
        host: names
        for host, plan in plans.items()
        if (names := tuple(name for name in plan.retired if spares.is_spare(name)))
    }


def _take_leftovers() -> None:
    try:
        plans = plan_again()
    except DeployError as error:
        logger.warning(f"spares may be left, deploy.py takes them away: {error}")
        return
    for host, names in _leftovers(plans).items():
        if failure := _retired(plans[host], names):
            logger.warning(f"{failure}; deploy.py does it")


# --- what is to change ---------------------------------------------------------------------


def _prepare(mode: Mode, *, again: bool = False) -> Prepared:
    fleet, _ = read_spec()
    if mode == "rollback":
        return _prepare_back(fleet, states_of(taking_part()))
    plans = plan_again() if again else made().plans
    known = refusals(plan.state for plan in plans.values())
    standings: list[Standing] = []
    wanted: dict[str, tuple[HostPlan, PlannedInstance]] = {}
    for spec in fleet.hosts:
        plan = plans.get(spec.name)
        if plan is None:
            # It takes no part: it counts in its pool, and its gateway knows whether it serves.
            standings += [
                _of_span(_unseen(spec.name, one.name, one.model), one) for one in spec.instances
            ]
            continue
        for planned in plan.wanted:
            if spares.is_spare(planned.name):
                continue
            version = Version(planned.release, plan.checksums[planned.name])
            one = standing(
                *(plan.state, spec.name, planned.name, planned.model_name, version, known),
                spare=plan.spares.get(planned.name, ()) if planned.span is None else (),
            )
            if planned.span is not None:
                one = replace(one, span=planned.span.name, rank=planned.span.rank)
            if planned.name in plan.state.adopted:
                one = replace(one, runs=None, serving=True, adopts=True)
            standings.append(one)
            wanted[one.id] = plan, planned
    if mode == "deploy":
        # What does not run is started before the rollout, or is not to be started at all.
        standings = [
            replace(_settled(one), serving=not again)
            if one.runs is None and not one.adopts and not _rolled(one, plans)
            else one
            for one in standings
        ]
    settings = _settings(fleet)
    free = [name for name, (plan, _) in wanted.items() if not plan.state.held]
    standings = together(standings, free)
    rollout = plan_rollout(standings, settings, _hold(fleet), releases=mode == "upgrade")
    targets = {
        one.id: _target(one, *wanted[one.id]) for step in rollout.steps for one in step.members
    }
    return Prepared(rollout, targets, settings)


def _prepare_back(fleet: Fleet, states: Mapping[str, HostState]) -> Prepared:
    """Of a rollback. It needs no plan: settings that are refused do not stand in its way."""
    standings, records = [], {}
    known = refusals(states.values())
    for spec in fleet.hosts:
        for one in spec.instances:
            there = states.get(spec.name)
            if there is None:
                standings.append(_of_span(_unseen(spec.name, one.name, one.model), one))
                continue
            nothing = Version("", "")
            found = standing(there, spec.name, one.name, one.model, nothing, known)
            found = _of_span(found, one)
            standings.append(found)
            records[found.id] = record_of(there, one.name)
    seen = [one for one in standings if one.id in records]
    back = {one.id: one for one in goes_back(seen, records)}
    settings = _settings(fleet).model_copy(update={"canaries": 0, "allow_downtime": True})
    free = [name for name in back if not states[back[name].host].held]
    standings = together([back.get(one.id, _settled(one)) for one in standings], free)
    rollout = plan_rollout(standings, settings, _hold(fleet))
    specs = {(spec.name, one.name): (spec, one) for spec in fleet.hosts for one in spec.instances}
    targets = {}
    for step in rollout.steps:
        for member in step.members:
            spec, declared = specs[member.host, member.name]
            model = spec.settings.models[declared.model]
            targets[member.id] = Target(
                standing=member,
                version=None,
                to=member.wanted,
                port=declared.port,
                model=declared.model,
                task=model.task,
                tools=False,
                start_seconds=spec.settings.start_seconds,
                drain_seconds=spec.settings.drain_seconds,
            )
    return Prepared(rollout, targets, settings)


def _unseen(host: str, name: str, pool: str) -> Standing:
    """An instance of a host that takes no part: left alone, and counted in its pool."""
    version = Version("", "")
    return Standing(host, name, pool, version, version, serving=True)


def _rolled(one: Standing, plans: Mapping[str, HostPlan]) -> bool:
    """Whether it does not run and is started by the rollout, with the others of its span."""
    return one.host in plans and one.name in plans[one.host].rolled


def _of_span(one: Standing, declared: Instance) -> Standing:
    """With the span that it is a rank of, where it is one."""
    if not isinstance(declared, Rank):
        return one
    return replace(one, span=declared.of, rank=declared.rank)


def _settled(one: Standing) -> Standing:
    """An instance that is left alone."""
    version = one.runs or one.wanted
    return Standing(
        one.host,
        one.name,
        one.pool,
        version,
        version,
        serving=one.counts,
        span=one.span,
        rank=one.rank,
    )


def _settings(fleet: Fleet) -> Settings:
    gpu = fleet.group("gpu")
    return gpu[0].settings.rollout if gpu else Settings()


def _hold(fleet: Fleet) -> int:
    """How long requests are held: by the gateway that holds them for the shortest time."""
    return min((one.settings.gateway.hold_seconds for one in fleet.group("gateway")), default=0)


def _target(one: Standing, plan: HostPlan, planned: PlannedInstance) -> Target:
    files = files_of(plan, planned.name)
    return Target(
        standing=one,
        version={**vars(one.wanted), "files": files},
        to=one.wanted,
        port=planned.port,
        model=planned.model_name,
        task=planned.model.task,
        tools=engine.has_tools(planned.args),
        start_seconds=planned.start_seconds,
        drain_seconds=planned.drain_seconds,
        # Of a span rank 0 has every option that the others have.
        command={"files": files} if planned.answers else {},
    )


def files_of(plan: HostPlan, name: str) -> list[dict[str, str]]:
    """The files that an instance is started with, as hosts are told of them."""
    return [
        {
            "path": file.path,
            "content": file.content,
            "mode": oct(file.mode)[2:],
            "owner": file.owner,
            "group": file.group,
        }
        for file in plan.instance_files[name]
    ]
