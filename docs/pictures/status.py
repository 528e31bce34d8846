"""Take the picture of the gateway's /status page: docs/pictures/status.png.

As root, where nginx with its Lua module and Chromium are installed:

    python -m docs.pictures.status

The gateway is a real one. The instances are stand-ins on addresses of the loopback range, one of
them drained and one not ready, under requests of this script for some time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.integration.browser import Browser
from tests.stubs.engine import Engine
from tests.stubs.gateway import Nginx, free_ports, wait_for
from tests.unit.gateway.fleet import pool, spec
from vllm_fleet import gateway
from vllm_fleet.planned import Pool

PICTURE = Path(__file__).with_name("status.png")
PORT = 8001
SECONDS = 40


def _pool(name: str, hosts: range, release: str, *aliases: str) -> Pool:
    made = pool(name, [PORT] * len(hosts), aliases=aliases)
    instances = tuple(
        replace(
            one,
            host=f"gpu-{n:02}",
            address=f"127.0.1.{10 + n}",
            name=name.partition("-")[0],
            release=release,
            vllm_version=release.partition("-")[0],
        )
        for one, n in zip(made.instances, hosts, strict=True)
    )
    return replace(made, instances=instances)


def _ask(nginx: Nginx, model: str, stream: bool, until: float) -> None:
    while time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException):
            body = json.dumps({"model": model, "stream": stream, "messages": []}).encode()
            nginx.ask("POST", "/v1/chat/completions", body)
        time.sleep(0.3)


def main() -> None:
    """Serve, ask, look."""
    pools = [
        _pool("glm-4.5-air", range(1, 5), "0.21.0-3f2a9c1e", "glm"),
        _pool("qwen3-8b", range(5, 8), "0.22.0-b81d04e7", "small"),
    ]
    engines = {
        one.host: Engine(one.host, host=one.address, port=PORT, first_byte=0.2, chunk_gap=0.1)
        for each in pools
        for one in each.instances
    }
    engines["gpu-06"].ready = False
    port, status_port = free_ports(2)
    with ExitStack() as stack:
        for engine in engines.values():
            engine.chunks = 60
            stack.enter_context(engine)
        nginx = Nginx(port, status_port)
        nginx.put(gateway.files(spec(listen=port), pools, {}, (), status_port=status_port))
        stack.enter_context(nginx)
        wait_for(lambda: nginx.status()["ready"] == 6)
        drain = http.client.HTTPConnection("127.0.0.1", status_port)
        drain.request("POST", "/drain?instance=gpu-03/glm")
        drain.getresponse().read()
        until = time.monotonic() + SECONDS
        kinds = [("glm", True)] * 8 + [("small", True)] * 3 + [("glm", False)] * 3
        kinds += [("small", False)] * 2
        clients = [
            threading.Thread(target=_ask, args=(nginx, model, stream, until))
            for model, stream in kinds
        ]
        for client in clients:
            client.start()
        time.sleep(SECONDS - 3)
        browser = stack.enter_context(Browser())
        browser.size(1100, 600)
        browser.go(f"http://127.0.0.1:{status_port}/status")
        browser.picture(PICTURE, whole=True)
        for client in clients:
            client.join()
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
