"""What will be: spec and facts in, the wanted state of every host out. Pure.

Nothing here talks to a host. Every refusal of every host is collected, so that the operator
sees all of them before anything is changed anywhere.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import resources

from vllm_fleet import (
    airgap,
    alertmanager,
    engine_data,
    exam,
    fabric,
    fanout,
    firewall,
    gateway,
    listings,
    monitoring,
    paths,
    placement,
    pruning,
    release,
    room,
    spans,
    spares,
    watch,
    weights,
)
from vllm_fleet import instance as vllm
from vllm_fleet.exam import NGINX, PROMETHEUS
from vllm_fleet.files import ManagedFile
from vllm_fleet.gateway import keepalived
from vllm_fleet.host_plan import (
    AcmeFetch,
    BundleTake,
    HostPlan,
    Kept,
    ReleaseBuild,
    Service,
    ToolsBuild,
    WeightsFetch,
)
from vllm_fleet.model_options import given_options
from vllm_fleet.onhost.tools import tools_id
from vllm_fleet.placement import Key, Placed
from vllm_fleet.planned import PlannedInstance, Pool
from vllm_fleet.rollout.policy import Version
from vllm_fleet.rollout.state import Refused, record_of, refusal_of, refusals
from vllm_fleet.spec.inputs import Inputs, lock_path, version_of
from vllm_fleet.spec.model import Fleet, Grafana, HostSpec, Instance, Rank, rank_name
from vllm_fleet.state import HostState
from vllm_fleet.survey import HostView, Sized, lines_of, survey

COMMON_PACKAGES = ("python3", "python3-venv", "prometheus-node-exporter")
# Triton and FlashInfer compile kernels while serving: compiler, Python headers, ninja.
GPU_PACKAGES = ("gcc", "g++", "ninja-build", "python3-dev", "libnuma1")
GATEWAY_PACKAGES = gateway.PACKAGES
MONITORING_PACKAGES = ("prometheus",)

NODE_EXPORTER = "prometheus-node-exporter.service"
GRAFANA = "grafana-server.service"
APT_KEYS = "/etc/apt/keyrings"
JOURNALD = "systemd-journald.service"
FIREWALL_GUARD = f"{firewall.GUARD}.timer"
TLS_PATH = f"{gateway.TLS_UNIT}.path"

# Files of others that decide whether a daemon is ours to set up.
PROMETHEUS_YML = "/etc/prometheus/prometheus.yml"
PROMETHEUS_DEFAULTS = "/etc/default/prometheus"
EXPORTER_DEFAULTS = "/etc/default/prometheus-node-exporter"

SCRIPTS = resources.files("vllm_fleet.onhost")
TOOLS_LOCK = SCRIPTS.joinpath("tools-requirements.lock").read_text(encoding="utf-8")
LIB_SCRIPTS = (
    "tools.py",
    "release.py",
    "interpreter.py",
    "weights.py",
    "hub.py",
    "peers.py",
    "structure.py",
    "prune.py",
)  # they stay on the host: see paths.LIB


class Refusal(Exception):
    """A host is not what the spec counts on; one line for each reason, with its remedy."""

    def __init__(self, reasons: list[str]):
        super().__init__("\n".join(reasons))
        self.reasons = reasons


def bundled_packages() -> tuple[str, ...]:
    """The Debian packages that any host may need; a bundle holds all of them."""
    return tuple(
        sorted(
            {
                *COMMON_PACKAGES,
                *GPU_PACKAGES,
                *GATEWAY_PACKAGES,
                *keepalived.PACKAGES,
                *MONITORING_PACKAGES,
                *alertmanager.PACKAGES,
                *firewall.PACKAGES,
                *gateway.ACME_PACKAGES,  # an authority of one's own may be in there
            }
        )
    )


def asked() -> str:
    """What the large fact looks at, the same for every host."""
    return json.dumps(
        {
            "packages": sorted(
                {
                    *COMMON_PACKAGES,
                    *GPU_PACKAGES,
                    *GATEWAY_PACKAGES,
                    *keepalived.PACKAGES,
                    *MONITORING_PACKAGES,
                    *alertmanager.PACKAGES,
                    *firewall.PACKAGES,
                    *gateway.ACME_PACKAGES,
                    *exam.PACKAGES,
                    "grafana",
                }
            ),
            "units": [
                *(NGINX, keepalived.UNIT),
                *(PROMETHEUS, NODE_EXPORTER, GRAFANA, JOURNALD),
                *exam.UNITS,
                airgap.UNIT,
                *(firewall.UNIT, FIREWALL_GUARD, TLS_PATH, gateway.ACME_TIMER),
                *(alertmanager.UNIT, alertmanager.RELAY_UNIT),
                *(f"{watch.PROBE}.timer", f"{watch.HOSTWATCH}.timer"),
                f"{watch.GPU_EXPORTER}.service",
            ],
            "disks": [paths.OPT, paths.STATE, "/var/cache"],
            "texts": [
                *(PROMETHEUS_YML, PROMETHEUS_DEFAULTS, EXPORTER_DEFAULTS, firewall.FILE),
                *(alertmanager.PACKAGED, alertmanager.DEFAULTS, fabric.FILE),
            ],
        }
    )


def pools_of(instances: Mapping[str, tuple[PlannedInstance, ...]]) -> tuple[Pool, ...]:
    """The pools over all hosts: models in the order in which their first instance is declared."""
    found: dict[str, list[PlannedInstance]] = {}
    for host_instances in instances.values():
        for instance in host_instances:
            if instance.answers:
                found.setdefault(instance.model_name, []).append(instance)
    return tuple(
        Pool(name, members[0].model.aliases, members[0].model, tuple(members))
        for name, members in found.items()
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: it would only walk all that is being made, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_uncollected()
def plan_fleet(
    fleet: Fleet, states: Mapping[str, HostState], inputs: Inputs
) -> dict[str, HostPlan]:
    """The plan of every host that has a state, in declared order.

    Gateways and monitors are told of the instances of all hosts, also of those that take no
    part in this run. Raises :class:`Refusal` with all reasons of all hosts at once.
    """
    views = survey(fleet, states, inputs)
    reasons = [reason for view in views.values() for reason in view.reasons]
    if reasons:
        raise Refusal(reasons)
    plans, reasons = plans_of(fleet, states, inputs, views)
    for plan in plans.values():
        reasons += room.refusals(plan)
        reasons += _unlisted(plan)
    if reasons:
        raise Refusal(reasons)
    return fanout.arranged(plans)


def plans_of(
    fleet: Fleet,
    states: Mapping[str, HostState],
    inputs: Inputs,
    views: Mapping[str, HostView],
) -> tuple[dict[str, HostPlan], list[str]]:
    """Plans of the hosts that are surveyed, whatever the survey says of them, and why others
    have none. For looking: only :func:`plan_fleet` says what may be applied.
    """
    reasons: list[str] = []
    known = refusals(states.values())
    wanted: dict[str, tuple[PlannedInstance, ...]] = {}
    kept: dict[str, dict[str, Kept]] = {}
    instances: dict[str, tuple[PlannedInstance, ...]] = {}
    for spec in fleet.hosts:
        with _refusing(spec, reasons):
            wanted[spec.name] = tuple(
                _instance(fleet, spec, one, views, inputs) for one in spec.instances
            )
            kept[spec.name] = {
                one.name: why
                for one in wanted[spec.name]
                if spec.name in states and (why := _kept(one, states[spec.name], known))
            }
    for spec in fleet.hosts if not reasons else ():
        with _refusing(spec, reasons):
            instances[spec.name] = tuple(
                _as_it_runs(one, kept[spec.name].get(one.name), states.get(spec.name))
                for one in wanted[spec.name]
            )
    if reasons:
        return {}, reasons
    _keep_together(instances, kept, states)
    pools, sharers = pools_of(instances), firewall.sharers(fleet)
    plans: dict[str, HostPlan] = {}
    for spec in fleet.hosts:
        if spec.name in views:
            with _refusing(spec, reasons):
                plans[spec.name] = _host_plan(
                    fleet,
                    states,
                    views[spec.name],
                    instances[spec.name],
                    wanted[spec.name],
                    kept[spec.name],
                    pools,
                    sharers,
                    inputs,
                )
    plans = {name: _with_bundle(plan, fleet, plans, inputs) for name, plan in plans.items()}
    return _rolled(plans), reasons


def _unlisted(plan: HostPlan) -> list[str]:
    """Debian packages from a bundle whose list has no checksum beside group_vars."""
    if plan.spec.settings.air_gapped is None or plan.apt_list or not plan.missing_packages:
        return []
    system = airgap.system_of(plan.state.os, plan.state.arch)
    return [
        f"{plan.spec.name}: runs {system}, and {airgap.packages_lock(system)} is not beside "
        f"group_vars, or holds no checksum: `fleet bundle` with --system {system} writes it, with "
        "the bundle that belongs to it; commit it"
    ]


def placement_of(plans: Mapping[str, HostPlan], inputs: Inputs) -> dict[Key, Placed] | None:
    """All lines that the placement file must hold; None where it holds them already."""
    new = {key: line for plan in plans.values() for key, line in plan.new_lines.items()}
    return {**inputs.placement.lines, **new} if new else None


def fleet_notices(fleet: Fleet, inputs: Inputs) -> list[str]:
    """What is odd about the fleet as a whole."""
    return placement.stale(inputs.placement, fleet.hosts)


@contextmanager
def _refusing(spec: HostSpec, reasons: list[str]) -> Iterator[None]:
    """Collect what a renderer refuses (ValueError), with the host's name."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        reasons.append(text if spec.name in text else f"{spec.name}: {text}")


def _release(spec: HostSpec, version: str, inputs: Inputs) -> ReleaseBuild:
    order = release.order(spec.settings, version, inputs.lock(spec, version))
    return ReleaseBuild(str(order["id"]), order)


def _instance(
    fleet: Fleet, spec: HostSpec, one: Instance, views: Mapping[str, HostView], inputs: Inputs
) -> PlannedInstance:
    view = views.get(spec.name)
    settings, model = spec.settings, spec.settings.models[one.model]
    version = version_of(spec, one)
    wanted = _release(spec, version, inputs).id
    cards = one.cards if not isinstance(one.cards, str) else ()
    if view is not None:
        cards = view.cards.get(one.name, cards)
    known = view.seen.by_index if view else {}
    sized = view.sized.get(one.name, Sized()) if view else Sized()
    # Every rank of a span computes with the settings that were chosen for all of them.
    chosen = sized.args
    if isinstance(one, Rank):
        first = views.get(one.hosts[0])
        chosen = first.sized.get(rank_name(one.of, 0), Sized()).args if first else {}
    return PlannedInstance(
        host=spec.name,
        address=spec.address,
        name=one.name,
        model_name=one.model,
        model=model,
        port=one.port,
        device=settings.device,
        cards=cards,
        uuids=tuple(known[c].uuid for c in cards if c in known),
        release=wanted,
        vllm_version=version,
        weights=weights.wanted(one.model, model).directory,
        args={**chosen, **given_options(one.model, model, one)},
        env={**model.env, **one.env},
        start_seconds=settings.start_seconds,
        drain_seconds=settings.drain_seconds,
        expected=sized.expected if sized.applied else {},
        span=spans.planned(
            fleet, one, len(cards), view.state.texts.get(fabric.FILE) if view else None
        ),
    )


def _kept(one: PlannedInstance, state: HostState, known: Sequence[Refused]) -> Kept | None:
    """Whether an instance stays as it is, also where group_vars want something else."""
    wanted = Version(one.release, vllm.running_checksum(one))
    now, record = state.instances.get(one.name, {}), record_of(state, one.name)
    active = state.active(one.unit)
    runs = str(now.get("release") or "")
    if held := state.held:
        who, why = held.get("who"), held.get("why")
        return Kept(
            runs,
            f"this host is held by {who}{f' ({why})' if why else ''}: nothing is started there "
            "until `maintain.py --data do=return`",
            startable=False,
        )
    if record.step is not None:
        to = record.cut_off
        return Kept(runs, f"a change to {to} was cut off: run upgrade.py, or rollback.py", False)
    if why := refusal_of(one.model_name, wanted, known):
        return Kept(
            runs,
            f"{one.release} is refused: {why}; want another version, or clear it: upgrade.py "
            f"--data clear={one.release}",
            startable=bool(now),
        )
    if runs == one.release or runs not in state.releases or not (active or record.goods):
        return None
    what = "runs" if active else "last served with"
    return Kept(
        runs, f"{what} {runs}, group_vars want {one.release}: staged; `upgrade.py` moves it", True
    )


def _keep_together(
    instances: Mapping[str, tuple[PlannedInstance, ...]],
    kept: Mapping[str, dict[str, Kept]],
    states: Mapping[str, HostState],
) -> None:
    """Leave ranks alone that would not meet: a host is missing, or has another release."""
    why = {
        **spans.unlike(instances, states),
        **spans.differing(instances),
        **spans.apart(instances, states),
    }
    for host, own in instances.items():
        for one in own:
            if host in states and (host, one.name) in why:
                kept[host][one.name] = Kept(one.release, why[host, one.name], startable=False)


def _rolled(plans: Mapping[str, HostPlan]) -> dict[str, HostPlan]:
    """The same, with the ranks that must not be started one by one: some have old settings."""
    moving = {
        one.span.name
        for plan in plans.values()
        for one in plan.instances
        if one.span is not None
        and one.name not in plan.kept
        and plan.state.active(one.unit)
        and plan.state.started_with(one.name) != plan.checksums[one.name]
    }
    return {
        name: replace(
            plan,
            rolled=frozenset(
                one.name for one in plan.instances if one.span and one.span.name in moving
            ),
        )
        for name, plan in plans.items()
    }


def _as_it_runs(
    one: PlannedInstance, kept: Kept | None, state: HostState | None
) -> PlannedInstance:
    """An instance as it is after deploy.py: for the gateway and the monitors."""
    if kept is None or state is None or kept.release not in state.releases:
        return one
    version = str(state.releases[kept.release].get("version") or one.vllm_version)
    return replace(one, release=kept.release, vllm_version=version)


def _with_bundle(
    plan: HostPlan, fleet: Fleet, plans: Mapping[str, HostPlan], inputs: Inputs
) -> HostPlan:
    """The plan of the host that has the bundle, with what the bundle must hold; others as is."""
    gap = plan.spec.settings.air_gapped
    if gap is None or not airgap.serves(plan.spec):
        return plan
    needs: dict[str, dict[str, str]] = {
        kind: {} for kind in ("locks", "listings", "archives", "packages")
    }
    systems: dict[str, list[str]] = {}
    for spec in fleet.hosts:
        if spec.settings.air_gapped is None:
            continue
        archive = spec.settings.python_archive
        if archive is not None and "gpu" in spec.groups:
            needs["archives"][archive.sha256] = f"of Python {archive.version}"
        for one in spec.instances if "gpu" in spec.groups else ():
            version = version_of(spec, one)
            text = inputs.lock(spec, version)
            if text is not None:
                held = release.lock_sha256(release.without(text, spec.settings.vllm_exclude))
                needs["locks"][held] = lock_path(str(spec.settings.vllm_lock), version)
            model = spec.settings.models[one.model]
            listing = inputs.listings.get(listings.path_of(one.model, model))
            if listing is not None:
                needs["listings"][airgap.listing_key(model, listing)] = listing.path
    for other in plans.values():
        if other.spec.settings.air_gapped is None:
            continue
        system = airgap.system_of(other.state.os, other.state.arch)
        systems[system] = sorted({*systems.get(system, []), *other.packages})
        if other.apt_list:
            path = airgap.packages_lock(system)
            needs["packages"][other.apt_list] = f"of {path} (another `fleet bundle` run wrote it)"
        if other.tools is not None:
            key, name = airgap.tools_key(TOOLS_LOCK, other.state.python)
            needs["locks"][key] = name
    wanted: dict[str, Mapping[str, Iterable[str]]] = {**needs, "systems": systems}
    later = sum(want.size for want in room.wants(plan) if want.place == paths.OPT)
    order: dict[str, object] = {"source": gap.bundle, "root": airgap.ROOT, "needs": wanted}
    order["later"] = later
    return replace(
        plan, bundle=BundleTake(airgap.held(plan.state.bundle, gap.bundle, wanted), order)
    )


def _host_plan(
    fleet: Fleet,
    states: Mapping[str, HostState],
    view: HostView,
    instances: tuple[PlannedInstance, ...],
    wanted: tuple[PlannedInstance, ...],
    kept: Mapping[str, Kept],
    pools: tuple[Pool, ...],
    sharers: Mapping[int, list[str]],
    inputs: Inputs,
) -> HostPlan:
    spec, state = view.spec, view.state
    settings, monitors = spec.settings, fleet.group("monitoring")
    packages: set[str] = set()
    files: list[ManagedFile] = []
    firewall_services: list[Service] = []
    gateway_services: list[Service] = []
    monitoring_services: list[Service] = []
    releases: dict[str, ReleaseBuild] = {}
    fetches: dict[str, WeightsFetch] = {}
    instance_files: dict[str, tuple[ManagedFile, ...]] = {}
    checksums = {one.name: vllm.running_checksum(one) for one in wanted}
    notices = view.notices
    acme: AcmeFetch | None = None
    bundle_services: list[Service] = []
    apt_list = ""
    if settings.air_gapped is not None:
        system = airgap.system_of(state.os, state.arch)
        files += airgap.sources(spec, system)
        apt_list = inputs.packages_lists.get(system, "")
    if airgap.serves(spec):
        serving = airgap.files(
            spec, [a for h in fleet.hosts for a in firewall.all_addresses(h, states.get(h.name))]
        )
        files += serving
        bundle_services.append(_service(airgap.UNIT, restarts=serving))
    if "gpu" in spec.groups:
        packages |= {*COMMON_PACKAGES, *GPU_PACKAGES}
        have = {file.path for file in files}
        files += [file for file in _lib_scripts() if file.path not in have]
        files += vllm.host_files(
            settings.device, hold_driver_packages=settings.hold_driver_packages
        )
        files += [
            ManagedFile(place, token, mode=0o600, secret=True)
            for place, token in inputs.hub_tokens(spec).items()
        ]
        limits = vllm.journal_limits()
        files.append(limits)
        monitoring_services.append(_service(JOURNALD, restarts=[limits]))
        for one, declared in zip(wanted, spec.instances, strict=True):
            instance_files[one.name] = tuple(vllm.files(one))
            if one.name in kept:
                notices.append(f"instance {one.name}: {kept[one.name].why}")
            elif not state.active(one.unit) or checksums[one.name] == state.started_with(one.name):
                files += instance_files[one.name]
            build = _release(spec, version_of(spec, declared), inputs)
            releases[build.id] = build
            same = [i for i in wanted if i.model_name == one.model_name]
            fetches[one.model_name] = _fetch(spec, same, state, inputs)
        notices += spans.link_notices(fleet, states, spec.name)
        present = state.texts.get(firewall.FILE)
        givers = sharers.get(settings.fanout.port, [])
        sharing = givers if spec.address in givers else []
        nodes = firewall.nodes(fleet, spec, states, present, spans.ranks_of(fleet, spec.name))
        if closed := firewall.files(spec, firewall.peers(fleet, states, present), sharing, nodes):
            notices += spans.closed_to_others(fleet, state, spec.name, nodes)
            files += closed
            packages |= set(firewall.PACKAGES)
            # Each is replaced in one step, without a moment in which the ports are open.
            reload = ("systemctl", "reload", firewall.UNIT)
            firewall_services += [
                _service(firewall.UNIT, reloads=closed[:1], reload=reload),
                _service(FIREWALL_GUARD, restarts=closed[2:]),
            ]
    if monitors:
        packages.add("prometheus-node-exporter")
        exporter = _exporter(spec, state)
        files += exporter
        monitoring_services.append(_service(NODE_EXPORTER, restarts=exporter))
        watching = watch.host_files(spec, instances)
        files += watching
        monitoring_services.append(_timer(watch.HOSTWATCH, watching))
        if exporter := watch.exporter_files(spec, [h.address for h in monitors]):
            files += exporter
            monitoring_services.append(_service(f"{watch.GPU_EXPORTER}.service", restarts=exporter))
    if probing := watch.probe_files(
        spec,
        [one for one in instances if one.answers],
        [monitoring.address(h.address, monitoring.GATEWAY_PORT) for h in fleet.group("gateway")],
    ):
        files += probing
        monitoring_services.append(_timer(watch.PROBE, probing))
    if "gateway" in spec.groups:
        packages |= set(GATEWAY_PACKAGES)
        routed = gateway.files(
            spec,
            pools,
            addresses={h.name: h.address for h in fleet.hosts},
            keys=inputs.gateway_keys(spec),
            # Probes ask it who else is ready before they take an instance out.
            monitors=tuple(
                h.address
                for h in fleet.hosts
                if h in monitors or ("gpu" in h.groups and h.settings.probe.enabled)
            ),
            tls=inputs.certificate(spec),
        )
        files += routed
        units = f"{gateway.UNITS}/{gateway.TLS_UNIT}."
        gateway_services.append(
            _service(
                NGINX,
                # Keys are read as they change, by nginx's workers themselves.
                reloads=[
                    f for f in routed if f.path != gateway.KEYS and not f.path.startswith(units)
                ],
                reload=("systemctl", "reload", NGINX),
            )
        )
        if watching := [f for f in routed if f.path.startswith(units)]:
            gateway_services.append(_service(TLS_PATH, restarts=watching))
        if command := gateway.acme_command(spec):
            packages |= set(gateway.ACME_PACKAGES)
            gateway_services.append(_service(gateway.ACME_TIMER))
            asked = hashlib.sha256("\0".join(command).encode()).hexdigest()
            acme = AcmeFetch(command, gateway.acme_environment(spec), asked)
        if shared := keepalived.files(
            spec, fleet.group("gateway"), state.nics, inputs.vrrp_password(spec)
        ):
            packages |= set(keepalived.PACKAGES)
            files += shared
            gateway_services.append(
                _service(
                    keepalived.UNIT,
                    restarts=[f for f in shared if f.path == keepalived.UNIT_FILE],
                    reloads=[f for f in shared if f.path != keepalived.UNIT_FILE],
                    reload=("systemctl", "reload", keepalived.UNIT),
                )
            )
    if "monitoring" in spec.groups:
        packages |= set(MONITORING_PACKAGES)
        own = monitoring.own_settings(
            state.texts.get(PROMETHEUS_YML), state.texts.get(PROMETHEUS_DEFAULTS)
        )
        if own:
            notices.append(
                f"Prometheus is set up by somebody ({'; '.join(own)}): left as it is; add what "
                f"{monitoring.FOLDER}/scrape.yml says to its configuration"
            )
        gpus = {
            h.name: (found.exporter, monitoring.address(h.address, watch.gpu_port(found)))
            for h in fleet.hosts
            if (found := watch.gpu_metrics(h)) is not None
        }
        watched = monitoring.files(
            spec,
            pools,
            {h.name: h.address for h in fleet.group("gateway")},
            {h.name: h.address for h in fleet.hosts},
            gpus=gpus,
            keep_own=bool(own),
        )
        files += watched
        if alerting := _alertmanager(spec, state, inputs, notices):
            packages |= set(alertmanager.PACKAGES)
            files += alerting
            monitoring_services += _alertmanager_services(alerting)
        boards = monitoring.grafana_files(spec, pools, {e for e, _ in gpus.values()})
        files += boards
        if settings.monitoring.grafana:
            packages.add("grafana")
            if settings.air_gapped is None:  # else the bundle has it
                files += _grafana_source(settings.monitoring.grafana, inputs)
            monitoring_services.append(_service(GRAFANA, restarts=boards))
        else:
            notices.append(
                "Grafana: no package source (monitoring.grafana.apt_source); its data source and "
                "dashboard lie ready in /etc/grafana"
            )
        monitoring_services.append(
            _service(
                PROMETHEUS,
                restarts=[f for f in watched if f.path.startswith("/etc/systemd/")],
                # Targets are read as they change, by Prometheus itself.
                reloads=[f for f in watched if "/targets/" not in f.path],
                reload=("systemctl", "reload", PROMETHEUS),
            )
        )
    alone = {
        pool.instances[0].name
        for pool in pools
        if len(pool.instances) == 1 and pool.instances[0].host == spec.name
    }
    names = {one.name for one in instances}
    used = {one.release for one in instances}
    return HostPlan(
        spec=spec,
        state=state,
        packages=tuple(sorted(packages)),
        apt_list=apt_list,
        tools=_tools(spec, state) if releases else None,
        files=tuple(files),
        releases=tuple(releases.values()),
        weights=tuple(fetches.values()),
        instances=instances,
        wanted=wanted,
        checksums=checksums,
        instance_files=instance_files,
        kept=kept,
        bundle_services=tuple(bundle_services),
        firewall_services=tuple(firewall_services),
        acme=acme,
        gateway_services=tuple(gateway_services),
        monitoring_services=tuple(monitoring_services),
        retired=tuple(sorted(_ours(state) - names)),
        new_lines=lines_of({spec.name: view}),
        spares={name: cards for name in sorted(alone) if (cards := spares.found(view, name))},
        prune=pruning.order(settings, state, set(releases) | used, {i.weights for i in instances})
        if releases
        else {},
        notices=tuple(notices),
    )


@cache
def _lib_scripts() -> tuple[ManagedFile, ...]:
    """Scripts of ours that stay on a GPU host."""
    return tuple(
        ManagedFile(
            f"{paths.LIB}/{name}",
            f"# {paths.MARK}\n{SCRIPTS.joinpath(name).read_text(encoding='utf-8')}",
        )
        for name in LIB_SCRIPTS
    )


def _exporter(spec: HostSpec, state: HostState) -> list[ManagedFile]:
    """Files of the node exporter; ValueError where its own defaults give one of our flags."""
    files = monitoring.host_files(spec)
    ours = re.findall(r"--([\w.-]+)", "\n".join(file.content for file in files))
    for flag in monitoring.given_flags(state.texts.get(EXPORTER_DEFAULTS)):
        if flag in ours:
            raise ValueError(
                f"{spec.name}: {EXPORTER_DEFAULTS}: ARGS: --{flag} is given by us too, and the "
                "node exporter refuses a flag given twice: take it out there"
            )
    return files


def _alertmanager(
    spec: HostSpec, state: HostState, inputs: Inputs, notices: list[str]
) -> list[ManagedFile]:
    """Files of Alertmanager; none, and a notice, where somebody has set it up."""
    found = alertmanager.files(spec, inputs.alerting)
    if found and alertmanager.own_settings(state.texts.get(alertmanager.PACKAGED)):
        notices.append(
            f"Alertmanager is set up by somebody ({alertmanager.PACKAGED} was edited): left as it "
            "is; put the receivers there, and name it in monitoring.alerting.existing instead"
        )
        return []
    for flag in monitoring.given_flags(state.texts.get(alertmanager.DEFAULTS)):
        if found and f"--{flag}=" in found[1].content:
            raise ValueError(
                f"{spec.name}: {alertmanager.DEFAULTS}: ARGS: --{flag} is given by us too: take it "
                "out there"
            )
    return found


def _alertmanager_services(files: Sequence[ManagedFile]) -> list[Service]:
    relay = [f for f in files if f.path.endswith(("relay.py", "relay.json", "relay.service"))]
    return [
        *([_service(alertmanager.RELAY_UNIT, restarts=relay)] if relay else []),
        _service(
            alertmanager.UNIT,
            restarts=[f for f in files if f.path == alertmanager.DROPIN],
            reloads=[f for f in files if f.path == alertmanager.CONFIG],
            reload=("systemctl", "reload", alertmanager.UNIT),
        ),
    ]


def _timer(unit: str, files: Sequence[ManagedFile]) -> Service:
    """A timer; scripts and settings are read anew at each round."""
    return _service(
        f"{unit}.timer", restarts=[f for f in files if f.path.startswith("/etc/systemd/")]
    )


def _grafana_source(settings: Grafana, inputs: Inputs) -> list[ManagedFile]:
    """The package source of Grafana, and its key where one is named."""
    files = [
        ManagedFile(
            "/etc/apt/sources.list.d/vllm-fleet-grafana.list",
            f"# {paths.MARK}\n{settings.apt_source}\n",
        )
    ]
    if settings.key_file:
        name = settings.key_file.rpartition("/")[2]
        files.append(ManagedFile(f"{APT_KEYS}/{name}", inputs.apt_keys[settings.key_file]))
    return files


def _ours(state: HostState) -> set[str]:
    """Names of the instances that stand on a host: by unit, running or enabled, or by file."""
    units = {
        name.removeprefix("vllm@").removesuffix(".service")
        for name in state.units
        if name.startswith("vllm@") and (state.active(name) or state.enabled(name))
    }
    return units | set(state.instances)


def _fetch(
    spec: HostSpec, instances: Sequence[PlannedInstance], state: HostState, inputs: Inputs
) -> WeightsFetch:
    """Weights that these instances of one model share."""
    one = instances[0]
    wanted = weights.wanted(one.model_name, one.model)
    stamp = state.weights.get(wanted.stamp)
    listing = inputs.listings.get(listings.path_of(one.model_name, one.model))
    order = weights.order(one.model_name, one.model, spec.settings, listing)
    if weights.hub_of(one.model, spec.settings)[1]:
        order["token_file"] = (
            paths.HUGGINGFACE_TOKEN if one.model.source == "huggingface" else paths.HUB_TOKEN
        )
    # An architecture that vLLM does not know may still be served by transformers' own code.
    order["engines"] = [
        dict(engine_data.architecture_rules(version))
        for version in dict.fromkeys(
            i.vllm_version for i in instances if not {"model-impl", "model_impl"} & set(i.args)
        )
    ]
    return WeightsFetch(
        one.model_name,
        bool(stamp and stamp["intact"])
        and weights.verified(stamp, wanted, listing.digest if listing else None),
        order,
    )


def _tools(spec: HostSpec, state: HostState) -> ToolsBuild:
    # Made with the same Python that gave the state: its version is part of the id.
    order = {"python": "python3", "lock": TOOLS_LOCK, "tools": paths.TOOLS}
    return ToolsBuild(
        tools_id(TOOLS_LOCK, state.python), {**order, **release.sources(spec.settings)}
    )


def _service(
    unit: str,
    *,
    restarts: Sequence[ManagedFile] = (),
    reloads: Sequence[ManagedFile] = (),
    reload: tuple[str, ...] = (),
) -> Service:
    return Service(unit, _checksum(restarts), _checksum(reloads), reload)


def _checksum(files: Sequence[ManagedFile]) -> str:
    """One checksum over files; "" over none."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.path):
        digest.update(f"{file.path}\0{file.sha256}\0".encode())
    return digest.hexdigest()
