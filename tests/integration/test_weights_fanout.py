"""Several hosts that fetch one model from each other: weights.py side by side on this machine.

Each pretended host has a loopback address and directories of its own; the hub counts its bytes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.test_release_weights import REPO, SCRIPT, wait_for
from tests.testbed import hub, tiny_models
from tests.testbed.hub import Fault
from vllm_fleet.onhost import peers
from vllm_fleet.onhost.hub import Entry

pytestmark = pytest.mark.integration

SHARDS = 3
PATIENCE = 4


@dataclass
class Fleet:
    """Pretended hosts, and the hub."""

    root: Path
    hub_root: Path
    endpoint: str
    port: int
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def place(self, n: int) -> Path:
        return self.root / f"h{n}/models/tiny/master"

    def start(
        self, n: int, of: int, *, fetchers: list[int] | None = None, repo: str = REPO
    ) -> None:
        (self.root / f"h{n}").mkdir(exist_ok=True)
        file = self.root / f"h{n}/settings.json"
        settings = {
            "name": "tiny",
            "source": "modelscope",
            "repo": repo,
            "revision": "master",
            "directory": str(self.place(n)),
            "stamp": str(self.place(n) / ".verified.json"),
            "needs": ["tokenizer"],
            "endpoint": self.endpoint,
            "state": str(self.root / f"h{n}/state"),
            "fanout": {
                "me": address(n),
                "port": self.port,
                "peers": [address(one) for one in range(of)],
                "fetchers": [address(one) for one in (fetchers or range(of))],
                "patience": PATIENCE,
            },
        }
        file.write_text(json.dumps(settings))
        argv = [sys.executable, str(SCRIPT), "fetch", "--settings", str(file)]
        self.running.append(
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )

    def wait(self, *numbers: int) -> list[str]:
        """Outputs of these processes, which must succeed; all by default."""
        outputs = []
        for n in numbers or range(len(self.running)):
            output, _ = self.running[n].communicate(timeout=120)
            print(output)
            assert self.running[n].returncode == 0, output
            outputs.append(output)
        return outputs

    def sent(self) -> dict[str, int]:
        """Bytes of each shard that the hub sent."""
        total: dict[str, int] = {}
        for entry in hub.requests(self.hub_root):
            if str(entry["file"]).endswith(".safetensors"):
                total[entry["file"]] = total.get(entry["file"], 0) + entry["bytes"]
        return total

    @property
    def shards(self) -> dict[str, int]:
        return {
            path.name: path.stat().st_size for path in (self.hub_root / REPO).glob("*.safetensors")
        }

    def whole(self, n: int) -> bool:
        return all(
            (self.place(n) / path.name).read_bytes() == path.read_bytes()
            for path in (self.hub_root / REPO).iterdir()
        )


def address(n: int) -> str:
    return f"127.0.0.{10 + n}"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    root = tmp_path / "hub"
    tiny_models.make(root / REPO, "qwen3", pad_mib=12)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with hub.running(root) as endpoint:
        made = Fleet(tmp_path, root, endpoint, port)
        yield made
        for process in made.running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def test_the_hub_sends_each_shard_once(fleet: Fleet) -> None:
    for n in range(3):
        fleet.start(n, 3)
    outputs = fleet.wait()
    assert all(fleet.whole(n) for n in range(3))
    assert fleet.sent() == fleet.shards
    assert all("from other hosts" in output for output in outputs)
    with pytest.raises(urllib.error.URLError):  # nothing is served any more
        urllib.request.urlopen(f"http://{address(0)}:{fleet.port}/fleet/peer", timeout=2)


def test_a_host_that_has_everything_serves_those_that_lack_it(fleet: Fleet) -> None:
    fleet.start(0, 1)
    fleet.wait()
    before = fleet.sent()
    for n in range(3):
        fleet.start(n, 3, fetchers=[1, 2])
    fleet.wait(1, 2, 3)
    assert all(fleet.whole(n) for n in range(3))
    assert fleet.sent() == before


def test_a_host_that_dies_is_replaced(fleet: Fleet) -> None:
    hub.switch(fleet.hub_root, Fault("slow", "*.safetensors", bytes=1 << 20))
    for n in range(3):
        fleet.start(n, 3)
    part = fleet.place(0).parent / ".master.part"
    wait_for(lambda: any(part.glob("*.safetensors.incomplete")))
    fleet.running[0].send_signal(signal.SIGKILL)
    hub.switch(fleet.hub_root)
    fleet.wait(1, 2)
    assert fleet.whole(1)
    assert fleet.whole(2)
    whole = sum(fleet.shards.values())
    assert sum(fleet.sent().values()) < 2 * whole  # what the dead one got is fetched once more
    hub.switch(fleet.hub_root)
    fleet.start(0, 3, fetchers=[0])  # it comes back, with nobody left to ask
    fleet.wait(3)
    assert fleet.whole(0)


def test_hosts_that_never_begin_are_not_waited_for(fleet: Fleet) -> None:
    fleet.start(0, 3)
    fleet.wait()
    assert fleet.whole(0)


def test_hosts_at_different_models_do_not_wait_for_each_other(fleet: Fleet) -> None:
    (fleet.hub_root / "Tiny/other").symlink_to(fleet.hub_root / REPO)
    fleet.start(0, 2)
    fleet.start(1, 2, repo="Tiny/other")
    fleet.wait()
    assert fleet.whole(0)
    assert fleet.whole(1)


def test_wrong_bytes_of_another_host_are_found_and_it_is_asked_no_more(fleet: Fleet) -> None:
    fleet.start(0, 1)
    fleet.wait()
    shard = fleet.place(0) / "model-00001-of-00003.safetensors"
    status = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)  # a failing disk: no stamp shows it
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    for n in range(2):
        fleet.start(n, 2, fetchers=[1])
    output = fleet.wait(2)[0]
    assert f"wrong bytes from {address(0)}" in output
    assert fleet.whole(1)


def test_strangers_and_other_paths_are_refused(fleet: Fleet) -> None:
    settings = {
        "repo": REPO,
        "revision": "master",
        "fanout": {"me": address(0), "port": fleet.port, "peers": [address(0), address(1)]},
    }
    place = fleet.hub_root / REPO

    def ask(path: str, source: str) -> int:
        connection = f"http://{address(0)}:{fleet.port}{path}"
        argv = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--interface", source]
        done = subprocess.run([*argv, "--path-as-is", connection], capture_output=True, text=True)
        return int(done.stdout)

    file = f"/api/v1/models/{REPO}/repo?Revision=master&FilePath="
    with peers.Share(settings, [place]) as share:
        share.add([Entry("config.json", 1, "a" * 64)])
        assert ask("/fleet/peer", address(1)) == 200
        assert ask("/fleet/peer", address(7)) == 403
        assert ask(f"{file}config.json", address(1)) == 200
        assert ask(f"{file}config.json", address(7)) == 403
        assert ask(f"{file}tokenizer.json", address(1)) == 404  # not verified (yet)
        assert ask(f"{file}../../../etc/passwd", address(1)) == 404
        assert ask("/etc/passwd", address(1)) == 404
        assert ask(f"{file.replace('master', 'v2')}config.json", address(1)) == 404


def test_every_host_asks_the_hub_for_like_bytes() -> None:
    entries = [Entry(f"{n:02}", 100 + n, "x") for n in range(16)] + [Entry("big", 400, "x")]
    hosts = [address(n) for n in range(8)]
    found = peers.owners(entries, hosts)
    assert peers.owners(entries[::-1], hosts) == found
    load = {one: sum(e.size for e in entries if found[e.path] == one) for one in hosts}
    assert max(load.values()) <= 400
    assert min(load.values()) >= 200
