"""A YAML file as values that remember their place, with YAML's traps found.

PyYAML's own loading takes the last of two equal keys, reads ``0.20`` as 0.2, ``1:30`` as 90 and
``010`` as 8, and forgets where a value stood. Here the node graph is read instead.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from vllm_fleet.spec.complaints import Complaint, Loc, key_of

Kind = Literal["text", "integer", "number", "boolean", "date", "null", "list", "mapping"]

_KINDS: dict[str, Kind] = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "timestamp": "date",
    "null": "null",
    "seq": "list",
    "map": "mapping",
}
_NAMES: dict[Kind, str] = {
    "text": "text",
    "integer": "a number",
    "number": "a number",
    "boolean": "true or false",
    "date": "a date",
    "null": "nothing",
    "list": "a list",
    "mapping": "a mapping",
}
_DEEPEST = 40  # levels; JSON and pydantic have limits of their own, with worse words
_TAG = "tag:yaml.org,2002:"
_PLAIN_INT = re.compile(r"^[-+]?(0|[1-9][0-9]*)$")
_SECRET = re.compile(
    r"(^|[._-])(keys?|tokens?|password|passwd|secret|sha256)(_file)?$", re.IGNORECASE
)


@dataclass
class Node:
    """One value of a file: what it is, how it was written, and where (from 1)."""

    value: Any  # plain data, as JSON could hold it; a date stays the text it was written as
    kind: Kind
    line: int
    column: int
    written: str = ""  # a scalar as it stands in the file
    quoted: bool = False
    # Of a list or mapping, by index or key; and where each key of a mapping stands.
    items: dict[str | int, Node] = field(default_factory=dict)
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)

    def at(self, loc: Loc) -> Node:
        """The node at a place, or the nearest one above it that exists."""
        node = self
        for part in loc:
            if part not in node.items:
                break
            node = node.items[part]
        return node


@dataclass(frozen=True)
class Document:
    """A file that was read: its root mapping, what is wrong for certain, and its traps.

    A trap is a value that YAML reads unlike what was written; it is a complaint of its own only
    where nothing better is known about the value.
    """

    file: str
    root: Node
    complaints: tuple[Complaint, ...]
    traps: dict[Loc, str]
    prefix: str = ""  # stands before every key: the host, where the values are a host's data

    def complaint(self, loc: Loc, text: str, *, at_key: bool = False) -> Complaint:
        """A complaint at the value of ``loc``, or at its key."""
        node = self.root.at(loc)
        line, column = node.line, node.column
        if at_key and loc and isinstance(loc[-1], str):
            line, column = self.root.at(loc[:-1]).keys.get(loc[-1], (line, column))
        return Complaint(self.file, line, column, self.prefix + key_of(loc), text)


def secret_key(loc: Loc) -> bool:
    """Whether the value at ``loc`` may be a secret, so that it is never repeated."""
    return any(isinstance(part, str) and _SECRET.search(part) for part in loc)


def read_document(path: Path, file: str) -> Document:
    """Read a YAML file whose top level is a mapping; ``file`` is its name in complaints.

    Never raises for what the file holds: a file that cannot be read is one complaint and an
    empty mapping.
    """
    text = ""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        root = _compose(text)
    except OSError as error:
        return _broken(Complaint(file, 0, 0, "", f"cannot be read: {error.strerror}"))
    except RecursionError:
        return _broken(Complaint(file, 1, 1, "", "is nested too deeply"))
    except UnicodeDecodeError:
        return _broken(Complaint(file, 0, 0, "", "is not UTF-8 text; save it as UTF-8"))
    except yaml.YAMLError as error:
        return _broken(_syntax(file, error, text))
    if root is None:
        return Document(file, Node({}, "mapping", 1, 1), (), {})
    document = document_of(root, file)
    node, complaints = document.root, document.complaints
    if node.kind not in ("mapping", "null"):
        what = "a list" if node.kind == "list" else "one value"
        text = f'must be settings, one "key: value" a line, not {what}'
        complaints += (Complaint(file, node.line, node.column, "", text),)
    if node.kind != "mapping":
        node = Node({}, "mapping", 1, 1)
    return Document(file, node, complaints, document.traps)


def document_of(root: yaml.Node, file: str) -> Document:
    """A node graph as a document, whatever its top level is."""
    reader = _Reader(file)
    try:
        node = reader.read(root, ())
    except RecursionError:
        return _broken(Complaint(file, 1, 1, "", "is nested too deeply"))
    return Document(file, node, tuple(reader.complaints), reader.traps)


def _broken(complaint: Complaint) -> Document:
    return Document(complaint.file, Node({}, "mapping", 1, 1), (complaint,), {})


def _compose(text: str) -> yaml.Node | None:
    """The node graph. libyaml is ten times as fast; its errors are found again by PyYAML's own
    scanner, so that an operator reads the same text everywhere."""
    fast = getattr(yaml, "CSafeLoader", None)
    if fast is None:
        return _graph(yaml.SafeLoader, text)
    try:
        return _graph(fast, text)
    except yaml.YAMLError:
        _graph(yaml.SafeLoader, text)
        raise


def _graph(loader: Any, text: str) -> yaml.Node | None:
    node: yaml.Node | None = yaml.compose(text, Loader=loader)
    return node


_HINTS = (
    (r"found character '\\t'", "a tab; indent with spaces"),
    (
        r"found character '([@`])'",
        r'text that starts with "\1" must be in quotes, as in "@local"',
    ),
    (r"found character '(.)'", r'text that starts with "\1" must be in quotes'),
    (r"mapping values are not allowed", 'a second ":" in one line; put the text in quotes'),
    (r"expected <block end>", "is indented unlike the lines above it"),
    (r"could not find expected ':'", 'a key without ":" after it'),
    (r"expected ',' or '([\]}])'", r'a "," or the closing "\1" is missing before this'),
    (r"end of stream|unexpected end", "the file ends within quotes or brackets"),
    (r"undefined alias|found undefined alias", "this alias has no anchor above it"),
    (r"expected a single document|but found another document", 'a second document ("---")'),
    (r"special characters are not allowed", "a control character"),
)


def _syntax(file: str, error: yaml.YAMLError, text: str) -> Complaint:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        line, column = mark.line + 1, mark.column + 1
    else:  # a character that YAML has no place for
        before = text[: getattr(error, "position", 0)].split("\n")
        line, column = len(before), len(before[-1]) + 1
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    for pattern, hint in _HINTS:
        if match := re.search(pattern, problem):
            return Complaint(file, line, column, "", f"not YAML: {match.expand(hint)}")
    return Complaint(file, line, column, "", f"not YAML: {problem}")


class _Reader:
    """Turns one node graph into :class:`Node`, collecting complaints and traps."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.complaints: list[Complaint] = []
        self.traps: dict[Loc, str] = {}
        self._open: set[int] = set()  # nodes above the current one: an alias may close a circle

    def say(self, node: Node, loc: Loc, text: str) -> None:
        self.complaints.append(Complaint(self.file, node.line, node.column, key_of(loc), text))

    def read(self, node: yaml.Node, loc: Loc) -> Node:
        if len(loc) > _DEEPEST:
            raise RecursionError
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        kind = _KINDS.get(node.tag.removeprefix(_TAG))
        if id(node) in self._open:
            circle = Node(None, "null", line, column)
            self.say(circle, loc, "an alias that holds itself")
            return circle
        if kind is None and node.tag not in (_TAG + "merge", _TAG + "value"):
            unknown = Node(None, "null", line, column)
            self.say(unknown, loc, f'the tag "{node.tag}" means nothing here; take it away')
            return unknown
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, loc, Node({}, "mapping", line, column))
            if isinstance(node, yaml.SequenceNode):
                found = Node([], "list", line, column)
                for index, item in enumerate(node.value):
                    found.items[index] = self.read(item, (*loc, index))
                found.value = [item.value for item in found.items.values()]
                return found
        finally:
            self._open.discard(id(node))
        assert isinstance(node, yaml.ScalarNode)
        quoted = node.style in ("'", '"', "|", ">")
        scalar = Node(None, kind or "text", line, column, node.value, quoted)
        scalar.value = self._scalar(scalar, loc)
        return scalar

    def _mapping(self, node: yaml.MappingNode, loc: Loc, found: Node) -> Node:
        merged: list[Node] = []
        for key_node, value_node in node.value:
            key_line, key_column = key_node.start_mark.line + 1, key_node.start_mark.column + 1
            if key_node.tag == _TAG + "merge":
                value = self.read(value_node, loc)
                merged += value.items.values() if value.kind == "list" else [value]
                continue
            place = Node(None, "text", key_line, key_column)
            if not isinstance(key_node, yaml.ScalarNode):
                self.say(place, loc, "a key must be text")
                continue
            key = str(key_node.value)
            if key_node.tag not in (_TAG + "str", _TAG + "value"):
                kind = _KINDS.get(key_node.tag.removeprefix(_TAG), "text")
                self.say(
                    place, (*loc, key), f'YAML reads this key as {_NAMES[kind]}; write "{key}":'
                )
            if key in found.keys:
                first = found.keys[key][0]
                self.say(place, (*loc, key), f"stands twice, in lines {first} and {key_line}")
                continue
            found.keys[key] = key_line, key_column
            found.items[key] = self.read(value_node, (*loc, key))
        for value in merged:
            if value.kind != "mapping":
                self.say(value, loc, '"<<" takes a mapping')
                continue
            for name, item in value.items.items():
                if isinstance(name, str) and name not in found.items:
                    found.items[name] = item
                    found.keys[name] = value.keys[name]
        found.value = {name: item.value for name, item in found.items.items()}
        return found

    def _scalar(self, node: Node, loc: Loc) -> Any:
        written, kind = node.written, node.kind
        if kind == "null":
            return None
        if kind == "boolean":
            value = written.lower() in ("true", "yes", "on")
            if written.lower() not in ("true", "false"):
                self.traps[loc] = (
                    f"{read_as(node, loc)}; write {str(value).lower()}, or put it in quotes"
                )
            return value
        if kind == "integer":
            if not _PLAIN_INT.match(written):
                self.traps[loc] = _plainly(node, loc)
            return _construct(written, "int")
        if kind == "number":
            number = _construct(written, "float")
            if not math.isfinite(number):
                self.traps[loc] = "must be a finite number"
                return 0.0
            if "_" in written or ":" in written:
                self.traps[loc] = _plainly(node, loc)
            return number
        if kind == "date":
            self.traps[loc] = f"{read_as(node, loc)}; put it in quotes"
        return written


def read_as(node: Node, loc: Loc) -> str:
    """``YAML reads 0.20 as the number 0.2``, without the value where it may be a secret."""
    written = "this" if secret_key(loc) else node.written
    if node.kind in ("integer", "number"):
        shown = "a number" if secret_key(loc) else f"the number {_construct_any(node)}"
    elif node.kind == "boolean":
        shown = str(node.written.lower() in ("true", "yes", "on")).lower()
    else:
        shown = _NAMES[node.kind]
    return f"YAML reads {written} as {shown}"


def _plainly(node: Node, loc: Loc) -> str:
    number = "it plainly" if secret_key(loc) else str(_construct_any(node))
    return f"{read_as(node, loc)}; write {number}, or put it in quotes if it is text"


def _construct_any(node: Node) -> Any:
    return _construct(node.written, "int" if node.kind == "integer" else "float")


def _construct(written: str, tag: str) -> Any:
    """A scalar by YAML 1.1's rules: octal, underscores, base 60."""
    if tag == "int" and _PLAIN_INT.match(written):
        return int(written)
    scalar = yaml.ScalarNode(_TAG + tag, written)
    try:
        return yaml.constructor.SafeConstructor().construct_object(scalar)
    except ValueError:  # an explicit tag on other text: !!int x
        return 0
