"""The base root file system that every host is an overlay over.

It holds little more than systemd and sshd, so that a deploy has everything to install; the
packages it will install lie in the package cache, with the package lists, so that a real
``apt-get install`` works, fast and without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import outer
from tests.testbed.shell import BedError, run

BASE_PACKAGES = [
    *("systemd", "systemd-sysv", "dbus", "libpam-systemd", "openssh-server", "sudo", "python3"),
    *("ca-certificates", "iproute2", "iputils-ping", "procps", "curl", "netbase", "nftables"),
]

# What deploy.py installs on hosts: fetched beforehand, not installed.
DEPLOY_PACKAGES = [
    *("python3-venv", "python3-dev", "gcc", "g++", "ninja-build", "libnuma1"),
    *("nginx-light", "libnginx-mod-http-lua", "lua-cjson"),
    *("prometheus", "prometheus-node-exporter", "prometheus-alertmanager"),
    *("logrotate", "unattended-upgrades", "needrestart", "rsync", "jq"),
]

DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
RECIPE = 1  # counted up when the steps below change
_MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer")


@dataclass(frozen=True)
class Recipe:
    """Everything a base depends on."""

    release: outer.Release
    sources: tuple[outer.Source, ...]  # none: mmdebstrap's own choice for the suite
    settings: tuple[str, ...]  # of apt
    certificates: str  # bundle that the outer machine trusts; may be empty

    @property
    def key(self) -> str:
        """Names the base: same key, same contents (as far as mirrors stand still)."""
        text = json.dumps(
            [
                RECIPE,
                self.release.suite,
                [line for s in self.sources for line in s.lines()],
                [s.key for s in self.sources],
                self.settings,
                self.certificates,
                BASE_PACKAGES,
                DEPLOY_PACKAGES,
            ]
        )
        return f"{self.release.suite}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def discover_release() -> outer.Release:
    """The release that hosts of this machine get."""
    return outer.host_release(_read("/etc/os-release"))


def discover() -> Recipe:
    """The recipe for this machine."""
    release = discover_release()
    sources: list[outer.Source] = []
    if release.own:
        files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
        for file in files:
            if file.suffix in (".list", ".sources"):
                sources += outer.parse_sources(_read(str(file)), deb822=file.suffix == ".sources")
        sources = outer.official(sources, release)
    return Recipe(
        release,
        tuple(sources),
        tuple(outer.apt_settings(run(["apt-config", "dump"]).stdout, dict(os.environ))),
        _read("/etc/ssl/certs/ca-certificates.crt"),
    )


def build(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> Path:
    """The base of this recipe below ``folder``, made when it is not there yet."""
    base = folder / recipe.key
    if base.is_dir():
        return base
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{recipe.key}.part"
    remove(part)
    say(f"making the hosts' base system ({recipe.release.suite}), once")
    _bootstrap(recipe, part, folder)
    say(f"fetching {len(DEPLOY_PACKAGES)} packages that the deploy will install")
    _settle(recipe, part)
    _prefetch(part)
    part.rename(base)
    return base


def python_version(base: Path) -> tuple[int, int]:
    """The version of the hosts' python3."""
    target = os.readlink(base / "usr/bin/python3")  # python3.11
    major, _, minor = target.rsplit("/", 1)[-1].removeprefix("python").partition(".")
    return int(major), int(minor)


def remove(tree: Path) -> None:
    """Delete a root file system; nothing may be mounted below it."""
    if tree.exists():
        mounts = [line.split()[4] for line in _read("/proc/self/mountinfo").splitlines()]
        below = [m for m in mounts if m.startswith(f"{tree.resolve()}/")]
        if below:
            raise BedError(f"{tree} is not deleted: {below[0]} is mounted; unmount it first")
        shutil.rmtree(tree)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return ""


def _source_lines(recipe: Recipe, keys: Path, seen_as: str) -> list[str]:
    """The sources' lines; inline keys are written to ``keys`` and named as ``seen_as``."""
    lines = []
    for number, source in enumerate(recipe.sources):
        if source.key:
            keys.mkdir(parents=True, exist_ok=True)
            (keys / f"bed-{number}.asc").write_text(source.key)
            lines += source.lines(signed_by=f"{seen_as}/bed-{number}.asc")
        else:
            lines += source.lines()
    return lines


def _bootstrap(recipe: Recipe, part: Path, folder: Path) -> None:
    argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
    argv += [f"--aptopt={line}" for line in recipe.settings]
    argv += [f"--include={','.join(BASE_PACKAGES)}", recipe.release.suite, str(part)]
    if recipe.sources:
        listed = folder / f"{recipe.key}.list"
        keys = (folder / f"{recipe.key}.keys").resolve()
        listed.write_text("\n".join(_source_lines(recipe, keys, str(keys))) + "\n")
        argv.append(str(listed))
    run(argv, timeout=900)


def _settle(recipe: Recipe, base: Path) -> None:
    """What every host has in common, from apt's settings to sshd's."""
    etc = base / "etc"
    if recipe.sources:
        for old in (etc / "apt/sources.list.d").glob("*"):
            old.unlink()
        lines = _source_lines(recipe, etc / "apt/keyrings", "/etc/apt/keyrings")
        (etc / "apt/sources.list").write_text("\n".join(lines) + "\n")
    _write(etc / "apt/apt.conf.d/90outer", "\n".join(recipe.settings) + "\n")
    _write(etc / "apt/apt.conf.d/91keep", 'APT::Keep-Downloaded-Packages "true";\n')
    needed = outer.source_files(recipe.sources) + outer.settings_files(recipe.settings)
    for needed_file in needed:
        inside = base / needed_file.lstrip("/")
        if Path(needed_file).is_file() and not inside.exists():
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(needed_file, inside)
    if recipe.release.own:
        for name in ("etc/apt/trusted.gpg.d", "etc/apt/auth.conf.d"):
            for file in Path("/", name).glob("*"):
                if file.is_file() and not (base / name / file.name).exists():
                    shutil.copy2(file, base / name / file.name)
    if recipe.certificates:
        (etc / "ssl/certs/ca-certificates.crt").write_text(recipe.certificates)
        own = Path("/usr/local/share/ca-certificates")
        for certificate in own.glob("**/*.crt"):
            target = base / str(certificate).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(certificate, target)
    (etc / "machine-id").write_text("")
    for file in [base / "var/lib/dbus/machine-id", *(etc / "ssh").glob("ssh_host_*")]:
        file.unlink(missing_ok=True)
    _write(etc / "dpkg/dpkg.cfg.d/unsafe-io", "force-unsafe-io\n")  # a test host is no one's data
    _write(etc / "default/locale", "LANG=C.UTF-8\n")
    _write(etc / "ssh/sshd_config.d/10-bed.conf", "UseDNS no\nPasswordAuthentication no\n")
    for unit in _MASKED:
        (etc / "systemd/system" / unit).unlink(missing_ok=True)
        (etc / "systemd/system" / unit).symlink_to("/dev/null")
    wants = etc / "systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    networkd = wants / "systemd-networkd.service"
    networkd.unlink(missing_ok=True)
    networkd.symlink_to("/lib/systemd/system/systemd-networkd.service")
    # Ubuntu starts sshd by socket; a deploy and its time-outs are tested against the service
    socket = etc / "systemd/system/sockets.target.wants/ssh.socket"
    if socket.is_symlink():
        socket.unlink()
        (wants / "ssh.service").unlink(missing_ok=True)
        (wants / "ssh.service").symlink_to("/lib/systemd/system/ssh.service")


def _prefetch(base: Path) -> None:
    """Package lists, and the .deb files of what the deploy installs, into the base."""
    resolv = base / "etc/resolv.conf"
    resolv.unlink(missing_ok=True)
    resolv.write_text(_read("/etc/resolv.conf"))
    env = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "DEBIAN_FRONTEND": "noninteractive",
        "LC_ALL": "C",
    }
    private = ["unshare", "--mount", "--propagation", "private"]
    script = (  # apt's methods want /proc and /dev on some releases
        'mount -t proc proc "$1/proc" && mount --bind /dev "$1/dev" && '
        'chroot "$1" apt-get -q update && shift_base=$1 && shift && '
        'chroot "$shift_base" apt-get -q -y --no-install-recommends --download-only install "$@"'
    )
    run(
        [*private, "bash", "-ec", script, "bed", str(base), *DEPLOY_PACKAGES],
        timeout=900,
        env=env,
    )
    resolv.write_text("")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
