"""What the doctor goes by, and what it says: the case of a fleet, findings, their remedies."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from vllm_fleet.doctor.entries import Area, Entry, Level, known
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import plans_of
from vllm_fleet.spec.inputs import Inputs
from vllm_fleet.spec.model import Fleet, HostSpec
from vllm_fleet.state import HostState
from vllm_fleet.survey import HostView, survey

Json = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``text`` says what, ``evidence`` where that is seen."""

    id: str
    host: str
    text: str
    evidence: str = ""
    remedy: tuple[str, ...] = ()  # commands, run on the operator's machine in this order
    note: str = ""  # what to do where no command does it, or before it
    instance: str = ""
    level: Level | None = None  # where it is not the entry's

    @property
    def entry(self) -> Entry:
        """The entry of the runbook that it leads to."""
        return known()[self.id]

    @property
    def severity(self) -> Level:
        """How bad it is here."""
        return self.level or self.entry.level

    @property
    def area(self) -> Area:
        """The line of the checklist that it belongs to."""
        return self.entry.area

    @property
    def where(self) -> str:
        """Host, or host and instance."""
        return f"{self.host}/{self.instance}" if self.instance else self.host


@dataclass(frozen=True)
class Case:
    """A fleet as it is written, and as its hosts said they are."""

    inventory: str  # as the operator wrote it: for commands
    fleet: Fleet
    inputs: Inputs
    states: Mapping[str, HostState]
    answers: Mapping[str, Json] = field(default_factory=dict)  # of onhost/doctor.py, by host
    failures: Mapping[str, str] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    asked_at: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    deep: bool = False
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @cached_property
    def views(self) -> dict[str, HostView]:
        """What the hosts are, and the exam's verdicts."""
        return survey(self.fleet, self.states, self.inputs)

    @cached_property
    def planned(self) -> tuple[dict[str, HostPlan], list[str]]:
        """Plans of the hosts, also where a deploy would be refused; and why others have none."""
        return plans_of(self.fleet, self.states, self.inputs, self.views)

    @property
    def looked_at(self) -> list[tuple[HostSpec, HostState]]:
        """The hosts that gave a state, in declared order."""
        return [(s, self.states[s.name]) for s in self.fleet.hosts if s.name in self.states]

    def answer(self, host: str) -> Json:
        """What a host said to the doctor's own questions; {} where it said nothing."""
        return dict(self.answers.get(host) or {})

    def deploy(self, host: str) -> str:
        """The command that brings one host to the plan."""
        return f"pyinfra {shlex.quote(self.inventory)} deploy.py --limit {shlex.quote(host)}"

    def ssh(self, host: str, command: str) -> str:
        """A command on a host."""
        return f"ssh {shlex.quote(host)} {shlex.quote(command)}"
