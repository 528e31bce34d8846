"""Our gateway against what people put in front of vLLM today, side by side on this machine.

    python benchmarks/gateway.py [--rounds N] [--only NAME ...]

Every gateway stands in front of the same two backends and gets the same requests, in turns: one
slice each, again and again, so that what else the machine does meets all alike. Figures are
medians over the rounds.

- added p50: median latency with one connection, less that of the backend asked directly in the
  same round; so the client's own share (it and the backend are gateway_load.c) is taken off.
- CPU: what the gateway's processes used, from the kernel's accounts, by requests served with 32
  connections.
- chunk delay: from the backend's write of a chunk to the client's read of it, 200 streams with 20
  chunks a second each.
- times plain nginx: nginx that treats connections to backends as ours does, kept or not.
- memory: growth of the gateway's processes (PSS) by idle stream, in a fresh gateway.

Ours is the configuration that the deploy renders, on nginx with Lua, with keys, JSON log and its
questions for the ready state. Needs root, nginx with the Lua module, and a C compiler. Peers that
are not installed are named and left out: ``haproxy`` is looked for on the PATH; vllm-router and
LiteLLM beside the Python that GATEWAY_PEERS_PYTHON names:

    python -m venv peers && peers/bin/pip install vllm-router==0.1.17 'litellm[proxy]'
    GATEWAY_PEERS_PYTHON=peers/bin/python python benchmarks/gateway.py

The last line is one JSON object. Exit 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.ports import free_ports  # noqa: E402
from tests.stubs.gateway import Nginx, available  # noqa: E402
from tests.unit.gateway.fleet import pool, spec  # noqa: E402
from vllm_fleet import gateway  # noqa: E402
from vllm_fleet.spec.model import ApiKey  # noqa: E402

SIZES = {"113 B": 113, "32 KB": 32 * 1024, "1 MB": 1024 * 1024}
CONNECTIONS = 32
CHUNKS_A_SECOND = 20
KEY = "sk-bench-0123456789abcdef0123456789abcdef"
# Other keys of the gateway: a look-up among a few, as in an office.
KEYS = [
    ApiKey(name="bench", key=KEY),
    *(ApiKey(name=f"team-{n}", key=f"sk-other-{n}") for n in range(50)),
]

# Bounds on ours, by figure.
ADDED_US = {"113 B": 100.0, "32 KB": 150.0, "1 MB": 1500.0}
CPU_US = {"113 B": 45.0}
CHUNK_DELAY_MS = 10.0
IDLE_STREAM_KB = 20.0
TIMES_NGINX = 1.5

BUSY = 0.5  # load of the machine before the run, from which on figures are not to be trusted


class Failed(Exception):
    """The benchmark cannot go on; the text says why."""


# Requests


def prose(size: int, seed: int = 7) -> str:
    """Text of this many bytes as JSON holds it: words, line ends, quotes, some Chinese."""
    random = Random(seed)
    words = ["the", "model", "context", "of", "gateway", "request", "answer", "模型", "上下文"]
    words += ["tokens", "and", "latency", '"quoted"', "in", "a", "line,", "path\\to", "file."]
    out: list[str] = []
    length = 0
    while length < size:
        line = " ".join(random.choices(words, k=12)) + "\n"
        out.append(line)
        length += len(json.dumps(line, ensure_ascii=False).encode()) - 2
    return "".join(out)


def body(size: int) -> bytes:
    """A chat of exactly this many bytes; ``model`` stands last, as some clients send it."""
    messages = [{"role": "user", "content": ""}]
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 16, "model": "m"}

    def encoded() -> bytes:
        return json.dumps(asked, ensure_ascii=False).encode()

    turn = 4096
    while len(encoded()) + 2 * turn < size:
        messages[-1]["content"] = prose(turn, len(messages))
        role = "assistant" if messages[-1]["role"] == "user" else "user"
        messages.append({"role": role, "content": ""})
    messages[-1]["content"] = "x" * (size - len(encoded()))
    data = encoded()
    assert len(data) == size
    return data


def stream_body(chunks: int, gap_ms: int) -> bytes:
    """A streamed chat; the backend takes the number of chunks and their gap from it."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": chunks}
    return json.dumps({**asked, "seed": gap_ms, "stream": True, "model": "m"}).encode()


def http(data: bytes) -> bytes:
    """The whole request, as written on the wire."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: llm.example\r\nUser-Agent: bench\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


# What the kernel knows of processes


def tree(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def cpu_us(root: int) -> float:
    """CPU time that the processes have used."""
    total = 0
    for pid in tree(root):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1000


def memory_kb(root: int) -> float:
    """Memory of the processes, what they share counted once."""
    total = 0
    for pid in tree(root):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total * 1.024  # the kernel's kB are 1024 bytes


# Gateways


class Gateway(ABC):
    """Something that listens on ``port`` and passes requests on to the backends."""

    name: str
    tls = False

    def __init__(self, backends: Sequence[int], folder: Path) -> None:
        self.backends, self.folder = backends, folder
        self.port = free_ports(1)[0]

    @classmethod
    def missing(cls) -> str:
        """Why it cannot run here, or an empty text."""
        return ""

    def version(self) -> str:
        """What was measured."""
        return ""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process above all of the gateway's processes."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Up and answering meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(self._process())
            self._wait()
            yield

    @abstractmethod
    def _process(self) -> contextlib.AbstractContextManager[Any]: ...

    def _wait(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        said = ""
        while time.monotonic() < deadline:
            try:
                with self.connect() as client:
                    client.sendall(http(body(113)))
                    said = client.recv(4096).decode(errors="replace")
            except OSError as error:
                said = str(error)
            if said.startswith("HTTP/1.1 200"):
                return
            time.sleep(0.2)
        raise Failed(f"{self.name} did not answer within {seconds:.0f} s: {said[:200]}")

    def connect(self) -> socket.socket:
        """A connection to it."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        if not self.tls:
            return client
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(client)


class Ours(Gateway):
    """The rendered configuration, under the nginx.conf that the tests use in Debian's stead."""

    name = "ours"
    keeps_connections = False  # to backends

    @classmethod
    def missing(cls) -> str:
        return "" if available() else "needs root, nginx and its Lua module"

    def version(self) -> str:
        return nginx_version()

    def _process(self) -> contextlib.AbstractContextManager[Any]:
        certificate = self._certificate() if self.tls else None
        settings: dict[str, Any] = {"listen": self.port}
        if self.tls:
            settings["tls"] = {"certificate": "gw.pem", "key": "gw.key"}
        status_port = free_ports(1)[0]
        self.nginx = Nginx(self.port, status_port, tls=self.tls)
        files = gateway.files(
            spec(**settings),
            [pool("m", self.backends)],
            {},
            KEYS,
            tls=certificate,
            status_port=status_port,
        )
        self.nginx.put(files)
        conf = next(file.content for file in files if file.path == gateway.CONF)
        self.keeps_connections = re.search(r"^\s*keepalive \d", conf, re.MULTILINE) is not None
        return self.nginx

    def _certificate(self) -> tuple[str, str]:
        subprocess.run(
            shlex.split(
                "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
                "-subj /CN=bench -keyout bench.key -out bench.crt"
            ),
            cwd=self.folder,
            check=True,
            capture_output=True,
        )
        return (self.folder / "bench.crt").read_text(), (self.folder / "bench.key").read_text()

    @property
    def pid(self) -> int:
        return self.nginx.pid


class OursTls(Ours):
    """The same behind TLS."""

    name = "ours, TLS"
    tls = True


class Program(Gateway):
    """A gateway that is a command in the foreground."""

    @abstractmethod
    def command(self) -> list[str]:
        """What to run; may write files into ``folder`` first."""

    def environment(self) -> dict[str, str]:
        """Variables on top of ours."""
        return {}

    @contextlib.contextmanager
    def _process(self) -> Iterator[None]:
        log = self.folder / f"{self.name.replace(' ', '-')}.log"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command(),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                start_new_session=True,
            )
        try:
            yield
        except Failed as failed:  # while it starts: its own words are in its log
            tail = log.read_text(errors="replace")[-2000:]
            raise Failed(f"{failed}\n{tail}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    @property
    def pid(self) -> int:
        return self.process.pid


class PlainNginx(Program):
    """nginx as it must be set for streams, without a look into the body."""

    name = "nginx"
    upstream = ""
    MAIN = """\
daemon off;
pid {folder}/{file}.pid;
worker_processes 2;
error_log {folder}/{file}.errors;
events {{ worker_connections 4096; }}
http {{
    access_log {folder}/{file}.access;
    client_body_temp_path {folder}/{file}-body;
    proxy_temp_path {folder}/{file}-proxy;
    upstream backends {{
        least_conn;
        {servers}
        {upstream}
    }}
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size 64m;
        location /v1/ {{
            proxy_pass http://backends;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_read_timeout 3600s;
        }}
    }}
}}
"""

    @classmethod
    def missing(cls) -> str:
        return "" if shutil.which("nginx") else "nginx is not installed"

    def version(self) -> str:
        return nginx_version()

    def command(self) -> list[str]:
        file = self.name.replace(" ", "-").replace(",", "")
        servers = " ".join(f"server 127.0.0.1:{port};" for port in self.backends)
        conf = self.folder / f"{file}.conf"
        conf.write_text(
            self.MAIN.format(
                folder=self.folder,
                file=file,
                port=self.port,
                servers=servers,
                upstream=self.upstream,
            )
        )
        return ["nginx", "-c", str(conf)]


class KeepaliveNginx(PlainNginx):
    """The same with idle connections to the backends, which may lose a POST with uvicorn."""

    name = "nginx keepalive"
    upstream = "keepalive 64;"


class HAProxy(Program):
    """HAProxy that reads the model out of the body."""

    name = "HAProxy"
    CONF = """\
global
    nbthread 2
    maxconn 8192
    tune.bufsize 16777216
defaults
    mode http
    option http-buffer-request
    option http-no-delay
    timeout connect 2s
    timeout client 3600s
    timeout server 3600s
frontend clients
    bind 127.0.0.1:{port}
    http-request set-var(txn.model) req.body,json_query('$.model')
    use_backend %[var(txn.model)]
backend m
    balance leastconn
    {servers}
"""

    @classmethod
    def missing(cls) -> str:
        return "" if shutil.which("haproxy") else "haproxy is not on the PATH"

    def version(self) -> str:
        done = subprocess.run(["haproxy", "-v"], capture_output=True, text=True, check=True)
        return done.stdout.split()[2]

    def command(self) -> list[str]:
        servers = "\n    ".join(
            f"server b{n} 127.0.0.1:{port}" for n, port in enumerate(self.backends)
        )
        conf = self.folder / "haproxy.cfg"
        conf.write_text(self.CONF.format(port=self.port, servers=servers))
        return ["haproxy", "-db", "-f", str(conf)]


def peer(name: str) -> Path | None:
    """A program beside the peers' Python."""
    python = os.environ.get("GATEWAY_PEERS_PYTHON")
    program = Path(python).absolute().parent / name if python else None
    return program if program and program.exists() else None


def peer_missing(name: str) -> str:
    if not os.environ.get("GATEWAY_PEERS_PYTHON"):
        return "GATEWAY_PEERS_PYTHON is not set"
    return "" if peer(name) else f"{name} is not installed beside GATEWAY_PEERS_PYTHON"


def peer_version(distribution: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    python = os.environ["GATEWAY_PEERS_PYTHON"]
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


class Router(Program):
    """vllm-router with one of its policies."""

    policy: str

    @classmethod
    def missing(cls) -> str:
        return peer_missing("vllm-router")

    def version(self) -> str:
        return peer_version("vllm-router")

    def command(self) -> list[str]:
        argv = [str(peer("vllm-router")), "--host", "127.0.0.1", "--port", str(self.port)]
        argv += [
            "--policy",
            self.policy,
            "--log-level",
            "warning",
            "--max-concurrent-requests",
            "8192",
        ]
        argv += ["--prometheus-port", str(free_ports(1)[0])]
        return [*argv, "--worker-urls", *(f"http://127.0.0.1:{port}" for port in self.backends)]


class RoundRobin(Router):
    """vllm-router, each backend in turn."""

    name, policy = "vllm-router round_robin", "round_robin"


class CacheAware(Router):
    """vllm-router, by shared prefixes."""

    name, policy = "vllm-router cache_aware", "cache_aware"


class LiteLLM(Program):
    """LiteLLM's proxy with a master key and without a database."""

    name = "LiteLLM"

    @classmethod
    def missing(cls) -> str:
        return peer_missing("litellm")

    def version(self) -> str:
        return peer_version("litellm")

    def environment(self) -> dict[str, str]:
        return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}

    def command(self) -> list[str]:
        models = [
            {
                "model_name": "m",
                "litellm_params": {
                    "model": "openai/m",
                    "api_base": f"http://127.0.0.1:{port}/v1",
                    "api_key": "none",
                },
            }
            for port in self.backends
        ]
        conf = self.folder / "litellm.json"  # JSON is YAML
        conf.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
        program = [str(peer("litellm")), "--config", str(conf), "--host", "127.0.0.1"]
        return [*program, "--port", str(self.port), "--telemetry", "False"]


GATEWAYS: tuple[type[Gateway], ...] = (
    Ours,
    PlainNginx,
    KeepaliveNginx,
    HAProxy,
    RoundRobin,
    CacheAware,
    LiteLLM,
)


def nginx_version() -> str:
    done = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True)
    return done.stderr.strip().rpartition("/")[2]


# Measuring


class Bench:
    """One run: backends, requests on disk, and what was found."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.tool = self._compile()
        self.found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.errors: dict[str, list[str]] = defaultdict(list)
        self.requests: dict[str, Path] = {}
        for name, size in SIZES.items():
            self._request(name, body(size))
        chunks = max(3, round(options.stream_seconds * CHUNKS_A_SECOND))
        self._request("stream", stream_body(chunks, 1000 // CHUNKS_A_SECOND))
        self.chunks = chunks
        self.plain = PlainNginx.name  # the one that treats connections as ours does

    def _compile(self) -> Path:
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            raise Failed("no C compiler: install gcc, or name one in CC")
        tool = self.folder / "gateway_load"
        source = HERE / "gateway_load.c"
        subprocess.run([*shlex.split(compiler), "-O2", "-o", tool, source], check=True)
        return tool

    def _request(self, name: str, data: bytes) -> None:
        path = self.folder / f"{name.replace(' ', '')}.request"
        path.write_bytes(http(data))
        self.requests[name] = path

    @contextlib.contextmanager
    def backends(self, count: int = 2) -> Iterator[list[int]]:
        """Ports of this many backends."""
        ports = free_ports(count)
        with ExitStack() as stack:
            for port in ports:
                process = subprocess.Popen(
                    [self.tool, "serve", str(port)], stdout=subprocess.PIPE, text=True
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                assert process.stdout
                stack.enter_context(process.stdout)
                if process.stdout.readline().strip() != "serving":
                    raise Failed(f"the backend on port {port} did not start")
            yield ports

    def _load(self, name: str, *argv: object) -> dict[str, Any]:
        done = subprocess.run(
            [self.tool, *map(str, argv)], capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode:
            raise Failed(f"the client of {name} failed: {done.stderr.strip()}")
        result: dict[str, Any] = json.loads(done.stdout)
        if result["errors"]:
            self.errors[name].append(f"{result['errors']} x {result['error']}")
        return result

    def slice(self, name: str, port: int, pid: int | None, direct: dict[str, float]) -> None:
        """One slice of every size for one gateway; ``direct`` are this round's p50 without."""
        seconds = self.options.seconds
        for size in SIZES:
            request = self.requests[size]
            one = self._load(name, "closed", port, 1, seconds / 2, request)
            before = cpu_us(pid) if pid else 0.0
            many = self._load(name, "closed", port, CONNECTIONS, seconds, request)
            after = cpu_us(pid) if pid else 0.0
            found = self.found[name]
            if one["requests"]:
                if name == "direct":
                    direct[size] = one["p50_us"]
                    found[f"p50 {size}"].append(one["p50_us"])
                else:
                    found[f"added {size}"].append(one["p50_us"] - direct[size])
            if many["requests"]:
                found[f"rate {size}"].append(many["requests"] / many["seconds"])
                if pid:
                    found[f"cpu {size}"].append((after - before) / many["requests"])

    def streams(self, name: str, port: int) -> None:
        """Many streams at once, opened evenly over the gap between two chunks."""
        count = self.options.streams
        request, spread = self.requests["stream"], 1000 / CHUNKS_A_SECOND
        got = self._load(name, "streams", port, count, spread, request)
        if got["chunks"] != count * self.chunks:
            self.errors[name].append(f"{got['chunks']} of {count * self.chunks} chunks came")
        self.found[name]["delay p50"].append(got["p50_us"] / 1000)
        self.found[name]["delay p99"].append(got["p99_us"] / 1000)
        self.found[name]["stretch p99"].append(got["stretch_p99_us"] / 1000)

    def slice_of(self, each: Gateway, direct: dict[str, float]) -> None:
        """A slice for this gateway."""
        self.slice(each.name, each.port, each.pid, direct)

    def streams_of(self, each: Gateway) -> None:
        """Many streams through this gateway."""
        self.streams(each.name, each.port)

    @staticmethod
    def _first_chunk(each: Gateway, client: socket.socket) -> None:
        text = b""
        while b'"t=' not in text:
            got = client.recv(65536)
            text += got
            if not got:
                said = text[:200].decode(errors="replace")
                raise Failed(f"{each.name} ended an idle stream: {said}")

    def memory(self, each: Gateway) -> None:
        """Memory by idle stream: what the last ``held`` of them added in a fresh gateway."""
        request = http(stream_body(2, 3_600_000))
        with ExitStack() as held:
            sizes = []
            first = max(10, self.options.held // 5)
            for count in (first, self.options.held):
                clients = []
                for _ in range(count):
                    clients.append(held.enter_context(each.connect()))
                    clients[-1].sendall(request)
                for client in clients:
                    self._first_chunk(each, client)
                time.sleep(1)
                sizes.append(memory_kb(each.pid))
            self.found[each.name]["idle stream"].append((sizes[1] - sizes[0]) / self.options.held)
            self.found[each.name]["memory"].append(sizes[1])


def figures(bench: Bench) -> dict[str, dict[str, float]]:
    """Medians by gateway."""
    return {
        name: {key: round(median(values), 2) for key, values in found.items()}
        for name, found in bench.found.items()
    }


# What came out


def bounds(found: dict[str, dict[str, float]], plain: str) -> list[dict[str, Any]]:
    """Every bound on ours: ``met`` is null where a peer it compares with was not there."""
    out: list[dict[str, Any]] = []
    ours = found["ours"]

    def bound(name: str, value: float | None, limit: float | None) -> None:
        judged = value is not None and limit is not None
        met = value < limit if value is not None and limit is not None else None
        out.append(
            {
                "name": name,
                "found": round(value, 2) if value is not None else None,
                "limit": round(limit, 2) if limit is not None else None,
                "met": met if judged else None,
            }
        )

    for size, limit in ADDED_US.items():
        bound(f"added p50 us, {size}", ours.get(f"added {size}"), limit)
    for size, limit in CPU_US.items():
        bound(f"CPU us a request, {size}", ours.get(f"cpu {size}"), limit)
    bound("chunk delay p99 ms", ours.get("delay p99"), CHUNK_DELAY_MS)
    bound("kB an idle stream, HTTP/1.1", ours.get("idle stream"), IDLE_STREAM_KB)
    small = next(iter(SIZES))
    for kind in ("added", "cpu"):
        theirs = found.get(plain, {}).get(f"{kind} {small}")
        value = ours.get(f"{kind} {small}")
        times = value / theirs if value is not None and theirs else None
        bound(f"{kind} {small}, times {plain}", times, TIMES_NGINX)
    for rival in (RoundRobin.name, CacheAware.name, LiteLLM.name):
        for size in SIZES:
            for kind in ("added", "cpu"):
                key = f"{kind} {size}"
                theirs = found.get(rival, {}).get(key)
                bound(f"{key}, against {rival}", ours.get(key), theirs)
    return out


def table(found: dict[str, dict[str, float]]) -> None:
    """Figures of all, then ours as a multiple of each."""

    def cell(values: dict[str, float], key: str, form: str = ".0f") -> str:
        return f"{values[key]:{form}}" if key in values else "-"

    sizes = [f"{size:>15}" for size in SIZES]
    print(f"{'added p50 us / CPU us a request':32}{''.join(sizes)}   requests/s, 113 B")
    for name, values in found.items():
        cells = []
        for size in SIZES:
            if name == "direct":
                cells.append(f"({cell(values, f'p50 {size}')})")
            else:
                cells.append(f"{cell(values, f'added {size}')} / {cell(values, f'cpu {size}')}")
        rate = cell(values, "rate 113 B")
        print(f"{name:32}{''.join(f'{c:>15}' for c in cells)}   {rate:>17}")
    print(f"\n{'':32}{'chunk delay ms':>20}{'idle stream kB':>18}{'all, MB':>10}")
    for name, values in found.items():
        delay = f"{cell(values, 'delay p50', '.2f')} / {cell(values, 'delay p99', '.2f')}"
        whole = f"{values['memory'] / 1000:.0f}" if "memory" in values else "-"
        print(f"{name:32}{delay:>20}{cell(values, 'idle stream', '.1f'):>18}{whole:>10}")
    print("direct: latency itself in brackets; chunk delay: p50 / p99; all: with the idle streams")
    ours = found["ours"]
    print(f"\n{'ours, times (added / CPU)':32}{''.join(sizes)}")
    for name, values in found.items():
        if name in ("direct", "ours", OursTls.name):
            continue
        cells = []
        for size in SIZES:
            pair = [
                f"{ours[key] / values[key]:.2f}" if values.get(key) and key in ours else "-"
                for key in (f"added {size}", f"cpu {size}")
            ]
            cells.append(" / ".join(pair))
        print(f"{name:32}{''.join(f'{c:>15}' for c in cells)}")
    print()


def measure(
    bench: Bench, kinds: Sequence[type[Gateway]], skipped: dict[str, str]
) -> dict[str, str]:
    """Fill ``bench.found``; the versions of what ran. A peer that does not start is skipped."""
    versions: dict[str, str] = {}
    rounds = bench.options.rounds
    with bench.backends() as ports, ExitStack() as stack:
        alone: list[type[Gateway]] = [OursTls, *kinds]
        for kind in alone:
            each = kind(ports, bench.folder)
            print(f"memory of {each.name}", file=sys.stderr)
            try:
                with each.running():
                    bench.memory(each)
            except (Failed, OSError) as failed:
                if isinstance(each, Ours):
                    raise
                skipped[each.name] = str(failed)
        up = [kind(ports, bench.folder) for kind in kinds if kind.name not in skipped]
        for each in up:
            print(f"starting {each.name}", file=sys.stderr)
            stack.enter_context(each.running())
            if isinstance(each, Ours) and each.keeps_connections:
                bench.plain = KeepaliveNginx.name
            versions[each.name] = each.version()
        for turn in range(rounds):
            print(f"round {turn + 1} of {rounds}", file=sys.stderr)
            direct: dict[str, float] = {}
            bench.slice("direct", ports[0], None, direct)
            order = up[turn % len(up) :] + up[: turn % len(up)]
            for each in order:
                _or_without(bench, up, each, partial(bench.slice_of, direct=direct))
            bench.streams("direct", ports[0])
            for each in [e for e in order if e in up]:
                _or_without(bench, up, each, bench.streams_of)
    return versions


def _or_without(
    bench: Bench, up: list[Gateway], each: Gateway, measured: Callable[[Gateway], None]
) -> None:
    """Measure, or go on without a peer that died; ours must not."""
    try:
        measured(each)
    except (Failed, OSError) as error:
        if isinstance(each, Ours):
            raise Failed(f"ours: {error}") from error
        bench.errors[each.name].append(f"gave up: {error}")
        up.remove(each)


def main() -> int:
    """Runs the comparison; 1 where ours misses a bound or fails a request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing running
    names = {kind.name: kind for kind in GATEWAYS}
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one slice")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--stream-seconds", type=float, default=4.0, help="length of a stream")
    parser.add_argument("--held", type=int, default=500, help="idle streams for memory")
    options = parser.parse_args()
    kinds = [kind for name, kind in names.items() if name in options.only or kind is Ours]
    skipped = {kind.name: why for kind in kinds if (why := kind.missing())}
    if "ours" in skipped:
        print(f"ours cannot run here: {skipped['ours']}", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"other programs run here (load {load:.1f}): figures will be higher", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # nginx's workers are not root
        try:
            bench = Bench(options, folder)
            there = [kind for kind in kinds if kind.name not in skipped]
            versions = measure(bench, there, skipped)
        except Failed as failed:
            print(failed, file=sys.stderr)
            return 2
    found = figures(bench)
    order = ["direct", "ours", OursTls.name, *(n for n in names if n != "ours")]
    found = {name: found[name] for name in order if name in found}
    table(found)
    for name, why in skipped.items():
        print(f"{name}: not run: {why}")
    for name, texts in bench.errors.items():
        print(f"{name}: failed requests: {'; '.join(sorted(set(texts)))}")
    judged = bounds(found, bench.plain)
    for each in judged:
        if each["met"] is False:
            print(f"missed: {each['name']}: {each['found']} (bound {each['limit']})")
    result = {
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "figures": found,
        "bounds": judged,
        "errors": dict(bench.errors),
        "not_run": skipped,
        "met": not bench.errors["ours"] and all(each["met"] is not False for each in judged),
    }
    print(json.dumps(result))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
