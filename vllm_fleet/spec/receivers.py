"""Receivers of alerts: which can work."""

from __future__ import annotations

from vllm_fleet.spec.model import Alerting, Receiver

ROBOTS = ("dingtalk", "feishu", "wecom")  # what the converter of ours stands before
RELAY_PORT = 9094  # of that converter, on the loopback address


def trouble(settings: Alerting, receiver: Receiver) -> str | None:
    """What a receiver lacks, or has too much of; None where it can work."""
    if receiver.kind == "mail":
        if not receiver.to:
            return "kind mail needs `to`, the addresses"
        if settings.mail is None:
            return "kind mail needs `monitoring.alerting.mail`, the server that sends it"
        if receiver.url_file:
            return "kind mail has no url_file; take it out"
    else:
        if not receiver.url_file:
            return f"kind {receiver.kind} needs `url_file`, which holds the webhook's address"
        if receiver.to:
            return f"kind {receiver.kind} has no `to`; take it out"
    if receiver.secret_file and receiver.kind not in ("dingtalk", "feishu"):
        return f"kind {receiver.kind} signs nothing; take secret_file out"
    return None
