"""A real nginx on loopback, run over the files that the gateway's renderer makes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from vllm_fleet import gateway
from vllm_fleet.files import ManagedFile

# As Debian's nginx.conf: what matters is in which context our files are included.
MAIN = """\
user www-data;
worker_processes 2;
pid {root}/nginx.pid;
error_log {root}/var/log/nginx/error.log notice;
include /etc/nginx/modules-enabled/*-mod-http-ndk.conf;
include /etc/nginx/modules-enabled/*-mod-http-lua.conf;
include {root}/etc/nginx/modules-enabled/*.conf;
events {{ worker_connections 4096; }}
http {{
    sendfile on;
    tcp_nopush on;
    include /etc/nginx/mime.types;
    default_type application/octet-stream;
    ssl_protocols TLSv1 TLSv1.1 TLSv1.2 TLSv1.3;
    access_log {root}/var/log/nginx/access.log;
    gzip on;
    client_body_temp_path {root}/body;
    proxy_temp_path {root}/proxy;
    include {root}/etc/nginx/conf.d/*.conf;
    include {root}/etc/nginx/sites-enabled/*;
}}
"""


def available() -> bool:
    """Whether this machine has nginx with the Lua module and may run it as Debian does."""
    return (
        os.geteuid() == 0
        and shutil.which("nginx") is not None
        and Path("/usr/lib/nginx/modules/ngx_http_lua_module.so").exists()
    )


def wait_for(what: Callable[[], Any], seconds: float = 10.0, step: float = 0.02) -> Any:
    """The first true value of ``what``; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(step)
    return value


def _runs(pid: int) -> bool:
    """Whether the process exists and is not just waiting to be reaped."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


class Nginx:
    """One nginx below a directory of its own; ``port`` for clients, ``status_port`` beside it."""

    def __init__(self, port: int, status_port: int, *, tls: bool = False) -> None:
        self.port, self.status_port, self.tls = port, status_port, tls
        self.root = Path(tempfile.mkdtemp(prefix="fleet-nginx-"))
        self.root.chmod(0o755)  # the workers are not root
        for directory in ("var/log/nginx", "etc/nginx/sites-enabled", "body", "proxy"):
            (self.root / directory).mkdir(parents=True)
        self.conf = self.root / "nginx.conf"
        self.conf.write_text(MAIN.format(root=self.root))

    def put(self, files: Sequence[ManagedFile]) -> None:
        """Write the files below the directory, with their paths in them moved there too."""
        for file in files:
            text = file.content
            for path in (gateway.LUA, gateway.ETC, gateway.ACCESS_LOG, gateway.DRAINED):
                text = text.replace(path, f"{self.root}{path}")
            path_here = self.root / file.path.lstrip("/")
            path_here.parent.mkdir(parents=True, exist_ok=True)
            path_here.write_text(text)
            path_here.chmod(file.mode)
            shutil.chown(path_here, file.owner, file.group)

    def site(self, text: str) -> None:
        """A site of somebody else."""
        (self.root / "etc/nginx/sites-enabled/other").write_text(text)

    def check(self) -> str:
        """What ``nginx -t`` says; raises where it refuses."""
        done = subprocess.run(
            ["nginx", "-t", "-c", self.conf], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def start(self) -> Self:
        self.check()
        subprocess.run(["nginx", "-c", self.conf], check=True, capture_output=True)
        return self

    @property
    def pid(self) -> int:
        return int((self.root / "nginx.pid").read_text())

    @property
    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def reload(self) -> None:
        """Reload, and wait until new workers run; old ones may go on."""
        before = set(self.workers)
        os.kill(self.pid, signal.SIGHUP)
        wait_for(lambda: len(set(self.workers) - before) == 2)

    def stop(self) -> None:
        """Stop nginx, where it runs, and remove its directory."""
        pid_file = self.root / "nginx.pid"
        if pid_file.exists() and pid_file.stat().st_size:  # `nginx -t` leaves an empty one
            pids = [self.pid, *self.workers]
            os.kill(pids[0], signal.SIGTERM)
            try:
                wait_for(lambda: not any(map(_runs, pids)))
            except AssertionError:  # a worker hangs: leave none behind, and say so
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise
        shutil.rmtree(self.root)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # What tests ask

    def connect(self, timeout: float = 30) -> http.client.HTTPConnection:
        if self.tls:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=timeout, context=context
            )
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = 30,
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers with lower-case names, body)."""
        connection = self.connect(timeout)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            data = response.read()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, data
        finally:
            connection.close()

    def chat(self, model: str | None = None, **more: Any) -> tuple[int, dict[str, str], Any]:
        """A chat; the answer is decoded."""
        timeout = more.pop("timeout", 30)
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        body = {"messages": [{"role": "user", "content": "hi"}], **more}
        if model is not None:
            body["model"] = model
        status, got, data = self.ask(
            "POST", "/v1/chat/completions", json.dumps(body).encode(), headers, timeout
        )
        return status, got, json.loads(data)

    def _of_ours(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.status_port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            assert response.status == 200
            return response.read()
        finally:
            connection.close()

    def status(self) -> Any:
        return json.loads(self._of_ours("/status"))

    def metrics(self) -> str:
        return self._of_ours("/metrics").decode()

    def instances(self) -> dict[str, Any]:
        """Every instance of /status by its id."""
        return {
            f"{i['host']}/{i['name']}": i for p in self.status()["pools"] for i in p["instances"]
        }

    def wait_ready(self, **ready: bool) -> None:
        """Wait until every instance has the state; ``all=True`` for all, else by name."""
        everywhere = ready.pop("all", None)

        def reached() -> bool:
            now = {i["name"]: i["ready"] for i in self.instances().values()}
            if everywhere is not None:
                return all(state == everywhere for state in now.values())
            return all(now[name.replace("_", "-")] == state for name, state in ready.items())

        wait_for(reached)

    def access(self) -> list[dict[str, Any]]:
        """The access log, one object a request, by the time when it ended.

        Each worker writes out what it has once a second.
        """
        log = self.root / gateway.ACCESS_LOG.lstrip("/")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return sorted(lines, key=lambda line: float(line["msec"]))

    def logged(self, request_id: str) -> dict[str, Any]:
        """The access log's line of one request; nginx writes it after the answer."""
        lines: list[dict[str, Any]] = wait_for(
            lambda: [line for line in self.access() if line["request_id"] == request_id]
        )
        assert len(lines) == 1
        return lines[0]

    def errors(self) -> str:
        return (self.root / "var/log/nginx/error.log").read_text()
