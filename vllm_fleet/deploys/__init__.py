"""The chapters of deploy.py and of the other deploy files, in their order there.

Each takes the plan of the host that it runs for, or None where the host gave no facts, and
calls an operation only where the plan has something for it to do: pyinfra looks through the call
stack at each call and prints a line for each host. Names carry no per-host values: pyinfra merges
operations of equal position over hosts and shows one name for all.
"""

from __future__ import annotations

from pyinfra import logger
from pyinfra.api import Host, State
from pyinfra.api.exceptions import DeployError
from pyinfra.operations import python

from vllm_fleet.deploys import fabric, rolling, trials
from vllm_fleet.deploys.fleet import all_as_wanted, fleet_plans, given_up, my_plan, new_placement
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations import flow
from vllm_fleet.operations import gateway as gateways
from vllm_fleet.operations import host as hosts
from vllm_fleet.operations import instance as instances
from vllm_fleet.operations import release as releases
from vllm_fleet.operations import weights as model_weights
from vllm_fleet.placement import write_placement

__all__ = [
    "bench",
    "maintain",
    "meet",
    "my_plan",
    "network",
    "open_gateway",
    "prepare",
    "retire",
    "rollback",
    "serve",
    "stage",
    "upgrade",
    "watch",
]


def meet(name: str) -> None:
    """All hosts wait for each other here, and stop here when one of them has failed."""
    if not all_as_wanted():
        flow.BARRIERS.add(name)
        flow.barrier(name=name, given_up=given_up())


def prepare(plan: HostPlan | None) -> None:
    """Cards that were chosen are written down; Debian packages; every file of ours; firewall."""
    if plan is None:
        return
    if new_placement() is not None:
        # On every host: where it fails, all of them must stop.
        python.call(name="Cards chosen, written down", function=write_down)
    if not all_as_wanted() and any(one.spec.settings.air_gapped for one in fleet_plans().values()):
        # On every host, so that all of them wait here until the bundle is served.
        hosts.bundle(name="Bundle for hosts without internet", plan=plan)
        meet("The bundle is served")
    if plan.missing_packages:
        hosts.packages(name="Debian packages", plan=plan)
    if plan.missing_certificate:
        gateways.stand_in(name="Stand-in for the certificate", plan=plan)
    if plan.changed_files:
        hosts.files(name="Files of ours", plan=plan)
    if plan.due(plan.firewall_services):
        # Before any instance starts, and before a new gateway sends to those that run.
        hosts.services(name="Firewall", plan=plan, services=plan.firewall_services)


def stage(plan: HostPlan | None) -> None:
    """Tools, releases and weights, built and verified beside what serves."""
    if plan is None:
        return
    if plan.missing_tools:
        releases.tools(name="Tools", plan=plan)
    if plan.missing_releases:
        releases.built(name="Releases of vLLM", plan=plan)
    if plan.wanted_weights:
        model_weights.verified(name="Weights of the models", plan=plan)


def open_gateway(plan: HostPlan | None) -> None:
    """nginx routes to what will serve and no more to what leaves."""
    if plan is None:
        return
    if plan.due(plan.gateway_services):
        hosts.services(name="Gateway", plan=plan, services=plan.gateway_services)
    if plan.missing_certificate:
        gateways.certificate(name="Certificate of the gateway", plan=plan)


def serve(plan: HostPlan | None) -> None:
    """What does not run starts, all at once; what runs with old settings is rolled."""
    if plan is None:
        return
    if plan.to_start():
        instances.started(name="Instances that do not run", plan=plan)
    if (plan.instances or plan.retired) and rolling.begun("deploy"):
        python.call(name="Instances with old settings", function=rolling.deploy, _run_once=True)


def upgrade(plan: HostPlan | None) -> None:
    """Every instance to what group_vars want, its release too: canaries, then waves."""
    if plan is not None and rolling.begun("upgrade"):
        python.call(name="Instances to another version", function=rolling.upgrade, _run_once=True)


def rollback() -> None:
    """The last change undone: every instance back to what served before."""
    if rolling.begun("rollback"):
        python.call(name="Back to what served before", function=rolling.rollback, _run_once=True)


def maintain() -> None:
    """Hosts out of service one after another: rebooted or held, and back."""
    if rolling.maintained():
        python.call(name="Out of service and back", function=rolling.maintain, _run_once=True)


def network(plan: HostPlan | None) -> None:
    """The environment of models that span hosts: tested on all of them, kept or put back."""
    if plan is not None and fabric.begun():
        python.call(name="Environment of the fabric", function=fabric.change, _run_once=True)


def bench() -> None:
    """One instance measured in several configurations, and put back."""
    if trials.begun():
        python.call(name="Configurations compared", function=trials.run, _run_once=True)


def watch(plan: HostPlan | None) -> None:
    """Prometheus, node exporter, Grafana."""
    if plan is not None and plan.due(plan.monitoring_services):
        hosts.services(name="Monitoring", plan=plan, services=plan.monitoring_services)


def retire(plan: HostPlan | None) -> None:
    """What is no longer in the plan: drained, stopped, removed, then its files."""
    if plan is None:
        return
    if plan.retired:
        instances.retired(name="Instances no longer in the plan", plan=plan)
    if plan.removed_files:
        hosts.files(name="Files no longer in the plan", plan=plan, keep_removed=False)
    if plan.prune:
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
