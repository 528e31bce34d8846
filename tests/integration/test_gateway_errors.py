"""Every refusal of the gateway, in the format of OpenAI's errors, and documented.

Real nginx; the engines are the stand-in of tests/stubs/engine.py, as these are faults. To add a
refusal: one line in REFUSALS, and its row in the table of docs/operations.md.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_gateway_nginx import running
from tests.ports import free_ports
from tests.stubs.engine import Answer, Engine
from tests.stubs.gateway import Nginx, available
from tests.unit.gateway.fleet import pool
from vllm_fleet.spec.model import ApiKey

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="needs root, nginx and its Lua module"),
    pytest.mark.timeout(120),
]

ROOT = Path(__file__).parents[2]
KEY, NARROW, SLOW = "sk-errors-1", "sk-errors-2", "sk-errors-3"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Got:
    """An answer as a client sees it."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Scene:
    """One gateway with pools that each fail in a way of their own, and are named so."""

    nginx: Nginx
    engines: dict[str, Engine]

    def ask(
        self,
        body: bytes = b"{}",
        path: str = CHAT,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> Got:
        return Got(*self.nginx.ask(method, path, body, {**_bearer(), **(headers or {})}))

    def chat(self, model: str, **more: Any) -> Got:
        return self.ask(json.dumps({"model": model, "messages": [], **more}).encode())

    def raw(self, *lines: str) -> Got:
        """A request in these very lines, which a client library would not send."""
        with socket.create_connection(("127.0.0.1", self.nginx.port), timeout=10) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode())
            response = http.client.HTTPResponse(client)
            response.begin()
            headers = {key.lower(): value for key, value in response.getheaders()}
            return Got(response.status, headers, response.read())


def _bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    answers: dict[str, Answer] = {
        "good": "serve",
        "closing": "close",
        "busy": "busy",
        "hanging": "hang",
    }
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(name, answer=answer))
            for name, answer in answers.items()
        }
        pools = [pool(name, [engine.port]) for name, engine in engines.items()]
        pools += [pool("down", free_ports(1)), pool("empty", [])]
        nginx = stack.enter_context(
            running(
                pools,
                keys=(
                    ApiKey(name="app", key=KEY),
                    ApiKey(name="narrow", key=NARROW, models=("good",)),
                    ApiKey(name="slow", key=SLOW, requests_per_minute=1),
                ),
                ready=False,
                hold_seconds=1,
                longest_answer=1,
                max_body_mib=2,
            )
        )
        nginx.wait_ready(**{f"{name}_1": True for name in engines})
        yield Scene(nginx, engines)


def _spool_gone(scene: Scene) -> Got:
    """The disk that large bodies are spooled to is gone."""
    spool, aside = scene.nginx.root / "body", scene.nginx.root / "aside"
    spool.rename(aside)
    try:
        return scene.chat("good", padding="x" * 1_800_000)
    finally:
        aside.rename(spool)


def _used_up(scene: Scene) -> Got:
    """A request more than the key has in a minute; the first one is admitted."""
    got = [scene.ask(b'{"model":"empty"}', headers=_bearer(SLOW)) for _ in range(2)]
    assert got[0].status == 503
    return got[1]


@dataclass(frozen=True)
class Refusal:
    """What is asked, and what must come back."""

    name: str
    status: int
    kind: str
    says: str  # a regular expression in the message
    ask: Callable[[Scene], Got]
    param: str | None = None
    headers: tuple[str, ...] = ()  # that must be there


REFUSALS: Sequence[Refusal] = (
    Refusal(
        "not JSON",
        400,
        "BadRequestError",
        "not a JSON object",
        lambda s: s.ask(b"hello"),
    ),
    Refusal(
        "no model",
        400,
        "BadRequestError",
        "`model` is required",
        lambda s: s.ask(b'{"messages":[]}'),
        param="model",
    ),
    Refusal(
        "model is a number",
        400,
        "BadRequestError",
        "must be a string",
        lambda s: s.ask(b'{"model":1}'),
        param="model",
    ),
    Refusal(
        "no host",
        400,
        "BadRequestError",
        "not valid HTTP",
        lambda s: s.raw("GET /v1/models HTTP/1.1"),
    ),
    Refusal(
        "not a request line",
        400,
        "BadRequestError",
        "not valid HTTP",
        lambda s: s.raw("hello", "Host: x"),
    ),
    Refusal(
        "two lengths",
        400,
        "BadRequestError",
        "not valid HTTP",
        lambda s: s.raw(
            f"POST {CHAT} HTTP/1.1",
            "Host: x",
            "Content-Length: 5",
            "Transfer-Encoding: chunked",
        ),
    ),
    Refusal(
        "no key",
        401,
        "AuthenticationError",
        "API key",
        lambda s: s.ask(headers={"Authorization": ""}),
        headers=("www-authenticate",),
    ),
    Refusal(
        "wrong key",
        401,
        "AuthenticationError",
        "API key",
        lambda s: s.ask(headers=_bearer("sk-nobody")),
        headers=("www-authenticate",),
    ),
    Refusal(
        "a key for other models",
        403,
        "PermissionDeniedError",
        "not for the model `down`",
        lambda s: s.ask(b'{"model":"down"}', headers=_bearer(NARROW)),
        param="model",
    ),
    Refusal(
        "unknown path",
        404,
        "NotFoundError",
        "no such path",
        lambda s: s.ask(path="/tokenize"),
    ),
    Refusal(
        "path written otherwise",
        404,
        "NotFoundError",
        "no such path",
        lambda s: s.ask(path="/v1/chat/../chat/completions"),
    ),
    Refusal(
        "unknown model",
        404,
        "NotFoundError",
        "^The model `gpt-4` does not exist",
        lambda s: s.chat("gpt-4"),
        param="model",
    ),
    Refusal(
        "unknown model, listed",
        404,
        "NotFoundError",
        "^The model `gpt-4` does not exist",
        lambda s: s.ask(path="/v1/models/gpt-4", method="GET"),
        param="model",
    ),
    Refusal(
        "wrong method",
        405,
        "MethodNotAllowedError",
        "Only POST",
        lambda s: s.ask(method="GET"),
        headers=("allow",),
    ),
    Refusal(
        "large body",
        413,
        "RequestTooLargeError",
        "body is larger",
        lambda s: s.chat("good", padding="x" * 3_000_000),
    ),
    Refusal(
        "long address",
        414,
        "RequestTooLargeError",
        "address is too long",
        lambda s: s.ask(path=f"{CHAT}?{'x' * 40_000}"),
    ),
    Refusal(
        "a key used up",
        429,
        "RateLimitError",
        "has 1 requests a minute",
        _used_up,
        headers=("retry-after", "x-ratelimit-remaining-requests"),
    ),
    Refusal(
        "large headers",
        431,
        "RequestTooLargeError",
        "headers are too large",
        lambda s: s.ask(headers={"X-Long": "x" * 40_000}),
    ),
    Refusal(
        "no room for the body",
        500,
        "InternalServerError",
        "error log",
        _spool_gone,
    ),
    Refusal(
        "the instance closes",
        502,
        "BadGatewayError",
        "closed the connection",
        lambda s: s.chat("closing"),
    ),
    Refusal(
        "the engine is busy",
        503,
        "ServiceUnavailableError",
        "too busy",
        lambda s: s.chat("busy"),
        headers=("retry-after",),
    ),
    Refusal(
        "no instance in time",
        503,
        "ServiceUnavailableError",
        "became ready within 1 second",
        lambda s: s.chat("down"),
        headers=("retry-after",),
    ),
    Refusal(
        "a pool without instances",
        503,
        "ServiceUnavailableError",
        "has no instance",
        lambda s: s.chat("empty"),
        headers=("retry-after",),
    ),
    Refusal(
        "a late answer",
        504,
        "GatewayTimeoutError",
        "took longer",
        lambda s: s.chat("hanging"),
    ),
)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name.replace(" ", "-"))
def test_refusal(scene: Scene, refusal: Refusal) -> None:
    got = refusal.ask(scene)
    assert got.status == refusal.status, got
    assert got.headers["content-type"] == "application/json"
    answer = json.loads(got.body)
    assert list(answer) == ["error"]
    assert list(answer["error"]) == ["message", "type", "param", "code"]
    expected = (refusal.kind, refusal.param, refusal.status)
    assert (answer["error"]["type"], answer["error"]["param"], answer["error"]["code"]) == expected
    assert re.search(refusal.says, answer["error"]["message"])
    assert set(refusal.headers) <= set(got.headers)
    assert KEY not in got.body.decode()
    assert not scene.engines["good"].hits


def test_the_gateway_serves_between_refusals(scene: Scene) -> None:
    """The scene's own proof: what differs in the cases above is what they are about."""
    for name in ("busy", "closing"):
        scene.engines[name].answer = "serve"
        try:
            assert scene.chat(name).status == 200
        finally:
            scene.engines[name].answer = "busy" if name == "busy" else "close"


def documented() -> dict[int, str]:
    """Status and type of each row of the table in docs/operations.md."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) `(\w+)` \|", text, re.MULTILINE)
    return {int(status): kind for status, kind in rows}


def test_what_is_refused_is_documented() -> None:
    tried = {refusal.status: refusal.kind for refusal in REFUSALS}
    assert documented() == tried


def test_documented_types_are_the_gateways() -> None:
    lua = (ROOT / "vllm_fleet/gateway/lua/fleet/answer.lua").read_text(encoding="utf-8")
    types = {int(s): k for s, k in re.findall(r'\[(\d{3})\] = "(\w+Error)"', lua)}
    for status, kind in documented().items():
        assert types.get(status, "InternalServerError") == kind
