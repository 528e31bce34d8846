"""Cards of a host and the groups they make: what one vLLM server may run on. Pure.

A group is a set of like cards (kind and memory) on the best links they have: first an NVLink or
NVSwitch island (or an XGMI hive), then one PCIe switch, one host bridge, one NUMA node. Sizes are
powers of two unless told. What cannot serve is left out, and said.

    listing = parse_gpus(csv_text)
    found = groups(listing.cards, parse_topo(topo_text))
    chosen = resolve("4 x A100-SXM4-80GB", found, taken={0, 1})
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from vllm_fleet.smi import (
    Card,
    CardsError,
    Listing,
    Process,
    attach,
    complaint,
    parse_compute_apps,
    parse_gpus,
    parse_kernel_log,
    parse_nvlink_status,
    parse_versions,
)
from vllm_fleet.topo import COMMAND, Pair, Topology, parse_p2p, parse_topo

__all__ = [
    "Card",
    "CardsError",
    "Group",
    "Groups",
    "LeftOut",
    "Listing",
    "Process",
    "Topology",
    "attach",
    "complaint",
    "groups",
    "parse_compute_apps",
    "parse_gpus",
    "parse_kernel_log",
    "parse_nvlink_status",
    "parse_p2p",
    "parse_topo",
    "parse_versions",
    "resolve",
    "worst_link",
]

# Links from best to worst; a group is made within one of these levels before the next is tried.
LEVELS = ({"NV", "XGMI", "C2C"}, {"PIX", "PXB"}, {"PHB"}, {"NODE"}, {"NUMA", "PCIE"})
RANK = {"NV": 0, "XGMI": 0, "C2C": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "PCIE": 5}
RANK |= {"NUMA": 5, "SYS": 6}
ALIKE = 0.03  # memory of like cards differs by less; ECC alone moves it by 6 %
BUSY_MIB = 1024  # more than this, or than BUSY_SHARE of a small card, is somebody's
BUSY_SHARE = 0.05
AMD_NOTE = "AMD groups are planned and rendered, and have not been run on hardware"


@dataclass(frozen=True)
class Group:
    """Like cards for one server."""

    gpus: tuple[int, ...]  # indices, ascending
    name: str
    memory_mib: int | None  # of each card: the least; None where nvidia-smi gives none
    link: str  # the worst one within; "single" for one card, "unknown" where not given
    vendor: str = "nvidia"


@dataclass(frozen=True)
class LeftOut:
    """A card no group may hold."""

    gpu: int
    why: str


@dataclass(frozen=True)
class Groups:
    """Groups of one host, and what was said about the rest."""

    groups: tuple[Group, ...]
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()  # the cards left out included, one sentence each
    cards: tuple[Card, ...] = ()  # the usable ones
    topology: Topology | None = None
    parts: tuple[Groups, ...] = ()  # of each maker, where a host has cards of several


def groups(
    cards: Sequence[Card],
    topology: Topology | None,
    *,
    p2p: Mapping[Pair, str] | None = None,
    own: Collection[int] = (),
    size: int | None = None,
) -> Groups:
    """Group a host's cards.

    ``own``: indices of cards that our own servers hold, which does not make them busy.
    ``size``: cards a group; None: the largest power of two. Never raises for odd hosts: what is
    odd is a warning, and its cards are left out.
    """
    vendors = sorted({c.vendor for c in cards})
    if len(vendors) > 1:
        return merged(
            [
                groups(
                    [c for c in cards if c.vendor == vendor],
                    topology if topology and topology.vendor == vendor else None,
                    p2p=p2p,
                    own=own,
                    size=size,
                )
                for vendor in vendors
            ]
        )
    warnings = list(topology.warnings) if topology else []
    out = list(_unfit(cards, own))
    gone = {o.gpu for o in out}
    usable = [c for c in cards if c.index not in gone]
    if topology is None:
        if len(usable) > 1:
            warnings.append(f"no matrix of links: every card is a group of its own; run {COMMAND}")
    else:
        warnings += _strangers(cards, topology)
        out += _unlinked(usable, topology)
        gone = {o.gpu for o in out}
        usable = [c for c in usable if c.index not in gone]
        # A card in use still shows what its peers should be linked by.
        whole = [c for c in cards if not c.faults and not c.mig and c.index in topology.cards]
        out += [o for o in _broken(whole, topology) if o.gpu not in gone]
        gone = {o.gpu for o in out}
        usable = [c for c in usable if c.index not in gone]
        warnings += _degraded(usable, topology)
    made: list[Group] = []
    for kind in _kinds(usable):
        made.extend(_grouped(kind, topology, size))
    made.sort(key=lambda g: g.gpus)
    out.sort(key=lambda o: o.gpu)
    warnings += [f"GPU{o.gpu} is left out: {o.why}" for o in out]
    spare = sorted({c.index for c in usable} - {i for g in made for i in g.gpus})
    if spare:
        names = ", ".join(f"GPU{i}" for i in spare)
        warnings.append(f"{names} make no group of {size} like cards on links that carry it")
    warnings += _kind_warnings(usable)
    warnings += _peer_warnings(made, p2p)
    return Groups(tuple(made), tuple(out), tuple(warnings), tuple(usable), topology)


def merged(parts: Sequence[Groups]) -> Groups:
    """Groups of one host's makers, side by side; each maker counts its cards from 0."""
    if len(parts) == 1:
        return parts[0]
    return Groups(
        parts=tuple(parts),
        groups=tuple(g for p in parts for g in p.groups),
        left_out=tuple(o for p in parts for o in p.left_out),
        warnings=tuple(w for p in parts for w in p.warnings),
        cards=tuple(c for p in parts for c in p.cards),
    )


def resolve(wanted: str, found: Groups, taken: Collection[int] = ()) -> Group:
    """The best free cards for "4 x A100-SXM4-80GB"; CardsError says why there are none.

    A whole free group comes first, then part of the group with the fewest free cards that are
    enough, then cards of several groups (their link is the worst between them: ask it before
    tensor parallelism).
    """
    match = re.fullmatch(r"\s*([1-9]\d*)\s*x\s*(\S.*?)\s*", wanted)
    if match is None:
        raise CardsError(f'{wanted!r} must be "COUNT x KIND", such as "4 x A100-SXM4-80GB"')
    count, kind = int(match[1]), match[2]
    names = _matching(kind, sorted({c.name for c in found.cards}))
    for part in found.parts:
        if len(names) == 1 and names[0] in {c.name for c in part.cards}:
            return resolve(wanted, part, taken)
    if not names:
        have = ", ".join(sorted({c.short_name for c in found.cards})) or "none that is usable"
        raise CardsError(f"no card here is a {kind}; this host has: {have}{_left(found)}")
    if len(names) > 1:
        raise CardsError(f"{kind!r} could be {' or '.join(names)}: write the whole name")
    cards = [c for c in found.cards if c.name == names[0]]
    free = [c for c in cards if c.index not in set(taken)]
    if len(free) < count:
        said = f"{len(cards)} usable, {len(cards) - len(free)} of them taken"
        raise CardsError(f"{count} free cards {names[0]} are wanted and {said}{_left(found)}")
    free_indices = {c.index for c in free}
    mine = [g for g in found.groups if g.gpus[0] in {c.index for c in cards}]
    whole = [g for g in mine if len(g.gpus) == count and free_indices >= set(g.gpus)]
    if whole:
        return min(whole, key=lambda g: (_rank(g.link), g.gpus))
    # Part of a group that is broken into already, so that whole groups stay whole.
    parts = [(set(g.gpus) & free_indices, _rank(g.link)) for g in mine]
    enough = [p for p in parts if len(p[0]) >= count]
    pool = min(enough, key=lambda p: (p[1], len(p[0]), min(p[0])))[0] if enough else free_indices
    chosen = _best(sorted(pool), count, found.topology)
    return _group([c for c in free if c.index in chosen], found.topology)


# -- what is left out


def _unfit(cards: Sequence[Card], own: Collection[int]) -> Iterator[LeftOut]:
    for card in cards:
        if card.faults:
            yield LeftOut(card.index, card.faults[0])
        elif card.mig:
            slices = f" ({', '.join(card.slices)})" if card.slices else ""
            yield LeftOut(
                card.index,
                f"it is in MIG mode{slices} and a slice has no links; to use it whole, "
                f"nvidia-smi -i {card.index} -mig 0",
            )
        elif card.index not in own and (use := _use(card)):
            yield LeftOut(card.index, use)


def _use(card: Card) -> str:
    """Who uses a card that is not ours, "" where nobody does.

    A desktop's few hundred MiB do not count; memory that nvidia-smi cannot give does.
    """
    limit = min(BUSY_MIB, BUSY_SHARE * card.memory_mib) if card.memory_mib else BUSY_MIB
    held = sum(p.memory_mib or 0 for p in card.processes)
    unknown = [p for p in card.processes if p.memory_mib is None]
    used = card.memory_used_mib or 0
    if max(used, held) <= limit and not unknown:
        return ""
    names = ", ".join(f"{p.name} (pid {p.pid})" for p in card.processes[:3])
    more = f" and {len(card.processes) - 3} more" if len(card.processes) > 3 else ""
    amount = f"{max(used, held)} MiB" if max(used, held) else "memory"
    return f"it is in use: {amount} held by {names + more if names else 'another process'}"


def _strangers(cards: Sequence[Card], topology: Topology) -> list[str]:
    listed = {c.index for c in cards}
    extra = sorted(set(topology.cards) - listed)
    if not extra:
        return []
    names = ", ".join(f"GPU{i}" for i in extra)
    return [
        f"{names} stand in the matrix of links and not in the list of cards: outputs of two hosts, "
        "or a card was lost in between; take both again"
    ]


def _unlinked(cards: Sequence[Card], topology: Topology) -> Iterator[LeftOut]:
    """Cards whose links are not all known, in a text that gives links at all."""
    if len(cards) < 2:
        return
    if topology.vendor == "amd" and not topology.links:
        return  # NUMA nodes alone; said by the parser
    for card in cards:
        if card.index not in topology.cards:
            yield LeftOut(
                card.index,
                "the matrix of links does not hold it: outputs of two hosts, or cut off; "
                f"run {COMMAND} again",
            )
    # A link stands in the rows of both cards; unknown, it is missing from both.
    unknown = {index for pair in topology.unknown() for index in pair}
    for card in cards:
        if card.index in unknown:
            yield LeftOut(card.index, f"its row of links is missing; run {COMMAND} again")


def _broken(cards: Sequence[Card], topology: Topology) -> Iterator[LeftOut]:
    """Cards without NVLink among like cards that all have it to each other."""
    for kind in _kinds(cards):
        indices = [c.index for c in kind]
        linked = [
            i for i in indices if any(_level(topology.link(i, j)) == 0 for j in indices if j != i)
        ]
        alone = [i for i in indices if i not in linked]
        whole = all(_level(topology.link(a, b)) == 0 for a, b in combinations(linked, 2))
        # A pair on a bridge beside a third card is how it was built; three and more are a switch
        # or a mesh, and a card outside it has lost its links.
        if not alone or len(linked) < 3 or not whole or len(alone) >= len(linked):
            continue
        strongest = max((topology.link(a, b) or "" for a, b in combinations(linked, 2)), key=_width)
        for index in alone:
            word = topology.link(index, linked[0])
            yield LeftOut(
                index,
                f"its NVLink is broken: {word} to its peers, which are {strongest} among each "
                f"other; see nvidia-smi nvlink -s -i {index} and the kernel log, then reset it "
                "or restart nvidia-fabricmanager",
            )


def _degraded(cards: Sequence[Card], topology: Topology) -> Iterator[str]:
    """A card with fewer NVLinks than its peers have among each other on a switch."""
    for kind in _kinds(cards):
        indices = [c.index for c in kind]
        if len(indices) < 4:
            continue
        for index in indices:
            mine = {topology.link(index, j) or "" for j in indices if j != index}
            rest = {
                topology.link(a, b) or ""
                for a, b in combinations(indices, 2)
                if index not in (a, b)
            }
            if len(mine) == 1 == len(rest) and 0 < _width(*mine) < _width(*rest):
                yield (
                    f"GPU{index} has lost NVLinks: {mine.pop()} to its peers, which are "
                    f"{rest.pop()} among each other; its groups are slower, see "
                    f"nvidia-smi nvlink -s -i {index}"
                )


# -- making groups


def _kinds(cards: Sequence[Card]) -> list[list[Card]]:
    """Cards of one maker, name and memory, in lists."""
    kinds: list[list[Card]] = []
    for card in sorted(cards, key=lambda c: c.index):
        for kind in kinds:
            if _alike(kind[0], card):
                kind.append(card)
                break
        else:
            kinds.append([card])
    return kinds


def _alike(first: Card, second: Card) -> bool:
    if (first.vendor, first.name) != (second.vendor, second.name):
        return False
    a, b = first.memory_mib, second.memory_mib
    if a is None or b is None:
        return a is b
    return abs(a - b) <= ALIKE * max(a, b)


def _grouped(kind: list[Card], topology: Topology | None, size: int | None) -> Iterator[Group]:
    rest = [c.index for c in kind]
    by_index = {c.index: c for c in kind}
    if topology is not None:
        for level in range(len(LEVELS)):
            while chosen := _largest(rest, level, topology, size):
                yield _group([by_index[i] for i in chosen], topology)
                rest = [i for i in rest if i not in chosen]
    if size in (None, 1):
        for index in rest:
            yield _group([by_index[index]], topology)


def _largest(
    rest: Sequence[int], level: int, topology: Topology, size: int | None
) -> tuple[int, ...]:
    """The largest set of cards all linked at this level or better; () where there is none."""
    sizes = [size] if size else [2**n for n in range(len(rest).bit_length(), 0, -1)]
    for count in sizes:
        if count < 2 or count > len(rest):
            continue
        fitting = [
            chosen
            for chosen in combinations(rest, count)
            if all(_pair_level(a, b, topology) <= level for a, b in combinations(chosen, 2))
        ]
        if fitting:
            return min(fitting, key=lambda c: _cost(c, topology))
    return ()


def _pair_level(first: int, second: int, topology: Topology) -> int:
    """Level of a pair; SYS within one NUMA node counts as that node."""
    link = topology.link(first, second)
    level = _level(link)
    if level < len(LEVELS) - 1:
        return level
    a, b = topology.numa.get(first), topology.numa.get(second)
    if a is not None and b is not None:
        return len(LEVELS) - 1 if a == b else len(LEVELS)
    return len(LEVELS) - 1 if link == "PCIE" else len(LEVELS)


@cache
def _level(link: str | None) -> int:
    word = "NV" if link and link.startswith("NV") else link
    return next((n for n, names in enumerate(LEVELS) if word in names), len(LEVELS))


@cache
def _rank(link: str | None) -> int:
    if link is None or link == "unknown":
        return 7
    return RANK["NV"] if link.startswith("NV") and link != "NUMA" else RANK.get(link, 0)


@cache
def _width(link: str) -> int:
    match = re.fullmatch(r"NV(\d+)", link)
    return int(match[1]) if match else 0


def _cost(chosen: tuple[int, ...], topology: Topology | None) -> tuple[object, ...]:
    """Smaller is better: links, NVLink width, few NUMA nodes, then the lowest indices."""
    if topology is None:
        return (chosen,)
    links = [topology.link(a, b) for a, b in combinations(chosen, 2)]
    # A card whose node is not known counts as a node of its own.
    nodes = {n for i in chosen for n in topology.numa.get(i, frozenset({-1 - i}))}
    worst = max((_rank(link) for link in links), default=0)
    return (
        worst,
        sum(_rank(link) for link in links),
        -min((_width(link or "") for link in links), default=0),
        -sum(_width(link or "") for link in links),
        len(nodes),
        chosen,
    )


def _best(pool: Sequence[int], count: int, topology: Topology | None) -> tuple[int, ...]:
    return min(combinations(pool, count), key=lambda chosen: _cost(chosen, topology))


def _group(cards: Sequence[Card], topology: Topology | None) -> Group:
    ordered = sorted(cards, key=lambda c: c.index)
    memory = [c.memory_mib for c in ordered if c.memory_mib is not None]
    return Group(
        gpus=tuple(c.index for c in ordered),
        name=ordered[0].name,
        memory_mib=min(memory) if memory else None,
        link=worst_link([c.index for c in ordered], topology),
        vendor=ordered[0].vendor,
    )


def worst_link(indices: Sequence[int], topology: Topology | None) -> str:
    """The slowest link between any two of these cards, in the words of :class:`Group`."""
    if len(indices) == 1:
        return "single"
    if topology is None:
        return "unknown"
    links = [topology.link(a, b) for a, b in combinations(indices, 2)]
    if None in links:
        return "NUMA" if topology.vendor == "amd" and not topology.links else "unknown"
    words = [link for link in links if link is not None]
    return max(words, key=lambda w: (_rank(w), -_width(w)))


# -- words


def _kind_warnings(cards: Sequence[Card]) -> Iterator[str]:
    if any(c.vendor == "amd" for c in cards):
        yield AMD_NOTE
    for card in cards:
        if card.memory_mib is None:
            yield (
                f"GPU{card.index} ({card.name}) has no memory figure: it shares the host's memory, "
                "or the list leaves it out; sizes must be given by hand"
            )
        if card.throttled:
            yield f"GPU{card.index} is throttled now: {', '.join(card.throttled)}"
        if card.pcie and card.pcie[2] < card.pcie[3]:
            # The generation drops when idle; the width does not.
            yield (
                f"GPU{card.index} has {card.pcie[2]} of {card.pcie[3]} PCIe lanes: reseat it, or "
                "see the slot's wiring"
            )


def _peer_warnings(made: Sequence[Group], p2p: Mapping[Pair, str] | None) -> Iterator[str]:
    for group in made:
        bad = sorted(
            {s for p in combinations(group.gpus, 2) if (s := (p2p or {}).get(p, "OK")) != "OK"}
        )
        if bad:
            yield (
                f"cards {list(group.gpus)} cannot reach each other directly ({', '.join(bad)}): "
                "NCCL copies through host memory; leave NCCL_P2P_DISABLE unset only if a test "
                "passes"
            )


def _matching(kind: str, names: Sequence[str]) -> list[str]:
    """Names that a kind stands for: the whole name first, else those that hold its words."""
    wanted = _words(kind)
    exact = [n for n in names if _words(n) == wanted]
    if exact:
        return exact
    return [n for n in names if _holds(_words(n), wanted)]


def _words(name: str) -> list[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return [w for w in words if w not in {"nvidia", "amd", "tesla", "geforce", "instinct"}]


def _holds(words: list[str], wanted: list[str]) -> bool:
    """Whether the wanted words stand in a row in the name: "H100" in "H100 80GB HBM3"."""
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words) - len(wanted) + 1))


def _left(found: Groups) -> str:
    if not found.left_out:
        return ""
    return "; left out: " + "; ".join(f"GPU{o.gpu}, {o.why}" for o in found.left_out)
