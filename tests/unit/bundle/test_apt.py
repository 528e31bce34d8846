"""Debian packages of a bundle by the real apt: fetched with what they need, and taken from it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from vllm_fleet import airgap, bundle
from vllm_fleet.onhost import bundle as onhost
from vllm_fleet.operations import host

needs_gpg = pytest.mark.skipif(not shutil.which("gpg"), reason="no gpg here")
pytestmark = pytest.mark.skipif(
    not (shutil.which("apt-get") and shutil.which("dpkg-deb")), reason="no apt here"
)


def deb(folder: Path, name: str, version: str, needs: str = "") -> None:
    tree = folder / name
    (tree / "DEBIAN").mkdir(parents=True)
    depends = f"Depends: {needs}\n" if needs else ""
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: a <a@b.example>\n"
        f"{depends}Description: made by a test\n"
    )
    escaped = version.replace(":", "%3a")
    target = folder / f"{name}_{escaped}_all.deb"
    subprocess.run(["dpkg-deb", "-b", str(tree), str(target)], check=True, capture_output=True)
    shutil.rmtree(tree)


def listed(folder: Path) -> None:
    """Make a flat repository of a folder of packages."""
    stanzas = [bundle._stanza(path) for path in sorted(folder.glob("*.deb"))]
    (folder / "Packages").write_text("\n".join(stanzas))


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A sources.list that leads to three packages; nobody asks for the last."""
    folder = tmp_path / "mirror"
    deb(folder, "one", "1.0", "libtwo++ (>= 1:2)")
    deb(folder, "libtwo++", "1:2.1~rc1+b1")
    deb(folder, "other", "3")
    listed(folder)
    sources = tmp_path / "suite.list"
    sources.write_text(f"deb [trusted=yes] copy:{folder} ./\n")
    return sources


def test_packages_come_with_what_they_need_and_apt_takes_them(mirror: Path, tmp_path: Path) -> None:
    system = bundle.System("debian-12-amd64", mirror)
    wanted = bundle.Wanted(systems=(system,), packages=("one",))
    manifest = bundle.make(wanted, tmp_path / "made", tmp_path, print)
    names = {name.rpartition("/")[2] for name in manifest["files"]}
    assert names == {"Packages", "Release", "one_1.0_all.deb", "libtwo++_2.1~rc1+b1_all.deb"}
    assert bundle.make(wanted, tmp_path / "made", tmp_path, print) == manifest
    order = {"source": str(tmp_path / "made"), "root": str(tmp_path / "opt"), "needs": {}}
    onhost.take(order)
    server = onhost.Server(("127.0.0.1", 0), tmp_path / "opt", ["127.0.0.1"])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        listed = tmp_path / "bundle.list"
        listed.write_text(f"deb [trusted=yes] {url}/apt/debian-12-amd64/ ./\n")
        for part in ("archives/partial", "state/lists/partial"):
            (tmp_path / part).mkdir(parents=True)
        (tmp_path / "status").touch()
        # As on a host that has nothing, with another source and a proxy of its own.
        config = tmp_path / "apt.conf"
        config.write_text(
            f'Dir::State::status "{tmp_path}/status";\nDir::Cache "{tmp_path}";\n'
            'APT::Sandbox::User "root";\nAPT::Architecture "amd64";\nDebug::NoLocking "1";\n'
            'APT::Get::Download-Only "1";\nAcquire::http::Proxy "http://192.0.2.1:3128";\n'
        )
        ((path, text),) = bundle.lists_of(manifest)
        assert path == "locks/apt-debian-12-amd64.txt"

        def install(checksum: str) -> subprocess.CompletedProcess[str]:
            command = host._from_bundle(("one",), checksum).get_raw_value()
            command = command.replace(airgap.SOURCES, str(listed))
            command = command.replace(airgap.APT_STATE, str(tmp_path / "state"))
            return subprocess.run(
                ["sh", "-c", command], env={**os.environ, "APT_CONFIG": str(config)},
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip

        done = install("0" * 64)  # as if somebody else's packages were served there
        assert done.returncode != 0
        assert "are not those of locks/apt-*.txt" in done.stderr
        assert not list((tmp_path / "archives").glob("*.deb"))
        done = install(text.splitlines()[-1])
        assert done.returncode == 0, done.stdout + done.stderr
        got = {path.name for path in (tmp_path / "archives").glob("*.deb")}
        assert got == {"one_1.0_all.deb", "libtwo++_1%3a2.1~rc1+b1_all.deb"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_package_that_no_source_has_is_told_with_the_source(mirror: Path, tmp_path: Path) -> None:
    system = bundle.System("debian-12-amd64", mirror)
    wanted = bundle.Wanted(systems=(system,), packages=("one", "absent"))
    with pytest.raises(bundle.BundleError) as refused:
        bundle.make(wanted, tmp_path / "made", tmp_path, print)
    assert f"debian-12-amd64: apt-get install from {mirror} failed" in str(refused.value)
    assert "absent" in str(refused.value)


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """(repository, its key) of a package that no distribution has, signed as Grafana's is."""
    folder, home = tmp_path / "signed", tmp_path / "gpg"
    deb(folder, "grafana", "11.0", "one")
    listed(folder)
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", ""]
    make = ["--quick-generate-key", "a@b.example", "rsa2048", "sign", "never"]
    subprocess.run([*gpg, *make], check=True, capture_output=True)
    text = (folder / "Packages").read_bytes()
    (folder / "Release").write_text(
        "Suite: stable\nCodename: stable\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n "
        f"{hashlib.sha256(text).hexdigest()} {len(text)} Packages\n"
    )
    sign = ["--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release")]
    subprocess.run([*gpg, *sign], check=True, capture_output=True)
    key = tmp_path / "files/grafana.asc"
    key.parent.mkdir()
    shown = subprocess.run([*gpg, "--armor", "--export"], check=True, capture_output=True)
    key.write_bytes(shown.stdout)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    return folder, key


@needs_gpg
def test_grafana_comes_from_its_own_source_with_its_key(
    mirror: Path, signed: tuple[Path, Path], tmp_path: Path
) -> None:
    """The line names a file of the hosts, which this machine does not have."""
    folder, key = signed
    keyring = "/etc/apt/keyrings/grafana.asc"
    assert not Path(keyring).exists()
    line = f"deb [signed-by={keyring}] copy:{folder} ./"
    source = bundle.Source(line, "files/grafana.asc", ("grafana",))
    system = bundle.System("debian-12-amd64", mirror)
    wanted = bundle.Wanted(systems=(system,), packages=("one",), sources=(source,))
    manifest = bundle.make(wanted, tmp_path / "made", tmp_path, print)
    assert manifest["systems"] == {"debian-12-amd64": ["grafana", "one"]}
    assert "apt/debian-12-amd64/grafana_11.0_all.deb" in manifest["files"]
    # With another key it is not taken, and what was there stays what it was.
    key.write_text("-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n-----END PGP PUBLIC KEY BLOCK-----\n")
    with pytest.raises(bundle.BundleError, match="failed"):
        bundle.make(wanted, tmp_path / "made", tmp_path, print)
    assert (tmp_path / "made/apt/debian-12-amd64/grafana_11.0_all.deb").exists()


def test_a_system_that_this_machine_is_not_needs_its_sources(tmp_path: Path) -> None:
    wanted = bundle.Wanted(systems=(bundle.System("ubuntu-23.10-amd64"),), packages=("one",))
    with pytest.raises(bundle.BundleError) as refused:
        bundle.make(wanted, tmp_path / "made", tmp_path, print)
    assert f"this machine is {bundle.own_system()}" in str(refused.value)
    assert "--system ubuntu-23.10-amd64=FILE" in str(refused.value)
    absent = bundle.System("ubuntu-23.10-amd64", tmp_path / "absent.list")
    with pytest.raises(bundle.BundleError, match=r"absent\.list is no file"):
        bundle.make(bundle.Wanted(systems=(absent,)), tmp_path / "other", tmp_path, print)
