"""The real Prometheus on our configuration: every target is read, every panel has data.

What it reads is a page that this test serves, with the names of metrics of a known vLLM version,
of the gateway and of the node exporter; the engine itself is not run here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.stubs.pages import served
from tests.unit.monitoring.test_dashboard import EXPORTERS, annotations, queries, resolved
from tests.unit.monitoring.test_files import host, instance
from vllm_fleet import alerts, dashboard, engine_data, metrics, monitoring
from vllm_fleet.planned import Pool

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed"),
]

POOL = "glm-4.5-air"
OURS = f'vllm_instance="air-a",pool="{POOL}"'


def samples(name: str, labels: str, kind: str, count: int) -> list[str]:
    if kind != "histogram":
        return [f"{name}{{{labels}}} {count}"]
    return [
        *(f'{name}_bucket{{{labels},le="{le}"}} {count}' for le in ("0.5", "10.0", "+Inf")),
        f"{name}_sum{{{labels}}} {count}",
        f"{name}_count{{{labels}}} {count}",
    ]


def page(version: str, count: int) -> str:
    """What an instance, a gateway and every exporter say, on one page. Counters rise."""
    lines = []
    data = engine_data.load(version)
    for name, kind in data.metrics.items():
        if name.startswith("vllm:"):
            labels = f'model_name="{POOL}",engine="0",finished_reason="stop",reason="capacity"'
            lines += samples(name, labels, kind, count)
    for name, kind in metrics.GATEWAY.items():
        labels = f'pool="{POOL}",host="gpu-01",instance="air-a",code="200",reason="x",key="app"'
        lines += samples(name, labels, kind, count)
    for number in range(2):
        labels = f'vllm_instance="air-{number}",pool="{POOL}",release="r",vllm_version="{version}"'
        lines.append(f"vllm_fleet_instance_info{{{labels}}} 1")
    for name in metrics.OWN.keys() - {"vllm_fleet_instance_info"}:
        labels = f'{OURS},card="0",uuid="GPU-0",reason="hw",phase="load",release="r",file="f"'
        lines.append(f'{name}{{{labels},xid="79",pci="0",action="reboot",source="plan"}} {count}')
    for name in sorted(metrics.OTHERS):
        if name.startswith(("node_", "alertmanager_")):
            labels = 'cpu="0",mode="idle",device="eth0",mountpoint="/",fstype="ext4",port="1"'
            lines.append(f'{name}{{{labels},name="vllm@air-a.service",state="active"}} {count}')
    lines += [f'{name}{{index="0",uuid="GPU-0",gpu="0"}} {count}' for name in sorted(EXPORTERS)]
    lines += [f"process_start_time_seconds {count}", "process_resident_memory_bytes 1"]
    return "\n".join(lines) + "\n"


def exporter(version: str) -> AbstractContextManager[int]:
    """Port of a server with this page."""
    return served(lambda count: page(version, count).encode())


def ask(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)["data"]


def until(seconds: float, what: Any) -> bool:
    """Whether what() came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if what():
                return True
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.2)
    return False


# One version alone, and a fleet in the midst of an upgrade over the longest way.
MIXES = (("0.18.0",), ("0.21.0",), ("0.21.0", "0.33.0"))
RECEIVERS = {"hook": {"kind": "webhook", "url_file": "hook"}}


@pytest.mark.parametrize("versions", MIXES)
def test_no_panel_and_no_rule_is_without_data(versions: tuple[str, ...], tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        sources = [stack.enter_context(exporter(v)) for v in versions]
        source = sources[0]
        instances = tuple(
            instance(
                f"air-{number}",
                "gpu-01",
                address="127.0.0.1",
                port=where,
                release=f"{version}-1234",
                vllm_version=versions[-1],
            )
            for number, (version, where) in enumerate(zip(versions, sources, strict=True))
        )
        pools = (Pool(POOL, (), instances[0].model, instances),)
        spec = host(
            listen=port,
            scrape_interval_seconds=1,
            alerting={"receivers": RECEIVERS, "port": source},
        )
        files = {
            f.path: f.content
            for f in monitoring.files(
                spec,
                pools,
                {"gw-01": "127.0.0.1"},
                {"gpu-01": "127.0.0.1"},
                gpus={"gpu-01": ("nvitop", f"127.0.0.1:{source}")},
            )
        }
        for path, content in files.items():
            place = tmp_path / path.removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            content = content.replace("/etc/prometheus", f"{tmp_path}/etc/prometheus")
            content = re.sub(r"127\.0\.0\.1:(9145|9100)", f"127.0.0.1:{source}", content)
            place.write_text(content)
        deployed = monitoring.deployed(pools)
        assert deployed == versions
        # The command of the drop-in itself, with its paths moved.
        dropin = (tmp_path / monitoring.UNIT_DROPIN.removeprefix("/")).read_text()
        start = re.search(r"^ExecStart=(/.*)$", dropin.replace("\\\n", " "), re.MULTILINE)
        assert start
        command = start.group(1).replace("$ARGS", "").split()
        command = [c.replace(f"address=:{port}", f"address=127.0.0.1:{port}") for c in command]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, f"--storage.tsdb.path={tmp_path}/data"], stdout=log, stderr=log
            )
        try:
            jobs = set(monitoring.JOBS)

            def all_up() -> bool:
                targets = ask(port, "targets")["activeTargets"]
                return {t["labels"]["job"] for t in targets if t["health"] == "up"} == jobs

            assert until(30, all_up), (tmp_path / "log").read_text()
            bad = {}
            annotated = [(t, e) for t, e in annotations() if "offset" not in e]
            for title, expr in [*queries(deployed=deployed), *annotated]:
                asked = resolved(expr).replace("[1m]", "[30s]")

                def has_data(asked: str = asked) -> bool:
                    return bool(ask(port, "query", query=asked)["result"])

                # What compares with a limit has data where both sides have.
                asked = re.sub(r"(?<!\{) (==|<|>) (bool )?(\d+|time\(\))", "", asked)
                if not until(15, lambda asked=asked: has_data(asked)):  # type: ignore[misc]
                    bad[title] = asked
            for alert in alerts.deployed_alerts(1, deployed):
                for name in set(
                    re.findall(r"\b(?:vllm[:_]|node_|prometheus_|alert)\w+", alert.expr)
                ):
                    known = (
                        name in metrics.OWN
                        or name in metrics.OTHERS
                        or name in (metrics.gateway_series())
                    )
                    if not (known or ":" in name):
                        continue
                    if not until(15, lambda n=name: ask(port, "query", query=n)["result"]):  # type: ignore[misc]
                        bad[alert.name] = name
            for board in dashboard.names():
                for variable in dashboard.build(board)["templating"]["list"]:
                    chosen = re.fullmatch(
                        r"label_values\((.+), (\w+)\)", variable["query"]["query"]
                    )
                    assert chosen
                    found = ask(
                        port, f"label/{chosen[2]}/values", **{"match[]": resolved(chosen[1])}
                    )
                    if not found:
                        bad[f"{board}: ${variable['name']}"] = chosen[1]
            assert bad == {}
            rules = ask(port, "rules")["groups"][0]["rules"]
            assert len(rules) == len(alerts.deployed_alerts(1, deployed))
            assert until(
                15,
                lambda: all(r["health"] == "ok" for r in ask(port, "rules")["groups"][0]["rules"]),
            )
            # What our scripts write of an instance is that instance's; of the host, the host's.
            out = ask(port, "query", query='vllm_fleet_probe_success{job="node"}')["result"]
            assert {(r["metric"]["host"], r["metric"]["instance"]) for r in out} == {
                ("gpu-01", "air-a")
            }
            # The page serves every job at once: only what was read as the gateway counts here.
            series = 'vllm_fleet_gateway_instance_ready{job="gateway"}'
            ready = ask(port, "query", query=series)["result"][0]["metric"]
            assert (ready["host"], ready["instance"], ready["gateway"]) == (
                "gpu-01",
                "air-a",
                "gw-01",
            )
        finally:
            process.terminate()
            process.wait(20)
