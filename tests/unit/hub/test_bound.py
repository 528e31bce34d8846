"""The bound of downloads: every byte that is read from the hub is paid for, once."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import hub as stub
from vllm_fleet.onhost import hub

SIZE = 3 << 20
PLAIN = {name: getattr(http.client.HTTPResponse, name) for name in hub.READS}


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(hub, "time", made)
    return made


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "Tiny/one").mkdir(parents=True)
    (tmp_path / "Tiny/one/a.bin").write_bytes(b"x" * SIZE)
    with stub.running(tmp_path) as endpoint:
        yield f"{endpoint}/api/v1/models/Tiny/one/repo?Revision=master&FilePath=a.bin"


@pytest.mark.parametrize("how", ["read", "blocks", "read1", "readinto"])
def test_each_byte_is_paid_for_once(clock: Clock, url: str, how: str) -> None:
    rate = 1 << 20
    with hub.Bound(rate).kept(), urllib.request.urlopen(url) as answer:
        total = 0
        if how == "read":
            total = len(answer.read())
        buffer = bytearray(65536)
        while how != "read":
            more: Any = (
                answer.read(50_000) if how == "blocks"
                else answer.read1(50_000) if how == "read1"
                else buffer[: answer.readinto(buffer)]
            )  # fmt: skip
            if not more:
                break
            total += len(more)
    assert total == SIZE
    assert clock.slept == pytest.approx(SIZE / rate - hub.Bound.BURST_SECONDS)


def test_connections_share_the_bound(clock: Clock, url: str) -> None:
    with hub.Bound(1 << 20).kept():
        for _ in range(3):
            with urllib.request.urlopen(url) as answer:
                answer.read()
    assert clock.slept == pytest.approx(3 * SIZE / (1 << 20) - hub.Bound.BURST_SECONDS)


def test_other_hosts_are_not_bounded(clock: Clock, url: str) -> None:
    with hub.Bound(1 << 20).kept(), urllib.request.urlopen(url) as answer:
        answer.unbounded = True
        assert len(answer.read()) == SIZE
    assert clock.slept == 0


def test_nothing_stays_behind(url: str) -> None:
    with hub.Bound(1 << 30).kept():
        assert {n: getattr(http.client.HTTPResponse, n) for n in hub.READS} != PLAIN
    assert {n: getattr(http.client.HTTPResponse, n) for n in hub.READS} == PLAIN
