"""Commands on a host: scripts of ours, what each of them needs, and how its output is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import resources
from typing import Any

from pyinfra.api import Host, QuoteString, State, StringCommand
from pyinfra.api.output import echo
from pyinfra.connectors.util import CommandOutput
from typing_extensions import override

from vllm_fleet import paths
from vllm_fleet.operations.alive import while_alive

TICK_SECONDS = 5
SCRIPTS = resources.files("vllm_fleet.onhost")


def inline(name: str) -> tuple[str, ...]:
    """The words that run a script of vllm_fleet/onhost which is not on the host (yet)."""
    return "python3", "-u", "-c", SCRIPTS.joinpath(name).read_text()


# Reads the modules from the first line of standard input and leaves the order, the second.
BOOT = """
import json, sys, types
for name, source in json.loads(sys.stdin.readline()):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name + ".py", "exec"), module.__dict__)
sys.exit(module.main())
"""


def bundled(label: tuple[str, ...], order: Any, *modules: str) -> StringCommand:
    """A command that runs the last of some scripts of ours, which import the ones before.

    Scripts and order go to its standard input; `gate/stop` names one of the gate's. ``label``
    stands at the end of the command line, for whoever looks at the processes of the host.
    """
    sources = [(name.rpartition("/")[2], _source(name)) for name in modules]
    words = ("python3", "-u", "-c", BOOT, *label)
    return StringCommand(
        *map(QuoteString, words), _stdin=f"{json.dumps(sources)}\n{json.dumps(order)}\n"
    )


def _source(name: str) -> str:
    folder, _, module = name.rpartition("/")
    where = resources.files(f"vllm_fleet.{folder or 'onhost'}")
    return where.joinpath(f"{module}.py").read_text(encoding="utf-8")


def installed(name: str, python: str = "/usr/bin/python3") -> tuple[str, ...]:
    """The words that run a script of ours which lies on the host."""
    return python, "-u", f"{paths.LIB}/{name}"


def progress_seconds(hosts: int) -> int:
    """How often a script tells how far it is, so that a person can read it; 0: nobody looks.

    All hosts of a run tell it side by side.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return 0
    return max(TICK_SECONDS, 2 * hosts)


class Command(StringCommand):
    """A command that is waited for as long as its host lives."""

    @override
    def execute(self, state: State, host: Host, connector_arguments: Any) -> Any:
        with while_alive(host):
            return super().execute(state, host, connector_arguments)


class Script(Command):
    """A script of ours, run on a host.

    ``order`` goes to its standard input as JSON, so that it never stands in a process list or
    a file. How often it is to tell its progress is added. Its lines are shown as they come;
    ``explain`` gets all of them when it fails and returns further lines for the operator.
    """

    def __init__(
        self,
        *words: str,
        order: Any,
        explain: Callable[[list[str]], list[str]] | None = None,
    ):
        super().__init__(*map(QuoteString, words))
        self.order = order
        self.explain = explain

    @override
    def execute(self, state: State, host: Host, connector_arguments: Any) -> Any:
        connector_arguments.update(self.connector_arguments)
        order = self.order
        if isinstance(order, dict):
            order = {**order, "progress": progress_seconds(len(state.active_hosts))}
        connector_arguments["_stdin"] = json.dumps(order)
        with while_alive(host):
            status, output = host.run_shell_command(
                self, print_output=True, print_input=state.print_input, **connector_arguments
            )
        if not status and self.explain:
            for line in self.explain(output.output_lines):
                echo(f"{host.print_prefix}{line}", err=True)
        # Shown already: pyinfra would print the same lines again for a failed command.
        return status, CommandOutput([])
