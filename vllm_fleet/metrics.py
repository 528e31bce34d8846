"""Which metrics there are: of each vLLM version, of the gateway and of our own scripts.

vLLM's come from ``data/vllm/<version>.json``, the one place that says what a version exports.
Rules and dashboards write the names of the newest version; :func:`adapted` turns an expression
into one that holds for the versions that are deployed, of which a fleet in the midst of an
upgrade has two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache

from vllm_fleet import engine_data

# What a metric of each kind is called in a sample, beside its own name.
_SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}

# What older versions called it, the newest first. Within the supported ones nothing has been
# renamed; these are from vLLM's release notes, for whoever runs an older one with our rules.
RENAMED: Mapping[str, tuple[str, ...]] = {
    "vllm:kv_cache_usage_perc": ("vllm:gpu_cache_usage_perc",),
    "vllm:inter_token_latency_seconds": ("vllm:time_per_output_token_seconds",),
    "vllm:prefix_cache_hits_total": ("vllm:gpu_prefix_cache_hits_total",),
    "vllm:prefix_cache_queries_total": ("vllm:gpu_prefix_cache_queries_total",),
}

# What the gateway's /metrics has, by kind; its Lua module `metrics` writes them.
GATEWAY = {
    "vllm_fleet_gateway_requests_total": "counter",
    "vllm_fleet_gateway_key_requests_total": "counter",
    "vllm_fleet_gateway_tokens_total": "counter",
    "vllm_fleet_gateway_limited_total": "counter",
    "vllm_fleet_gateway_key_refused_total": "counter",
    "vllm_fleet_gateway_retries_total": "counter",
    "vllm_fleet_gateway_refused_total": "counter",
    "vllm_fleet_gateway_series_dropped_total": "counter",
    "vllm_fleet_gateway_first_byte_seconds": "histogram",
    "vllm_fleet_gateway_duration_seconds": "histogram",
    "vllm_fleet_gateway_instance_ready": "gauge",
    "vllm_fleet_gateway_instance_draining": "gauge",
    "vllm_fleet_gateway_in_flight": "gauge",
    "vllm_fleet_gateway_queued": "gauge",
    "vllm_fleet_gateway_held": "gauge",
    "vllm_fleet_gateway_connections": "gauge",
}

# What our own scripts on the hosts write for the node exporter, by kind.
OWN = {
    # gate/bootlog.py
    "vllm_fleet_plan_weights_bytes": "gauge",
    "vllm_fleet_plan_kv_cache_bytes": "gauge",
    "vllm_fleet_plan_kv_cache_tokens": "gauge",
    "vllm_fleet_plan_max_concurrency": "gauge",
    "vllm_fleet_plan_differences": "gauge",
    # onhost/probe.py
    "vllm_fleet_probe_success": "gauge",
    "vllm_fleet_probe_seconds": "gauge",
    "vllm_fleet_probe_time_seconds": "gauge",
    "vllm_fleet_probe_out": "gauge",
    "vllm_fleet_probe_restarts_total": "counter",
    # rollout/audit.py
    "vllm_fleet_change_timestamp_seconds": "gauge",
    "vllm_fleet_change_seconds": "gauge",
    "vllm_fleet_rollout_timestamp_seconds": "gauge",
    # onhost/hostwatch.py
    "vllm_fleet_hostwatch_time_seconds": "gauge",
    "vllm_fleet_instance_info": "gauge",
    "vllm_fleet_instance_ready": "gauge",
    "vllm_fleet_instance_ready_time_seconds": "gauge",
    "vllm_fleet_instance_start_seconds": "gauge",
    "vllm_fleet_instance_start_part_seconds": "gauge",
    "vllm_fleet_weights_verified_time_seconds": "gauge",
    "vllm_fleet_change_until_seconds": "gauge",
    "vllm_fleet_certificate_expires_time_seconds": "gauge",
    "vllm_fleet_xid_total": "counter",
    "vllm_fleet_xid_time_seconds": "gauge",
    "vllm_fleet_card_present": "gauge",
    "vllm_fleet_card_memory_used_bytes": "gauge",
    "vllm_fleet_card_memory_total_bytes": "gauge",
    "vllm_fleet_card_utilization_ratio": "gauge",
    "vllm_fleet_card_temperature_celsius": "gauge",
    "vllm_fleet_card_power_watts": "gauge",
    "vllm_fleet_card_throttled": "gauge",
    "vllm_fleet_card_ecc_uncorrected_total": "counter",
    "vllm_fleet_card_repair_pending": "gauge",
    "vllm_fleet_card_remap_failed": "gauge",
    "vllm_fleet_card_nvlinks_active": "gauge",
}

# Of the node exporter 1.5, Prometheus 2.42 and Alertmanager 0.25 (Debian 12), and later: those
# that are asked for.
OTHERS = frozenset(
    {
        "up",
        "ALERTS",
        "process_start_time_seconds",
        "node_cpu_seconds_total",
        "node_filesystem_avail_bytes",
        "node_filesystem_device_error",
        "node_filesystem_size_bytes",
        "node_infiniband_state_id",
        "node_memory_MemAvailable_bytes",
        "node_memory_MemTotal_bytes",
        "node_network_receive_bytes_total",
        "node_network_transmit_bytes_total",
        "node_network_up",
        "node_disk_read_bytes_total",
        "node_disk_written_bytes_total",
        "node_systemd_unit_state",
        "node_textfile_scrape_error",
        "node_timex_maxerror_seconds",
        "node_timex_offset_seconds",
        "node_timex_sync_status",
        "node_vmstat_oom_kill",
        "prometheus_config_last_reload_successful",
        "prometheus_notifications_dropped_total",
        "prometheus_rule_evaluation_failures_total",
        "alertmanager_notifications_failed_total",
    }
)

# A name, and the matchers that follow it where there are any.
_SELECTOR = re.compile(r"(vllm:\w+)(\{)?")


def versions() -> tuple[str, ...]:
    """Versions whose metrics are known, oldest first."""
    return engine_data.versions()


@cache
def series(version: str) -> frozenset[str]:
    """Names of all series that every server of this version exports, `_bucket` and the like too.

    Those of the nearest older version where this one is not known.
    """
    return _names(engine_data.nearest(version).metrics)


def gateway_series() -> frozenset[str]:
    """Names of all series that a gateway exports."""
    return _names(GATEWAY)


def own_series() -> frozenset[str]:
    """Names of all series that our scripts on the hosts write."""
    return _names(OWN)


def named(expr: str) -> frozenset[str]:
    """Names of vLLM's series in an expression."""
    return frozenset(match[1] for match in _SELECTOR.finditer(expr))


def adapted(
    expr: str,
    deployed: Collection[str],
    exported: Mapping[str, Collection[str]] | None = None,
) -> str | None:
    """The expression with the names of the deployed versions; None where none exports one of them.

    Where two versions call it otherwise, the selector takes both names: an instance exports the
    one of the version that it runs. `exported` is for tests: the series of each version.
    """
    known = {v: exported[v] if exported is not None else series(v) for v in deployed}
    missing = False

    def replace(match: re.Match[str]) -> str:
        nonlocal missing
        name, brace = match[1], match[2] or ""
        names = sorted(
            {found for held in known.values() if (found := called(name, held)) is not None}
        )
        if not known or names == [name]:
            return name + brace
        if not names:
            missing = True
            return name + brace
        if len(names) == 1:
            return names[0] + brace
        either = f'{{__name__=~"{"|".join(names)}"'
        return either + "," if brace else either + "}"

    text = _SELECTOR.sub(replace, expr)
    return None if missing else text


def called(name: str, exported: Collection[str]) -> str | None:
    """What a version that exports these series calls this one; None where it has no such."""
    stem, suffix = name, ""
    for end in ("_bucket", "_sum", "_count"):
        if name.endswith(end) and name.removesuffix(end) in RENAMED:
            stem, suffix = name.removesuffix(end), end
    candidates = (stem, *RENAMED.get(stem, ()))
    return next((c + suffix for c in candidates if c + suffix in exported), None)


def _names(kinds: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name + suffix for name, kind in kinds.items() for suffix in _SUFFIXES[kind])
