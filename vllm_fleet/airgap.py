"""Hosts without internet: everything comes from one host's bundle. Pure.

A bundle is made by ``fleet bundle`` on a connected machine (:mod:`vllm_fleet.bundle`), carried
to one host, verified there and served to the fleet's addresses by
:mod:`vllm_fleet.onhost.bundle`. Here every host's package index, model hub and apt are pointed to
it, and what the bundle must hold is told.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from vllm_fleet import paths, release, weights
from vllm_fleet.files import ManagedFile
from vllm_fleet.render import render
from vllm_fleet.spec.model import (
    Fleet,
    HostSettings,
    HostSpec,
    Hub,
    Model,
    PackageIndex,
    Proxy,
    PythonArchive,
)
from vllm_fleet.weights import Listing

ROOT = f"{paths.OPT}/bundle"
SETTINGS = f"{paths.ETC}/bundle.json"
SOURCES = f"{paths.ETC}/bundle.list"  # of apt
APT_STATE = f"{paths.STATE}/apt"
UNIT = "vllm-fleet-bundle.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
SCRIPTS = ("tools.py", "bundle.py")  # what it needs of paths.LIB

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def pointed(fleet: Fleet) -> Fleet:
    """The fleet with every host that is `air_gapped` pointed to its bundle, and nowhere else.

    Addresses must have been looked up before.
    """
    known = {host.name: host.address for host in fleet.hosts}
    hosts = [
        host.model_copy(update={"settings": _pointed(host.settings, known)}) for host in fleet.hosts
    ]
    return fleet.model_copy(update={"hosts": tuple(hosts)})


def _pointed(settings: HostSettings, known: Mapping[str, str]) -> HostSettings:
    gap = settings.air_gapped
    if gap is None:
        return settings
    url = address_of(known[gap.host], gap.port)
    archive = settings.python_archive
    if archive is not None:
        archive = archive.model_copy(update={"source": f"{url}/{archive_name(archive)}"})
    return settings.model_copy(
        update={
            "python_archive": archive,
            "package_index": PackageIndex(index_url=f"{url}/simple/"),
            "hub": Hub(endpoint=url, huggingface_endpoint=url, limit_mib=settings.hub.limit_mib),
            "proxy": Proxy(),
        }
    )


def address_of(address: str, port: int) -> str:
    """URL of a bundle."""
    shown = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    return f"http://{shown}:{port}"


def archive_name(archive: PythonArchive) -> str:
    """Name of a Python's archive in a bundle."""
    return f"python/{archive.version}-{archive.sha256[:16]}.tar"


def system_of(os: Mapping[str, str], machine: str) -> str:
    """Name of a system in a bundle: ``debian-12-amd64``."""
    return f"{os['id']}-{os['version']}-{ARCHITECTURES.get(machine, machine)}"


def packages_lock(system: str) -> str:
    """Where the checksum of a system's list of packages is, beside group_vars."""
    return f"locks/apt-{system}.txt"


def packages_text(system: str, checksum: str) -> str:
    """What stands there."""
    return (
        f"# Debian packages of the bundle for {system}: sha256 of their list, which has those of "
        f"the packages.\n# Made by `fleet bundle`; commit it.\n{checksum}\n"
    )


def sources(spec: HostSpec, system: str) -> list[ManagedFile]:
    """apt's only source on a host without internet, used by our own runs of apt alone."""
    gap = spec.settings.air_gapped
    index = spec.settings.package_index.index_url
    if gap is None or index is None:
        return []
    url = index.removesuffix("/simple/")
    # Its own mark of trust: apt's list is compared with the checksum beside group_vars.
    return [
        ManagedFile(SOURCES, f"# {paths.MARK}\ndeb [trusted=yes] {url}/apt/{system}/ ./\n"),
    ]


def serves(spec: HostSpec) -> bool:
    """Whether a host is the one with the bundle."""
    return spec.settings.air_gapped is not None and spec.settings.air_gapped.host == spec.name


def files(spec: HostSpec, addresses: Iterable[str]) -> list[ManagedFile]:
    """What serves the bundle on its host: scripts, whom it answers, the unit."""
    gap = spec.settings.air_gapped
    assert gap is not None, "called for the host of a bundle alone"
    settings = {
        "root": ROOT,
        "address": spec.address,
        "port": gap.port,
        "allow": sorted(set(addresses)),
    }
    scripts = resources.files("vllm_fleet.onhost")
    unit = render(
        "bundle/bundle.service.j2", mark=paths.MARK, lib=paths.LIB, root=ROOT, settings=SETTINGS
    )
    return [
        *(
            ManagedFile(
                f"{paths.LIB}/{name}",
                f"# {paths.MARK}\n{scripts.joinpath(name).read_text(encoding='utf-8')}",
            )
            for name in SCRIPTS
        ),
        ManagedFile(SETTINGS, json.dumps(settings, indent=1) + "\n"),
        ManagedFile(UNIT_FILE, unit),
    ]


def tools_key(lock: str, python: str) -> tuple[str, str]:
    """(what a bundle calls the wheels of our own tools for a Python, in words)."""
    short = ".".join(python.split(".")[:2])
    return f"{release.lock_sha256(lock)}/{short}", f"of the tools for Python {short}"


def listing_key(model: Model, listing: Listing) -> str:
    """What a bundle calls the weights of a frozen listing: two models may hold equal files."""
    revision = weights.revision_of(model)
    return f"{model.source}:{model.repo}@{revision}:{listing.digest}"


def held(
    stamp: Mapping[str, Any], source: str, needs: Mapping[str, Mapping[str, Iterable[str]]]
) -> bool:
    """Whether the bundle that a host has, by its stamp, is the wanted one and holds all."""
    if stamp.get("source") != source:
        return False
    for kind in ("locks", "listings", "archives", "packages"):
        if not set(needs[kind]) <= set(stamp.get(kind) or ()):
            return False
    systems = stamp.get("systems") or {}
    return all(
        set(packages) <= set(systems.get(system, ()))
        for system, packages in needs["systems"].items()
    )
