"""The types of :mod:`vllm_fleet.spec.model` in plain words, and pydantic's errors as complaints.

One description of a type serves complaints ("must be a positive integer or "auto"") and
docs/settings.md.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vllm_fleet.spec.complaints import Complaint, Loc
from vllm_fleet.spec.model import HostSettings, Instance, Model, Wants
from vllm_fleet.spec.yamlfile import Document, Node, read_as, secret_key


@dataclass(frozen=True)
class Type:
    """An annotation with everything ``Annotated`` and ``Field`` say about it."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    @classmethod
    def of(cls, annotation: Any, metadata: Iterable[Any] = ()) -> Type:
        """Take off ``Annotated``, gather what pydantic and we noted in it."""
        notes = list(metadata)
        while get_origin(annotation) is Annotated:
            annotation, *inner = get_args(annotation)
            notes += inner
        flat: list[Any] = []
        for note in notes:
            flat += note.metadata if isinstance(note, FieldInfo) else [note]
        return cls(annotation, tuple(flat))

    @property
    def options(self) -> tuple[Type, ...]:
        """The members of a union, without None; else the type itself."""
        if get_origin(self.annotation) not in (Union, types.UnionType):
            return (self,)
        members = (Type.of(a) for a in get_args(self.annotation) if a is not type(None))
        return tuple(option for member in members for option in member.options)

    @property
    def nullable(self) -> bool:
        """Whether null is allowed."""
        return type(None) in get_args(self.annotation)

    @property
    def model(self) -> type[BaseModel] | None:
        """The settings model this is, if it is one."""
        for option in self.options:
            if isinstance(option.annotation, type) and issubclass(option.annotation, BaseModel):
                return option.annotation
        return None

    def child(self, part: str | int) -> Type | None:
        """The type of a field, entry or item; None where it can have none of this name."""
        for option in self.options:
            origin, args = get_origin(option.annotation), get_args(option.annotation)
            if option.model is not None and isinstance(part, str):
                field = option.model.model_fields.get(part)
                if field is not None:
                    return Type.of(field.annotation, field.metadata)
            elif (origin is dict and isinstance(part, str)) or (
                origin is list and isinstance(part, int)
            ):
                return Type.of(args[-1])
            elif origin is tuple and isinstance(part, int):
                return Type.of(args[0])
        return None

    @property
    def is_text(self) -> bool:
        """Whether it must be text, whatever the text."""
        return all(option.annotation is str for option in self.options)

    def fits(self, text: str) -> bool:
        """Whether text matches the pattern wanted of it."""
        notes = self.metadata + self.options[0].metadata
        patterns = [p for note in notes if (p := getattr(note, "pattern", None))]
        return all(re.search(pattern, text) for pattern in patterns)

    def takes(self, kind: type) -> bool:
        """Whether a value of this Python type may stand here."""
        return any(option.annotation is kind for option in self.options)


def describe(wanted: Type) -> str:
    """``a positive integer or "auto"``."""
    for note in wanted.metadata:
        if isinstance(note, Wants):
            return note.text
    if len(wanted.options) > 1:
        return _or(list(dict.fromkeys(describe(option) for option in wanted.options)))
    wanted = Type.of(wanted.options[0].annotation, wanted.metadata + wanted.options[0].metadata)
    for note in wanted.metadata:
        if isinstance(note, Wants):
            return note.text
    annotation, origin = wanted.annotation, get_origin(wanted.annotation)
    if origin is Literal:
        return _or([f'"{value}"' for value in get_args(annotation)])
    if annotation is int:
        return _integer(wanted.metadata)
    if annotation is bool:
        return "true or false"
    if annotation is float:
        return "a number"
    if annotation is str:
        return "text"
    if origin in (list, tuple):
        return "a list"
    return "a mapping"


def _integer(metadata: tuple[Any, ...]) -> str:
    low = next((note.ge for note in metadata if isinstance(note, Ge)), None)
    high = next((note.le for note in metadata if isinstance(note, Le)), None)
    if high is not None:
        return f"an integer from {low} to {high}"
    if low is None:
        return "an integer"
    return "a positive integer" if low == 1 else f"an integer, {low} or more"


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return found[0] if found else None


def places_of(
    document: Document, errors: list[ErrorDetails], root: Any = HostSettings
) -> dict[Loc, ErrorDetails]:
    """Pydantic's errors about a document by the place of the value, the first of each.

    ``root`` is what the document is to hold as a whole, here and below.
    """
    found: dict[Loc, ErrorDetails] = {}
    for error in errors:
        loc, _ = _locate(document.root, error["loc"], root)
        found.setdefault(loc, error)
    return found


def complaints_of(
    document: Document, found: dict[Loc, ErrorDetails], root: Any = HostSettings
) -> Iterator[Complaint]:
    """The errors of :func:`places_of`, one complaint a value, in our words."""
    for loc, error in found.items():
        # A list that is refused as text as well: only its bad item is of use.
        if any(len(other) > len(loc) and other[: len(loc)] == loc for other in found) and (
            error["type"] not in ("missing", "extra_forbidden")
        ):
            continue
        yield _complaint(document, loc, error, root)


def _locate(node: Node, loc: tuple[str | int, ...], root: Any) -> tuple[Loc, Type]:
    """The place in the file of an error's ``loc``, which also names members of unions."""
    wanted = Type.of(root)
    path: list[str | int] = []
    for part in loc:
        if part == "[key]":
            break
        child = wanted.child(part)
        if part in node.items:
            node = node.items[part]
        elif node.kind != "mapping" or (isinstance(part, str) and "[" in part):
            continue  # the tag of a union's member
        elif wanted.model is None:
            continue
        path.append(part)
        wanted = child or wanted
    return tuple(path), wanted


def _complaint(document: Document, loc: Loc, error: ErrorDetails, root: Any) -> Complaint:
    if error["type"] == "extra_forbidden":
        return document.complaint(loc, _unknown(loc, root), at_key=True)
    _, wanted = _locate(document.root, loc, root)
    if error["loc"] and error["loc"][-1] == "[key]":
        return document.complaint(loc, f"must be {_key_words(loc, root)}", at_key=True)
    if error["type"] == "missing":
        return document.complaint(loc, f"is missing; it must be {describe(wanted)}")
    node = document.root.at(loc)
    if error["type"] == "value_error":
        return document.complaint(loc, str(error.get("ctx", {}).get("error", "is wrong")))
    if error["type"] == "too_short":
        return document.complaint(loc, "must not be empty")
    text = f"must be {describe(wanted)}"
    if node.kind == "null":
        return document.complaint(loc, f"{text}; take the key away for its default")
    if hint := _hint(node, wanted, loc):
        text += f"; {hint}"
    return document.complaint(loc, text)


def _hint(node: Node, wanted: Type, loc: Loc) -> str:
    """How to write the value so that YAML reads what is wanted."""
    if node.kind in ("integer", "number", "boolean", "date") and wanted.is_text:
        if secret_key(loc):
            return "put it in quotes"
        if not wanted.fits(node.written):
            return read_as(node, loc) if node.kind != "integer" else ""
        if node.written == str(node.value):
            return f'put it in quotes: "{node.written}"'
        return f'{read_as(node, loc)}, write "{node.written}"'
    if wanted.takes(int):
        if node.kind == "number" and node.value == int(node.value):
            return f"write {int(node.value)}"
        if node.kind == "text" and node.written.isdecimal():
            why = "take the quotes away" if node.quoted else "a leading zero makes it text"
            return f"{why}: {int(node.written)}"
    if node.kind == "integer" and node.written != str(node.value) and not secret_key(loc):
        return read_as(node, loc)
    return ""


def _key_words(loc: Loc, root: Any) -> str:
    parent = Type.of(root)
    for part in loc[:-1]:
        parent = parent.child(part) or parent
    for option in parent.options:
        if get_origin(option.annotation) is dict:
            return describe(Type.of(get_args(option.annotation)[0]))
    return "text"


# How pyinfra is to reach a host: data of the inventory, by the beginning of the key.
CONNECTION = ("ssh_", "_", "winrm_", "docker_", "chroot_", "fake_")
_SECRETS = {
    "api_key": "api_keys.file",
    "api-key": "api_keys.file",
    "api_keys": "api_keys.file",
    "keys": "api_keys.file",
    "vllm_api_key": "api_keys.file",
    "token": "hub.token_file",
    "hf_token": "hub.token_file",
    "hub_token": "hub.token_file",
    "modelscope_api_token": "hub.token_file",
}


def _unknown(loc: Loc, root: Any) -> str:
    """What to say of a key that no setting has."""
    parent = Type.of(root)
    for part in loc[:-1]:
        parent = parent.child(part) or parent
    key, model = str(loc[-1]), parent.model
    known = list(model.model_fields) if model else []
    if root is not HostSettings:  # a file of its own, where nothing of group_vars may stand
        near = nearest(key, known) or nearest(key.replace("-", "_"), known)
        hint = f'did you mean "{near}"?' if near else f"there are {', '.join(known)}"
        return f"no such setting; {hint}"
    if target := _SECRETS.get(key.lower()):
        return (
            f"a secret never stands in group_vars; put it in a file and name that file in {target}"
        )
    if key.startswith(CONNECTION):
        return (
            "no such setting; how to reach a host stands in the inventory, "
            f'as in ("gpu-01", {{"{key}": ...}})'
        )
    if near := nearest(key, known):
        return f'no such setting; did you mean "{near}"?'
    if homes := [home for home in _homes(key) if home != key or len(loc) > 1]:
        return f"no such setting here; it stands in {_or(homes)}"
    if near := nearest(key.replace("-", "_"), known):
        return f'no such setting; did you mean "{near}"?'
    if model in (Model, Instance):
        return "no such setting; options of `vllm serve` stand in vllm_args"
    if model is HostSettings:
        return "no such setting; docs/settings.md lists them all"
    return f"no such setting; there are {', '.join(known)}"


def _homes(key: str) -> list[str]:
    """Where a setting of this name does stand."""
    found = [key] if key in HostSettings.model_fields else []
    for name, field in HostSettings.model_fields.items():
        top = Type.of(field.annotation, field.metadata)
        for option, text in ((top, name), (top.child("<name>"), f"{name}.<name>")):
            if option and option.model and key in option.model.model_fields:
                found.append(f"{text}.{key}")
        item = top.child(0)
        if item and item.model and key in item.model.model_fields:
            found.append(f"{name}[].{key}")
    return found
