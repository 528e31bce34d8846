"""The instances' ports on real hosts: open to the gateway, closed to others, kept, taken away.

Only the chapters of deploy.py that matter here are run, and what listens on an instance's port is
a stand-in: no engine is built.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operators import Operator, changes
from tests.testbed.bed import Bed
from tests.testbed.hosts import Host, HostSpec
from tests.testbed.shell import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

DEPLOY = """\
from vllm_fleet import deploys

plan = deploys.my_plan()
deploys.prepare(plan)
deploys.meet("Everything is prepared")
deploys.retire(plan)
"""
PORT, OTHER_PORT = 8001, 7999
OPEN, REFUSED = "0", "7"  # curl's exit codes
THEIRS = """\
table inet operator {
    chain input {
        type filter hook input priority 10; policy accept;
        tcp dport 6666 counter drop
    }
}
"""


class Site:
    """A GPU host, its gateway and a stranger; the operator wants one instance on the first."""

    def __init__(self, bed: Bed, root: Path) -> None:
        self.gpu, self.gateway, self.stranger = map(bed.host, ("fw-gpu", "fw-gw", "fw-other"))
        self.operator = Operator(root, bed.cache)
        (root / "deploy.py").write_text(DEPLOY)
        known = json.loads((bed.root / "state.json").read_text())["inventory"]
        (root / "inventory" / "fw.py").write_text(
            f"gpu = [('fw-gpu', {known['fw-gpu']!r})]\ngateway = [('fw-gw', {known['fw-gw']!r})]\n"
        )
        values = yaml.safe_load((root / "group_vars" / "demo.yml").read_text())
        values["instances"] = [
            {"name": "glm", "hosts": ["fw-gpu"], "model": "glm-4-tiny", "port": PORT}
        ]
        del values["models"]["qwen3-tiny"]
        self.values = values

    def run(self, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Deploy the GPU host alone, with these settings."""
        path = self.operator.root / "group_vars" / "fw.yml"
        path.write_text(yaml.safe_dump(self.values | settings))
        return self.operator.deploy("--limit", "fw-gpu", inventory="fw")

    def deploy(self, **settings: Any) -> dict[str, tuple[str, str, str]]:
        """Like run(), which must succeed: what changed; then something listens again."""
        self.listen(False)  # else the exam finds a stranger on the port
        done = self.run(**settings)
        assert done.returncode == 0, done.stdout
        self.listen(True)
        return changes(done.stdout)

    def listen(self, on: bool) -> None:
        """Something on the instance's port and on another, by IPv4 and IPv6."""
        for port in (PORT, OTHER_PORT):
            unit = f"stand-in-{port}"
            self.gpu.sh(f"systemctl stop {unit}", check=False)
            if on:
                serve = f"python3 -m http.server {port} --bind ::"
                self.gpu.sh(f"systemd-run -q --collect --unit={unit} {serve}")
        if on:
            assert until(lambda: self.ask(self.gpu, OTHER_PORT, "127.0.0.1") == OPEN, 20)
            assert until(lambda: self.ask(self.gpu, PORT, "127.0.0.1") == OPEN, 20)

    def ask(self, source: Host, port: int, address: str | None = None) -> str:
        """curl's exit code, from one host to the GPU host."""
        url = f"http://{address or self.gpu.address}:{port}/"
        done = source.sh(f"curl -gs -m 5 -o /dev/null {url}; echo $?", check=False)
        return done.stdout.strip()

    def closed(self) -> None:
        """The instance's port is open to the gateway and the host itself, and to nobody else."""
        assert self.ask(self.gateway, PORT) == OPEN
        assert self.ask(self.gpu, PORT) == OPEN
        assert self.ask(self.gpu, PORT, "127.0.0.1") == OPEN
        assert self.ask(self.stranger, PORT) == REFUSED
        # the rest is as it was
        assert self.ask(self.stranger, OTHER_PORT) == OPEN

    def tables(self) -> list[str]:
        return self.gpu.sh("nft list tables").stdout.splitlines()


@pytest.fixture(scope="module")
def site(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One for all tests here, which run in the order in which they stand."""
    names = ("fw-gpu", "fw-gw", "fw-other")
    for number, name in enumerate(names):
        empty_bed.add(HostSpec(name, 90 + number))
    yield Site(empty_bed, tmp_path_factory.mktemp("operator") / "o")
    for name in names:
        empty_bed.remove(name)


def test_a_kernel_without_nf_tables_is_told_what_to_do(site: Site) -> None:
    """nft is a stand-in here that says what the real one does there."""
    site.gpu.sh(
        "cat >/usr/local/sbin/nft; chmod 755 /usr/local/sbin/nft",
        stdin="#!/bin/sh\necho 'Unable to initialize Netlink socket: Protocol not supported' >&2\n"
        "exit 1\n",
    )
    done = site.run()
    site.gpu.sh("rm /usr/local/sbin/nft")
    assert done.returncode == 1
    assert "Unable to initialize Netlink socket" in done.stdout
    assert "set `firewall: false`" in done.stdout
    assert site.gpu.sh("ls /etc/vllm/firewall.nft", check=False).returncode != 0


def test_the_ports_of_instances_from_first_deploy_to_removal(site: Site) -> None:
    gpu = site.gpu
    gpu.sh("cat >/etc/operator.nft; nft -f /etc/operator.nft", stdin=THEIRS)
    theirs = gpu.sh("nft list table inet operator").stdout
    for number, host in enumerate((gpu, site.gateway, site.stranger), 1):
        host.sh(f"ip addr add fd77::{number}/64 dev host0 nodad")

    site.listen(True)
    assert site.ask(site.stranger, PORT) == OPEN
    assert site.deploy()["Firewall"] == ("1", "-", "-")
    site.closed()
    assert site.ask(site.gateway, PORT, "[fd77::1]") == REFUSED  # not an address it is known by
    assert site.ask(site.stranger, PORT, "[fd77::1]") == REFUSED
    assert gpu.sh("nft list table inet operator").stdout == theirs
    assert "counter packets 0" not in gpu.sh("nft list table inet vllm_fleet").stdout

    # once more: nothing to do
    again = site.deploy()
    assert {counts[0] for counts in again.values()} == {"-"}, again  # nothing was to be done

    # others let in by name of their network
    assert site.deploy(firewall_allow=["fd77::/64"])["Firewall"] == ("1", "-", "-")
    assert site.ask(site.stranger, PORT, "[fd77::1]") == OPEN
    site.closed()

    # a reboot; SSH is what tells that it is over
    gpu.reboot()
    site.listen(True)
    site.closed()
    assert site.tables() == ["table inet vllm_fleet"]

    # taken out of the settings: table, units and file go, the rest stays
    gpu.sh("nft -f /etc/operator.nft")
    site.deploy(firewall=False)
    assert site.ask(site.stranger, PORT) == OPEN
    assert site.tables() == ["table inet operator"]
    assert gpu.sh("nft list table inet operator").stdout == theirs
    left = gpu.sh(
        "ls -d /etc/vllm/firewall.nft /etc/systemd/system/*vllm-fleet-firewall* "
        "/etc/systemd/system/*.wants/vllm-fleet-firewall* 2>/dev/null; "
        "systemctl list-units --all --plain --no-legend 'vllm-fleet-firewall*'",
        check=False,
    )
    assert left.stdout == ""
    gpu.reboot()
    site.listen(True)
    assert site.ask(site.stranger, PORT) == OPEN

    # and back
    assert site.deploy()["Firewall"] == ("1", "-", "-")
    site.closed()


@pytest.mark.parametrize(
    "how",
    [
        "systemctl restart nftables.service",
        "systemctl reload nftables.service",
        "nft -f /etc/nftables.conf && systemctl start vllm-fleet-firewall-guard.service",
        "nft flush ruleset && systemctl start vllm-fleet-firewall-guard.service",
        "systemctl stop nftables.service; systemctl start vllm-fleet-firewall-guard.service",
    ],
    ids=["restart", "reload", "by hand", "flush", "stop"],
)
def test_a_ruleset_that_somebody_empties(site: Site, how: str) -> None:
    """Debian's nftables.conf begins with `flush ruleset`. The guard runs each minute by itself."""
    if "table inet vllm_fleet" not in site.tables():
        site.deploy()
    site.gpu.sh("systemctl start nftables.service")
    assert site.gpu.sh("systemctl is-active vllm-fleet-firewall-guard.timer").stdout == "active\n"
    site.gpu.sh("systemctl start vllm-fleet-firewall-guard.service", check=False)
    site.closed()
    site.gpu.sh(how)
    site.closed()
