"""Look at the hosts of an inventory without changing one: connect, ask, disconnect.

Importing this imports pyinfra and gevent; ``gevent.monkey.patch_all()`` comes before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Pool
from pyinfra.api import Config, State, StringCommand
from pyinfra.api import Host as PyinfraHost
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.connect import disconnect_all
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.api.facts import get_fact
from pyinfra.context import ctx_config, ctx_host, ctx_inventory, ctx_state
from pyinfra_cli.exceptions import CliError
from pyinfra_cli.inventory import make_inventory
from pyinfra_cli.util import exec_file

from vllm_fleet.facts.host import Host
from vllm_fleet.rollout.hosts import Failed, result_of
from vllm_fleet.state import HostState

AT_ONCE = 100  # hosts; each is a connection and no work of this machine
SECONDS = 180.0  # that one host may take in all: a dead one must not hold up the others


class ReadError(Exception):
    """The inventory cannot be used by pyinfra; the message is for the operator."""


@dataclass
class Looked:
    """What the hosts said."""

    states: dict[str, HostState] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)  # to the second question
    failures: dict[str, str] = field(default_factory=dict)  # why a host gave no state
    silent: dict[str, str] = field(default_factory=dict)  # why it gave a state and no answer
    # When the second question was sent and answered, by this machine's clock.
    asked_at: dict[str, tuple[float, float]] = field(default_factory=dict)


def read_states(
    inventory_file: str, asked: str, only: Collection[str] = ()
) -> tuple[dict[str, HostState], dict[str, str]]:
    """State by host, and why each other host gave none.

    ``asked``: what the fact looks at (:func:`vllm_fleet.plan.asked`); ``only``: names of hosts,
    all where empty. Connections are made as ``pyinfra INVENTORY`` makes them, config.py of the
    inventory's directory included. Raises ReadError.
    """
    found = look(inventory_file, asked, only=only)
    return found.states, found.failures


def look(
    inventory_file: str,
    asked: str,
    question: Callable[[str], StringCommand | None] = lambda _: None,
    only: Collection[str] = (),
    seconds: float = SECONDS,
) -> Looked:
    """The state of each host, and its answer to one more question: a script of ours that prints
    a ``result`` line. All hosts side by side, each with ``seconds`` of its own. Raises ReadError.
    """
    path = Path(os.path.abspath(inventory_file))
    root = path.parent.parent
    if str(root) not in sys.path:
        sys.path.append(str(root))  # inventories import what stands beside them
    found = Looked()
    with chdir(root):
        config, state = Config(), State()  # type: ignore[no-untyped-call]
        try:
            with ctx_state.use(state), ctx_config.use(config):
                if Path("config.py").exists():
                    exec_file("config.py")
                inventory = make_inventory(str(path), cwd=str(root))
        except (PyinfraError, CliError) as error:
            raise ReadError(f"{inventory_file}: {error}") from None
        with ctx_state.use(state), ctx_inventory.use(inventory), ctx_config.use(config):
            state.init(inventory, config)

            def read(one: PyinfraHost) -> None:
                deadline = gevent.Timeout(seconds)
                deadline.start()
                try:
                    with ctx_host.use(one):
                        _state_of(state, one, asked, found)
                        if one.name in found.states and (command := question(one.name)):
                            _answer_of(state, one, command, found)
                except gevent.Timeout as timeout:
                    if timeout is not deadline:
                        raise
                    place = found.silent if one.name in found.states else found.failures
                    place[one.name] = f"no answer within {seconds:g} s"
                finally:
                    deadline.close()

            pool = Pool(AT_ONCE)
            jobs = [pool.spawn(read, one) for one in inventory if not only or one.name in only]
            gevent.joinall(jobs, raise_error=True)
            disconnect_all(state)
    return found


def _state_of(state: State, one: PyinfraHost, asked: str, found: Looked) -> None:
    """Connect, and the large fact."""
    try:
        one.connect(reason=None, show_errors=False, raise_exceptions=True)
        state.activate_host(one)
        fact = get_fact(state, one, Host, kwargs={"asked": asked}, apply_failed_hosts=False)
    except ConnectError as error:
        found.failures[one.name] = f"unreachable: {error}"
    except PyinfraError as error:
        found.failures[one.name] = f"gave no facts: {error}"
    else:
        if fact is None:
            found.failures[one.name] = "gave no facts; what it said stands above"
        else:
            found.states[one.name] = fact


def _answer_of(state: State, one: PyinfraHost, command: StringCommand, found: Looked) -> None:
    """The second question, over the same connection."""
    sent = time.time()
    try:
        arguments, _ = pop_global_arguments(state, one, {})
        kept = {k: v for k, v in arguments.items() if k in CONNECTOR_ARGUMENT_KEYS}
        kept.update(command.connector_arguments)
        _, output = one.run_shell_command(command, **kept)
        found.answers[one.name] = result_of(one.name, [str(line.line) for line in output])
        found.asked_at[one.name] = sent, time.time()
    except Failed as error:
        found.silent[one.name] = str(error).partition(": ")[2]
    except Exception as error:  # connectors raise whatever their library does
        found.silent[one.name] = f"{type(error).__name__}: {error}"
