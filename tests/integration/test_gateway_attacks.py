"""What attackers send to a gateway: real nginx with our Lua, on loopback.

Every engine here is the stand-in of tests/stubs/engine.py. Whatever the attack, after it the
access log must be JSON line by line and hold no key and nothing of a body, and where HTTP allows
an answer it is an error as OpenAI's clients read it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.integration.test_gateway_nginx import running
from tests.stubs.certificates import issue
from tests.stubs.engine import Engine
from tests.stubs.gateway import Nginx, available, wait_for
from tests.stubs.http2 import Http2
from tests.unit.gateway.fleet import pool
from vllm_fleet.spec.model import ApiKey

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="needs root, nginx and its Lua module"),
    pytest.mark.timeout(120),
]

KEY = "sk-attacked-4711"
KEYS = (ApiKey(name="team-a", key=KEY),)
MINE = {"Authorization": f"Bearer {KEY}"}
SECRET = "the-body-says-hush"  # stands in bodies, and must stand nowhere else
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": SECRET}]}).encode()
CHAT = "/v1/chat/completions"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("a") as engine:
        yield engine


@contextmanager
def attacked(*engines: Engine, secure: bool = False, **settings: Any) -> Iterator[Nginx]:
    """A gateway with one key; afterwards it must still serve, and its log be in order."""
    pools = [pool(name, [e.port]) for name, e in zip(("m", "other"), engines, strict=False)]
    made = issue("gw-01")
    tls = (made.pem, made.key_pem()) if secure else None
    with running(pools, keys=KEYS, tls=tls, **settings) as nginx:
        yield nginx
        assert nginx.chat("m", headers=MINE)[0] == 200
        in_order(nginx)


def in_order(nginx: Nginx) -> None:
    """Each line of the log is one JSON object; no file of it holds a key or a body."""
    folder = nginx.root / "var/log/nginx"
    for line in (folder / "vllm-fleet.access.json").read_bytes().splitlines():
        assert isinstance(json.loads(line.decode()), dict)
    for file in folder.iterdir():
        text = file.read_bytes()
        assert KEY.encode() not in text, file
        assert SECRET.encode() not in text, file


def refusal(data: bytes, status: int) -> str:
    """The message of an error as OpenAI's clients read it."""
    error = json.loads(data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert isinstance(error["type"], str)
    return str(error["message"])


class Answer:
    """The answer to bytes sent as they are; ``status`` 0 where there was none."""

    def __init__(self, connection: socket.socket) -> None:
        self.status, self.body = 0, b""
        response = http.client.HTTPResponse(connection)
        with contextlib.suppress(http.client.BadStatusLine, ConnectionResetError):
            response.begin()
            self.status = response.status
            self.body = response.read()

    def refused(self, status: int) -> str:
        assert self.status == status, (self.status, self.body)
        return refusal(self.body, status)


def send(nginx: Nginx, *pieces: bytes) -> Answer:
    """What nginx answers to these bytes on a connection of their own."""
    with socket.create_connection(("127.0.0.1", nginx.port), 20) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
        return Answer(connection)


def head(*lines: str, path: str = CHAT) -> bytes:
    """A request's head with a key and these lines."""
    first = (f"POST {path} HTTP/1.1", "Host: gw", f"Authorization: Bearer {KEY}")
    return "\r\n".join((*first, *lines, "", "")).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# Keys


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer sk-guess"},
        {"Authorization": f"Bearer {KEY} "},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Basic {KEY}"},
        {"X-Api-Key": ""},
        {"X_Api_Key": KEY},
        {"Authorization": "Bearer " + "x" * 10_000},
    ],
    ids=["none", "unknown", "space", "longer", "basic", "empty", "underscores", "long"],
)
def test_without_a_known_key(engine: Engine, headers: dict[str, str]) -> None:
    """Trailing space is no part of a header's value, so that one is the key itself."""
    known = headers.get("Authorization") == f"Bearer {KEY} "
    with attacked(engine) as nginx:
        status, got, data = nginx.ask("POST", CHAT, BODY, headers)
        if known:
            assert status == 200
            engine.hits.clear()
        else:
            assert "API key" in refusal(data, 401)
            assert (status, got["www-authenticate"]) == (401, "Bearer")
            assert not engine.hits


# Size


def test_two_hundred_megabytes(engine: Engine) -> None:
    with attacked(engine) as nginx:
        size = 200 * 1024 * 1024
        piece = SECRET.encode() * 4096
        told = send(nginx, head(f"Content-Length: {size}"), piece)
        assert "larger than this gateway accepts" in told.refused(413)
        told = send(nginx, head(f"Content-Length: {size}", "Expect: 100-continue"))
        assert "larger than this gateway accepts" in told.refused(413)

        # without a length it is read until it is too much
        with socket.create_connection(("127.0.0.1", nginx.port), 20) as connection:
            connection.sendall(head("Transfer-Encoding: chunked"))
            sent = 0
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while sent < size and not readable(connection):
                    connection.sendall(chunk(piece))
                    sent += len(piece)
            assert sent < size / 2
            Answer(connection).refused(413)
        assert not engine.hits


def test_nobody_without_a_key_has_a_body_read(engine: Engine) -> None:
    with attacked(engine) as nginx, socket.create_connection(("127.0.0.1", nginx.port), 20) as c:
        c.sendall(
            b"POST %s HTTP/1.1\r\nHost: gw\r\nContent-Length: 9999999\r\n\r\n" % CHAT.encode()
        )
        Answer(c).refused(401)  # with none of the body sent


def readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


@pytest.mark.parametrize(
    ("lines", "path", "status"),
    [
        ([f"X-Long: {'x' * 100_000}"], CHAT, 431),
        ([f"X-{number}: {'x' * 50}" for number in range(3000)], CHAT, 431),
        ([], CHAT + "?" + "x" * 100_000, 414),
    ],
    ids=["one", "many", "address"],
)
def test_header_bomb(engine: Engine, lines: list[str], path: str, status: int) -> None:
    with attacked(engine) as nginx:
        assert "too l" in send(nginx, head(*lines, path=path)).refused(status)
        assert not engine.hits


def test_header_bomb_by_http2(engine: Engine) -> None:
    with attacked(engine, secure=True) as nginx, Http2(nginx.port) as client:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            number = client.request(CHAT, BODY, {**lower(MINE), "x-long": "x" * 500_000})
            answer = client.wait(number)
            assert answer.status in (None, 400, 431)
        assert not engine.hits


def lower(headers: dict[str, str]) -> dict[str, str]:
    return {key.lower(): value for key, value in headers.items()}


# Slowness


def test_slow_loris_times_five_hundred(engine: Engine) -> None:
    """With no more connections a worker than Debian gives; headers are given two seconds here."""
    with attacked(engine) as nginx:
        hurried(nginx, "client_header_timeout 15s;", "client_header_timeout 2s;")
        with ExitStack() as stack:
            address = ("127.0.0.1", nginx.port)
            slow = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(500)]
            began = time.monotonic()
            for each in slow:
                each.sendall(head()[:-2] + b"X-A: ")
            for _ in range(5):
                assert nginx.chat("m", headers=MINE)[0] == 200
            # a byte now and then does not buy more time
            closed: set[socket.socket] = set()
            with selectors.DefaultSelector() as selector:
                for each in slow:
                    selector.register(each, selectors.EVENT_READ)
                while len(closed) < len(slow):
                    assert time.monotonic() - began < 30
                    for key, _ in selector.select(0.2):
                        with contextlib.suppress(ConnectionResetError):
                            assert key.fileobj.recv(4096) == b""  # type: ignore[union-attr]
                        selector.unregister(key.fileobj)
                        closed.add(key.fileobj)  # type: ignore[arg-type]
                    for each in set(slow) - closed:
                        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                            each.sendall(b"x")
            assert nginx.chat("m", headers=MINE)[0] == 200
        lines = wait_for(lambda: (a := nginx.access()) and len(a) >= 500 and a)
        assert sum(line["status"] == 408 for line in lines) == 500
        assert len(engine.hits) == 6


def test_slow_bodies(engine: Engine) -> None:
    """Of a body that does not go on for a while the client is told; one second here."""
    with attacked(engine) as nginx:
        hurried(nginx, "client_body_timeout 30s;", "client_body_timeout 1s;")
        with ExitStack() as stack:
            slow = [
                stack.enter_context(socket.create_connection(("127.0.0.1", nginx.port), 20))
                for _ in range(200)
            ]
            for each in slow:
                each.sendall(head(f"Content-Length: {len(BODY)}") + BODY[:20])
            assert nginx.chat("m", headers=MINE)[0] == 200
            for each in slow:
                assert Answer(each).status in (0, 408)
        assert len(engine.hits) == 1
        lines = wait_for(lambda: (a := nginx.access()) and len(a) >= 201 and a)
        assert sum(line["status"] == 408 for line in lines) == 200


def hurried(nginx: Nginx, old: str, new: str) -> None:
    """Change a line of the configuration, and have Debian's number of connections."""
    conf = nginx.root / "etc/nginx/conf.d/vllm-fleet.conf"
    main = nginx.conf.read_text()
    assert old in conf.read_text()
    conf.write_text(conf.read_text().replace(old, new))
    nginx.conf.write_text(main.replace("worker_connections 4096", "worker_connections 768"))
    before = set(nginx.workers)
    nginx.reload()
    wait_for(lambda: not before & set(nginx.workers))  # an old one may still take connections


# Many at once


def test_one_address_has_a_bound(engine: Engine) -> None:
    engine.answer = "hang"
    with (
        attacked(
            engine, connections_per_address=3, connections_unlimited=("127.0.0.3", "10.0.0.0/8")
        ) as nginx,
        ExitStack() as stack,
    ):

        def ask(source: str) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(
                "127.0.0.1", nginx.port, timeout=20, source_address=(source, 0)
            )
            stack.callback(connection.close)
            connection.request("POST", CHAT, BODY, MINE)
            return connection

        held = [ask("127.0.0.2") for _ in range(3)]
        wait_for(lambda: len(engine.hits) == 3)
        for _ in range(2):
            response = ask("127.0.0.2").getresponse()
            assert (response.status, response.getheader("retry-after")) == (429, "5")
            assert "connections_unlimited" in refusal(response.read(), 429)
        assert len(engine.hits) == 3
        # others are not hindered, nor is who is named
        held += [ask("127.0.0.4"), *(ask("127.0.0.3") for _ in range(5))]
        wait_for(lambda: len(engine.hits) == 9)
        for each in held:
            each.close()
        wait_for(lambda: not engine.in_flight)
        engine.answer = "serve"
        assert ask("127.0.0.2").getresponse().status == 200


# Paths


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/"),
        *("/v1/../invocations", "/v1/%2e%2e/invocations", "/v1/..%2finvocations"),
        *("/v1/./chat/completions", "/v1/chat/completions/..", "/v1/chat/completions/../models"),
        *("/%76%31/chat/completions", "/v1%2fchat/completions", "/v1/chat%2Fcompletions"),
        *(
            "/v1/chat/completions;x=/../../metrics",
            "/v1;/chat/completions",
            "/v1/chat/completions;",
        ),
        *("/v1/chat/completions%0a", "/v1/chat/completions%20", "/v1/chat/completions%3f"),
        *("/v1\\chat\\completions", "/v1/chat/completions#x", "/V1/CHAT/COMPLETIONS"),
        *(
            "/invocations",
            "/tokenize",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/v1/load_lora_adapter",
        ),
        *("/status", "/drain", "/fleet/ready", "/v1/models/../../metrics", "/v1/%c3%a9", "/v1/%ff"),
    ],
)
def test_path_tricks(engine: Engine, path: str) -> None:
    with attacked(engine) as nginx:
        told = send(nginx, head(f"Content-Length: {len(BODY)}", path=path), BODY)
        told.refused(404)
        assert not engine.hits
        wait_for(nginx.access)  # in_order() looks at it


@pytest.mark.parametrize("path", ["/v1/chat/completions%00", "/v1/%00/../metrics", "/../metrics"])
def test_paths_that_are_no_http(engine: Engine, path: str) -> None:
    with attacked(engine) as nginx:
        send(nginx, head(f"Content-Length: {len(BODY)}", path=path), BODY).refused(400)
        assert not engine.hits


def test_bytes_that_are_no_text_stay_out_of_the_log(engine: Engine) -> None:
    with attacked(engine) as nginx:
        request = head().replace(CHAT.encode(), b"/v1/\xff\xc3(")
        send(nginx, request[:-2] + b"User-Agent: \xff\xfe\r\n\r\n").refused(404)
        (line,) = wait_for(nginx.access)
        assert isinstance(line["path"], str)
        assert isinstance(line["agent"], str)


# Smuggling


CL, TE = f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    "lines",
    [
        [CL, TE],
        [TE, CL],
        ["Content-Length: 0", TE],
        [CL, "Content-Length: 5"],
        [CL, CL],
        [f"Content-Length: +{len(BODY)}"],
        [f"Content-Length: {len(BODY)}, {len(BODY)}"],
        ["Content-Length: 0x10"],
        ["Content-Length: -1"],
        ["Content-Length: 99999999999999999999"],
        [CL, "Transfer-Encoding : chunked"],
        [CL, "Transfer-Encoding: identity"],
        [CL, "Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
        [CL, "X: y", " Transfer-Encoding: chunked"],
    ],
    ids=lambda lines: ", ".join(lines) if isinstance(lines, list) else None,
)
def test_a_length_told_in_two_ways_or_wrongly(engine: Engine, lines: list[str]) -> None:
    with attacked(engine) as nginx:
        told = send(nginx, head(*lines), chunk(BODY) + b"0\r\n\r\n")
        assert told.status in (400, 413, 501)
        refusal(told.body, told.status)
        assert not engine.hits


@pytest.mark.parametrize(
    "line",
    [
        *("Transfer-Encoding: xchunked", "Transfer-Encoding: identity"),
        *("Transfer-Encoding: chunked, identity", "Transfer-Encoding: gzip, chunked"),
        *("Transfer-Encoding: \x0bchunked", "Transfer-Encoding: chunked\r\n" + TE),
    ],
)
def test_codings_of_a_body_that_nginx_does_not_do(engine: Engine, line: str) -> None:
    with attacked(engine) as nginx:
        told = send(nginx, head(line), chunk(BODY) + b"0\r\n\r\n")
        assert told.status in (400, 501)
        refusal(told.body, told.status)
        assert not engine.hits


def test_a_header_that_others_read_otherwise_is_no_header(engine: Engine) -> None:
    """A name with a space or an underscore, or in a folded line, reaches no engine."""
    with attacked(engine) as nginx:
        told = send(nginx, head(CL, "Transfer_Encoding: chunked"), BODY)
        assert told.status == 200
        assert "transfer_encoding" not in engine.hits[0].headers
        engine.hits.clear()


@pytest.mark.parametrize(
    "body", [b"5;\r\nx", b"-1\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b"\r\n0\r\n\r\n"]
)
def test_broken_chunks(engine: Engine, body: bytes) -> None:
    with attacked(engine) as nginx:
        hurried(nginx, "client_body_timeout 30s;", "client_body_timeout 1s;")
        told = send(nginx, head(TE), body)
        assert told.status in (0, 400, 408)
        assert not engine.hits


def test_what_follows_a_body_is_a_request_of_its_own(engine: Engine) -> None:
    """The second one shows no key, and does not inherit that of the first."""
    second = b"POST %s HTTP/1.1\r\nHost: gw\r\nContent-Length: 2\r\n\r\n{}" % CHAT.encode()
    with attacked(engine) as nginx:
        with socket.create_connection(("127.0.0.1", nginx.port), 20) as connection:
            connection.sendall(head(CL) + BODY + second)
            first = http.client.HTTPResponse(connection)
            first.begin()
            assert first.status == 200
            # http.client reads ahead: what it has not used is in its buffer
            data = first.fp.read(int(first.headers["Content-Length"])) and first.fp
            assert data.readline().split()[1] == b"401"
        assert [h.body for h in engine.hits] == [BODY]


# Two parsers


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"model":"m","model":"other"}', "other"),
        ('{"model":"other","model":"m"}', "m"),
        ('{"model":"m","mod\\u0065l":"other"}', "other"),
        ('{"model":"m","x":{"model":"other"}}', "m"),
        ('{"model":"m","x":"\\",\\"model\\":\\"other\\""}', "m"),
        ('{"model":"m","Model":"other"}', "m"),
        ('{"model":"m","model ":"other"}', "m"),
        ('\ufeff{"model":"other"}', None),
        ('{"model":"oth\\u0065r"}', "other"),
    ],
)
def test_the_model_is_the_one_that_the_engine_reads(
    engine: Engine, body: str, name: str | None
) -> None:
    """Python's json is the engine's parser; the gateway must route by what it reads."""
    with Engine("b") as other, attacked(engine, other) as nginx:
        status, _, data = nginx.ask("POST", CHAT, body.encode(), MINE)
        assert status == 200
        served = "m" if json.loads(data)["engine"] == "a" else "other"
        assert served == json.loads(body.encode())["model"]
        assert name is None or served == name


# TLS and HTTP/2


def test_plain_http_on_the_tls_port(engine: Engine) -> None:
    with attacked(engine, secure=True) as nginx:
        assert "plain HTTP on a TLS port" in send(nginx, head(CL), BODY).refused(400)
        assert not engine.hits


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_tls_is_refused(engine: Engine) -> None:
    with attacked(engine, secure=True) as nginx:
        versions = {}
        for version in (
            ssl.TLSVersion.TLSv1,
            ssl.TLSVersion.TLSv1_1,
            ssl.TLSVersion.TLSv1_2,
            ssl.TLSVersion.TLSv1_3,
        ):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_ciphers("ALL:@SECLEVEL=0")  # else this side would not offer the old ones
            context.minimum_version = context.maximum_version = version
            with socket.create_connection(("127.0.0.1", nginx.port), 20) as plain:
                try:
                    with context.wrap_socket(plain) as secured:
                        versions[version.name] = (secured.cipher() or ("none",))[0]
                except (ssl.SSLError, ConnectionResetError) as error:
                    versions[version.name] = type(error).__name__
        assert versions["TLSv1"] == versions["TLSv1_1"] == "SSLError"
        assert versions["TLSv1_2"].startswith("ECDHE-")
        assert versions["TLSv1_3"].startswith("TLS_")


def test_http2_serves_and_streams(engine: Engine) -> None:
    engine.chunk_gap, engine.chunks = 0.1, 600
    with attacked(engine, secure=True) as nginx, Http2(nginx.port) as client:
        plain = client.wait(client.request(CHAT, BODY, lower(MINE)))
        assert (plain.status, json.loads(plain.body)["engine"]) == (200, "a")
        unknown = client.wait(client.request(CHAT, BODY))
        assert "API key" in refusal(unknown.body, 401)
        number = client.request(CHAT, b'{"model":"m","stream":true}', lower(MINE))
        stream = client.streams[number]
        while not stream.body:
            client.step()
        assert engine.in_flight == 1  # a minute is left of the answer
        engine.chunk_gap = 0
        assert client.wait(number).body.endswith(b"data: [DONE]\n\n")
        engine.hits.clear()


def test_http2_requests_without_a_length_or_with_a_wrong_one(engine: Engine) -> None:
    with attacked(engine, secure=True) as nginx, Http2(nginx.port) as client:
        for length in (5, len(BODY) + 5):
            answer = client.wait(client.request(CHAT, BODY, lower(MINE), length=length))
            assert answer.status == 400 or answer.reset is not None
        answer = client.wait(client.request(CHAT, BODY, {**lower(MINE), "transfer-encoding": "x"}))
        assert answer.status in (400, 501) or answer.reset is not None
        assert not engine.hits


def test_http2_rapid_reset(engine: Engine) -> None:
    """Two thousand requests given up as soon as they are made; others are served meanwhile."""
    engine.first_byte = 0.05
    with attacked(engine, secure=True) as nginx:
        asked = 0
        for _ in range(4):
            with Http2(nginx.port) as client, contextlib.suppress(ConnectionError, ssl.SSLError):
                for _ in range(500):
                    number = client.request(CHAT, BODY, lower(MINE))
                    client.reset(number)
                    asked += 1
            assert nginx.chat("m", headers=MINE)[0] == 200
        assert asked > 500
        # nothing is left of them
        wait_for(lambda: not engine.in_flight)
        wait_for(lambda: not any(i["in_flight"] for i in nginx.instances().values()))


def test_http2_client_that_leaves_frees_what_it_held(engine: Engine) -> None:
    """Working at the engine, and waiting while no instance is ready."""
    engine.answer = "hang"
    with attacked(engine, secure=True) as nginx:
        with Http2(nginx.port) as client:
            client.reset(client.request(CHAT, BODY, lower(MINE)))
            number = client.request(CHAT, BODY, lower(MINE))
            wait_for(lambda: engine.in_flight)
            client.reset(number)
            wait_for(lambda: not engine.in_flight)
            wait_for(lambda: not any(i["in_flight"] for i in nginx.instances().values()))
            engine.ready = False
            nginx.wait_ready(all=False)
            number = client.request(CHAT, BODY, lower(MINE))
            wait_for(lambda: nginx.status()["held"] == 1)
            client.reset(number)
            wait_for(lambda: nginx.status()["held"] == 0)
            number = client.request(CHAT, BODY, lower(MINE))
            wait_for(lambda: nginx.status()["held"] == 1)
        wait_for(lambda: nginx.status()["held"] == 0)  # the whole connection closed
        engine.ready, engine.answer = True, "serve"
        nginx.wait_ready(all=True)
