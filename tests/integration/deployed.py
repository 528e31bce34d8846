"""The demo's hosts after a deploy, as tests look at them."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from tests.integration.load import Load
from tests.integration.operators import Operator
from tests.testbed.bed import Bed

MODELS = ("glm-4-tiny", "qwen3-tiny")
ACCESS_LOG = "/var/log/nginx/vllm-fleet.access.json"
# What a unit logs when it no longer serves, from whatever cause.
ENDS = (
    "not ready any more",
    "Main process exited",
    "Deactivated successfully",
    "Failed with result",
)


@dataclass(frozen=True)
class Deployed:
    """Hosts, the operator's directory, the gateway's address and a client's key."""

    bed: Bed
    operator: Operator
    url: str
    key: str
    first_run: str  # what the first deploy printed

    def get(self, path: str, key: str | None = None) -> Any:
        """JSON of the gateway, or of Prometheus for an absolute address."""
        url = path if path.startswith("http") else self.url + path
        request = urllib.request.Request(url)
        request.add_header("Authorization", f"Bearer {key or self.key}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def ask(self, model: str, path: str = "/v1/chat/completions", **body: Any) -> tuple[int, Any]:
        """(status, JSON) of a request to the gateway."""
        message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        request = urllib.request.Request(
            self.url + path,
            json.dumps({"model": model, **message, **body}).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def load(self, rate: float = 5) -> Load:
        """Requests for both models in turn."""
        return Load(self.url, self.key, MODELS, rate)

    def targets(self, job: str) -> set[str]:
        """Addresses that Prometheus scrapes in a job and finds up."""
        found = self.get(self.url + ":9090/api/v1/targets")["data"]["activeTargets"]
        return {
            one["labels"]["host"] + "/" + one["labels"]["instance"]
            for one in found
            if one["labels"]["job"] == job and one["health"] == "up"
        }

    def look(self, command: str) -> str:
        """Output of a command that changes nothing on the gateway's host.

        Asked again where SSH gave no connection: two cores that start engines keep it waiting.
        """
        for tries in range(4, -1, -1):
            done = self.bed.host("demo-gw").sh(command, check=not tries)
            if done.returncode == 0:
                break
            time.sleep(1)
        return done.stdout

    def status(self) -> dict[str, dict[str, bool]]:
        """Ready state by pool and "host/instance", as the gateway knows it."""
        text = self.look("curl -s http://127.0.0.1:9145/status")
        return {
            pool["name"]: {f"{i['host']}/{i['name']}": i["ready"] for i in pool["instances"]}
            for pool in json.loads(text)["pools"]
        }

    def wait_ready(self, seconds: float = 300) -> None:
        """Wait until the gateway finds every instance ready."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pools = self.status()
            if pools and all(all(pool.values()) for pool in pools.values()):
                return
            time.sleep(1)
        raise AssertionError(f"not ready within {seconds:.0f} s: {self.status()}")

    def access_log(self, since: float) -> list[dict[str, Any]]:
        """The gateway's log lines of requests that ended since a moment."""
        time.sleep(1.5)  # nginx writes it once a second
        text = self.look(f"cat {ACCESS_LOG}")
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if line["msec"] >= since and line["pool"] != "-"]

    def spells(
        self, host: str, instance: str, ends: tuple[float, ...] = ()
    ) -> list[tuple[float, float]]:
        """When an instance was ready: (from, to) in seconds since the epoch, from its journal.

        ``ends``: further moments at which it ceased to be, such as when a test killed it.
        """
        text = (
            self.bed.host(host)
            .sh(f"journalctl -u vllm@{instance} -o short-unix --no-pager --no-hostname")
            .stdout
        )
        begins, stops = [], list(ends)
        for line in text.splitlines():
            stamp, _, message = line.partition(" ")
            if "warmup: " in message and ": ready after " in message:
                begins.append(float(stamp))
            elif any(end in message for end in ENDS):
                stops.append(float(stamp))
        return [(begin, min((s for s in stops if s > begin), default=1e12)) for begin in begins]
