"""Take instances out of their pools at the gateway of this host, and put them back.

Runs with the host's own Python, standard library only; talks to the gateway's status port on
the loopback. Reads one JSON object from standard input and prints ``result`` and a JSON object
as its last line, or ``refused`` and why.

    status    {}                              ready, draining and in_flight by instance
    drain     {"instances", "seconds"}        no new request, then wait for those in flight
    undrain   {"instances", "seconds"}        back again, then wait until they are ready
    counts    {"instances"}                   requests answered and failed since nginx started

An instance is called ``host/name``. Each may be said again and again.
"""

import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Callable, Dict, List

Json = Dict[str, Any]

PORT = 9145
POLL_SECONDS = 0.2
SAY_SECONDS = 15.0
CALL_SECONDS = 10


class Refused(Exception):
    """The gateway did not do what it was told; in words for the operator."""


def call(method: str, path: str) -> str:
    """What the gateway answers. Raises Refused."""
    request = urllib.request.Request("http://127.0.0.1:%d%s" % (PORT, path), method=method)
    request.add_header("Accept", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy
    try:
        with opener.open(request, timeout=CALL_SECONDS) as answer:
            text: str = answer.read().decode("utf-8", "replace")
            return text
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", "replace").strip()
        raise Refused("the gateway answered %d to %s: %s" % (error.code, path, said)) from None
    except OSError as error:
        raise Refused(
            "the gateway does not answer on port %d (%s): is nginx running?" % (PORT, error)
        ) from None


def states() -> Dict[str, Json]:
    """Every instance that this gateway knows."""
    try:
        pools = json.loads(call("GET", "/status"))["pools"]
        return {
            "%s/%s" % (one["host"], one["name"]): {
                "pool": pool["name"],
                "ready": bool(one["ready"]),
                "draining": bool(one.get("draining", False)),
                "in_flight": int(one["in_flight"]),
            }
            for pool in pools
            for one in pool["instances"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise Refused("the gateway's /status cannot be read (%r)" % error) from None


def known(names: List[str], now: Dict[str, Json]) -> List[Json]:
    """The states of these instances. Raises Refused where the gateway does not know one."""
    unknown = [name for name in names if name not in now]
    if unknown:
        raise Refused("this gateway does not know %s: deploy it first" % ", ".join(unknown))
    return [now[name] for name in names]


def tell(what: str, name: str) -> None:
    """POST /drain or /undrain for one instance."""
    call("POST", "/%s?instance=%s" % (what, urllib.parse.quote(name, safe="/@:")))


def status(order: Json) -> Json:
    """Every instance that this gateway knows."""
    return {"instances": states()}


def drain(order: Json) -> Json:
    """Keep requests away, see that it is so, and wait until nothing is in flight."""
    names = order["instances"]
    known(names, states())
    for name in names:
        tell("drain", name)
    begun = time.monotonic()
    said = begun
    while True:
        now = known(names, states())
        if not all(one["draining"] for one in now):
            raise Refused("was told to drain %s, and does not" % ", ".join(names))
        left = sum(one["in_flight"] for one in now)
        took = time.monotonic() - begun
        if not left or took >= float(order["seconds"]):
            return {"in_flight": left, "seconds": round(took, 2)}
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            say("%s: %d requests in flight, %.0f s" % (", ".join(names), left, took))
        time.sleep(POLL_SECONDS)


def undrain(order: Json) -> Json:
    """Let requests in again, and wait until the gateway finds the instances ready."""
    names = order["instances"]
    for name in names:
        tell("undrain", name)
    deadline = time.monotonic() + float(order["seconds"])
    while True:
        now = known(names, states())
        if any(one["draining"] for one in now):
            raise Refused("was told to undrain %s, and does not" % ", ".join(names))
        ready = all(one["ready"] for one in now)
        if ready or time.monotonic() >= deadline:
            return {"ready": ready}
        time.sleep(POLL_SECONDS)


def counts(order: Json) -> Json:
    """Requests that these instances answered, and those of them that failed (500 and above)."""
    wanted = set(order["instances"])
    answered = failed = 0
    for line in call("GET", "/metrics").splitlines():
        match = re.match(r"vllm_fleet_gateway_requests_total\{(.*)\} ([\d.e+]+)$", line)
        if not match:
            continue
        labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match.group(1)))
        if "%s/%s" % (labels.get("host"), labels.get("instance")) not in wanted:
            continue
        count = int(float(match.group(2)))
        answered += count
        failed += count if labels.get("code", "").startswith("5") else 0
    return {"answered": answered, "failed": failed}


def say(text: str) -> None:
    """A progress line, at once."""
    print(text, flush=True)


ACTIONS: Dict[str, Callable[[Json], Json]] = {
    "status": status,
    "drain": drain,
    "undrain": undrain,
    "counts": counts,
}


def main() -> int:
    """Do what stands on standard input."""
    order = json.load(sys.stdin)
    try:
        if order.get("action") not in ACTIONS:
            raise Refused("%r is none of %s" % (order.get("action"), ", ".join(ACTIONS)))
        result = ACTIONS[order["action"]](order)
    except Refused as error:
        say("refused %s" % error)
        return 1
    say("result %s" % json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
