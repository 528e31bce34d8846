"""Alerts of hosts and their cards, and of the monitoring itself."""

from __future__ import annotations

from vllm_fleet.alerts.table import DISKS, HOST_AWAY, HOST_UP, Alert

# Interfaces of containers and guests come and go.
NICS = 'device!~"lo|docker.*|br-.*|veth.*|virbr.*|cni.*|cali.*|flannel.*|lxc.*|tun.*|tap.*|vb-.*"'


def alerts() -> tuple[Alert, ...]:
    """Hosts, cards, network, disks, clocks, certificates, monitoring."""
    return (
        Alert(
            "HostDown",
            HOST_AWAY,
            "2m",
            "critical",
            "{{ $labels.host }}: the host does not answer (its instances are not reported apart)",
            "Nothing on it answers Prometheus: it is off, cut from the network, or what runs there "
            "has stopped with its node exporter.",
            "Reach it by SSH or its management port. Up, but not answering on 9100: "
            "`systemctl status prometheus-node-exporter`. Lost: the pools go on without it; "
            "deploy again when it is back.",
        ),
        Alert(
            "DiskFull",
            f"node_filesystem_avail_bytes{{{DISKS}}} / node_filesystem_size_bytes{{{DISKS}}}"
            " < 0.05",
            "5m",
            "critical",
            "{{ $labels.host }}: {{ $labels.mountpoint }} has {{ $value | humanizePercentage }} "
            "left",
            "Logs, releases, weights or compile caches fill it. New starts and downloads fail.",
            "`du -xhd1 MOUNT | sort -h`. Old releases below /opt/vllm/releases and revisions "
            "below /opt/vllm/models that no instance uses can go; `journalctl --vacuum-size=1G`.",
        ),
        Alert(
            "DiskFullSoon",
            f"predict_linear(node_filesystem_avail_bytes{{{DISKS}}}[6h], 86400) < 0"
            f" and node_filesystem_avail_bytes{{{DISKS}}} / node_filesystem_size_bytes{{{DISKS}}}"
            " < 0.25",
            "30m",
            "warning",
            "{{ $labels.host }}: {{ $labels.mountpoint }} will be full within a day",
            "It fills at a rate that leaves less than a day.",
            "See disk-full; a download under way ends by itself.",
        ),
        Alert(
            "ClockOff",
            "abs(node_timex_offset_seconds) > 0.5",
            "10m",
            "warning",
            "{{ $labels.host }}: the clock is off by {{ $value }} s",
            "Certificates, logs and rates of several hosts no longer agree.",
            "`timedatectl`; start chrony or systemd-timesyncd and check that it reaches a server.",
        ),
        Alert(
            "MonitoringConfigStale",
            "prometheus_config_last_reload_successful == 0",
            "1m",
            "warning",
            "{{ $labels.host }}: Prometheus refused its new configuration and runs on the old one",
            "A file below /etc/prometheus does not parse.",
            "`promtool check config /etc/prometheus/vllm-fleet.yml`, then deploy again.",
        ),
        Alert(
            "MonitoringRulesFail",
            "increase(prometheus_rule_evaluation_failures_total[5m]) > 0",
            "5m",
            "warning",
            "{{ $labels.host }}: Prometheus cannot evaluate rules of {{ $labels.rule_group }}",
            "Alerts of that group may be silent.",
            "`journalctl -u prometheus | grep -i rule` names the rule and the reason.",
        ),
        Alert(
            "DiskBroken",
            # Unlike one that never could be read: a mount below somebody's private directory.
            f"node_filesystem_device_error{{{DISKS}}} == 1"
            f" and min_over_time(node_filesystem_device_error{{{DISKS}}}[1d]) == 0",
            "2m",
            "critical",
            "{{ $labels.host }}: {{ $labels.mountpoint }} cannot be read",
            "The disk, its controller or a network file system answers with errors, and did not "
            "a day ago. Instances that "
            "run go on from memory; none that reads its weights there can start.",
            "`dmesg | grep -iE 'i/o error|nvme|ata'`, `smartctl -a DISK`. Move its instances to "
            "other hosts before you unmount it.",
        ),
        Alert(
            "OomKill",
            "increase(node_vmstat_oom_kill[10m]) > 0",
            "0m",
            "warning",
            "{{ $labels.host }}: the kernel killed a process for want of memory",
            "Host memory, not the cards' memory: weights read into it, swap space of the KV cache, "
            "shared memory, or a process of somebody else.",
            "`journalctl -k | grep -A1 oom-kill` names it; `systemd-cgtop -m` shows who has most.",
        ),
        Alert(
            "InterfaceDown",
            f"node_network_up{{{NICS}}} == 0 and max_over_time(node_network_up{{{NICS}}}[1d]) == 1",
            "2m",
            "critical",
            "{{ $labels.host }}: network interface {{ $labels.device }} is down",
            "It was up within the last day. Instances over several hosts hang without it (NCCL), "
            "also where the host is still reached by another one.",
            "`ip link show DEVICE; ethtool DEVICE`: cable, switch port, driver. NCCL's choice: "
            "`grep NCCL_ /etc/vllm/NAME.env`.",
        ),
        Alert(
            "InfinibandDown",
            "node_infiniband_state_id < 4 and max_over_time(node_infiniband_state_id[1d]) == 4",
            "2m",
            "critical",
            "{{ $labels.host }}: InfiniBand {{ $labels.device }} port {{ $labels.port }} is not "
            "active",
            "It was active within the last day. NCCL hangs or falls back to a slow network.",
            "`ibstat DEVICE`, `ip link`: cable, subnet manager, switch port.",
        ),
        Alert(
            "CardGone",
            "vllm_fleet_card_present == 0",
            "1m",
            "critical",
            "{{ $labels.host }}: card {{ $labels.card }} of instance {{ $labels.instance }} "
            "is gone",
            "The driver no longer lists a card that an instance was planned on: it fell off the "
            "bus (Xid 79), or its driver died. The cards after it may be renumbered.",
            "`journalctl -k | grep -E 'NVRM|fallen'`. Drain the host, reboot it; lost again: power "
            "and slot, then the card itself. Until then take the instance out of group_vars.",
        ),
        Alert(
            "XidError",
            'time() - vllm_fleet_xid_time_seconds{action!~"application|none"} < 900',
            "0m",
            "critical",
            "{{ $labels.host }}: Xid {{ $labels.xid }} of card {{ $labels.pci }}: "
            "{{ $labels.action }}",
            "The driver wrote it to the kernel log. DCGM's own gauge holds only the last code and "
            "never resets, so the log is what is counted here.",
            "By the action named: `reset`: drain the instance, `nvidia-smi --gpu-reset -i CARD`; "
            "`reboot`: drain and reboot the host; `hardware`: have slot, power and card checked; "
            "`memory`: see card-memory-errors; `nvlink`: see nvlink-down, then the fabric manager; "
            "`unknown`: NVIDIA's Xid catalogue.",
        ),
        Alert(
            "XidOfProgram",
            'time() - vllm_fleet_xid_time_seconds{action="application"} < 900',
            "0m",
            "info",
            "{{ $labels.host }}: Xid {{ $labels.xid }} of card {{ $labels.pci }}: the program that "
            "used it failed",
            "A kernel read or wrote where it may not, or was killed. The card is well.",
            "The instance restarts by itself. Again and again: a bug of the version; "
            "`journalctl -u vllm@NAME -n 400 | fleet explain -`.",
        ),
        Alert(
            "CardMemoryErrors",
            "increase(vllm_fleet_card_ecc_uncorrected_total[1h]) > 0",
            "0m",
            "critical",
            "{{ $labels.host }}: card {{ $labels.card }} has uncorrectable memory errors",
            "Its memory held a wrong value that it could not mend. What used it was ended; the "
            "row is replaced at the next reset.",
            "Drain its instance, `nvidia-smi --gpu-reset -i CARD` (or reboot), then "
            "`nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT -i CARD`. Again: replace the card.",
        ),
        Alert(
            "CardNeedsReset",
            "vllm_fleet_card_repair_pending == 1",
            "10m",
            "warning",
            "{{ $labels.host }}: card {{ $labels.card }} waits for a reset to replace bad memory",
            "Rows are to be remapped, or pages to be retired; until then the bad ones are in use.",
            "At the next planned moment: drain its instance, `nvidia-smi --gpu-reset -i CARD`.",
        ),
        Alert(
            "CardMemoryWornOut",
            "vllm_fleet_card_remap_failed == 1",
            "5m",
            "critical",
            "{{ $labels.host }}: card {{ $labels.card }} has no spare memory rows left",
            "A bad row could not be replaced: the card will fail again.",
            "Take it out of group_vars and have it replaced.",
        ),
        Alert(
            "CardThrottled",
            "max by (host, instance, card, reason)"
            " (avg_over_time(vllm_fleet_card_throttled[10m])) > 0.5",
            "5m",
            "warning",
            "{{ $labels.host }}: card {{ $labels.card }} is slowed down ({{ $labels.reason }})",
            "Heat or power: hw_thermal and sw_thermal are cooling, hw_power_brake is the power "
            "supply, hw_slowdown either. Every token of its instance waits for the slowest card.",
            "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i CARD`; fans, dust, airflow, the "
            "room; then the power supply.",
        ),
        Alert(
            "NvlinkDown",
            "vllm_fleet_card_nvlinks_active < max_over_time(vllm_fleet_card_nvlinks_active[1d])",
            "2m",
            "critical",
            "{{ $labels.host }}: card {{ $labels.card }} has {{ $value }} NVLinks, fewer than "
            "today before",
            "Collectives of its group hang or become slow.",
            "`nvidia-smi nvlink -s -i CARD`, `systemctl status nvidia-fabricmanager`, "
            "`journalctl -k | grep Xid`. Drain, then reset all cards of the host together.",
        ),
        Alert(
            "GroupMemoryUneven",
            '(max by (host, instance) (vllm_fleet_card_memory_used_bytes{instance!="node"})'
            ' - min by (host, instance) (vllm_fleet_card_memory_used_bytes{instance!="node"}))'
            ' / max by (host, instance) (vllm_fleet_card_memory_total_bytes{instance!="node"})'
            " > 0.15",
            "15m",
            "warning",
            "{{ $labels.host }}: memory in use differs by {{ $value | humanizePercentage }} "
            "between the cards of instance {{ $labels.instance }}",
            "Ranks of one group take the same. A foreign process has a part of one card, or a rank "
            "has died. Pipeline parallelism is uneven by nature, by less than this as a rule.",
            "`nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv`; "
            "`systemctl status vllm@NAME` lists the pids that belong.",
        ),
        Alert(
            "ClockUnsynchronised",
            "node_timex_sync_status == 0 and node_timex_maxerror_seconds >= 16",
            "30m",
            "warning",
            "{{ $labels.host }}: nothing keeps the clock right",
            "No time server is reached; certificates, logs and rates drift apart.",
            "`timedatectl`; start chrony or systemd-timesyncd and check that it reaches a server.",
        ),
        Alert(
            "CertificateExpires",
            "vllm_fleet_certificate_expires_time_seconds - time() < 2 * 86400",
            "5m",
            "critical",
            "{{ $labels.host }}: the certificate {{ $labels.file }} ends in "
            "{{ $value | humanizeDuration }}",
            "From then on every client refuses the gateway.",
            "From an authority: `systemctl status certbot.timer`, `journalctl -u certbot`. Else "
            "put a new pair where `gateway.tls` names it, and deploy.",
        ),
        Alert(
            "CertificateExpiresSoon",
            "vllm_fleet_certificate_expires_time_seconds - time() < 14 * 86400",
            "1h",
            "warning",
            "{{ $labels.host }}: the certificate {{ $labels.file }} ends in "
            "{{ $value | humanizeDuration }}",
            "Renewal by an authority happens a month before the end: it has failed for two weeks.",
            "See certificate-expires.",
        ),
        Alert(
            "ExporterDown",
            f'up{{job=~"node|gpu|alertmanager|prometheus",host!=""}} == 0 {HOST_UP}',
            "5m",
            "warning",
            "{{ $labels.host }}: {{ $labels.job }} of {{ $labels.instance }} is not read",
            "A part of the monitoring is blind: its alerts are silent whatever happens.",
            "`node`: `systemctl status prometheus-node-exporter`; until it is back, states of "
            "units, disks, clocks and our own figures of this host are missing. "
            "`gpu`: `systemctl status vllm-fleet-gpu-exporter` (or the DCGM or AMD exporter that "
            "`gpu_metrics` names); `alertmanager`: `systemctl status prometheus-alertmanager`.",
        ),
        Alert(
            "HostwatchSilent",
            "time() - vllm_fleet_hostwatch_time_seconds > 600",
            "5m",
            "warning",
            "{{ $labels.host }}: cards, kernel log and certificates have not been looked at for "
            "{{ $value | humanizeDuration }}",
            "The timer of ours that reads them does not run, or nvidia-smi hangs.",
            "`systemctl status vllm-fleet-hostwatch.timer vllm-fleet-hostwatch`; a hanging "
            "nvidia-smi means a card that hangs: see card-gone.",
        ),
        Alert(
            "TextfileUnreadable",
            "node_textfile_scrape_error == 1",
            "10m",
            "warning",
            "{{ $labels.host }}: the node exporter cannot read a file of metrics",
            "One of the files below /var/lib/vllm/metrics or of Debian's collectors is broken: its "
            "metrics are missing.",
            "`journalctl -u prometheus-node-exporter | grep textfile` names the file.",
        ),
        Alert(
            "GatewayMetricsDropped",
            "increase(vllm_fleet_gateway_series_dropped_total[15m]) > 0",
            "0m",
            "warning",
            "{{ $labels.host }}: the gateway has no room for new series of metrics",
            "Pools, instances and owners of keys make more series than it keeps: new ones are not "
            "counted.",
            "Fewer owners of keys; a restart of nginx clears those of pools that are gone.",
        ),
        Alert(
            "AlertsNotSent",
            "increase(alertmanager_notifications_failed_total[10m]) > 0",
            "5m",
            "warning",
            "{{ $labels.host }}: Alertmanager could not send alerts ({{ $labels.integration }})",
            "The receiver refuses them or cannot be reached; this one may not arrive either.",
            "`journalctl -u prometheus-alertmanager -u vllm-fleet-relay -n 50` holds the answer.",
        ),
        Alert(
            "AlertsDropped",
            "increase(prometheus_notifications_dropped_total[10m]) > 0",
            "5m",
            "warning",
            "{{ $labels.host }}: Prometheus could not hand alerts to Alertmanager",
            "Alertmanager is down or does not answer.",
            "`systemctl status prometheus-alertmanager`.",
        ),
    )
