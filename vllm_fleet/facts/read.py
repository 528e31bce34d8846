"""Read the hosts of an inventory without changing one: connect, one fact each, disconnect.

Importing this imports pyinfra and gevent; ``gevent.monkey.patch_all()`` comes before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import chdir
from pathlib import Path

import gevent
from pyinfra.api import Config, State
from pyinfra.api import Host as PyinfraHost
from pyinfra.api.connect import disconnect_all
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.api.facts import get_fact
from pyinfra.context import ctx_config, ctx_host, ctx_inventory, ctx_state
from pyinfra_cli.exceptions import CliError
from pyinfra_cli.inventory import make_inventory
from pyinfra_cli.util import exec_file

from vllm_fleet.facts.host import Host
from vllm_fleet.operations.alive import LOOK_SECONDS, while_alive
from vllm_fleet.state import HostState


class ReadError(Exception):
    """The inventory cannot be used by pyinfra; the message is for the operator."""


def read_states(
    inventory_file: str, asked: str, only: Collection[str] = ()
) -> tuple[dict[str, HostState], dict[str, str]]:
    """State by host, and why each other host gave none.

    ``asked``: what the fact looks at (:func:`vllm_fleet.plan.asked`); ``only``: names of hosts,
    all where empty. Connections are made as ``pyinfra INVENTORY`` makes them, config.py of the
    inventory's directory included. Raises ReadError.
    """
    path = Path(os.path.abspath(inventory_file))
    root = path.parent.parent
    if str(root) not in sys.path:
        sys.path.append(str(root))  # inventories import what stands beside them
    states: dict[str, HostState] = {}
    failures: dict[str, str] = {}
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
                try:
                    with ctx_host.use(one):
                        one.connect(reason=None, show_errors=False, raise_exceptions=True)
                        state.activate_host(one)
                        kwargs = {"asked": asked, "_timeout": LOOK_SECONDS}
                        with while_alive(one):
                            found = get_fact(
                                state, one, Host, kwargs=kwargs, apply_failed_hosts=False
                            )
                except (ConnectError, ConnectionError) as error:
                    failures[one.name] = f"unreachable: {error}"
                except PyinfraError as error:
                    failures[one.name] = f"gave no facts: {error}"
                else:
                    if found is None:
                        failures[one.name] = "gave no facts; what it said stands above"
                    else:
                        states[one.name] = found

            jobs = [
                state.pool.spawn(read, one) for one in inventory if not only or one.name in only
            ]
            gevent.joinall(jobs, raise_error=True)
            disconnect_all(state)
    return states, failures
