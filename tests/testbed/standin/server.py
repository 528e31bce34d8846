"""``vllm serve`` of the stand-in: an OpenAI-compatible server whose answers are counted words.

``behaviour.json`` beside this file says how this version behaves (see standin_wheel.Behaviour);
an instance's environment may override a value: ``STANDIN_TOKENS_PER_SECOND=5``.
"""

from __future__ import annotations

import asyncio
import bisect
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn  # type: ignore[import-not-found]

HERE = Path(__file__).parent
STARTED = time.time()
# Observed at the first token of an answer, and at each later one.
AT_TOKENS = ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")


def behaviour() -> SimpleNamespace:
    """What was packed, overridden by STANDIN_<KEY>."""
    values = json.loads((HERE / "behaviour.json").read_text())
    for key, value in values.items():
        given = os.environ.get(f"STANDIN_{key.upper()}")
        if given is not None:
            values[key] = given if isinstance(value, str) else json.loads(given)
    return SimpleNamespace(**values)


def parse(argv: list[str], removed: list[str]) -> dict[str, Any]:
    """Options of ``vllm serve MODEL ...`` by name; exits 2 on a removed one, as argparse does."""
    if argv in (["--version"], ["-v"]):
        print(behaviour().version)
        sys.exit(0)
    if not argv or argv[0] != "serve":
        sys.exit(f"vllm: this stand-in knows serve and --version, not {argv}")
    options: dict[str, Any] = {"model": argv[1]}
    at = 2
    while at < len(argv):
        name, equals, value = argv[at].partition("=")
        if name in removed:
            print(f"vllm: error: unrecognized arguments: {name}", file=sys.stderr)
            sys.exit(2)
        values = [value] if equals else []
        at += 1
        while not equals and at < len(argv) and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
        options.setdefault(name.lstrip("-"), []).extend(values)
    return options


def one(options: dict[str, Any], name: str, default: str) -> str:
    """The last value of an option."""
    values = options.get(name) or [default]
    return str(values[-1])


def say(module: str, text: str) -> None:
    """A line in the form of vLLM's log."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"(EngineCore pid={os.getpid()}) INFO {stamp} [{module}] {text}", flush=True)


class Ranks:
    """The other ranks of a span, as vLLM's: met at a start, missed by nobody until they are used.

    Rank 0 waits until all are connected at the master port, the others until it takes them.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.count = int(one(options, "nnodes", "1"))
        self.rank = int(one(options, "node-rank", "0"))
        self.place = one(options, "master-addr", ""), int(one(options, "master-port", "0"))
        self.lost = False
        self.wires: list[socket.socket] = []

    def meet(self) -> None:
        """Returns when all are there; ends as vLLM does where the port is taken."""
        if self.count == 1:
            return
        if self.rank:
            while True:
                try:
                    self.wires.append(socket.create_connection(self.place, 5))
                    break
                except OSError:
                    time.sleep(0.2)
            self.wires[0].settimeout(None)
            self.wires[0].recv(1)  # all are there
        else:
            with socket.create_server(self.place) as server:
                while len(self.wires) < self.count - 1:
                    self.wires.append(server.accept()[0])
            for wire in self.wires:
                wire.sendall(b".")
        for wire in self.wires:
            threading.Thread(target=self.watch, args=(wire,), daemon=True).start()

    def watch(self, wire: socket.socket) -> None:
        """Nothing is said any more; what is lost is lost, and nothing ends by itself."""
        try:
            while wire.recv(1):
                pass
        except OSError:
            pass
        self.lost = True

    def serve_headless(self) -> None:
        """A rank that answers nobody: a worker, until it is told to end or its worker dies."""
        worker = engine_process(f"VLLM::Worker_PP{self.rank}")

        def end(*_: Any) -> None:
            worker.kill()
            os._exit(0)

        signal.signal(signal.SIGTERM, end)
        worker.wait()
        os._exit(1)


def engine_process(name: str) -> subprocess.Popen[bytes]:
    """A process of its own, as vLLM's engine is, with its name in the process list."""
    return subprocess.Popen(
        [name, "-c", "import time\nwhile True: time.sleep(60)"], executable=sys.executable
    )


class Histogram:
    """Counts below each bound."""

    def __init__(self, bounds: list[float]) -> None:
        self.bounds = [*bounds, float("inf")]
        self.counts = [0] * len(self.bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def samples(self, name: str, labels: str) -> list[str]:
        """As prometheus_client writes them."""
        counts = list(itertools.accumulate(self.counts))
        bounds = [str(float(b)).replace("inf", "+Inf") for b in self.bounds]
        rows = zip(bounds, counts, strict=True)
        return [
            *(f'{name}_bucket{{{labels},le="{bound}"}} {count}' for bound, count in rows),
            f"{name}_count{{{labels}}} {counts[-1]}",
            f"{name}_sum{{{labels}}} {self.total}",
        ]


class App:
    """The ASGI application; ``state.engine_client.errored`` is what the gate looks at."""

    def __init__(self, options: dict[str, Any], how: SimpleNamespace, ranks: Ranks) -> None:
        self.how = how
        self.ranks = ranks
        self.names = options.get("served-model-name") or [options["model"]]
        self.longest = int(one(options, "max-model-len", "4096"))
        self.most = int(one(options, "max-num-seqs", "256"))
        self.slots = asyncio.Semaphore(self.most)
        self.state = SimpleNamespace(engine_client=SimpleNamespace(errored=False))
        self.running = self.waiting = 0
        self.prompt = self.generated = self.finished = 0
        self.histograms = {
            name: Histogram(kept["bounds"])
            for name, kept in how.metrics.items()
            if kept["kind"] == "histogram"
        }
        self.first_client = 0.0  # when the first request came that is no warm-up or probe
        self.engine = 0  # pid
        self.shown = ""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": kind + ".complete"})
                if kind == "lifespan.shutdown":
                    return
        scope["app"] = self
        path, method = scope["path"], scope["method"]
        if method == "GET":
            await self.get(path, send)
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if not any(name == b"x-fleet-token" for name, _ in scope["headers"]):
            self.first_client = self.first_client or time.monotonic()
        left = asyncio.create_task(self.gone(receive))
        work = asyncio.create_task(self.post(path, body, send))
        await asyncio.wait({left, work}, return_when=asyncio.FIRST_COMPLETED)
        for task in (left, work):
            task.cancel()
        await asyncio.gather(left, work, return_exceptions=True)

    async def gone(self, receive: Any) -> None:
        """Ends when the client has left."""
        while (await receive())["type"] != "http.disconnect":
            pass

    async def get(self, path: str, send: Any) -> None:
        if path == "/health":
            await reply(send, 503 if self.state.engine_client.errored else 200, {})
        elif path == "/version":
            await reply(send, 200, {"version": self.how.version})
        elif path == "/v1/models":
            models = [
                {"id": n, "object": "model", "max_model_len": self.longest, "owned_by": "vllm"}
                for n in self.names
            ]
            await reply(send, 200, {"object": "list", "data": models})
        elif path == "/metrics":
            await reply(send, 200, self.metrics(), "text/plain; version=0.0.4")
        else:
            await reply(send, 404, error(404, "NotFoundError", "Not Found"))

    def metrics(self) -> str:
        """As vLLM's: what the engine last reported, so that a hung one changes nothing."""
        if not stopped(self.engine) or not self.shown:
            self.shown = self.report()
        return self.shown

    def report(self) -> str:
        """What the engine counts now, every metric of its version in vLLM's own form."""
        known = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.waiting,
            "vllm:kv_cache_usage_perc": self.running / self.most,
            "vllm:prompt_tokens_total": self.prompt,
            "vllm:prefix_cache_queries_total": self.prompt,
            "vllm:generation_tokens_total": self.generated,
            "vllm:request_success_total": self.finished,
            "process_start_time_seconds": STARTED,
            "process_resident_memory_bytes": 1 << 30,
        }
        lines = []
        for name, kept in self.how.metrics.items():
            lines.append(f"# TYPE {name} {kept['kind']}")
            labels = f'model_name="{self.names[0]}"' if ":" in name else ""
            if labels and kept["engine"]:
                labels = f'engine="0",{labels}'
            if name in self.histograms:
                lines += self.histograms[name].samples(name, labels)
                continue
            own = [f'{k}="{v}"' for k, values in kept["labels"].items() for v in values]
            for number, more in enumerate(own or [""]):
                of = ",".join(filter(None, (labels, more)))
                value = known.get(name, 0) if not number else 0
                lines.append(f"{name}{{{of}}} {value}" if of else f"{name} {value}")
        return "\n".join(lines) + "\n"

    def observe(self, name: str, value: float) -> None:
        """One value of a histogram, where this version has it."""
        if name in self.histograms:
            self.histograms[name].observe(value)

    def observe_end(self, took: float, prompt: int, generated: int) -> None:
        """What vLLM observes when a request ends."""
        for name in self.histograms.keys() - set(AT_TOKENS):
            tokens = prompt if "prompt" in name or "prefill_kv" in name else generated
            self.observe(name, took if name.endswith("_seconds") else tokens)

    async def post(self, path: str, body: bytes, send: Any) -> None:
        try:
            asked = json.loads(body)
        except ValueError:
            await reply(send, 400, error(400, "BadRequestError", "not JSON"))
            return
        if asked.get("model") not in (None, "", *self.names):
            text = f"The model `{asked['model']}` does not exist."
            await reply(send, 404, error(404, "NotFoundError", text))
            return
        if self.how.fault == "500":
            await reply(send, 500, error(500, "InternalServerError", "stand-in: told to fail"))
            return
        text = json.dumps(asked.get("messages") or asked.get("prompt") or asked.get("input") or "")
        prompt = max(1, len(text.split()))
        wanted = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        if prompt + wanted > self.longest:
            message = (
                f"This model's maximum context length is {self.longest} tokens. However, you "
                f"requested {wanted} output tokens and your prompt contains {prompt} tokens."
            )
            await reply(send, 400, error(400, "BadRequestError", message))
            return
        if path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}]
            await reply(send, 200, {"object": "list", "model": self.names[0], "data": data})
            return
        self.waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            await self.generate(asked, prompt, wanted, path.endswith("/chat/completions"), send)
        finally:
            self.running -= 1
            self.slots.release()

    async def generate(
        self, asked: dict[str, Any], prompt: int, wanted: int, chat: bool, send: Any
    ) -> None:
        """Words at the pace of the behaviour, streamed or at once."""
        how = self.how
        if how.fault == "never ends":
            wanted = 10**9
        begun = last_token = time.monotonic()
        self.prompt += prompt
        usage = {"prompt_tokens": prompt, "completion_tokens": wanted}
        usage["total_tokens"] = prompt + wanted
        kind = "chat.completion" if chat else "text_completion"
        base = {"id": "standin", "created": int(time.time()), "model": self.names[0]}
        stream = bool(asked.get("stream"))
        if stream:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.sleep(how.first_token_seconds)
        for number in range(wanted):
            # paced by the clock, so that a busy machine slows it no more than it must
            due = begun + how.first_token_seconds + number / how.tokens_per_second
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            while (
                stopped(self.engine) or self.ranks.lost
            ):  # as a hung engine: nothing comes, nothing is counted
                await asyncio.sleep(0.05)
            self.generated += 1
            now = time.monotonic()
            self.observe(AT_TOKENS[bool(number)], now - last_token)
            last_token = now
            if not stream:
                continue
            delta = {"content": f"w{number} "}
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": delta} if chat else {"text": delta["content"]}
            await event(send, {**base, "object": kind + ".chunk", "choices": [choice]})
        self.finished += 1
        self.observe_end(time.monotonic() - begun, prompt, wanted)
        last: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if stream:
            end: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            last |= end
            await event(send, {**base, "object": kind + ".chunk", "choices": [last]})
            if (asked.get("stream_options") or {}).get("include_usage"):
                done = {**base, "object": kind + ".chunk", "choices": [], "usage": usage}
                await event(send, done)
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            return
        text = "".join(f"w{n} " for n in range(wanted))
        whole: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        last |= whole if chat else {"text": text}
        await reply(send, 200, {**base, "object": kind, "choices": [last], "usage": usage})


async def event(send: Any, value: dict[str, Any]) -> None:
    """One server-sent event."""
    body = b"data: " + json.dumps(value).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def reply(
    send: Any, status: int, content: dict[str, Any] | str, kind: str = "application/json"
) -> None:
    """A whole answer."""
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error(status: int, kind: str, message: str) -> dict[str, Any]:
    """An error as vLLM words it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def watch_engine(engine: subprocess.Popen[bytes], app: App) -> None:
    """When the engine's process has died: marked at once, and the server ends with 0."""
    engine.wait()
    app.state.engine_client.errored = True
    time.sleep(0.4)
    os._exit(0)


def crash_later(engine: subprocess.Popen[bytes], app: App, seconds: float) -> None:
    """End the engine this long after the first client."""
    while not app.first_client or time.monotonic() < app.first_client + seconds:
        time.sleep(0.1)
    engine.kill()


def main() -> None:
    """``vllm ...``"""
    how = behaviour()
    options = parse(sys.argv[1:], how.removed)
    time.sleep(how.start_seconds)
    if how.fault == "no start":
        print("ERROR [core.py:1] EngineCore failed to start.", flush=True)
        print("ValueError: stand-in: told not to start", flush=True)
        sys.exit(1)
    ranks = Ranks(options)
    ranks.meet()
    if "headless" in options:
        ranks.serve_headless()
    longest = int(one(options, "max-model-len", "4096"))
    say("default_loader.py:502", f"Loading weights took {how.start_seconds:.2f} seconds")
    say("gpu_worker.py:298", f"Available KV cache memory: {how.kv_gib:.2f} GiB")
    say("kv_cache_utils.py:1087", f"GPU KV cache size: {how.kv_tokens:,} tokens")
    ratio = how.kv_tokens / longest
    say(
        "kv_cache_utils.py:1091",
        f"Maximum concurrency for {longest:,} tokens per request: {ratio:.2f}x",
    )
    app = App(options, how, ranks)
    wrapped: Any = app
    for middleware in options.get("middleware") or []:  # the last one is the outermost
        module, _, name = middleware.rpartition(".")
        wrapped = getattr(importlib.import_module(module), name)(wrapped)

    async def outer(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scope["app"] = app
        await wrapped(scope, receive, send)

    engine = engine_process("VLLM::EngineCore")
    app.engine = engine.pid
    threading.Thread(target=watch_engine, args=(engine, app), daemon=True).start()
    if how.crash_seconds:
        crash = threading.Thread(
            target=crash_later, args=(engine, app, how.crash_seconds), daemon=True
        )
        crash.start()
    uvicorn.run(
        outer,
        host=one(options, "host", "0.0.0.0"),
        port=int(one(options, "port", "8000")),
        log_level="warning",
        timeout_keep_alive=5,
    )
    engine.kill()
