"""A certificate that something on the gateway renews: real systemd sees it, nginx reads it."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from tests.integration.operators import Operator, changes
from tests.stubs.certificates import Issued, issue
from tests.testbed.bed import Bed
from tests.testbed.hosts import Host, HostSpec
from tests.testbed.shell import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

DEPLOY = """\
from vllm_fleet import deploys

plan = deploys.my_plan()
deploys.prepare(plan)
deploys.meet("Everything is prepared")
deploys.open_gateway(plan)
deploys.retire(plan)
"""
LIVE, ARCHIVE = "/etc/renewed/live", "/etc/renewed/archive"


class Site:
    """One gateway, whose instances are nowhere, and whose certificate stands on it."""

    def __init__(self, bed: Bed, root: Path) -> None:
        self.host: Host = bed.host("tls-gw")
        self.operator = Operator(root, bed.cache)
        self.bed = bed
        (root / "deploy.py").write_text(DEPLOY)
        known = json.loads((bed.root / "state.json").read_text())["inventory"]["tls-gw"]
        (root / "inventory" / "tls.py").write_text(
            "gpu = [('nowhere', {'ssh_hostname': '10.255.255.1'})]\n"
            f"gateway = [('tls-gw', {known!r})]\n"
        )
        self.values = yaml.safe_load((root / "group_vars" / "demo.yml").read_text())
        self.values["instances"] = [
            {"name": "glm", "hosts": ["nowhere"], "model": "glm-4-tiny", "port": 8001}
        ]
        del self.values["models"]["qwen3-tiny"]
        self.made = 0

    def deploy(self, gateway: dict[str, object]) -> dict[str, tuple[str, str, str]]:
        path = self.operator.root / "group_vars" / "tls.yml"
        path.write_text(yaml.safe_dump({**self.values, "gateway": gateway}))
        done = self.operator.deploy("--limit", "tls-gw", inventory="tls")
        assert done.returncode == 0, done.stdout
        return changes(done.stdout)

    def put(self, path: str, text: str) -> None:
        self.host.sh(
            f"mkdir -p {path.rpartition('/')[0]}; cat >{path}; chmod 600 {path}", stdin=text
        )

    def renew(self, pair: Issued) -> None:
        """As certbot does: new files in the archive, links turned to them."""
        self.made += 1
        for name, text in (("fullchain", pair.pem), ("privkey", pair.key_pem())):
            self.put(f"{ARCHIVE}/{name}{self.made}.pem", text)
            self.host.sh(
                f"mkdir -p {LIVE}; ln -sfn {ARCHIVE}/{name}{self.made}.pem {LIVE}/{name}.pem"
            )

    def served(self) -> int:
        """Serial number of the certificate that the gateway shows; 0 where it shows none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with (
                socket.create_connection((self.host.address, 443), 5) as plain,
                context.wrap_socket(plain) as secured,
            ):
                data = secured.getpeercert(binary_form=True)
        except OSError:
            return 0
        assert data is not None
        return x509.load_der_x509_certificate(data).serial_number

    def shows(self, pair: Issued) -> bool:
        return until(lambda: self.served() == pair.certificate.serial_number, 30, 0.5)


@pytest.fixture
def site(empty_bed: Bed, tmp_path: Path) -> Iterator[Site]:
    empty_bed.add(HostSpec("tls-gw", 80))
    yield Site(empty_bed, tmp_path / "operator")
    empty_bed.remove("tls-gw")


def test_a_renewal_on_the_host_is_read_and_a_broken_one_is_not(site: Site) -> None:
    first, second, third, fourth = (issue() for _ in range(4))
    site.renew(first)
    tls = {"host_certificate": f"{LIVE}/fullchain.pem", "host_key": f"{LIVE}/privkey.pem"}
    settings: dict[str, object] = {"listen": 443, "tls": tls}
    site.deploy(settings)
    assert site.shows(first)
    again = site.deploy(settings)
    assert again == {}  # nothing was to be done

    site.renew(second)
    assert site.shows(second)

    # a pair that does not match: nginx goes on with what it has, and the journal says why
    site.put(f"{LIVE}/fullchain.pem", third.pem)
    unit = "systemctl show -P Result vllm-fleet-tls.service"
    assert until(lambda: site.host.sh(unit).stdout.strip() == "exit-code", 30, 0.5)
    assert "key values mismatch" in site.host.sh("journalctl -u vllm-fleet-tls").stdout
    assert site.served() == second.certificate.serial_number
    # its key comes later
    site.put(f"{LIVE}/privkey.pem", third.key_pem())
    assert site.shows(third)

    # files written in place
    site.host.reboot()
    assert site.shows(third)
    site.put(f"{LIVE}/privkey.pem", fourth.key_pem())
    site.put(f"{LIVE}/fullchain.pem", fourth.pem)
    assert site.shows(fourth)

    # back to plain HTTP: the watching ends
    site.deploy({"listen": 80})
    left = site.host.sh(
        "ls -d /etc/systemd/system/vllm-fleet-tls* /etc/systemd/system/*.wants/vllm-fleet-tls* "
        "2>/dev/null; systemctl list-units --all --plain --no-legend 'vllm-fleet-tls*'",
        check=False,
    )
    assert left.stdout == ""
