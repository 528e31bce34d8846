"""The test bed itself: what other tests rely on when they break hosts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import CACHE, ROOT, HostFactory
from tests.testbed.bed import Bed
from tests.testbed.fabric import namespaces
from tests.testbed.hosts import Host
from tests.testbed.services import REPO
from tests.testbed.shell import BedError, run, until

OUTSIDE = "192.0.2.1"  # reserved for documentation: no packet is meant to arrive


@pytest.fixture
def host(host_factory: HostFactory) -> Host:
    return host_factory("small")


def answers(host: Host) -> bool:
    return host.sh("true", check=False, timeout=8).returncode == 0


def test_a_host_runs_systemd_and_sshd(host: Host) -> None:
    state = host.sh("systemctl is-system-running --wait", check=False).stdout.strip()
    assert state == "running", host.sh("systemctl --failed --no-legend", check=False).stdout
    assert host.sh("hostname").stdout == "small\n"
    assert host.sh("cat /proc/1/comm").stdout == "systemd\n"
    assert host.sh("stat -f -c %T /sys/fs/cgroup").stdout == "cgroup2fs\n"


def test_ops_is_root_only_by_sudo(host_factory: HostFactory) -> None:
    host = host_factory("opshost", user="ops")
    argv = host.ssh_argv()
    assert run([*argv, "id -un"]).stdout == "ops\n"
    assert run([*argv, "sudo -n true"], check=False).returncode != 0
    assert host.sh("id -un; cat", stdin="passed on\n").stdout == "root\npassed on\n"
    as_root = [*argv[:-1], f"root@{host.address}", "true"]
    assert run(as_root, check=False).returncode == 255


def test_hosts_reach_each_other_and_nothing_else(host_factory: HostFactory) -> None:
    one, two = host_factory("one"), host_factory("two")
    one.sh(f"ping -c1 -W2 {two.address}")
    assert one.sh(f"ping -c1 -W1 {OUTSIDE}", check=False).returncode != 0


def test_packages_of_a_deploy_install_without_a_network(host: Host) -> None:
    assert host.sh("command -v jq", check=False).returncode != 0
    install = "DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install"
    host.sh(f"{install} jq lua-cjson", timeout=60)
    assert host.sh("echo '[7]' | jq .[0]").stdout == "7\n"


def test_reboot_comes_back_as_another_boot(host: Host) -> None:
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    before = host.sh(boot_id).stdout
    host.sh("touch /run/gone /root/stays")
    host.reboot()
    assert host.sh(boot_id).stdout != before
    assert host.sh("ls /run/gone /root/stays", check=False).stdout == "/root/stays\n"


def test_power_cut_kills_at_once_and_keeps_files(host: Host) -> None:
    host.sh("systemd-run -q --unit=work sleep 1000; echo kept >/root/file; sync")
    started = time.monotonic()
    host.powercut()
    assert time.monotonic() - started < 5
    assert not host.running()
    assert not answers(host)
    host.boot()
    host.wait()
    assert host.sh("cat /root/file").stdout == "kept\n"
    assert host.sh("systemctl is-active work", check=False).stdout == "inactive\n"


def test_a_frozen_host_hangs_and_goes_on(host: Host) -> None:
    host.freeze()
    with pytest.raises(BedError, match="no end after 3 s"):
        host.sh("true", timeout=3)
    host.thaw()
    host.wait(20)
    assert answers(host)


def test_a_cut_off_host_lives_on_alone(host: Host) -> None:
    host.sh("systemd-run -q sh -c 'sleep 2; touch /root/alive'")
    host.cut()
    assert not answers(host)
    host.mend()
    host.wait(20)
    assert until(lambda: host.sh("ls /root/alive", check=False).returncode == 0, 10)


def test_a_second_up_changes_nothing(empty_bed: Bed, host: Host) -> None:
    before = host.sh("cat /proc/sys/kernel/random/boot_id").stdout
    started = time.monotonic()
    empty_bed.up([host.spec], serve=(), uplink=False)
    assert time.monotonic() - started < 10
    assert host.sh("cat /proc/sys/kernel/random/boot_id").stdout == before


@pytest.fixture
def other_root() -> Iterator[Path]:
    """The folder of a second bed; always the same, so that the next run finds what is left."""
    root = ROOT.with_name(ROOT.name + "-second")
    Bed(root, CACHE).down()
    shutil.rmtree(root)
    yield root
    Bed(root, CACHE).down()
    shutil.rmtree(root)


_UP = """
import sys
from pathlib import Path
from tests.testbed.bed import Bed
from tests.testbed.hosts import HostSpec
bed = Bed(Path(sys.argv[1]), Path(sys.argv[2]))
bed.up([HostSpec("left", 11)], serve=("hub",), uplink=False)
print("UP", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("moment", ["namespace", "booted", "up", "state lost"])
def test_what_a_killed_run_left_is_removed(empty_bed: Bed, other_root: Path, moment: str) -> None:
    bed = Bed(other_root, CACHE)
    child = subprocess.Popen(
        [sys.executable, "-c", _UP, str(other_root), str(CACHE)],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    console = other_root / "hosts/left/console.log"
    assert child.stdout is not None
    if moment == "namespace":
        assert until(lambda: bed.tag in namespaces(), 30, 0.01)
    elif moment == "booted":
        assert until(console.exists, 30, 0.01)
    else:
        assert "UP\n" in iter(child.stdout.readline, "")
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    if moment == "state lost":
        (other_root / "state.json").write_text("{cut")

    again = Bed(other_root, CACHE)
    again.down()
    assert bed.tag not in namespaces()
    assert run(["ip", "link", "show", bed.fabric.outer_link], check=False).returncode != 0
    assert not (again._cgroups()).exists()
    assert run(["ps", "-eo", "args"]).stdout.count(str(other_root)) == 0
    assert sorted(p.name for p in other_root.iterdir() if p.is_dir()) == []


_NET = """
import sys
from pathlib import Path
from tests.testbed.bed import Bed
bed = Bed(Path(sys.argv[1]), Path(sys.argv[2]), say=lambda _: None)
sys.stdin.readline()
bed.up([], serve=(), uplink=False)
print(bed.net.second)
"""


def test_beds_made_at_the_same_moment_get_networks_of_their_own(tmp_path: Path) -> None:
    roots = [tmp_path / f"bed{number}" for number in range(4)]
    try:
        beds = [
            subprocess.Popen(
                [sys.executable, "-c", _NET, str(root), str(CACHE)],
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for root in roots
        ]
        for one in beds:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        nets = [one.communicate(timeout=60)[0].strip() for one in beds]
        assert all(nets)
        assert len(set(nets)) == len(nets), nets
    finally:
        for root in roots:
            Bed(root, CACHE).down()
