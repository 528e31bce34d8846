"""What the test runs on, and what is said of its findings: one line for one cause."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cards.made import gpus, matrix, uniform
from tests.unit.fleets import state
from vllm_fleet.fabric.trial import (
    Member,
    Place,
    floor_of,
    link_findings,
    place,
    places,
    rank_findings,
)
from vllm_fleet.state import HostState

NAMES = ("a", "b", "c", "d")
MEMBERS = [Member(name, f"10.0.0.{i}", "eno1", 9000) for i, name in enumerate(NAMES, 1)]
SEEN = {"why": "", "mtu_why": "", "through": "eno1"}
REACHED = {"problems": {}, "clock": [0.001, 0.0]}


def cards(used: dict[int, int] | None = None, holders: tuple[int, ...] = ()) -> HostState:
    """A host with four cards of 80 GiB."""
    listed = gpus(4, used=used)
    uuids = [line.split(", ")[2] for line in listed.splitlines()[1:]]
    return state(
        cards={
            "present": True,
            "error": None,
            "csv": listed,
            "holders": [{"uuid": uuids[i]} for i in holders],
            "topo": matrix(uniform(4, "NV4")),
        }
    )


def test_free_cards_are_tested_on_and_no_others() -> None:
    assert place(cards(), 256) == Place((0, 1, 2, 3), False)
    assert place(cards({1: 75000}, (1, 2)), 256) == Place((0, 3), False)


def test_a_card_that_serves_is_taken_where_all_do_and_it_has_room() -> None:
    full = dict.fromkeys(range(4), 70000)
    assert place(cards(full | {2: 60000}, (0, 1, 2, 3)), 256) == Place((2,), True)
    with pytest.raises(ValueError, match=r"every card serves, and none has 2112 MiB left .*hold"):
        place(cards(dict.fromkeys(range(4), 80500), (0, 1, 2, 3)), 256)


def test_as_many_cards_on_every_host() -> None:
    found = places({"a": cards(), "b": cards({0: 70000, 1: 70000}, (0, 1))}, True, 256)
    assert found == {"a": Place((0, 1), False), "b": Place((2, 3), False)}
    assert places({"a": cards()}, False, 256) == {"a": Place((), False)}
    full = cards(dict.fromkeys(range(4), 80500), (0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"a: every card.*\nb: every card"):
        places({"a": full, "b": full, "c": cards()}, True, 256)


def looked(
    dead: set[tuple[str, str]] | None = None,
    *,
    seen: dict[tuple[str, str], dict[str, Any]] | None = None,
    reached: dict[tuple[str, str], dict[str, Any]] | None = None,
    taken: dict[str, dict[str, str]] | None = None,
) -> tuple[list[str], list[str]]:
    """Complaints and notices, everything good but what is given."""
    paths, ports = {}, {}
    for a in NAMES:
        peers = [b for b in NAMES if b != a]
        gone = {b for b in peers if (a, b) in (dead or set())}
        links = {b: {**SEEN, **(seen or {}).get((a, b), {})} for b in peers}
        paths[a] = {
            "why": "",
            "peers": links | {b: {**SEEN, "why": "no answer"} for b in gone},
        }
        none = {"problems": {"29400": "no answer"}, "clock": None}
        ports[a] = {
            "taken": (taken or {}).get(a, {}),
            "peers": {
                b: none if b in gone else {**REACHED, **(reached or {}).get((a, b), {})}
                for b in peers
            },
        }
    return link_findings(MEMBERS, paths, ports)


def test_good_links_are_no_news() -> None:
    assert looked() == ([], [])


def test_a_host_that_nobody_reaches_is_one_line() -> None:
    dead = {(a, "c") for a in "abd"} | {("c", b) for b in "abd"}
    complaints, _ = looked(dead)
    assert complaints == [
        "c: none of the others reaches it (10.0.0.3 through eno1): no answer; look at its "
        "interface, firewall and switch port"
    ]


def test_hosts_none_of_which_reaches_another_are_one_line() -> None:
    dead = {(a, b) for a in NAMES for b in NAMES if a != b}
    complaints, _ = looked(dead)
    assert len(complaints) == 1
    assert complaints[0].startswith("no host reaches another through eno1: a → b (10.0.0.2): no")


def test_one_way_alone_is_told_as_that_way() -> None:
    assert looked({("a", "b")})[0] == ["a → b (10.0.0.2 through eno1): no answer"]


def test_a_taken_port_is_not_told_as_a_blocked_one() -> None:
    problems = {
        (a, "b"): {"problems": {"29400": "connection refused"}, "clock": None} for a in "acd"
    }
    complaints, _ = looked(reached=problems, taken={"b": {"29400": "pid 7 of root: nginx"}})
    assert complaints == [
        "b: port 29400 is taken by pid 7 of root: nginx: end that, or set another nccl.port"
    ]


def test_no_echo_is_no_fault_where_ports_answer() -> None:
    complaints, notices = looked(seen={("a", "b"): {"why": "no answer"}})
    assert complaints == []
    assert notices == [
        "a → b (10.0.0.2 through eno1): no answer to an echo request: MTU was not tried"
    ]


def test_another_route_than_the_interface_is_a_notice() -> None:
    complaints, notices = looked(seen={("a", "b"): {"through": "eno2"}})
    assert complaints == []
    assert "the kernel's own route leads through eno2" in notices[0]


def test_clocks_of_hosts() -> None:
    ahead = {("a", "d"): 60.0, ("b", "d"): 60.1, ("c", "d"): 60.0}
    reached = {
        **{pair: {"clock": [0.01, seconds]} for pair, seconds in ahead.items()},
        **{(b, a): {"clock": [0.01, -seconds]} for (a, b), seconds in ahead.items()},
    }
    complaints, _ = looked(reached=reached)
    assert complaints == ["d: its clock is 60.0 s ahead of a, b, c: set it (timedatectl, chrony)"]


# --- ranks

RESULT: dict[str, Any] = {
    "rank": 0,
    "wrong": 0,
    "busbw_gbyte": 40.0,
    "point_to_point": {"gbyte": 20.0},
    "backend": "nccl",
    "torch": "2.11.0",
    "transports": {"NET/IB/GDRDMA": 4},
    "nccl": {"version": "2.28.9", "network": "IB", "warnings": []},
}


def rank(**changes: Any) -> dict[str, Any]:
    one = {"rank": 0, "code": 0, "step": "leave", "why": "", "tail": [], "ended": False}
    return {"ranks": [{**one, "result": RESULT, **changes}]}


def found(first: str = "", **by_host: Any) -> list[str]:
    """Complaints about the ranks of hosts; InfiniBand was promised, and 10 GB a second."""
    hosts = {"a": rank(), "b": rank(), **by_host}
    return rank_findings(hosts, first=first, layer="InfiniBand", floor=10.0, seconds=60)[0]


def test_right_and_fast() -> None:
    complaints, notices, figures = rank_findings(
        {"a": rank(), "b": rank()}, first="", layer="InfiniBand", floor=10.0, seconds=60
    )
    assert (complaints, notices) == ([], [])
    assert figures["busbw_gbyte"] == 40.0
    assert figures["transports"] == {"NET/IB/GDRDMA": 8}


def test_without_gpudirect_is_a_notice() -> None:
    plain = rank(result={**RESULT, "transports": {"NET/IB": 4}})
    _, notices, _ = rank_findings(
        {"a": plain, "b": plain}, first="", layer="RoCE", floor=None, seconds=60
    )
    assert "RoCE without GPUDirect" in notices[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"result": {**RESULT, "wrong": 3}}, "a: rank 0: 3 numbers came wrong"),
        (
            {"result": {**RESULT, "transports": {"NET/Socket": 2}}},
            "a: NCCL took NET/Socket where InfiniBand was promised",
        ),
        ({"result": {**RESULT, "busbw_gbyte": 2.0}}, "reaches 2.00 GB/s bus bandwidth, less than"),
        ({"result": None, "code": 1, "why": "NCCL error"}, "a: rank 0, leave: NCCL error"),
        (
            {"result": None, "code": 1, "step": "", "tail": ["No module named 'torch'"]},
            "a: rank 0 ended with 1 at its start: No module named 'torch'",
        ),
    ],
)
def test_what_a_rank_found(changes: dict[str, Any], told: str) -> None:
    complaints = found(a=rank(**changes))
    assert len(complaints) == 1
    assert told in complaints[0]


def test_the_cause_is_told_and_not_who_waited_for_it() -> None:
    waits = rank(result=None, code=-9, step="rendezvous", ended=False)
    assert found("b", a=waits, b="connection lost") == ["b: connection lost"]
    closed = rank(result=None, code=1, why="Connection closed by peer [10.0.0.2]")
    assert found("b", a=closed, b=rank(result=None, code=1, why="out of memory")) == [
        "b: rank 0, leave: out of memory"
    ]
    killed = rank(result=None, code=-9, step="all-reduce")
    assert "b: rank 0 was killed at all-reduce" in found("b", a=waits, b=killed)[0]


def test_who_stood_still_while_others_waited() -> None:
    late = {"result": None, "code": -14}
    told = found("a", a=rank(step="rendezvous", **late), b=rank(step="torch", **late))
    assert told == ["b: stood still at torch while the others waited, 60 s: hung, or overloaded"]
    told = found("a", a=rank(step="all-reduce", **late), b=rank(step="all-reduce", **late))
    assert "did not get through within 60 s, all at all-reduce" in told[0]


def test_what_is_promised_of_bandwidth() -> None:
    assert floor_of(3.0, [400.0, 400.0], nccl=True) == 3.0
    assert floor_of(None, [400.0, 200.0], nccl=True) == 6.25
    assert floor_of(None, [400.0, None], nccl=True) is None
    assert floor_of(None, [10.0, 10.0], nccl=False) is None
