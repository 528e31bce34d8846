"""What each host is asked beside its state: the order of onhost/doctor.py. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from vllm_fleet import engine, gateway, monitoring, watch, weights
from vllm_fleet.model_options import given_options
from vllm_fleet.spec.inputs import Inputs
from vllm_fleet.spec.model import ApiKey, Fleet, HostSpec

# The scripts that are sent, in this order; the last one is run.
SCRIPTS = ("state", "acceptance", "tools", "structure", "doctor")
ANSWER_SECONDS = 15.0  # that one answer may take at most
ANSWERS = 5  # so many may follow each other within the time of a host


def question(
    fleet: Fleet,
    spec: HostSpec,
    inputs: Inputs,
    now: datetime,
    *,
    deep: bool = False,
    key: str | None = None,
    seconds: float = ANSWER_SECONDS * ANSWERS,
) -> dict[str, Any]:
    """The order for one host, which has ``seconds`` for all of it.

    ``key``: of a client, in plain text, where keys are kept hashed.
    """
    settings = spec.settings
    instances, stamps = [], []
    for one in spec.instances if "gpu" in spec.groups else ():
        model = settings.models[one.model]
        wanted = weights.wanted(one.model, model)
        instances.append(
            {
                "name": one.name,
                "port": one.port,
                "model": one.model,
                "task": model.task,
                "template": wanted.needs_chat_template,
                "weights": wanted.directory,
            }
        )
        stamps.append(wanted.stamp)
    return {
        "instances": instances,
        "stamps": list(dict.fromkeys(stamps)),
        "deep": deep,
        "gateway": _gateway(fleet, spec, inputs, now, key) if "gateway" in spec.groups else None,
        "prometheus": settings.monitoring.listen if "monitoring" in spec.groups else None,
        "watched": watched(fleet, spec),
        "seconds": min(ANSWER_SECONDS, seconds / ANSWERS),
    }


def _gateway(
    fleet: Fleet, spec: HostSpec, inputs: Inputs, now: datetime, key: str | None
) -> dict[str, Any]:
    tls = spec.settings.gateway.tls
    named = (*tls.names, *(tls.acme.domains if tls.acme else ())) if tls else ()
    shown, allowed = key, None
    if key is None and (found := usable_key(inputs.gateway_keys(spec), now)):
        shown, allowed = found.key, found.models
    tasks = {
        one.model: (host.settings.models[one.model].task, host.settings.models[one.model].aliases)
        for host in fleet.hosts
        for one in host.instances
    }
    return {
        "port": spec.settings.gateway.listen,
        "tls": tls is not None,
        "server_name": next((n for n in named if not n.startswith("*")), ""),
        "key": shown or "",
        "models": {
            name: task
            for name, (task, aliases) in tasks.items()
            if allowed is None or {name, *aliases} & set(allowed)
        },
        "reach": {
            f"{host.name}/{one.name}": [host.address, one.port]
            for host in fleet.hosts
            for one in host.instances
        },
    }


def usable_key(keys: tuple[ApiKey, ...], now: datetime) -> ApiKey | None:
    """A key in plain text that holds now; one for all models before others."""
    good = [
        one
        for one in keys
        if one.key is not None and (one.ends is None or one.ends > now.timestamp())
    ]
    return min(good, key=lambda one: one.models is not None, default=None)


def watched(fleet: Fleet, spec: HostSpec) -> list[int]:
    """The ports of a host that other hosts of the fleet must reach."""
    ports = {one.port for one in spec.instances}
    if fleet.group("monitoring"):
        ports.add(monitoring.NODE_PORT)
        if found := watch.gpu_metrics(spec):
            ports.add(watch.gpu_port(found))
        if "gateway" in spec.groups:
            ports.add(gateway.STATUS_PORT)
    if "gateway" in spec.groups:
        ports.add(spec.settings.gateway.listen)
    if spec.settings.fanout.enabled and "gpu" in spec.groups:
        ports.add(spec.settings.fanout.port)
    return sorted(ports)


def served_names(fleet: Fleet) -> dict[str, set[str]]:
    """Every name that clients may use, by pool: the model's, its aliases, its adapters."""
    found: dict[str, set[str]] = {}
    for host in fleet.hosts:
        for one in host.instances:
            model = host.settings.models[one.model]
            names = found.setdefault(one.model, {one.model, *model.aliases})
            names |= engine.lora_names(given_options(one.model, model, one))
    return found
