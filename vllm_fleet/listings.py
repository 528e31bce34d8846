"""Frozen listings of weights: which files a model's revision has, with size and checksum.

``listings/<model>@<revision>.json`` beside group_vars belongs to the operator, who commits it.
From then on a branch or tag that is moved at the hub changes nothing that is served: a host
refuses a hub that lists otherwise, and weights that are not those of the listing.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from vllm_fleet import weights
from vllm_fleet.onhost import hub as onhost
from vllm_fleet.onhost import weights as checks
from vllm_fleet.onhost.tools import Refusal
from vllm_fleet.spec.complaints import Complaint, SpecError
from vllm_fleet.spec.model import HostSettings, Model
from vllm_fleet.weights import Listing

MODELSCOPE = "https://modelscope.cn"  # as the modelscope library has it
SECONDS = 30
LARGEST = 64 * 2**20
MOST = 3000  # files; of more ModelScope answers with a part


class ListingError(Exception):
    """A listing cannot be had; the message names what, where and the remedy."""


def path_of(name: str, model: Model) -> str:
    """Where a model's listing is looked for beside group_vars."""
    revision = weights.path_safe(weights.revision_of(model))
    return f"listings/{weights.path_safe(name)}@{revision}.json"


def read_listing(root: Path, name: str, model: Model) -> Listing | None:
    """The frozen listing of a model; None where there is none.

    Raises SpecError where it is damaged, or of another repository or revision.
    """
    path = path_of(name, model)

    def bad(text: str) -> SpecError:
        return SpecError([Complaint(path, 0, 0, "", text)])

    try:
        found = json.loads((root / path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise bad(f"is no readable JSON ({error}); restore it from version control") from None
    try:
        about = (found["source"], found["repo"], found["revision"])
        files = tuple({**f, "path": str(f["path"]), "size": int(f["size"])} for f in found["files"])
    except (KeyError, TypeError, ValueError):
        raise bad("is no listing; restore it from version control, or fetch it again") from None
    wanted = (model.source, model.repo, weights.revision_of(model))
    if about != wanted:
        raise bad(
            f"is of {about[1]} at {about[2]} ({about[0]}), model {name} is {wanted[1]} at "
            f"{wanted[2]} ({wanted[0]}): delete it and fetch it again, or correct the model"
        )
    return Listing(path, files)


def fetch(name: str, model: Model, settings: HostSettings, root: Path) -> Listing:
    """The listing of a model's revision as its hub has it now. Raises ListingError."""
    try:
        entries, _ = checks.wanted(name, _entries(name, model, settings, root))
    except Refusal as refusal:
        raise ListingError(f"model {refusal}") from None
    files = tuple(
        {
            "path": entry.path,
            "size": entry.size,
            **({"sha256": entry.sha256} if entry.sha256 else {}),
            **({"git": entry.git} if entry.git else {}),
        }
        for entry in sorted(entries, key=lambda entry: entry.path)
    )
    return Listing(path_of(name, model), files)


def write(root: Path, listing: Listing, model: Model) -> None:
    """Put a listing in its place, one file a line. Raises OSError."""
    about = {
        "source": model.source,
        "repo": model.repo,
        "revision": weights.revision_of(model),
    }
    head = json.dumps(about, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(file, ensure_ascii=False)}" for file in listing.files)
    path = root / listing.path
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f'{head},\n "files": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    temporary.replace(path)


def _entries(name: str, model: Model, settings: HostSettings, root: Path) -> list[onhost.Entry]:
    endpoint, token_file = weights.hub_of(model, settings)
    token = str(root / token_file) if token_file else None
    if model.source == "huggingface":
        about = {"name": name, "repo": model.repo, "revision": weights.revision_of(model)}
        return onhost.HuggingFace({**about, "endpoint": endpoint, "token_file": token}).listing()
    return _modelscope(name, model, (endpoint or MODELSCOPE).rstrip("/"), token)


def _modelscope(
    name: str, model: Model, endpoint: str, token_file: str | None
) -> list[onhost.Entry]:
    query = urllib.parse.urlencode({"Revision": model.revision, "Recursive": "True"})
    url = f"{endpoint}/api/v1/models/{urllib.parse.quote(model.repo)}/repo/files?{query}"
    request = urllib.request.Request(url, headers={"User-Agent": "vllm-fleet"})
    if token_file:
        token = Path(token_file).read_text(encoding="utf-8").strip()
        request.add_unredirected_header("Cookie", f"m_session_id={token}")
    at = f"{model.repo} at {model.revision}"
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            data = json.loads(answer.read(LARGEST))["Data"]
        listed = data["Files"] if isinstance(data, dict) else data
        entries = [
            onhost.Entry(str(f["Path"]), int(f["Size"]), str(f.get("Sha256") or "").lower())
            for f in listed
            if f.get("Type") != "tree"
        ]
    except urllib.error.HTTPError as error:
        why = "does not know it: check `repo` and `revision`" if error.code == 404 else ""
        raise ListingError(
            f"model {name}: {endpoint} answers {error.code} for {at}"
            + (f": {why}" if why else "; check `hub` in group_vars")
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ListingError(
            f"model {name}: {endpoint} gives no listing of {at} ({error}): check `hub` and this "
            "machine's proxy and name resolution"
        ) from None
    if len(listed) >= MOST:
        raise ListingError(f"model {name}: {at} has {len(listed)} files or more; not frozen")
    return entries
