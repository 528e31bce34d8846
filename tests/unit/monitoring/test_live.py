"""The real Prometheus on our configuration: every target is read, every panel has data.

What it reads is a page that this test serves, with the names of metrics of a known vLLM version,
of the gateway and of the node exporter; the engine itself is not run here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.unit.monitoring.test_dashboard import queries, resolved
from tests.unit.monitoring.test_files import host, instance
from vllm_fleet import alerts, metrics, monitoring
from vllm_fleet.planned import Pool

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed"),
]

OF = 'pool="glm-4.5-air",host="gpu-01",instance="air-a"'


def page(version: str, count: int) -> str:
    """What an instance, a gateway and a node exporter say, on one page. Counters rise."""
    lines = []
    for name in sorted(metrics.series(version)):
        labels = 'model_name="glm-4.5-air",engine="0"'
        if name.endswith("_bucket"):
            lines += [f'{name}{{{labels},le="{le}"}} {count}' for le in ("0.5", "1", "+Inf")]
        elif name.startswith("vllm:"):
            lines.append(f"{name}{{{labels}}} {count}")
    lines += [
        f"process_start_time_seconds {count}",
        f"vllm_fleet_gateway_instance_ready{{{OF}}} 1",
        f"vllm_fleet_gateway_in_flight{{{OF}}} 2",
        'vllm_fleet_gateway_held{pool="glm-4.5-air"} 0',
        'vllm_fleet_gateway_queued{pool="glm-4.5-air"} 0',
        f'vllm_fleet_gateway_tokens_total{{pool="glm-4.5-air",key="app",kind="prompt"}} {count}',
        *(
            f'vllm_fleet_gateway_{name}_seconds_bucket{{{OF},le="{le}"}} {count}'
            for name in ("first_byte", "duration")
            for le in ("0.5", "1", "+Inf")
        ),
        f'vllm_fleet_gateway_retries_total{{pool="glm-4.5-air"}} {count}',
        'vllm_fleet_gateway_refused_total{pool="glm-4.5-air"} 0',
        f'vllm_fleet_gateway_requests_total{{pool="glm-4.5-air",code="200"}} {count}',
        f'node_cpu_seconds_total{{cpu="0",mode="idle"}} {count}',
        "node_memory_MemAvailable_bytes 1",
        "node_memory_MemTotal_bytes 2",
        'node_filesystem_avail_bytes{mountpoint="/",fstype="ext4"} 1',
        'node_filesystem_size_bytes{mountpoint="/",fstype="ext4"} 2',
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def exporter(version: str) -> Iterator[int]:
    """Port of a server with this page."""

    class Handler(BaseHTTPRequestHandler):
        count = 0

        def do_GET(self) -> None:
            type(self).count += 1
            body = page(version, self.count).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


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


@pytest.mark.parametrize("version", metrics.versions())
def test_every_panel_has_data(version: str, tmp_path: Path) -> None:
    port = free_port()
    with exporter(version) as source:
        one = instance("air-a", "gpu-01", address="127.0.0.1", port=source)
        pool = Pool("glm-4.5-air", (), one.model, (one,))
        files = {
            f.path: f.content
            for f in monitoring.files(
                host(listen=port, scrape_interval_seconds=1),
                (pool,),
                {"gw-01": "127.0.0.1"},
                {"gpu-01": "127.0.0.1"},
            )
        }
        for path, content in files.items():
            place = tmp_path / path.removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            content = content.replace("/etc/prometheus", f"{tmp_path}/etc/prometheus")
            content = re.sub(r"127\.0\.0\.1:(9145|9100)", f"127.0.0.1:{source}", content)
            place.write_text(content)
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
            for title, expr in queries():
                asked = resolved(expr).replace("[1m]", "[30s]")

                def has_data(asked: str = asked) -> bool:
                    return bool(ask(port, "query", query=asked)["result"])

                if not until(15, has_data):
                    bad[title] = asked
            assert bad == {}
            rules = ask(port, "rules")["groups"][0]["rules"]
            assert len(rules) == len(alerts.alerts())
            assert until(
                15,
                lambda: all(r["health"] == "ok" for r in ask(port, "rules")["groups"][0]["rules"]),
            )
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
