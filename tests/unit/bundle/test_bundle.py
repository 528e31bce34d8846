"""A bundle: made, carried, taken, served; and what is refused on the way."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import hub as stub
from tests.testbed import tiny_models
from tests.testbed.made_wheels import wheel
from tests.unit.fleets import ALL, fleet
from vllm_fleet import airgap, bundle, listings, release
from vllm_fleet.onhost import bundle as onhost
from vllm_fleet.onhost import hub, state
from vllm_fleet.onhost.tools import Refusal
from vllm_fleet.spec.model import HostSettings, Hub, Model, PythonArchive

pytestmark = pytest.mark.slow

REPO = "Tiny/qwen3"


@dataclass
class Site:
    """A connected machine's folders and its hub, and what a bundle is to hold."""

    root: Path
    hub_root: Path
    wanted: bundle.Wanted

    @property
    def folder(self) -> Path:
        return self.root / "made"

    @property
    def taken(self) -> Path:
        return self.root / "opt/bundle"

    def make(self) -> dict[str, Any]:
        self.said: list[str] = []
        return bundle.make(self.wanted, self.folder, self.root, self.said.append)

    def take(self, **needs: Any) -> None:
        order = {"source": str(self.folder), "root": str(self.taken), "needs": needs}
        onhost.take(order)

    def asked(self) -> list[str]:
        return [str(one["file"]) for one in stub.requests(self.hub_root) if one["file"]]


@pytest.fixture(params=["modelscope", "huggingface"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    root = tmp_path / "hub"
    tiny_models.make(root / REPO, "qwen3")
    folder = tmp_path / "links"
    folder.mkdir()
    made = wheel(folder, "one", "1.0")
    text = f"one==1.0 \\\n    --hash=sha256:{made}\n"
    own = f"3.{sys.version_info[1]}"
    lock = bundle.LockFile(
        release.lock_sha256(text), "locks/one.txt", text, own, os.uname().machine
    )
    with stub.running(root) as endpoint:
        settings = HostSettings(hub=Hub(endpoint=endpoint, huggingface_endpoint=endpoint))
        model = Model(repo=REPO, source=request.param)
        listing = listings.fetch("tiny", model, settings, tmp_path)
        model_files = bundle.Weights("tiny", model, settings, listing)
        wanted = bundle.Wanted(
            (lock,), (model_files,), (), ("--no-index", "--find-links", str(folder))
        )
        yield Site(tmp_path, root, wanted)


@contextmanager
def serving(root: Path, *allow: str) -> Iterator[str]:
    server = onhost.Server(("127.0.0.1", 0), root, allow or ("127.0.0.1",))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def status(url: str, source: str = "127.0.0.1") -> int:
    argv = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--interface", source]
    return int(subprocess.run([*argv, "--path-as-is", url], capture_output=True).stdout)


def test_what_is_made_is_taken_and_served(site: Site, tmp_path: Path) -> None:
    manifest = site.make()
    for name, about in manifest["files"].items():
        data = (site.folder / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (about["size"], about["sha256"])
    digest = site.wanted.models[0].listing.digest
    key = manifest["models"][0]["key"]
    site.take(locks={site.wanted.locks[0].key: "locks/one.txt"}, listings={key: "tiny"})
    with serving(site.taken) as url:
        target = tmp_path / "venv"
        subprocess.run(
            [sys.executable, "-m", "pip", "-q", "install", "--isolated", "--index-url",
             f"{url}/simple/", "--require-hashes", "-r", "/dev/stdin", "--target", str(target)],
            input=site.wanted.locks[0].text, text=True, check=True,
        )  # fmt: skip
        assert list(target.glob("one-1.0.dist-info"))
        one = site.wanted.models[0]
        about = {"name": "tiny", "repo": REPO, "revision": "main", "endpoint": url}
        if one.model.source == "huggingface":
            source = hub.HuggingFace(about)
            found = {entry.path: entry for entry in source.listing()}
            assert found == {entry.path: entry for entry in one.entries}
            source.fetch(found["config.json"], tmp_path)
            want = (site.hub_root / REPO / "config.json").read_bytes()
            assert (tmp_path / "config.json").read_bytes() == want
        else:
            again = HostSettings(hub=Hub(endpoint=url))
            assert listings.fetch("tiny", one.model, again, tmp_path).digest == digest
        assert status(f"{url}/api/models/{REPO}/revision/other") == 404
        assert status(f"{url}/wheels/../manifest.json") == 404
        assert status(f"{url}/wheels/./one-1.0-py3-none-any.whl") == 200  # as apt asks
        assert status(f"{url}/manifest.json") == 404
        assert status(f"{url}/{REPO}/resolve/{digest}/../../etc/passwd") == 404
        assert status(f"{url}/simple/one/", "127.0.0.9") == 403


def test_a_range_is_answered_as_a_hub_does(site: Site) -> None:
    site.make()
    site.take()
    one = site.wanted.models[0]
    revision = "main" if one.model.source == "huggingface" else "master"
    with serving(site.taken) as url:
        address = f"{url}/api/v1/models/{REPO}/repo?Revision={revision}&FilePath=config.json"
        request = urllib.request.Request(address, headers={"Range": "bytes=10-"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 206
            assert answer.read() == (site.hub_root / REPO / "config.json").read_bytes()[10:]
        request = urllib.request.Request(address, headers={"Range": "bytes=999999-"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 416


def test_what_is_there_is_kept_and_a_partial_file_goes_on(site: Site) -> None:
    first = site.make()
    asked = len(site.asked())
    assert site.make() == first
    assert len(site.asked()) == asked
    shard = next(n for n in first["files"] if n.endswith(".safetensors"))
    data = (site.folder / shard).read_bytes()
    (site.folder / shard).unlink()
    (site.folder / f"{shard}.incomplete").write_bytes(data[:1000])
    assert site.make() == first
    ranges = [str(one["range"]) for one in stub.requests(site.hub_root)]
    assert "bytes=1000-" in ranges
    (site.folder / "wheels" / "old-1-py3-none-any.whl").write_text("x")
    assert site.make() == first
    assert not (site.folder / "wheels" / "old-1-py3-none-any.whl").exists()


def test_a_package_for_other_systems_is_asked_for_once(site: Site) -> None:
    lock = site.wanted.locks[0]
    text = f'{lock.text}two==1 ; sys_platform == "win32" \\\n    --hash=sha256:{"2" * 64}\n'
    other = bundle.LockFile(release.lock_sha256(text), lock.name, text, lock.python, lock.platform)
    wanted = bundle.Wanted((other,), (), (), site.wanted.pip)
    said: list[str] = []
    first = bundle.make(wanted, site.folder, site.root, said.append)
    assert "fetching 2 of 2 wheels" in said[0]
    assert bundle.make(wanted, site.folder, site.root, said.append) == first
    assert len(said) == 1


def test_a_moved_branch_is_no_part_of_a_bundle(site: Site) -> None:
    path = site.hub_root / REPO / "config.json"
    path.write_text(path.read_text().replace("{", "{ ", 1)[:-1])
    with pytest.raises(bundle.BundleError, match=r"config.json: .* branch or tag was moved"):
        site.make()


def test_a_directory_of_others_is_left_alone(site: Site) -> None:
    site.folder.mkdir()
    (site.folder / "letter.txt").write_text("mine")
    with pytest.raises(bundle.BundleError, match="is not empty and no bundle"):
        site.make()
    assert [path.name for path in site.folder.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("how", ["flipped", "short", "missing", "link"])
def test_a_file_that_was_spoilt_on_the_way_is_named_and_nothing_switched(
    site: Site, how: str
) -> None:
    manifest = site.make()
    site.take()
    before = os.readlink(site.taken / "current")
    # Another bundle, and one of its files is not as it was made.
    (site.folder / "manifest.json").write_text(json.dumps({**manifest, "second": True}))
    name = next(n for n in manifest["files"] if n.endswith("config.json"))
    path = site.folder / name
    data = path.read_bytes()
    path.unlink()  # the bundle that was taken shares it
    if how == "flipped":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif how == "short":
        path.write_bytes(data[:-1])
    elif how == "link":
        path.symlink_to("/etc/hostname")
    with pytest.raises(Refusal, match=r"config\.json: .*nothing was switched"):
        site.take()
    assert os.readlink(site.taken / "current") == before
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    site.take()  # only this one is read again
    assert os.readlink(site.taken / "current") != before
    assert len([p for p in site.taken.iterdir() if p.is_dir() and not p.is_symlink()]) == 1


def test_a_bundle_that_stands_is_not_read_again_and_a_spoilt_one_is_mended(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = site.make()
    site.take()
    capsys.readouterr()
    site.take()
    assert "stands" in capsys.readouterr().out
    final = site.taken / os.readlink(site.taken / "current")
    name = next(n for n in manifest["files"] if n.endswith(".safetensors"))
    (final / name).unlink()
    site.take()
    assert "1 of " in capsys.readouterr().out
    assert (final / name).read_bytes() == (site.folder / name).read_bytes()


def test_the_state_of_a_host_tells_its_bundle_while_it_is_whole(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "OPT", str(site.taken.parent))
    assert state.bundle() == {}
    manifest = site.make()
    site.take()
    stamp = state.bundle()
    assert stamp["source"] == str(site.folder)
    assert stamp["locks"] == [site.wanted.locks[0].key]
    assert stamp["listings"] == [manifest["models"][0]["key"]]
    # Another bundle was carried; the same again; taken away altogether.
    carried = site.folder / "manifest.json"
    text = carried.read_text()
    carried.write_text(text + " ")
    assert state.bundle() == {}
    carried.write_text(text)
    assert state.bundle() == stamp
    carried.unlink()
    assert state.bundle() == stamp
    final = site.taken / os.readlink(site.taken / "current")
    (final / next(iter(manifest["files"]))).unlink()
    assert state.bundle() == {}


def test_a_bundle_that_lacks_something_is_refused_with_what(site: Site) -> None:
    site.make()
    with pytest.raises(Refusal) as refused:
        site.take(
            locks={"0" * 64: "locks/vllm-0.33.0.txt"},
            listings={"1" * 64: "listings/other@v1.json"},
            systems={"debian-12-amd64": ["nginx-light"]},
        )
    for text in ("lock locks/vllm-0.33.0.txt", "listing listings/other@v1.json", "debian-12-amd64"):
        assert text in str(refused.value)
    assert not site.taken.exists()


def test_no_bundle_and_a_path_that_leads_out(site: Site) -> None:
    with pytest.raises(Refusal, match="holds no bundle"):
        site.take()
    manifest = site.make()
    manifest["files"]["../../etc/cron.d/x"] = {"size": 1, "sha256": "0"}
    (site.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Refusal, match="refused as a path"):
        site.take()


def test_wheels_of_another_build_are_refused(site: Site) -> None:
    text = site.wanted.locks[0].text.replace("sha256:", "sha256:0")[:-2] + "\n"
    lock = bundle.LockFile("k", "locks/one.txt", text, "3.11", os.uname().machine)
    wanted = bundle.Wanted((lock,), (), (), site.wanted.pip)
    with pytest.raises(bundle.BundleError, match="not the one that the lock names"):
        bundle.make(wanted, site.folder, site.root, print)


def test_a_python_is_taken_along_and_served_as_hosts_are_told(site: Site, tmp_path: Path) -> None:
    data = tmp_path / "py.tar.gz"
    data.write_bytes(b"an archive")
    checksum = hashlib.sha256(b"an archive").hexdigest()
    archive = PythonArchive(source=str(data), sha256=checksum, version="3.12")
    site.wanted = replace(site.wanted, archives=(archive,))
    site.make()
    site.take(archives={checksum: "of Python 3.12"})
    with serving(site.taken) as url:
        asked = f"{url}/{airgap.archive_name(archive)}"
        assert urllib.request.urlopen(asked).read() == b"an archive"
    data.write_bytes(b"another")
    site.make()  # what is there is right, and not asked for again
    site.wanted = replace(site.wanted, archives=(archive.model_copy(update={"sha256": "1" * 64}),))
    with pytest.raises(bundle.BundleError, match="is not the archive that python_archive"):
        site.make()


def test_tools_are_for_the_python_of_the_system_whatever_releases_are_made_with(
    tmp_path: Path,
) -> None:
    """A lock for 3.13 on Debian 12, whose own Python is 3.11."""
    (tmp_path / "locks").mkdir()
    pin = f"vllm==0.32.0 \\\n    --hash=sha256:{'0' * 64}\n"
    head = "# vllm==0.32.0 for Python 3.13 on x86_64, as of 2026-05-15 (UTC).\n"
    (tmp_path / "locks/0.32.0.txt").write_text(head + pin)
    found = fleet(tmp_path, all=ALL + 'vllm_lock: "locks/{version}.txt"\n')
    systems = (bundle.System("debian-12-amd64"), bundle.System("ubuntu-24.04-arm64"))
    locks = bundle.locks_of(found, None, systems)
    tools = {(one.python, one.platform) for one in locks if "tools" in one.name}
    assert tools == {("3.13", "x86_64"), ("3.11", "x86_64"), ("3.12", "aarch64")}
