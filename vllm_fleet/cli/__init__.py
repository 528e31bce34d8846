"""The command `fleet`: reads and measures, never changes a host.

Each module here is one subcommand, named like it (``cli/check.py`` holds the click command
``check``); it is imported when it is called, so that ``fleet check`` never waits for pyinfra.
Exit 0: good; 1: a finding or a refusal; 2: wrong usage.
"""

from __future__ import annotations

import importlib
import pkgutil

import click

import vllm_fleet


class Commands(click.Group):
    """A group whose subcommands are the modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all modules that are not private."""
        names = (module.name for module in pkgutil.iter_modules(__path__))
        return sorted(name for name in names if not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand; None where there is none of this name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command), f"{module.__name__} has no command {cmd_name}"
        return command


@click.group(cls=Commands)
@click.version_option(vllm_fleet.__version__, prog_name="fleet")
def main() -> None:
    """Look at a fleet of vLLM hosts and at the files that describe it; changes no host."""
