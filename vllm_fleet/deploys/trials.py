"""From a file of configurations to a trial and its table: what bench.py does."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyinfra import logger, state
from pyinfra.api import Host, State
from pyinfra.api.exceptions import DeployError

from vllm_fleet import engine
from vllm_fleet import plan as planning
from vllm_fleet.bench import tell
from vllm_fleet.bench.configurations import Comparison, ConfigurationError, applied, parse
from vllm_fleet.bench.generator import GeneratorError, find
from vllm_fleet.bench.measure import measure
from vllm_fleet.bench.report import ReportError
from vllm_fleet.bench.result import Result
from vllm_fleet.deploys import rolling
from vllm_fleet.deploys.fleet import asked, begun_once, made, read_spec
from vllm_fleet.engine_args import check_args
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations.instance import explained
from vllm_fleet.operations.reach import Reached
from vllm_fleet.operations.tunnel import tunnel
from vllm_fleet.planned import PlannedInstance
from vllm_fleet.rollout.hosts import Failed
from vllm_fleet.rollout.lock import Lock
from vllm_fleet.rollout.state import record_of
from vllm_fleet.rollout.trial import Candidate, Trial

USAGE = (
    "say which instance and which configurations: "
    "--data instance=HOST/NAME --data configurations=FILE"
)


def begun() -> bool:
    """Whether there is a trial to run; told once, also by `--dry`. Raises DeployError."""

    def ask() -> bool:
        plan, planned, comparison = _asked_for()
        _candidates(plan, planned, comparison)
        _generator()
        logger.info(
            "%s/%s of %s: out of its pool, %s, measured with %s, and back",
            plan.spec.name,
            planned.name,
            planned.model_name,
            "; ".join(comparison.configurations),
            comparison.load.told(),
        )
        return True

    return begun_once("bench", ask)


def run(state: State, host: Host) -> bool:
    """All of it; False where it failed, with everything said."""
    return rolling.locked(state, "bench.py", _below_lock)


def _below_lock(reached: Reached, gateways: list[str], lock: Lock) -> bool:
    plan, planned, comparison = _asked_for()
    out = asked("out") or f"bench-{planned.name}-{time.strftime('%m%d-%H%M%S')}"
    results: list[Result] = []
    candidates = _candidates(plan, planned, comparison)

    def measured(candidate: Candidate, figures: dict[str, Any]) -> str:
        # The connection may have been made anew since the last one.
        target = next(one for one in state.inventory if one.name == plan.spec.name)
        try:
            reached.connect([plan.spec.name])
            with tunnel(target, candidate.port) as address:
                result = measure(
                    _generator(),
                    replace(comparison.load, url=f"http://{address}/v1"),
                    Path(out) / candidate.name.replace("/", "-"),
                    name=candidate.name,
                    cards=_cards(planned),
                    targets=comparison.targets,
                    metrics=f"http://{address}/metrics",
                    api_key=planned.env.get("VLLM_API_KEY", ""),
                )
        except (GeneratorError, ReportError, Failed, OSError) as error:
            return str(error)
        results.append(replace(result, figures=figures))
        return "" if any(level.answered for level in result.levels) else "nothing was answered"

    trial = Trial(
        hosts=reached,
        gateways=gateways,
        settings=plan.spec.settings.rollout,
        lock=lock,
        host=plan.spec.name,
        name=planned.name,
        pool=planned.model_name,
        start_seconds=planned.start_seconds,
        drain_seconds=planned.drain_seconds,
        candidates=candidates,
        measure=measured,
        explain=explained,
    )
    good = trial.run()
    if results:
        tell.show(results, [])
        logger.info("%s", tell.keep(Path(out), results, []))
    return good and not any(one.why for one in trial.tried)


def _asked_for() -> tuple[HostPlan, PlannedInstance, Comparison]:
    """The instance and what to compare. Raises DeployError."""
    who, file = asked("instance"), asked("configurations")
    if not who or not file:
        raise DeployError(f"nothing was changed: {USAGE}")
    host, _, name = who.rpartition("/")
    plan = made().plans.get(host)
    planned = next((one for one in plan.wanted if one.name == name), None) if plan else None
    if plan is None or planned is None:
        known = [f"{spec}/{one.name}" for spec, its in made().plans.items() for one in its.wanted]
        raise DeployError(
            f"nothing was changed: no instance {who} takes part; there is {', '.join(known)}"
        )
    if plan.state.held:
        raise DeployError(f"nothing was changed: {host} is held: maintain.py --data do=return")
    if record_of(plan.state, name).step is not None:
        raise DeployError(
            f"nothing was changed: a change of {who} was cut off: run upgrade.py, or rollback.py"
        )
    if planned.model.task != "chat":
        raise DeployError(f"nothing was changed: {who} is no chat model: the load is of chats")
    try:
        return plan, planned, parse(Path(file).read_text(), planned.model_name)
    except OSError as error:
        raise DeployError(f"nothing was changed: {file}: {error.strerror}") from None
    except ConfigurationError as error:
        raise DeployError(f"nothing was changed: {file}: {error}") from None


def _candidates(plan: HostPlan, planned: PlannedInstance, compared: Comparison) -> list[Candidate]:
    """Every configuration, planned as a deploy would. Raises DeployError with all refusals."""
    fleet, inputs = read_spec()
    host, found, reasons = plan.spec.name, [], []
    for name, change in compared.configurations.items():
        try:
            changed = applied(fleet, host, planned.name, change)
            its = planning.plan_fleet(changed, {host: plan.state}, inputs)[host]
        except (ConfigurationError, planning.Refusal) as error:
            reasons.append(f"{name}: {error}")
            continue
        one = next(one for one in its.wanted if one.name == planned.name)
        words = [word for line in engine.command(one)[1:] for word in line]
        if wrong := check_args(one.vllm_version, words):
            reasons += [f"{name}: {error}" for error in wrong]
            continue
        version: dict[str, Any] = {
            "release": one.release,
            "checksum": its.checksums[one.name],
            "files": rolling.files_of(its, one.name),
        }
        found.append(Candidate(name, version, one.port))
    if reasons:
        told = [f"{asked('configurations')}: configurations: {reason}" for reason in reasons]
        raise DeployError("nothing was changed:\n" + "\n".join(told))
    return found


def _generator() -> str:
    try:
        return find(asked("generator") or None)
    except GeneratorError as error:
        raise DeployError(f"nothing was changed: {error}") from None


def _cards(planned: PlannedInstance) -> str:
    return f"{len(planned.cards)} cards" if planned.cards else planned.device
