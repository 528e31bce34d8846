"""The table of known failures, read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

WHERE = ("engine", "cuda", "nccl", "systemd", "nginx", "modelscope", "client", "install")
STARTED = re.compile(r"Application startup complete\.")
# What was fetched whole, by whichever program, after all that went wrong before.
_FETCHED = re.compile(
    STARTED.pattern + r"|(?i:successfully (?:downloaded|installed))|^Installed \d+ packages?|"
    r" saved \[\d+/|Fetching \d+ files: 100%|^\S+: OK$",
    re.MULTILINE,
)
VERSION = re.compile(r"^\d+(\.\d+)*$")

# A frame of a traceback in a file of this path, and the exception not far below it: there may be
# frames of libraries between, and lines of other ranks. What only points to a cause above is none.
_FRAME = (
    r'File "[^"\n]*(?:{path})[^"\n]*", line \d+, in .*\n(?:.*\n){{0,10}}?'
    r"(?P<line>(?:^|.*(?<!raise)(?<!xcept)[ \t])"
    r"(?!(?:\w+\.)*CancelledError\b)"
    r"(?:(?:\w+\.)*\w*(?:Error|Exception)|(?:\w+\.)+(?:errors?|exc|exceptions)\.[A-Z]\w+)\b"
    r"(?:: (?!{points}).*)?$)"
)
# An HTTP status in the words of clients' libraries, whatever it is; a hub's is not an engine's.
_OF_HUB = r"(?!\S*(?:modelscope|hugging|\bhf-|hub\b|/api/(?:v1/)?(?:models|datasets)|/simple/))"
_STATUS = (
    r"does not indicate success: {0}\b|response code:? ?{0}\b|\b{0}, message=.{{1,80}}url=\S*/v1/|"
    r"\bERROR {0}: |\bHTTP/2 {0}\b|Exception(?:\$\w+)?: {0}\b|"
    r"(?:状态码|返回码|错误码|响应码)\D{{0,4}}{0}\b|"
    rf"\b{{0}} (?:Client|Server) Error: .{{{{0,60}}}}for url: {_OF_HUB}|"
    rf"(?:Client|Server) error '{{0}}\b.{{{{0,60}}}}for url '{_OF_HUB}|"
    r"\bHTTP(?: Error)? {0}\b"
)
_POINTS_UP = (
    "Engine (?:core init|loop )|Worker failed with|WorkerProc init|EngineCore enc|"
    "Executor failed|cancelled"
)


class Rank(IntEnum):
    """How near a line stands to the cause: roots are named first, generic last lines last."""

    ROOT = 1  # the line says what is wrong
    SYMPTOM = 2  # something broke; a better line may stand elsewhere
    TRACE = 3  # the exception that ended it, and nothing that is known better
    GENERIC = 4  # says only that it failed and that the cause stands above


class TableError(ValueError):
    """The table is wrong: which entry, which key, why."""


@dataclass(frozen=True)
class Cause:
    """One known failure. `near` must occur somewhere in the same text, `unless` must not.

    What stands before the last place of `over` no longer counts: the server got through it.

    Where the pattern has a group `line`, that is what tells of the cause, else all of it.
    """

    id: str
    pattern: re.Pattern[str]
    where: str
    cause: str
    remedy: str
    source: str
    rank: Rank = Rank.ROOT
    near: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    over: re.Pattern[str] | None = None
    since: tuple[int, ...] | None = None  # first vLLM version it happens in
    before: tuple[int, ...] | None = None  # first vLLM version it no longer happens in

    def applies_to(self, version: str) -> bool:
        """Whether it can happen in this vLLM version, such as `0.21.0`."""
        number = parse_version(version)
        return (self.since is None or self.since <= number) and (
            self.before is None or number < self.before
        )


def parse_version(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: 0.21.0 and 0.21.0rc1 are (0, 21, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    if not found:
        raise ValueError(f"not a version: {version!r}")
    return tuple(int(n) for n in found.group().split("."))


@cache
def load() -> tuple[Cause, ...]:
    """Every entry, in the order of the file. TableError where one is wrong."""
    return parse((files("vllm_fleet.causes") / "table.yml").read_text("utf-8"))


def parse(text: str) -> tuple[Cause, ...]:
    """The entries of a table in YAML. TableError where one is wrong or an id comes twice."""
    entries = yaml.safe_load(text)
    if not isinstance(entries, list):
        raise TableError("the table is not a list")
    causes: dict[str, Cause] = {}
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise TableError(f"entry {number} is not a mapping")
        cause = _entry(entry, str(entry.get("id") or f"entry {number}"))
        if cause.id in causes:
            raise TableError(f"{cause.id}: id: used twice")
        causes[cause.id] = cause
    return tuple(causes.values())


def _entry(entry: dict[str, Any], name: str) -> Cause:
    found = "frame" if "frame" in entry else "pattern"
    known = {"id", found, "where", "cause", "remedy", "source"}
    optional = {"rank", "near", "unless", "over", "since", "before"}
    if found == "pattern":
        optional.add("status")
    if missing := known - set(entry):
        raise TableError(f"{name}: {', '.join(sorted(missing))}: missing")
    if unknown := set(entry) - known - optional:
        raise TableError(f"{name}: {', '.join(sorted(unknown))}: unknown key")
    for key, value in entry.items():
        if not isinstance(value, str) or not value.strip():
            raise TableError(f"{name}: {key}: must be text")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", entry["id"]):
        raise TableError(f"{name}: id: small letters, digits and dashes only")
    if entry["where"] not in WHERE:
        raise TableError(f"{name}: where: one of {', '.join(WHERE)}")
    rank = entry.get("rank", "root").upper()
    if rank not in Rank.__members__:
        raise TableError(f"{name}: rank: root, symptom, trace or generic")
    if not re.fullmatch(r"[45]\d\d", entry.get("status", "400")):
        raise TableError(f"{name}: status: an HTTP status of an error")
    for key in ("since", "before"):
        if key in entry and not VERSION.match(entry[key]):
            raise TableError(f"{name}: {key}: not a version")
    return Cause(
        id=entry["id"],
        pattern=_frame(entry, name) if found == "frame" else _pattern(entry, "pattern", name),
        where=entry["where"],
        cause=entry["cause"].strip(),
        remedy=entry["remedy"].strip(),
        source=entry["source"],
        rank=Rank[rank],
        near=_pattern(entry, "near", name) if "near" in entry else None,
        unless=_pattern(entry, "unless", name) if "unless" in entry else None,
        over=_over(entry, name),
        since=parse_version(entry["since"]) if "since" in entry else None,
        before=parse_version(entry["before"]) if "before" in entry else None,
    )


def _over(entry: dict[str, Any], name: str) -> re.Pattern[str] | None:
    """Where a server started or a file came whole, what hindered it before is over."""
    if "over" in entry:
        return _pattern(entry, "over", name)
    return _FETCHED if entry["where"] in ("modelscope", "install") else None


def _frame(entry: dict[str, Any], name: str) -> re.Pattern[str]:
    path = _pattern(entry, "frame", name).pattern
    return re.compile(_FRAME.format(path=path, points=_POINTS_UP), re.MULTILINE)


def _pattern(entry: dict[str, Any], key: str, name: str) -> re.Pattern[str]:
    text = entry[key].strip()
    if key == "pattern" and "status" in entry:
        text += "|" + _STATUS.format(entry["status"])
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise TableError(f"{name}: {key}: {error}") from error
    if pattern.search(""):
        raise TableError(f"{name}: {key}: matches everything")
    return pattern
