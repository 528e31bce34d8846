"""Checks that need more than one value: over a host and over the whole fleet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from vllm_fleet import fabric, paths
from vllm_fleet.spec import receivers
from vllm_fleet.spec.air_gapped import check_air_gapped
from vllm_fleet.spec.complaints import Complaint, Loc
from vllm_fleet.spec.engine_options import check_engine
from vllm_fleet.spec.entries import check_entries
from vllm_fleet.spec.findings import At, Findings, placed
from vllm_fleet.spec.layers import Layer, Loaded, LoadedHost
from vllm_fleet.spec.named_files import check_named_files
from vllm_fleet.spec.spans import check_spans, span_ports
from vllm_fleet.spec.tls import ACME_PORT, check_tls
from vllm_fleet.spec.words import nearest

NODE_EXPORTER_PORT = 9100  # on every host
# In paths.STATE.
TAKEN = frozenset({"changes", "loaded", "manifest.json", "metrics", "stacks", "weights"})
NVITOP_PORT = 9146
GRAFANA_PORT = 3000  # on monitoring hosts, where a package source is configured


def check_fleet(
    loaded: Loaded, *, locks: bool = True, listings: bool = True
) -> tuple[tuple[Complaint, ...], tuple[Complaint, ...]]:
    """Complaints and warnings about everything read for one inventory."""
    found, warnings = Findings(), Findings()
    for layer in loaded.layers:
        check_entries(found, layer)
        if not loaded.inventory.complaints:  # else its hosts are not known
            _placement(found, layer, loaded)
    for host in loaded.hosts:
        _cards_and_ports(found, host)
        _instances(found, host)
        _listening(found, host)
        _deadlines(found, host)
        _watching(found, host)
    check_spans(found, warnings, loaded)
    _one_rollout(found, loaded)
    _names(found, loaded)
    check_named_files(found, loaded, locks=locks)
    check_tls(found, warnings, loaded)
    check_air_gapped(found, loaded, listings=locks and listings)
    check_engine(found, warnings, loaded)
    if not loaded.inventory.complaints:
        _unserved(found, loaded)
        _fleet_warnings(warnings, loaded)
    return found.complaints(), warnings.complaints()


def _placement(found: Findings, layer: Layer, loaded: Loaded) -> None:
    """Every host of an instance is one of the inventory's, in group gpu."""
    hosts = loaded.inventory.hosts
    for number, instance in layer.instances:
        for index, name in enumerate(instance.hosts):
            at = At(layer, ("instances", number, "hosts", index))
            if name not in hosts:
                near = nearest(name, hosts)
                hint = f'; did you mean "{near}"?' if near else f"; it has {_some(hosts)}"
                found.say(at, f'"{name}" is no host of {loaded.inventory.file}{hint}')
            elif "gpu" not in hosts[name].groups:
                text = f'"{name}" is not in group gpu of {loaded.inventory.file}'
                found.say(at, text)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


# --- one host ------------------------------------------------------------------------------


def _cards_and_ports(found: Findings, host: LoadedHost) -> None:
    """One instance a card, one listener a port, one instance a name."""
    me = host.host.name
    names: dict[str, At] = {}
    cards: dict[int, tuple[str, At]] = {}
    ports = dict(_other_ports(host))
    for at, instance in placed(host):
        first = names.setdefault(instance.name, at)
        if first is not at:
            text = f"stands twice on {{hosts}}: {first.place} has it too"
            found.say(At(at.layer, (*at.loc, "name")), text, me)
        if instance.name == fabric.NAME:
            text = f"is the name of a file of ours in {paths.ETC} ({fabric.FILE}); choose another"
            found.say(At(at.layer, (*at.loc, "name")), text)
        if instance.name in TAKEN:
            text = f"is the name of a folder or file of ours in {paths.STATE}; choose another"
            found.say(At(at.layer, (*at.loc, "name")), text)
        port_at = At(at.layer, (*at.loc, "port"))
        if instance.port in ports:
            text = f"port {instance.port} of {{hosts}} is taken by {ports[instance.port]}"
            found.say(port_at, text, me)
        else:
            ports[instance.port] = f"{instance.name} ({port_at.place})"
        span = instance.span
        for setting, port in span_ports(instance).items():
            span_at = At(at.layer, (*at.loc, "span"))
            if port in ports and not ports[port].startswith(f"{instance.name} "):
                text = f"{setting}: port {port} of {{hosts}} is taken by {ports[port]}"
                found.say(span_at, text, me, at_key=True)
            ports.setdefault(port, f"{instance.name} ({span_at.place})")
        if isinstance(instance.cards, str):
            continue  # resolved by the plan, which has the cards
        key: Loc = ("span", "cards", me) if span and me in span.cards else ("cards",)
        for index, card in enumerate(instance.cards):
            card_at = At(at.layer, (*at.loc, *key, index))
            if card in cards:
                other, other_at = cards[card]
                text = f"card {card} of {{hosts}} is taken by {other} ({other_at.place})"
                found.say(card_at, text, me)
            else:
                cards[card] = instance.name, card_at


def _other_ports(host: LoadedHost) -> Iterator[tuple[int, str]]:
    """The ports of a host that are not an instance's, and whose they are."""
    for port, owner, _ in _listeners(host):
        yield port, owner


def _watching(found: Findings, host: LoadedHost) -> None:
    """Receivers of alerts that can work; a probe whose times follow each other."""
    alerting = host.settings.monitoring.alerting
    if "monitoring" in host.host.groups:
        for name, receiver in alerting.receivers.items():
            if problem := receivers.trouble(alerting, receiver):
                loc = ("monitoring", "alerting", "receivers", name)
                found.say(At(host.sources["monitoring"], loc), problem)
    probe = host.settings.probe
    if "gpu" in host.host.groups and "probe" in host.sources:
        for longer, shorter in (
            ("wedged_seconds", "deadline_seconds"),
            ("restart_seconds", "wedged_seconds"),
        ):
            if getattr(probe, longer) < getattr(probe, shorter):
                found.say(
                    At(host.sources["probe"], ("probe",)),
                    f"{longer} ({getattr(probe, longer)}) must not be below {shorter} "
                    f"({getattr(probe, shorter)})",
                )


def _listeners(host: LoadedHost) -> Iterator[tuple[int, str, Loc | None]]:
    """Port, owner and, where a setting decides it, the setting."""
    groups, settings = host.host.groups, host.settings
    ssh = host.host.data.get("ssh_port", 22)
    if isinstance(ssh, int):
        yield ssh, "sshd", None
    yield NODE_EXPORTER_PORT, "the node exporter", None
    if "gpu" in groups and settings.fanout.enabled:
        yield settings.fanout.port, "the fan-out of weights", ("fanout", "port")
    gap = settings.air_gapped
    if gap is not None and gap.host == host.host.name:
        yield gap.port, "the bundle", ("air_gapped", "port")
    if (
        "gpu" in groups
        and settings.device == "cuda"
        and settings.gpu_metrics.exporter
        in (
            "auto",
            "nvitop",
        )
    ):
        port = settings.gpu_metrics.port or NVITOP_PORT
        yield port, "the exporter of the cards", ("gpu_metrics", "port")
    if "gateway" in groups:
        yield settings.gateway.listen, "the gateway", ("gateway", "listen")
        tls = settings.gateway.tls
        if tls and tls.acme and settings.gateway.listen != ACME_PORT:  # that is told in words
            yield ACME_PORT, "the proof for the certificate", ("gateway", "tls", "acme")
    if "monitoring" in groups:
        yield settings.monitoring.listen, "Prometheus", ("monitoring", "listen")
        alerting = settings.monitoring.alerting
        if alerting.receivers:
            yield alerting.port, "Alertmanager", ("monitoring", "alerting", "port")
        if any(r.kind in receivers.ROBOTS for r in alerting.receivers.values()):
            yield receivers.RELAY_PORT, "the converter of alerts", None
        if settings.monitoring.grafana is not None:
            yield GRAFANA_PORT, "Grafana", None


def _instances(found: Findings, host: LoadedHost) -> None:
    """What the instances of a host need: a known model, a release, cards that fit the device."""
    me = host.host.name
    device = host.settings.device
    known = host.sources.get("models")
    names = dict(known.models) if known else {}
    broken = known.broken_models if known else frozenset()
    for at, instance in placed(host):
        model = names.get(instance.model)
        if model is None and instance.model not in broken and "models" not in host.unsound:
            near = nearest(instance.model, names)
            hint = f'; did you mean "{near}"?' if near else ""
            if not near:
                hint = f"; known: {_some(names)}" if names else "; `models` is empty"
            text = f'"{instance.model}" is no model of {{hosts}}{hint}'
            found.say(At(at.layer, (*at.loc, "model")), text, me)
        version = instance.vllm_version or (model.vllm_version if model else None)
        if not version and _absent(host, "vllm_version") and instance.model not in broken:
            text = "no release for {hosts}; set vllm_version in all.yml, here or at the model"
            found.say(At(at.layer, (*at.loc, "vllm_version")), text, me)
        cards_at = At(at.layer, (*at.loc, "cards"))
        if "device" in host.unsound:
            continue
        if device == "cpu" and instance.cards:
            text = "{hosts}: computes on the CPU (`device: cpu`); take the cards away"
            found.say(cards_at, text, me)
        elif device != "cpu" and not instance.cards:
            text = f"is missing or empty; {{hosts}}: computes on {device}, so name the cards"
            found.say(cards_at, text, me)


def _listening(found: Findings, host: LoadedHost) -> None:
    """The gateway, Prometheus and what every host has: one listener a port."""
    seen: dict[int, tuple[str, Loc | None]] = {}
    for port, owner, setting in _listeners(host):
        first, first_setting = seen.setdefault(port, (owner, setting))
        if first == owner:
            continue
        # Said where the operator wrote one of the two; a default cannot be pointed at.
        for loc, other in ((setting, first), (first_setting, owner)):
            layer = host.sources.get(str(loc[0])) if loc else None
            if layer is not None and loc is not None:
                text = f"port {port} of {{hosts}} is taken by {other}"
                found.say(At(layer, loc), text, host.host.name)
                break


def _deadlines(found: Findings, host: LoadedHost) -> None:
    """An instance can be healthy for long enough in time, and its change can end in time."""
    layer = host.sources.get("rollout")
    if layer is None:
        return
    rollout = host.settings.rollout
    times = {
        name: getattr(rollout, name)
        for name in (
            "minimum_healthy_seconds",
            "healthy_deadline_seconds",
            "progress_deadline_seconds",
        )
    }
    for (name, less), (longer, more) in pairwise(times.items()):
        if less < more:
            continue
        written = [one for one in (longer, name) if one in _keys(layer, "rollout")]
        key = (written or [longer])[0]
        text = f"{name} ({less}) must be less than {longer} ({more})"
        found.say(At(layer, ("rollout", key) if written else ("rollout",)), text)


def _keys(layer: Layer, key: str) -> list[str]:
    """What is written below a key."""
    return [str(name) for name in layer.document.root.items[key].items]


def _one_rollout(found: Findings, loaded: Loaded) -> None:
    """A change goes through the fleet in one way."""
    gpu = [host for host in loaded.hosts if "gpu" in host.host.groups]
    for host in gpu[1:]:
        first, layer = gpu[0], host.sources.get("rollout")
        layer = layer or first.sources.get("rollout")
        if layer is not None and host.settings.rollout != first.settings.rollout:
            text = f"{{hosts}}: differs from that of {first.host.name}; set it once, in all.yml"
            found.say(At(layer, ("rollout",)), text, host.host.name, at_key=True)


def _absent(host: LoadedHost, key: str) -> bool:
    """Whether a key has no value, and not because a file has a bad one."""
    return getattr(host.settings, key) is None and key not in host.unsound


# --- the whole fleet -----------------------------------------------------------------------


def _effective_models(loaded: Loaded) -> list[Layer]:
    """The layers that some host has its models from."""
    found: list[Layer] = []
    for host in loaded.hosts:
        layer = host.sources.get("models")
        if layer is not None and layer not in found:
            found.append(layer)
    return found


def _names(found: Findings, loaded: Loaded) -> None:
    """A name that clients use stands for one model."""
    layers = _effective_models(loaded)
    taken: dict[str, tuple[str, str]] = {}  # name: (model, what it is there)
    for layer in layers:
        for name in layer.models:
            taken.setdefault(name, (name, "a model"))
    for layer in layers:
        for name, model in layer.models.items():
            for adapter in model.adapters:
                at = At(layer, ("models", name, "adapters", adapter))
                owner, what = taken.setdefault(adapter, (name, f'an adapter of "{name}"'))
                if (owner, what) != (name, f'an adapter of "{name}"'):
                    found.say(at, f'"{adapter}" is {what} already', at_key=True)
            for index, alias in enumerate(model.aliases):
                at = At(layer, ("models", name, "aliases", index))
                if alias in model.aliases[:index] or alias == name:
                    found.say(at, f'"{alias}" is a name of this model already')
                    continue
                owner, what = taken.setdefault(alias, (name, f'an alias of "{name}"'))
                if owner != name:
                    found.say(at, f'"{alias}" is {what} already')


def _unserved(found: Findings, loaded: Loaded) -> None:
    """A model that no instance serves would be downloaded nowhere and answered by nobody."""
    if any("instances" in host.unsound for host in loaded.hosts):
        return
    served: set[str] = set()
    for layer in {id(s): s for h in loaded.hosts if (s := h.sources.get("instances"))}.values():
        for node in layer.document.root.items["instances"].items.values():
            if "model" not in node.items:  # a complaint of its own
                return
            served.add(str(node.items["model"].value))
    for layer in _effective_models(loaded):
        for name in layer.models:
            if name not in served:
                text = "no instance serves this model; add one to `instances`, or take it away"
                found.say(At(layer, ("models", name)), text, at_key=True)


def _fleet_warnings(found: Findings, loaded: Loaded) -> None:
    """What is allowed and may still not be meant."""
    inventory = loaded.inventory
    models = _effective_models(loaded)
    if models and any(layer.models for layer in models) and not inventory.groups.get("gateway"):
        text = "no host is in group gateway: clients must ask the instances themselves"
        found.add(Complaint(inventory.file, 1, 1, "", ""), text)
    by_name = {host.host.name: host for host in loaded.hosts}
    used = {id(host.sources.get("instances")) for host in loaded.hosts}
    for layer in loaded.layers:
        for number, instance in layer.instances:
            for index, name in enumerate(instance.hosts):
                host = by_name.get(name)
                source = host.sources.get("instances") if host else None
                if source is None or source is layer:
                    continue
                at = At(layer, ("instances", number, "hosts", index))
                where = source.document.file
                if id(layer) in used:
                    text = f"{name} takes its instances from {where}, so it does not run this one"
                    found.say(at, text)
