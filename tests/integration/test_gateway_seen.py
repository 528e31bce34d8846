"""What is seen of the gateway, and what an operator may tell it: real nginx on loopback.

Every engine here is the stand-in of tests/stubs/engine.py.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.test_gateway_nginx import Stream, running
from tests.stubs.engine import Engine
from tests.stubs.gateway import Nginx, available, wait_for
from tests.unit.gateway.fleet import pool, spec
from vllm_fleet import gateway
from vllm_fleet.spec.model import ApiKey

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="needs root, nginx and its Lua module"),
    pytest.mark.timeout(120),
]

SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    with Engine("a") as a, Engine("b") as b:
        yield [a, b]


@pytest.fixture
def pair(engines: list[Engine]) -> Iterator[Nginx]:
    """One pool `m` over both, for one client."""
    keys = (ApiKey(name="team-a", key="sk-aaa"),)
    with running([pool("m", [e.port for e in engines])], keys=keys) as nginx:
        yield nginx


KEY = {"Authorization": "Bearer sk-aaa"}


def ask(
    nginx: Nginx,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    source: str = "127.0.0.1",
) -> tuple[int, dict[str, str], bytes]:
    """One request to the status port."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", nginx.status_port, timeout=10, source_address=(source, 0)
    )
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        data = response.read()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, data
    finally:
        connection.close()


def samples(nginx: Nginx) -> dict[tuple[str, frozenset[str]], float]:
    """Every sample of /metrics by name and labels."""
    found: dict[tuple[str, frozenset[str]], float] = {}
    for line in nginx.metrics().splitlines():
        if match := SAMPLE.match(line):
            labels = frozenset(re.findall(r'\w+="(?:[^"\\]|\\.)*"', match[2]))
            assert (match[1], labels) not in found, line
            found[match[1], labels] = float(match[3])
    return found


def total(nginx: Nginx, name: str, *labels: str) -> float:
    """The sum over the series of a name that have these labels."""
    name = f"vllm_fleet_gateway_{name}"
    return sum(v for (n, has), v in samples(nginx).items() if n == name and has >= set(labels))


def lint(text: str) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


# Metrics


def test_requests_are_counted_by_pool_instance_code_and_key(
    pair: Nginx, engines: list[Engine]
) -> None:
    for _ in range(6):
        assert pair.chat("m", headers=KEY)[0] == 200
    pair.chat("none", headers=KEY)
    pair.chat("m")
    engines[0].stop()
    engines[1].answer = "bad"
    assert pair.chat("m", headers=KEY)[0] == 400
    wait_for(lambda: total(pair, "requests_total") == 9)
    assert total(pair, "requests_total", 'pool="m"', 'code="200"') == 6
    for name in ("m-1", "m-2"):
        assert total(pair, "requests_total", f'instance="{name}"', 'code="200"') >= 2
    assert total(pair, "requests_total", 'instance="m-2"', 'host="gpu-02"', 'code="400"') == 1
    # what the gateway answers itself has no instance, and what names no pool none either
    assert total(pair, "requests_total", 'pool="-"', 'instance=""', 'code="404"') == 1
    assert total(pair, "requests_total", 'pool="-"', 'instance=""', 'code="401"') == 1
    assert total(pair, "key_requests_total", 'key="team-a"', 'pool="m"', 'code="200"') == 6
    assert total(pair, "key_requests_total", 'key="-"', 'code="401"') == 1
    lint(pair.metrics())


def test_times_are_histograms(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.first_byte, engine.chunk_gap, engine.chunks = 0.3, 0.2, 4
    answer = pair.chat("m", headers=KEY, stream=False)
    assert answer[0] == 200
    connection = pair.connect()
    body = b'{"model":"m","stream":true}'
    connection.request("POST", "/v1/chat/completions", body, KEY)
    connection.getresponse().read()
    connection.close()
    pair.chat("none", headers=KEY)  # no part of the times
    wait_for(lambda: total(pair, "requests_total") == 3)
    for name in ("first_byte_seconds", "duration_seconds"):
        assert total(pair, f"{name}_count", 'pool="m"') == 2
        assert total(pair, f"{name}_bucket", 'le="+Inf"') == 2
        # cumulative, from the shortest to the longest
        for instance in ("m-1", "m-2"):
            lines = re.findall(
                rf'{name}_bucket{{pool="m",host="[^"]*",instance="{instance}",le="[^"]*"}} (\d+)',
                pair.metrics(),
            )
            assert [int(n) for n in lines] == sorted(int(n) for n in lines)
            assert len(lines) in (0, len(set(gateway_bounds(pair, name))))
    assert total(pair, "first_byte_seconds_bucket", 'le="0.2"') == 0
    assert total(pair, "first_byte_seconds_sum") >= 0.6
    stream = total(pair, "duration_seconds_sum") - total(pair, "first_byte_seconds_sum")
    assert stream >= 0.75  # four gaps of a stream of five chunks
    lint(pair.metrics())


def gateway_bounds(nginx: Nginx, name: str) -> list[str]:
    return re.findall(rf'{name}_bucket{{.*le="([^"]*)"}}', nginx.metrics())


def test_the_first_byte_counts_from_the_requests_begin(engines: list[Engine]) -> None:
    """The wait for an instance is part of what a client waits."""
    engines[0].ready = False
    with running([pool("m", [engines[0].port])], ready=False) as nginx:
        connection = nginx.connect()
        connection.request("POST", "/v1/chat/completions", b'{"model":"m"}')
        wait_for(lambda: nginx.status()["held"] == 1)
        assert total(nginx, "held", 'pool="m"') == 1
        time.sleep(1.1)
        engines[0].ready = True
        assert connection.getresponse().status == 200
        connection.close()
        wait_for(lambda: total(nginx, "first_byte_seconds_count") == 1)
        assert total(nginx, "first_byte_seconds_sum") > 1
        assert wait_for(nginx.access)[0]["first_byte_seconds"] > 1
        assert total(nginx, "held", 'pool="m"') == 0


def test_counters_survive_reloads_and_dead_workers(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.chunk_gap, engine.chunks = 0.05, 200
    for _ in range(4):
        assert pair.chat("m", headers=KEY)[0] == 200
    wait_for(lambda: total(pair, "requests_total") == 4)
    pair.reload()
    assert total(pair, "requests_total") == 4
    streams = []
    for _ in range(4):
        connection = pair.connect()
        connection.request("POST", "/v1/chat/completions", b'{"model":"m","stream":true}', KEY)
        assert connection.getresponse().status == 200
        streams.append(connection)
    assert total(pair, "in_flight") == 4
    for worker in pair.workers:
        os.kill(worker, signal.SIGKILL)

    def clean() -> bool:
        try:
            return total(pair, "in_flight") == 0
        except (ConnectionError, http.client.HTTPException):
            return False

    wait_for(clean, 20)
    assert total(pair, "requests_total", 'code="200"') >= 4
    for connection in streams:
        connection.close()
    lint(pair.metrics())


def test_what_is_deployed_no_more_has_no_series(engines: list[Engine]) -> None:
    a, b = engines
    with running([pool("one", [a.port]), pool("two", [b.port, a.port])]) as nginx:
        nginx.chat("one")
        for _ in range(4):
            nginx.chat("two")
        nginx.chat("none")
        wait_for(lambda: total(nginx, "requests_total") == 6)
        kept = total(nginx, "requests_total", 'instance="two-1"')
        assert 0 < kept < 4
        nginx.put(
            gateway.files(
                spec(listen=nginx.port),
                [pool("two", [b.port])],
                {},
                (),
                status_port=nginx.status_port,
            )
        )
        nginx.reload()
        assert total(nginx, "requests_total") == kept + 1
        assert not [has for _, has in samples(nginx) if 'pool="one"' in has]
        assert not [has for _, has in samples(nginx) if 'instance="two-2"' in has]
        assert total(nginx, "requests_total", 'instance="two-1"') == kept
        assert total(nginx, "requests_total", 'code="404"') == 1
        assert total(nginx, "duration_seconds_count", 'instance="two-1"') == kept


def test_names_cannot_break_a_label(engines: list[Engine]) -> None:
    """Host names come from an inventory, where anything may stand."""
    odd = pool("m", [engines[0].port])
    host = 'gpu"<01>\\'
    instance = odd.instances[0].__class__(**{**odd.instances[0].__dict__, "host": host})
    odd = odd.__class__(odd.name, odd.aliases, odd.model, (instance,))
    with running([odd], ready=False) as nginx:
        wait_for(lambda: nginx.status()["ready"] == 1)
        nginx.chat("m")
        wait_for(lambda: total(nginx, "requests_total") == 1)
        assert 'host="gpu\\"<01>\\\\",instance="m-1",code="200"} 1' in nginx.metrics()
        lint(nginx.metrics())
        nginx.reload()
        assert total(nginx, "requests_total") == 1
        page = ask(nginx, "GET", "/status", {"Accept": "text/html"})[2].decode()
        assert "gpu&quot;&lt;01&gt;\\" in page
        assert "<01>" not in page


def test_healthz_is_not_counted(pair: Nginx) -> None:
    for _ in range(3):
        assert pair.ask("GET", "/healthz")[0] == 200
    pair.chat("none", headers=KEY)
    wait_for(lambda: total(pair, "requests_total") == 1)
    assert total(pair, "key_requests_total") == 1


# Access log

GARBAGE = (
    b"GET /v1/%ff%fe%c3%28 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /\xff\xfe\xc0\xaf/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /%00%01%22%5c HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b'GET /v1/models HTTP/1.1\r\nHost: x\r\nUser-Agent: \xed\xa0\x80\xf5"\\\r\n'
    b"Connection: close\r\n\r\n",
    "GET /%E6%A8%A1 HTTP/1.1\r\nHost: x\r\nUser-Agent: 模型\r\nConnection: close\r\n\r\n".encode(),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\xff\xff\r\n\r\n",
    b"NONSENSE\r\n\r\n",
    b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff"\r\nContent-Length: 4\r\n'
    b"Connection: close\r\n\r\n\xff\xfe\xfd\xfc",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"\xff" * 40_000 + b"\r\n\r\n",
)


def test_every_line_of_the_access_log_is_json(pair: Nginx) -> None:
    """Also of what is refused before any of our code runs; a client of plain bytes asks."""
    for request in GARBAGE:
        with socket.create_connection(("127.0.0.1", pair.port), timeout=10) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as answer:
                status = answer.readline()
            assert re.match(rb"HTTP/1\.1 [45]", status), (request[:40], status)
    log = pair.root / gateway.ACCESS_LOG.lstrip("/")
    wait_for(lambda: len(log.read_bytes().splitlines()) == len(GARBAGE))
    lines = [json.loads(line.decode("utf-8")) for line in log.read_bytes().splitlines()]
    assert {frozenset(line) for line in lines} == {frozenset(lines[0])}
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", line["request_id"])
        assert isinstance(line["status"], int)
        assert line["status"] >= 400
        assert isinstance(line["held_ms"], int)
        assert line["first_byte_seconds"] is None
    said = {(line["path"], line["agent"]) for line in lines}  # workers log in any order
    assert ("/v1/\ufffd\ufffd\ufffd(", "") in said
    assert ("/模", "模型") in said
    assert ("/v1/models", '\ufffd\ufffd\ufffd\ufffd"\\') in said
    wait_for(lambda: total(pair, "requests_total", 'pool="-"') == len(GARBAGE))


def test_what_the_gateway_refuses_is_logged_with_the_reason_of_its_answer(pair: Nginx) -> None:
    """Key's owner, model and pool stand where they are known; nobody's key or body does."""
    pair.chat("nobody-serves-this", headers=KEY)
    pair.chat("m", headers={"Authorization": "Bearer sk-secret"})
    wait_for(lambda: len(pair.access()) == 2)
    # both may end in one millisecond, each in a worker of its own
    missing, unknown = sorted(pair.access(), key=lambda line: line["status"], reverse=True)
    assert (missing["status"], missing["key"], missing["model"], missing["pool"]) == (
        404,
        "team-a",
        "nobody-serves-this",
        "-",
    )
    assert (unknown["status"], unknown["key"], unknown["model"]) == (401, "", "")
    assert "sk-secret" not in json.dumps(pair.access())


# Status


def test_status_for_programs(pair: Nginx, engines: list[Engine]) -> None:
    status, headers, data = ask(pair, "GET", "/status", {"Accept": "*/*"})
    assert (status, headers["content-type"]) == (200, "application/json")
    assert headers["cache-control"] == "no-store"
    now = json.loads(data)
    assert (now["gateway"], now["ready"], now["instances"], now["in_flight"]) == ("gw-01", 2, 2, 0)
    (only,) = now["pools"]
    assert (only["name"], only["ready"], only["queued"], only["held"]) == ("m", 2, 0, 0)
    assert only["instances"][0]["release"] == "0.21.0-abc"
    assert only["instances"][0]["vllm_version"] == "0.21.0"
    assert only["instances"][0]["draining"] is False
    assert abs(now["time"] - time.time()) < 60


def test_rates(pair: Nginx, engines: list[Engine]) -> None:
    def rates() -> Any:
        return pair.status()["pools"][0]

    wait_for(lambda: rates()["requests_per_second"] is not None)
    for engine in engines:
        engine.answer = "close"
    assert pair.chat("m", headers=KEY)[0] == 502
    for engine in engines:
        engine.answer = "serve"
    for _ in range(9):
        assert pair.chat("m", headers=KEY)[0] == 200
    # Each worker brings what it counted to shared memory in its own time.
    wait_for(lambda: total(pair, "requests_total") == 10)
    now = wait_for(lambda: rates() if rates()["failures_per_second"] else None)
    assert now["requests_per_second"] > now["failures_per_second"] > 0
    each = [i["requests_per_second"] for i in now["instances"]]
    # a request of this moment may be booked between two reads
    assert abs(sum(each) - now["requests_per_second"]) < 0.01
    assert all(each)


def test_status_for_people(pair: Nginx) -> None:
    status, headers, data = ask(
        pair, "GET", "/status", {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    )
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    page = data.decode()
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', page))
    assert re.fullmatch(r"[0-9a-f]{32}", nonce)
    assert f"script-src 'nonce-{nonce}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    again = ask(pair, "GET", "/status", {"Accept": "text/html", "X-Request-Id": nonce})
    assert nonce not in again[1]["content-security-policy"]
    # whole in itself
    assert re.findall(r"""(?:src|href)=["'](?!#|data:,)""", page) == []
    assert "url(" not in page
    assert "style=" not in page
    for text in ("gpu-01/m-1", "gpu-02/m-2", "0.21.0-abc", "2 ready", "gw-01"):
        assert text in page


def test_refusals_of_the_status_port_are_json(pair: Nginx) -> None:
    for path, source, code in (
        ("/nothing", "127.0.0.1", 404),
        ("/status", "127.0.0.2", 403),
        ("/drain", "127.0.0.2", 403),
    ):
        status, headers, data = ask(pair, "GET", path, source=source)
        assert (status, headers["content-type"]) == (code, "application/json")
        assert json.loads(data)["error"]["code"] == code


# Drain


def drained(nginx: Nginx, verb: str, instance: str, **more: Any) -> tuple[int, Any]:
    status, _, data = ask(nginx, "POST", f"/{verb}?instance={instance}", **more)
    return status, json.loads(data)


def test_drain_and_undrain(pair: Nginx, engines: list[Engine]) -> None:
    a = engines[0]
    a.chunk_gap, a.chunks = 0.1, 600
    with ExitStack() as stack:
        connection = pair.connect()
        stack.callback(connection.close)
        while not a.in_flight:
            connection.request("POST", "/v1/chat/completions", b'{"model":"m","stream":true}', KEY)
            answer = connection.getresponse()
            if not a.in_flight:
                answer.read()
        for _ in range(2):  # said twice is said once
            assert drained(pair, "drain", "gpu-01/m-1") == (
                200,
                {"instance": "gpu-01/m-1", "draining": True, "ready": True, "in_flight": 1},
            )
        before = len(a.hits)
        for _ in range(10):
            assert pair.chat("m", headers=KEY)[2]["engine"] == "b"
        assert len(a.hits) == before
        state = json.loads(ask(pair, "GET", "/drain")[2])
        assert [i["instance"] for i in state["instances"]] == ["gpu-01/m-1"]
        instance = pair.instances()["gpu-01/m-1"]
        assert (instance["draining"], instance["ready"]) == (True, True)
        assert pair.status()["pools"][0]["ready"] == 1
        assert total(pair, "instance_draining", 'instance="m-1"') == 1
        assert total(pair, "instance_ready", 'instance="m-1"') == 0
        page = ask(pair, "GET", "/status", {"Accept": "text/html"})[2].decode()
        assert '<span class="state draining">draining</span>' in page
        # the stream that runs there ends whole
        a.chunk_gap = 0
        assert answer.read().endswith(b"data: [DONE]\n\n")
        one = ask(pair, "GET", "/drain?instance=gpu-01/m-1")[2]
        wait_for(
            lambda: not json.loads(ask(pair, "GET", "/drain?instance=gpu-01/m-1")[2])["in_flight"]
        )
        assert json.loads(one)["draining"] is True
    for _ in range(2):
        assert drained(pair, "undrain", "gpu-01/m-1")[1]["draining"] is False
    assert json.loads(ask(pair, "GET", "/drain")[2]) == {"instances": []}
    assert {pair.chat("m", headers=KEY)[2]["engine"] for _ in range(4)} == {"a", "b"}
    assert "gpu-01/m-1 is drained, asked by 127.0.0.1" in pair.errors()


def test_a_drain_survives_a_reload(pair: Nginx) -> None:
    drained(pair, "drain", "gpu-02/m-2")
    pair.reload()
    assert pair.instances()["gpu-02/m-2"]["draining"]
    assert {pair.chat("m", headers=KEY)[2]["engine"] for _ in range(4)} == {"a"}


@pytest.mark.parametrize(
    ("instance", "hint"),
    [
        ("gpu-01/m-2", "Near it: gpu-01/m-1, gpu-02/m-2."),
        ("m-2", "Near it: gpu-02/m-2, gpu-01/m-1."),
        ("something/else-altogether", "There is no instance `something/else-altogether`."),
        ("%22%00%ff", 'There is no instance `"??`.'),
    ],
)
def test_an_unknown_instance_is_told_with_those_near_it(
    pair: Nginx, instance: str, hint: str
) -> None:
    for verb in ("drain", "undrain"):
        status, got = drained(pair, verb, instance)
        assert (status, got["error"]["type"]) == (404, "NotFoundError")
        assert got["error"]["message"].endswith(hint)
    assert json.loads(ask(pair, "GET", "/drain")[2]) == {"instances": []}


def test_who_may_drain(engines: list[Engine]) -> None:
    """127.0.0.2 is of the admins' network, 127.0.1.1 a monitor, 127.0.2.1 nobody."""
    ports = [e.port for e in engines]
    with running(
        [pool("m", ports)], admin_networks=("127.0.0.2/31",), monitors=("127.0.1.0/24",)
    ) as nginx:
        path = "/drain?instance=gpu-01/m-1"
        for source, may_read, may_drain in (
            ("127.0.0.1", True, True),
            ("127.0.0.2", True, True),
            ("127.0.1.1", True, False),
            ("127.0.2.1", False, False),
        ):
            assert (ask(nginx, "GET", "/status", source=source)[0] == 200) is may_read
            for verb in ("drain", "undrain"):
                got = ask(nginx, "POST", f"/{verb}?instance=gpu-01/m-1", source=source)[0]
                assert got == (200 if may_drain else 403)
            assert ask(nginx, "GET", "/drain", source=source)[0] == (200 if may_drain else 403)
        # a page in an operator's browser may not, whatever network it is in
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert ask(nginx, "POST", path, headers)[0] == 403
        assert ask(nginx, "POST", "/drain")[0] == 400
        status, headers, _ = ask(nginx, "GET", "/undrain?instance=gpu-01/m-1")
        assert (status, headers["allow"]) == (405, "POST")
        assert ask(nginx, "DELETE", path)[1]["allow"] == "GET, POST"
        assert not nginx.instances()["gpu-01/m-1"]["draining"]
        # and nobody at the clients' port
        assert nginx.ask("POST", path)[0] == 404


def test_a_pool_drained_whole_holds_its_requests(engines: list[Engine]) -> None:
    with running([pool("m", [engines[0].port])]) as nginx:
        drained(nginx, "drain", "gpu-01/m-1")
        connection = nginx.connect()
        connection.request("POST", "/v1/chat/completions", b'{"model":"m"}')
        wait_for(lambda: nginx.status()["held"] == 1)
        drained(nginx, "undrain", "gpu-01/m-1")
        assert connection.getresponse().status == 200
        connection.close()
        assert Stream(nginx).rest().endswith(b"data: [DONE]\n\n")
