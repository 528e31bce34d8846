"""What a rollout needs of hosts: to run a script of ours there and read what it found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Json = dict[str, Any]

# Script and what it imports, in that order; see operations.remote.bundled.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "ledger": ("ledger",),
    "switch": ("ledger", "apply", "gate/before_start", "instances", "switch"),
    "care": ("ledger", "apply", "gate/before_start", "instances", "switch", "care"),
    "adopt": ("ledger", "apply", "gate/before_start", "instances", "switch", "adopt"),
    "gateways": ("gateways",),
    "acceptance": ("acceptance",),
    "rehearse": ("rehearse",),
    "fabric": ("ledger", "gate/before_start", "fabric"),
}
RESULT, REFUSED, JOURNAL = "result ", "refused ", "journal "
# Before a cause, and the line that tells of it, in what an operator is told of a log.
CAUSE, LINE = "  cause: ", "  log line: "


class Failed(Exception):
    """A script could not do what it was asked; the message names host and reason."""


class Hosts(Protocol):
    """The hosts of a fleet, as a rollout reaches them."""

    def ask(self, host: str, script: str, order: Mapping[str, Any]) -> Json:
        """What a script found. Raises Failed where it refused or the host is lost."""

    def say(self, text: str) -> None:
        """Tell the operator, at once."""

    def save(self, name: str, lines: Sequence[str]) -> str:
        """Keep lines on the operator's machine; where they are."""


def result_of(host: str, lines: Sequence[str]) -> Json:
    """The result among the lines that a script printed. Raises Failed where there is none."""
    for line in reversed(lines):
        if line.startswith(RESULT):
            found = json.loads(line[len(RESULT) :])
            if isinstance(found, dict):
                return found
        if line.startswith(REFUSED):
            raise Failed(f"{host}: {line[len(REFUSED) :]}")
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    raise Failed(f"{host}: no answer to the end ({last.strip()[:300]})")
