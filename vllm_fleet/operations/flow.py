"""Order between hosts."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any

from pyinfra import host, logger, state
from pyinfra.api import FunctionCommand, operation


@operation()
def barrier(given_up: Collection[str]) -> Generator[FunctionCommand, None, None]:
    """
    Change nothing; called by every host at one line, it makes all of them meet there.

    pyinfra keeps the order of operations only within a host: without this, a host with fewer
    steps runs ahead of the others. And it goes on with the other hosts when one has failed:
    here the run ends instead, before what comes next is touched on any host.

    + given_up: names of hosts that were left out from the start, and so failed nothing
    """
    failed = sorted({one.name for one in state.failed_hosts} - set(given_up))
    if not failed:
        host.noop("every host got here")
        return
    yield FunctionCommand(_stop, (failed,), {})


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
