"""The fleet of rolling.py, watched: Prometheus, Alertmanager and what receives its messages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.rolling import GATEWAY, HOSTS, RollingFleet, make, served
from tests.stubs.certificates import Issued, issue
from tests.testbed import receiver, services
from tests.testbed.bed import Bed
from tools.unanswered import Prometheus

RECEIVER_PORT = 8904
CERTIFICATE, KEY = "/etc/ssl/llm/fullchain.pem", "/etc/ssl/llm/privkey.pem"
SCRAPE_SECONDS = 5
Binds = Mapping[str, tuple[tuple[str, str], ...]]


@dataclass
class Monitored:
    """A fleet, its Prometheus, and the folder in which messages of alerts arrive."""

    fleet: RollingFleet
    prometheus: Prometheus
    inbox: Path
    ending: Issued  # a pair for the gateway that ends tomorrow, trusted as the one in use is

    @property
    def address(self) -> str:
        return self.fleet.bed.host(GATEWAY).address

    def firing(self) -> set[tuple[str, str]]:
        """Alerts that fire, each as (name, pool or host)."""
        return {
            (one["labels"]["alertname"], one["labels"].get("pool") or one["labels"].get("host", ""))
            for one in self.prometheus.get("alerts")["alerts"]
            if one["state"] == "firing"
        }

    def held_back(self) -> set[str]:
        """Names of alerts that Alertmanager sends to nobody for the sake of another one."""
        command = "curl -s 'http://127.0.0.1:9093/api/v2/alerts?active=false&inhibited=true'"
        text = self.fleet.bed.host(GATEWAY).sh(command).stdout
        return {one["labels"]["alertname"] for one in json.loads(text)}

    def messages(self) -> list[dict[str, Any]]:
        """Every alert that came by the webhook, with `at`, in the order of coming."""
        return [
            {**alert, "at": post["at"]}
            for post in receiver.posts(self.inbox, "/hook")
            for alert in post["body"]["alerts"]
        ]

    def put_certificate(self, pair: Issued) -> None:
        """As a renewal on the host does."""
        put(self.fleet, pair)


def put(fleet: RollingFleet, pair: Issued) -> None:
    """The pair that the gateway shows."""
    host = fleet.bed.host(GATEWAY)
    for path, text in ((KEY, pair.key_pem()), (CERTIFICATE, pair.pem)):
        host.sh(f"install -d {Path(path).parent}; cat >{path}; chmod 600 {path}", stdin=text)


@contextmanager
def monitored(
    bed: Bed,
    folder: Path,
    change: Callable[[dict[str, Any]], None] | None = None,
    binds: Binds | None = None,
) -> Iterator[Monitored]:
    """Hosts that serve 0.31.0 of the stand-in behind TLS, and are watched."""
    inbox = folder / "inbox"

    def watched(values: dict[str, Any]) -> None:
        values["gateway"] |= {
            "listen": 443,
            "tls": {"host_certificate": CERTIFICATE, "host_key": KEY},
        }
        values["monitoring"] = {
            "scrape_interval_seconds": SCRAPE_SECONDS,
            "retention_days": 1,
            "retention_gib": 1,
            "alerting": {
                "receivers": {
                    "hook": {"kind": "webhook", "url_file": "secrets/hook"},
                    "group": {
                        "kind": "dingtalk",
                        "url_file": "secrets/robot",
                        "secret_file": "secrets/robot.key",
                    },
                }
            },
        }
        if change:
            change(values)

    disk = folder / "disk"  # a file system that is counted: a host's own is an overlay
    disks = {name: ((str(disk), "/srv/disk"),) for name in (*HOSTS, GATEWAY)}
    fleet = make(bed, folder, watched, {**disks, **(binds or {})}, ("gateway", "monitoring"))
    fleet.secure = True
    address = bed.host(GATEWAY).address
    # Names of their own: of two issuers with one name clients try the first alone.
    pairs = [issue(f"gateway for {days} days", names=[address], days=days) for days in (90, 1)]
    put(fleet, pairs[0])
    trusted = folder / "trusted.pem"
    trusted.write_text("".join(pair.pem for pair in pairs))
    secrets = fleet.operator.root / "secrets"
    secrets.mkdir(exist_ok=True)
    posted = f"http://{bed.net.fabric}:{RECEIVER_PORT}"
    (secrets / "hook").write_text(f"{posted}/hook\n")
    (secrets / "robot").write_text(f"{posted}/robot?access_token=t\n")
    (secrets / "robot.key").write_text("SECrobot\n")
    listens = services.start(
        *("tests.testbed.receiver", inbox, bed.net.fabric, RECEIVER_PORT),
        bed.fabric.inside(),
        folder / "receiver.log",
    )
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = str(trusted)
    try:
        with served(fleet):
            fleet.wants("0.31.0")
            done = fleet.run("deploy.py")
            assert done.returncode == 0, done.stdout
            yield Monitored(fleet, Prometheus(f"http://{address}:9090"), inbox, pairs[1])
    finally:
        if before is None:
            del os.environ["SSL_CERT_FILE"]
        else:
            os.environ["SSL_CERT_FILE"] = before
        listens.stop()
        for name in [*bed.hosts]:
            if name.startswith("roll-"):
                bed.remove(name)
