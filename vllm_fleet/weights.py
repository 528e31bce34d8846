"""Weights, as plain data: which directory a model's weights are in, and what to fetch. Pure.

The work is done on the host by :mod:`vllm_fleet.onhost.weights`, which takes what
:func:`order` returns, as JSON.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm_fleet import paths
from vllm_fleet.onhost import weights as checks
from vllm_fleet.onhost.hub import Entry
from vllm_fleet.spec.model import HostSettings, Model, Source

STAMP = ".verified.json"  # in a verified directory: what was checked, file by file
STAMPS = f"{paths.STATE}/weights"  # stamps of directories that are not ours to write


@dataclass(frozen=True)
class Weights:
    """The weights one model wants on a host."""

    name: str
    source: Source
    repo: str
    revision: str
    directory: str  # what vLLM is given
    stamp: str  # file that says the directory is complete and verified
    needs_tokenizer: bool
    needs_chat_template: bool

    @property
    def identity(self) -> dict[str, str]:
        """What a stamp must say for these weights to be the wanted ones."""
        return {"source": self.source, "repo": self.repo, "revision": self.revision}


@dataclass(frozen=True)
class Listing:
    """A frozen listing: where it is, and its files."""

    path: str  # relative to the directory of group_vars
    files: tuple[dict[str, Any], ...]

    @property
    def digest(self) -> str:
        """One checksum over it; stands in the stamp of weights that are of it."""
        return checks.digest(
            Entry(f["path"], f["size"], f.get("sha256", ""), f.get("git", "")) for f in self.files
        )


def wanted(name: str, model: Model) -> Weights:
    """What a model of this name wants.

    A chat template is needed for task `chat`, unless `vllm_args` brings one; a tokenizer
    always, unless `vllm_args` names another or does without.
    """
    ours = model.source != "path"
    revision = revision_of(model)
    directory = f"{paths.MODELS}/{name}/{path_safe(revision)}" if ours else model.repo
    given = {key.lstrip("-").replace("_", "-") for key in model.vllm_args}
    own_tokenizer = not given & {"tokenizer", "skip-tokenizer-init"}
    return Weights(
        name=name,
        source=model.source,
        repo=model.repo,
        revision=revision if ours else "",
        directory=directory.rstrip("/") or "/",
        stamp=f"{directory}/{STAMP}" if ours else f"{STAMPS}/{name}.json",
        needs_tokenizer=own_tokenizer,
        needs_chat_template=model.task == "chat" and own_tokenizer and "chat-template" not in given,
    )


def revision_of(model: Model) -> str:
    """The revision as the hub names it: ModelScope's usual branch is `main` at Hugging Face."""
    if model.source == "huggingface" and model.revision == "master":
        return "main"
    return model.revision


def hub_of(model: Model, settings: HostSettings) -> tuple[str | None, str | None]:
    """(address, token file on the operator's machine) of a model's hub; None: as usual, none."""
    hub = settings.hub
    if model.source == "huggingface":
        return hub.huggingface_endpoint, hub.huggingface_token_file
    return hub.endpoint, hub.token_file


@lru_cache(maxsize=4096)
def path_safe(revision: str) -> str:
    """One directory name for a revision; two revisions never share one.

    Tags and commits stay as they are; `refs/pr/1` becomes `refs-pr-1-` and eight hex digits.
    """
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", revision):
        return revision
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", revision).strip("-.")[:80] or "revision"
    return f"{plain}-{hashlib.sha256(revision.encode()).hexdigest()[:8]}"


def verified(
    stamp: Mapping[str, object] | None, weights: Weights, listing: str | None = None
) -> bool:
    """Whether a stamp, as `weights.py status` prints it, is of these weights and stands.

    `changed` names the files that no longer are what the stamp says. ``listing``: checksum of
    the frozen listing that they must be of; None where there is none.
    """
    if stamp is None or any(stamp.get(key) != value for key, value in weights.identity.items()):
        return False
    passed = stamp.get("passed")
    if stamp.get("changed"):
        return False
    if listing is not None and stamp.get("listing") != listing:
        return False
    return isinstance(passed, list) and set(needs(weights)) <= set(passed)


def needs(weights: Weights) -> tuple[str, ...]:
    """The checks beyond the files themselves that these weights must have passed."""
    return tuple(
        check
        for check, on in (
            ("tokenizer", weights.needs_tokenizer),
            ("chat_template", weights.needs_chat_template),
        )
        if on
    )


def order(
    name: str, model: Model, settings: HostSettings, listing: Listing | None = None
) -> dict[str, object]:
    """What onhost/weights.py is told to have ready, as JSON values.

    `token_file` is left out: whoever puts the token on the host adds its path there.
    """
    weights = wanted(name, model)
    return {
        "name": name,
        **weights.identity,
        "directory": weights.directory,
        "stamp": weights.stamp,
        "needs": list(needs(weights)),
        "trust_remote_code": model.trust_remote_code,
        "endpoint": hub_of(model, settings)[0],
        "proxy": settings.proxy.model_dump(mode="json"),
        "state": STAMPS,
        **({"limit": settings.hub.limit_mib << 20} if settings.hub.limit_mib else {}),
        **({"listing": list(listing.files), "listing_file": listing.path} if listing else {}),
    }
