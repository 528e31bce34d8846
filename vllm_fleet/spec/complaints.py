"""What is wrong with an operator's files, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Loc = tuple[str | int, ...]  # ("instances", 1, "port")


@dataclass(frozen=True, order=True)
class Complaint:
    """One mistake: ``group_vars/gpu.yml:12:9: models.glm.max_model_len: must be ...``.

    ``file`` is relative to the directory that holds inventory/ and group_vars/; ``line`` and
    ``column`` count from 1, 0 where the mistake has no place in the file; ``key`` is empty where
    it is in no setting. ``text`` says what is wrong and what to do, never a secret's value.
    """

    file: str
    line: int
    column: int
    key: str
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        whole = f"{place}: {self.key}: {self.text}" if self.key else f"{place}: {self.text}"
        # Names from files may hold anything, and a complaint is one line.
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in whole)


class SpecError(Exception):
    """The files of an inventory cannot be used; carries every complaint, by file and line."""

    def __init__(self, complaints: Iterable[Complaint]) -> None:
        self.complaints = tuple(sorted(set(complaints)))
        super().__init__("\n".join(map(str, self.complaints)))


def key_of(loc: Loc) -> str:
    """``("instances", 1, "port")`` as ``instances[1].port``."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
