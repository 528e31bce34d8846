"""From inventory, group_vars and one fact a host to the plan of every host, once a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gevent
from gevent.lock import RLock
from pyinfra import host, inventory, logger, state
from pyinfra.api import Host as PyinfraHost
from pyinfra.api.exceptions import DeployError, InventoryError, PyinfraError
from pyinfra.context import ctx_host

from vllm_fleet import adoption
from vllm_fleet import plan as planning
from vllm_fleet.facts.host import Host
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations.alive import LOOK_SECONDS, LOST, while_alive
from vllm_fleet.operations.runlog import tell_failures
from vllm_fleet.placement import Key, Placed, text_of
from vllm_fleet.plan import Refusal
from vllm_fleet.spares import Spare, kept, with_spares
from vllm_fleet.spec.addresses import resolved
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.inputs import Inputs, read_inputs
from vllm_fleet.spec.load import load_fleet
from vllm_fleet.spec.model import Fleet
from vllm_fleet.state import HostState

NAMED = 5  # hosts with the same notice; the others are counted


@dataclass(frozen=True)
class NewPlacement:
    """The placement file as it must become."""

    root: Path
    path: str  # relative to root
    lines: dict[Key, Placed]

    def written(self) -> bool:
        """Whether the file holds these lines by now."""
        path = self.root / self.path
        return path.is_file() and path.read_text(encoding="utf-8") == text_of(self.lines)


@dataclass(frozen=True)
class Made:
    """What was made for one run: the checked settings, and the plans of the hosts in it."""

    fleet: Fleet
    inputs: Inputs
    plans: dict[str, HostPlan]
    placement: NewPlacement | None
    given_up: frozenset[str]
    all_as_wanted: bool


# pyinfra runs the deploy file once a host, side by side: the first one here plans for all.
_lock = RLock()
_made: dict[int, Made] = {}
_read: dict[int, tuple[Fleet, Inputs]] = {}
# What is asked once may ask for the plan, also from greenlets of its own: not the same lock.
_said = RLock()
_begun: dict[tuple[int, str], bool] = {}


def my_plan() -> HostPlan | None:
    """The plan of the host that this deploy file runs for; None where the host gave no facts.

    Raises InventoryError for a wrong spec and DeployError where any host is refused: both
    before anything is changed on any host.
    """
    return fleet_plans().get(host.name)


def fleet_plans() -> dict[str, HostPlan]:
    """The plans of all hosts that take part in this run, in declared order."""
    return made().plans


def made() -> Made:
    """What this run goes by; made at the first call."""
    with _lock:
        key = id(state.inventory)
        if key not in _made:
            tell_failures(state)
            _made[key] = _plan_all()
        return _made[key]


def begun_once(what: str, ask: Callable[[], bool]) -> bool:
    """Whether a deploy file has something to do: asked, and told, once for all hosts of a run."""
    with _said:
        key = id(state.inventory), what
        if key not in _begun:
            _begun[key] = ask()
        return _begun[key]


def read_spec() -> tuple[Fleet, Inputs]:
    """The checked settings of all hosts and the files beside them. Raises InventoryError."""
    with _lock:
        key = id(state.inventory)
        if key not in _read:
            try:
                fleet = resolved(load_fleet(inventory_file()))
                _read[key] = fleet, read_inputs(fleet)
            except SpecError as error:
                raise InventoryError(f"nothing was changed:\n{error}") from None
        return _read[key]


def plan_again(more: Sequence[Spare] = ()) -> dict[str, HostPlan]:
    """The plans of the same hosts as they are now, with further spares.

    Raises DeployError where one is refused.
    """
    before = made()
    taking_part = [
        one for one in inventory if one.name in before.plans and one in state.active_hosts
    ]
    return _plans(before.fleet, before.inputs, states_of(taking_part), more)


def asked(key: str) -> str:
    """What the operator said by `--data KEY=...`."""
    found = next((one.data.get(key) for one in inventory if one.data.get(key)), None)
    return str(found) if found else ""


def given_up() -> frozenset[str]:
    """Names of the hosts that take no part: not reached, or without facts."""
    return made().given_up


def all_as_wanted() -> bool:
    """Whether there is nothing at all to do, on any host."""
    return made().all_as_wanted


def new_placement() -> NewPlacement | None:
    """The placement file to write; None where it holds every line of this run already."""
    return made().placement


def inventory_file() -> str:
    """The inventory file of this run, which group_vars stands beside.

    pyinfra does not hand it on; it is the first existing .py file of the command line whose
    name is a group of the inventory.
    """
    for word in sys.argv[1:]:
        path = Path(word)
        if path.suffix == ".py" and path.is_file() and path.stem in inventory.groups:
            return word
    raise InventoryError(
        "group_vars stand beside an inventory file: run pyinfra inventory/<name>.py deploy.py"
    )


def _plan_all() -> Made:
    fleet, inputs = read_spec()
    plans = _plans(fleet, inputs, states_of(taking_part()))
    told: dict[str, list[str]] = {}
    for plan in plans.values():
        for notice in plan.notices:
            told.setdefault(notice, []).append(plan.spec.name)
    for notice, names in told.items():
        logger.warning("%s: %s", _listed(names), notice)
    for notice in planning.fleet_notices(fleet, inputs):
        logger.warning("%s", notice)
    lines = planning.placement_of(plans, inputs)
    placement = NewPlacement(Path(fleet.root), inputs.placement.path, lines) if lines else None
    all_as_wanted = all(plan.as_wanted for plan in plans.values())
    if all_as_wanted:
        logger.info("%d hosts looked at: everything on them is as wanted", len(plans))
    left_out = frozenset(one.name for one in inventory) - frozenset(plans)
    return Made(fleet, inputs, plans, placement, left_out, all_as_wanted)


def _listed(names: list[str]) -> str:
    """Names of hosts for one line."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def taking_part() -> list[PyinfraHost]:
    """The hosts of this run in declared order; one that cannot be reached is named."""
    for one in inventory:
        if state.is_host_in_limit(one) and one not in state.active_hosts:
            logger.warning("%sunreachable: left out of this run", one.print_prefix)
    return [one for one in inventory if one in state.active_hosts]


def _plans(
    fleet: Fleet, inputs: Inputs, states: dict[str, HostState], more: Sequence[Spare] = ()
) -> dict[str, HostPlan]:
    try:
        names = adoption.asked(asked("adopt"), fleet)
        states = adoption.as_if_gone(fleet, states, names)
        known = {(one.host, one.name): one for one in [*kept(fleet, states), *more]}
        return planning.plan_fleet(with_spares(fleet, [*known.values()]), states, inputs)
    except adoption.AdoptionError as error:
        raise DeployError(f"nothing was changed: {error}") from None
    except Refusal as refusal:
        raise DeployError("nothing was changed:\n" + "\n".join(refusal.reasons)) from None


def states_of(hosts: list[PyinfraHost]) -> dict[str, HostState]:
    """The large fact of every host, side by side; a host that gives none is left out."""

    asked = planning.asked()

    def ask(one: PyinfraHost) -> HostState | None:
        found: HostState | None = None
        # Where the last host fails its fact, pyinfra raises: told below for all of them.
        with ctx_host.use(one), suppress(PyinfraError, ConnectionError), while_alive(one):
            found = one.get_fact(Host, asked=asked, _timeout=LOOK_SECONDS)
        if found is None:
            why = LOST.get(
                one.name,
                "could not be looked at, for the reason above: where sudo refused, set "
                "_sudo_password (or passwordless sudo) for it in the inventory; python3 must be "
                "installed there",
            )
            logger.error(f"{one.name}: {why}")
        return found

    jobs = {one.name: state.fact_pool.spawn(ask, one) for one in hosts}
    gevent.joinall(list(jobs.values()), raise_error=True)
    states = {name: job.value for name, job in jobs.items() if job.value is not None}
    if not states:
        raise DeployError("nothing was changed: no host could be looked at")
    return states
