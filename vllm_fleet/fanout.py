"""Which hosts give each other which weights in a run. Pure.

A model that several hosts lack, or that one lacks and another has, is fetched from the hub once
and then from host to host (:mod:`vllm_fleet.onhost.peers`). Hosts take their models in the order
of names, so that none waits for one that is at another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address

from vllm_fleet.host_plan import HostPlan, WeightsFetch

IDENTITY = ("source", "repo", "revision")


def arranged(plans: Mapping[str, HostPlan]) -> dict[str, HostPlan]:
    """The plans with what each fetch must know of the other hosts.

    Only of hosts that take part in this run and have `fanout.enabled`.
    """
    taking_part = {
        host: plan
        for host, plan in plans.items()
        if plan.spec.settings.fanout.enabled and is_ipv4(plan.spec.address)
    }
    fetches = {(host, one.name): one for host, plan in taking_part.items() for one in plan.weights}
    done = dict(plans)
    for host, plan in taking_part.items():
        weights = []
        for one in plan.weights:
            # The same port on all: a host that was given another one is not found.
            same = {
                other: fetches[other, one.name]
                for other, its in taking_part.items()
                if (other, one.name) in fetches
                and _alike(fetches[other, one.name], one)
                and its.spec.settings.fanout.port == plan.spec.settings.fanout.port
            }
            weights.append(_with_others(one, host, same, taking_part))
        done[host] = replace(plan, weights=tuple(sorted(weights, key=lambda one: one.name)))
    return done


def _with_others(
    one: WeightsFetch,
    host: str,
    same: Mapping[str, WeightsFetch],
    plans: Mapping[str, HostPlan],
) -> WeightsFetch:
    lacking = [other for other, fetch in same.items() if not fetch.present]
    if not lacking or len(same) < 2 or one.order["source"] == "path":
        return one

    def addresses(hosts: list[str]) -> list[str]:
        return [plans[other].spec.address for other in hosts]

    order = {
        **one.order,
        "fanout": {
            "me": plans[host].spec.address,
            "port": plans[host].spec.settings.fanout.port,
            "peers": addresses(list(same)),
            "fetchers": addresses(lacking),
        },
    }
    return replace(one, order=order, serves=one.present)


def _alike(one: WeightsFetch, other: WeightsFetch) -> bool:
    return all(one.order[key] == other.order[key] for key in IDENTITY)


def is_ipv4(address: str) -> bool:
    """Whether hosts can share weights at an address."""
    try:
        return ip_address(address).version == 4
    except ValueError:
        return False
