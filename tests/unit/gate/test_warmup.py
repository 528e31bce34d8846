"""The warm-up against a stand-in server, run as its own process as the unit does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gate.stand_in import Reply, StandIn
from vllm_fleet.gate import warmup

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
NO_TEMPLATE = "As of transformers v4.44, default chat template is no longer allowed"


def chat(body: Any) -> Reply | list[str]:
    """A thinking model: content is null, the text is elsewhere."""
    if body.get("stream"):
        return ['data: {"choices": [{}]}\n\n', 'data: {"usage": {}}\n\n', "data: [DONE]\n\n"]
    return 200, {"choices": [{"message": {"content": None, "reasoning": "hm"}}]}


def routes(length: int | None = 2048) -> dict[str, Callable[[Any], Reply | list[str]]]:
    return {
        "/v1/models": lambda body: (200, {"data": [{"id": "m", "max_model_len": length}]}),
        "/version": lambda body: (200, {"version": "0.32.0"}),
        CHAT: chat,
        "/v1/embeddings": lambda body: (200, {"data": [{"embedding": [0.1]}]}),
        "/v1/rerank": lambda body: (200, {"results": [{"index": 0}]}),
    }


class Case:
    """One instance with a stand-in for its main process."""

    def __init__(self, folder: Path) -> None:
        self.main = subprocess.Popen(["sleep", "60"])
        self.folder = folder
        (folder / "token").write_text("s3cret\n")

    def env(self, port: int, **changes: str) -> dict[str, str]:
        return {
            "FLEET_INSTANCE": "air-a",
            "FLEET_MODEL": "m",
            "FLEET_TASK": "chat",
            "FLEET_TOOLS": "0",
            "FLEET_PORT": str(port),
            "FLEET_RUN": str(self.folder),
            "FLEET_STATE": str(self.folder),
            "FLEET_START_SECONDS": "20",
            "MAINPID": str(self.main.pid),
            **changes,
        }

    def start(self, port: int, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", warmup.__file__],
            env=self.env(port, **changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, port: int, **changes: str) -> tuple[int, str]:
        process = self.start(port, **changes)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    @property
    def ready(self) -> bool:
        return (self.folder / "ready").exists()


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path)
    yield made
    made.main.kill()
    made.main.wait()


@pytest.mark.parametrize(
    ("task", "tools", "path", "names"),
    [
        ("chat", "0", CHAT, ["chat", "stream", "long prompt", "at once"]),
        ("chat", "1", CHAT, ["chat", "stream", "long prompt", "tools", "at once"]),
        ("embed", "0", "/v1/embeddings", ["embedding", "embeddings", "long text", "at once"]),
        ("rerank", "0", "/v1/rerank", ["ranking", "many documents", "long document", "at once"]),
    ],
)
def test_warms_by_task_and_opens(
    case: Case, task: str, tools: str, path: str, names: list[str]
) -> None:
    with StandIn(routes()) as server:
        code, output = case.run(server.port, FLEET_TASK=task, FLEET_TOOLS=tools)
    assert code == 0, output
    assert case.ready
    report = json.loads((case.folder / "warmup.json").read_text())
    assert [step["name"] for step in report["steps"]] == names
    assert (report["vllm_version"], report["task"], report["model"]) == ("0.32.0", task, "m")
    assert report["load_seconds"] >= 0
    assert report["pid"] == case.main.pid
    assert abs(report["ready_at"] - time.time()) < 60
    asked = [(p, body) for p, body, _ in server.asked if p not in ("/v1/models", "/version")]
    assert {p for p, _ in asked} == {path}
    assert len(asked) == len(names) - 1 + warmup.AT_ONCE
    assert all(headers["x-fleet-token"] == "s3cret" for _, _, headers in server.asked)
    assert any("tools" in body for _, body in asked) is (tools == "1")


def test_waits_until_the_server_is_up(case: Case) -> None:
    answers: Iterator[Reply | list[str]] = iter([(503, {}), (503, {})])
    table = routes()
    models = table["/v1/models"]
    table["/v1/models"] = lambda body: next(answers, models(body))
    with StandIn(table) as server:
        code, output = case.run(server.port)
    assert code == 0, output


def test_an_operators_key_is_shown(case: Case) -> None:
    with StandIn(routes()) as server:
        code, output = case.run(server.port, VLLM_API_KEY="k")
    assert code == 0, output
    assert all(headers["authorization"] == "Bearer k" for _, _, headers in server.asked)


def test_long_prompts_follow_what_the_model_takes(case: Case) -> None:
    def short(body: Any) -> Reply | list[str]:
        words = len(body["messages"][0]["content"].split())
        if words > 100:
            return 400, {"error": {"message": "This model's maximum context length is 128 tokens"}}
        return chat(body)

    with StandIn({**routes(length=1024), CHAT: short}) as server:
        code, output = case.run(server.port)
    assert code == 0, output
    sizes = [len(b["messages"][0]["content"].split()) for p, b, _ in server.asked if p == CHAT]
    assert [size for size in sizes if size > 10] == [512, 256, 128, 64]


def test_no_chat_template_is_said(case: Case) -> None:
    reply = (400, {"error": {"message": NO_TEMPLATE, "code": 400}})
    with StandIn({**routes(), CHAT: lambda body: reply}) as server:
        code, output = case.run(server.port)
    assert code == 1
    assert "warmup: air-a: FAILED: warm-up request `chat`: /v1/chat/completions answered 400" in (
        output
    )
    assert NO_TEMPLATE in output
    assert "vllm_args `chat-template`" in output
    assert not case.ready


@pytest.mark.parametrize(
    ("path", "reply", "said"),
    [
        (CHAT, (200, {"choices": []}), "`chat`: /v1/chat/completions answered without choices"),
        (CHAT, (500, {"error": "boom"}), "`chat`: /v1/chat/completions answered 500"),
        ("/v1/models", (200, {"data": [{"id": "other"}]}), "serves other, not m"),
        ("/v1/models", (401, {}), "/v1/models answered 401"),
    ],
)
def test_what_failed_is_named(case: Case, path: str, reply: Reply, said: str) -> None:
    with StandIn({**routes(), path: lambda body: reply}) as server:
        code, output = case.run(server.port)
    assert code == 1
    assert said in output
    assert not case.ready


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (["data: {}\n\n"], "ended without [DONE] after 1 events"),
        (['data: {"error": {"message": "boom"}}\n\n', "data: [DONE]\n\n"], "broke"),
    ],
)
def test_a_broken_stream(case: Case, events: list[str], said: str) -> None:
    def broken(body: Any) -> Reply | list[str]:
        return events if body.get("stream") else chat(body)

    with StandIn({**routes(), CHAT: broken}) as server:
        code, output = case.run(server.port)
    assert code == 1
    assert "`stream`" in output
    assert said in output


def test_the_time_is_bounded(case: Case) -> None:
    begun = time.monotonic()
    code, output = case.run(1, FLEET_START_SECONDS="1")
    assert code == 1
    assert "start_seconds are over" in output
    assert time.monotonic() - begun < 20


def test_a_hung_request_is_bounded_too(case: Case) -> None:
    def hangs(body: Any) -> Reply:
        time.sleep(3)
        return 200, {}

    with StandIn({**routes(), CHAT: hangs}) as server:
        code, output = case.run(server.port, FLEET_START_SECONDS="1")
    assert code == 1
    assert "`chat`: /v1/chat/completions got no answer: timed out" in output


@pytest.mark.parametrize("when", ["waiting", "warming"])
def test_ends_at_once_with_the_main_process(case: Case, when: str) -> None:
    def hangs(body: Any) -> Reply:
        time.sleep(2)
        return 200, {}

    with StandIn({**routes(), CHAT: hangs} if when == "warming" else {}) as server:
        server.routes.setdefault("/v1/models", lambda body: (503, {}))
        process = case.start(server.port)
        time.sleep(0.7)
        os.kill(case.main.pid, signal.SIGKILL)
        begun = time.monotonic()
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 1
    assert time.monotonic() - begun < 1.8
    assert "vLLM ended during its start" in output
    assert not case.ready


def test_a_main_process_gone_before(case: Case) -> None:
    case.main.kill()
    case.main.wait()
    code, output = case.run(1)
    assert code == 1
    assert "vLLM ended during its start" in output
