"""What watches a host from within: the probe, the host's own metrics, an exporter of cards. Pure.

Timers, not daemons: nothing of ours is left running that could hang unseen, and a metric with
the time of the last round tells when one does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources

from vllm_fleet import gateway, jsontext, paths, weights
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import PlannedInstance
from vllm_fleet.render import render
from vllm_fleet.spec.model import GpuMetrics, HostSpec

UNITS = "/etc/systemd/system"
PROBE = "vllm-fleet-probe"
HOSTWATCH = "vllm-fleet-hostwatch"
GPU_EXPORTER = "vllm-fleet-gpu-exporter"
HOSTWATCH_SECONDS = 30
ROUND_SECONDS = 300  # no round of the probe may take longer: nine deadlines of stacks


def probe_files(
    spec: HostSpec, instances: Sequence[PlannedInstance], gateways: Iterable[str]
) -> list[ManagedFile]:
    """Script, settings and timer of the probe; `gateways` are their /status, as address:port."""
    settings = spec.settings.probe
    if not settings.enabled or not instances:
        return []
    order = {
        "host": spec.name,
        "instances": [
            {
                "name": one.name,
                "pool": one.model_name,
                "model": one.model_name,
                "port": one.port,
                "task": one.model.task,
                "start_seconds": one.start_seconds,
            }
            for one in instances
        ],
        "gateways": list(gateways),
        **settings.model_dump(exclude={"enabled", "interval_seconds"}),
    }
    return [
        _script("probe"),
        ManagedFile(f"{paths.ETC}/probe.json", jsontext.lines(order)),
        *_timer(
            PROBE,
            "Ask every vLLM instance of this host for one token",
            "probe",
            settings.interval_seconds,
            ROUND_SECONDS,
        ),
    ]


def host_files(spec: HostSpec, instances: Sequence[PlannedInstance]) -> list[ManagedFile]:
    """Script, settings and timer of the host's own metrics."""
    order = {
        "device": spec.settings.device if "gpu" in spec.groups else "cpu",
        "instances": [
            {
                "name": one.name,
                "pool": one.model_name,
                "release": one.release,
                "weights_stamp": weights.wanted(one.model_name, one.model).stamp,
                "cards": list(one.cards),
                "uuids": list(one.uuids),
            }
            for one in instances
        ],
        "certificates": _certificates(spec),
    }
    return [
        _script("hostwatch"),
        ManagedFile(f"{paths.ETC}/hostwatch.json", jsontext.lines(order)),
        *_timer(
            HOSTWATCH,
            "Metrics of cards, kernel log and certificates of this host",
            "hostwatch",
            HOSTWATCH_SECONDS,
            ROUND_SECONDS,
        ),
    ]


def gpu_metrics(spec: HostSpec) -> GpuMetrics | None:
    """Who exports metrics of this host's cards; None where nobody does."""
    if "gpu" not in spec.groups:
        return None
    wanted = spec.settings.gpu_metrics
    if wanted.exporter != "auto":
        return wanted if wanted.exporter != "none" else None
    if spec.settings.device != "cuda":
        return None
    return wanted.model_copy(update={"exporter": "nvitop"})


def gpu_port(metrics: GpuMetrics) -> int:
    """Port of the exporter of cards."""
    return metrics.port or {"nvitop": 9146, "dcgm": 9400, "amd": 5000}[metrics.exporter]


def exporter_files(spec: HostSpec, addresses: Iterable[str]) -> list[ManagedFile]:
    """The unit of nvitop-exporter, from the tools venv; none where another one exports.

    `addresses` are those of the monitoring hosts: systemd lets nobody else in.
    """
    metrics = gpu_metrics(spec)
    if metrics is None or metrics.exporter != "nvitop":
        return []
    text = render(
        "prometheus/gpu-exporter.service.j2",
        mark=paths.MARK,
        tools=paths.TOOLS,
        host=spec.name,
        port=gpu_port(metrics),
        address="::" if ":" in spec.address else "0.0.0.0",
        user=paths.USER,
        allowed=sorted(set(addresses)),
    )
    return [ManagedFile(f"{UNITS}/{GPU_EXPORTER}.service", text)]


def _certificates(spec: HostSpec) -> list[str]:
    tls = spec.settings.gateway.tls if "gateway" in spec.groups else None
    return [gateway.certificate_file(tls)] if tls else []


@cache
def _script(name: str) -> ManagedFile:
    source = resources.files("vllm_fleet.onhost").joinpath(f"{name}.py").read_text(encoding="utf-8")
    return ManagedFile(f"{paths.LIB}/{name}.py", f"# {paths.MARK}\n{source}")


def _timer(
    unit: str, description: str, script: str, seconds: int, longest: int
) -> list[ManagedFile]:
    values = {
        "mark": paths.MARK,
        "description": description,
        "lib": paths.LIB,
        "script": script,
        "settings": f"{paths.ETC}/{script}.json",
        "seconds": seconds,
        "longest": longest,
    }
    return [
        ManagedFile(f"{UNITS}/{unit}.{kind}", render(f"prometheus/watch.{kind}.j2", **values))
        for kind in ("service", "timer")
    ]
