"""The script that talks to the gateway, against a stand-in of its status port."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import pytest

from vllm_fleet.onhost import gateways
from vllm_fleet.rollout.hosts import Failed, result_of

METRICS = """\
# HELP vllm_fleet_gateway_requests_total Requests answered.
vllm_fleet_gateway_requests_total{pool="glm",host="@fake/g1",instance="a",code="200"} 120
vllm_fleet_gateway_requests_total{pool="glm",host="@fake/g1",instance="a",code="400"} 7
vllm_fleet_gateway_requests_total{pool="glm",host="@fake/g1",instance="a",code="502"} 3
vllm_fleet_gateway_requests_total{pool="glm",host="g2",instance="a",code="500"} 99
vllm_fleet_gateway_in_flight{pool="glm",host="@fake/g1",instance="a"} 4
"""


class Gateway:
    """/status, /drain, /undrain and /metrics of one gateway with one instance."""

    def __init__(self, in_flight: tuple[int, ...] = (0,), *, deaf: bool = False) -> None:
        self.in_flight = list(in_flight)  # at each further look
        self.ready = [True]
        self.deaf = deaf  # says yes and does nothing
        self.draining = False
        self.told: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                text = METRICS if self.path == "/metrics" else json.dumps(outer.status())
                self.answer(200, text)

            def do_POST(self) -> None:
                outer.told.append(self.path)
                parts = urlsplit(self.path)
                if parse_qs(parts.query)["instance"] != ["@fake/g1/a"]:
                    self.answer(404, '{"error": "no such instance"}')
                    return
                if not outer.deaf:
                    outer.draining = parts.path == "/drain"
                self.answer(200, "{}")

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def status(self) -> dict[str, Any]:
        flight = self.in_flight.pop(0) if len(self.in_flight) > 1 else self.in_flight[0]
        ready = self.ready.pop(0) if len(self.ready) > 1 else self.ready[0]
        one = {"host": "@fake/g1", "name": "a", "ready": ready, "in_flight": flight}
        return {"pools": [{"name": "glm", "instances": [{**one, "draining": self.draining}]}]}

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def ask(self, **order: Any) -> dict[str, Any]:
        """Run the script as a host does."""
        code = (
            "import sys\nfrom vllm_fleet.onhost import gateways\n"
            f"gateways.PORT = {self.server.server_address[1]}\n"
            "gateways.POLL_SECONDS = 0.01\ngateways.SAY_SECONDS = 0.02\nsys.exit(gateways.main())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert (done.returncode == 0) == done.stdout.splitlines()[-1].startswith("result ")
        return result_of("gw", done.stdout.splitlines())


ONE = ["@fake/g1/a"]


def test_out_means_drained_and_nothing_in_flight() -> None:
    with Gateway(in_flight=(3, 3, 3, 2, 1, 0)) as gateway:
        found = gateway.ask(action="drain", instances=ONE, seconds=30)
        assert found["in_flight"] == 0
        assert gateway.draining
        assert gateway.told == ["/drain?instance=@fake/g1/a"]
        state = gateway.ask(action="status")["instances"]["@fake/g1/a"]
    assert state == {"pool": "glm", "ready": True, "draining": True, "in_flight": 0}


def test_what_still_runs_at_the_deadline_is_told() -> None:
    with Gateway(in_flight=(5,)) as gateway:
        assert gateway.ask(action="drain", instances=ONE, seconds=0.1)["in_flight"] == 5


def test_a_gateway_that_does_not_do_it_is_named() -> None:
    with (
        Gateway(deaf=True) as gateway,
        pytest.raises(Failed, match="gw: was told to drain @fake/g1/a, and does not"),
    ):
        gateway.ask(action="drain", instances=ONE, seconds=1)


def test_an_unknown_instance_is_named_before_anything_is_told() -> None:
    with Gateway() as gateway:
        with pytest.raises(Failed, match="does not know g9/x: deploy it first"):
            gateway.ask(action="drain", instances=["g9/x"], seconds=1)
        assert gateway.told == []


def test_in_means_that_the_gateway_finds_it_ready() -> None:
    with Gateway() as gateway:
        gateway.ready = [False, False, True]
        gateway.draining = True
        assert gateway.ask(action="undrain", instances=ONE, seconds=30) == {"ready": True}
        assert not gateway.draining
        gateway.ready = [False]
        assert gateway.ask(action="undrain", instances=ONE, seconds=0.05) == {"ready": False}


def test_errors_of_clients_are_those_of_this_instance() -> None:
    with Gateway() as gateway:
        found = gateway.ask(action="counts", instances=ONE)
    assert found == {"answered": 130, "failed": 3}


def test_a_gateway_that_is_down_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with Gateway() as gateway:
        port = gateway.server.server_address[1]
    monkeypatch.setattr(gateways, "PORT", port)
    with pytest.raises(gateways.Refused, match=r"does not answer on port \d+ .*is nginx running"):
        gateways.states()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with Gateway() as gateway:
        monkeypatch.setattr(gateways, "PORT", gateway.server.server_address[1])
        assert gateways.states()  # never by a proxy
