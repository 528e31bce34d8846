"""Keys, limits, tokens and slow clients at the gateway: real nginx with our Lua, on loopback.

Every engine here is the stand-in of tests/stubs/engine.py: these are tests of faults and timing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.test_gateway_nginx import error, running
from tests.stubs.engine import Engine, Hit
from tests.stubs.gateway import Nginx, available, wait_for
from tests.unit.gateway.fleet import pool, spec
from vllm_fleet import gateway
from vllm_fleet.spec.model import ApiKey

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="needs root, nginx and its Lua module"),
    pytest.mark.timeout(120),
]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("a") as a:
        yield a


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def key(name: str, **more: Any) -> ApiKey:
    """The key `sk-NAME` of NAME."""
    return ApiKey(name=name, key=f"sk-{name}", **more)


def put_keys(nginx: Nginx, keys: Sequence[ApiKey]) -> None:
    """As a deploy that changes keys alone: one file, renamed into its place, and no reload."""
    files = gateway.files(spec(), [], {}, keys)
    (file,) = [file for file in files if file.path == gateway.KEYS]
    nginx.put([file])


def logs(nginx: Nginx) -> str:
    return "".join(path.read_text() for path in (nginx.root / "var/log/nginx").iterdir())


# Keys


def test_expired_keys_and_keys_of_other_models(engine: Engine) -> None:
    keys = [
        key("all"),
        ApiKey(name="small", sha256=hashlib.sha256(b"sk-small").hexdigest(), models=("two",)),
        key("alias", models=("uno",)),
        key("past", expires="2020-12-31"),
        key("today", expires=time.strftime("%Y-%m-%d", time.gmtime())),
    ]
    pools = [pool("one", [engine.port], aliases=("uno",)), pool("two", [engine.port])]
    with running(pools, keys=keys) as nginx:

        def ask(name: str, model: str) -> int:
            return nginx.chat(model, headers=bearer(f"sk-{name}"))[0]

        assert [ask("all", model) for model in ("one", "uno", "two", "none")] == [200] * 3 + [404]
        assert [ask("small", model) for model in ("one", "uno", "two")] == [403, 403, 200]
        assert [ask("alias", model) for model in ("one", "uno", "two")] == [200, 200, 403]
        assert ask("today", "one") == 200
        status, headers, got = nginx.chat("one", headers=bearer("sk-past"))
        text = "The API key of past expired (2020-12-31). Ask the operator for a new one."
        assert (status, got) == (401, error(401, text, "AuthenticationError"))
        assert headers["www-authenticate"] == "Bearer"
        _, _, got = nginx.chat("one", headers=bearer("sk-small"))
        text = "The API key of small is not for the model `one`."
        assert got == error(403, text, "PermissionDeniedError", "model")

        def listed(name: str) -> list[str]:
            data = nginx.ask("GET", "/v1/models", headers=bearer(f"sk-{name}"))[2]
            return [model["id"] for model in json.loads(data)["data"]]

        assert listed("all") == ["one", "uno", "two"]
        assert listed("small") == ["two"]
        assert nginx.ask("GET", "/v1/models/two", headers=bearer("sk-small"))[0] == 200
        assert nginx.ask("GET", "/v1/models/uno", headers=bearer("sk-small"))[0] == 403
        # who asked in vain is known by name, and no key stands in a log

        def refused(status: int) -> set[str]:
            return {line["key"] for line in nginx.access() if line["status"] == status}

        wait_for(lambda: refused(403) == {"small", "alias"})
        wait_for(lambda: refused(401) == {"past"})
        assert "sk-" not in logs(nginx)
        assert 'key_refused_total{reason="expired"} 1' in nginx.metrics()
        assert 'key_refused_total{reason="model"} 5' in nginx.metrics()


def test_keys_change_without_a_reload(engine: Engine) -> None:
    with running([pool("m", [engine.port])], keys=[key("old"), key("both")]) as nginx:

        def status(name: str) -> int:
            return nginx.chat("m", headers=bearer(f"sk-{name}"))[0]

        def everywhere(name: str, wanted: int) -> bool:
            """Whether every worker answers so; which one takes a connection is chance."""
            return all(status(name) == wanted for _ in range(12))

        workers = nginx.workers
        engine.chunk_gap, engine.chunks = 0.1, 600
        with contextlib.closing(nginx.connect()) as connection:
            body = b'{"model":"m","stream":true}'
            connection.request("POST", "/v1/chat/completions", body, bearer("sk-old"))
            stream = connection.getresponse()
            put_keys(nginx, [key("new"), key("both")])
            wait_for(lambda: everywhere("new", 200) and everywhere("old", 401))
            assert status("both") == 200
            assert engine.in_flight == 1
            engine.chunk_gap = 0
            assert stream.read().endswith(b"data: [DONE]\n\n")  # what runs is not cut
        assert nginx.workers == workers
        wait_for(lambda: "keys.json changed: the keys in it hold from now on" in nginx.errors())
        # a file that cannot be used changes nothing, and is told
        path = nginx.root / gateway.KEYS.lstrip("/")
        good = path.read_text()
        for bad in ("{", '{"keys": []}', '{"required": true, "keys": [{"name": "x"}]}'):
            before = nginx.errors().count("keys.json changed and cannot be used")
            path.write_text(bad)
            wait_for(
                lambda seen=before: (
                    nginx.errors().count("keys.json changed and cannot be used") > seen
                )
            )
            assert (status("new"), status("old")) == (200, 401)
        path.unlink()
        wait_for(lambda: "keys.json cannot be read again" in nginx.errors())
        assert (status("new"), status("old")) == (200, 401)
        path.write_text(good.replace("new", "newer"))
        wait_for(lambda: everywhere("new", 200))


def test_a_gateway_without_keys_asks_for_none(engine: Engine) -> None:
    with running([pool("m", [engine.port])]) as nginx:
        assert nginx.chat("m")[0] == 200
        assert nginx.chat("m", headers=bearer("whatever"))[0] == 200
        put_keys(nginx, [key("team")])
        wait_for(lambda: all(nginx.chat("m")[0] == 401 for _ in range(12)))


def test_a_broken_keys_file_refuses_the_reload(engine: Engine) -> None:
    with running([pool("m", [engine.port])], keys=[key("team")]) as nginx:
        workers = nginx.workers
        (nginx.root / gateway.KEYS.lstrip("/")).write_text('{"required": true}')
        os.kill(nginx.pid, signal.SIGHUP)
        wait_for(lambda: "keys.json: " in nginx.errors())
        assert "run the deploy for this gateway again" in nginx.errors()
        assert nginx.workers == workers
        assert nginx.chat("m", headers=bearer("sk-team"))[0] == 200


# Limits


def test_requests_a_minute_over_all_workers(engine: Engine) -> None:
    keys = [key("slow", requests_per_minute=20), key("other")]
    with running([pool("m", [engine.port])], keys=keys) as nginx:
        began = time.monotonic()
        with ThreadPoolExecutor(16) as executor:
            asked = [executor.submit(nginx.chat, "m", headers=bearer("sk-slow")) for _ in range(60)]
            answers = [each.result() for each in asked]
        passed = time.monotonic() - began
        served = sum(status == 200 for status, _, _ in answers)
        assert 20 <= served <= 20 + passed / 3 + 1
        assert {status for status, _, _ in answers} == {200, 429}
        refused = [answer for answer in answers if answer[0] == 429]
        for _, headers, got in refused:
            assert 1 <= int(headers["retry-after"]) <= 3
            assert got["error"]["type"] == "RateLimitError"
            assert "slow has 20 requests a minute" in got["error"]["message"]
            assert headers["x-ratelimit-limit-requests"] == "20"
            assert headers["x-ratelimit-remaining-requests"] == "0"
        left = {int(h["x-ratelimit-remaining-requests"]) for s, h, _ in answers if s == 200}
        assert {0, 19} <= left
        assert nginx.chat("m", headers=bearer("sk-other"))[0] == 200
        assert len(engine.hits) == served + 1
        assert f'limited_total{{key="slow",limit="requests"}} {60 - served}' in nginx.metrics()


def test_retry_after_is_true(engine: Engine) -> None:
    with running([pool("m", [engine.port])], keys=[key("k", requests_per_minute=30)]) as nginx:

        def ask() -> tuple[int, dict[str, str], Any]:
            return nginx.chat("m", headers=bearer("sk-k"))

        headers = wait_for(lambda: (got := ask())[0] == 429 and got[1])
        time.sleep(int(headers["retry-after"]))
        assert ask()[0] == 200


def test_tokens_a_minute(engine: Engine) -> None:
    """Charged by estimate, settled by usage, plain and streamed; refused when used up."""
    engine.prompt_tokens, engine.completion_tokens, engine.chunks = 1000, 2000, 40
    keys = [key("k", tokens_per_minute=6000), key("free")]
    with running([pool("m", [engine.port])], keys=keys) as nginx:

        def ask(**more: Any) -> tuple[int, dict[str, str], bytes]:
            body = json.dumps({"model": "m", "messages": [], **more}).encode()
            got = nginx.ask("POST", "/v1/chat/completions", body, bearer("sk-k"))
            nginx.logged(got[1]["x-request-id"])  # settled then, which is after the answer
            return got

        def left(headers: dict[str, str]) -> int:
            return int(headers["x-ratelimit-remaining-tokens"])

        began = time.monotonic()
        status, headers, _ = ask()
        assert (status, headers["x-ratelimit-limit-tokens"]) == (200, "6000")
        assert 6000 - 530 <= left(headers) <= 6000 - 500  # an estimate of a short prompt
        status, headers, _ = ask(stream=True)
        assert status == 200
        refilled = (time.monotonic() - began) * 100 + 1
        assert 2455 <= left(headers) <= 2495 + refilled  # 3000 used, and the estimate
        status, headers, data = ask(max_tokens=10**6)
        assert status == 200  # the estimate allows for no more than a usual answer
        assert json.loads(data)["usage"]["total_tokens"] == 3000
        status, headers, data = ask()
        refilled = (time.monotonic() - began) * 100 + 1
        wait = int(headers["retry-after"])
        assert status == 429
        owed = 3000 + 1040 + 3000 + 515 - 6000
        assert (owed - refilled - 20) / 100 <= wait <= (owed + 30) / 100 + 1
        assert f"Try again in {wait} s" in json.loads(data)["error"]["message"]
        status, headers, data = ask(messages=[{"role": "user", "content": "word " * 20_000}])
        assert status == 429
        assert "retry-after" not in headers
        assert headers["x-should-retry"] == "false"
        assert "Make it smaller" in json.loads(data)["error"]["message"]
        counted = {
            'tokens_total{pool="m",key="k",kind="prompt"} 3000',
            'tokens_total{pool="m",key="k",kind="completion"} 4040',
            'limited_total{key="k",limit="tokens"} 2',
        }
        wait_for(lambda: all(line in nginx.metrics() for line in counted))
        wait_for(lambda: len(nginx.access()) == 5)
        lines = [(x["prompt_tokens"], x["completion_tokens"]) for x in nginx.access()]
        assert sorted(lines) == [(0, 0), (0, 0), (1000, 40), (1000, 2000), (1000, 2000)]
        checked = subprocess.run(
            ["promtool", "check", "metrics"],
            input=nginx.metrics(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_usage_is_asked_for_and_hidden(engine: Engine, path: str) -> None:
    with running([pool("m", [engine.port])], keys=[key("k")]) as nginx:

        def ask(**more: Any) -> str:
            body = json.dumps({"model": "m", "stream": True, "text": "模\u2028", **more})
            got = nginx.ask("POST", f"/v1/{path}", body.encode(), bearer("sk-k"))
            assert got[0] == 200
            return got[2].decode()

        asked: dict[str, Any] = {"stream_options": {"include_usage": True}}
        plain, shown = ask(), ask(**asked)
        no = ask(stream_options={"include_usage": False})
        assert plain == no
        assert '"usage"' not in plain
        assert plain.count("data: ") == engine.chunks + 1
        assert shown.count('"usage"') == 1
        assert shown.replace(re.findall(r'data: .*"usage".*\n\n', shown)[0], "") == plain
        assert [hit.json["stream_options"]["include_usage"] for hit in engine.hits] == [True] * 3
        assert {hit.json["text"] for hit in engine.hits} == {"模\u2028"}
        total = f'tokens_total{{pool="m",key="k",kind="completion"}} {3 * engine.chunks}'
        wait_for(lambda: total in nginx.metrics())


def test_usage_in_a_body_that_was_spooled(engine: Engine) -> None:
    with running([pool("m", [engine.port])]) as nginx:
        body = json.dumps({"model": "m", "stream": True, "image": "A" * 5_000_000}).encode()
        status, _, data = nginx.ask("POST", "/v1/chat/completions", body)
        assert (status, b'"usage"' in data) == (200, False)
        assert engine.hits[0].json == {
            **json.loads(body),
            "stream_options": {"include_usage": True},
        }
        wait_for(lambda: 'tokens_total{pool="m",key="-",kind="prompt"} 1' in nginx.metrics())


def test_what_no_instance_answered_costs_no_tokens(engine: Engine) -> None:
    engine.stop()
    keys = [key("k", tokens_per_minute=1000, concurrent=2)]
    with running([pool("m", [engine.port])], keys=keys, ready=False, hold_seconds=0) as nginx:
        for _ in range(5):
            status, headers, _ = nginx.chat("m", headers=bearer("sk-k"))
            assert status == 503
            assert int(headers["x-ratelimit-remaining-tokens"]) > 400
            nginx.logged(headers["x-request-id"])
        assert "tokens_total{" not in nginx.metrics()


# Requests at once, clients that leave, clients that read slowly


class Client:
    """A streamed chat over a bare socket, of which nothing is read until it is asked for."""

    def __init__(self, nginx: Nginx, name: str) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", nginx.port))
        body = b'{"model":"m","stream":true}'
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer sk-{name}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)

    def __enter__(self) -> socket.socket:
        return self.socket

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def first_hit(engine: Engine) -> Hit:
    hit: Hit = wait_for(lambda: engine.hits and engine.hits[0])
    return hit


def idle(nginx: Nginx) -> bool:
    return not any(i["in_flight"] for i in nginx.instances().values())


def test_requests_at_once_and_clients_that_leave(engine: Engine) -> None:
    keys = [key("k", concurrent=2), key("other")]
    with running([pool("m", [engine.port])], keys=keys) as nginx:

        def ask(name: str) -> tuple[int, dict[str, str], Any]:
            return nginx.chat("m", headers=bearer(f"sk-{name}"))

        engine.answer = "hang"  # before the first byte
        with Client(nginx, "k"), Client(nginx, "k"):
            wait_for(lambda: len(engine.hits) == 2)
            status, headers, got = ask("k")
            assert (status, headers["retry-after"]) == (429, "1")
            text = (
                "The API key of k may have 2 requests at once and has them. Try again when one "
                "has ended."
            )
            assert got == error(429, text, "RateLimitError")
            engine.answer = "serve"
            assert ask("other")[0] == 200
        wait_for(lambda: all(hit.aborted for hit in engine.hits[:2]))
        wait_for(lambda: ask("k")[0] == 200)
        wait_for(lambda: idle(nginx))
        # in the middle of a stream
        engine.chunk_gap, engine.chunks = 0.1, 600
        before = len(engine.hits)
        with Client(nginx, "k") as one, Client(nginx, "k") as two:
            assert one.recv(10) == two.recv(10) == b"HTTP/1.1 2"
            wait_for(lambda: len(engine.hits) == before + 2)
            assert ask("k")[0] == 429
        wait_for(lambda: all(hit.aborted for hit in engine.hits[before:]))
        wait_for(lambda: ask("k")[0] == 200)


def test_a_killed_worker_leaves_no_request_of_a_key_behind(engine: Engine) -> None:
    engine.chunk_gap, engine.chunks = 0.1, 600
    with (
        running([pool("m", [engine.port])], keys=[key("k", concurrent=1)]) as nginx,
        Client(nginx, "k") as client,
    ):
        client.recv(10)
        assert nginx.chat("m", headers=bearer("sk-k"))[0] == 429
        for worker in nginx.workers:
            os.kill(worker, signal.SIGKILL)

        def served() -> bool:
            with contextlib.suppress(OSError):
                return bool(nginx.chat("m", headers=bearer("sk-k"))[0] == 200)
            return False

        wait_for(served, 20)
        assert "died with key:k at 1; taken off the count" in nginx.errors()


def test_a_client_that_takes_nothing_is_cut_off(engine: Engine) -> None:
    """It holds up nobody, and after a while its place is free and the engine's work ended."""
    engine.chunk_gap, engine.chunks, engine.padding = 0, 10_000, 100_000
    keys = [key("k", concurrent=1), key("other")]
    with (
        running([pool("m", [engine.port])], keys=keys, stalled_client_seconds=2) as nginx,
        Client(nginx, "k"),
    ):
        hit = first_hit(engine)
        others = 0
        while not hit.aborted:
            assert nginx.chat("m", headers=bearer("sk-other"))[0] == 200
            others += 1
            time.sleep(0.02)
        assert others > 10
        assert time.monotonic() - hit.began > 1.9
        wait_for(lambda: idle(nginx))
        engine.chunks = 1
        wait_for(lambda: nginx.chat("m", headers=bearer("sk-k"))[0] == 200)


def test_a_client_that_reads_drop_by_drop_is_cut_off_at_the_longest_answer(engine: Engine) -> None:
    engine.chunk_gap, engine.chunks = 0.02, 10_000
    keys = [key("k", concurrent=1)]
    with (
        running([pool("m", [engine.port])], keys=keys, longest_answer=3) as nginx,
        Client(nginx, "k") as client,
    ):
        hit = first_hit(engine)
        while not hit.aborted:
            client.recv(10)
            time.sleep(0.05)
        assert time.monotonic() - hit.began > 2.9
        wait_for(lambda: "took longer than gateway.longest_answer" in nginx.errors())
        wait_for(lambda: idle(nginx))
        engine.chunks = 1
        assert nginx.chat("m", headers=bearer("sk-k"))[0] == 200
        # what was cut is charged by its chunks
        line = wait_for(nginx.access)[0]
        assert line["completion_tokens"] > 20
