"""Real clients against the gateway: real nginx with our configuration, keys on.

Behind it is the stand-in of tests/stubs/engine.py with vLLM's HTTP surface, so what is tested is
that the clients and the gateway understand each other; an engine's own answers are not.

Each generation of clients has a virtual environment of its own, made once from the lock in
tests/clients (``pip install --require-hashes``) and kept with the other caches of the tests. The
locks are made anew with::

    cd tests/clients
    for name in openai-0 openai-1 current; do
        uv pip compile $name.in --generate-hashes --no-emit-index-url --no-header \\
            --python-version 3.11 -o $name.txt
    done
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scripts import BED
from tests.integration.test_gateway_nginx import running
from tests.stubs.answers import VECTOR
from tests.stubs.engine import Engine
from tests.stubs.gateway import Nginx, available
from tests.unit.gateway.fleet import pool
from vllm_fleet import clients
from vllm_fleet.clients import Snippet, page
from vllm_fleet.spec.model import (
    ApiKey,
    ApiKeys,
    Fleet,
    Gateway,
    HostSettings,
    HostSpec,
    Instance,
    Model,
    Task,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="needs root, nginx and its Lua module"),
    pytest.mark.timeout(600),  # the first run installs the clients
]

CLIENTS = Path(__file__).parents[1] / "clients"
KEY, MODEL, ALIAS = "sk-clients-1", "qwen3-8b", "small"

PROMPT, COMPLETION = 9, 5
TEXT = "from stand-in"
STREAMED = "".join(f"stand-in-{n} " for n in range(COMPLETION))
VECTORS = [list(VECTOR), list(VECTOR)]

# Script: (environment, {step: value}, {step: (class raised, status)}).
Raised = tuple[str, int]
EXPECTED: dict[str, tuple[str, dict[str, Any], dict[str, Raised]]] = {
    "openai_0": (
        "openai-0",
        {
            "models": [MODEL, ALIAS],
            "chat": TEXT,
            "stream": STREAMED,
            "embeddings": VECTORS,
            "completion": TEXT,
        },
        {
            "wrong key": ("openai.AuthenticationError", 401),
            # The name that 0.28 has for 400, 404 and 415.
            "unknown model": ("openai.InvalidRequestError", 404),
        },
    ),
    **{
        name: (
            name.replace("_", "-") if name == "openai_1" else "current",
            {
                "models": [MODEL, ALIAS],
                "model": MODEL,
                "chat": TEXT,
                "stream": STREAMED,
                "usage": [[1, 0], PROMPT + COMPLETION],
                "many": [TEXT],
                "embeddings": VECTORS,
                "completion": TEXT,
                "response": TEXT,
                "response stream": [STREAMED, "response.completed"],
            },
            {
                "wrong key": ("openai.AuthenticationError", 401),
                "unknown model": ("openai.NotFoundError", 404),
            },
        )
        for name in ("openai_1", "openai_current")
    },
    "langchain_chat": (
        "current",
        {
            "chat": TEXT,
            "stream": STREAMED,
            "embeddings": VECTORS,
            "tokens": PROMPT + COMPLETION,
        },
        {
            "wrong key": ("openai.AuthenticationError", 401),
            "unknown model": ("openai.NotFoundError", 404),
        },
    ),
    "anthropic_messages": (
        "current",
        {
            "models": [MODEL, ALIAS],
            "chat": TEXT,
            "stream": [STREAMED, COMPLETION],
            "count": PROMPT,
        },
        {
            "wrong key": ("anthropic.AuthenticationError", 401),
            "unknown model": ("anthropic.NotFoundError", 404),
        },
    ),
}
SCRIPTS = {"openai_current": "openai_1"}  # the same program, under the newest package


@pytest.fixture(scope="module")
def gateway() -> Iterator[Nginx]:
    """One pool with an alias, over one stand-in; a key is asked for."""
    with (
        Engine("stand-in", prompt_tokens=PROMPT, completion_tokens=COMPLETION) as engine,
        running(
            [pool(MODEL, [engine.port], aliases=(ALIAS,))], keys=(ApiKey(name="app", key=KEY),)
        ) as nginx,
    ):
        yield nginx


def python_of(environment: str) -> Path:
    """The Python of a client environment; made where its lock is new."""
    lock = CLIENTS / f"{environment}.txt"
    tag = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:12]
    place = BED / "clients" / f"{environment}-{tag}"
    if not place.exists():
        building = place.with_suffix(".new")
        shutil.rmtree(building, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", building], check=True)
        pip = [str(building / "bin/python"), "-m", "pip", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "-r", str(lock)], check=True)
        building.rename(place)
    return place / "bin/python"


@pytest.fixture(scope="module")
def outcomes(gateway: Nginx) -> dict[str, dict[str, Any]]:
    """What every step of every client came to, each client asked once, when first wanted."""

    class Lazy(dict[str, dict[str, Any]]):
        def __missing__(self, client: str) -> dict[str, Any]:
            script = CLIENTS / f"{SCRIPTS.get(client, client)}.py"
            done = subprocess.run(
                [
                    *(python_of(EXPECTED[client][0]), script),
                    *(f"http://127.0.0.1:{gateway.port}", KEY, MODEL),
                ],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            self[client] = json.loads(done.stdout.splitlines()[-1])
            return self[client]

    return Lazy()


@pytest.mark.parametrize(
    ("client", "step"),
    [(client, step) for client, (_, values, _) in EXPECTED.items() for step in values],
)
def test_answers(outcomes: dict[str, dict[str, Any]], client: str, step: str) -> None:
    assert outcomes[client][step] == EXPECTED[client][1][step]


@pytest.mark.parametrize(
    ("client", "step"),
    [(client, step) for client, (_, _, errors) in EXPECTED.items() for step in errors],
)
def test_refusals_are_the_clients_own_errors(
    outcomes: dict[str, dict[str, Any]], client: str, step: str
) -> None:
    kind, status = EXPECTED[client][2][step]
    got = outcomes[client][step]
    assert kind in got["raised"], got
    assert got["status"] == status
    expected = "does not exist" if step == "unknown model" else "API key"
    assert expected in got["text"]


def test_no_step_of_a_script_is_unchecked(outcomes: dict[str, dict[str, Any]]) -> None:
    for client, (_, values, errors) in EXPECTED.items():
        assert set(outcomes[client]) == set(values) | set(errors)


# curl


def curl(gateway: Nginx, path: str, *more: str, key: str = KEY, data: str | None = None) -> Any:
    """(exit code, status, body)."""
    argv = ["curl", "-sS", "--max-time", "30", "-w", "\n%{http_code}"]
    argv += ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
    argv += ["--data-binary", "@-"] if data is not None else []
    done = subprocess.run(
        [*argv, *more, f"http://127.0.0.1:{gateway.port}{path}"],
        input=data,
        capture_output=True,
        text=True,
        check=False,
    )
    text, _, status = done.stdout.rpartition("\n")
    return done.returncode, int(status), text


def asked(**more: Any) -> str:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more})


def test_curl(gateway: Nginx) -> None:
    code, status, text = curl(gateway, "/v1/models")
    assert (code, status) == (0, 200)
    assert [model["id"] for model in json.loads(text)["data"]] == [MODEL, ALIAS]
    code, status, text = curl(gateway, "/v1/chat/completions", data=asked())
    assert (code, status) == (0, 200)
    assert json.loads(text)["choices"][0]["message"]["content"] == TEXT
    code, status, text = curl(gateway, "/v1/chat/completions", "-N", data=asked(stream=True))
    assert (code, status) == (0, 200)
    assert text.rstrip().endswith("data: [DONE]")
    body = json.dumps({"model": ALIAS, "input": "a"})
    code, status, text = curl(gateway, "/v1/embeddings", data=body)
    assert (code, status) == (0, 200)
    assert json.loads(text)["data"][0]["embedding"] == list(VECTOR)


def test_curl_sees_refusals(gateway: Nginx) -> None:
    code, status, text = curl(
        gateway, "/v1/chat/completions", "--fail-with-body", key="sk-nobody", data=asked()
    )
    assert (code, status) == (22, 401)
    assert json.loads(text)["error"]["type"] == "AuthenticationError"
    code, status, text = curl(
        gateway, "/v1/chat/completions", "--fail-with-body", data=asked(model="no-such-model")
    )
    assert (code, status) == (22, 404)
    assert json.loads(text)["error"]["code"] == 404


@pytest.mark.parametrize(
    "header", ["Expect: 100-continue", "Transfer-Encoding: chunked"], ids=["expect", "chunked"]
)
def test_curl_sends_a_large_body(gateway: Nginx, header: str) -> None:
    """curl asks leave before it sends over a megabyte, or sends what it reads in chunks."""
    body = asked(padding="x" * 3_000_000)
    code, status, text = curl(gateway, "/v1/chat/completions", "-H", header, data=body)
    assert (code, status) == (0, 200)
    assert json.loads(text)["body_bytes"] == len(body)


# What `fleet status --clients` prints, run as it stands there, with a key put in


def snippets(gateway: Nginx) -> dict[str, Snippet]:
    """What the client page of this gateway says where its model chats, and where it embeds."""
    found: dict[str, Snippet] = {}
    tasks: tuple[Task, ...] = ("embed", "chat")
    for task in tasks:
        settings = HostSettings(
            gateway=Gateway(listen=gateway.port),
            api_keys=ApiKeys(file="keys.yml"),
            models={MODEL: Model(repo="a/b", task=task, aliases=(ALIAS,))},
            instances=(Instance(name="a", hosts=("gw",), model=MODEL, port=8001),),
        )
        host = HostSpec(
            name="gw", groups=("gateway", "gpu"), address="127.0.0.1", settings=settings
        )
        shown = page(Fleet(inventory="i.py", root="/", hosts=(host,)))
        found |= {one.client: one for one in shown.snippets}
    return found


SNIPPETS = {
    "curl": ("", f'"content": "{TEXT}"'),
    "openai-python": ("current", STREAMED),
    "LangChain": ("current", TEXT),
    "anthropic-python": ("current", TEXT),
    "curl, embeddings": ("", '"embedding"'),
    "LangChain, embeddings": ("current", str(len(VECTOR))),
}


def test_every_snippet_that_is_called_tested_is_run_here(gateway: Nginx) -> None:
    assert {s.client for s in snippets(gateway).values() if s.tested} == set(SNIPPETS)


@pytest.mark.parametrize("client", SNIPPETS)
def test_a_snippet_of_the_client_page_works_as_it_stands(gateway: Nginx, client: str) -> None:
    environment, wanted = SNIPPETS[client]
    text = snippets(gateway)[client].text.replace(clients.KEY, KEY)
    program = [python_of(environment), "-c", text] if environment else ["sh", "-c", text]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert wanted.replace(" ", "") in done.stdout.replace(" ", "")


def test_no_key_of_a_client_is_logged(gateway: Nginx, outcomes: dict[str, dict[str, Any]]) -> None:
    assert all(outcomes[client] for client in EXPECTED)
    logs = "".join(p.read_text() for p in (gateway.root / "var/log/nginx").iterdir())
    assert '"key":"app"' in logs
    assert "sk-nobody" not in logs
    assert KEY not in logs
