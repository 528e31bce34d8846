"""An own fleet against an API: what a day costs, and from how many tokens on it pays. Pure.

Every price is an input, in one currency. A day of the fleet costs what its hosts do over the
years they are written off, room, upkeep, people, and power by load; one of the API its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

DAYS = 365.0
MILLION = 1e6
MOST_HOSTS = 4096

Money = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class CostError(ValueError):
    """Prices that cannot be used; says which key, and what is expected."""


class _Inputs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hosts(_Inputs):
    """One host of the fleet; what is said of hosts is said of each."""

    price: Annotated[Money, Field(description="Of the server with its cards.")]
    years: Annotated[float, Field(gt=0, description="Until it is written off.")] = 4
    residual: Annotated[Share, Field(description="Share of the price that it is worth then.")] = 0
    interest: Annotated[float, Field(ge=0, description="Cost of the money a year, a share.")] = 0
    upkeep: Annotated[float, Field(ge=0, description="Support a year, a share of the price.")] = 0
    rack: Annotated[Money, Field(description="Room, cooling's share and network, a year.")] = 0
    watts_idle: Annotated[float, Field(ge=0)] = 0
    watts_load: Annotated[float, Field(gt=0, description="At the measured throughput.")]
    pue: Annotated[float, Field(ge=1, description="Power of the room over that of hosts.")] = 1.4
    spare: Annotated[int, Field(ge=0, description="Further hosts, for upgrades and failures.")] = 0


class People(_Inputs):
    """Who looks after it."""

    count: Annotated[float, Field(ge=0, description="Whole posts, for the whole fleet.")]
    cost: Annotated[Money, Field(description="Of one post a year, all in.")]


class Capacity(_Inputs):
    """What one host bears at the targets: the tokens of a measurement, a second."""

    input_per_second: Annotated[float, Field(ge=0)]
    output_per_second: Annotated[float, Field(gt=0)]
    utilisation: Annotated[
        float,
        Field(gt=0, le=1, description="Mean load of a day over its peak, which must fit."),
    ] = 0.3


class Api(_Inputs):
    """Prices of the API, a million tokens."""

    input: Money
    output: Money
    cached: Annotated[Money | None, Field(description="Of input found in its cache.")] = None
    cached_share: Annotated[Share, Field(description="Share of the input found there.")] = 0


class Traffic(_Inputs):
    """What is asked for."""

    tokens_a_day: Annotated[float, Field(gt=0, description="Input and output.")] | None = None
    input_share: Annotated[Share, Field(description="Share of them that is input.")] = 0.8


class Prices(_Inputs):
    """The file of `fleet cost`."""

    currency: str = "EUR"
    power: Annotated[Money, Field(description="A kilowatt hour.")]
    hosts: Hosts
    people: People
    capacity: Capacity
    api: Api
    traffic: Traffic = Traffic()


def parse(text: str, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Prices:
    """The content of a file; ``changes`` go over it, section by section. Raises CostError."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CostError(f"no YAML: {error}") from None
    if not isinstance(found, Mapping):
        raise CostError("a mapping is expected, see the example in docs/operations.md")
    merged = dict(found)
    for section, values in (changes or {}).items():
        merged[section] = {**(merged.get(section) or {}), **values}
    try:
        return Prices.model_validate(merged)
    except ValidationError as error:
        told = [
            f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()
        ]
        raise CostError("; ".join(told)) from None


@dataclass(frozen=True)
class BreakEven:
    """From how many tokens a day an own fleet is cheaper."""

    tokens: float  # a day
    hosts: int
    always_from: float | None  # from here on no further host makes it dearer again


def api_price(prices: Prices) -> float:
    """What a token costs at the API, of the traffic's mixture."""
    api, share = prices.api, prices.traffic.input_share
    fresh = api.input
    if api.cached is not None:
        fresh = api.input * (1 - api.cached_share) + api.cached * api.cached_share
    return (fresh * share + api.output * (1 - share)) / MILLION


def tokens_of_host(prices: Prices) -> float:
    """Tokens a day that one host bears, of the traffic's mixture, with the day's peak fitting.

    Input and output go side by side in the measurement; the scarcer one bounds the mixture.
    """
    capacity, share = prices.capacity, prices.traffic.input_share
    bounds = []
    if share < 1:
        bounds.append(capacity.output_per_second / (1 - share))
    if share > 0 and capacity.input_per_second > 0:
        bounds.append(capacity.input_per_second / share)
    return min(bounds) * 86400 * capacity.utilisation


def hosts_for(prices: Prices, tokens: float) -> int:
    """Hosts that bear so many tokens a day, without spares: one at least."""
    return max(1, math.ceil(tokens / tokens_of_host(prices) - 1e-9))


def parts_of_day(prices: Prices, hosts: int, tokens: float) -> dict[str, float]:
    """What a day costs with so many hosts (spares come on top), by what it goes into."""
    one, count = prices.hosts, hosts + prices.hosts.spare
    write_off = one.price * (1 - one.residual) / one.years
    # The money that is bound is on the average half of what is written off, and the rest.
    interest = one.price * (1 + one.residual) / 2 * one.interest
    full = tokens_of_host(prices) / prices.capacity.utilisation  # a day at the measured load
    busy = min(hosts, tokens / full)
    watts = count * one.watts_idle + busy * max(0.0, one.watts_load - one.watts_idle)
    return {
        "hardware": count * (write_off + interest) / DAYS,
        "upkeep": count * one.price * one.upkeep / DAYS,
        "rack": count * one.rack / DAYS,
        "people": prices.people.count * prices.people.cost / DAYS,
        "power": watts * one.pue * 24 / 1000 * prices.power,
    }


def day(prices: Prices, tokens: float) -> float:
    """What a day of so many tokens costs with as many hosts as they need."""
    return sum(parts_of_day(prices, hosts_for(prices, tokens), tokens).values())


def break_even(prices: Prices) -> BreakEven | None:
    """Where an own fleet becomes cheaper; None where it does with no number of hosts."""
    price, each = api_price(prices), tokens_of_host(prices)
    first: tuple[float, int] | None = None
    always: float | None = None
    for hosts in range(1, MOST_HOSTS + 1):
        fixed = sum(parts_of_day(prices, hosts, 0).values())
        slope = (sum(parts_of_day(prices, hosts, each).values()) - fixed) / each
        if price <= slope:
            break
        tokens = fixed / (price - slope)
        begins, ends = (hosts - 1) * each, hosts * each
        if tokens > ends:
            always = None  # at no load of so many hosts
            continue
        if first is None:
            first = tokens, hosts
        if always is None or tokens > begins:
            always = max(tokens, begins)
        if tokens <= begins:
            # Fixed cost grows by the same with each further host, and the API's by more.
            break
    else:
        always = None
    return BreakEven(first[0], first[1], always) if first else None


def summary(prices: Prices) -> dict[str, Any]:
    """All that `fleet cost` prints."""
    found = break_even(prices)
    data: dict[str, Any] = {
        "currency": prices.currency,
        "api_per_million": api_price(prices) * MILLION,
        "tokens_a_day_of_a_host": tokens_of_host(prices),
        "break_even": None
        if found is None
        else {
            "tokens_a_day": found.tokens,
            "hosts": found.hosts,
            "always_from": found.always_from,
        },
    }
    tokens = prices.traffic.tokens_a_day
    if tokens:
        hosts = hosts_for(prices, tokens)
        parts = parts_of_day(prices, hosts, tokens)
        own, api = sum(parts.values()), api_price(prices) * tokens
        data["today"] = {
            "tokens_a_day": tokens,
            "hosts": hosts,
            "spare": prices.hosts.spare,
            "load": tokens / (hosts * tokens_of_host(prices)),
            "parts_a_day": parts,
            "own_a_day": own,
            "api_a_day": api,
            "own_per_million": own / tokens * MILLION,
            "cheaper": "own" if own < api else "api",
        }
    return data


def of_bench(result: Mapping[str, Any], hosts_instances: int) -> dict[str, float]:
    """Capacity of a host by a result of `fleet bench`, with so many such instances on it.

    The level that keeps the targets counts; where none were given, the knee. Raises CostError.
    """
    streams = result.get("keeps_targets") or (result.get("knee") or {}).get("streams")
    level = next((one for one in result.get("levels") or () if one["streams"] == streams), None)
    if level is None:
        raise CostError("this result has no level that keeps its targets, and no knee")
    return {
        "input_per_second": level["in_per_second"] * hosts_instances,
        "output_per_second": level["out_per_second"] * hosts_instances,
    }
