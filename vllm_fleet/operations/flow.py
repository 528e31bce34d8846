"""Order between hosts."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import suppress
from typing import Any

import gevent
from gevent.lock import RLock
from pyinfra import host, logger, state
from pyinfra.api import FunctionCommand, Host, StringCommand, operation

from vllm_fleet.operations.alive import LOST

# Names of the operations at which hosts meet.
BARRIERS: set[str] = set()
ANSWER_SECONDS = 10


@operation()
def barrier(given_up: Collection[str]) -> Generator[FunctionCommand, None, None]:
    """
    Change nothing; called by every host at one line, it makes all of them meet there.

    pyinfra keeps the order of operations only within a host: without this, a host with fewer
    steps runs ahead of the others. And it goes on with the other hosts when one has failed:
    here the run ends instead, before what comes next is touched on any host. One that was lost,
    with power or network, stops nobody: it is as one that was not reached at the start.

    + given_up: names of hosts that were left out from the start, and so failed nothing
    """
    failed = sorted(
        one.name for one in state.failed_hosts if one.name not in given_up and not _lost(one)
    )
    if not failed:
        host.noop("every host got here")
        return
    yield FunctionCommand(_stop, (failed,), {})


def _lost(one: Host) -> bool:
    """Whether a host that failed does not answer any more; asked once."""
    with _asking:
        if one.name not in _answers:
            _answers[one.name] = False
            if one.name not in LOST:
                with gevent.Timeout(ANSWER_SECONDS, False), suppress(Exception):
                    one.run_shell_command(StringCommand("true"))
                    _answers[one.name] = True
                if not _answers[one.name]:
                    LOST[one.name] = "connection lost"
        return not _answers[one.name]


def _stop(state: Any, host: Any, failed: list[str]) -> bool:
    """Fail this host, and say once why."""
    if _said_for.get(id(state)) != failed:
        _said_for[id(state)] = failed
        logger.error(
            f"stopped here on every host, since {', '.join(failed)} failed: see above for the "
            "cause, mend it and run again; what is done is not done twice"
        )
    return False


_said_for: dict[int, list[str]] = {}
_answers: dict[str, bool] = {}
_asking = RLock()
