"""The one large fact: everything that a converge must know of a host, in one command."""

from __future__ import annotations

import json
from importlib import resources

from pyinfra.api import FactBase, QuoteString, StringCommand
from pyinfra.api.exceptions import FactProcessError
from typing_extensions import override

from vllm_fleet.state import HostState

SCRIPT = resources.files("vllm_fleet.onhost").joinpath("state.py").read_text()


class Host(FactBase[HostState | None]):
    """
    Everything a converge must know of a host.

    + asked: JSON: which ``packages``, ``units`` and ``disks`` to look at
    """

    @staticmethod
    @override
    def default() -> None:
        return None

    @override
    def command(self, asked: str) -> StringCommand:
        return StringCommand("python3", "-c", QuoteString(SCRIPT), QuoteString(asked))

    @override
    def process(self, output: list[str]) -> HostState:
        try:
            return HostState(**json.loads(output[-1]))
        except (ValueError, TypeError, IndexError) as error:
            raise FactProcessError(f"unreadable state: {error}") from error
