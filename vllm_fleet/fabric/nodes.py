"""What all nodes of a span must have alike, compared before it starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_fleet.smi import CardsError, parse_gpus
from vllm_fleet.state import HostState

# Logs of ranks are read side by side, and certificates and locks go by the clock.
CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Versions:
    """What a node would run a rank with."""

    release: str  # id; says the lock, so every package
    libraries: Mapping[str, str] = field(default_factory=dict)  # torch, nccl, vllm
    driver: str = ""  # "" without cards

    def all(self) -> dict[str, str]:
        """Each by its name, what is not known left out."""
        found = {"release": self.release, **self.libraries, "driver": self.driver}
        return {name: version for name, version in found.items() if version}


def versions_of(state: HostState, release: str) -> Versions:
    """What the fact of a host says of a release on it."""
    try:
        cards = parse_gpus(str(state.cards.get("csv") or "")).cards
    except CardsError:
        cards = ()
    driver = next((card.driver for card in cards if card.driver), "")
    return Versions(release, state.libraries.get(release, {}), driver)


def differences(nodes: Mapping[str, Versions]) -> list[str]:
    """What is not alike over the nodes of a span, one line each with who has what.

    NCCL of two versions hangs or ends with a text that names neither.
    """
    known = {name: versions.all() for name, versions in nodes.items()}
    names = dict.fromkeys(name for found in known.values() for name in found)
    complaints = []
    for name in names:
        by_version: dict[str, list[str]] = {}
        for node, found in known.items():
            by_version.setdefault(found.get(name, "none"), []).append(node)
        if len(by_version) > 1:
            told = "; ".join(f"{v} on {', '.join(on)}" for v, on in by_version.items())
            complaints.append(f"{name} differs between the nodes of one model: {told}")
    if "driver" in names and len(complaints) == 1 and complaints[0].startswith("driver"):
        complaints[0] += ": install one driver on all of them, then reboot (maintain.py)"
    elif complaints:
        complaints[-1] += ": have one `vllm_version` and one lock for all of them, then deploy.py"
    return complaints


@dataclass(frozen=True)
class Clock:
    """How far a node's clock is ahead of another's, as that one saw it."""

    seen_by: str
    node: str
    ahead: float
    within: float  # by which that may be wrong


def clocks_apart(clocks: Sequence[Clock], limit: float = CLOCK_SECONDS) -> list[str]:
    """Nodes whose clock differs from most others' by more than a limit."""
    nodes = {c.node for c in clocks} | {c.seen_by for c in clocks}
    pairs: dict[str, dict[str, float]] = {}
    for c in clocks:
        if abs(c.ahead) - c.within > limit:
            pairs.setdefault(c.node, {})[c.seen_by] = c.ahead
            pairs.setdefault(c.seen_by, {})[c.node] = -c.ahead
    complaints = []
    for node, apart in pairs.items():
        # Of two nodes nobody knows which one is wrong; of more it is the one that stands alone.
        if len(nodes) > 2 and len(apart) * 2 <= len(nodes) - 1:
            continue
        ahead = sorted(apart.values())[len(apart) // 2]
        way = "ahead of" if ahead > 0 else "behind"
        complaints.append(
            f"{node}: its clock is {abs(ahead):.1f} s {way} {', '.join(sorted(apart))}: set it "
            "(timedatectl, chrony)"
        )
    return complaints[:1] if len(nodes) == 2 else complaints
