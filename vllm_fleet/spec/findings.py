"""Complaints while they are collected: about a place, about one host or several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_fleet.spec.complaints import Complaint, Loc
from vllm_fleet.spec.layers import Layer, LoadedHost
from vllm_fleet.spec.model import Instance, part_of


@dataclass(frozen=True)
class At:
    """A place in a document, and what is said there of one or more hosts."""

    layer: Layer
    loc: Loc

    @property
    def place(self) -> str:
        """``group_vars/gpu.yml:3``, to point at from another complaint."""
        node = self.layer.document.root.at(self.loc)
        return f"{self.layer.document.file}:{node.line}"


class Findings:
    """Complaints, one for each place and text; hosts of the same complaint are listed in it."""

    def __init__(self) -> None:
        self._found: dict[tuple[Complaint, str], list[str]] = {}

    def say(self, at: At, text: str, host: str | None = None, *, at_key: bool = False) -> None:
        """Add a complaint; ``{hosts}`` in the text becomes the names of all its hosts."""
        if at.layer.flawed(at.loc, within=not at_key):
            return  # what stands there was refused already
        complaint = at.layer.document.complaint(at.loc, "", at_key=at_key)
        self.add(complaint, text, host)

    def add(self, complaint: Complaint, text: str, host: str | None = None) -> None:
        """Like :meth:`say`, of a place that is in no layer."""
        hosts = self._found.setdefault((complaint, text), [])
        if host is not None and host not in hosts:
            hosts.append(host)

    def complaints(self) -> tuple[Complaint, ...]:
        """All of them, in order."""
        return tuple(
            sorted(
                Complaint(c.file, c.line, c.column, c.key, t.replace("{hosts}", ", ".join(hosts)))
                for (c, t), hosts in self._found.items()
            )
        )


def placed(host: LoadedHost) -> Iterator[tuple[At, Instance]]:
    """The instances of a host, of a span its own rank, each with its place in the file."""
    layer = host.sources.get("instances")
    if layer is None:
        return
    for number, instance in layer.placements.get(host.host.name, ()):
        yield At(layer, ("instances", number)), part_of(instance, host.host.name)
