"""How the nodes of models that span hosts reach each other. Pure: facts in, decisions out.

:mod:`discovery` reads what a host has, :mod:`environment` chooses and checks the variables of
NCCL, gloo and vLLM for it, :mod:`nodes` compares versions, :mod:`findings` judges the test.
"""

from __future__ import annotations

from vllm_fleet import paths
from vllm_fleet.spec.model import HostSpec, Nccl

# Read by the units of ranks (EnvironmentFile=), written by nccl.py alone: only what was tested
# on all hosts together is ever in it. No instance may have this name.
NAME = "fabric"
FILE = f"{paths.ETC}/{NAME}.env"


def taken_part(spec: HostSpec) -> Nccl | None:
    """The settings of a host that is part of the fabric; None where it is not."""
    return spec.settings.nccl if "gpu" in spec.groups else None


def text_of(environment: dict[str, str]) -> str:
    """The file of an environment; values hold no quotes (checked in :mod:`environment`)."""
    lines = [f'{key}="{environment[key]}"' for key in sorted(environment)]
    head = f"# {paths.MARK}: found and tested by nccl.py; changes are undone by its next run."
    return "\n".join([head, *lines]) + "\n"


def environment_of(text: str | None) -> dict[str, str]:
    """The variables of such a file; none where there is no file."""
    found = {}
    for line in (text or "").splitlines():
        key, mark, value = line.partition("=")
        if mark and not line.startswith("#"):
            found[key.strip()] = value.strip().strip('"')
    return found
