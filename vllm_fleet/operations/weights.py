"""Weights of the models on a host."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import operation

from vllm_fleet import paths
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations.remote import Script, installed

TOOLS_PYTHON = f"{paths.TOOLS}/current/bin/python"


@operation()
def verified(plan: HostPlan) -> Generator[Script, None, None]:
    """Fetch, verify and switch in the weights that are missing, here or on other hosts."""
    if not plan.wanted_weights:
        host.noop("all weights are verified")
        return
    for weights in plan.wanted_weights:
        yield Script(
            *installed("weights.py", TOOLS_PYTHON), "fetch", "--settings", "-", order=weights.order
        )
