"""Findings about gateways: what clients get, who is reached, keys, certificates."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from cryptography import x509

from vllm_fleet.doctor.case import Case, Finding, Json
from vllm_fleet.doctor.questions import served_names
from vllm_fleet.spec.model import HostSpec

SOON, NOW = timedelta(days=14), timedelta(days=2)


def findings(case: Case) -> Iterator[Finding]:
    """Everything about the gateways."""
    for spec, _ in case.looked_at:
        if "gateway" not in spec.groups:
            continue
        yield from _keys(case, spec)
        yield from _hold(case, spec)
        seen = case.answer(spec.name).get("gateway")
        if seen and case.states[spec.name].active("nginx.service"):
            yield from _clients(case, spec, seen)
            yield from _reach(case, spec, seen)
            yield from _certificate(case, spec, seen)


def _clients(case: Case, spec: HostSpec, seen: Json) -> Iterator[Finding]:
    """Names, and one answer of each pool."""
    status = case.ssh(spec.name, "curl -s 127.0.0.1:9145/status")
    if seen["why"] == "asks for a key":
        text = "it asks for keys, and none in plain text is at hand: not asked for answers"
        yield Finding(
            "gateway-not-asked",
            spec.name,
            text,
            "keys are kept as sha256, or have expired",
            (f"fleet doctor {case.inventory} --key-file FILE",),
        )
        return
    if seen["why"]:
        text = "it does not answer clients"
        log = case.ssh(spec.name, "tail -n 50 /var/log/nginx/error.log")
        yield Finding("gateway-answers-fail", spec.name, text, seen["why"], (log,))
        return
    wanted = set().union(*served_names(case.fleet).values())
    listed = set(seen["names"] or ())
    keys = case.inputs.gateway_keys(spec)
    restricted = any(one.models for one in keys)  # it lists what the key may use
    lacks, strange = sorted(wanted - listed), sorted(listed - wanted)
    if (lacks and not restricted) or strange:
        parts = [
            *([f"lacks {', '.join(lacks)}"] if lacks and not restricted else []),
            *([f"lists {', '.join(strange)}, which no model is called"] if strange else []),
        ]
        yield Finding(
            "served-name-differs",
            spec.name,
            "its models are not called as in the plan",
            f"/v1/models {' and '.join(parts)}",
            (case.deploy(spec.name),),
        )
    for name, answer in sorted((seen.get("answers") or {}).items()):
        if answer is None or answer["ok"]:
            continue
        yield Finding(
            "gateway-answers-fail",
            spec.name,
            f"a client that asks {name} for one token gets no answer",
            answer["why"] if not answer["why"].startswith("0 ") else answer["why"][2:],
            (status,),
        )


def _reach(case: Case, spec: HostSpec, seen: Json) -> Iterator[Finding]:
    """Instances as this gateway finds them, against what their hosts say."""
    shown = {
        f"{one['host']}/{one['name']}": one
        for pool in (seen.get("status") or {}).get("pools") or ()
        for one in pool["instances"]
    }
    for host in case.fleet.hosts:
        state = case.states.get(host.name)
        for one in host.instances:
            name = f"{host.name}/{one.name}"
            why = (seen.get("reach") or {}).get(name)
            listening = bool(state and state.listening.get(str(one.port)))
            if why and listening:
                yield blocked(case, host.name, one.port, spec.name, f"it: {why}", one.name)
                continue
            at = shown.get(name)
            ready = bool(state and state.instances.get(one.name, {}).get("ready"))
            if at and at["draining"]:
                held = bool(state and state.held)
                command = f"curl -sX POST '127.0.0.1:9145/undrain?instance={name}'"
                yield Finding(
                    "instance-drained",
                    host.name,
                    f"gateway {spec.name} keeps requests away from it",
                    f"/status of {spec.name}: {at['state']}, {at['in_flight']} in flight",
                    (case.ssh(spec.name, command),),
                    instance=one.name,
                    level="info" if held else None,
                )
            elif at and ready and not at["ready"] and not why:
                yield Finding(
                    "gateway-sees-other",
                    host.name,
                    f"it is ready, and gateway {spec.name} takes it for {at['state']}",
                    f"/status of {spec.name}",
                    (case.ssh(spec.name, "tail -n 50 /var/log/nginx/error.log"),),
                    instance=one.name,
                )


def blocked(case: Case, host: str, port: int, who: str, said: str, instance: str = "") -> Finding:
    """A port that listens and is not reached; with the rule that does it, where it is found."""
    rules = [r for r in case.answer(host).get("blocking") or () if r["port"] == port]
    text = f"port {port} listens there, and {who} cannot reach {said}"
    if rules:
        rule = rules[0]
        command = f"nft delete rule {rule['at']} handle {rule['handle']}"
        return Finding(
            "port-blocked",
            host,
            text,
            f"nftables, {rule['at']}: {rule['rule']}",
            (case.ssh(host, command),),
            "and take it out of what writes it at boot",
            instance,
        )
    look = f"nft list ruleset | grep -n {port}"
    return Finding("port-blocked", host, text, said, (case.ssh(host, look),), instance=instance)


def _hold(case: Case, spec: HostSpec) -> Iterator[Finding]:
    pools: dict[str, list[tuple[str, str]]] = {}
    for host in case.fleet.hosts:
        for one in host.instances:
            pools.setdefault(one.model, []).append((host.name, one.name))
    hold = spec.settings.gateway.hold_seconds
    for pool, members in pools.items():
        host_name, name = members[0]
        if len(members) > 1 or host_name not in case.states:
            continue
        took = case.states[host_name].instances.get(name, {}).get("start_seconds")
        if took and took > hold:
            yield Finding(
                "hold-too-short",
                spec.name,
                f"{host_name}/{name}, the only instance of {pool}, took {took:.0f} s to start",
                f"gateway.hold_seconds is {hold}",
                (case.deploy(spec.name),),
                "raise gateway.hold_seconds, or add an instance, first",
            )


def _keys(case: Case, spec: HostSpec) -> Iterator[Finding]:
    settings = spec.settings.api_keys
    for one in case.inputs.gateway_keys(spec):
        if one.ends is None or settings is None:
            continue
        left = one.ends - case.now.timestamp()
        if left > SOON.total_seconds():
            continue
        note = f"in {settings.file}, add a new entry (or take {one.name} out) first"
        if left <= 0:
            text, found = f"the key of {one.name} has expired", "key-expired"
        else:
            text = f"the key of {one.name} expires in {left / 86400:.0f} days"
            found = "key-expires"
        seen = f"{settings.file}: expires {one.expires}"
        yield Finding(found, spec.name, text, seen, (case.deploy(spec.name),), note)


def _certificate(case: Case, spec: HostSpec, seen: Json) -> Iterator[Finding]:
    tls = spec.settings.gateway.tls
    if tls is None or not seen.get("certificate"):
        return
    shown = x509.load_pem_x509_certificate(seen["certificate"].encode())
    left = shown.not_valid_after_utc - case.now
    if left > SOON:
        return
    day = shown.not_valid_after_utc.strftime("%Y-%m-%d %H:%M UTC")
    text = f"ends in {left.days} days" if left > timedelta(0) else "has ended"
    note, commands = "", (case.deploy(spec.name),)
    if tls.acme:
        commands = (case.ssh(spec.name, "certbot renew"),)
    elif tls.host_certificate:
        note = f"renew {tls.host_certificate} on the host; nginx reads it by itself"
        commands = (case.ssh(spec.name, "systemctl restart vllm-fleet-tls.service"),)
    else:
        note = f"renew {tls.certificate} and its key first"
    yield Finding(
        "certificate-expires" if left < NOW else "certificate-expires-soon",
        spec.name,
        f"the certificate that clients are shown {text}",
        f"{shown.subject.rfc4514_string()}, until {day}",
        commands,
        note,
    )
