"""config.json of models, fetched from their hub to beside group_vars.

With it a model is sized, its settings chosen and its architecture checked before any weights
are downloaded. Reads from the hub, writes on the operator's machine alone.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from vllm_fleet import listings, weights
from vllm_fleet.listings import MODELSCOPE as ENDPOINT
from vllm_fleet.onhost.hub import HUGGINGFACE
from vllm_fleet.sizing import SizingError
from vllm_fleet.spec.inputs import Inputs, config_path
from vllm_fleet.spec.model import Fleet, HostSettings, Model
from vllm_fleet.state import HostState
from vllm_fleet.survey import config_of, merged_config, stamps_of

SECONDS = 30
LARGEST = 4 * 2**20


class FetchError(Exception):
    """A config.json cannot be had; the message names what, where and the remedy."""


def complete(
    fleet: Fleet, states: Mapping[str, HostState], inputs: Inputs
) -> tuple[list[str], list[str]]:
    """Write every config.json that is not there yet: (paths written, what failed).

    Taken from the weights on a host where they are, else from the hub.
    """
    written: list[str] = []
    failed: list[str] = []
    root = Path(fleet.root)
    stamps = stamps_of(states)
    for spec in fleet.group("gpu"):
        for one in spec.instances:
            model = spec.settings.models[one.model]
            path = config_path(one.model, model)
            if path in inputs.configs:
                continue
            try:
                config, _ = config_of(spec, one, stamps, inputs)
                if config is None:
                    config = fetch(one.model, model, spec.settings, root)
                text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
                _write(root / path, text)
            except (FetchError, SizingError, OSError) as error:
                if str(error) not in failed:
                    failed.append(str(error))
            else:
                inputs.configs[path] = config
                written.append(path)
    return written, failed


def freeze(fleet: Fleet, inputs: Inputs) -> tuple[list[str], list[str]]:
    """Write the listing of every model that has none yet: (paths written, what failed)."""
    written: list[str] = []
    failed: list[str] = []
    root = Path(fleet.root)
    for spec in fleet.group("gpu"):
        for one in spec.instances:
            model = spec.settings.models[one.model]
            path = listings.path_of(one.model, model)
            if model.source == "path" or path in inputs.listings:
                continue
            try:
                listing = listings.fetch(one.model, model, spec.settings, root)
                listings.write(root, listing, model)
            except (listings.ListingError, OSError) as error:
                if str(error) not in failed:
                    failed.append(str(error))
            else:
                inputs.listings[path] = listing
                written.append(path)
    return written, failed


def fetch(name: str, model: Model, settings: HostSettings, root: Path) -> dict[str, object]:
    """config.json of a model from its hub, its quantisation in it. Raises FetchError."""
    if model.source == "path":
        raise FetchError(
            f"model {name}: source {model.source} has no hub to ask; put its config.json at "
            f"{config_path(name, model)}"
        )
    config = _get(name, model, settings, root, "config.json")
    if config is None:
        raise FetchError(
            f"model {name}: {model.repo} has no config.json at {model.revision}: check `repo` and "
            "`revision`"
        )
    quant = None
    if '"quantization_config"' not in config:
        quant = _get(name, model, settings, root, "hf_quant_config.json")
    try:
        return merged_config(config, quant, f"model {name}")
    except SizingError as error:
        raise FetchError(str(error)) from None


def _get(name: str, model: Model, settings: HostSettings, root: Path, file: str) -> str | None:
    """Text of one file of a repository; None where it has none of this name."""
    given, token_file = weights.hub_of(model, settings)
    repo, revision = urllib.parse.quote(model.repo), weights.revision_of(model)
    token = (root / token_file).read_text(encoding="utf-8").strip() if token_file else ""
    if model.source == "huggingface":
        endpoint = (given or HUGGINGFACE).rstrip("/")
        url = f"{endpoint}/{repo}/resolve/{urllib.parse.quote(revision)}/{file}"
        header = ("Authorization", f"Bearer {token}")
    else:
        endpoint = (given or ENDPOINT).rstrip("/")
        query = urllib.parse.urlencode({"Revision": revision, "FilePath": file})
        url = f"{endpoint}/api/v1/models/{repo}/repo?{query}"
        header = ("Cookie", f"m_session_id={token}")
    request = urllib.request.Request(url, headers={"User-Agent": "vllm-fleet"})
    if token:
        request.add_unredirected_header(*header)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            text: str = answer.read(LARGEST).decode("utf-8")
            return text
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise FetchError(
            f"model {name}: {endpoint} answers {error.code} for {file} of {model.repo}: check "
            "`hub` in group_vars, or put the file at " + config_path(name, model)
        ) from None
    except (OSError, ValueError) as error:
        raise FetchError(
            f"model {name}: {endpoint} cannot be reached from here ({error}): check `hub` and this "
            "machine's proxy, or put config.json at " + config_path(name, model)
        ) from None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
