"""A file that a host must have: the unit in which configuration is rendered and compared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ManagedFile:
    """One file of ours on a host.

    ``mode`` is octal as in ``0o644``. ``secret`` keeps its content out of ``--diff`` and logs.
    """

    path: str
    content: str
    mode: int = 0o644
    owner: str = "root"
    group: str = "root"
    secret: bool = False

    @cached_property
    def sha256(self) -> str:
        """Checksum of the content, in hex."""
        return hashlib.sha256(self.content.encode()).hexdigest()
