"""How the cards of a host are linked: ``nvidia-smi topo -m``, ``topo -p2p``, rocm-smi. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

from vllm_fleet.smi import ANSI, CardsError, Vendor, complaint

Pair = tuple[int, int]  # two card indices, the smaller one first

LINK = re.compile(r"NV\d+|SYS|SOC|NODE|PHB|PXB|PIX|PSB|C2C|XGMI|PCIE|X", re.I)
COMMAND = "nvidia-smi topo -m"


@dataclass(frozen=True)
class Topology:
    """Links between cards as they were printed, and where each card sits."""

    vendor: Vendor
    cards: tuple[int, ...]  # every card that stands in the matrix
    links: Mapping[Pair, str]  # NV18, PIX, PXB, PHB, NODE, SYS, XGMI, PCIE; unknown ones absent
    numa: Mapping[int, frozenset[int]]  # NUMA nodes of a card; absent where not said
    cpus: Mapping[int, str]  # CPU affinity as printed, such as "0-55,112-167"
    nics: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    # By card and RDMA device (mlx5_0; NIC0 where no legend tells): PIX, PXB, PHB, NODE, SYS.
    to_nics: Mapping[tuple[int, str], str] = field(default_factory=dict)

    def link(self, first: int, second: int) -> str | None:
        """Link of two cards; None where it is not known."""
        return self.links.get((min(first, second), max(first, second)))

    def unknown(self) -> tuple[Pair, ...]:
        """Pairs whose link the text does not give."""
        return tuple(p for p in combinations(self.cards, 2) if p not in self.links)


@lru_cache(maxsize=256)  # hosts of one kind print the same
def parse_topo(text: str) -> Topology:
    """Read ``nvidia-smi topo -m`` or ``rocm-smi --showtopo``; CardsError where it is neither."""
    clean = ANSI.sub("", text).replace("\r\n", "\n")
    if not clean.strip():
        raise CardsError(f"the matrix of links is empty; run {COMMAND}")
    if re.search(r"ROCm System Management|\(Topology\)|between two GPUs", clean):
        return _rocm(clean)
    rows = [line for line in clean.splitlines() if re.match(r"\s*GPU\d+(\s|$)", line)]
    header = next((line for line in clean.splitlines() if _is_header(line)), None)
    rows = [r for r in rows if not _is_header(r)]
    if not rows:
        said = complaint(clean)
        first = clean.strip().splitlines()[0][:60]
        raise CardsError(
            said or f"this is no matrix of links, it begins with {first!r}; run {COMMAND}"
        )
    if any(re.fullmatch(r"OK|CNS|GNS|TNS|NS", token) for r in rows for token in r.split()):
        raise CardsError(
            f"this is the peer-to-peer matrix (topo -p2p), not that of links; run {COMMAND}"
        )
    devices = dict(re.findall(r"^\s*(NIC\d+)\s*:\s*(\S+)", clean, re.M))
    return _nvidia(header, rows, devices)


def parse_p2p(text: str) -> dict[Pair, str]:
    """Read ``nvidia-smi topo -p2p r``: pair -> OK, or why not (NS, CNS, GNS, TNS, U).

    NS: not supported; CNS: by the chipset; GNS: by the card; TNS: by the topology. Of two
    directions that differ the worse one counts. CardsError where the text is no such matrix.
    """
    clean = ANSI.sub("", text)
    found: dict[Pair, str] = {}
    for line in clean.splitlines():
        match = re.match(r"\s*GPU(\d+)\s+(.*)", line)
        if match is None or "GPU" in match[2]:
            continue
        row = int(match[1])
        for column, status in enumerate(match[2].split()):
            if column == row or not re.fullmatch(r"[A-Z]{1,3}", status):
                continue
            pair = (min(row, column), max(row, column))
            if found.get(pair, "OK") == "OK":
                found[pair] = status
    if not found or any(LINK.fullmatch(s) for s in found.values()):
        raise CardsError("this is no peer-to-peer matrix; run nvidia-smi topo -p2p r")
    return found


def numa_nodes(text: str) -> frozenset[int] | None:
    """Nodes of "0-3" or "1,19-25"; None for N/A and the like."""
    nodes: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            return None
        nodes.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(nodes)


# -- nvidia-smi


def _is_header(line: str) -> bool:
    """Columns, not links: names of two cards, or one and what follows the cards."""
    names = re.findall(r"GPU\d+", line)
    return len(names) > 1 or (len(names) == 1 and "Affinity" in line)


def _nvidia(header: str | None, rows: list[str], devices: Mapping[str, str]) -> Topology:
    warnings: list[str] = []
    read = {}
    for row in rows:
        index = int(re.findall(r"GPU(\d+)", row)[0])
        if index in read:
            raise CardsError(
                f"the matrix has two rows GPU{index}: outputs of several hosts or runs are "
                f"mixed up; run {COMMAND} once on one host"
            )
        read[index] = _links(row)
    if header is not None:
        head = header.split("CPU Affinity")[0]
        columns = [int(n) for n in re.findall(r"GPU(\d+)", head)]
        nics = tuple(re.findall(r"NIC\d+|\b(?!GPU)[a-z]\w+_\d+", head))
    else:
        count = max([*read, *(i for links, _ in read.values() for i in _nvlinks(links))]) + 1
        columns, nics = list(range(count)), ()
        warnings.append(
            "the matrix has no header line: the cards are counted by its rows and by NVLink, "
            f"{count} here; run {COMMAND} again"
        )
    links: dict[Pair, str] = {}
    cut: list[int] = []
    numa: dict[int, frozenset[int]] = {}
    cpus: dict[int, str] = {}
    for index, (words, rest) in read.items():
        if index not in columns:
            raise CardsError(
                f"the matrix has a row GPU{index} and no such column: it is cut off "
                f"or mixed up; run {COMMAND} again"
            )
        place = columns.index(index)
        if place < len(words) and words[place] != "X":
            raise CardsError(
                f"row GPU{index} has {words[place]} where it meets itself: the columns are "
                f"shifted; run {COMMAND} again"
            )
        if len(words) < len(columns):
            cut.append(index)
        for column, word in zip(columns, words, strict=False):
            if column != index:
                pair = (min(index, column), max(index, column))
                if links.setdefault(pair, word) != word:
                    raise CardsError(
                        f"GPU{pair[0]} and GPU{pair[1]} are {links[pair]} in one row and {word} "
                        f"in the other: mixed-up outputs; run {COMMAND} again"
                    )
        if len(words) >= len(columns):
            cpu, node = _affinity(rest, len(columns), len(nics), words)
            if cpu:
                cpus[index] = cpu
            nodes = numa_nodes(node)
            if nodes is not None:
                numa[index] = nodes
    missing = [c for c in columns if c not in read]
    if missing or cut:
        names = ", ".join(f"GPU{i}" for i in [*missing, *cut])
        warnings.append(f"the matrix is cut off: the rows of {names} are missing or incomplete")
    to_nics = {
        (index, devices.get(nic, nic)): word
        for index, (words, _) in read.items()
        for nic, word in zip(nics, words[len(columns) :], strict=False)
    }
    return Topology("nvidia", tuple(columns), links, numa, cpus, nics, tuple(warnings), to_nics)


def _links(row: str) -> tuple[list[str], str]:
    """The links of a row in order, glued ones taken apart, and the rest of the line."""
    rest = re.sub(r"^\s*GPU\d+", "", row)
    words = []
    while match := re.match(rf"\s*({LINK.pattern})(?=[^\w-]|$|{LINK.pattern})", rest, re.I):
        words.append("SYS" if match[1].upper() == "SOC" else match[1].upper())
        rest = rest[match.end() :]
    return words, rest


def _nvlinks(words: list[str]) -> list[int]:
    return [i for i, word in enumerate(words) if word.startswith("NV")]


def _affinity(rest: str, cards: int, nics: int, words: list[str]) -> tuple[str, str]:
    """CPU and NUMA affinity behind the links; "" where blank or not told apart."""
    if "\t" in rest:
        cells = [c.strip() for c in rest.split("\t")]
        cells = cells[1:] if cells and not cells[0] else cells
        return (cells[0] if cells else ""), (cells[1] if len(cells) > 1 else "")
    cells = rest.split()
    if len(cells) >= 2 and len(words) == cards + nics:
        return cells[0], cells[1]
    # Without tabs a blank cell cannot be seen; two values are CPU and NUMA, in this order.
    return (cells[0], cells[1]) if len(cells) >= 2 and re.search(r"\d", cells[0]) else ("", "")


# -- rocm-smi


def _rocm(text: str) -> Topology:
    warnings: list[str] = []
    section = re.search(r"Link Type between two GPUs[ =]*\n(.*?)(?=\n\s*=|\Z)", text, re.S)
    links: dict[Pair, str] = {}
    cards: set[int] = set()
    numa = {
        int(m[1]): frozenset({int(m[2])})
        for m in re.finditer(r"GPU\s*\[?(\d+)\]?\s*:\s*\(Topology\) Numa Node:\s*(\d+)", text)
    }
    cards.update(numa)
    rows: dict[int, list[str]] = {}
    if section:
        columns = [int(n) for n in re.findall(r"GPU(\d+)", section[1].strip("\n").split("\n")[0])]
        cards.update(columns)
        for line in section[1].splitlines()[1:]:
            match = re.match(r"\s*GPU(\d+)\s+(\S.*)", line)
            if match:
                rows[int(match[1])] = match[2].split()
        for row, words in rows.items():
            for column, word in zip(columns, words, strict=False):
                if column != row and word in {"XGMI", "PCIE"}:
                    links[min(row, column), max(row, column)] = word
        cut = [c for c in columns if len(rows.get(c, [])) < len(columns)]
        if cut:
            names = ", ".join(f"GPU{i}" for i in cut)
            warnings.append(f"the matrix is cut off: the rows of {names} are missing or incomplete")
    elif len(cards) > 1:
        warnings.append(
            "the text says nothing of links, only of NUMA nodes; run rocm-smi --showtopo"
        )
    if not cards:
        raise CardsError("this text of rocm-smi names no card; run rocm-smi --showtopo")
    return Topology("amd", tuple(sorted(cards)), links, numa, {}, (), tuple(warnings))
