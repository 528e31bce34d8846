"""Alerts of pools, instances and gateways."""

from __future__ import annotations

from vllm_fleet.alerts.table import EACH, HOST_UP, MOVING, Alert, window
from vllm_fleet.spec.model import Objectives


def alerts(scrape_interval_seconds: int) -> tuple[Alert, ...]:
    """What clients feel, and what they would feel next."""
    w = window(scrape_interval_seconds)
    return (
        Alert(
            "PoolDown",
            "max by (pool, gateway) (vllm_fleet_gateway_instance_ready) == 0",
            "1m",
            "critical",
            "{{ $labels.pool }}: no instance is ready (seen by {{ $labels.gateway }}):"
            # An answer comes in no order; a text that changes would be sent as a new alert.
            "{{ range query (printf `label_join(vllm_fleet_gateway_instance_ready"
            '{pool=%q,gateway=%q}, "at", "/", "host", "instance")`'
            ' $labels.pool $labels.gateway) | sortByLabel "at" }} {{ .Labels.at }}{{ end }}',
            "Every instance of the pool is starting, draining, stopped or broken. The gateway "
            "holds requests for `gateway.hold_seconds`, then answers 503.",
            "`systemctl status 'vllm@*'` on the hosts named. Starting: wait for the warm-up "
            "(`journalctl -fu vllm@NAME`). Failed: "
            "`journalctl -u vllm@NAME -n 400 | fleet explain -`.",
        ),
        Alert(
            "GatewayDown",
            f'up{{job="gateway"}} == 0 {HOST_UP}',
            "1m",
            "critical",
            "{{ $labels.host }}: the gateway does not answer",
            "nginx on this host is stopped or hung. Clients that use its address are cut off.",
            "`nginx -t && systemctl status nginx`; the error log: "
            "`tail -n 50 /var/log/nginx/error.log | fleet explain -`.",
        ),
        Alert(
            "InstanceFailed",
            'label_replace(node_systemd_unit_state{name=~"vllm@.+",state="failed"} == 1,'
            ' "instance", "$1", "name", "vllm@(.+)[.]service")',
            "1m",
            "critical",
            "{{ $labels.host }}: instance {{ $labels.instance }} has failed and is not tried again",
            "The unit ran into its start limit or was killed; systemd has given up on it.",
            "`journalctl -u vllm@NAME -n 400 | fleet explain -` names the cause. When it is "
            "mended: deploy again, or `systemctl reset-failed vllm@NAME` and start it.",
        ),
        Alert(
            "InstanceDown",
            f'up{{job="vllm"}} == 0 unless on (host, instance) {MOVING} {HOST_UP}',
            "2m",
            "critical",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} "
            "does not answer",
            "The server's port is closed or hung while its unit is neither starting nor stopping. "
            "The pool has lost this instance's share of capacity.",
            "`systemctl status vllm@NAME`, then `journalctl -u vllm@NAME -n 400 | "
            "fleet explain -`. Inactive: deploy again. Active and silent: restart it.",
        ),
        Alert(
            "EngineWedged",
            f"sum by ({EACH}) (vllm:num_requests_running) > 0"
            f" and sum by ({EACH}) (rate(vllm:generation_tokens_total[{w}])) == 0"
            f" and sum by ({EACH}) (rate(vllm:prompt_tokens_total[{w}])) == 0",
            "3m",
            "critical",
            "{{ $labels.host }}: instance {{ $labels.instance }} has {{ $value }} requests "
            "running and gives no token",
            "The engine hangs in a kernel or a collective while its API process still answers "
            "/health with 200. A single prompt of several minutes looks the same.",
            "Take it out and restart it: `systemctl restart vllm@NAME` (the gateway sends its "
            "requests elsewhere). Before that, keep `journalctl -u vllm@NAME -n 400`, "
            "`journalctl -k | grep Xid` and `nvidia-smi -q`.",
        ),
        Alert(
            "GatewayFailures",
            'sum by (pool, gateway) (rate(vllm_fleet_gateway_requests_total{code=~"5.."}[5m]))'
            " / sum by (pool, gateway) (rate(vllm_fleet_gateway_requests_total[5m])) > 0.05"
            " and sum by (pool, gateway)"
            ' (increase(vllm_fleet_gateway_requests_total{code=~"5.."}[5m])) >= 5',
            "2m",
            "critical",
            "{{ $labels.pool }}: {{ $value | humanizePercentage }} of requests fail at gateway "
            "{{ $labels.gateway }}",
            "Counted at the gateway: vLLM 0.21 counts a client's 400 as 5xx of its own.",
            "Which instance: the access log holds the upstream of every failure "
            "(`grep '\"status\":5' /var/log/nginx/*access*.log`). 503: no instance ready, or "
            "too many held. 502 and 504: look at the instance's journal.",
        ),
        Alert(
            "InstanceStartsLong",
            f"{MOVING} == 1",
            "1h",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} has been starting or stopping "
            "for an hour",
            "Weights are read slowly, kernels compile, the warm-up does not succeed, or requests "
            "do not end.",
            "`journalctl -fu vllm@NAME`: the warm-up prints what it waits for. `start_seconds` "
            "and `drain_seconds` bound both.",
        ),
        Alert(
            "InstanceFlaps",
            'changes(process_start_time_seconds{job="vllm"}[1h]) > 2',
            "0m",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} was started {{ $value }} times "
            "more in the last hour",
            "It comes up and dies again: often memory, a card that is lost, or the host's OOM "
            "killer.",
            "`journalctl -u vllm@NAME --since -2h | fleet explain -`; "
            "`journalctl -k --since -2h | grep -E 'Xid|oom-kill'`.",
        ),
        Alert(
            "RequestsWaiting",
            f"sum by ({EACH}) (vllm:num_requests_waiting) > 20",
            "5m",
            "warning",
            "{{ $labels.host }}: {{ $value }} requests wait in instance {{ $labels.instance }} "
            "of {{ $labels.pool }}",
            "The instance gets more than it can start: time to first token grows.",
            "KV cache near 100 %: see kv-cache-full. Else raise `max-num-seqs` where memory "
            "allows, or add an instance to the pool.",
        ),
        Alert(
            "KvCacheFull",
            f"max by ({EACH}) (vllm:kv_cache_usage_perc) > 0.95"
            f" and sum by ({EACH}) (vllm:num_requests_waiting) > 0",
            "5m",
            "warning",
            "{{ $labels.host }}: KV cache of instance {{ $labels.instance }} is at "
            "{{ $value | humanizePercentage }} and requests wait",
            "Requests wait for memory, not for compute. Full without waiting is normal.",
            "Shorter `max_model_len`, `kv-cache-dtype: fp8`, fewer `max-num-seqs`, more cards "
            "per instance, or one more instance. `fleet size` says what fits.",
        ),
        Alert(
            "Preemptions",
            f"sum by ({EACH}) (rate(vllm:num_preemptions_total[5m])) > 0.1",
            "10m",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} preempts "
            "{{ printf `%.1f` $value }} requests a second",
            "More sequences run than their KV cache bears; preempted ones are computed again.",
            "Lower `max-num-seqs` or see kv-cache-full.",
        ),
        Alert(
            "FirstTokenSlow",
            f"histogram_quantile(0.95, sum by ({EACH}, le)"
            " (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 30",
            "10m",
            "warning",
            "{{ $labels.host }}: one in twenty requests to instance {{ $labels.instance }} waits "
            "over {{ $value | humanizeDuration }} for its first token",
            "Queueing, very long prompts, or a card that throttles.",
            "Waiting above 0: see requests-waiting. Else look at the prompt lengths and at "
            "`nvidia-smi -q -d PERFORMANCE`.",
        ),
        Alert(
            "RequestsHeld",
            "max by (pool, gateway) (vllm_fleet_gateway_held) > 0",
            "5m",
            "warning",
            "{{ $labels.pool }}: {{ $value }} requests are held at gateway {{ $labels.gateway }} "
            "for want of a ready instance",
            "The gateway keeps requests while no instance of the pool is ready.",
            "See pool-down. During a change of a pool with one instance this is meant.",
        ),
        Alert(
            "RequestsQueued",
            "max by (pool, gateway) (vllm_fleet_gateway_queued) > 0",
            "5m",
            "warning",
            "{{ $labels.pool }}: {{ $value }} requests are queued at gateway "
            "{{ $labels.gateway }}: every instance is full",
            "Each instance of the pool has as many requests as it may have at once.",
            "See requests-waiting: more instances, or shorter requests. `/status` on the gateway "
            "shows who has how many; an instance that is drained or not ready is missing there.",
        ),
        Alert(
            "RequestsRefused",
            "sum by (pool, gateway, reason) (increase(vllm_fleet_gateway_refused_total[5m])) > 0",
            "5m",
            "warning",
            "{{ $labels.pool }}: gateway {{ $labels.gateway }} refuses requests "
            "({{ $labels.reason }})",
            "Clients got 429 or 503: a hold or a queue was full or took too long, or a key is over "
            "its limits.",
            "The reason stands in the summary. `full`, `time`, `empty`, `tries`: see pool-down and "
            "requests-queued. A key's limit: the access log holds its owner.",
        ),
        Alert(
            "InstanceDrainedLong",
            "max by (host, instance, pool, gateway) (vllm_fleet_gateway_instance_draining) == 1",
            "6h",
            "info",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} has been "
            "drained at gateway {{ $labels.gateway }} for six hours",
            "An operator took it out and has not put it back.",
            "Still wanted? Else, on the gateway: "
            "`curl -X POST '127.0.0.1:9145/undrain?instance=HOST/NAME'`.",
        ),
        Alert(
            "MixedVersions",
            "count by (pool) (count by (pool, vllm_version) (vllm_fleet_instance_info)) > 1",
            "1d",
            "info",
            "{{ $labels.pool }}: {{ $value }} vLLM versions serve it for over a day",
            "An upgrade stopped half way, or an instance sets its own `vllm_version`.",
            "`fleet status` shows who runs what; run upgrade.py again, or rollback.py.",
        ),
        Alert(
            "InstanceNotReady",
            f"max by ({EACH}) (vllm_fleet_gateway_instance_ready) == 0"
            ' and on (host, instance) up{job="vllm"} == 1'
            f" unless on (host, instance) {MOVING}"
            " unless on (host, instance) vllm_fleet_gateway_instance_draining == 1"
            f" {HOST_UP}",
            "3m",
            "critical",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} runs and is "
            "not ready",
            "Its server answers /metrics, its unit neither starts nor stops, and no gateway sends "
            "it anything: its ready file is gone, or its engine is dead or wedged.",
            "`curl -s localhost:PORT/fleet/ready` and `ls /run/vllm/NAME`. A file `wedged` there: "
            "see engine-taken-out. Neither: `systemctl restart vllm@NAME`.",
        ),
        Alert(
            "EngineTakenOut",
            "vllm_fleet_probe_out == 1",
            "5m",
            "critical",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} gives no "
            "token, is out of rotation, and has not been restarted",
            "The probe's request was not answered and no token came out for "
            "`probe.wedged_seconds`. It is not restarted by itself where it is the last of its "
            "pool, where another one of the pool is starting, or where `probe.restarts_per_hour` "
            "is used up or `probe.restart` is off.",
            "The stacks are in /var/lib/vllm/stacks; `journalctl -u vllm-fleet-probe -n 50` says "
            "why it waits. `systemctl kill -s KILL vllm@NAME` restarts it without draining.",
        ),
        Alert(
            "EngineRestarted",
            "increase(vllm_fleet_probe_restarts_total[1h]) > 0",
            "0m",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} was wedged "
            "and was restarted by the probe",
            "Its engine hung: a kernel, a collective between cards, or a deadlock.",
            "The stacks of that moment are in /var/lib/vllm/stacks (root alone). Again and again: "
            "`journalctl -k | grep Xid`, and look for the topmost frame in the issues of vLLM.",
        ),
        Alert(
            "ProbeFails",
            f"vllm_fleet_probe_success == 0 unless on (host, instance) {MOVING}",
            "2m",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} does not "
            "answer a request for one token in time",
            "Every `probe.interval_seconds` it is asked for one token. Saturated: its queue is "
            "longer than the probe waits. Else its answers are errors.",
            "`journalctl -u vllm-fleet-probe -n 20` holds what it said. With requests-waiting: "
            "too much load. Else `journalctl -u vllm@NAME -n 400 | fleet explain -`.",
        ),
        Alert(
            "ProbeSilent",
            "time() - vllm_fleet_probe_time_seconds > 300",
            "5m",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} has not been probed for "
            "{{ $value | humanizeDuration }}",
            "The probe's timer does not run, or the instance is being kept out by hand.",
            "`systemctl status vllm-fleet-probe.timer vllm-fleet-probe`; drained on purpose: none.",
        ),
        Alert(
            "EngineRejects",
            f"sum by ({EACH}) (increase(vllm:admission_rejections_total[5m])) > 0",
            "5m",
            "warning",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} turns "
            "requests away: its own queue is full",
            "`max-num-queued-reqs` or `max-num-queued-tokens` is reached; clients get 503.",
            "See requests-waiting. Let the gateway queue instead: give its pool a limit of "
            "requests per instance below the engine's.",
        ),
        Alert(
            "PlanDiffers",
            "vllm_fleet_plan_differences > 0",
            "10m",
            "info",
            "{{ $labels.host }}: instance {{ $labels.instance }} of {{ $labels.pool }} came up "
            "with other memory than planned ({{ $value }} figures)",
            "Weights, KV cache or concurrency differ from the plan by more than 5 %.",
            "`journalctl -u vllm@NAME | grep bootlog` names each figure and its likely cause.",
        ),
        Alert(
            "PlannedChange",
            "max by (pool) (vllm_fleet_change_until_seconds) > time()",
            "0m",
            "none",
            "{{ $labels.pool }}: a planned change is under way",
            "It holds back what such a change makes look broken; it is sent to nobody, and ends "
            "by itself at the time that was written down when the change began.",
            "Nothing. Left over after a change that died: it ends by itself.",
        ),
    )


def burn_rates(objectives: Objectives) -> tuple[Alert, ...]:
    """How fast the share of requests that may be slow is being used up, over two windows each."""
    return (
        *_burn(
            "FirstToken",
            "time_to_first_token_seconds",
            objectives.first_token_seconds,
            objectives.within_percent,
            "first token",
            "Queueing, long prompts, or too few instances. See requests-waiting, kv-cache-full and "
            "first-token-slow.",
        ),
        *_burn(
            "TokenGap",
            "inter_token_latency_seconds",
            objectives.between_tokens_seconds,
            objectives.within_percent,
            "time between tokens",
            "Too many sequences at once (`max-num-seqs`), long prompts that share a step with "
            "decoding (`max-num-batched-tokens`), preemptions, or a card that throttles.",
        ),
    )


def _burn(
    name: str, metric: str, target: float, within_percent: float, words: str, remedy: str
) -> tuple[Alert, Alert]:
    allowed = 1 - within_percent / 100
    bound = f'{int(target)}([.]0)?"' if target == int(target) else f'{target}"'

    def slow(window: str) -> str:
        fast = f'sum by (pool) (rate(vllm:{metric}_bucket{{le=~"{bound}}}[{window}]))'
        return f"(1 - {fast} / sum by (pool) (rate(vllm:{metric}_count[{window}])))"

    def both(long: str, short: str, factor: float) -> str:
        # More than all cannot be slow: a generous target still has a fast burn.
        limit = f"{min(0.9, factor * allowed):.4g}"
        enough = f"sum by (pool) (increase(vllm:{metric}_count[{long}])) >= 20"
        return f"{slow(long)} > {limit} and {slow(short)} > {limit} and {enough}"

    said = (
        f"{{{{ $labels.pool }}}}: {words} over {target:g} s in "
        "{{ $value | humanizePercentage }} of cases for "
    )
    why = (
        f"Target: {within_percent:g} % within {target:g} s "
        "(`monitoring.objectives`). At this pace a month's share is used up in "
    )
    return (
        Alert(
            f"{name}BudgetFast",
            both("1h", "5m", 14.4),
            "2m",
            "critical",
            said + "an hour",
            why + "two days.",
            remedy,
        ),
        Alert(
            f"{name}BudgetSlow",
            both("6h", "30m", 6),
            "15m",
            "warning",
            said + "six hours",
            why + "five days.",
            remedy,
        ),
    )
