"""What a host is to have, and in what it differs from what it has. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vllm_fleet import instance as vllm
from vllm_fleet import paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.placement import Key, Placed
from vllm_fleet.planned import PlannedInstance
from vllm_fleet.spec.model import HostSpec
from vllm_fleet.state import HostState


@dataclass(frozen=True)
class Service:
    """A daemon around vLLM, and the checksums of what it must have read.

    ``restarts`` covers files that only a restart makes it read (a drop-in with flags),
    ``reloads`` those that a reload does. Where ``restarts`` is empty it is never restarted.
    """

    unit: str
    restarts: str
    reloads: str
    reload: tuple[str, ...]  # command

    def due(self, state: HostState) -> str:
        """The command that has it run, enabled, with its present files; "" where it does.

        Whether it must read its files again is decided from the checksum it last read, never
        from "a file changed in this run": a run that died in between is made good by the next.
        """
        read = state.loaded.get(self.unit, "").partition(":")
        commands = []
        if not state.enabled(self.unit):
            commands.append(f"systemctl enable -q {self.unit}")
        if not state.active(self.unit) or (self.restarts and read[0] != self.restarts):
            commands.append(f"systemctl restart {self.unit}")
        elif read[2] != self.reloads:
            commands.append(shlex.join(self.reload))
        if commands:
            stamp = f"{paths.STATE}/loaded/{self.unit}"
            commands.append(f"printf %s {self.restarts}:{self.reloads} > {stamp}")
        return " && ".join(commands)


@dataclass(frozen=True)
class ReleaseBuild:
    """A release to have on a host: its id, and what onhost/release.py is told."""

    id: str
    order: dict[str, object]


@dataclass(frozen=True)
class ToolsBuild:
    """The small venv of ours: its id, and what onhost/tools.py is told."""

    id: str
    order: dict[str, object]


@dataclass(frozen=True)
class WeightsFetch:
    """Weights to have on a host: whether they are there, and what onhost/weights.py is told."""

    name: str
    present: bool
    order: dict[str, object]
    serves: bool = False  # they are there, and other hosts get them from here


@dataclass(frozen=True)
class Kept:
    """Why an instance is left as it is by deploy.py, and whether it may be started so."""

    release: str  # what it runs, or ran last
    why: str
    startable: bool


@dataclass(frozen=True)
class BundleTake:
    """A bundle to have on the host that serves it, and what onhost/bundle.py is told."""

    held: bool
    order: dict[str, object]


@dataclass(frozen=True)
class AcmeFetch:
    """A certificate to have from an authority: certbot's words, and what they are asked for."""

    command: tuple[str, ...]
    environment: dict[str, str]
    checksum: str

    name = "acme"  # of the stamp that holds the checksum of the certificate that is there


@dataclass(frozen=True)
class HostPlan:
    """The wanted state of one host, and what differs from it.

    ``instances`` are as they are after deploy.py: one that is ``kept`` has the release that it
    runs. ``wanted`` are as group_vars want them; upgrade.py takes a kept one there.
    """

    spec: HostSpec
    state: HostState
    packages: tuple[str, ...] = ()
    tools: ToolsBuild | None = None
    files: tuple[ManagedFile, ...] = ()
    releases: tuple[ReleaseBuild, ...] = ()
    weights: tuple[WeightsFetch, ...] = ()
    instances: tuple[PlannedInstance, ...] = ()
    wanted: tuple[PlannedInstance, ...] = ()
    checksums: dict[str, str] = field(default_factory=dict)  # of the wanted ones, by instance
    # By instance: the files that start the wanted one. They are in `files` where deploy.py puts
    # them at once; else they go in place while the instance is stopped, by the rollout.
    instance_files: Mapping[str, tuple[ManagedFile, ...]] = field(default_factory=dict)
    kept: Mapping[str, Kept] = field(default_factory=dict)
    rolled: frozenset[str] = frozenset()  # ranks of spans that only a rollout may start
    bundle: BundleTake | None = None
    apt_list: str = ""  # sha256 of the bundle's list of Debian packages
    bundle_services: tuple[Service, ...] = ()
    firewall_services: tuple[Service, ...] = ()
    acme: AcmeFetch | None = None
    gateway_services: tuple[Service, ...] = ()
    monitoring_services: tuple[Service, ...] = ()
    retired: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    new_lines: Mapping[Key, Placed] = field(default_factory=dict)  # of the placement file
    # By instance that is the only one of its pool: free cards like its own.
    spares: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prune: Mapping[str, list[str]] = field(default_factory=dict)  # what onhost/prune.py is told

    @property
    def missing_packages(self) -> tuple[str, ...]:
        """Debian packages to install."""
        return tuple(p for p in self.packages if p not in self.state.packages)

    @property
    def changed_files(self) -> tuple[ManagedFile, ...]:
        """Files whose content, mode or owner differs."""
        return tuple(
            f
            for f in self.files
            if self.state.files.get(f.path) != [f.sha256, oct(f.mode), f.owner, f.group]
        )

    @property
    def removed_files(self) -> tuple[str, ...]:
        """Files that we put once and that are no longer wanted."""
        wanted = {f.path for f in self.files}
        for name, files in self.instance_files.items():
            if not wanted.issuperset(f.path for f in files):
                wanted.update(vllm.paths_of(name))  # its rollout's business
        return tuple(sorted(path for path in self.state.manifest if path not in wanted))

    @property
    def missing_certificate(self) -> AcmeFetch | None:
        """The certificate to fetch; None where it is there, or none is wanted."""
        if self.acme and self.state.loaded.get(self.acme.name) != self.acme.checksum:
            return self.acme
        return None

    @property
    def missing_releases(self) -> tuple[ReleaseBuild, ...]:
        """Releases to build."""
        return tuple(r for r in self.releases if r.id not in self.state.releases)

    @property
    def missing_tools(self) -> ToolsBuild | None:
        """The tools venv to build; None where it is there, or none is wanted."""
        return self.tools if self.tools and self.state.tools != self.tools.id else None

    @property
    def wanted_weights(self) -> tuple[WeightsFetch, ...]:
        """Weights to fetch or to check, or that other hosts get from here."""
        return tuple(one for one in self.weights if not one.present or one.serves)

    def due(self, services: Sequence[Service]) -> list[str]:
        """What brings daemons to their present files, a command each; none where all is well."""
        return [command for one in services if (command := one.due(self.state))]

    @cached_property
    def as_wanted(self) -> bool:
        """Whether nothing at all is to be done on this host, now or by a rollout."""
        services = (
            *self.bundle_services,
            *self.firewall_services,
            *self.gateway_services,
            *self.monitoring_services,
        )
        return not (
            self.missing_packages
            or self.changed_files
            or self.removed_files
            or (self.bundle and not self.bundle.held)
            or self.missing_certificate
            or self.missing_tools
            or self.missing_releases
            or self.wanted_weights
            or self.retired
            or self.prune
            or self.kept
            or self.new_lines
            or self.to_start()
            or self.to_restart()
            or self.due(services)
        )

    def to_start(self) -> tuple[PlannedInstance, ...]:
        """Instances that do not run: nobody is served by them, so they start at once.

        Ranks of a span that has some with other settings are replaced together instead.
        """
        return tuple(
            i
            for i in self.instances
            if (
                self.state.units.get(i.unit, {}).get("ActiveState") != "active"
                or not self.state.enabled(i.unit)
            )
            and (i.name not in self.kept or self.kept[i.name].startable)
            and i.name not in self.rolled
            and i.name not in self.state.adopted  # the rollout's business
        )

    def to_restart(self) -> tuple[PlannedInstance, ...]:
        """Instances that run with something else than the plan says."""
        starting = self.to_start()
        return tuple(
            i
            for i in self.instances
            if i not in starting
            and i.name not in self.kept
            and self.state.started_with(i.name) != self.checksums[i.name]
        )
