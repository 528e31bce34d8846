"""What a newcomer sees at the end of ``make demo``: the service answers, and where things are."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import yaml

from tests.testbed.bed import Bed
from tests.testbed.shell import BedError

MODELS = ("glm-4-tiny", "qwen3-tiny")
PROMETHEUS_PORT = 9090
_BOLD, _PLAIN = "\033[1m", "\033[0m"


def main() -> int:
    """Ask the demo's gateway; 0 when everything answered."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        bed = Bed()
        gateway = bed.host("demo-gw").address
        key = yaml.safe_load((bed.cache / "demo-keys.yml").read_text())[0]["key"]
        _models(gateway, key)
        for model in MODELS:
            _chat(gateway, key, model)
        down = _targets(gateway)
        _where(bed, gateway, key)
    except (BedError, OSError, ValueError, KeyError) as error:
        print(f"demo: {_reason(error)}", file=sys.stderr)
        return 1
    return 1 if down else 0


def _models(gateway: str, key: str) -> None:
    _title(f"Models: GET http://{gateway}/v1/models")
    for model in _get(f"http://{gateway}/v1/models", key)["data"]:
        print(f"  {model['id']}")


def _chat(gateway: str, key: str, model: str) -> None:
    _title(f"A streamed answer of {model} (random weights: words without sense)")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "How do you serve a model?"}],
        "stream": True,
        "max_tokens": 40,
        "temperature": 0.7,
    }
    started = time.monotonic()
    first, pieces = 0.0, 0
    sys.stdout.write("  ")
    for delta in _stream(f"http://{gateway}/v1/chat/completions", key, body):
        text = delta.get("content") or delta.get("reasoning") or ""
        if text:
            first = first or time.monotonic() - started
            pieces += 1
            sys.stdout.write(text.replace("\n", " "))
            sys.stdout.flush()
    if not pieces:
        raise BedError(f"{model}: the gateway's answer was empty")
    took = time.monotonic() - started
    print(f"\n  first piece after {first:.2f} s, {pieces} pieces in {took:.2f} s")


def _targets(gateway: str) -> int:
    """Print what Prometheus watches; how many of it are not up."""
    address = f"http://{gateway}:{PROMETHEUS_PORT}"
    _title(f"What Prometheus watches: {address}/targets")
    deadline = time.monotonic() + 60  # a target is unknown until it was read once
    while True:
        active = _get(f"{address}/api/v1/targets")["data"]["activeTargets"]
        unwell = [t for t in active if t["health"] != "up"]
        if (active and not unwell) or time.monotonic() > deadline:
            break
        time.sleep(1)
    for target in sorted(active, key=lambda t: str(t["scrapeUrl"])):
        print(f"  {target['health']:8} {target['scrapeUrl']}")
    return len(unwell) if active else 1


def _where(bed: Bed, gateway: str, key: str) -> None:
    _title("Look around")
    print(f"""\
  curl -s -H 'Authorization: Bearer {key}' http://{gateway}/v1/models
  python -m tests.testbed status                   hosts and servers of the demo
  python -m tests.testbed sh demo-gpu-1 'systemctl status vllm@glm'
  python -m tests.testbed sh demo-gpu-1 'journalctl -u vllm@glm -n 50 --no-pager'
  pyinfra inventory/demo.py deploy.py -y           deploy again: nothing changes
  group_vars/demo.yml                              what the demo's hosts shall be
  {bed.root}    the bed itself
  (python and pyinfra are those in .venv/bin; root is needed for the test bed)

  make demo-down                                   removes the hosts, keeps the caches""")


def _get(url: str, key: str | None = None) -> Any:
    request = urllib.request.Request(url)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with _open(request, 30) as answer:
        return json.load(answer)


def _stream(url: str, key: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The deltas of a streamed chat."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with _open(request, 300) as answer:
        for raw in answer:
            data = raw.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if data.startswith("{"):
                yield from (c["delta"] for c in json.loads(data)["choices"])


def _open(request: urllib.request.Request, timeout: float) -> Any:
    # a proxy of the environment is for the Internet, never for the bed
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.url}: {error.code} {error.read().decode(errors='replace')[:500]}"
    return str(error)


def _title(text: str) -> None:
    print(f"\n{_BOLD}{text}{_PLAIN}" if sys.stdout.isatty() else f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
