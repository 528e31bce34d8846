"""Files of a monitoring host, and of every host that is watched. Pure: settings in, text out.

Debian's and Ubuntu's own packages are added to, never replaced: Prometheus gets a
configuration of ours beside the package's, chosen by a drop-in of its unit. A Prometheus that
somebody has set up (:func:`own_settings`) keeps its configuration and gets our rules and
targets, and a file that says what to add.

After putting the files: `systemctl reload prometheus` for those below /etc/prometheus except
targets/ (read by itself), a restart for a changed drop-in, and a restart of
prometheus-node-exporter for those of :func:`host_files`, which makes their directories.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import yaml

from vllm_fleet import alerts, dashboard, paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import PlannedInstance, Pool
from vllm_fleet.render import render
from vllm_fleet.spec.model import HostSpec

CONFIG = "/etc/prometheus/vllm-fleet.yml"
FOLDER = "/etc/prometheus/vllm-fleet"  # rules/ and targets/
UNIT_DROPIN = "/etc/systemd/system/prometheus.service.d/10-vllm-fleet.conf"
EXPORTER_DROPIN = "/etc/systemd/system/prometheus-node-exporter.service.d/10-vllm-fleet.conf"
TMPFILES = "/etc/tmpfiles.d/vllm-fleet-metrics.conf"
DEBIAN_TEXTFILE = "/var/lib/prometheus/node-exporter"
COLLECTED = f"{paths.STATE}/textfile.d"
DASHBOARDS = "/etc/grafana/vllm-fleet"
CARDS = "card"  # the board of cards

GATEWAY_PORT = 9145
NODE_PORT = 9100
JOBS = ("vllm", "gateway", "node", "gpu", "prometheus", "alertmanager")


def files(
    spec: HostSpec,
    pools: tuple[Pool, ...],
    gateways: Mapping[str, str],
    hosts: Mapping[str, str],
    *,
    gpus: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    keep_own: bool = False,
) -> list[ManagedFile]:
    """Files of Prometheus on the monitoring host `spec`.

    `gateways` and `hosts` map names to addresses, `gpus` a host to its exporter of cards and
    where it listens. With `keep_own` the host's Prometheus has
    settings of its own: no configuration and no drop-in, but what to add to them.
    """
    settings = spec.settings.monitoring
    values = {"mark": paths.MARK, "folder": FOLDER, "jobs": JOBS}
    rules = alerts.rules(
        settings.scrape_interval_seconds,
        deployed(pools),
        settings.objectives,
        runbook=settings.alerting.runbook,
    )
    result = [ManagedFile(f"{FOLDER}/rules/fleet.yml", rules)]
    for job, groups in targets(spec, pools, gateways, hosts, gpus).items():
        text = json.dumps(groups, indent=2, ensure_ascii=False) + "\n"
        result.append(ManagedFile(f"{FOLDER}/targets/{job}.json", text))
    if keep_own:
        text = render("prometheus/scrape-only.yml.j2", **values)
        return [*result, ManagedFile(f"{FOLDER}/scrape.yml", text)]
    config = render(
        "prometheus/vllm-fleet.yml.j2",
        interval=settings.scrape_interval_seconds,
        alertmanagers=[
            *(
                [address("localhost", settings.alerting.port)]
                if settings.alerting.receivers
                else []
            ),
            *settings.alerting.existing,
        ],
        **values,
    )
    flags = (
        f"--config.file={CONFIG}",
        f"--storage.tsdb.retention.time={settings.retention_days}d",
        f"--storage.tsdb.retention.size={settings.retention_gib}GB",  # Prometheus' GB is a GiB
        f"--web.listen-address=:{settings.listen}",
    )
    dropin = render("prometheus/prometheus.service.j2", mark=paths.MARK, flags=flags)
    return [*result, ManagedFile(CONFIG, config), ManagedFile(UNIT_DROPIN, dropin)]


def targets(
    spec: HostSpec,
    pools: tuple[Pool, ...],
    gateways: Mapping[str, str],
    hosts: Mapping[str, str],
    gpus: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> dict[str, list[dict[str, Any]]]:
    """What is scraped, by job, in the form of Prometheus' file_sd."""
    vllm = [
        _target(
            address(one.address, one.port),
            host=one.host,
            instance=one.name,
            pool=pool.name,
            model=one.model_name,
            cards=",".join(map(str, one.cards)) or one.device,
        )
        for pool in pools
        for one in pool.instances
    ]
    alerting = spec.settings.monitoring.alerting
    return {
        "vllm": vllm,
        "gateway": [
            _target(address(where, GATEWAY_PORT), host=name, instance="gateway", gateway=name)
            for name, where in gateways.items()
        ],
        "node": [
            _target(address(where, NODE_PORT), host=name, instance="node")
            for name, where in hosts.items()
        ],
        "gpu": [
            _target(where, host=name, instance="gpu", exporter=exporter)
            for name, (exporter, where) in gpus.items()
        ],
        "alertmanager": [
            _target(address("localhost", alerting.port), host=spec.name, instance="alertmanager")
        ]
        if alerting.receivers
        else [],
        "prometheus": [
            _target(
                address("localhost", spec.settings.monitoring.listen),
                host=spec.name,
                instance="prometheus",
            )
        ],
    }


def running_version(instance: PlannedInstance) -> str:
    """The vLLM version of the release that an instance runs: in an upgrade not the wanted one."""
    return re.split("[+-]", instance.release, maxsplit=1)[0] or instance.vllm_version


def deployed(pools: Iterable[Pool]) -> tuple[str, ...]:
    """Versions that run, and those wanted: their names are asked for in rules and dashboards."""
    instances = [one for pool in pools for one in pool.instances]
    found = {v for one in instances for v in (running_version(one), one.vllm_version)}
    return tuple(sorted(found))


def _target(where: str, **labels: str) -> dict[str, Any]:
    return {"targets": [where], "labels": labels}


def address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_files(spec: HostSpec) -> list[ManagedFile]:
    """Files of the node exporter, on every host: our textfile metrics, and our units' states."""
    del spec  # the same on every host
    flags = (
        f"--collector.textfile.directory={COLLECTED}/*",
        "--collector.systemd",
        # Anchored by the exporter; systemd would take a backslash for itself.
        "--collector.systemd.unit-include=(vllm@.+|vllm-fleet-.+|nginx|prometheus.*|nvidia-.+)[.]service",
    )
    dropin = render(
        "prometheus/node-exporter.service.j2", mark=paths.MARK, flags=flags, tmpfiles=TMPFILES
    )
    tmpfiles = render(
        "prometheus/tmpfiles.conf.j2",
        mark=paths.MARK,
        textfile=paths.TEXTFILE,
        collected=COLLECTED,
        debian=DEBIAN_TEXTFILE,
    )
    return [ManagedFile(EXPORTER_DROPIN, dropin), ManagedFile(TMPFILES, tmpfiles)]


def grafana_files(
    spec: HostSpec, pools: Iterable[Pool] = (), exporters: Collection[str] = ()
) -> list[ManagedFile]:
    """Data source and dashboards, provisioned as files; the rest of Grafana is left as it is.

    `exporters` of cards tell what there is to show of them; without cards there is no such board.
    """
    settings = spec.settings.monitoring
    instances = [one for pool in pools for one in pool.instances]
    source = render(
        "grafana/datasource.yaml.j2",
        mark=paths.MARK,
        uid=dashboard.SOURCE,
        port=settings.listen,
        interval=settings.scrape_interval_seconds,
    )
    provider = render("grafana/dashboards.yaml.j2", mark=paths.MARK, folder=DASHBOARDS)
    boards = [
        ManagedFile(
            f"{DASHBOARDS}/{name}.json",
            dashboard.text(name, deployed(pools), exporters, settings.alerting.runbook),
        )
        for name in dashboard.names()
        if name != CARDS or any(one.device == "cuda" for one in instances)
    ]
    return [
        ManagedFile("/etc/grafana/provisioning/datasources/vllm-fleet.yaml", source),
        ManagedFile("/etc/grafana/provisioning/dashboards/vllm-fleet.yaml", provider),
        *boards,
    ]


def own_settings(prometheus_yml: str | None, defaults: str | None) -> list[str]:
    """Why this host's Prometheus counts as set up by somebody; empty: as the package left it.

    `prometheus_yml` and `defaults` are the contents of /etc/prometheus/prometheus.yml and
    /etc/default/prometheus, None where they do not exist.
    """
    reasons = []
    try:
        config = yaml.safe_load(prometheus_yml or "") or {}
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        return ["/etc/prometheus/prometheus.yml: does not parse, so somebody has edited it"]
    jobs = {
        str(job.get("job_name")): job
        for job in config.get("scrape_configs") or []
        if isinstance(job, dict)
    }
    for name, job in jobs.items():
        groups = job.get("static_configs") or []
        where = [t for g in groups if isinstance(g, dict) for t in g.get("targets") or []]
        if (
            name not in ("prometheus", "node")
            or not where
            or any(not str(t).startswith("localhost:") for t in where)
        ):
            reasons.append(f"/etc/prometheus/prometheus.yml: scrape_configs: job {name!r}")
    for key in ("rule_files", "remote_write", "remote_read", "scrape_config_files"):
        if config.get(key):
            reasons.append(f"/etc/prometheus/prometheus.yml: {key}")
    ours = ("config.file", "storage.tsdb.retention.time", "storage.tsdb.retention.size")
    reasons += [
        f"/etc/default/prometheus: ARGS: --{flag}"
        for flag in given_flags(defaults)
        if flag in (*ours, "web.listen-address")
    ]
    return reasons


def given_flags(defaults: str | None) -> list[str]:
    """Names of the long flags in the ARGS of a file below /etc/default.

    Prometheus and its exporters refuse a flag that is given twice, so one of these that a
    drop-in of ours gives too must be taken out of ARGS first.
    """
    lines = (defaults or "").replace("\\\n", " ").splitlines()
    args = " ".join(line for line in lines if re.match(r"\s*ARGS=", line))
    return re.findall(r"--([A-Za-z0-9][\w.-]*)", args)
