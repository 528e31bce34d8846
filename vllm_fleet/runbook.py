"""docs/runbook.md, made from the alerts and the table of known failures.

`python -m vllm_fleet.runbook > docs/runbook.md` writes it anew; a test holds the two together.
"""

from __future__ import annotations

import sys

from vllm_fleet.alerts import alerts
from vllm_fleet.causes import Cause, Rank, load

HEAD = """\
# Runbook

What to do when an alert fires, or when a log names a failure. `NAME` is the instance that the
alert names; commands run on the host that it names, as root. Made from the code by
`python -m vllm_fleet.runbook`: edit the tables, not this page.

Start here: `journalctl -u vllm@NAME -n 400 | fleet explain -` names the causes that it knows,
each with its entry below.
"""

AREAS = {
    "engine": "vLLM",
    "cuda": "CUDA, driver and cards",
    "nccl": "NCCL, gloo and links between cards and hosts",
    "systemd": "systemd and the host",
    "nginx": "Gateway",
    "client": "Clients",
    "modelscope": "Downloads",
    "install": "Installs and access",
}


def text() -> str:
    """The whole page."""
    parts = [HEAD, "## Alerts\n"]
    for alert in alerts():
        parts.append(
            f"### {alert.anchor}\n\n"
            f"{alert.name}, {alert.severity}, after {alert.wait}.\n\n"
            f"{alert.why}\n\n**Do:** {alert.remedy}\n\n"
            f"```\n{alert.expr}\n```\n"
        )
    for area, title in AREAS.items():
        parts.append(f"## Known failures: {title}\n")
        parts += [_cause(c) for c in load() if c.where == area]
    return "\n".join(parts)


def _cause(cause: Cause) -> str:
    hint = "" if cause.rank is Rank.ROOT else " A symptom: look for a cause above it as well."
    return f"### {cause.id}\n\n{cause.cause}{hint}\n\n**Do:** {cause.remedy}\n"


if __name__ == "__main__":
    sys.stdout.write(text())
