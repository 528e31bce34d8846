"""The gateway's behaviour: real nginx with our Lua, on loopback.

Every engine here is the stand-in of tests/stubs/engine.py: these are tests of faults and timing.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.ports import free_ports
from tests.stubs.engine import Engine
from tests.stubs.gateway import Nginx, available, wait_for
from tests.unit.gateway.fleet import pool, spec
from vllm_fleet import gateway
from vllm_fleet.planned import Pool
from vllm_fleet.spec.model import ApiKey

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="needs root, nginx and its Lua module"),
    pytest.mark.timeout(120),
]


def error(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@contextmanager
def running(
    pools: list[Pool],
    *,
    keys: Sequence[ApiKey] = (),
    tls: tuple[str, str] | None = None,
    site: str | None = None,
    ready: bool = True,
    monitors: tuple[str, ...] = (),
    **settings: Any,
) -> Iterator[Nginx]:
    """nginx over these pools; with ``ready``, every instance is known to be ready."""
    port, status_port = free_ports(2)
    if tls:
        settings["tls"] = {"certificate": "gw.pem", "key": "gw.key"}
    host = spec(listen=port, **settings)
    nginx = Nginx(port, status_port, tls=tls is not None)
    files = gateway.files(
        host, pools, {}, keys, monitors=monitors, tls=tls, status_port=status_port
    )
    nginx.put(files)
    if site:
        nginx.site(site.format(port=port, root=nginx.root))
    try:
        with nginx:
            wait_for(nginx.status)
            if ready:
                nginx.wait_ready(all=True)
            yield nginx
    except BaseException:
        if nginx.root.exists():
            print(nginx.errors())
        raise


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Two stand-ins, a and b."""
    with Engine("a") as a, Engine("b") as b:
        yield [a, b]


@pytest.fixture
def pair(engines: list[Engine]) -> Iterator[Nginx]:
    """One pool `m` over both."""
    with running([pool("m", [e.port for e in engines])]) as nginx:
        yield nginx


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    where = tmp_path_factory.mktemp("tls")
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
            "-subj /CN=gw-01 -keyout key -out crt"
        ),
        cwd=where,
        check=True,
        capture_output=True,
    )
    return (where / "crt").read_text(), (where / "key").read_text()


class Stream:
    """A streamed chat, read as it comes."""

    def __init__(self, nginx: Nginx, model: str = "m") -> None:
        self.connection = nginx.connect()
        body = json.dumps({"model": model, "stream": True, "messages": []})
        self.connection.request("POST", "/v1/chat/completions", body)
        self.response = self.connection.getresponse()
        assert self.response.status == 200
        self.first = self.response.readline()

    def rest(self) -> bytes:
        data = self.first + self.response.read()
        self.connection.close()
        return data


# Routing


def test_each_model_and_alias_reaches_its_pool(engines: list[Engine]) -> None:
    a, b = engines
    pools = [pool("Qwen", [a.port], aliases=("small",)), pool("qwen", [b.port])]
    with running(pools) as nginx:
        answers = {name: nginx.chat(name)[2]["engine"] for name in ("Qwen", "qwen", "small")}
        assert answers == {"Qwen": "a", "qwen": "b", "small": "a"}
        status, headers, got = nginx.chat("gpt-4")
        assert (status, headers["content-type"]) == (404, "application/json")
        assert got == error(404, "The model `gpt-4` does not exist.", "NotFoundError", "model")
        status, headers, got = nginx.chat(None)
        assert (status, got["error"]["param"]) == (400, "model")


def test_the_only_pool_serves_a_request_without_model(pair: Nginx) -> None:
    assert pair.chat(None)[0] == 200
    assert pair.chat("")[0] == 200


def test_last_model_wins_even_behind_five_megabytes(engines: list[Engine]) -> None:
    a, b = engines
    with running([pool("one", [a.port]), pool("two", [b.port])]) as nginx:
        text = json.dumps('x"y\\' * 1_300_000)
        body = f'{{"model":"one","messages":[{{"model":"one","content":{text}}}],"model":"two"}}'
        assert len(body) > 5_000_000  # nginx spools it to a file
        status, _, data = nginx.ask("POST", "/v1/chat/completions", body.encode())
        assert (status, json.loads(data)["engine"]) == (200, "b")
        assert b.hits[0].body == body.encode()


def test_a_body_of_thirty_megabytes_arrives_whole(pair: Nginx, engines: list[Engine]) -> None:
    body = json.dumps({"model": "m", "image": "A" * 30_000_000}).encode()
    status, _, data = pair.ask("POST", "/v1/chat/completions", body)
    assert (status, json.loads(data)["body_bytes"]) == (200, len(body))
    assert [h.body == body for e in engines for h in e.hits] == [True]


def test_chunked_body(pair: Nginx) -> None:
    connection = pair.connect()
    chunks = [b'{"messages":[],', b'"model":', b'"m"}']
    connection.request("POST", "/v1/chat/completions", iter(chunks), encode_chunked=True)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["model"]) == (200, "m")
    connection.close()


@pytest.mark.parametrize("body", [b"", b"hello", b"[1]", b'{"model":"m"'])
def test_bad_json(pair: Nginx, engines: list[Engine], body: bytes) -> None:
    status, _, data = pair.ask("POST", "/v1/chat/completions", body)
    expected = error(400, "The request body is not a JSON object.", "BadRequestError")
    assert (status, json.loads(data)) == (400, expected)
    assert not engines[0].hits + engines[1].hits


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large(engines: list[Engine], chunked: bool) -> None:
    with running([pool("m", [engines[0].port])], max_body_mib=1) as nginx:
        body = b'{"model":"m","x":"' + b"x" * 1_100_000 + b'"}'
        connection = nginx.connect()
        connection.request(
            "POST", "/v1/completions", iter([body]) if chunked else body, encode_chunked=chunked
        )
        response = connection.getresponse()
        expected = error(
            413, "The request body is larger than this gateway accepts.", "RequestTooLargeError"
        )
        assert (response.status, json.loads(response.read())) == (413, expected)
        connection.close()
        assert not engines[0].hits


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/invocations", "/tokenize", "/metrics", "/docs", "/status", "/fleet/ready"),
        *("//v1/chat/completions", "/v1/../v1/chat/completions", "/v1/%63hat/completions"),
        *("/v1/chat/completions/", "/V1/chat/completions", "/v1/models/a%2Fb"),
    ],
)
def test_closed_paths(pair: Nginx, engines: list[Engine], path: str) -> None:
    for method in ("GET", "POST"):
        status, headers, data = pair.ask(method, path, b'{"model":"m"}')
        assert (status, headers["content-type"]) == (404, "application/json")
        assert json.loads(data)["error"]["type"] == "NotFoundError"
    assert not engines[0].hits + engines[1].hits


@pytest.mark.parametrize("path", [f"/v1/{path}" for path in gateway.API_PATHS])
def test_open_paths(pair: Nginx, engines: list[Engine], path: str) -> None:
    assert pair.ask("POST", path + "?beta=true", b'{"model":"m"}')[0] == 200
    assert [h.path for e in engines for h in e.hits] == [path + "?beta=true"]
    status, headers, data = pair.ask("GET", path)
    assert (status, headers["allow"]) == (405, "POST")
    expected = error(405, "Only POST is allowed here.", "MethodNotAllowedError")
    assert json.loads(data) == expected


def test_the_engines_own_errors_pass(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.answer = "bad"
    status, _, got = pair.chat("m")
    assert (status, got["error"]["message"]) == (400, "engine says no")


def test_nginx_own_refusals_are_json(pair: Nginx) -> None:
    status, _, data = pair.ask("POST", "/v1/completions", b"{}", {"X-Long": "x" * 40_000})
    assert (status, json.loads(data)["error"]["code"]) == (431, 431)


# Models


def test_models_are_merged(engines: list[Engine]) -> None:
    a, b = engines
    pools = [
        pool("two", [b.port]),
        pool("one", [a.port], aliases=("uno",), **{"max-model-len": 4096}),
    ]
    with running(pools) as nginx:
        status, _, data = nginx.ask("GET", "/v1/models")
        listed = json.loads(data)
        assert (status, listed["object"]) == (200, "list")
        assert [(m["id"], m["root"], m["max_model_len"]) for m in listed["data"]] == [
            ("one", "one", 4096),
            ("uno", "one", 4096),
            ("two", "two", None),
        ]
        assert {m["object"] for m in listed["data"]} == {"model"}
        status, _, data = nginx.ask("GET", "/v1/models/uno")
        assert (status, json.loads(data)) == (200, listed["data"][1])
        status, _, data = nginx.ask("GET", "/v1/models/none")
        expected = error(404, "The model `none` does not exist.", "NotFoundError", "model")
        assert (status, json.loads(data)) == (404, expected)


# Keys


def test_keys(engines: list[Engine]) -> None:
    keys = (ApiKey(name="team-a", key="sk-aaa"), ApiKey(name="team-b", key="sk-bbb"))
    with running([pool("m", [engines[0].port])], keys=keys) as nginx:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "sk-aaa"},
            {"Authorization": "Bearer sk-aaa2"},
            {"x-api-key": "team-a"},
        ):
            status, got, answer = nginx.chat("m", headers=headers)
            assert (status, got["www-authenticate"]) == (401, "Bearer")
            assert answer["error"]["type"] == "AuthenticationError"
        assert nginx.ask("GET", "/v1/models")[0] == 401
        assert nginx.ask("GET", "/healthz")[0] == 200
        assert not engines[0].hits
        for headers, name in (
            ({"Authorization": "Bearer sk-aaa"}, "team-a"),
            ({"authorization": "bearer sk-bbb"}, "team-b"),
            ({"x-api-key": "sk-bbb"}, "team-b"),
        ):
            status, got, _ = nginx.chat("m", headers=headers)
            assert status == 200
            assert nginx.logged(got["x-request-id"])["key"] == name
        # no key reaches an engine or a log
        assert not [h for h in engines[0].hits if {"authorization", "x-api-key"} & set(h.headers)]
        logs = "".join(p.read_text() for p in (nginx.root / "var/log/nginx").iterdir())
        assert "sk-" not in logs


def test_a_client_cannot_pass_for_the_warm_up(pair: Nginx, engines: list[Engine]) -> None:
    assert pair.chat("m", headers={"X-Fleet-Token": "x"})[0] == 200
    assert "x-fleet-token" not in [*engines[0].hits, *engines[1].hits][0].headers


# Streams


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_stream_passes_at_once(
    engines: list[Engine], certificate: tuple[str, str], secure: bool
) -> None:
    a = engines[0]
    a.chunk_gap, a.chunks = 0.1, 600
    with running([pool("m", [a.port])], tls=certificate if secure else None) as nginx:
        stream = Stream(nginx)
        assert a.in_flight == 1  # a minute is left of it
        a.chunk_gap = 0
        data = stream.rest()
        assert data.count(b"data: ") == 601
        assert data.endswith(b"data: [DONE]\n\n")


def test_reload_cuts_no_stream(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.chunk_gap, engine.chunks = 0.1, 600
    streams = [Stream(pair) for _ in range(10)]
    assert {len(streams)} == {sum(i["in_flight"] for i in pair.instances().values())}
    for _ in range(2):
        pair.reload()
    assert pair.chat("m")[0] == 200
    # what old workers carry is still counted; the chat is booked off after its answer
    wait_for(lambda: sum(i["in_flight"] for i in pair.instances().values()) == 10)
    for engine in engines:
        engine.chunk_gap = 0
    for stream in streams:
        data = stream.rest()
        assert data.count(b"data: ") == 601
        assert data.endswith(b"data: [DONE]\n\n")
    wait_for(lambda: not any(i["in_flight"] for i in pair.instances().values()))


def test_a_client_that_leaves_ends_the_engines_work(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.chunk_gap, engine.chunks = 0.1, 300
    stream = Stream(pair)
    stream.connection.close()
    stream.response.close()
    (hit,) = [h for e in engines for h in e.hits]
    wait_for(lambda: hit.aborted, 3)
    wait_for(lambda: not any(i["in_flight"] for i in pair.instances().values()), 3)


def test_a_client_that_leaves_before_the_first_byte(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.answer = "hang"
    connection = pair.connect()
    connection.request("POST", "/v1/chat/completions", b'{"model":"m"}')
    (hit,) = wait_for(lambda: [h for e in engines for h in e.hits])
    connection.close()
    wait_for(lambda: hit.aborted, 3)
    (line,) = wait_for(pair.access)
    assert line["status"] == 499
    wait_for(lambda: not any(i["in_flight"] for i in pair.instances().values()), 3)


# Choice and retry


def test_least_in_flight(pair: Nginx, engines: list[Engine]) -> None:
    a, b = engines
    a.chunk_gap, a.chunks = 0.1, 600
    with ExitStack() as stack:
        while not a.in_flight:
            stack.callback(Stream(pair).rest)
        before = len(b.hits)
        for _ in range(6):
            assert pair.chat("m")[2]["engine"] == "b"
        assert len(b.hits) == before + 6
        a.chunk_gap = 0


def test_refused_connection_goes_to_another(pair: Nginx, engines: list[Engine]) -> None:
    a = engines[0]
    a.stop()
    answers = [pair.chat("m") for _ in range(4)]
    assert [(status, got["engine"]) for status, _, got in answers] == [(200, "b")] * 4
    tried = [pair.logged(headers["x-request-id"])["tried"] for _, headers, _ in answers]
    # once it was found closed, nobody is sent there again
    assert tried.count("gpu-01/m-1:502, gpu-02/m-2:200") <= 1
    assert {t.split(", ")[-1] for t in tried} == {"gpu-02/m-2:200"}
    a.start()
    pair.wait_ready(m_1=True)
    assert {pair.chat("m")[2]["engine"] for _ in range(4)} == {"a", "b"}


def test_marked_503_goes_to_another(pair: Nginx, engines: list[Engine]) -> None:
    a = engines[0]
    a.answer = "gate"  # its /fleet/ready still says ready: the gateway's knowledge is old
    tried = set()
    for _ in range(4):
        status, headers, got = pair.chat("m")
        assert (status, got["engine"]) == (200, "b")
        assert "x-fleet-gate" not in headers
        tried.add(pair.logged(headers["x-request-id"])["tried"])
    assert "gpu-01/m-1:503, gpu-02/m-2:200" in tried
    assert not a.hits
    assert 'retries_total{pool="m",reason="gate"}' in pair.metrics()


def test_nothing_is_replayed_once_sent(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.answer = "close"
    status, headers, got = pair.chat("m")
    assert (status, got["error"]["type"]) == (502, "BadGatewayError")
    assert headers["content-type"] == "application/json"
    assert "was not given to another one" in got["error"]["message"]
    assert len(engines[0].hits + engines[1].hits) == 1
    assert pair.logged(headers["x-request-id"])["tried"].endswith(":502")


def test_an_unmarked_503_is_not_replayed(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.answer = "busy"
    status, headers, got = pair.chat("m")
    assert (status, headers["retry-after"]) == (503, "7")
    assert got["error"]["type"] == "ServiceUnavailableError"
    assert len(engines[0].hits + engines[1].hits) == 1


def test_killed_in_mid_stream_breaks_only_that_stream(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.chunk_gap, engine.chunks = 0.1, 600
    streams = [Stream(pair) for _ in range(4)]
    engines[0].stop()
    engines[1].chunk_gap = 0
    whole, cut = 0, 0
    for stream in streams:
        try:
            whole += stream.rest().endswith(b"data: [DONE]\n\n")
        except http.client.IncompleteRead:
            cut += 1
    assert (whole, cut) == (2, 2)
    assert len(engines[1].hits) == 2


def test_a_drained_instance_gets_nothing(pair: Nginx, engines: list[Engine]) -> None:
    a = engines[0]
    a.ready = False
    pair.wait_ready(m_1=False)
    assert {pair.chat("m")[2]["engine"] for _ in range(20)} == {"b"}
    assert (len(a.hits), a.gated) == (0, 0)
    a.ready = True
    pair.wait_ready(m_1=True)
    assert {pair.chat("m")[2]["engine"] for _ in range(4)} == {"a", "b"}


def test_a_host_that_does_not_answer_delays_no_other(engines: list[Engine]) -> None:
    """A listener that accepts and never answers, beside one whose state changes."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        ports = [dead.getsockname()[1], engines[0].port]
        with running([pool("m", ports)], ready=False) as nginx:
            nginx.wait_ready(m_2=True)
            for state in (False, True):
                engines[0].ready = state
                began = time.monotonic()
                nginx.wait_ready(m_2=state)
                assert time.monotonic() - began < 1.5
            assert not nginx.instances()["gpu-01/m-1"]["ready"]


def test_a_busy_instance_is_not_taken_for_a_dead_one(pair: Nginx, engines: list[Engine]) -> None:
    a = engines[0]
    a.silent = 2
    deadline = time.monotonic() + 6  # each silence takes two seconds
    while time.monotonic() < deadline:
        assert pair.instances()["gpu-01/m-1"]["ready"]
        time.sleep(0.1)
    assert a.silent == 0
    a.silent = 1000
    pair.wait_ready(m_1=False)
    assert {pair.chat("m")[2]["engine"] for _ in range(6)} == {"b"}


# Hold


def test_hold_over_a_full_outage(pair: Nginx, engines: list[Engine]) -> None:
    """All of a pool gone for three seconds under twenty clients: no error, none lost."""
    until = time.monotonic() + 6
    answers: list[tuple[int, float]] = []

    def client() -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            status = pair.chat("m")[0]
            answers.append((status, time.monotonic() - began))
            time.sleep(0.05)

    with ThreadPoolExecutor(20) as executor:
        clients = [executor.submit(client) for _ in range(20)]
        time.sleep(1)
        # as a planned stop does: the gate closes, gateways learn it, work ends, the port closes
        for engine in engines:
            engine.ready = False
        pair.wait_ready(all=False)
        # by the gateway's count: what was sent to an engine that has not read it yet is in flight
        wait_for(lambda: not any(i["in_flight"] for i in pair.instances().values()))
        for engine in engines:
            engine.stop()
        wait_for(lambda: pair.status()["held"] == 20)
        time.sleep(3)
        for engine in engines:
            engine.ready = True
            engine.start()
        for each in clients:
            each.result()
    assert {status for status, _ in answers} == {200}
    assert sum(seconds > 2.5 for _, seconds in answers) == 20
    assert max(seconds for _, seconds in answers) < 6
    wait_for(lambda: sum(line["held_ms"] > 2500 for line in pair.access()) == 20)
    assert pair.status()["held"] == 0


def test_hold_when_the_only_instance_dies_unseen(engines: list[Engine]) -> None:
    """The request is already on its way to the instance when the connection fails."""
    a = engines[0]
    with running([pool("m", [a.port])]) as nginx:
        a.stop()  # the gateway still holds it for ready
        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(nginx.chat, "m")
            wait_for(lambda: nginx.status()["held"] == 1)
            a.start()
            status, headers, _ = answer.result()
        assert status == 200
        assert nginx.logged(headers["x-request-id"])["tried"] == "gpu-01/m-1:502, gpu-01/m-1:200"


def test_large_bodies_and_streams_survive_the_hold(engines: list[Engine]) -> None:
    a = engines[0]
    a.ready = False
    with running([pool("m", [a.port])], ready=False) as nginx:
        body = json.dumps({"model": "m", "stream": True, "image": "A" * 10_000_000}).encode()
        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(nginx.ask, "POST", "/v1/chat/completions", body)
            wait_for(lambda: nginx.status()["held"] == 1)
            a.ready = True
            status, headers, data = answer.result()
        assert (status, data.count(b"data: ")) == (200, a.chunks + 1)
        usage = {"stream_options": {"include_usage": True}}  # asked for by the gateway
        assert a.hits[0].json == {**json.loads(body), **usage}
        assert headers["content-type"].startswith("text/event-stream")


def test_hold_is_bounded(engines: list[Engine]) -> None:
    for engine in engines:
        engine.stop()
    pools = [pool("m", [e.port for e in engines])]
    with running(pools, ready=False, hold_seconds=2, hold_requests=3) as nginx:
        began = time.monotonic()
        with ThreadPoolExecutor(5) as executor:
            answers = list(executor.map(lambda _: (nginx.chat("m"), time.monotonic()), range(5)))
        waited = sorted(at - began for _, at in answers)
        assert waited[1] < 1
        # nginx reads its clock once a round: a wait may seem a little shorter than it was.
        assert all(1.9 <= seconds < 10 for seconds in waited[2:])
        for (status, headers, got), _ in answers:
            assert (status, headers["retry-after"]) == (503, "5")
            assert got["error"]["type"] == "ServiceUnavailableError"
        assert 'refused_total{pool="m",reason="full"} 2' in nginx.metrics()
        assert 'refused_total{pool="m",reason="time"} 3' in nginx.metrics()
        assert nginx.status()["held"] == 0


def test_no_hold(engines: list[Engine]) -> None:
    engines[0].stop()
    with running([pool("m", [engines[0].port])], ready=False, hold_seconds=0) as nginx:
        began = time.monotonic()
        assert nginx.chat("m")[0] == 503
        assert time.monotonic() - began < 1


def test_a_client_that_leaves_the_hold_frees_its_place(engines: list[Engine]) -> None:
    a = engines[0]
    a.ready = False
    with running([pool("m", [a.port])], ready=False) as nginx:
        connections = [nginx.connect() for _ in range(3)]
        for connection in connections:
            connection.request("POST", "/v1/chat/completions", b'{"model":"m"}')
        wait_for(lambda: nginx.status()["held"] == 3)
        for connection in connections:
            connection.close()
        wait_for(lambda: nginx.status()["held"] == 0, 3)
        a.ready = True
        nginx.wait_ready(all=True)
        time.sleep(0.6)
        assert not a.hits
        wait_for(lambda: {line["status"] for line in nginx.access()} == {499})


def test_an_instance_that_says_ready_and_refuses_ends_in_503(engines: list[Engine]) -> None:
    a = engines[0]
    a.answer = "gate"
    with running([pool("m", [a.port])], hold_seconds=4) as nginx:
        status, headers, _ = nginx.chat("m")
        assert status == 503
        assert nginx.logged(headers["x-request-id"])["seconds"] < 6
        assert 2 <= a.gated <= 6  # tried at growing intervals


def test_requests_held_by_old_workers_see_new_instances(engines: list[Engine]) -> None:
    a, b = engines
    a.stop()
    with running([pool("m", [a.port])], ready=False) as nginx, ThreadPoolExecutor(1) as executor:
        answer = executor.submit(nginx.chat, "m")
        wait_for(lambda: nginx.status()["held"] == 1)
        nginx.put(
            gateway.files(
                spec(listen=nginx.port),
                [pool("m", [b.port])],
                {},
                (),
                status_port=nginx.status_port,
            )
        )
        nginx.reload()
        assert answer.result()[2]["engine"] == "b"


# Workers, neighbours, monitoring


def test_a_killed_worker_leaves_no_count_behind(pair: Nginx, engines: list[Engine]) -> None:
    for engine in engines:
        engine.chunk_gap, engine.chunks = 0.1, 300
    streams = [Stream(pair) for _ in range(4)]
    for worker in pair.workers:
        os.kill(worker, signal.SIGKILL)
    assert len(streams) == 4

    def clean() -> bool:
        try:
            return not any(i["in_flight"] for i in pair.instances().values())
        except (ConnectionError, http.client.HTTPException):
            return False

    wait_for(clean, 15)
    assert "; taken off the count" in pair.errors()
    assert pair.chat("m")[0] == 200


def test_a_broken_data_file_refuses_the_reload(pair: Nginx) -> None:
    data = pair.root / "etc/nginx/vllm-fleet/pools.json"
    data.write_text("{")
    workers = pair.workers
    os.kill(pair.pid, signal.SIGHUP)
    wait_for(lambda: "pools.json is not JSON" in pair.errors())
    assert "run the deploy for this gateway again" in pair.errors()
    assert pair.workers == workers
    assert pair.chat("m")[0] == 200


DEFAULT_SITE = """
server {{
    listen {port} default_server;
    server_name _;
    location / {{ return 200 "welcome"; }}
}}
server {{
    listen {port};
    server_name wiki.example;
    location / {{ return 200 "wiki"; }}
}}
"""


def test_sites_of_others_go_on(engines: list[Engine]) -> None:
    """Debian's default site has our port and is the default server."""
    with running([pool("m", [engines[0].port])], site=DEFAULT_SITE) as nginx:
        assert nginx.chat("m")[0] == 200
        assert nginx.chat("m", headers={"Host": "llm.example"})[0] == 200
        assert nginx.ask("GET", "/", headers={"Host": "wiki.example"})[2] == b"wiki"


def test_connections_to_engines_are_kept(pair: Nginx, engines: list[Engine]) -> None:
    for index in range(40):
        assert pair.chat("m", stream_options=None, n=index)[0] == 200
    for engine in engines:
        assert len(engine.hits) >= 10
        assert len({hit.connection for hit in engine.hits}) <= len(pair.workers)


def test_no_request_goes_to_a_connection_that_the_engine_has_closed(
    pair: Nginx, engines: list[Engine]
) -> None:
    for _ in range(4):
        assert {pair.chat("m")[0] for _ in range(8)} == {200}
        for engine in engines:
            engine.stop()
            engine.start()
        pair.wait_ready(all=True)


def test_many_requests_on_one_connection(pair: Nginx, engines: list[Engine]) -> None:
    connection = pair.connect()
    for index in range(50):
        body = json.dumps({"model": "m", "stream": index % 3 == 0, "n": "x" * index * 997})
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        assert (response.status, len(response.read()) > 100) == (200, True)
    connection.close()
    assert len(engines[0].hits + engines[1].hits) == 50


def test_status_and_metrics(pair: Nginx) -> None:
    _, headers, _ = pair.chat("m")
    pair.logged(headers["x-request-id"])
    pair.chat("none")
    status = pair.status()
    assert (status["held"], status["hold_requests"], status["hold_seconds"]) == (0, 1000, 900)
    (only,) = status["pools"]
    assert [(i["host"], i["name"], i["ready"]) for i in only["instances"]] == [
        ("gpu-01", "m-1", True),
        ("gpu-02", "m-2", True),
    ]
    missed = 'requests_total{pool="-",host="",instance="",code="404"} 1'
    wait_for(lambda: missed in pair.metrics())
    text = pair.metrics()
    assert re.search(r'requests_total{pool="m",host="gpu-0\d",instance="m-\d",code="200"} 1', text)
    ready = 'vllm_fleet_gateway_instance_ready{pool="m",host="gpu-01",instance="m-1"} 1'
    assert ready in text
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_status_is_closed_to_others(engines: list[Engine]) -> None:
    """Nobody but loopback and the given monitors; 127.0.0.2 stands for another host."""
    with running([pool("m", [engines[0].port])]) as nginx:
        for path in ("/status", "/metrics"):
            connection = http.client.HTTPConnection(
                "127.0.0.1", nginx.status_port, source_address=("127.0.0.2", 0)
            )
            connection.request("GET", path)
            assert connection.getresponse().status == 403
            connection.close()


def test_access_log(pair: Nginx, engines: list[Engine]) -> None:
    _, headers, got = pair.chat("m", headers={"X-Request-Id": "client-7"})
    assert headers["x-request-id"] == "client-7"
    line = pair.logged("client-7")
    served = {"a": "gpu-01/m-1:200", "b": "gpu-02/m-2:200"}[got["engine"]]
    assert (line["tried"], line["status"], line["pool"], line["model"]) == (served, 200, "m", "m")
    assert line["path"] == "/v1/chat/completions"
    assert (line["held_ms"], line["first_byte_seconds"] < 1) == (0, True)
    assert [h.headers["x-request-id"] for e in engines for h in e.hits] == ["client-7"]
    pair.ask("POST", "/pools/m/v1/chat/completions", b"{}", {"X-Request-Id": "by-path"})
    assert pair.logged("by-path")["path"] == "/v1/chat/completions"
    # what a client sends cannot break the log's lines
    pair.chat('x"\n\x01模\\', headers={"X-Request-Id": 'a"b', "User-Agent": 'q"\\'})
    wait_for(lambda: len(pair.access()) == 3)
    assert 'q"\\' in {line["agent"] for line in pair.access()}


def test_ids_are_unique_and_reach_the_engine(pair: Nginx, engines: list[Engine]) -> None:
    with ThreadPoolExecutor(8) as executor:
        answers = list(executor.map(lambda _: pair.chat("m"), range(60)))
    ids = {headers["x-request-id"] for _, headers, _ in answers}
    assert len(ids) == 60
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
    assert {h.headers["x-request-id"] for e in engines for h in e.hits} == ids
    assert len({each[:24] for each in ids}) <= len(pair.workers)  # each worker's own beginning
    wait_for(lambda: {line["request_id"] for line in pair.access()} == ids)


def test_answers_are_evenly_spread_over_threads(pair: Nginx, engines: list[Engine]) -> None:
    """Forty clients at once on two workers: the busier instance has at most a few more."""
    for engine in engines:
        engine.first_byte = 0.05
    with ThreadPoolExecutor(40) as executor:
        statuses = list(executor.map(lambda _: pair.chat("m")[0], range(200)))
    assert set(statuses) == {200}
    counts = [len(e.hits) for e in engines]
    assert sum(counts) == 200
    assert max(counts) <= 120
