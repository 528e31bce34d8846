"""What the dashboards show. Names of vLLM's metrics are those of its newest version.

A panel that asks for something that some versions lack is left out where none of the deployed
ones has it (vllm_fleet/dashboard.py); so is one whose exporter no host has. Counters that begin
with their first event are added to zero, so that no panel is empty because all is well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_fleet.alerts.hosts import NICS
from vllm_fleet.alerts.table import DISKS, HOST_AWAY

RATE = "[$__rate_interval]"
OF = 'pool=~"$pool",host=~"$host",instance=~"$instance"'
NAMED = "{{host}}/{{instance}}"
EACH = "pool, host, instance"
NODE = 'host=~"$host"'
GATEWAY = 'pool=~"$pool",gateway=~"$gateway"'
POOL = 'pool=~"$pool"'


@dataclass(frozen=True)
class Panel:
    """One panel: its queries as (expression, legend), the unit in Grafana's words."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    text: str = ""  # what to make of it
    alert: str = ""  # the alert that is red with it: a link to its runbook entry
    red_below: float | None = None  # red under this value, green from it on
    red_from: float | None = None  # green under this value, red from it on
    most: float | None = None  # upper end of the axis
    stacked: bool = False


@dataclass(frozen=True)
class Board:
    """One dashboard: rows of panels, and what can be chosen."""

    name: str
    title: str
    variables: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


# What can be chosen, and where its values come from.
VARIABLES = {
    "pool": 'label_values(up{job="vllm"}, pool)',
    "host": 'label_values(up{job="node"}, host)',
    "instance": 'label_values(up{job="vllm",pool=~"$pool"}, instance)',
    "gateway": 'label_values(up{job="gateway"}, gateway)',
    "owner": 'label_values(vllm_fleet_card_present{host=~"$host"}, instance)',
}


def quantiles(metric: str, of: str, by: str, legend: str) -> tuple[tuple[str, str], ...]:
    """Median, 95th and 99th of a hundred of one of vLLM's histograms."""
    return tuple(
        (
            f"histogram_quantile({q},"
            f" sum by ({by}, le) (rate(vllm:{metric}_bucket{{{of}}}{RATE})))",
            f"{legend} p{round(q * 100)}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def by_version(metric: str) -> tuple[tuple[str, str], ...]:
    """95th of a hundred of one of vLLM's histograms, by what the instance ran at that time."""
    return (
        (
            "histogram_quantile(0.95, sum by (pool, vllm_version, le)"
            f" (rate(vllm:{metric}_bucket{{{POOL}}}{RATE})"
            " * on (host, instance) group_left (vllm_version)"
            ' vllm_fleet_instance_info{job="node"}))',
            "{{pool}} {{vllm_version}} p95",
        ),
    )


def of_pool(title: str, metric: str, *, unit: str = "short", alert: str = "") -> Panel:
    """A histogram of vLLM's over all instances of a pool."""
    return Panel(title, quantiles(metric, POOL, "pool", "{{pool}}"), unit=unit, alert=alert)


def gateway_quantiles(metric: str, of: str) -> tuple[tuple[str, str], ...]:
    """The same of one of the gateway's."""
    series = f"vllm_fleet_gateway_{metric}_bucket"
    return tuple(
        (
            f"histogram_quantile({q}, sum by (pool, le) (rate({series}{{{of}}}{RATE})))",
            f"{{{{pool}}}} p{round(q * 100)}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def total(metric: str, by: str, of: str, legend: str) -> tuple[tuple[str, str], ...]:
    """A gauge, added up."""
    return ((f"sum by ({by}) ({metric}{{{of}}})", legend),)


def rate(metric: str, by: str, of: str, legend: str) -> tuple[tuple[str, str], ...]:
    """A counter a second, added up."""
    return ((f"sum by ({by}) (rate({metric}{{{of}}}{RATE}))", legend),)


def events(metric: str, by: str, of: str, legend: str) -> tuple[tuple[str, str], ...]:
    """The same of a counter that begins with its first event."""
    return ((f"sum by ({by}) (rate({metric}{{{of}}}{RATE})) or on() vector(0)", legend),)


def failing(by: str, of: str, legend: str) -> tuple[tuple[str, str], ...]:
    """Share of requests that fail, at the gateways."""
    name = "vllm_fleet_gateway_requests_total"
    return (
        (
            f'(sum by ({by}) (rate({name}{{{of},code=~"5.."}}{RATE})) or sum by ({by})'
            f" (rate({name}{{{of}}}{RATE})) * 0) / sum by ({by}) (rate({name}{{{of}}}{RATE}))",
            legend,
        ),
    )


READY = Panel(
    "Instances ready",
    (
        (
            "sum by (pool) (max by (pool, host, instance)"
            f" (vllm_fleet_gateway_instance_ready{{{POOL}}}))",
            "{{pool}}",
        ),
    ),
    kind="stat",
    width=6,
    red_below=1,
    text="Warm and in rotation, as the gateways see it.",
    alert="PoolDown",
)
FIRING = Panel(
    "Alerts firing",
    (('count(ALERTS{alertstate="firing",severity!="none"}) or on() vector(0)', "firing"),),
    kind="stat",
    width=6,
    red_from=1,
    text="The page of Prometheus lists them, each with its runbook entry.",
)
TOKENS = Panel(
    "Tokens a second",
    (
        *rate("vllm:generation_tokens_total", "pool", POOL, "{{pool}} out"),
        *rate("vllm:prompt_tokens_total", "pool", POOL, "{{pool}} in"),
    ),
)
WAITING_AT_GATEWAYS = Panel(
    "Held and queued",
    (
        *total("vllm_fleet_gateway_held", "pool", POOL, "{{pool}} held"),
        *total("vllm_fleet_gateway_queued", "pool", POOL, "{{pool}} queued"),
    ),
    text="Held: no instance is ready. Queued: every instance is full.",
    alert="RequestsHeld",
)

FLEET = Board(
    "fleet",
    "vLLM fleet",
    ("pool", "host"),
    (
        (
            "Now",
            (
                READY,
                Panel(
                    "Instances answering",
                    ((f'sum by (pool) (up{{job="vllm",{POOL}}})', "{{pool}}"),),
                    kind="stat",
                    width=6,
                    red_below=1,
                    alert="InstanceDown",
                ),
                FIRING,
                Panel(
                    "Hosts away",
                    ((f"count({HOST_AWAY}) or on() vector(0)", "away"),),
                    kind="stat",
                    width=6,
                    red_from=1,
                    alert="HostDown",
                ),
            ),
        ),
        (
            "What users feel",
            (
                Panel(
                    "Requests",
                    rate(
                        "vllm_fleet_gateway_requests_total", "pool, code", POOL, "{{pool}} {{code}}"
                    ),
                    unit="reqps",
                ),
                Panel(
                    "Requests that fail",
                    failing("pool", POOL, "{{pool}}"),
                    unit="percentunit",
                    most=1,
                    alert="GatewayFailures",
                ),
                Panel(
                    "First byte at the gateways",
                    gateway_quantiles("first_byte_seconds", POOL),
                    unit="s",
                    text="As clients wait for it, holds and queues included.",
                ),
                WAITING_AT_GATEWAYS,
                TOKENS,
                Panel(
                    "Tokens a second, by owner of the key",
                    events("vllm_fleet_gateway_tokens_total", "key", POOL, "{{key}}"),
                    stacked=True,
                ),
            ),
        ),
        (
            "Hosts",
            (
                Panel(
                    "CPU",
                    (
                        (
                            "1 - avg by (host) (rate(node_cpu_seconds_total"
                            f'{{mode="idle",{NODE}}}{RATE}))',
                            "{{host}}",
                        ),
                    ),
                    unit="percentunit",
                    most=1,
                ),
                Panel(
                    "Memory",
                    (
                        (
                            f"1 - node_memory_MemAvailable_bytes{{{NODE}}}"
                            f" / node_memory_MemTotal_bytes{{{NODE}}}",
                            "{{host}}",
                        ),
                    ),
                    unit="percentunit",
                    most=1,
                    alert="OomKill",
                ),
                Panel(
                    "Disk",
                    (
                        (
                            f"1 - node_filesystem_avail_bytes{{{NODE},{DISKS}}}"
                            f" / node_filesystem_size_bytes{{{NODE},{DISKS}}}",
                            "{{host}} {{mountpoint}}",
                        ),
                    ),
                    unit="percentunit",
                    most=1,
                    alert="DiskFull",
                ),
                Panel(
                    "Network",
                    (
                        *rate(
                            "node_network_receive_bytes_total",
                            "host",
                            f"{NODE},{NICS}",
                            "{{host}} in",
                        ),
                        *rate(
                            "node_network_transmit_bytes_total",
                            "host",
                            f"{NODE},{NICS}",
                            "{{host}} out",
                        ),
                    ),
                    unit="Bps",
                ),
                Panel(
                    "Disks, read and written",
                    (
                        *rate("node_disk_read_bytes_total", "host", NODE, "{{host}} read"),
                        *rate("node_disk_written_bytes_total", "host", NODE, "{{host}} written"),
                    ),
                    unit="Bps",
                ),
                Panel(
                    "Clock",
                    ((f"abs(node_timex_offset_seconds{{{NODE}}})", "{{host}}"),),
                    unit="s",
                    text="How far it is off.",
                    alert="ClockOff",
                ),
            ),
        ),
    ),
)

POOLS = Board(
    "pool",
    "vLLM pool",
    ("pool",),
    (
        ("Now", (READY, FIRING)),
        (
            "What users feel",
            (
                of_pool(
                    "Time to first token",
                    "time_to_first_token_seconds",
                    unit="s",
                    alert="FirstTokenBudgetFast",
                ),
                of_pool(
                    "Between tokens",
                    "inter_token_latency_seconds",
                    unit="s",
                    alert="TokenGapBudgetFast",
                ),
                of_pool(
                    "Whole answer",
                    "e2e_request_latency_seconds",
                    unit="s",
                ),
                TOKENS,
                Panel(
                    "Requests that ended, by reason",
                    rate(
                        "vllm:request_success_total",
                        "pool, finished_reason",
                        POOL,
                        "{{pool}} {{finished_reason}}",
                    ),
                    unit="reqps",
                ),
                WAITING_AT_GATEWAYS,
            ),
        ),
        (
            "Where the time goes",
            (
                of_pool(
                    "In the engine's queue",
                    "request_queue_time_seconds",
                    unit="s",
                    alert="RequestsWaiting",
                ),
                of_pool(
                    "Prefill",
                    "request_prefill_time_seconds",
                    unit="s",
                ),
                of_pool(
                    "Decode",
                    "request_decode_time_seconds",
                    unit="s",
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "Running", total("vllm:num_requests_running", EACH, POOL, NAMED), stacked=True
                ),
                Panel(
                    "Waiting",
                    total("vllm:num_requests_waiting", EACH, POOL, NAMED),
                    alert="RequestsWaiting",
                ),
                Panel(
                    "Waiting, by reason",
                    total(
                        "vllm:num_requests_waiting_by_reason",
                        "pool, reason",
                        POOL,
                        "{{pool}} {{reason}}",
                    ),
                    text="capacity: no room now. deferred: held back by the scheduler.",
                ),
                Panel(
                    "KV cache in use",
                    ((f"max by ({EACH}) (vllm:kv_cache_usage_perc{{{POOL}}})", NAMED),),
                    unit="percentunit",
                    most=1,
                    alert="KvCacheFull",
                ),
                Panel(
                    "Preemptions",
                    rate("vllm:num_preemptions_total", EACH, POOL, NAMED),
                    unit="cps",
                    alert="Preemptions",
                ),
                Panel(
                    "Prefix cache hits",
                    (
                        (
                            f"sum by (pool) (rate(vllm:prefix_cache_hits_total{{{POOL}}}{RATE}))"
                            " / sum by (pool)"
                            f" (rate(vllm:prefix_cache_queries_total{{{POOL}}}{RATE}))",
                            "{{pool}}",
                        ),
                    ),
                    unit="percentunit",
                    most=1,
                ),
                Panel(
                    "Turned away by engines",
                    events("vllm:admission_rejections_total", EACH, POOL, NAMED),
                    unit="cps",
                    alert="EngineRejects",
                ),
                of_pool(
                    "Length of prompts",
                    "request_prompt_tokens",
                ),
                of_pool(
                    "Length of answers",
                    "request_generation_tokens",
                ),
            ),
        ),
    ),
)

INSTANCES = Board(
    "instance",
    "vLLM instance",
    ("pool", "host", "instance"),
    (
        (
            "Now",
            (
                Panel(
                    "Ready",
                    (
                        (
                            f"min by ({EACH}) (vllm_fleet_gateway_instance_ready{{{OF}}})",
                            NAMED,
                        ),
                    ),
                    kind="stat",
                    width=6,
                    red_below=1,
                    alert="InstanceNotReady",
                ),
                Panel(
                    "One token in time",
                    ((f"vllm_fleet_probe_success{{{OF}}}", NAMED),),
                    kind="stat",
                    width=6,
                    red_below=1,
                    text="The probe's last answer.",
                    alert="ProbeFails",
                ),
                Panel(
                    "Restarted when wedged, today",
                    ((f"increase(vllm_fleet_probe_restarts_total{{{OF}}}[1d])", NAMED),),
                    kind="stat",
                    width=6,
                    red_from=1,
                    alert="EngineRestarted",
                ),
                Panel(
                    "Runs since",
                    ((f'time() - process_start_time_seconds{{job="vllm",{OF}}}', NAMED),),
                    unit="s",
                    kind="stat",
                    width=6,
                    alert="InstanceFlaps",
                ),
            ),
        ),
        (
            "Requests",
            (
                Panel("Running", total("vllm:num_requests_running", EACH, OF, NAMED)),
                Panel(
                    "Waiting",
                    total("vllm:num_requests_waiting", EACH, OF, NAMED),
                    alert="RequestsWaiting",
                ),
                Panel(
                    "In flight at gateways", total("vllm_fleet_gateway_in_flight", EACH, OF, NAMED)
                ),
                Panel(
                    "Tokens a second",
                    (
                        *rate("vllm:generation_tokens_total", EACH, OF, f"{NAMED} out"),
                        *rate("vllm:prompt_tokens_total", EACH, OF, f"{NAMED} in"),
                    ),
                    alert="EngineWedged",
                ),
                Panel(
                    "Time to first token",
                    quantiles("time_to_first_token_seconds", OF, EACH, NAMED)[1:2],
                    unit="s",
                    alert="FirstTokenSlow",
                ),
                Panel(
                    "Time of the probe", ((f"vllm_fleet_probe_seconds{{{OF}}}", NAMED),), unit="s"
                ),
            ),
        ),
        (
            "Memory",
            (
                Panel(
                    "KV cache in use",
                    ((f"max by ({EACH}) (vllm:kv_cache_usage_perc{{{OF}}})", NAMED),),
                    unit="percentunit",
                    most=1,
                    alert="KvCacheFull",
                ),
                Panel(
                    "KV cache, planned and found",
                    ((f"vllm_fleet_plan_kv_cache_tokens{{{OF}}}", NAMED + " {{source}}"),),
                    text="Tokens that it holds.",
                    alert="PlanDiffers",
                ),
                Panel(
                    "Memory of the server on the host",
                    ((f'process_resident_memory_bytes{{job="vllm",{OF}}}', NAMED),),
                    unit="bytes",
                ),
            ),
        ),
        (
            "Starts",
            (
                Panel(
                    "The last start",
                    ((f"vllm_fleet_instance_start_seconds{{{OF}}}", NAMED + " {{phase}}"),),
                    unit="s",
                    stacked=True,
                    alert="InstanceStartsLong",
                ),
                Panel(
                    "Weights, compiling and CUDA graphs of it",
                    ((f"vllm_fleet_instance_start_part_seconds{{{OF}}}", NAMED + " {{part}}"),),
                    unit="s",
                    stacked=True,
                ),
                Panel(
                    "State of the unit",
                    (
                        (
                            'node_systemd_unit_state{name=~"vllm@.+",host=~"$host"} == 1',
                            "{{host}} {{name}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Weights verified before",
                    ((f"time() - vllm_fleet_weights_verified_time_seconds{{{OF}}}", NAMED),),
                    unit="s",
                ),
            ),
        ),
    ),
)

CARD = 'host=~"$host",instance=~"$owner"'
CARD_NAMED = "{{host}} {{card}}"
CARDS = Board(
    "card",
    "vLLM cards",
    ("host", "owner"),
    (
        (
            "Now",
            (
                Panel(
                    "Cards lost",
                    (("count(vllm_fleet_card_present == 0) or on() vector(0)", "lost"),),
                    kind="stat",
                    width=6,
                    red_from=1,
                    alert="CardGone",
                ),
                Panel(
                    "Xid errors in an hour",
                    (
                        (
                            'count(time() - vllm_fleet_xid_time_seconds{action!="none"} < 3600)'
                            " or on() vector(0)",
                            "kinds",
                        ),
                    ),
                    kind="stat",
                    width=6,
                    red_from=1,
                    alert="XidError",
                ),
                Panel(
                    "Uncorrectable errors of memory",
                    (
                        (
                            f"sum(vllm_fleet_card_ecc_uncorrected_total{{{CARD}}})"
                            " or on() vector(0)",
                            "since boot",
                        ),
                    ),
                    kind="stat",
                    width=6,
                    red_from=1,
                    alert="CardMemoryErrors",
                ),
                Panel(
                    "Cards slowed down",
                    (
                        (
                            f"count(max by (host, card) (vllm_fleet_card_throttled{{{CARD}}}) == 1)"
                            " or on() vector(0)",
                            "slow",
                        ),
                    ),
                    kind="stat",
                    width=6,
                    red_from=1,
                    alert="CardThrottled",
                ),
            ),
        ),
        (
            "Cards",
            (
                Panel(
                    "Memory in use",
                    (
                        (
                            f"vllm_fleet_card_memory_used_bytes{{{CARD}}}"
                            f" / vllm_fleet_card_memory_total_bytes{{{CARD}}}",
                            CARD_NAMED,
                        ),
                    ),
                    unit="percentunit",
                    most=1,
                    alert="GroupMemoryUneven",
                ),
                Panel(
                    "Busy",
                    ((f"vllm_fleet_card_utilization_ratio{{{CARD}}}", CARD_NAMED),),
                    unit="percentunit",
                    most=1,
                    text="Share of time in which some kernel runs; full while it waits for others.",
                ),
                Panel(
                    "Temperature",
                    ((f"vllm_fleet_card_temperature_celsius{{{CARD}}}", CARD_NAMED),),
                    unit="celsius",
                    alert="CardThrottled",
                ),
                Panel(
                    "Power",
                    ((f"vllm_fleet_card_power_watts{{{CARD}}}", CARD_NAMED),),
                    unit="watt",
                ),
                Panel(
                    "Slowed down, by reason",
                    ((f"vllm_fleet_card_throttled{{{CARD}}}", CARD_NAMED + " {{reason}}"),),
                    most=1,
                    alert="CardThrottled",
                ),
                Panel(
                    "NVLinks that are up",
                    (
                        (
                            f"sum by (host, card) (vllm_fleet_card_nvlinks_active{{{CARD}}})"
                            " or on() vector(0)",
                            CARD_NAMED,
                        ),
                    ),
                    alert="NvlinkDown",
                ),
                Panel(
                    "Clock of the cores",
                    (('gpu_clock_sm_MHz{host=~"$host"} * 1e6', "{{host}} {{index}}"),),
                    unit="hertz",
                ),
                Panel(
                    "PCIe, sent and received",
                    (
                        (
                            'gpu_pcie_tx_throughput_MiBps{host=~"$host"} * 1048576',
                            "{{host}} {{index}} out",
                        ),
                        (
                            'gpu_pcie_rx_throughput_MiBps{host=~"$host"} * 1048576',
                            "{{host}} {{index}} in",
                        ),
                    ),
                    unit="Bps",
                ),
                Panel(
                    "Clock of the cores (DCGM)",
                    (('DCGM_FI_DEV_SM_CLOCK{host=~"$host"} * 1e6', "{{host}} {{gpu}}"),),
                    unit="hertz",
                ),
            ),
        ),
    ),
)

GATEWAYS = Board(
    "gateway",
    "vLLM gateways",
    ("pool", "gateway"),
    (
        (
            "Requests",
            (
                Panel(
                    "Requests, by status",
                    rate(
                        "vllm_fleet_gateway_requests_total",
                        "gateway, code",
                        GATEWAY,
                        "{{gateway}} {{code}}",
                    ),
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Requests that fail",
                    failing("pool, gateway", GATEWAY, "{{pool}} at {{gateway}}"),
                    unit="percentunit",
                    most=1,
                    alert="GatewayFailures",
                ),
                Panel(
                    "In flight",
                    total("vllm_fleet_gateway_in_flight", EACH, GATEWAY, NAMED),
                    stacked=True,
                ),
                Panel("First byte", gateway_quantiles("first_byte_seconds", GATEWAY), unit="s"),
                Panel("Whole answer", gateway_quantiles("duration_seconds", GATEWAY), unit="s"),
                Panel(
                    "Connections",
                    (
                        (
                            'vllm_fleet_gateway_connections{gateway=~"$gateway"}',
                            "{{gateway}} {{state}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "What goes wrong",
            (
                Panel(
                    "Held",
                    total(
                        "vllm_fleet_gateway_held", "pool, gateway", GATEWAY, "{{pool}} {{gateway}}"
                    ),
                    alert="RequestsHeld",
                ),
                Panel(
                    "Queued",
                    total(
                        "vllm_fleet_gateway_queued",
                        "pool, gateway",
                        GATEWAY,
                        "{{pool}} {{gateway}}",
                    ),
                    alert="RequestsQueued",
                ),
                Panel(
                    "Tried elsewhere, by reason",
                    events(
                        "vllm_fleet_gateway_retries_total",
                        "pool, reason",
                        GATEWAY,
                        "{{pool}} {{reason}}",
                    ),
                    unit="cps",
                ),
                Panel(
                    "Refused, by reason",
                    events(
                        "vllm_fleet_gateway_refused_total",
                        "pool, reason",
                        GATEWAY,
                        "{{pool}} {{reason}}",
                    ),
                    unit="cps",
                    alert="RequestsRefused",
                ),
                Panel(
                    "Refused by a key's limits",
                    events(
                        "vllm_fleet_gateway_limited_total", "key", 'gateway=~"$gateway"', "{{key}}"
                    ),
                    unit="cps",
                ),
                Panel(
                    "Without a good key, by reason",
                    events(
                        "vllm_fleet_gateway_key_refused_total",
                        "reason",
                        'gateway=~"$gateway"',
                        "{{reason}}",
                    ),
                    unit="cps",
                ),
                Panel(
                    "Tokens a second, by owner of the key",
                    events(
                        "vllm_fleet_gateway_tokens_total", "key, kind", GATEWAY, "{{key}} {{kind}}"
                    ),
                    stacked=True,
                ),
                Panel(
                    "Certificates end in",
                    (
                        (
                            "min by (host) (vllm_fleet_certificate_expires_time_seconds) - time()"
                            " or on() vector(0)",
                            "{{host}}",
                        ),
                    ),
                    unit="s",
                    text="0 where no gateway has one.",
                    alert="CertificateExpires",
                ),
            ),
        ),
    ),
)

UPGRADE = Board(
    "upgrade",
    "vLLM upgrade",
    ("pool",),
    (
        (
            "Now",
            (
                READY,
                Panel(
                    "Planned change under way",
                    (
                        (
                            "max by (pool) (vllm_fleet_change_until_seconds) > bool time()"
                            " or on() vector(0)",
                            "{{pool}}",
                        ),
                    ),
                    kind="stat",
                    width=6,
                    text="1: alerts that it explains are held back.",
                    alert="PlannedChange",
                ),
                FIRING,
            ),
        ),
        (
            "Versions",
            (
                Panel(
                    "Instances answering, by version",
                    (
                        (
                            "count by (pool, vllm_version)"
                            f" (vllm_fleet_instance_info{{{POOL}}}"
                            ' and on (host, instance) up{job="vllm"} == 1)',
                            "{{pool}} {{vllm_version}}",
                        ),
                    ),
                    stacked=True,
                    alert="MixedVersions",
                ),
                Panel(
                    "Instances, by release",
                    (
                        (
                            f"count by (pool, release) (vllm_fleet_instance_info{{{POOL}}})",
                            "{{pool}} {{release}}",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Instances ready",
                    ((f"vllm_fleet_instance_ready{{{POOL}}}", NAMED),),
                    most=1,
                ),
            ),
        ),
        (
            "What users feel meanwhile",
            (
                Panel(
                    "Requests that fail",
                    failing("pool", POOL, "{{pool}}"),
                    unit="percentunit",
                    most=1,
                    alert="GatewayFailures",
                ),
                WAITING_AT_GATEWAYS,
                Panel(
                    "Tried elsewhere",
                    events("vllm_fleet_gateway_retries_total", "pool", POOL, "{{pool}}"),
                    unit="cps",
                ),
                Panel(
                    "Time to first token, by version",
                    by_version("time_to_first_token_seconds"),
                    unit="s",
                ),
                Panel(
                    "Between tokens, by version",
                    by_version("inter_token_latency_seconds"),
                    unit="s",
                ),
                Panel(
                    "The last start",
                    ((f"vllm_fleet_instance_start_seconds{{{POOL}}}", NAMED + " {{phase}}"),),
                    unit="s",
                    stacked=True,
                    alert="InstanceStartsLong",
                ),
                Panel(
                    "The last change took",
                    (
                        (
                            f"vllm_fleet_change_seconds{{{POOL}}} or on() vector(0)",
                            NAMED,
                        ),
                    ),
                    unit="s",
                    text="Out of the pool until back in it, by upgrade.py, rollback.py or a "
                    "deploy; 0 before the first.",
                ),
            ),
        ),
    ),
)

BOARDS = (FLEET, POOLS, INSTANCES, CARDS, GATEWAYS, UPGRADE)
