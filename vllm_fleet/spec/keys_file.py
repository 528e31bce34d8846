"""The file of clients' keys that `api_keys.file` names: a list of :class:`ApiKey`.

No complaint ever repeats a key, nor text that may hold one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from vllm_fleet.spec.complaints import Complaint, Loc
from vllm_fleet.spec.model import ApiKey, digest_of
from vllm_fleet.spec.words import complaints_of, nearest, places_of
from vllm_fleet.spec.yamlfile import Document, document_of

ApiKeys = tuple[ApiKey, ...]
_ADAPTER: TypeAdapter[ApiKeys] = TypeAdapter(ApiKeys)
_SHAPE = 'must be a list of {name: "...", key: "..."}; docs/settings.md has what else may stand'


@dataclass(frozen=True)
class KeysFile:
    """A keys file that was read: its entries where it has no mistake."""

    keys: ApiKeys
    complaints: tuple[Complaint, ...]


def read_keys(path: Path, file: str, names: Sequence[str] | None = None) -> KeysFile:
    """Read a keys file; ``file`` is its name in complaints.

    ``names`` are the names of models that clients may use; None where they are not known.
    OSError where the file cannot be read.
    """
    try:
        root = yaml.compose(path.read_bytes().decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        return _broken(Complaint(file, 1, 1, "", "is not UTF-8 text; save it as UTF-8"))
    except RecursionError:
        return _broken(Complaint(file, 1, 1, "", "is nested too deeply"))
    except yaml.YAMLError as error:  # its text would show what stands there
        mark = getattr(error, "problem_mark", None)
        return _broken(_at(mark, file, "is not YAML here"))
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        return _broken(_at(root and root.start_mark, file, _SHAPE))
    document = document_of(root, file)
    found = [*_of_values(document), *_over_entries(document, names)]
    complaints = tuple({(c.line, c.column): c for c in reversed(found)}.values())  # first of each
    if complaints:
        return KeysFile((), tuple(sorted(complaints)))
    return KeysFile(_ADAPTER.validate_json(json.dumps(document.root.value)), ())


def _at(mark: Any, file: str, text: str) -> Complaint:
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    return Complaint(file, line, column, "", text)


def _broken(complaint: Complaint) -> KeysFile:
    return KeysFile((), (complaint,))


def _of_values(document: Document) -> Iterator[Complaint]:
    """What is wrong with single values."""
    for said in document.complaints:
        if said.text.startswith(("stands twice", "is nested")):
            yield said
        else:  # what stands there may be a key that was written without quotes
            text = "YAML takes this for something else; put it in quotes"
            yield Complaint(said.file, said.line, said.column, "", text)
    for index, node in document.root.items.items():
        if node.kind != "mapping":
            yield document.complaint((index,), _SHAPE)
    refused: dict[Loc, ErrorDetails] = {}
    try:
        _ADAPTER.validate_json(json.dumps(document.root.value))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        refused = places_of(document, errors, ApiKeys)
    yield from complaints_of(document, refused, ApiKeys)
    for loc, text in document.traps.items():
        # A date is meant as one here, and taken as it was written.
        meant = loc[-1:] == ("expires",) and document.root.at(loc).kind == "date"
        if not meant and loc not in refused:
            yield document.complaint(loc, text)


def _over_entries(document: Document, names: Sequence[str] | None) -> Iterator[Complaint]:
    """What is wrong between values: of one entry, of two, with the models."""
    names_seen: dict[str, int] = {}
    digests: dict[str, int] = {}
    for index, node in document.root.items.items():
        if node.kind != "mapping":
            continue
        entry: dict[str, Any] = node.value
        given = [field for field in ("key", "sha256") if entry.get(field) is not None]
        if len(given) == 2:
            second = max(given, key=lambda field: node.keys[field])
            text = "key and sha256 both stand here; keep one"
            yield document.complaint((index, second), text, at_key=True)
        elif not given:
            text = "has no key; give `key`, or `sha256` (printf %s KEY | sha256sum)"
            written: Loc = ("key",) if "key" in entry else ()
            yield document.complaint((index, *written), text)
        if isinstance(name := entry.get("name"), str):
            if first := names_seen.get(name):
                yield document.complaint((index, "name"), f"stands in line {first} already")
            names_seen.setdefault(name, node.items["name"].line)
        for field in given[:1]:
            if not isinstance(value := entry[field], str):
                continue
            one = digest_of(value) if field == "key" else value.lower()
            if first := digests.get(one):
                yield document.complaint((index, field), f"this key stands in line {first} already")
            digests.setdefault(one, node.items[field].line)
        yield from _models(document, (index, "models"), entry.get("models"), names)


def _models(
    document: Document, loc: Loc, models: Any, names: Sequence[str] | None
) -> Iterator[Complaint]:
    if not isinstance(models, list) or names is None:
        return
    for index, name in enumerate(models):
        if not isinstance(name, str) or name in names:
            continue
        near = nearest(name, names)
        hint = f'did you mean "{near}"?' if near else f"there are {', '.join(names) or 'none'}"
        text = f'"{name}" is no model or alias of this inventory; {hint}'
        yield document.complaint((*loc, index), text)
