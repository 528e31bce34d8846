"""Run one of our scripts on a host: what each of them needs, and how its output is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

from pyinfra.api import Host, QuoteString, State, StringCommand
from pyinfra.api.output import echo
from pyinfra.connectors.util import CommandOutput
from typing_extensions import override

from vllm_fleet import paths

SCRIPTS = resources.files("vllm_fleet.onhost")


def inline(name: str) -> tuple[str, ...]:
    """The words that run a script of vllm_fleet/onhost which is not on the host (yet)."""
    return "python3", "-u", "-c", SCRIPTS.joinpath(name).read_text()


def installed(name: str, python: str = "/usr/bin/python3") -> tuple[str, ...]:
    """The words that run a script of ours which lies on the host."""
    return python, "-u", f"{paths.LIB}/{name}"


class Script(StringCommand):
    """A script of ours, run on a host.

    ``order`` goes to its standard input as JSON, so that it never stands in a process list or
    a file. Its lines are shown as they come; ``explain`` gets all of them when it fails and
    returns further lines for the operator.
    """

    def __init__(
        self,
        *words: str,
        order: Any,
        explain: Callable[[list[str]], list[str]] | None = None,
    ):
        super().__init__(*map(QuoteString, words), _stdin=json.dumps(order))
        self.explain = explain

    @override
    def execute(self, state: State, host: Host, connector_arguments: Any) -> Any:
        connector_arguments.update(self.connector_arguments)
        status, output = host.run_shell_command(
            self, print_output=True, print_input=state.print_input, **connector_arguments
        )
        if not status and self.explain:
            for line in self.explain(output.output_lines):
                echo(f"{host.print_prefix}{line}", err=True)
        # Shown already: pyinfra would print the same lines again for a failed command.
        return status, CommandOutput([])
