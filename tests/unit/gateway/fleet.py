"""Pools and host specs made up for tests of the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_fleet.planned import PlannedInstance, Pool
from vllm_fleet.spec.model import Gateway, HostSettings, HostSpec, Model


def spec(address: str = "127.0.0.1", **gateway: Any) -> HostSpec:
    """A gateway host with these settings of ``gateway``."""
    settings = HostSettings(gateway=Gateway(**gateway))
    return HostSpec(name="gw-01", groups=("gateway",), address=address, settings=settings)


def pool(
    name: str,
    ports: Sequence[int],
    *,
    aliases: tuple[str, ...] = (),
    address: str = "127.0.0.1",
    **args: object,
) -> Pool:
    """A pool with an instance on each port, named a, b, c, ... on gpu-01, gpu-02, ..."""
    model = Model(repo=f"org/{name}", aliases=aliases)
    instances = tuple(
        PlannedInstance(
            host=f"gpu-{number:02}",
            address=address,
            name=f"{name.lower()}-{number}",
            model_name=name,
            model=model,
            port=port,
            device="cpu",
            cards=(),
            uuids=(),
            release="0.21.0-abc",
            vllm_version="0.21.0",
            weights=f"/opt/vllm/models/{name}/v1",
            args=dict(args),
            env={},
            start_seconds=60,
            drain_seconds=60,
        )
        for number, port in enumerate(ports, 1)
    )
    return Pool(name=name, aliases=aliases, model=model, instances=instances)


def varied(pool: Pool, *each: dict[str, object]) -> Pool:
    """The pool with these further options of its instances, one mapping for each."""
    instances = tuple(
        replace(one, args={**one.args, **args})
        for one, args in zip(pool.instances, each, strict=True)
    )
    return replace(pool, instances=instances)
