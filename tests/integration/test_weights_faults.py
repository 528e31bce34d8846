"""Weights through bad hubs, disks and runs; after each a re-run fetches only what is missing.

weights.py as it runs on a host, on this machine, against the test bed's hub, by both sources.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_release_weights import REPO, SCRIPT, SHARD, Host, wait_for
from tests.testbed import hub, tiny_models
from tests.testbed.hub import Fault
from vllm_fleet import listings, weights
from vllm_fleet.onhost import weights as onhost
from vllm_fleet.spec.model import HostSettings, Hub, Model
from vllm_fleet.weights import Listing

pytestmark = pytest.mark.integration

SOURCES = ("modelscope", "huggingface")


class Fleet(Host):
    """A pretended host whose model is from one of the sources."""

    source = "modelscope"

    def settings(self, **more: object) -> dict[str, object]:
        revision = "main" if self.source == "huggingface" else "master"
        given = super().settings(source=self.source, revision=revision)
        return {**given, "directory": str(self.final), **more}

    @property
    def size(self) -> int:
        return (self.hub_root / REPO / SHARD).stat().st_size

    def listing(self) -> dict[str, object]:
        """What a frozen listing of now adds to the settings."""
        model = Model(repo=REPO, source=self.source)  # type: ignore[arg-type]
        hubs = Hub(endpoint=self.endpoint, huggingface_endpoint=self.endpoint)
        found = listings.fetch("tiny", model, HostSettings(hub=hubs), self.root)
        return {"listing": list(found.files), "listing_file": found.path}


def _fleet(tmp_path: Path, source: str) -> Iterator[Fleet]:
    root = tmp_path / "hub"
    tiny_models.make(root / REPO, "qwen3", pad_mib=12)
    (tmp_path / "host").mkdir()
    with hub.running(root) as endpoint:
        made = Fleet(tmp_path / "host", root, endpoint)
        made.source = source
        yield made


@pytest.fixture(params=SOURCES)
def host(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    yield from _fleet(tmp_path, request.param)


@pytest.fixture
def modelscope(tmp_path: Path) -> Iterator[Fleet]:
    yield from _fleet(tmp_path, "modelscope")


@pytest.fixture
def huggingface(tmp_path: Path) -> Iterator[Fleet]:
    yield from _fleet(tmp_path, "huggingface")


def same(host: Fleet) -> bool:
    """Whether the switched-in files are those of the hub."""
    return all(
        (host.final / path.name).read_bytes() == path.read_bytes()
        for path in (host.hub_root / REPO).iterdir()
    )


# -- the hub


def test_a_cut_file_goes_on_where_it_stopped(host: Fleet) -> None:
    hub.switch(host.hub_root, Fault("cut", SHARD, bytes=host.size // 2, times=1))
    code, output = host.fetch()
    assert code == 0, output
    assert host.sent()[SHARD] == host.size
    asked = len(host.asked())
    assert host.fetch()[0] == 0
    assert len(host.asked()) == asked


def test_200_to_a_range_begins_again(host: Fleet) -> None:
    hub.switch(
        host.hub_root, Fault("cut", SHARD, bytes=host.size // 2, times=1), Fault("no_range", SHARD)
    )
    code, output = host.fetch()
    assert code == 0, output
    assert same(host)
    assert host.sent()[SHARD] == host.size // 2 + host.size


def test_wrong_bytes_are_named_and_fetched_again_alone(host: Fleet) -> None:
    hub.switch(host.hub_root, Fault("wrong_bytes", SHARD, bytes=70_000))
    code, output = host.fetch()
    assert code == 1
    assert SHARD in output.splitlines()[-1]
    assert "sha256 expected" in output.splitlines()[-1]
    hub.switch(host.hub_root)
    asked = len(host.asked())
    assert host.fetch()[0] == 0
    assert {name for name, sent in host.sent(asked).items() if sent} == {SHARD}


def test_a_small_file_without_sha256_is_checked_by_its_git_id(huggingface: Fleet) -> None:
    hub.switch(huggingface.hub_root, Fault("wrong_bytes", "config.json", bytes=3))
    code, output = huggingface.fetch()
    assert code == 1
    assert "config.json" in output.splitlines()[-1]
    assert "git id" in output.splitlines()[-1]
    hub.switch(huggingface.hub_root)
    assert huggingface.fetch()[0] == 0
    stamp = json.loads((huggingface.final / weights.STAMP).read_text())
    assert stamp["files"]["config.json"]["git"] == onhost.git_id_of(
        huggingface.final / "config.json"
    )


def test_a_token_goes_to_the_hub_and_not_where_it_redirects(huggingface: Fleet) -> None:
    (huggingface.root / "token").write_text("hf_secret\n")
    code, output = huggingface.fetch(token_file=str(huggingface.root / "token"))
    assert code == 0, output
    assert "hf_secret" not in output
    answers = huggingface.asked()
    assert all(not a["token"] for a in answers if str(a["path"]).startswith("/cdn/"))
    assert all(a["token"] for a in answers if not str(a["path"]).startswith("/cdn/"))
    assert any(str(a["path"]).startswith("/cdn/") for a in answers)


@pytest.mark.parametrize("more", [5, -5])
def test_a_size_that_the_listing_has_wrong_is_named(host: Fleet, more: int) -> None:
    hub.switch(host.hub_root, Fault("wrong_size", SHARD, bytes=more))
    code, output = host.fetch()
    assert code == 1
    assert SHARD in output
    assert not host.final.exists()
    hub.switch(host.hub_root)
    code, output = host.fetch()
    assert code == 0, output
    assert same(host)


def test_an_answer_that_is_too_short_is_named(host: Fleet) -> None:
    hub.switch(host.hub_root, Fault("short", SHARD, bytes=1000))
    code, output = host.fetch()
    assert code == 1
    assert SHARD in output.splitlines()[-1]
    hub.switch(host.hub_root)
    asked = len(host.asked())
    assert host.fetch()[0] == 0
    assert same(host)
    assert {name for name, sent in host.sent(asked).items() if sent} == {SHARD}


def test_a_library_that_reports_success_is_not_believed(modelscope: Fleet) -> None:
    """A stand-in for the library's download alone: it returns without having written."""
    liar = modelscope.root / "liar"
    liar.mkdir()
    (liar / "sitecustomize.py").write_text(
        "import modelscope_hub\n"
        "real = modelscope_hub.HubApi.download_file\n"
        "def lie(self, repo, kind, path, **more):\n"
        f"    if path != {SHARD!r}:\n"
        "        return real(self, repo, kind, path, **more)\n"
        "modelscope_hub.HubApi.download_file = lie\n"
    )
    settings = modelscope.root / "settings.json"
    settings.write_text(json.dumps(modelscope.settings()))
    argv = [sys.executable, str(SCRIPT), "fetch", "--settings", str(settings)]
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(liar)}
    )
    assert done.returncode == 1
    assert f"{SHARD}: its download ended without an error, and 0 B of" in done.stderr
    assert not modelscope.final.exists()
    asked = len(modelscope.asked())
    assert modelscope.fetch()[0] == 0
    assert set(modelscope.sent(asked)) == {SHARD}


def test_a_slow_hub_that_dies_is_said_soon_and_what_came_is_kept(host: Fleet) -> None:
    hub.switch(host.hub_root, Fault("slow", "*.safetensors", bytes=2 << 20))
    process = host.start(files_at_once=1)
    wait_for(lambda: any(host.part.glob("*.incomplete")))
    hub.switch(host.hub_root, Fault("dead"))
    began = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"hub {host.endpoint} does not answer" in output.splitlines()[-1]
    assert time.monotonic() - began < 60
    hub.switch(host.hub_root)
    asked = len(host.asked())
    assert host.fetch()[0] == 0
    assert same(host)
    whole = sum(path.stat().st_size for path in (host.hub_root / REPO).iterdir())
    assert sum(host.sent(asked).values()) < whole  # the file that came before is not sent again


# -- what is listed


def _change(host: Fleet) -> None:
    """Another content of the same size, under the same revision."""
    shard = host.hub_root / REPO / SHARD
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_a_file_that_changes_while_it_is_fetched_is_never_mixed(host: Fleet) -> None:
    hub.switch(host.hub_root, Fault("slow", SHARD, bytes=1 << 20))
    process = host.start()
    partial = host.part / f"{SHARD}.incomplete"
    wait_for(lambda: partial.exists() and partial.stat().st_size > 1 << 20)
    process.kill()
    process.communicate()
    _change(host)
    hub.switch(host.hub_root)
    code, output = host.fetch()
    assert code == 0, output
    assert same(host)


def test_a_moved_branch_is_refused_by_the_frozen_listing(host: Fleet) -> None:
    frozen = host.listing()
    old = hub.Hub(host.hub_root, Path(os.devnull)).sha256(host.hub_root / REPO / SHARD)
    _change(host)
    new = hub.Hub(host.hub_root, Path(os.devnull)).sha256(host.hub_root / REPO / SHARD)
    code, output = host.fetch(**frozen)
    assert code == 1
    error = output.splitlines()[-1]
    assert f"{SHARD}: frozen {old}, hub {new}" in error
    assert str(frozen["listing_file"]) in error
    assert not host.sent().get(SHARD)
    code, output = host.fetch(**host.listing())
    assert code == 0, output


def test_a_file_taken_away_at_the_hub_is_refused(modelscope: Fleet) -> None:
    frozen = modelscope.listing()
    (modelscope.hub_root / REPO / "generation_config.json").unlink()
    code, output = modelscope.fetch(**frozen)
    assert code == 1
    assert "generation_config.json: not there (hub)" in output


def test_weights_that_are_there_must_be_those_of_the_listing(host: Fleet) -> None:
    assert host.fetch()[0] == 0
    asked = len(host.asked())
    code, output = host.fetch(**host.listing())  # frozen later, and the same
    assert code == 0, output
    asked = len(host.asked())
    frozen = host.listing()
    _change(host)
    (host.hub_root / REPO / "config.json").write_text(
        (host.hub_root / REPO / "config.json").read_text() + " "
    )
    code, output = host.fetch(**host.listing())
    assert code == 1
    assert f"{host.final} is not what" in output
    assert SHARD in output
    assert "config.json" in output
    assert host.fetch(**frozen)[0] == 0
    assert not host.sent(asked)


def test_a_complete_directory_asks_nothing_with_a_listing_too(host: Fleet) -> None:
    frozen = host.listing()
    assert host.fetch(**frozen)[0] == 0
    stamp = json.loads((host.final / weights.STAMP).read_text())
    model = Model(repo=REPO, source=host.source)  # type: ignore[arg-type]
    wanted = weights.wanted("tiny", model)
    files = tuple(frozen["listing"])  # type: ignore[arg-type, var-annotated]
    digest = Listing("", files).digest
    assert weights.verified({**stamp, "changed": []}, wanted, digest)
    assert not weights.verified({**stamp, "changed": []}, wanted, "0" * 64)
    asked = len(host.asked())
    assert host.fetch(**frozen)[0] == 0
    assert len(host.asked()) == asked


# -- the host


def test_a_lock_that_a_dead_run_left_holds_nobody(host: Fleet) -> None:
    host.final.parent.mkdir(parents=True)
    (host.final.parent / ".master.lock").write_text("999999")
    code, output = host.fetch()
    assert code == 0, output
    assert "waiting" not in output


def test_a_disk_that_fills_up_says_how_much_is_missing(host: Fleet, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=310m", "tmpfs", str(small)], check=True)
    place = small / "tiny/master"
    try:
        hub.switch(host.hub_root, Fault("slow", "*.safetensors", bytes=1 << 19))
        process = host.start(directory=str(place))
        part = small / "tiny/.master.part"
        wait_for(lambda: any(part.glob("*.incomplete")) and len(list(part.glob("*.json"))) > 3)
        with (small / "filler").open("wb") as file:
            while True:  # somebody else takes the room
                try:
                    file.write(b"\0" * (1 << 20))
                    file.flush()
                except OSError:
                    break
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1, output
        error = output.splitlines()[-1]
        assert "the disk became full" in error
        assert "are still to come" in error
        assert "of room" in error
        assert not place.exists()
        (small / "filler").unlink()
        hub.switch(host.hub_root)
        wait_for(lambda: len([n for n in host.sent() if n.endswith(".safetensors")]) >= 1)
        kept = sum(path.stat().st_size for path in part.rglob("*") if path.suffix != ".new")
        assert kept > 0
        asked = len(host.asked())
        code, output = host.fetch(directory=str(place))
        assert code == 0, output
        whole = sum(path.stat().st_size for path in (host.hub_root / REPO).iterdir())
        assert sum(host.sent(asked).values()) < whole
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_full_disk_leaves_what_serves_untouched(modelscope: Fleet, tmp_path: Path) -> None:
    host, small = modelscope, tmp_path / "small"
    small.mkdir()
    # The first revision and the release beside it fit, a second one does not.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=330m", "tmpfs", str(small)], check=True)
    try:
        release = small / "releases/1/lib.py"
        release.parent.mkdir(parents=True)
        release.write_text("pass\n")
        assert host.fetch(directory=str(small / "tiny/v1"))[0] == 0
        before = {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}
        with (small / "filler").open("wb") as file:
            file.write(b"\0" * (256 << 20))
        os.rename(host.hub_root / REPO, host.hub_root / "Tiny/old")
        tiny_models.make(host.hub_root / REPO, "qwen3", pad_mib=12, seed=2)
        code, output = host.fetch(directory=str(small / "tiny/v2"))
        assert code == 1
        assert "no space" in output.splitlines()[-1]
        assert " of room" in output.splitlines()[-1]
        after = {path: path.read_bytes() for path in before}
        assert after == before
        (small / "filler").unlink()
        assert host.fetch(directory=str(small / "tiny/v2"))[0] == 0
    finally:
        subprocess.run(["umount", str(small)], check=True)


# -- rate and progress


def test_downloads_keep_to_their_bound(host: Fleet) -> None:
    rate = 3 << 20
    began = time.monotonic()
    code, output = host.fetch(limit=rate)
    took = time.monotonic() - began
    assert code == 0, output
    assert sum(host.sent().values()) / took <= rate * 1.05


def test_progress_is_told_only_where_somebody_looks(host: Fleet) -> None:
    hub.switch(host.hub_root, Fault("slow", "*.safetensors", bytes=6 << 20))
    lines = re.compile(r"(?m)^tiny: .* of .*, \d+%, .*/s, \d+:\d\d left$")
    files = re.compile(rf"(?m)^tiny:   {SHARD}: .* of .*, \d+%, .*/s, \d+:\d\d left$")
    code, output = host.fetch(progress=0.2)
    assert code == 0, output
    assert lines.search(output)
    assert files.search(output)
    code, output = host.fetch(progress=0, directory=str(host.root / "elsewhere/tiny/master"))
    assert code == 0, output
    assert "/s, " not in output
    assert "hashing" not in output


def test_an_operator_who_is_gone_does_not_end_the_download(host: Fleet) -> None:
    hub.switch(host.hub_root, Fault("slow", "*.safetensors", bytes=2 << 20))
    process = host.start()
    wait_for(lambda: host.part.exists())
    assert process.stdout is not None
    process.stdout.close()  # as when the connection is lost
    code, output = host.fetch()  # the operator comes back
    assert code == 0, output
    assert process.wait(timeout=60) == 0
    assert same(host)
    for name, sent in host.sent().items():
        assert sent == (host.final / name).stat().st_size


# -- sharing, hashing again


def test_a_new_revision_links_what_is_on_disk(host: Fleet) -> None:
    assert host.fetch()[0] == 0
    (host.hub_root / REPO / "revisions.json").write_text(json.dumps({"master": ".", "v2": "v2"}))
    second = host.hub_root / REPO / "v2"
    second.mkdir()
    for path in (host.hub_root / REPO).iterdir():
        if path.is_file() and path.name != "revisions.json":
            (second / path.name).write_bytes(path.read_bytes())
    generation = second / "generation_config.json"
    generation.write_text(generation.read_text() + "\n")
    asked = len(host.asked())
    final = host.final.parent / "v2"
    code, output = host.fetch(revision="v2", directory=str(final))
    assert code == 0, output
    assert "linked from other revisions" in output
    assert (final / SHARD).stat().st_ino == (host.final / SHARD).stat().st_ino
    fetched = {name for name, sent in host.sent(asked).items() if sent}
    assert "generation_config.json" in fetched
    assert not any(name.endswith(".safetensors") for name in fetched)


def test_a_flipped_byte_that_no_stamp_shows_is_found_named_and_repaired(host: Fleet) -> None:
    assert host.fetch()[0] == 0
    shard = host.final / SHARD
    status = shard.stat()
    data = bytearray(shard.read_bytes())
    data[1_000_000] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a failing disk does it
    assert host.fetch()[0] == 0  # by the stamp nothing has changed
    models = ["--models", str(host.root / "models")]
    argv = [sys.executable, str(SCRIPT), "verify", *models]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{shard}: sha256" in done.stderr
    assert "1 bad" in done.stdout
    asked = len(host.asked())
    code, output = host.fetch()
    assert code == 0, output
    assert {name for name, sent in host.sent(asked).items() if sent} == {SHARD}
    assert same(host)
    assert subprocess.run(argv, capture_output=True).returncode == 0


@pytest.fixture
def spacious(tmp_path: Path) -> Iterator[Path]:
    """A folder for gigabytes: gone after the test, where pytest keeps those of three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_byte_anywhere_in_two_gigabytes_is_found_named_and_repaired_alone(
    spacious: Path,
) -> None:
    """2 GiB in 16 shards; each time one bit is flipped, and size and time stay as stamped."""
    root = spacious / "hub"
    tiny_models.make(root / REPO, "qwen3", pad_mib=2048, shards=16)
    (spacious / "host").mkdir()
    dice = random.Random(5)
    with hub.running(root) as endpoint:
        host = Fleet(spacious / "host", root, endpoint)
        code, output = host.fetch()
        assert code == 0, output
        files = sorted(path.name for path in (root / REPO).iterdir())
        shards = [name for name in files if name.endswith(".safetensors")]
        size = {name: (host.final / name).stat().st_size for name in files}
        assert sum(size.values()) > 2 << 30
        assert len(shards) == 16
        places = [
            (shards[0], 0),  # the first byte of all
            (shards[-1], size[shards[-1]] - 1),  # the last one
            (shards[7], dice.randrange(size[shards[7]])),
            ("tokenizer.json", dice.randrange(size["tokenizer.json"])),
        ]
        argv = [sys.executable, str(SCRIPT), "verify", "--models", str(host.root / "models")]
        for name, place in places:
            path = host.final / name
            status = path.stat()
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1 << dice.randrange(8)]))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            done = subprocess.run(argv, capture_output=True, text=True)
            assert done.returncode == 1
            assert f"{path}: sha256" in done.stderr
            assert "1 bad" in done.stdout
            asked = len(host.asked())
            code, output = host.fetch()
            assert code == 0, output
            assert host.sent(asked) == {name: size[name]}
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "0 bad" in done.stdout
