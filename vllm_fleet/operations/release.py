"""The tools venv and the releases of vLLM on a host."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import operation

from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations.remote import Script, installed


@operation()
def tools(plan: HostPlan) -> Generator[Script, None, None]:
    """Have the small venv of ours: the model hub's library, uv, the exporter."""
    if plan.missing_tools is None:
        host.noop("the tools are there")
        return
    yield Script(*installed("tools.py"), "build", "--settings", "-", order=plan.missing_tools.order)


@operation()
def pruned(plan: HostPlan) -> Generator[Script, None, None]:
    """Remove the releases and revisions of weights that are kept no longer."""
    if not plan.prune:
        host.noop("nothing is kept too long")
        return
    yield Script(*installed("prune.py"), "prune", "--settings", "-", order=dict(plan.prune))


@operation()
def built(plan: HostPlan) -> Generator[Script, None, None]:
    """Build the releases that are missing, beside their place, and switch them in."""
    if not plan.missing_releases:
        host.noop("every release is there")
        return
    for release in plan.missing_releases:
        yield Script(*installed("release.py"), "build", "--settings", "-", order=release.order)
