"""Files of Alertmanager: who is told of what, and what holds back what. Pure.

Debian's package, added to: a configuration of ours beside its own, chosen by a drop-in of its
unit. It listens on the loopback address alone, since whoever reaches it can silence alerts.
Robots of DingTalk, Feishu and WeCom want JSON of their own, and signatures; a small converter
(onhost/relay.py) stands between, on the loopback address too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from vllm_fleet import paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.render import render
from vllm_fleet.spec.model import Alerting, HostSpec, Receiver
from vllm_fleet.spec.receivers import RELAY_PORT, ROBOTS, trouble

PACKAGES = ("prometheus-alertmanager",)
UNIT = "prometheus-alertmanager.service"
CONFIG = "/etc/prometheus/alertmanager-vllm-fleet.yml"
DROPIN = f"/etc/systemd/system/{UNIT}.d/10-vllm-fleet.conf"
PACKAGED = "/etc/prometheus/alertmanager.yml"
DEFAULTS = "/etc/default/prometheus-alertmanager"
RELAY_UNIT = "vllm-fleet-relay.service"
RELAY_SETTINGS = f"{paths.ETC}/relay.json"

NOBODY = "nobody"

# What a cause holds back: (the cause, what it explains, labels that both must share).
INHIBITIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # A host that is dead is one message. Pools are of all hosts, and are told apart from it.
    ("HostDown", (".+",), ("host",)),
    (
        "PlannedChange",
        (
            *("PoolDown", "InstanceDown", "InstanceNotReady", "InstanceFlaps"),
            *("RequestsHeld", "RequestsQueued", "ProbeFails", "MixedVersions"),
        ),
        ("pool",),
    ),
    ("PoolDown", ("RequestsHeld", "RequestsQueued", "RequestsRefused"), ("pool",)),
    ("InstanceFailed", ("InstanceDown", "InstanceNotReady"), ("host", "instance")),
    ("EngineTakenOut", ("InstanceNotReady", "EngineWedged", "ProbeFails"), ("host", "instance")),
    ("EngineWedged", ("ProbeFails",), ("host", "instance")),
    ("DiskFull", ("DiskFullSoon",), ("host", "mountpoint")),
    ("CertificateExpires", ("CertificateExpiresSoon",), ("host", "file")),
    ("FirstTokenBudgetFast", ("FirstTokenBudgetSlow", "FirstTokenSlow"), ("pool",)),
    ("TokenGapBudgetFast", ("TokenGapBudgetSlow",), ("pool",)),
    ("CardGone", ("NvlinkDown", "GroupMemoryUneven", "HostwatchSilent"), ("host",)),
)


def files(spec: HostSpec, secrets: Mapping[str, str]) -> list[ManagedFile]:
    """Configuration, drop-in and converter; none where there is no receiver.

    `secrets` holds the texts of the files that the settings name. Raises ValueError, naming
    host and setting, for a receiver that cannot work.
    """
    settings = spec.settings.monitoring.alerting
    if not settings.receivers:
        return []
    for name, receiver in settings.receivers.items():
        if problem := trouble(settings, receiver):
            raise ValueError(f"{spec.name}: monitoring.alerting.receivers.{name}: {problem}")
    flags = (
        f"--config.file={CONFIG}",
        f"--web.listen-address=127.0.0.1:{settings.port}",
        "--cluster.listen-address=",  # one of it: nobody to gossip with
    )
    result = [
        ManagedFile(
            CONFIG,
            _config(settings, secrets),
            mode=0o640,
            group="prometheus",
            secret=True,
        ),
        ManagedFile(
            DROPIN, render("prometheus/alertmanager.service.j2", mark=paths.MARK, flags=flags)
        ),
    ]
    robots = {n: r for n, r in settings.receivers.items() if r.kind in ROBOTS}
    if not robots:
        return result
    order = {
        "port": RELAY_PORT,
        "receivers": {
            name: {
                "kind": robot.kind,
                "url": secrets[robot.url_file or ""].strip(),
                "secret": secrets[robot.secret_file].strip() if robot.secret_file else "",
            }
            for name, robot in robots.items()
        },
    }
    source = resources.files("vllm_fleet.onhost").joinpath("relay.py").read_text(encoding="utf-8")
    unit = render(
        "prometheus/relay.service.j2", mark=paths.MARK, lib=paths.LIB, settings=RELAY_SETTINGS
    )
    return [
        *result,
        ManagedFile(f"{paths.LIB}/relay.py", f"# {paths.MARK}\n{source}"),
        ManagedFile(RELAY_SETTINGS, json.dumps(order, indent=1) + "\n", mode=0o600, secret=True),
        ManagedFile(f"/etc/systemd/system/{RELAY_UNIT}", unit),
    ]


def own_settings(packaged: str | None) -> bool:
    """Whether somebody has edited the package's own configuration, whose content is given."""
    if not packaged:
        return False
    try:
        config = yaml.safe_load(packaged)
        names = {r["name"] for r in config["receivers"]}
    except (yaml.YAMLError, TypeError, KeyError):
        return True
    return not all(str(n).startswith("team-") for n in names)


def _config(settings: Alerting, secrets: Mapping[str, str]) -> str:
    """The configuration, as Alertmanager 0.23 and later read it."""
    config: dict[str, Any] = {"global": _mail(settings, secrets)}
    config["route"] = {
        "receiver": NOBODY,
        "group_by": ["alertname", "pool", "host"],
        "group_wait": "15s",
        "group_interval": "2m",
        "repeat_interval": f"{settings.repeat_hours}h",
        "routes": [
            {
                "receiver": name,
                "matchers": [f'severity=~"{"|".join(receiver.severities)}"'],
                "continue": True,
            }
            for name, receiver in settings.receivers.items()
        ],
    }
    config["inhibit_rules"] = [
        {
            "source_matchers": [f'alertname="{cause}"'],
            "target_matchers": [f'alertname!="{cause}"', f'alertname=~"{"|".join(explained)}"'],
            "equal": list(shared),
        }
        for cause, explained, shared in INHIBITIONS
    ]
    config["receivers"] = [
        {"name": NOBODY},
        *(_receiver(name, one, secrets) for name, one in settings.receivers.items()),
    ]
    text = yaml.safe_dump(config, sort_keys=False, width=10_000, allow_unicode=True)
    return f"# {paths.MARK}; changes here are overwritten.\n{text}"


def _mail(settings: Alerting, secrets: Mapping[str, str]) -> dict[str, Any]:
    mail = settings.mail
    if mail is None:
        return {}
    found: dict[str, Any] = {
        "smtp_smarthost": mail.server,
        "smtp_from": mail.sender,
        "smtp_require_tls": mail.tls,
    }
    if mail.user:
        found["smtp_auth_username"] = mail.user
    if mail.password_file:
        found["smtp_auth_password"] = secrets[mail.password_file].strip()
    return found


def _receiver(name: str, receiver: Receiver, secrets: Mapping[str, str]) -> dict[str, Any]:
    if receiver.kind == "mail":
        mails = [{"to": to, "send_resolved": True} for to in receiver.to]
        return {"name": name, "email_configs": mails}
    if receiver.kind == "webhook":
        url = secrets[receiver.url_file or ""].strip()
    else:
        url = f"http://127.0.0.1:{RELAY_PORT}/{name}"
    return {"name": name, "webhook_configs": [{"url": url, "send_resolved": True}]}
