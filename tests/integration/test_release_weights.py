"""weights.py as it runs on a host, against the real modelscope library and a real HTTP hub."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.testbed import hub, tiny_models
from tests.testbed.hub import Fault
from vllm_fleet import weights
from vllm_fleet.spec.model import Model

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "vllm_fleet/onhost/weights.py"
SHARD = "model-00001-of-00003.safetensors"
REPO = "Tiny/qwen3"


@dataclass
class Host:
    """Directories of one pretended host, and the hub that it downloads from."""

    root: Path
    hub_root: Path
    endpoint: str

    @property
    def final(self) -> Path:
        return self.root / "models/tiny/master"

    @property
    def part(self) -> Path:
        return self.root / "models/tiny/.master.part"

    def settings(self, **more: object) -> dict[str, object]:
        model = Model(repo=REPO)
        wanted = weights.wanted("tiny", model)
        return {
            "name": "tiny",
            **wanted.identity,
            "directory": str(self.final),
            "stamp": str(self.final / weights.STAMP),
            "needs": list(weights.needs(wanted)),
            "endpoint": self.endpoint,
            "state": str(self.root / "state"),
            **more,
        }

    def start(self, **more: object) -> subprocess.Popen[str]:
        (self.root / "settings.json").write_text(json.dumps(self.settings(**more)))
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), "fetch", "--settings", str(self.root / "settings.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def fetch(self, **more: object) -> tuple[int, str]:
        process = self.start(**more)
        output, _ = process.communicate(timeout=180)
        print(output)
        return process.returncode, output

    def asked(self, since: int = 0) -> list[dict[str, object]]:
        """Requests of the hub since a number of them, less those for acceleration."""
        return hub.requests(self.hub_root)[since:]

    def sent(self, since: int = 0) -> dict[str, int]:
        """Bytes that the hub sent of each file."""
        total: dict[str, int] = {}
        for entry in self.asked(since):
            if entry["file"]:
                total[str(entry["file"])] = total.get(str(entry["file"]), 0) + int(
                    str(entry["bytes"])
                )
        return total


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    root = tmp_path / "hub"
    tiny_models.make(root / REPO, "qwen3", pad_mib=12)
    (tmp_path / "host").mkdir()
    with hub.running(root) as endpoint:
        yield Host(tmp_path / "host", root, endpoint)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_weights_are_fetched_once_and_a_rerun_asks_nothing(host: Host) -> None:
    code, output = host.fetch()
    assert code == 0, output
    names = {path.name for path in (host.hub_root / REPO).iterdir()}
    assert {path.name for path in host.final.iterdir()} == names | {weights.STAMP}
    assert not host.part.exists()
    for name in names:
        assert (host.final / name).read_bytes() == (host.hub_root / REPO / name).read_bytes()
        assert host.sent()[name] == (host.final / name).stat().st_size
    asked = len(host.asked())
    began = time.monotonic()
    code, output = host.fetch()
    assert code == 0
    assert "stands" in output
    assert time.monotonic() - began < 1
    assert len(host.asked()) == asked


def test_a_cut_file_is_resumed_where_it_stopped(host: Host) -> None:
    size = (host.hub_root / REPO / SHARD).stat().st_size
    hub.switch(host.hub_root, Fault("cut", SHARD, bytes=size // 2, times=1))
    code, output = host.fetch()
    assert code == 0, output
    assert host.sent()[SHARD] == size
    ranges = [entry["range"] for entry in host.asked() if entry["file"] == SHARD]
    assert ranges == [None, f"bytes={size // 2}-"]


def test_many_cuts_do_not_end_a_download_that_gains(host: Host) -> None:
    size = (host.hub_root / REPO / SHARD).stat().st_size
    hub.switch(host.hub_root, Fault("cut", SHARD, bytes=size // 8))
    code, output = host.fetch()
    assert code == 0, output
    assert host.sent()[SHARD] == size


def test_a_flipped_byte_at_the_hub_stops_with_file_and_checksums(host: Host) -> None:
    hub.switch(host.hub_root, Fault("wrong_bytes", SHARD, bytes=70_000))
    code, output = host.fetch()
    assert code == 1
    error = output.splitlines()[-1]
    right = hub.Hub(host.hub_root, Path(os.devnull)).sha256(host.hub_root / REPO / SHARD)
    assert SHARD in error
    assert f"expected {right}" in error
    assert re.search(r"found [0-9a-f]{64}", error)
    assert not host.final.exists()
    hub.switch(host.hub_root)
    asked = len(host.asked())
    code, output = host.fetch()
    assert code == 0, output
    assert set(host.sent(asked)) == {SHARD}


def test_bytes_wrong_once_are_fetched_again(host: Host) -> None:
    hub.switch(host.hub_root, Fault("wrong_bytes", SHARD, bytes=70_000, times=1))
    code, output = host.fetch()
    assert code == 0, output
    size = (host.hub_root / REPO / SHARD).stat().st_size
    assert host.sent()[SHARD] == 2 * size


def test_a_killed_run_is_taken_up_by_the_next(host: Host) -> None:
    hub.switch(host.hub_root, Fault("slow", "*.safetensors", bytes=2 << 20))
    process = host.start()
    partial = host.part / f"{SHARD}.incomplete"
    wait_for(lambda: partial.exists() and partial.stat().st_size > 1 << 20)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = sum(path.stat().st_size for path in host.part.rglob("*.incomplete"))
    assert kept > 1 << 20
    assert not host.final.exists()
    hub.switch(host.hub_root)
    # The hub notices a gone client at its next write; only then are its lines complete.
    wait_for(lambda: len([name for name in host.sent() if name.endswith(".safetensors")]) == 3)
    asked = len(host.asked())
    code, output = host.fetch()
    assert code == 0, output
    shards = {path.name: path.stat().st_size for path in host.final.glob("*.safetensors")}
    again = {name: size for name, size in host.sent(asked).items() if name in shards}
    assert sum(again.values()) == sum(shards.values()) - kept


def test_two_runs_at_once_download_once(host: Host) -> None:
    hub.switch(host.hub_root, Fault("slow", SHARD, bytes=2 << 20))
    first = host.start()
    wait_for(lambda: host.part.exists())
    second = host.start()
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert any("waiting" in output and "stands" in output for output in outputs)
    for name, sent in host.sent().items():
        assert sent == (host.final / name).stat().st_size


def test_a_hub_that_ignores_ranges_is_borne(host: Host) -> None:
    size = (host.hub_root / REPO / SHARD).stat().st_size
    hub.switch(
        host.hub_root, Fault("cut", SHARD, bytes=size // 2, times=1), Fault("no_range", SHARD)
    )
    code, output = host.fetch()
    assert code == 0, output


def test_a_wrong_size_in_the_listing_is_named(host: Host) -> None:
    hub.switch(host.hub_root, Fault("wrong_size", SHARD, bytes=5))
    code, output = host.fetch()
    assert code == 1
    assert SHARD in output.splitlines()[-1]
    assert "size" in output.splitlines()[-1]
    assert not host.final.exists()


def test_weights_without_sha256_are_refused_before_any_download(host: Host) -> None:
    hub.switch(host.hub_root, Fault("no_sha256", SHARD))
    code, output = host.fetch()
    assert code == 1
    assert SHARD in output
    assert not host.sent()


def test_a_small_file_without_sha256_is_a_warning(host: Host) -> None:
    hub.switch(host.hub_root, Fault("no_sha256", "generation_config.json"))
    code, output = host.fetch()
    assert code == 0
    assert "warning: generation_config.json" in output


def test_a_dead_hub_is_named_within_30_seconds(host: Host) -> None:
    for endpoint, fault in (
        ("http://127.0.0.1:9", None),
        (host.endpoint, Fault("dead")),
        (host.endpoint, Fault("error")),
        (host.endpoint, Fault("hang", bytes=60)),
    ):
        hub.switch(host.hub_root, *([fault] if fault else []))
        began = time.monotonic()
        code, output = host.fetch(endpoint=endpoint)
        assert code == 1
        assert time.monotonic() - began < 30
        assert endpoint in output
        assert "hub.endpoint" in output


def test_a_hub_that_dies_while_loading_is_named_and_not_asked_for_every_file(host: Host) -> None:
    hub.switch(host.hub_root, Fault("slow", "*.safetensors", bytes=2 << 20))
    process = host.start(files_at_once=1)
    wait_for(lambda: any(host.part.glob("*.incomplete")))
    hub.switch(host.hub_root, Fault("dead"))  # what is being sent goes on, nothing more is given
    began = time.monotonic()
    output, _ = process.communicate(timeout=120)
    print(output)
    assert process.returncode == 1
    assert f"hub {host.endpoint} does not answer" in output.splitlines()[-1]
    assert time.monotonic() - began < 25
    hub.switch(host.hub_root)
    asked = len(host.asked())
    files = {path.name for path in (host.hub_root / REPO).iterdir()}
    # What the hub had given is kept, but for the shard that was under way.
    came = files & {path.name for path in host.part.rglob("*")}
    assert came
    assert len(set(host.sent()) - came) <= 1
    missing = files - came
    assert host.fetch()[0] == 0
    assert set(host.sent(asked)) == missing


def test_an_unknown_repository_or_revision_is_said_at_once(host: Host) -> None:
    began = time.monotonic()
    code, output = host.fetch(revision="v9")
    assert code == 1
    assert "v9" in output
    assert "check repo and revision" in output
    assert time.monotonic() - began < 15


def test_a_damaged_file_on_disk_is_found_by_its_stamp_and_fetched_alone(host: Host) -> None:
    assert host.fetch()[0] == 0
    shard = host.final / SHARD
    data = bytearray(shard.read_bytes())
    data[70_000] ^= 1
    shard.write_bytes(data)
    (host.final / "tokenizer.json").touch()  # another time, the same bytes
    asked = len(host.asked())
    code, output = host.fetch()
    assert code == 0, output
    assert set(host.sent(asked)) == {SHARD}
    assert shard.read_bytes() == (host.hub_root / REPO / SHARD).read_bytes()
    asked = len(host.asked())
    assert host.fetch()[0] == 0
    assert len(host.asked()) == asked


def test_another_repository_under_the_same_name_is_refused(host: Host) -> None:
    assert host.fetch()[0] == 0
    code, output = host.fetch(repo="Tiny/other")
    assert code == 1
    assert REPO in output
    assert "Tiny/other" in output


def test_a_stranger_beside_the_weights_is_refused(host: Host) -> None:
    assert host.fetch()[0] == 0
    (host.final / "extra.safetensors").write_bytes(b"x")
    code, output = host.fetch()
    assert code == 1
    assert "extra.safetensors" in output


def test_no_chat_template_is_refused_for_chat_and_taken_for_embeddings(host: Host) -> None:
    config = host.hub_root / REPO / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    code, output = host.fetch()
    assert code == 1
    assert "chat template" in output
    assert not host.final.exists()
    asked = len(host.asked())
    assert host.fetch(needs=["tokenizer"])[0] == 0
    assert not set(host.sent(asked)) & {SHARD}  # what was fetched before was kept
    code, output = host.fetch()  # and the stamp does not claim what was not looked at
    assert code == 1


def test_a_full_disk_is_said_before_anything_is_written(host: Host, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], check=True)
    try:
        code, output = host.fetch(directory=str(small / "tiny/master"))
        assert code == 1
        assert "no space" in output
        assert "available" in output
        assert not host.sent()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_own_directories_are_checked_and_never_written(host: Host) -> None:
    own = tiny_models.make(host.root / "own", "glm4")
    before = sorted(path.name for path in own.iterdir())
    settings: dict[str, object] = {
        "source": "path",
        "repo": str(own),
        "revision": "",
        "directory": str(own),
        "stamp": str(host.root / "state/tiny.json"),
    }
    assert host.fetch(**settings)[0] == 0
    assert sorted(path.name for path in own.iterdir()) == before
    assert "stands" in host.fetch(**settings)[1]
    shard = own / SHARD
    shard.write_bytes(shard.read_bytes()[:-7])
    code, output = host.fetch(**settings)
    assert code == 1
    assert SHARD in output
    assert "cut short" in output


def test_status_tells_stamps_and_what_changed(host: Host) -> None:
    assert host.fetch()[0] == 0
    argv = [sys.executable, str(SCRIPT), "status", "--models", str(host.root / "models")]

    def status() -> dict[str, object]:
        answer = subprocess.run(argv, capture_output=True, text=True, check=True)
        found = json.loads(answer.stdout)
        assert list(found) == [str(host.final)]
        return dict(found[str(host.final)])

    stamp = status()
    wanted = weights.wanted("tiny", Model(repo=REPO))
    assert weights.verified(stamp, wanted)
    assert not weights.verified(stamp, weights.wanted("tiny", Model(repo="Tiny/other")))
    (host.final / SHARD).unlink()
    stamp = status()
    assert stamp["changed"] == [SHARD]
    assert not weights.verified(stamp, wanted)
