"""Levels made for tests."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_fleet.bench.report import Level, Spread


def level(
    streams: int,
    out: float,
    *,
    first: float = 0.2,
    between: float = 0.02,
    whole: float = 2.0,
    failed: Mapping[str, int] | None = None,
    points: tuple[tuple[float, float], ...] = (),
) -> Level:
    """A level of 100 answered requests in 100 s, with so many tokens out a second."""
    return Level(
        streams=streams,
        began=1000.0,
        ended=1100.0,
        answered=100,
        failed=failed or {},
        cut=0,
        tokens_in=51_200,
        tokens_out=round(out * 100),
        first_token=Spread(first, first, first, first),
        between_tokens=Spread(between, between, between, between),
        whole=Spread(whole, whole, whole, whole),
        points=points,
    )
