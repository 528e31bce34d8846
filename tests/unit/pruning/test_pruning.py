"""What is chosen for removal, and what is removed of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.fleets import state
from vllm_fleet import pruning
from vllm_fleet.onhost import prune as onhost
from vllm_fleet.onhost import tools
from vllm_fleet.spec.model import HostSettings

RELEASES = {f"0.2{n}.0-{n * 8}": {"built_at": f"2026-0{n}-01T00:00:00Z"} for n in range(1, 6)}
NAMES = sorted(RELEASES)


def weights(*revisions: str, model: str = "glm") -> dict[str, dict[str, object]]:
    return {
        f"/opt/vllm/models/{model}/{one}/.verified.json": {"verified_at": f"2026-01-0{n}T00:00:00Z"}
        for n, one in enumerate(revisions, 1)
    }


def test_nothing_is_removed_unless_told() -> None:
    host = state(releases=RELEASES, weights=weights("v1", "v2", "v3"))
    assert pruning.order(HostSettings(), host, [NAMES[-1]], ["/opt/vllm/models/glm/v3"]) == {}


def test_the_newest_are_kept_beside_what_is_wanted_or_runs() -> None:
    host = state(releases=RELEASES, instances={"a": {"release": NAMES[0]}})
    found = pruning.order(HostSettings(keep_releases=1), host, [NAMES[4]], [])
    assert found == {"releases": [NAMES[1], NAMES[2]], "weights": []}
    found = pruning.order(HostSettings(keep_releases=0), host, [NAMES[4]], [])
    assert found["releases"] == NAMES[1:4]
    assert pruning.order(HostSettings(keep_releases=3), host, [NAMES[4]], []) == {}


def test_what_rollback_needs_is_no_candidate() -> None:
    record = {"goods": [{"release": NAMES[4]}, {"release": NAMES[0]}], "next": None}
    record["refused"] = [{"release": NAMES[1]}]
    host = state(releases=RELEASES, rollout={"a": record})
    found = pruning.order(HostSettings(keep_releases=0), host, [NAMES[4]], [])
    assert found["releases"] == NAMES[1:4]


def test_only_revisions_of_served_models_are_chosen() -> None:
    host = state(
        weights={
            **weights("v1", "v2", "v3", "v4"),
            **weights("v1", "v2", model="gone"),
            "/var/lib/vllm/weights/own.json": {"verified_at": None},
        }
    )
    wanted = ["/opt/vllm/models/glm/v2", "/data/own"]
    found = pruning.order(HostSettings(keep_revisions=1), host, [], wanted)
    assert found["weights"] == ["/opt/vllm/models/glm/v1", "/opt/vllm/models/glm/v3"]


class Host:
    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("releases", "models/glm", "etc", "state/a"):
            (root / folder).mkdir(parents=True)

    def release(self, name: str) -> Path:
        path = self.root / "releases" / name
        (path / "bin").mkdir(parents=True)
        (path / "bin/python").write_text("x")
        (path / "release.json").write_text(json.dumps({"id": name}))
        return path

    def revision(self, name: str) -> Path:
        path = self.root / "models/glm" / name
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"x" * 10_000)
        (path / ".verified.json").write_text(json.dumps({"directory": str(path)}))
        return path

    def prune(self, *paths: Path) -> list[Path]:
        releases = [p.name for p in paths if p.parent.name == "releases"]
        return onhost.prune(
            {
                "releases": releases,
                "weights": [str(p) for p in paths if p.name not in releases],
                "releases_root": str(self.root / "releases"),
                "models_root": str(self.root / "models"),
                "etc": str(self.root / "etc"),
                "state": str(self.root / "state"),
            }
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_what_nobody_needs_is_removed_whole(host: Host) -> None:
    gone, kept = host.release("0.1.0-a"), host.release("0.2.0-b")
    old, new = host.revision("v1"), host.revision("v2")
    (host.root / "releases/.pruned.0.0.1-x").mkdir()  # a removal that was cut off
    assert host.prune(gone, old) == [gone, old]
    assert sorted(p.name for p in (host.root / "releases").iterdir()) == [kept.name]
    assert sorted(p.name for p in (host.root / "models/glm").iterdir()) == [new.name]


def test_what_is_named_or_used_is_left(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    script, undo, running, opened = (host.release(f"0.{n}.0-a") for n in range(1, 5))
    (host.root / "etc/a.sh").write_text(f"exec {script}/bin/vllm serve\n")
    (host.root / "state/a/last-good").write_text(f"{undo.name}\n")
    served = host.revision("v1")
    (host.root / "etc/b.sh").write_text(f"exec /x serve '{served}'\n")
    sleep = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with (
        subprocess.Popen(
            [*sleep, f"{running}/x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
        (opened / "bin/python").open(),
    ):
        assert process.stdout is not None
        process.stdout.readline()
        with subprocess.Popen(
            sleep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=opened
        ) as p:
            assert p.stdout is not None
            p.stdout.readline()
            assert host.prune(script, undo, running, opened, served) == []
            said = capsys.readouterr().out
            assert "etc/a.sh names it" in said
            assert "last-good names it" in said
            assert f"process {process.pid} was started with it" in said
            assert f"process {p.pid} uses it" in said
            assert "etc/b.sh names it" in said
            p.communicate()
        process.communicate()
    assert host.prune(running) == [running]


def test_what_an_instance_can_go_back_to_is_left(host: Host) -> None:
    before, refused = host.release("0.1.0-a"), host.release("0.2.0-b")
    weights, other = host.revision("v1"), host.revision("v2")
    records = host.root / "state/_rollout/instances"
    records.mkdir(parents=True)
    script = {"path": "/etc/vllm/a.sh", "content": f"exec vllm serve {weights} --x 1\n"}
    good = {"release": before.name, "files": [script]}
    bad = {"release": refused.name, "why": "slow"}
    text = json.dumps({"goods": [good], "next": None, "refused": [bad]})
    (records / "a.json").write_text(text)
    assert host.prune(before, refused, weights, other) == [refused, other]
    # A record that cannot be read holds nothing, and stops nothing.
    (records / "a.json").write_text("{")
    assert host.prune(before) == [before]


def test_a_name_that_only_begins_alike_does_not_hold(host: Host) -> None:
    short, long = host.revision("v1"), host.revision("v1.5")
    (host.root / "etc/a.sh").write_text(f"serve {long}\n")
    assert host.prune(short, long) == [short]


def test_what_is_not_ours_is_never_touched(host: Host, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".verified.json").write_text(json.dumps({"directory": str(outside)}))
    (outside / "data").write_text("x")
    unstamped = host.root / "models/glm/byhand"
    unstamped.mkdir()
    copied = host.root / "models/glm/copy"
    copied.mkdir()
    (copied / ".verified.json").write_text(json.dumps({"directory": str(outside)}))
    link = host.root / "models/glm/link"
    link.symlink_to(outside)
    linked_model = host.root / "models/linked"
    linked_model.symlink_to(tmp_path)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    asked = [outside, unstamped, copied, link, linked_model / "outside", host.root / "models/glm"]
    asked += [host.root / "models/glm/../../../outside", host.root / "models"]
    assert host.prune(*asked) == []
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_files_with_a_link_elsewhere_free_nothing(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = host.revision("v1"), host.revision("v2")
    (new / "model.safetensors").unlink()
    os.link(old / "model.safetensors", new / "model.safetensors")
    assert host.prune(old) == [old]
    assert (new / "model.safetensors").read_bytes() == b"x" * 10_000
    assert "4.0 KiB freed" in capsys.readouterr().out


MOUNTS = """\
21 1 254:0 / / rw - ext4 /dev/vda rw
40 21 0:35 / /opt/vllm/models rw - nfs4 nas:/models rw
41 40 0:36 / /opt/vllm/models/my\\040own rw - ext4 /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/opt/vllm/models/glm/v1", "nfs4"),
        ("/opt/vllm/models/my own/v1", ""),
        ("/opt/vllm/releases/0.21.0-1", ""),
        ("/opt/vllm/models2/v1", ""),
    ],
)
def test_shared_storage_is_known_by_its_mount(path: str, kind: str) -> None:
    assert tools.shared_kind(Path(path), MOUNTS) == kind


def test_what_other_hosts_may_use_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file system of this test counts as shared: no real one can be mounted everywhere."""
    (line,) = [
        line.split(" - ")[1].split()[0]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4] == mount_of(tmp_path)
    ][-1:]
    monkeypatch.setattr(tools, "SHARED", {line})
    place = tmp_path / "models/glm/v1"
    place.mkdir(parents=True)
    (place / ".verified.json").write_text(json.dumps({"directory": str(place), "files": {}}))
    order = {"weights": [str(place)], "models_root": str(tmp_path / "models")}
    assert onhost.prune(order) == []
    assert place.is_dir()
    assert f"is on shared storage ({line})" in capsys.readouterr().out
    monkeypatch.setattr(tools, "SHARED", frozenset())
    assert onhost.prune(order) == [place]


def mount_of(path: Path) -> str:
    while not path.is_mount():
        path = path.parent
    return str(path)
