"""Spans: how many cards share what, and checks of what is written. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_fleet.engine import SPAN_OPTIONS
from vllm_fleet.spec.findings import At, Findings
from vllm_fleet.spec.layers import Loaded, LoadedHost
from vllm_fleet.spec.model import (
    CARDS_OF_KIND,
    RAY_PORTS,
    RAY_WORKER_PORTS,
    Instance,
    Rank,
    Span,
    part_of,
)

# What a rank must have as the others of its span have it.
ALIKE = ("device", "vllm_package", "vllm_variant", "vllm_lock", "vllm_exclude", "vllm_extra")


def degrees(span: Span, hosts: int, cards: int) -> tuple[int, int]:
    """(cards that share each layer, stages) of a span, with so many cards on each of its hosts.

    A host without cards counts as one. Raises ValueError where it does not come out.
    """
    cards = cards or 1
    world, copies = hosts * cards, span.data_parallel
    shown = f"{hosts} hosts with {cards} {'cards' if cards > 1 else 'card'} each"
    if world % copies or (hosts % copies and copies % hosts):
        raise ValueError(
            f"data_parallel {copies} cannot be divided over {shown}: take as many copies as hosts, "
            "or a number that divides the hosts or is a multiple of them"
        )
    one = world // copies
    tensor, stages = span.tensor_parallel, span.pipeline_parallel
    if tensor is None:
        tensor = one // stages if stages else min(cards, one)
    if stages is None:
        stages = one // tensor
    if tensor * stages != one:
        raise ValueError(
            f"tensor_parallel {tensor} x pipeline_parallel {stages} x data_parallel {copies} = "
            f"{tensor * stages * copies}, and {shown} are {world}: change these, or `hosts`"
        )
    return tensor, stages


def span_ports(part: Instance) -> dict[str, int]:
    """Every port of a rank of a span, by the setting that gives it; none of another instance."""
    span = part.span
    if span is None or not isinstance(part, Rank):
        return {}
    found = span.ports(part.rank)
    for number in range(1, RAY_PORTS + RAY_WORKER_PORTS) if span.executor == "ray" else ():
        found[f"ray_port + {number}"] = span.ray_port + number
    return found


def check_spans(found: Findings, warnings: Findings, loaded: Loaded) -> None:
    """What makes one server of several hosts: enough of them, alike, with cards that come out."""
    by_name = {host.host.name: host for host in loaded.hosts}
    for layer in loaded.layers:
        for number, instance in layer.instances:
            if instance.span is None:
                continue
            at = At(layer, ("instances", number))
            span_at = At(layer, (*at.loc, "span"))
            if len(set(instance.hosts)) < 2:
                text = "one server over several hosts needs two `hosts` or more; take `span` away"
                found.say(span_at, text, at_key=True)
                continue
            _named(found, span_at, instance)
            _arithmetic(found, warnings, span_at, instance, by_name)
            _own_ports(found, span_at, instance)
            _ours(found, at, instance)
            _alike(found, at, instance, by_name)


def _named(found: Findings, at: At, instance: Instance) -> None:
    """Hosts that are none of the span's; one address for two of them."""
    assert instance.span is not None
    for field in ("cards", "addresses"):
        for host in getattr(instance.span, field):
            if host not in instance.hosts:
                text = f'"{host}" is none of its hosts ({", ".join(instance.hosts)})'
                found.say(At(at.layer, (*at.loc, field, host)), text, at_key=True)
    seen: dict[str, str] = {}
    for host, address in instance.span.addresses.items():
        first = seen.setdefault(address, host)
        if first != host:
            text = f"{address} is that of {first} already"
            found.say(At(at.layer, (*at.loc, "addresses", host)), text)


def _count(cards: tuple[int, ...] | str) -> int:
    kind = CARDS_OF_KIND.match(cards) if isinstance(cards, str) else None
    return int(kind["count"]) if kind else len(cards)


def _arithmetic(
    found: Findings,
    warnings: Findings,
    at: At,
    instance: Instance,
    by_name: Mapping[str, LoadedHost],
) -> None:
    """As many cards on each host, and their product as vLLM counts it."""
    span = instance.span
    assert span is not None
    counts = {host: _count(part_of(instance, host).cards) for host in instance.hosts}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{host} {count}" for host, count in counts.items())
        found.say(at, f"vLLM needs as many cards on each host; here: {told}", at_key=True)
        return
    cards = next(iter(counts.values()))
    try:
        tensor, _ = degrees(span, len(instance.hosts), cards)
    except ValueError as error:
        found.say(at, str(error), at_key=True)
        return
    if span.executor == "ray" and span.data_parallel > 1:
        text = "data_parallel is done by vLLM's own processes: take `executor: ray` away"
        found.say(at, text, at_key=True)
    cuda = any(by_name[h].settings.device != "cpu" for h in instance.hosts if h in by_name)
    if tensor > max(cards, 1) and cuda:
        text = (
            f"tensor_parallel {tensor} over {cards} cards a host: every layer waits for the "
            "network between the hosts; stages (pipeline_parallel) over them are faster unless "
            "that is InfiniBand or RoCE"
        )
        warnings.say(at, text, at_key=True)


def _own_ports(found: Findings, at: At, instance: Instance) -> None:
    """No port of a span for two things."""
    taken = {instance.port: "port"}
    for setting, port in span_ports(part_of(instance, instance.hosts[0])).items():
        first = taken.setdefault(port, setting)
        if first != setting:
            found.say(at, f"{setting}: port {port} is its `{first}` already", at_key=True)
            return


def _ours(found: Findings, at: At, instance: Instance) -> None:
    """Options that its `span` sets, where they are written beside it."""
    for name in instance.vllm_args:
        if name.replace("_", "-").removeprefix("no-") in SPAN_OPTIONS:
            text = "is set by its `span`; write it there"
            found.say(At(at.layer, (*at.loc, "vllm_args", name)), text, at_key=True)


def _alike(found: Findings, at: At, instance: Instance, by_name: Mapping[str, LoadedHost]) -> None:
    """Every host runs its rank, and of the same release and model."""
    known = [by_name[host] for host in instance.hosts if host in by_name]
    for index, name in enumerate(instance.hosts):
        host = by_name.get(name)
        if host is None or "gpu" not in host.host.groups:
            continue  # told as no host, or as none of group gpu
        here = At(at.layer, (*at.loc, "hosts", index))
        source = host.sources.get("instances")
        if source is not at.layer:
            where = source.document.file if source else "nowhere"
            text = f"{name} takes its instances from {where}: a span must be one for all its hosts"
            found.say(here, text)
            continue
        first = known[0].settings
        different = [key for key in ALIKE if getattr(host.settings, key) != getattr(first, key)]
        models = (host.settings.models, first.models)
        if models[0].get(instance.model) != models[1].get(instance.model):
            different.append(f"models.{instance.model}")
        if not instance.vllm_version and host.settings.vllm_version != first.vllm_version:
            different.append("vllm_version")
        has_ray = any(one.startswith(("ray==", "ray[")) for one in host.settings.vllm_extra)
        if instance.span and instance.span.executor == "ray" and not has_ray:
            text = (
                f"{name}: no Ray in its release, and no vLLM depends on it: add it to vllm_extra, "
                'such as vllm_extra: ["ray==2.60.0"], and make the lock again (`fleet lock`)'
            )
            found.say(At(at.layer, (*at.loc, "span", "executor")), text)
        if different:
            text = f"{name} differs from {known[0].host.name} in {', '.join(different)}"
            found.say(here, f"{text}: the ranks of a span must be alike")
