"""docs/runbook.md, made from the alerts, the doctor's findings and the table of known failures.

The three have one name space: an alert's anchor, a finding's id and the id of an explained log
are headings here, and a thing that is told in several ways has one entry.

`python -m vllm_fleet.runbook > docs/runbook.md` writes it anew; a test holds the two together.
"""

from __future__ import annotations

import sys

from vllm_fleet.alerts import alerts
from vllm_fleet.causes import Cause, Rank, load
from vllm_fleet.doctor.entries import AREAS, ENTRIES, SHARED

HEAD = """\
# Runbook

What to do when an alert fires, when `fleet doctor` finds something, or when a log names a failure:
each leads to one entry here, by its name. `NAME` is the instance that is named; commands run on
the host that is named, as root. Made from the code by `python -m vllm_fleet.runbook`: edit the
tables, not this page.

Start here: `fleet doctor INVENTORY` looks at everything, and
`journalctl -u vllm@NAME -n 400 | fleet explain -` names the causes that it knows in a log.
"""

PLACES = {
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
            f"{alert.name}, {alert.severity}, after {alert.wait}.{_doctor(alert.anchor)}\n\n"
            f"{alert.why}\n\n**Do:** {alert.remedy}\n\n"
            f"```\n{alert.expr}\n```\n"
        )
    parts.append("## Found by `fleet doctor`\n")
    for entry in ENTRIES:
        parts.append(
            f"### {entry.id}\n\n{entry.level.capitalize()}: {AREAS[entry.area]}.\n\n"
            f"{entry.cause}\n\n**Do:** {entry.remedy}\n"
        )
    for where, title in PLACES.items():
        parts.append(f"## Known failures: {title}\n")
        parts += [_cause(c) for c in load() if c.where == where]
    return "\n".join(parts)


def _cause(cause: Cause) -> str:
    hint = "" if cause.rank is Rank.ROOT else " A symptom: look for a cause above it as well."
    text = f"{cause.cause}{hint}{_doctor(cause.id)}"
    return f"### {cause.id}\n\n{text}\n\n**Do:** {cause.remedy}\n"


def _doctor(name: str) -> str:
    return " `fleet doctor` looks for it too." if name in SHARED else ""


if __name__ == "__main__":
    sys.stdout.write(text())
