"""ExecStartPost of an instance: wait for the server, warm it by its task, open the gate.

Sends what clients will send (a chat, a stream, a long prompt, tools, several at once;
embeddings; a ranking), so that the kernels those compile on first use are there before a
client needs them. Never judges what a model says: random or thinking models answer anything,
or nothing but thoughts. Ends at once when the server does.

Environment: FLEET_INSTANCE, FLEET_MODEL, FLEET_TASK, FLEET_TOOLS, FLEET_PORT, FLEET_RUN,
FLEET_STATE, FLEET_START_SECONDS, MAINPID, VLLM_API_KEY where the operator set one, and
FLEET_RANK of a rank of a span. Writes FLEET_STATE/warmup.json, then FLEET_RUN/ready. Exits 1 with
the request that failed. A span is warmed through its rank 0; the others wait until that is ready.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

POLL_SECONDS = 0.5
SAY_SECONDS = 30.0
LONG_WORDS = 8192  # about vLLM's largest batch of prefill, so that chunking is warmed too
AT_ONCE = 4
TOO_LONG = ("maximum context length", "max_model_len", "max model len", "longer than", "too long")

Json = Dict[str, Any]
Send = Callable[[], None]


class Failed(Exception):
    """Why the instance cannot be opened to clients."""


class Rejected(Failed):
    """A request that was not answered with 200."""

    def __init__(self, path: str, status: int, body: str) -> None:
        super().__init__("%s answered %d: %s%s" % (path, status, body[:500], likely_cause(body)))
        self.status = status
        self.body = body


class Step(NamedTuple):
    """One request that was made, for warmup.json."""

    name: str
    seconds: float


class Client:
    """Asks one server of this host, past its gate, never past the deadline."""

    def __init__(self, port: int, token: str, deadline: float, api_key: Optional[str]) -> None:
        self._port = port
        self._deadline = deadline
        self._headers = {"Content-Type": "application/json", "X-Fleet-Token": token}
        if api_key:
            self._headers["Authorization"] = "Bearer " + api_key

    def left(self) -> float:
        """Seconds left. Raises Failed when there are none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Failed("start_seconds are over; raise it in group_vars if the start is healthy")
        return left

    def get(self, path: str, timeout: float) -> Json:
        """The JSON at a path. Raises OSError or HTTPException where there is no server yet."""
        return self._ask("GET", path, None, min(timeout, self.left()))

    def post(self, path: str, body: Json) -> Json:
        """The JSON answer. Raises Rejected on another status than 200."""
        try:
            return self._ask("POST", path, body, self.left())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Failed("%s got no answer: %s" % (path, reason(error))) from error

    def stream(self, path: str, body: Json) -> int:
        """Read server-sent events to `[DONE]`; how many came. Raises Rejected or Failed."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self.left())
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise Rejected(path, response.status, response.read().decode(errors="replace"))
            events = 0
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return events
                if line.startswith(b'data: {"error"'):
                    raise Failed("%s (stream) broke: %s" % (path, line.decode(errors="replace")))
                events += line.startswith(b"data:")
            raise Failed("%s (stream) ended without [DONE] after %d events" % (path, events))
        except (OSError, http.client.HTTPException) as error:
            raise Failed("%s (stream) got no answer: %s" % (path, reason(error))) from error
        finally:
            connection.close()

    def _ask(self, method: str, path: str, body: Optional[Json], timeout: float) -> Json:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, self._headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        if response.status != 200:
            raise Rejected(path, response.status, text)
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise ValueError("no JSON object: %s" % text[:200])
        return answer


def main(env: Mapping[str, str]) -> int:
    """Warm one instance and open its gate; the exit code."""
    name = env["FLEET_INSTANCE"]
    pid = int(env["MAINPID"])
    watch_main(pid, name)
    if env.get("FLEET_RANK"):
        wait_for_ranks(env["FLEET_RUN"])
    begun = time.monotonic()
    if int(env.get("FLEET_RANK") or 0) > 0:
        return wait_for_first(env, begun)
    try:
        with open(os.path.join(env["FLEET_RUN"], "token")) as file:
            token = file.read().strip()
        deadline = begun + float(env["FLEET_START_SECONDS"])
        client = Client(int(env["FLEET_PORT"]), token, deadline, env.get("VLLM_API_KEY"))
        max_model_len = wait_for_server(client, name, env["FLEET_MODEL"])
        loaded = time.monotonic()
        say("%s: serves after %.1f s, warming (%s)" % (name, loaded - begun, env["FLEET_TASK"]))
        steps = warm(client, env, max_model_len)
        report = {
            "instance": name,
            "model": env["FLEET_MODEL"],
            "task": env["FLEET_TASK"],
            "vllm_version": client.get("/version", 30).get("version"),
            "max_model_len": max_model_len,
            "pid": pid,
            "ready_at": int(time.time()),
            "load_seconds": round(loaded - begun, 3),
            "warm_seconds": round(time.monotonic() - loaded, 3),
            "steps": [{"name": step.name, "seconds": step.seconds} for step in steps],
        }
    except (Failed, OSError, ValueError, http.client.HTTPException) as error:
        print("warmup: %s: FAILED: %s" % (name, error), file=sys.stderr, flush=True)
        return 1
    write(os.path.join(env["FLEET_STATE"], "warmup.json"), json.dumps(report, indent=1))
    write(os.path.join(env["FLEET_RUN"], "ready"), "%d %d" % (pid, time.time()))
    say("%s: ready after %.1f s" % (name, time.monotonic() - begun))
    return 0


def span_state(run: str) -> str:
    """How far the main process of a rank is, as it says itself; empty before it does."""
    try:
        with open(os.path.join(run, "span.json")) as file:
            return str(json.load(file)["state"])
    except (OSError, ValueError, KeyError):
        return ""


def wait_for_ranks(run: str) -> None:
    """Wait, for as long as it takes, until all ranks of a span are there and vLLM is started.

    A host that is down may be so for days; nothing is loaded meanwhile.
    """
    while span_state(run) in ("", "waiting"):
        time.sleep(POLL_SECONDS)


def wait_for_first(env: Mapping[str, str], begun: float) -> int:
    """Wait until the whole span is ready; the exit code."""
    name, ready = env["FLEET_INSTANCE"], os.path.join(env["FLEET_RUN"], "ready")
    while not os.path.exists(ready):
        if time.monotonic() - begun > float(env["FLEET_START_SECONDS"]):
            text = "warmup: %s: FAILED: start_seconds are over, and rank 0 is not ready" % name
            print(text, file=sys.stderr, flush=True)
            return 1
        time.sleep(POLL_SECONDS)
    say("%s: ready after %.1f s, with its rank 0" % (name, time.monotonic() - begun))
    return 0


def wait_for_server(client: Client, name: str, model: str) -> Optional[int]:
    """Wait until the server lists the model; its longest request in tokens where it says so.

    Raises Failed when it lists others, or the time is over.
    """
    said = time.monotonic()
    while True:
        try:
            models = client.get("/v1/models", 10)
        except Rejected as error:
            if error.status in (401, 403):
                raise Failed("%s -- an API key in `vllm_args`? set `api_keys`" % error) from None
            if error.status == 404:
                raise
        except (OSError, http.client.HTTPException, ValueError):
            pass  # not up yet
        else:
            listed = {entry["id"]: entry for entry in models.get("data", [])}
            if model not in listed:
                raise Failed("serves %s, not %s" % (", ".join(listed) or "no model", model))
            length = listed[model].get("max_model_len")
            return length if isinstance(length, int) else None
        left = client.left()
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            say("%s: not up yet, %.0f s left" % (name, left))
        time.sleep(POLL_SECONDS)


def warm(client: Client, env: Mapping[str, str], max_model_len: Optional[int]) -> List[Step]:
    """Make the requests of the task, one after the other. Raises Failed at the first that fails."""
    model = env["FLEET_MODEL"]
    if env["FLEET_TASK"] == "chat":
        requests = chat_requests(client, model, max_model_len, env.get("FLEET_TOOLS") == "1")
    elif env["FLEET_TASK"] == "embed":
        requests = embed_requests(client, model, max_model_len)
    else:
        requests = rerank_requests(client, model, max_model_len)
    steps = []
    for name, send in requests:
        begun = time.monotonic()
        try:
            send()
        except Failed as error:
            raise Failed("warm-up request `%s`: %s" % (name, error)) from error
        steps.append(Step(name, round(time.monotonic() - begun, 3)))
        say("%s %.2f s" % steps[-1])
    return steps


def chat_requests(
    client: Client, model: str, max_model_len: Optional[int], tools: bool
) -> List[Tuple[str, Send]]:
    """What clients of a chat model send."""
    path = "/v1/chat/completions"

    def body(text: str, **more: Any) -> Json:
        messages = [{"role": "user", "content": text}]
        return {"model": model, "messages": messages, "max_tokens": 16, **more}

    def chat(text: str, **more: Any) -> None:
        expect(path, client.post(path, body(text, **more)), "choices")

    def stream() -> None:
        # with usage: one chunk more, and the code path that counts tokens
        client.stream(path, body("Count to ten.", stream_options={"include_usage": True}))

    function = {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
    requests: List[Tuple[str, Send]] = [
        ("chat", lambda: chat("Say hello.")),
        ("stream", stream),
        ("long prompt", lambda: longest(chat, max_model_len)),
    ]
    if tools:
        offered = [{"type": "function", "function": function}]
        requests.append(("tools", lambda: chat("What is the weather in Paris?", tools=offered)))
    requests.append(("at once", lambda: at_once(lambda i: chat("Tell me about number %d." % i))))
    return requests


def embed_requests(
    client: Client, model: str, max_model_len: Optional[int]
) -> List[Tuple[str, Send]]:
    """What clients of an embedding model send."""
    path = "/v1/embeddings"

    def embed(text: Any) -> None:
        data = expect(path, client.post(path, {"model": model, "input": text}), "data")
        if not data[0].get("embedding"):
            raise Failed("%s gave an empty embedding" % path)

    return [
        ("embedding", lambda: embed("Hello.")),
        ("embeddings", lambda: embed(["Text number %d." % i for i in range(16)])),
        ("long text", lambda: longest(embed, max_model_len)),
        ("at once", lambda: at_once(lambda i: embed("Text number %d." % i))),
    ]


def rerank_requests(
    client: Client, model: str, max_model_len: Optional[int]
) -> List[Tuple[str, Send]]:
    """What clients of a ranking model send."""
    path = "/v1/rerank"

    def rerank(*documents: str) -> None:
        body = {"model": model, "query": "Which is the capital?", "documents": list(documents)}
        expect(path, client.post(path, body), "results")

    return [
        ("ranking", lambda: rerank("Paris is the capital.", "Bread is baked.")),
        ("many documents", lambda: rerank(*("Document number %d." % i for i in range(16)))),
        ("long document", lambda: longest(rerank, max_model_len)),
        ("at once", lambda: at_once(lambda i: rerank("Document %d." % i, "Another."))),
    ]


def longest(send: Callable[[str], None], max_model_len: Optional[int]) -> None:
    """Send a long text, halved for as long as the server says that it is too long.

    How many tokens a word takes is the tokenizer's affair. Raises what `send` raises.
    """
    words = min(LONG_WORDS, max(1, (max_model_len or 2 * LONG_WORDS) // 2))
    while True:
        try:
            send(" ".join(["hello"] * words))
            return
        except Rejected as error:
            too_long = any(text in error.body.lower() for text in TOO_LONG)
            if error.status != 400 or not too_long or words == 1:
                raise
        words //= 2


def at_once(send: Callable[[int], None]) -> None:
    """Send several requests side by side. Raises the first failure."""
    failures: List[Failed] = []

    def run(number: int) -> None:
        try:
            send(number)
        except Failed as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def expect(path: str, answer: Json, key: str) -> List[Json]:
    """The non-empty list that an answer must hold. Raises Failed."""
    found = answer.get(key)
    if not isinstance(found, list) or not found:
        raise Failed("%s answered without %s: %s" % (path, key, json.dumps(answer)[:300]))
    return found


def likely_cause(body: str) -> str:
    """What most often stands behind a refusal, and the remedy; empty where unknown."""
    text = body.lower()
    if "chat template" in text or "chat_template" in text:
        return (
            " -- the model brings no chat template: give one with vllm_args `chat-template`, "
            "or set `task` if it is no chat model"
        )
    if "does not support" in text or "not found" in text:
        return " -- does `task` of the model fit what it is?"
    return ""


def reason(error: Exception) -> str:
    """Why a connection failed, in words."""
    return str(error) or type(error).__name__


def watch_main(pid: int, name: str) -> None:
    """End this process with 1 as soon as the server is gone, whatever else waits."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        gone(name)
        return

    def wait() -> None:
        select.select([file], [], [])
        gone(name)

    threading.Thread(target=wait, daemon=True).start()


def gone(name: str) -> None:
    """Say that the server has ended, and end."""
    text = "warmup: %s: FAILED: vLLM ended during its start; its own lines above say why\n" % name
    os.write(2, text.encode())
    os._exit(1)


def write(path: str, text: str) -> None:
    """Put a file in place at once."""
    temporary = "%s.%d" % (path, os.getpid())
    with open(temporary, "w") as file:
        file.write(text + "\n")
    os.rename(temporary, path)


def say(text: str) -> None:
    """One line to the journal, at once."""
    print("warmup: " + text, flush=True)


if __name__ == "__main__":
    sys.exit(main(os.environ))
