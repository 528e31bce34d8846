"""What a run tells: bounded lines for each step however many hosts there are, failures at the end.

pyinfra prints a line for each host and step. From the :data:`FEW` on they are counted instead;
what failed, and what scripts say, is always printed. ``-v`` and ``--debug`` print everything.
"""

from __future__ import annotations

import atexit
import logging
import re
from collections import Counter

from pyinfra import logger
from pyinfra.api import BaseStateCallback, Host, State
from typing_extensions import override

from vllm_fleet.operations.alive import LOST
from vllm_fleet.operations.flow import BARRIERS

FEW = 20
NAMED = 50  # failed hosts; the others are counted
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OF_A_HOST = re.compile(r"\[[^\]]+\]\s+(Connected|Ready:|Success|No changes|Skipped)")


class FewLines(logging.Filter):
    """Lets the first lines of each kind pass, and tells how many more there were."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        kind = _OF_A_HOST.match(_COLOUR.sub("", str(record.msg)))
        if kind is None:
            if "-->" in str(record.msg):
                self._tell()
            return True
        self._counts[kind[1]] += 1
        return self._counts[kind[1]] <= FEW

    def _tell(self) -> None:
        counts, self._counts = self._counts, Counter()
        for kind, count in counts.items():
            if count > FEW:
                logger.info("... and %d more hosts: %s", count - FEW, kind.rstrip(":"))


class Failures(BaseStateCallback):
    """Remembers where each host failed first."""

    steps: dict[str, str]

    def __init__(self) -> None:
        self.steps = {}

    # pyinfra calls them on the object, and declares them static.
    @override
    def operation_host_error(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        self.steps.setdefault(host.name, ", ".join(state.get_op_meta(op_hash).names))

    def lines(self, state: State) -> list[str]:
        """Each host that failed, and where; those that only stopped with the others, counted."""
        found, stopped = [], 0
        for host in state.inventory:
            if host not in state.failed_hosts:
                continue
            step = self.steps.get(host.name)
            if step in BARRIERS and host.name not in LOST:
                stopped += 1
            elif host not in state.activated_hosts:
                found.append(f"{host.name}: could not be reached")
            else:
                why = LOST.get(host.name, "failed")
                found.append(f"{host.name}: {why}" + (f": {step}" if step else " while looked at"))
        more = len(found) - NAMED
        told = [*found[:NAMED], *([f"and {more} more hosts"] if more > 0 else [])]
        if stopped:
            told.append(f"stopped with them, nothing of their own is wrong: {stopped} hosts")
        return told


def few_lines() -> None:
    """Have pyinfra's own lines for single hosts counted where there are many."""
    if logger.level <= logging.DEBUG:
        return
    for handler in logger.handlers:
        if not any(isinstance(one, FewLines) for one in handler.filters):
            handler.addFilter(FewLines())


def tell_failures(state: State) -> None:
    """Have every host that fails in this run named at its end."""
    failures = Failures()
    state.callback_handlers.append(failures)

    def tell() -> None:
        if lines := failures.lines(state):
            logger.error("--> Failed hosts:")
            for line in lines:
                logger.error("%s", line)

    atexit.register(tell)
