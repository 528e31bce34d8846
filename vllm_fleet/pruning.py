"""Which releases and revisions a host keeps no longer. Pure.

Only candidates are named here; :mod:`vllm_fleet.onhost.prune` removes those that are ours and
that nobody uses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from vllm_fleet import paths
from vllm_fleet.spec.model import HostSettings
from vllm_fleet.state import HostState


def order(
    settings: HostSettings, state: HostState, releases: Collection[str], weights: Collection[str]
) -> dict[str, list[str]]:
    """What onhost/prune.py is told; empty where everything is kept.

    ``releases``: ids that are wanted; ``weights``: directories that are wanted.
    """
    found = {
        "releases": _old_releases(settings.keep_releases, state, releases),
        "weights": _old_revisions(settings.keep_revisions, state, weights),
    }
    return found if any(found.values()) else {}


def _old_releases(keep: int | None, state: HostState, wanted: Collection[str]) -> list[str]:
    if keep is None:
        return []
    used = {str(one.get("release") or "") for one in state.instances.values()}
    # What served well before is what rollback.py goes back to, without a download.
    used |= {
        str(good.get("release") or "")
        for record in state.rollout.values()
        for good in (*(record.get("goods") or ()), record.get("next") or {})
    }
    old = {
        name: stamp
        for name, stamp in state.releases.items()
        if name not in wanted and name not in used
    }
    return _beyond(keep, old, "built_at")


def _old_revisions(keep: int | None, state: HostState, wanted: Collection[str]) -> list[str]:
    """Of the models that are served alone: what left the plan may come back to it."""
    if keep is None:
        return []
    found: list[str] = []
    for model in sorted({str(PurePosixPath(path).parent) for path in wanted}):
        if str(PurePosixPath(model).parent) != paths.MODELS:
            continue  # an operator's own directory
        old = {
            directory: stamp
            for path, stamp in state.weights.items()
            if (directory := str(PurePosixPath(path).parent)) not in wanted
            and str(PurePosixPath(directory).parent) == model
        }
        found += _beyond(keep, old, "verified_at")
    return found


def _beyond(keep: int, old: Mapping[str, Mapping[str, Any]], time: str) -> list[str]:
    """All but the newest, oldest last named first; one without a time counts as oldest."""
    newest_first = sorted(old, key=lambda name: (str(old[name].get(time) or ""), name))[::-1]
    return sorted(newest_first[keep:])
