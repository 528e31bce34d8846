"""Files of monitoring hosts and of every watched host."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet import monitoring
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import PlannedInstance, Pool
from vllm_fleet.spec.model import HostSettings, HostSpec, Model

DEBIAN = """\
global:
  scrape_interval: 15s
  external_labels: {monitor: example}
alerting:
  alertmanagers:
  - static_configs:
    - targets: ['localhost:9093']
rule_files:
  # - "first_rules.yml"
scrape_configs:
  - job_name: 'prometheus'
    scrape_interval: 5s
    static_configs:
      - targets: ['localhost:9090']
  - job_name: node
    static_configs:
      - targets: ['localhost:9100']
"""


def host(**settings: Any) -> HostSpec:
    return HostSpec(
        name="mon-01",
        groups=("monitoring",),
        address="10.0.0.9",
        settings=HostSettings.model_validate({"monitoring": settings}),
    )


def instance(name: str, where: str, **changes: Any) -> PlannedInstance:
    values: dict[str, Any] = {
        "host": where,
        "address": "10.0.0.1",
        "name": name,
        "model_name": "glm-4.5-air",
        "model": Model(repo="ZhipuAI/GLM-4.5-Air"),
        "port": 8001,
        "device": "cuda",
        "cards": (0, 1),
        "uuids": ("GPU-a", "GPU-b"),
        "release": "0.21.0-3f2a",
        "vllm_version": "0.21.0",
        "weights": "/opt/vllm/models/glm-4.5-air/v1.0",
        "args": {},
        "env": {},
        "start_seconds": 600,
        "drain_seconds": 60,
    }
    return PlannedInstance(**{**values, **changes})


def pools() -> tuple[Pool, ...]:
    one = instance("air-a", "gpu-01")
    two = instance("tiny", "cpu-01", address="fd00::2", device="cpu", cards=(), uuids=())
    return (Pool("glm-4.5-air", (), one.model, (one, two)),)


def by_path(files: list[ManagedFile]) -> dict[str, str]:
    result = {f.path: f.content for f in files}
    assert len(result) == len(files)
    return result


def all_files(spec: HostSpec, keep_own: bool = False) -> dict[str, str]:
    return by_path(
        monitoring.files(
            spec,
            pools(),
            {"gw-01": "10.0.0.5"},
            {"gpu-01": "10.0.0.1", "gw-01": "10.0.0.5"},
            keep_own=keep_own,
        )
    )


def test_targets_carry_what_an_alert_names() -> None:
    files = all_files(host(listen=9091))
    vllm = json.loads(files["/etc/prometheus/vllm-fleet/targets/vllm.json"])
    assert vllm[0] == {
        "targets": ["10.0.0.1:8001"],
        "labels": {
            "host": "gpu-01",
            "instance": "air-a",
            "pool": "glm-4.5-air",
            "model": "glm-4.5-air",
            "cards": "0,1",
        },
    }
    assert vllm[1]["targets"] == ["[fd00::2]:8001"]
    assert vllm[1]["labels"]["cards"] == "cpu"
    gateway = json.loads(files["/etc/prometheus/vllm-fleet/targets/gateway.json"])
    assert gateway == [
        {
            "targets": ["10.0.0.5:9145"],
            "labels": {"host": "gw-01", "instance": "gateway", "gateway": "gw-01"},
        }
    ]
    node = json.loads(files["/etc/prometheus/vllm-fleet/targets/node.json"])
    assert [(t["targets"][0], t["labels"]["host"]) for t in node] == [
        ("10.0.0.1:9100", "gpu-01"),
        ("10.0.0.5:9100", "gw-01"),
    ]
    own = json.loads(files["/etc/prometheus/vllm-fleet/targets/prometheus.json"])
    assert own[0]["targets"] == ["localhost:9091"]


def test_settings_reach_prometheus() -> None:
    spec = host(listen=9091, retention_days=3, retention_gib=7, scrape_interval_seconds=5)
    files = all_files(spec)
    dropin = files["/etc/systemd/system/prometheus.service.d/10-vllm-fleet.conf"]
    start = next(line for line in dropin.replace("\\\n", "").splitlines() if "$ARGS" in line)
    assert start.split() == [
        "ExecStart=/usr/bin/prometheus",
        "$ARGS",
        "--config.file=/etc/prometheus/vllm-fleet.yml",
        "--storage.tsdb.retention.time=3d",
        "--storage.tsdb.retention.size=7GB",
        "--web.listen-address=:9091",
    ]
    assert "ExecStart=\n" in dropin  # the package's own is taken out, or the unit has two
    config = yaml.safe_load(files["/etc/prometheus/vllm-fleet.yml"])
    assert config["global"] == {
        "scrape_interval": "5s",
        "scrape_timeout": "5s",
        "evaluation_interval": "5s",
    }
    assert [job["job_name"] for job in config["scrape_configs"]] == list(monitoring.JOBS)


def test_nothing_of_the_package_is_written() -> None:
    files = {**all_files(host()), **by_path(monitoring.host_files(host()))}
    assert "/etc/prometheus/prometheus.yml" not in files
    assert not [path for path in files if path.startswith(("/etc/default/", "/lib/", "/usr/"))]


def test_own_prometheus_gets_rules_and_targets_only() -> None:
    files = all_files(host(), keep_own=True)
    assert set(files) == {
        "/etc/prometheus/vllm-fleet/rules/fleet.yml",
        "/etc/prometheus/vllm-fleet/scrape.yml",
        *(f"/etc/prometheus/vllm-fleet/targets/{job}.json" for job in monitoring.JOBS),
    }
    text = files["/etc/prometheus/vllm-fleet/scrape.yml"]
    assert list(yaml.safe_load(text)) == ["scrape_configs"]  # the form of scrape_config_files
    assert "which is left alone" in text


def test_every_text_file_carries_the_mark() -> None:
    spec = host()
    files = {
        **all_files(spec),
        **all_files(spec, keep_own=True),
        **by_path(monitoring.host_files(spec)),
        **by_path(monitoring.grafana_files(spec)),
    }
    for path, content in files.items():
        if not path.endswith(".json"):
            assert content.splitlines()[0].startswith("# Managed by vllm-fleet"), path
        assert content.endswith("\n"), path


def test_node_exporter_reads_ours_and_debians_metrics() -> None:
    files = by_path(monitoring.host_files(host()))
    dropin = files["/etc/systemd/system/prometheus-node-exporter.service.d/10-vllm-fleet.conf"]
    assert "--collector.textfile.directory=/var/lib/vllm/textfile.d/*" in dropin
    made = (
        "ExecStartPre=-+/usr/bin/systemd-tmpfiles --create /etc/tmpfiles.d/vllm-fleet-metrics.conf"
    )
    assert made in dropin.splitlines()  # else it would find no directory before the next boot
    links = files["/etc/tmpfiles.d/vllm-fleet-metrics.conf"]
    assert "L+ /var/lib/vllm/textfile.d/fleet - - - - /var/lib/vllm/metrics\n" in links
    assert "/var/lib/prometheus/node-exporter\n" in links


def test_grafana_is_pointed_at_prometheus() -> None:
    files = by_path(monitoring.grafana_files(host(listen=9091)))
    source = yaml.safe_load(files["/etc/grafana/provisioning/datasources/vllm-fleet.yaml"])
    assert source["datasources"][0]["url"] == "http://localhost:9091"
    provider = yaml.safe_load(files["/etc/grafana/provisioning/dashboards/vllm-fleet.yaml"])
    folder = provider["providers"][0]["options"]["path"]
    board = json.loads(files[f"{folder}/fleet.json"])
    uids = {t["datasource"]["uid"] for p in board["panels"] for t in p.get("targets", [])}
    assert uids == {source["datasources"][0]["uid"]}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    """Also with the targets' files: promtool reads those that the configuration names."""
    for path, content in all_files(host()).items():
        if path.startswith("/etc/prometheus/"):
            place = tmp_path / path.removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content.replace("/etc/prometheus", f"{tmp_path}/etc/prometheus"))
    run = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "etc/prometheus/vllm-fleet.yml")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rules found" in run.stdout


def test_the_packages_own_configuration_is_nobodys() -> None:
    assert monitoring.own_settings(DEBIAN, 'ARGS=""\n# --config.file is shown here\n') == []
    assert monitoring.own_settings(None, None) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DEBIAN + "  - {job_name: db, static_configs: [{targets: ['db:9187']}]}\n", "job 'db'"),
        (DEBIAN.replace("localhost:9100", "web-01:9100"), "job 'node'"),
        (DEBIAN.replace('  # - "first', '  - "first'), "rule_files"),
        (DEBIAN + "remote_write: [{url: 'http://store/api'}]\n", "remote_write"),
        ("a: [", "does not parse"),
        ("- a\n", "does not parse"),
    ],
)
def test_an_edited_configuration_is_seen(config: str, reason: str) -> None:
    found = monitoring.own_settings(config, None)
    assert len(found) == 1
    assert reason in found[0]


def test_flags_that_would_be_given_twice_are_seen() -> None:
    defaults = 'ARGS="--web.enable-lifecycle \\\n --storage.tsdb.retention.time=90d"\n'
    assert monitoring.own_settings(DEBIAN, defaults) == [
        "/etc/default/prometheus: ARGS: --storage.tsdb.retention.time"
    ]
    assert monitoring.own_settings(DEBIAN, 'ARGS="--web.enable-lifecycle"') == []
