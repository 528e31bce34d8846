"""The chapters of deploy.py, in the order in which they stand there.

Each takes the plan of the host that it runs for, or None where the host gave no facts, and
calls operations that compare and yield only what differs. Names carry no per-host values:
pyinfra merges operations of equal position over hosts and shows one name for all.
"""

from __future__ import annotations

from pyinfra import logger
from pyinfra.api import Host, State
from pyinfra.api.exceptions import DeployError, NestedOperationError
from pyinfra.context import ctx_config, ctx_host
from pyinfra.operations import python

from vllm_fleet.deploys.fleet import fleet_plans, given_up, my_plan, new_placement
from vllm_fleet.operations import flow
from vllm_fleet.operations import gateway as gateways
from vllm_fleet.operations import host as hosts
from vllm_fleet.operations import instance as instances
from vllm_fleet.operations import release as releases
from vllm_fleet.operations import weights as model_weights
from vllm_fleet.placement import write_placement
from vllm_fleet.plan import HostPlan
from vllm_fleet.planned import PlannedInstance

__all__ = [
    "meet",
    "my_plan",
    "open_gateway",
    "prepare",
    "retire",
    "serve",
    "stage",
    "watch",
]


def meet(name: str) -> None:
    """All hosts wait for each other here, and stop here when one of them has failed."""
    flow.barrier(name=name, given_up=given_up())


def prepare(plan: HostPlan | None) -> None:
    """Cards that were chosen are written down; Debian packages; every file of ours; firewall."""
    if plan is None:
        return
    if new_placement() is not None:
        # On every host: where it fails, all of them must stop.
        python.call(name="Cards chosen, written down", function=write_down)
    if any(one.spec.settings.air_gapped for one in fleet_plans().values()):
        # On every host, so that all of them wait here until the bundle is served.
        hosts.bundle(name="Bundle for hosts without internet", plan=plan)
        meet("The bundle is served")
    hosts.packages(name="Debian packages", plan=plan)
    if plan.acme:
        gateways.stand_in(name="Stand-in for the certificate", plan=plan)
    hosts.files(name="Files of ours", plan=plan)
    if plan.firewall_services:
        # Before any instance starts, and before a new gateway sends to those that run.
        hosts.services(name="Firewall", plan=plan, services=plan.firewall_services)


def stage(plan: HostPlan | None) -> None:
    """Tools, releases and weights, built and verified beside what serves."""
    if plan is None or not plan.releases:
        return
    releases.tools(name="Tools", plan=plan)
    releases.built(name="Releases of vLLM", plan=plan)
    model_weights.verified(name="Weights of the models", plan=plan)


def open_gateway(plan: HostPlan | None) -> None:
    """nginx routes to what will serve and no more to what leaves."""
    if plan is not None and plan.gateway_services:
        hosts.services(name="Gateway", plan=plan, services=plan.gateway_services)
        if plan.acme:
            gateways.certificate(name="Certificate of the gateway", plan=plan)


def serve(plan: HostPlan | None) -> None:
    """What does not run starts, all at once; what runs with old settings is replaced in turn."""
    if plan is None or not (plan.instances or plan.retired):
        return
    instances.started(name="Instances that do not run", plan=plan)
    if any(one.to_restart() for one in fleet_plans().values()):
        python.call(name="Instances with old settings", function=replace_in_turn, _run_once=True)


def watch(plan: HostPlan | None) -> None:
    """Prometheus, node exporter, Grafana."""
    if plan is not None and plan.monitoring_services:
        hosts.services(name="Monitoring", plan=plan, services=plan.monitoring_services)


def retire(plan: HostPlan | None) -> None:
    """What is no longer in the plan: drained, stopped, removed, then its files."""
    if plan is None:
        return
    instances.retired(name="Instances no longer in the plan", plan=plan)
    hosts.files(name="Files no longer in the plan", plan=plan, keep_removed=False)
    releases.pruned(name="Old releases and weights", plan=plan)


def write_down(state: State, host: Host) -> None:
    """Have the placement file written on the operator's machine, before a host is changed.

    Raises DeployError, on each host: a later run could choose other cards.
    """
    placement = new_placement()
    assert placement is not None, "called only where there is something to write"
    try:
        if placement.written():
            return
        write_placement(placement.root, placement.path, placement.lines)
    except OSError as error:
        raise DeployError(
            f"nothing was changed: {placement.root / placement.path} cannot be written "
            f"({error.strerror}): without it a later run could move instances to other cards"
        ) from None
    logger.info(f"{placement.path}: cards written down; commit this file")


def replace_in_turn(state: State, host: Host) -> bool:
    """Restart the instances that run with old settings, one after the other, in declared order.

    Each must be warm before the next one goes; the first failure ends it, so that the others
    keep serving as they are. False then, which fails the run. pyinfra books it on the host that
    carries this call: the lines printed name the real one.
    """
    turns: list[tuple[HostPlan, PlannedInstance]] = [
        (plan, one) for plan in fleet_plans().values() for one in plan.to_restart()
    ]
    by_name = {one.name: one for one in state.inventory}
    for number, (plan, one) in enumerate(turns, 1):
        target = by_name[plan.spec.name]
        rest = f"{len(turns) - number} more keep their old settings and serve"
        if target not in state.active_hosts:
            logger.error(
                f"{target.name} failed earlier in this run: {one.name} is as it was; {rest}"
            )
            return False
        try:
            with ctx_config.use(state.config.copy()), ctx_host.use(target):
                instances.replaced(name="Replace an instance", plan=plan, instance=one)
        except NestedOperationError:
            logger.error(
                f"{target.name}: instance {one.name} did not come back with its new settings; "
                f"{rest}; mend the cause told above and deploy again"
            )
            return False
    return True
