"""Which cards "4 x A100-SXM4-80GB" stands for, decided once and written down.

The file is ``placement/<inventory>.yml`` beside group_vars, and belongs to the operator, who
commits it. A line in it is never changed by us: cards move only when the operator deletes the
line or changes ``cards`` of the instance.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_fleet.cards import CardsError, Group, Groups, resolve
from vllm_fleet.spec.complaints import Complaint, SpecError
from vllm_fleet.spec.model import HostSpec

HEAD = """\
# Which cards "COUNT x KIND" in group_vars stands for. Written by deploy.py, read by every later
# run, which keeps to it; commit this file. To have cards chosen anew, delete their line.
"""
Key = tuple[str, str]  # host, instance


@dataclass(frozen=True)
class Placed:
    """The cards of one instance on one host."""

    asked: str  # as group_vars had it
    cards: tuple[int, ...]
    uuids: tuple[str, ...] = ()  # of these cards, so that a replaced one is noticed


@dataclass(frozen=True)
class Placement:
    """A placement file: where it is, and what stands in it."""

    path: str = ""  # relative to the directory of group_vars
    lines: dict[Key, Placed] = field(default_factory=dict)


@dataclass(frozen=True)
class Decided:
    """Cards of the instances of one host that name a count and kind."""

    lines: dict[str, Placed] = field(default_factory=dict)  # by instance; old and new ones
    new: frozenset[str] = frozenset()
    reasons: tuple[str, ...] = ()  # why some could not be resolved, with the remedy
    notices: tuple[str, ...] = ()


def path_of(inventory: str) -> str:
    """``inventory/prod.py`` -> ``placement/prod.yml``."""
    return f"placement/{Path(inventory).stem}.yml"


def read_placement(root: Path, inventory: str) -> Placement:
    """The placement file of an inventory; empty where there is none.

    Raises :class:`SpecError` where it cannot be used: guessing could move cards.
    """
    name = path_of(inventory)

    def bad(text: str, line: int = 0) -> SpecError:
        return SpecError([Complaint(name, line, 1 if line else 0, "", text)])

    try:
        text = (root / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return Placement(name)
    except (OSError, UnicodeDecodeError) as error:
        raise bad(f"cannot be read: {error}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 0
        raise bad("is no YAML; restore it from version control", line) from None
    lines: dict[Key, Placed] = {}
    if not isinstance(data, dict | None):
        raise bad("must hold hosts and their instances; restore it from version control")
    for host, instances in (data or {}).items():
        for instance, value in (instances if isinstance(instances, dict) else {"": None}).items():
            placed = _placed(value)
            if placed is None:
                raise bad(
                    f"{host}: {instance}: must be {{asked: COUNT x KIND, cards: [...], "
                    "uuids: [...]}; restore it from version control, or delete the line to "
                    "have the cards chosen anew"
                )
            lines[str(host), str(instance)] = placed
    return Placement(name, lines)


def _placed(value: Any) -> Placed | None:
    if not isinstance(value, dict):
        return None
    asked, cards, uuids = value.get("asked"), value.get("cards"), value.get("uuids", [])
    if not isinstance(asked, str) or not isinstance(cards, list) or not isinstance(uuids, list):
        return None
    if not cards or not all(type(c) is int and c >= 0 for c in cards):
        return None
    return Placed(asked, tuple(cards), tuple(map(str, uuids)))


def text_of(lines: Mapping[Key, Placed]) -> str:
    """The file's text; the same for the same lines in any order."""
    out = [HEAD]
    for host in sorted({host for host, _ in lines}):
        out.append(f"{_scalar(host)}:\n")
        for (_, instance), one in sorted((k, v) for k, v in lines.items() if k[0] == host):
            uuids = ", ".join(map(_scalar, one.uuids))
            cards = ", ".join(map(str, one.cards))
            out.append(
                f"  {_scalar(instance)}: {{asked: {_scalar(one.asked)}, cards: [{cards}], "
                f"uuids: [{uuids}]}}\n"
            )
    return "".join(out)


def _scalar(text: str) -> str:
    """A text as one YAML scalar on one line."""
    dumped: str = yaml.safe_dump(text, width=10**6, default_flow_style=True, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...").strip()


def write_placement(root: Path, path: str, lines: Mapping[Key, Placed]) -> None:
    """Put the file in place at once, so that it is never half written. Raises OSError."""
    target = root / path
    target.parent.mkdir(exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text_of(lines))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def decide(
    spec: HostSpec,
    placement: Placement,
    found: Groups | None,
    uuids: Mapping[int, str],
) -> Decided:
    """The cards of every instance of a host that names a count and kind.

    ``found``: the host's groups, None where the host gave no facts; then only what is written
    holds. ``uuids``: of every card that the host lists, also of those left out of the groups.
    """
    lines: dict[str, Placed] = {}
    new: set[str] = set()
    reasons: list[str] = []
    notices: list[str] = []
    taken: dict[int, str] = {}
    waiting: list[tuple[str, str, Placed | None]] = []
    for one in spec.instances:
        if not isinstance(one.cards, str):
            taken.update(dict.fromkeys(one.cards, one.name))
    for one in spec.instances:
        if not isinstance(one.cards, str):
            continue
        written = placement.lines.get((spec.name, one.name))
        if written is None or _plain(written.asked) != _plain(one.cards):
            waiting.append((one.name, one.cards, written))
            continue
        clash = {c: taken[c] for c in written.cards if c in taken}
        if clash:
            card, other = next(iter(clash.items()))
            reasons.append(
                f"{placement.path}: {spec.name}: {one.name}: card {card} is taken by instance "
                f"{other}: delete this line to have cards chosen anew, or change {other}"
            )
            continue
        lines[one.name] = written
        taken.update(dict.fromkeys(written.cards, one.name))
        if found is not None:
            reasons += _moved(spec, one.name, written, uuids, placement.path)
    if found is not None:
        for name, asked, old in waiting:
            try:
                group = _keep_or_resolve(asked, old, found, taken)
            except CardsError as error:
                reasons.append(f"{spec.name}: instance {name}: cards {asked!r}: {error}")
                continue
            lines[name] = Placed(asked, group.gpus, tuple(uuids.get(i, "") for i in group.gpus))
            new.add(name)
            taken.update(dict.fromkeys(group.gpus, name))
            if old is not None:
                notices.append(
                    f"instance {name}: `cards` was changed from {old.asked!r} to {asked!r}: "
                    f"cards {_some(old.cards)} become {_some(group.gpus)}"
                )
    return Decided(lines, frozenset(new), tuple(reasons), tuple(notices))


def _keep_or_resolve(
    asked: str, old: Placed | None, found: Groups, taken: Collection[int]
) -> Group:
    """Cards for a request; the present ones are free for it, and kept where they still do."""
    if old is not None:
        outside = [c.index for c in found.cards if c.index not in old.cards]
        try:
            return resolve(asked, found, {*taken, *outside})
        except CardsError:
            pass
    return resolve(asked, found, taken)


def _moved(
    spec: HostSpec, name: str, written: Placed, uuids: Mapping[int, str], path: str
) -> list[str]:
    """Cards whose index now stands for another card, or for none."""
    reasons = []
    for card, uuid in zip(written.cards, written.uuids, strict=False):
        now = uuids.get(card)
        if now is None or not uuid or now == uuid:
            continue  # a missing one is told by the exam
        elsewhere = next((i for i, u in uuids.items() if u == uuid), None)
        where = f"is now card {elsewhere}" if elsewhere is not None else "is gone"
        reasons.append(
            f"{spec.name}: instance {name} was given card {card} ({uuid}), which {where}; "
            f"{card} is now {now}: cards were lost, replaced or moved; put them back, or delete "
            f"the line of {name} in {path} to have cards chosen anew"
        )
    return reasons


def stale(placement: Placement, hosts: Collection[HostSpec]) -> list[str]:
    """Lines that no instance of group_vars uses; they hold no card."""
    used = {
        (spec.name, one.name)
        for spec in hosts
        for one in spec.instances
        if isinstance(one.cards, str)
    }
    return [
        f"{placement.path}: {host}: {instance}: no instance uses this line any more (cards "
        f"{_some(one.cards)} are free): delete it"
        for (host, instance), one in sorted(placement.lines.items())
        if (host, instance) not in used
    ]


def _plain(asked: str) -> str:
    return " ".join(asked.lower().split())


def _some(cards: Collection[int]) -> str:
    return ", ".join(map(str, cards))
