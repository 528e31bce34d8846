"""The file that bench.py compares from: one load, several configurations of one instance. Pure.

    load: {input: 1024~256, output: 256, streams: 32}
    configurations:
      as it is: {}
      cache in FP8: {vllm_args: {kv-cache-dtype: fp8}}
      two cards: {cards: [0, 1]}

A configuration names what differs from group_vars: `vllm_args` and `env` over those of the
instance, `cards` instead of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from vllm_fleet.bench.knee import Target, TargetError
from vllm_fleet.bench.load import PATHS, Length, Load, LoadError, prefix_of, ramp, seconds_of
from vllm_fleet.spec.model import Fleet, HostSpec, Instance

CONFIGURATION = ("vllm_args", "env", "cards")
LOAD = ("input", "output", "streams", "requests", "seconds", "prefix", "turns", "path", "tokenizer")


class ConfigurationError(ValueError):
    """The file cannot be used; says which key, and what is allowed."""


@dataclass(frozen=True)
class Comparison:
    """What to compare, and with which load; ``load`` has no address yet."""

    load: Load
    targets: tuple[Target, ...]
    configurations: Mapping[str, Mapping[str, Any]]


def parse(text: str, model: str) -> Comparison:
    """The file's content. Raises ConfigurationError."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"no YAML: {error}") from None
    found = _mapping(found, "the file", ("load", "targets", "configurations"))
    asked = _mapping(found.get("load") or {}, "load", LOAD)
    configurations = found.get("configurations")
    if not isinstance(configurations, Mapping) or not configurations:
        raise ConfigurationError("configurations: a mapping of names to what differs is expected")
    return Comparison(
        _load(asked, model),
        _targets(found.get("targets") or []),
        {
            str(name): _mapping(one or {}, f"configurations: {name}", CONFIGURATION)
            for name, one in configurations.items()
        },
    )


def applied(fleet: Fleet, host: str, name: str, change: Mapping[str, Any]) -> Fleet:
    """The fleet with one instance changed on one host. Raises ConfigurationError."""
    spec = fleet.host(host)
    one = next(one for one in spec.instances if one.name == name)
    given = one.model_dump()
    for key, value in change.items():
        if key == "cards":
            given[key] = tuple(value) if isinstance(value, list) else value
        else:
            given[key] = {**given[key], **(value or {})}
    try:
        changed = Instance.model_validate(given)
    except ValidationError as error:
        told = "; ".join(f"{_path(e['loc'])}: {e['msg']}" for e in error.errors())
        raise ConfigurationError(told) from None
    return fleet.model_copy(
        update={
            "hosts": tuple(_with(one, name, changed) if one == spec else one for one in fleet.hosts)
        }
    )


def _with(spec: HostSpec, name: str, changed: Instance) -> HostSpec:
    instances = tuple(
        changed if one.name == name and spec.name in one.hosts else one
        for one in spec.settings.instances
    )
    settings = spec.settings.model_copy(update={"instances": instances})
    return spec.model_copy(update={"settings": settings})


def _path(parts: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in parts)


def _mapping(found: Any, where: str, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{where}: a mapping is expected, with {', '.join(allowed)}")
    if unknown := sorted(str(key) for key in set(found) - set(allowed)):
        raise ConfigurationError(
            f"{where}: {', '.join(unknown)}: unknown; there is {', '.join(allowed)}"
        )
    return found


def _load(asked: Mapping[str, Any], model: str) -> Load:
    known = {str(key): str(value) for key, value in asked.items()}
    try:
        shared, kinds = prefix_of(known["prefix"]) if "prefix" in known else (0, 1)
        streams = asked.get("streams", 16)
        return Load(
            url="",
            model=model,
            tokenizer=known.get("tokenizer", ""),
            streams=tuple(map(int, streams)) if isinstance(streams, list) else ramp(int(streams)),
            input=Length.parse(known.get("input", "512")),
            output=Length.parse(known.get("output", "128")),
            requests_per_stream=int(asked.get("requests", 8)),
            seconds=seconds_of(known.get("seconds", "120s")),
            prefix_tokens=shared,
            prefixes=kinds,
            turns=int(asked.get("turns", 1)),
            path=_path_of(known.get("path", "chat")),
        )
    except (LoadError, ValueError, TypeError) as error:
        raise ConfigurationError(f"load: {error}") from None


def _path_of(text: str) -> str:
    if text not in PATHS:
        raise LoadError(f"path: {text!r}: one of {', '.join(PATHS)}")
    return text


def _targets(found: Any) -> tuple[Target, ...]:
    if not isinstance(found, list):
        raise ConfigurationError("targets: a list is expected, such as [ttft-p95=1s]")
    try:
        return tuple(Target.parse(str(one)) for one in found)
    except TargetError as error:
        raise ConfigurationError(f"targets: {error}") from None
