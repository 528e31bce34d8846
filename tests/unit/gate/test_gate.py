"""The ASGI gate, around small apps that stand in for vLLM's."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fleet.gate.gate import Gate, InFlight

CHAT = "/v1/chat/completions"
Inner = Callable[[Any, Any, Any], Awaitable[None]]


class Engine:
    """vLLM's engine client, as far as the gate looks at it."""

    errored = False


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hi"})


class House:
    """A gate with its folder, an engine, and a way to ask."""

    def __init__(self, run: Path, app: Inner = answer) -> None:
        self.run = run
        self.engine = Engine()
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))
        self.gate = Gate(app)

    def open(self) -> None:
        (self.run / "ready").write_text("1")

    async def ask(self, path: str, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        raw = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "app": self.app}
        await self.gate(scope, receive, send)
        return sent

    def once(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
        """(status, headers, body) of one request."""
        head, *rest = asyncio.run(self.ask(path, headers))
        body = b"".join(message.get("body", b"") for message in rest)
        return head["status"], dict(head["headers"]), body

    def ready(self) -> tuple[int, dict[str, Any]]:
        status, _, body = self.once("/fleet/ready")
        return status, json.loads(body)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEET_RUN", str(tmp_path))
    (tmp_path / "token").write_text("s3cret\n")
    return tmp_path


def is_marked(status: int, headers: Any, body: bytes) -> bool:
    error = json.loads(body)["error"]
    return (
        status == 503
        and headers[b"x-fleet-gate"] == b"not-ready"
        and headers[b"retry-after"] == b"1"
        and headers[b"content-length"] == b"%d" % len(body)
        and error["code"] == 503
        and set(error) == {"message", "type", "param", "code"}
    )


def test_cold_then_ready_then_draining(run: Path) -> None:
    house = House(run)
    assert is_marked(*house.once(CHAT))
    assert house.ready() == (503, {"ready": False, "in_flight": 0})
    house.open()
    assert house.once(CHAT) == (200, {}, b"hi")
    assert house.ready() == (200, {"ready": True, "in_flight": 0})
    (run / "ready").unlink()
    assert is_marked(*house.once(CHAT)), "a removed ready file holds from the next request on"


def test_dead_engine(run: Path) -> None:
    house = House(run)
    house.open()
    house.engine.errored = True
    assert is_marked(*house.once(CHAT))
    assert is_marked(*house.once(CHAT, {"X-Fleet-Token": "s3cret"}))
    assert house.ready() == (503, {"ready": False, "in_flight": 0})
    assert house.once("/metrics")[0] == 200


def test_without_an_engine_client_nothing_is_dead(run: Path) -> None:
    house = House(run)
    house.open()
    for app in (None, SimpleNamespace(), SimpleNamespace(state=SimpleNamespace())):
        house.app = app  # type: ignore[assignment]
        assert house.once(CHAT)[0] == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_open_at_any_time(run: Path, path: str) -> None:
    assert House(run).once(path)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        *(CHAT, "/v1/models", "/v1/embeddings", "/v1/rerank", "/v1/messages/count_tokens"),
        *("/v1/responses", "/v1/responses/resp_a1-b", "/v1/responses/resp_a1/cancel"),
    ],
)
def test_allowed_paths(run: Path, path: str) -> None:
    house = House(run)
    house.open()
    assert house.once(path)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/docs", "/openapi.json", "/version", "/ping", "/load", "/tokenize", "/V1/models"),
        *("/invocations", "/inference/v1/generate", "/v1/load_lora_adapter", "/pause", "/v1"),
        *("//v1/models", "/v1/models/../../tokenize", "/metrics/x", "/fleet/ready/", f"{CHAT}/"),
        *("/v1/responses/a/b", "/v1/responses/../x", "/v1/responses/a\n"),
    ],
)
@pytest.mark.parametrize("ready", [True, False])
def test_everything_else_is_not_there(run: Path, path: str, ready: bool) -> None:
    house = House(run)
    if ready:
        house.open()
    status, headers, body = house.once(path)
    assert (status, json.loads(body)["error"]["type"]) == (404, "NotFoundError")
    assert b"x-fleet-gate" not in headers, "another instance would say the same"


def test_token_opens_the_gate_to_the_warm_up_alone(run: Path) -> None:
    house = House(run)
    assert house.once(CHAT, {"X-Fleet-Token": "s3cret"})[0] == 200
    assert house.once("/version", {"X-Fleet-Token": "s3cret"})[0] == 200
    assert house.once("/tokenize", {"X-Fleet-Token": "s3cret"})[0] == 404
    for wrong in ("", "s3cre", "s3cret ", "S3CRET"):
        assert is_marked(*house.once(CHAT, {"X-Fleet-Token": wrong}))


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_no_token_made_lets_nobody_through(run: Path, content: str | None) -> None:
    (run / "token").unlink()
    if content is not None:
        (run / "token").write_text(content)
    assert is_marked(*House(run).once(CHAT, {"X-Fleet-Token": ""}))


def test_without_its_folder_it_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEET_RUN", raising=False)
    with pytest.raises(RuntimeError, match="FLEET_RUN is not set"):
        Gate(answer)


def test_counts_clients_until_their_answer_is_complete(run: Path) -> None:
    async def story() -> list[int]:
        release = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await release.wait()
            await send({"type": "http.response.body", "body": b"b"})

        house = House(run, slow)
        house.open()
        counts = [house.gate._in_flight.total()]
        clients = [asyncio.create_task(house.ask(CHAT)) for _ in range(3)]
        warm_up = asyncio.create_task(house.ask(CHAT, {"X-Fleet-Token": "s3cret"}))
        await asyncio.sleep(0)
        counts.append(house.gate._in_flight.total())
        clients[0].cancel()  # a client that left
        await asyncio.sleep(0)
        counts.append(house.gate._in_flight.total())
        release.set()
        await asyncio.gather(*clients[1:], warm_up)
        return [*counts, house.gate._in_flight.total()]

    assert asyncio.run(story()) == [0, 3, 2, 0]


def test_a_raising_app_is_not_counted_for_ever(run: Path) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("bug")

    house = House(run, broken)
    house.open()
    with pytest.raises(ValueError, match="bug"):
        house.once(CHAT)
    assert house.ready()[1] == {"ready": True, "in_flight": 0}


def test_sums_over_api_servers_and_forgets_dead_ones(run: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "30"])
    try:
        (run / f"in-flight.{sleeper.pid}").write_bytes(struct.pack("q", 5))
        counter = InFlight(str(run))
        counter.add(1)
        counter.add(1)
        assert counter.total() == 7
    finally:
        sleeper.kill()
        sleeper.wait()
    assert counter.total() == 2
    (run / f"in-flight.{os.getppid()}").write_bytes(b"")  # just being made
    assert counter.total() == 2


def dies(messages: list[dict[str, Any]], *, alive_until: int, error: bool = False) -> Inner:
    """An app that sends these, its engine dead from message `alive_until` on."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for index, message in enumerate(messages):
            if index == alive_until:
                scope["app"].state.engine_client.errored = True
            await send(message)
        if alive_until >= len(messages):
            scope["app"].state.engine_client.errored = True
        if error:
            raise RuntimeError("engine dead")

    return app


def start(status: int) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]}


def body(content: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


SSE_ERROR = body(b'data: {"error": {"message": "EngineCore encountered an issue"}}\n\n', True)
DONE = body(b"data: [DONE]\n\n", True)


@pytest.mark.parametrize(
    "app",
    [
        dies([start(500), body(b'{"error": {}}')], alive_until=0),
        dies([start(200), SSE_ERROR, DONE, body(b"")], alive_until=0),
        dies([start(200), SSE_ERROR, DONE, body(b"")], alive_until=1),
        dies([start(200)], alive_until=1, error=True),
        dies([start(200)], alive_until=1),
        dies([], alive_until=0, error=True),
        dies([], alive_until=0),
    ],
)
def test_engine_death_before_the_first_byte_is_marked(run: Path, app: Inner) -> None:
    house = House(run, app)
    house.open()
    assert is_marked(*house.once(CHAT))
    assert house.ready()[1]["in_flight"] == 0


def test_engine_death_after_the_first_byte_is_told_as_vllm_tells_it(run: Path) -> None:
    messages = [start(200), body(b"data: {}\n\n", True), SSE_ERROR, DONE, body(b"")]
    house = House(run, dies(messages, alive_until=2))
    house.open()
    assert asyncio.run(house.ask(CHAT)) == messages


@pytest.mark.parametrize(
    "messages",
    [
        [start(500), body(b'{"error": {}}')],
        [start(400), body(b'{"error": {}}')],
        [start(200), body(b'{"choices": [{"text": "an \\"error\\""}]}')],
        [start(204), body(b"")],
        [start(200), SSE_ERROR, body(b"")],
    ],
)
def test_answers_of_a_living_engine_pass_unchanged(
    run: Path, messages: list[dict[str, Any]]
) -> None:
    house = House(run, dies(messages, alive_until=99))
    house.open()
    assert asyncio.run(house.ask(CHAT)) == messages


def test_a_whole_answer_of_an_engine_that_just_died_passes(run: Path) -> None:
    messages = [start(200), body(b'{"choices": [{"text": "done"}]}')]
    house = House(run, dies(messages, alive_until=1))
    house.open()
    assert asyncio.run(house.ask(CHAT)) == messages


def test_lifespan_passes_and_websockets_are_refused(run: Path) -> None:
    seen: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    gate = Gate(inner)
    asyncio.run(gate({"type": "lifespan"}, receive, send))
    asyncio.run(gate({"type": "websocket", "path": "/v1/realtime"}, receive, send))
    assert seen == ["lifespan"]
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_costs_little(run: Path) -> None:
    """Gate and count together stay far below what a token takes (milliseconds)."""
    house = House(run)
    house.open()

    async def many(ask: Callable[[], Awaitable[Any]]) -> float:
        begun = time.perf_counter()
        for _ in range(2000):
            await ask()
        return (time.perf_counter() - begun) / 2000

    async def bare() -> None:
        async def send(message: Any) -> None:
            pass

        await answer({}, None, send)

    gated = min(asyncio.run(many(lambda: house.ask(CHAT))) for _ in range(3))
    plain = min(asyncio.run(many(bare)) for _ in range(3))
    assert gated - plain < 0.02
