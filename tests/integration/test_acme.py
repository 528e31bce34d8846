"""A certificate from an authority: real nginx, certbot and Pebble, an authority for tests.

Run where the Debian packages `certbot` and `pebble` are. What systemd and root's own paths do on a
gateway, stand-ins and a folder do here.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from tests.ports import free_ports
from tests.stubs.certificates import issue
from tests.stubs.gateway import Nginx, available, wait_for
from tests.unit.fleets import fleet, states
from vllm_fleet import gateway, paths
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations import gateway as operations
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import Inputs

PROGRAMS = ("certbot", "pebble", "pebble-challtestsrv")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not available() or not all(map(shutil.which, PROGRAMS)),
        reason="needs root, nginx with its Lua module, and the packages certbot and pebble",
    ),
    pytest.mark.timeout(180),
]


class Authority:
    """Pebble, for which every name leads to 127.0.0.1."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.port, management, dns, self.proof_port = free_ports(4)
        made = issue("localhost", names=["localhost", "127.0.0.1"])
        (folder / "ca.pem").write_text(made.pem)
        (folder / "ca.key").write_text(made.key_pem())
        config = {
            "listenAddress": f"127.0.0.1:{self.port}",
            "managementListenAddress": f"127.0.0.1:{management}",
            "certificate": str(folder / "ca.pem"),
            "privateKey": str(folder / "ca.key"),
            "httpPort": self.proof_port,
            "tlsPort": 1,
            "ocspResponderURL": "",
            "externalAccountBindingRequired": False,
        }
        (folder / "pebble.json").write_text(json.dumps({"pebble": config}))
        none = [word for name in ("http01", "https01", "tlsalpn01") for word in (f"-{name}", "")]
        names = ["-defaultIPv4", "127.0.0.1", "-defaultIPv6", "", "-management", ""]
        for words in (
            ["pebble-challtestsrv", "-dns01", f"127.0.0.1:{dns}", *none, *names],
            ["pebble", "-config", str(folder / "pebble.json"), "-dnsserver", f"127.0.0.1:{dns}"],
        ):
            log = stack.enter_context((folder / f"{words[0]}.log").open("w"))
            process = subprocess.Popen(
                words, stdout=log, stderr=log, env={**os.environ, "PEBBLE_VA_NOSLEEP": "1"}
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        wait_for(self._answers)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    with ExitStack() as stack:
        yield Authority(tmp_path, stack)


def served(port: int) -> x509.Certificate:
    """The certificate that the gateway shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="llm.example.com") as secured,
    ):
        data = secured.getpeercert(binary_form=True)
    assert data is not None
    return x509.load_der_x509_certificate(data)


def commands(operation: Any, plan: HostPlan) -> list[str]:
    return [command.get_raw_value() for command in operation._inner(plan)]


def test_from_the_stand_in_to_a_renewed_certificate(authority: Authority, tmp_path: Path) -> None:
    port, status = free_ports(2)
    root = tmp_path / "operator"
    found = fleet(
        root,
        gateway=f"gateway: {{listen: {port}, tls: {{acme: {{email: ops@example.com, domains: "
        f'[llm.example.com, chat.example.com], directory: "https://127.0.0.1:{authority.port}/dir"'
        "}}}\n",
    )
    plan = plan_fleet(found, states(found), Inputs())["gw-1"]
    nginx = Nginx(port, status, tls=True)
    own = nginx.root / "certbot"

    def run(command: str) -> None:
        for path in (gateway.ETC, gateway.ACME_HOOK, paths.STATE):  # the webroot is in the last
            command = command.replace(f"{path}", f"{nginx.root}{path}")
        folders = f"--config-dir {own} --work-dir {own} --logs-dir {own}"
        command = command.replace("certbot certonly", f"certbot certonly {folders}")
        done = subprocess.run(
            ["sh", "-c", command.replace("certbot renew", f"certbot renew {folders}")],
            env={
                **os.environ,
                "PATH": f"{nginx.root / 'bin'}:{os.environ['PATH']}",
                "REQUESTS_CA_BUNDLE": str(tmp_path / "ca.pem"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        log = tmp_path / "pebble.log"
        assert done.returncode == 0, done.stdout + done.stderr + log.read_text()[-3000:]

    try:
        for name, text in (
            ("nginx", f'exec /usr/sbin/nginx -c {nginx.conf} "$@"'),
            ("systemctl", f'test "$*" = "reload nginx"; kill -HUP $(cat {nginx.root}/nginx.pid)'),
        ):
            (nginx.root / "bin").mkdir(exist_ok=True)
            (nginx.root / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (nginx.root / "bin" / name).chmod(0o755)
        (nginx.root / f"{paths.STATE[1:]}/loaded").mkdir(parents=True)

        for command in commands(operations.stand_in, plan) * 2:  # it is kept the second time
            run(command)
        host = found.host("gw-1")
        nginx.put(gateway.files(host, [], {}, (), status_port=status))
        for path in (gateway.CONF, gateway.ACME_HOOK):
            file = nginx.root / path.lstrip("/")
            text = file.read_text().replace(
                gateway.ACME_WEBROOT, f"{nginx.root}{gateway.ACME_WEBROOT}"
            )
            file.write_text(text.replace("listen 80;", f"listen {authority.proof_port};"))
        with nginx:
            assert "stand-in" in served(port).subject.rfc4514_string()
            (command,) = commands(operations.certificate, plan)
            run(command)
            wait_for(lambda: "Pebble" in served(port).issuer.rfc4514_string())
            first = served(port)
            names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert sorted(names.get_values_for_type(x509.DNSName)) == [
                "chat.example.com",
                "llm.example.com",
            ]
            assert plan.missing_certificate is not None
            stamp = nginx.root / f"{paths.STATE[1:]}/loaded/acme"
            assert stamp.read_text() == plan.missing_certificate.checksum
            pem = nginx.root / gateway.ACME_PEM.lstrip("/")
            assert pem.stat().st_mode & 0o777 == 0o600

            # what certbot.timer does when it is time
            run("certbot renew --force-renewal --quiet --no-random-sleep-on-renew")
            wait_for(lambda: served(port).serial_number != first.serial_number)
            assert "Pebble" in served(port).issuer.rfc4514_string()
    finally:
        if nginx.root.exists():
            nginx.stop()
