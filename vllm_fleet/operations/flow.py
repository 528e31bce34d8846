"""Order between hosts."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import StringCommand, operation


@operation()
def barrier() -> Generator[StringCommand, None, None]:
    """
    Change nothing; called by every host at one line, it makes all of them meet there.

    pyinfra keeps the order of operations only within a host: without this, a host with fewer
    steps runs ahead of the others.
    """
    host.noop("every host got here")
    yield from ()
