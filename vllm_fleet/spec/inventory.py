"""A pyinfra inventory file read offline, by pyinfra's own rules and without pyinfra.

pyinfra runs the file and takes every module-level list, and every tuple of a list and a dict,
whose name has no leading ``_`` for a group of hosts. Constants are traps there: ``PORTS = (1, 2)``
ends the run with a traceback and ``OPTS = ["-o"]`` becomes a host named ``-o``. Here they are
complaints.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
import traceback
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_fleet.spec.complaints import Complaint
from vllm_fleet.spec.words import nearest

GROUPS = ("gpu", "gateway", "monitoring")  # the groups that deploy.py knows
_HOST = re.compile(r"^(@[a-z]+(/\S+)?|[A-Za-z0-9_\[:][^\s=,;'\"]*)$")
_EXPANDING = ("@terraform", "@vagrant")  # pyinfra asks a program which hosts these are


@dataclass
class InventoryHost:
    """One host: its groups in declared order, and the data beside its name in the inventory."""

    name: str
    groups: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def default_address(self) -> str:
        """Where other hosts reach it, if no setting says otherwise."""
        if self.name == "@local":
            return "127.0.0.1"
        name = self.name.split("/", 1)[1] if self.name.startswith("@") else self.name
        return str(self.data.get("ssh_hostname") or name)


@dataclass
class InventoryFile:
    """What an inventory file declares. ``file`` is its name in complaints."""

    file: str
    stem: str  # also the group of all its hosts
    hosts: dict[str, InventoryHost]
    groups: dict[str, list[str]]  # host names by group, both in declared order
    group_data: dict[str, dict[str, Any]]
    complaints: list[Complaint]
    source: str = ""

    def place(self, *names: str) -> tuple[int, int]:
        """Line and column (from 1) of the first text equal to the last name.

        Earlier names narrow the search: a key of a host's data is looked for after the host.
        Hosts and data may come from loops or files: (1, 1) then.
        """
        start, found = (0, 0), (1, 1)
        for name in names:
            places = [p for p, text in self._texts if text == name and p > start]
            if not places:
                return found
            found = start = min(places)
        return found

    def variable(self, name: str) -> tuple[int, int]:
        """Line and column of the assignment of a module-level name."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
                return node.lineno, node.col_offset + 1
        return 1, 1

    @cached_property
    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self.source)
        except (SyntaxError, ValueError):
            return ast.Module([], [])

    @cached_property
    def _texts(self) -> list[tuple[tuple[int, int], str]]:
        return [
            ((node.lineno, node.col_offset + 1), node.value)
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]


def read_inventory(path: str, file: str) -> InventoryFile:
    """Run an inventory file and read its hosts and groups; ``file`` is its name in complaints."""
    stem = Path(path).name.rsplit(".", 1)[0]
    found = InventoryFile(file, stem, {}, {}, {}, [])
    try:
        found.source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        found.complaints.append(Complaint(file, 0, 0, "", f"cannot be read: {reason}"))
        return found
    names = _run(found, path)
    if names is None:
        return found
    groups = {
        name: group
        for name, value in names.items()
        if not name.startswith("_") and (group := _group(found, name, value)) is not None
    }
    if not found.complaints:
        _assemble(found, groups)
    return found


def _run(found: InventoryFile, path: str) -> dict[str, Any] | None:
    """The names that the file defines, in order; None and a complaint where it fails."""
    names: dict[str, Any] = {"__file__": path}
    searched = list(sys.path)
    sys.path.append(os.getcwd())  # as pyinfra does
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the caller's
            exec(compile(found.source, path, "exec"), names)
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        complaint = Complaint(found.file, line, column, "", f"not Python: {error.msg}")
        found.complaints.append(complaint)
        return None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == path), 1) or 1
        text = f"stopped with {type(error).__name__}: {error}"
        found.complaints.append(Complaint(found.file, line, 1, "", text))
        return None
    finally:
        sys.path[:] = searched
    return names


def _group(found: InventoryFile, name: str, value: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """A module-level value as (hosts, data); None where it is no group or a complaint."""
    line, column = found.variable(name)

    def refuse(text: str) -> None:
        found.complaints.append(Complaint(found.file, line, column, name, text))

    if not isinstance(value, (list, tuple)):
        if name in (*GROUPS, "all"):
            refuse(f"must be a list of hosts, or (list, data), not {_kind(value)}")
        return None
    if name.isupper():
        refuse(
            "pyinfra takes every list and tuple of an inventory for a group of hosts; "
            f"rename the constant _{name}, or write a group in small letters"
        )
        return None
    hosts, data = (value, {}) if isinstance(value, list) else _pair(value)
    if not isinstance(hosts, list) or not isinstance(data, dict):
        refuse(
            "must be a list of hosts, or (list, data): pyinfra reads a tuple as hosts and their "
            f"data; write [...], or rename it _{name} if it is no group"
        )
        return None
    good = True
    for host in hosts:
        host_name, host_data = (host, {}) if isinstance(host, str) else _pair(host)
        if not isinstance(host_name, str) or not isinstance(host_data, dict):
            refuse(f'a host must be "name" or ("name", {{data}}), not {_kind(host)}')
            good = False
        elif not _HOST.match(host_name):
            refuse(
                f'"{host_name}" cannot be a host; pyinfra takes every list for a group of hosts: '
                f"rename it _{name} if it is none"
            )
            good = False
        elif host_name.startswith(_EXPANDING):
            refuse(f'"{host_name}" stands for hosts that only a program knows; name the hosts')
            good = False
    return (hosts, data) if good else None


def _pair(value: Any) -> tuple[Any, Any]:
    """A tuple of two as it is; anything else as something that is refused."""
    return value if isinstance(value, tuple) and len(value) == 2 else (None, None)


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"


def _assemble(found: InventoryFile, groups: dict[str, tuple[list[Any], dict[str, Any]]]) -> None:
    """Hosts in pyinfra's order, their groups, and their data as pyinfra would merge it."""
    declared, all_data = groups.pop("all", (None, {}))
    members = {name: [_named(host) for host in hosts] for name, (hosts, _) in groups.items()}
    if declared is None:
        order = list(dict.fromkeys(n for hosts in members.values() for n, _ in hosts))
    else:
        order = list(dict.fromkeys(n for n, _ in map(_named, declared)))
    found.hosts = {name: InventoryHost(name) for name in order}
    members.setdefault(found.stem, [(name, {}) for name in order])
    for group, hosts in members.items():
        found.groups[group] = list(dict.fromkeys(name for name, _ in hosts if name in found.hosts))
        for name, data in hosts:
            if name not in found.hosts:
                line, column = found.place(name)
                text = f'has "{name}", which `all` has not: pyinfra would leave it out'
                found.complaints.append(Complaint(found.file, line, column, group, text))
                continue
            found.hosts[name].data.update(data)
            if group not in found.hosts[name].groups:
                found.hosts[name].groups.append(group)
    for name, data in map(_named, declared or []):
        found.hosts[name].data.update(data)
    found.group_data = {name: data for name, (_, data) in groups.items() if data}
    if all_data:
        found.group_data["all"] = all_data
    _spelling(found)
    if not found.hosts:
        found.complaints.append(Complaint(found.file, 1, 1, "", "names no host"))


def _named(host: Any) -> tuple[str, dict[str, Any]]:
    return host if isinstance(host, tuple) else (host, {})


def _spelling(found: InventoryFile) -> None:
    """A group named almost like one of ours, whose hosts would get nothing."""
    free = [group for group in GROUPS if group not in found.groups]
    for group, hosts in found.groups.items():
        near = nearest(group, free)
        lost = all(not set(GROUPS) & set(found.hosts[host].groups) for host in hosts)
        if near and lost and hosts and group not in (*GROUPS, found.stem):
            line, column = found.variable(group)
            text = f'deploy.py knows no group of this name; did you mean "{near}"?'
            found.complaints.append(Complaint(found.file, line, column, group, text))
