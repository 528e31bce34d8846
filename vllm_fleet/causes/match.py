"""A log in, its causes out: the root line first, the generic last line last."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from vllm_fleet.causes.table import STARTED, Cause, Rank, load

# Colours, and the carriage returns of progress bars that would hide a line in another.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What a sound server repeats: requests that were answered, and what it tells of itself.
_SOUND = re.compile(r'" 200 |\bINFO\b|"status": ?"?200\b')
# Words of clients, which may be anything: a prompt that asks what an error means is no error.
_REQUESTS = re.compile(r"^.*\b(?:Received request|Generated response) \S+: .*\n?", re.MULTILINE)
# So may what a model says, in an answer or in the conversation so far. What is no prose stays: rows
# of exclamation marks and markup of tool calls tell of faults.
_SAID = re.compile(
    r"""(?:["'](?:content|text|delta|thinking|reasoning(?:_content)?)["'] ?: ?|\bcontent=)"""
    r"""(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
)
_PROSE = re.compile(r"(?:[^\W\d_]{2} [^\W\d_]{2}|[\u4e00-\u9fff]{4})")
_MARKUP = re.compile(r"<(?:\||/?(?:tool|function|arg|think))|!{16}")
# A request that was sent again and answered then; a stop that was asked for and ended well.
_RETRIED = re.compile(
    r'^.*HTTP Request: \S+ \S+ "HTTP/[\d.]+ (?:429|5\d\d)\b.*\n(?:.*\n){0,3}?.*Retrying request to '
    r'.*\n(?=(?:.*\n){0,40}?.*HTTP Request: \S+ \S+ "HTTP/[\d.]+ 200\b)',
    re.MULTILINE,
)
_STOPPED = re.compile(
    r"^.*systemd\[\d+\]: Stopping (?P<unit>\S+?)(?: - .*)?(?:\.\.\.|…)?\n"
    r"(?:(?!.*(?:timed out|SIGKILL|Failed with result|systemd\[\d+\]: Start)).*\n){0,400}?"
    r".*systemd\[\d+\]: (?P=unit): Deactivated successfully",
    re.MULTILINE,
)
_NUMBERS = re.compile(r"\d+")
MANY_LINES = 2000  # from here on the time of the search counts
KEPT_OF_A_SHAPE = 50
# An exception as Python ends a traceback with it, what argparse says of a wrong option, and what
# our gate and warm-up end with.
_ERROR = re.compile(
    r"(?:^|[ :\])])((?:\w+\.)*\w*(?:Error|Exception): .+|error: .+|"
    r"(?:FAILED|REFUSED): (?!vLLM ended).+)$",
    re.MULTILINE,
)


# Whether it came before the last start, rank, start of its line, whether the line alone is known,
# number in the table.
_Order = tuple[bool, int, int, bool, int]


@dataclass(frozen=True)
class Match:
    """A cause found in a text, and the line that tells of it."""

    id: str
    cause: str
    remedy: str
    line: str
    rank: Rank = Rank.ROOT


def match(text: str, version: str | None = None) -> list[Match]:
    """Causes that the text tells of, the most likely root first; empty where none is known.

    Each cause is named once, by its first line. `version` is that of vLLM, where it is known:
    entries that cannot happen in it are left out. ValueError where it is not a version.
    """
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = _told_once(_REQUESTS.sub("", text))
    searched = _without_what_is_well(text)
    started = _last(STARTED, searched)
    overs = {over: _last(over, searched) for over in {cause.over for cause in load()}}
    found: list[tuple[_Order, Match]] = []
    for number, cause in enumerate(load()):
        if version is not None and not cause.applies_to(version):
            continue
        over = overs[cause.over]
        # What came after the last start, where anything did, is why it is not well now.
        hit = cause.pattern.search(searched, max(started, over))
        if hit is None and over < started:
            hit = cause.pattern.search(searched, over, started)
        if hit is None or (cause.near is not None and not cause.near.search(searched)):
            continue
        if cause.unless is not None and cause.unless.search(searched):
            continue
        framed = "line" in cause.pattern.groupindex
        position = hit.start("line") if framed and hit["line"] is not None else hit.start()
        while text[position : position + 1] == "\n":  # a pattern that begins at the end of a line
            position += 1
        start = text.rfind("\n", 0, position) + 1
        # On one line the entry that also knows its surroundings says more.
        order = (
            position < started,
            int(cause.rank),
            start,
            cause.near is None and not framed,
            number,
        )
        found.append((order, _match(cause, text, position)))
    return _without_doubles(sorted(found, key=lambda pair: pair[0]))


def _last(over: re.Pattern[str] | None, text: str) -> int:
    """The end of the last place where this occurs; 0 where it does not."""
    return max((place.end() for place in over.finditer(text)), default=0) if over else 0


def _without_what_is_well(text: str) -> str:
    """The text, as long as it was, without what tells of no fault: words of models, sound stops."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", ".", found[0])

    def unless_markup(found: re.Match[str]) -> str:
        prose = _PROSE.search(found[0]) and not _MARKUP.search(found[0])
        return blank(found) if prose else found[0]

    return _STOPPED.sub(blank, _RETRIED.sub(blank, _SAID.sub(unless_markup, text)))


def _without_doubles(found: list[tuple[_Order, Match]]) -> list[Match]:
    """The matches in their order; of what is known by the exception alone, one for each line."""
    seen: set[int] = set()
    kept = []
    for (_, _, start, _, _), told in found:
        if told.rank is Rank.TRACE:
            if start in seen:
                continue
            seen.add(start)
        kept.append(told)
    return kept


def _told_once(text: str) -> str:
    """The text without most of the sound lines that a server prints by the thousand."""
    if text.count("\n") < MANY_LINES:
        return text
    seen: Counter[str] = Counter()
    kept = []
    for line in text.split("\n"):
        if _SOUND.search(line):
            shape = _NUMBERS.sub("0", line)
            seen[shape] += 1
            if seen[shape] > KEPT_OF_A_SHAPE:
                continue
        kept.append(line)
    return "\n".join(kept)


def _match(cause: Cause, text: str, position: int) -> Match:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    line = text[start : end if end >= 0 else len(text)].strip()
    return Match(cause.id, cause.cause, cause.remedy, line, cause.rank)


def last_error(text: str) -> str:
    """The last error that a log names in words of its own; empty where it names none.

    For a text in which no known cause was found, or only one that says that something failed.
    """
    found = _ERROR.findall(_ESCAPES.sub("", text).replace("\r", "\n"))
    # "Engine core initialization failed. See root cause above.": the one above, then.
    last = next((error for error in reversed(found[-50:]) if not match(error)), "")
    return last.strip()[:500]
