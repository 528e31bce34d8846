"""Makes the bundle that hosts without internet install from, on a connected machine.

DIR gets wheels/ (of every lock and of our own tools, one build each), python/ (the archives that
python_archive names), apt/<system>/ (a flat
repository of Debian packages with everything that they need), weights/<model>@<revision>/ (as
the frozen listings say) and manifest.json, the sha256 of all of it. What is there and right is
kept, so that a run that was cut off is simply run again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_fleet import airgap, listings, release, variants, weights
from vllm_fleet.onhost import bundle as onhost
from vllm_fleet.onhost import hub, interpreter, tools
from vllm_fleet.onhost import weights as checks
from vllm_fleet.plan import APT_KEYS, TOOLS_LOCK, bundled_packages
from vllm_fleet.spec.inputs import lock_path, version_of
from vllm_fleet.spec.model import Fleet, HostSettings, Model, PythonArchive
from vllm_fleet.weights import Listing

MARK = ".vllm-fleet-bundle"
NOTES = ".notes.json"  # sha256 of files by size and time, so that nothing is hashed twice
GRAFANA = "grafana"  # of no distribution: from monitoring.grafana.apt_source
# What `python3` is there, and so what our own tools are made with.
SYSTEM_PYTHONS = {
    "debian-12": "3.11",
    "debian-13": "3.13",
    "ubuntu-22.04": "3.10",
    "ubuntu-24.04": "3.12",
}
GLIBC = (35, 16)  # of Ubuntu 22.04; pip wants each tag named, down to the oldest in use
SPARE = 1 << 30
FILES_AT_ONCE = 4
_MADE_FOR = re.compile(r"(?m)^# \S+ for Python (3\.\d+) on (\S+?)[,.]? ")
# Equal contents give an equal file: the date says nothing, and is not looked at.
_DATE = "Thu, 01 Jan 2026 00:00:00 UTC"

Say = Callable[[str], None]


class BundleError(Exception):
    """The bundle cannot be made; what, where, why and the remedy."""


@dataclass(frozen=True)
class LockFile:
    """A lock whose wheels the bundle holds."""

    key: str  # as hosts ask for it
    name: str
    text: str
    python: str
    platform: str
    indexes: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        """What was asked of pip."""
        return f"{self.key} {self.python} {self.platform}"


@dataclass(frozen=True)
class Weights:
    """A model whose weights the bundle holds."""

    name: str
    model: Model
    settings: HostSettings
    listing: Listing

    @property
    def directory(self) -> str:
        revision = weights.path_safe(weights.revision_of(self.model))
        return f"weights/{weights.path_safe(self.name)}@{revision}"

    @property
    def entries(self) -> list[hub.Entry]:
        return [
            hub.Entry(f["path"], f["size"], f.get("sha256", ""), f.get("git", ""))
            for f in self.listing.files
        ]


@dataclass(frozen=True)
class System:
    """A distribution that hosts run, and apt's sources for it; None: this machine's own."""

    name: str
    sources: Path | None = None

    @property
    def architecture(self) -> str:
        return self.name.rpartition("-")[2]


@dataclass(frozen=True)
class Source:
    """A further apt source, as a line for hosts, with the key that hosts would get."""

    line: str
    key_file: str | None
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """What a bundle is to hold."""

    locks: tuple[LockFile, ...] = ()
    models: tuple[Weights, ...] = ()
    systems: tuple[System, ...] = ()
    pip: tuple[str, ...] = ()  # further arguments of pip
    packages: tuple[str, ...] = field(default_factory=bundled_packages)
    archives: tuple[PythonArchive, ...] = ()
    sources: tuple[Source, ...] = ()


# -- what is wanted


def own_system() -> str:
    """The system of this machine, as a bundle names it."""
    found: dict[str, str] = {}
    for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        found[key] = value.strip().strip('"')
    about = {"id": found.get("ID", ""), "version": found.get("VERSION_ID", "")}
    return airgap.system_of(about, os.uname().machine)


def sources_of(fleet: Fleet) -> tuple[Source, ...]:
    """The apt sources that settings name beside the distribution's."""
    found = [spec.settings.monitoring.grafana for spec in fleet.group("monitoring")]
    given = {(one.apt_source, one.key_file) for one in found if one is not None}
    return tuple(Source(line, key, (GRAFANA,)) for line, key in sorted(given, key=str))


def locks_of(
    fleet: Fleet, python: str | None, systems: Iterable[System] = ()
) -> tuple[LockFile, ...]:
    """The locks of all GPU hosts, and ours for the tools of each Python. Raises BundleError.

    Our tools are made with the systems' own Python, whatever releases are made with.
    """
    found: dict[tuple[str, str, str], LockFile] = {}
    for spec in fleet.group("gpu"):
        settings = spec.settings
        for one in spec.instances:
            version = version_of(spec, one)
            if settings.vllm_lock is None:
                raise BundleError(
                    f"{spec.name}: has no lock, and a bundle holds what locks name: `fleet lock "
                    f"{version}` makes one, then set vllm_lock"
                )
            name = lock_path(settings.vllm_lock, version)
            try:
                text = (Path(fleet.root) / name).read_text(encoding="utf-8")
                release.check_lock(text, version, settings.vllm_package, settings.vllm_extra)
            except (OSError, release.LockError) as error:
                raise BundleError(f"{name}: {error}") from None
            text = release.without(text, settings.vllm_exclude)
            made_for = _MADE_FOR.search(text)
            archive = settings.python_archive
            own = archive.version if archive else _named(settings.python)
            wanted = python or (made_for[1] if made_for else own)
            platform = made_for[2] if made_for else os.uname().machine
            indexes = variants.indexes(version, settings.vllm_package, settings.vllm_variant)
            key = release.lock_sha256(text)
            if key not in {lock.key for lock in found.values()}:
                lock = LockFile(key, name, text, wanted, platform, indexes)
                found[key, wanted, platform] = lock
    pairs = {(wanted, platform) for _, wanted, platform in found}
    pairs |= {
        (SYSTEM_PYTHONS[release_of], machine)
        for release_of, machine in (_parts(system) for system in systems)
        if release_of in SYSTEM_PYTHONS
    }
    for wanted, platform in sorted(pairs):
        key, words = airgap.tools_key(TOOLS_LOCK, wanted)
        lock = LockFile(key, f"lock {words}", TOOLS_LOCK, wanted, platform)
        found[key, wanted, platform] = lock
    return tuple(found.values())


def _parts(system: System) -> tuple[str, str]:
    """(distribution and release, machine) of a system."""
    name, _, architecture = system.name.rpartition("-")
    machines = {debian: machine for machine, debian in airgap.ARCHITECTURES.items()}
    return name, machines.get(architecture, architecture)


def _named(python: str) -> str:
    """The version in a setting such as python3.12, else that of this machine."""
    match = re.search(r"python(3\.\d+)$", python)
    return match[1] if match else f"3.{sys.version_info[1]}"


def with_hubs(fleet: Fleet, endpoint: str | None, huggingface: str | None) -> Fleet:
    """The fleet with other hubs: with `air_gapped` it names none, and this machine may need one."""
    hosts = []
    for host in fleet.hosts:
        given = host.settings.hub
        named = given.model_copy(
            update={
                "endpoint": endpoint or given.endpoint,
                "huggingface_endpoint": huggingface or given.huggingface_endpoint,
            }
        )
        settings = host.settings.model_copy(update={"hub": named})
        hosts.append(host.model_copy(update={"settings": settings}))
    return fleet.model_copy(update={"hosts": tuple(hosts)})


def models_of(fleet: Fleet, say: Say) -> tuple[Weights, ...]:
    """The models of all hosts with their listings; what is not frozen yet is, now."""
    root = Path(fleet.root)
    found: dict[str, Weights] = {}
    for spec in fleet.group("gpu"):
        for one in spec.instances:
            model = spec.settings.models[one.model]
            path = listings.path_of(one.model, model)
            if model.source == "path" or path in found:
                continue
            listing = listings.read_listing(root, one.model, model)
            if listing is None:
                try:
                    listing = listings.fetch(one.model, model, spec.settings, root)
                except listings.ListingError as error:
                    raise BundleError(str(error)) from None
                listings.write(root, listing, model)
                say(f"{listing.path}: written; commit it")
            found[path] = Weights(one.model, model, spec.settings, listing)
    return tuple(found.values())


# -- making it


def make(wanted: Wanted, folder: Path, root: Path, say: Say) -> dict[str, Any]:
    """Have the bundle in a directory; its manifest. Raises BundleError.

    ``root``: directory of group_vars, for token files.
    """
    _own(folder)
    if wanted.systems and not shutil.which("apt-get"):
        raise BundleError(
            "this machine has no apt-get, and it fetches the hosts' Debian packages: run this on "
            "Debian or Ubuntu (a container does), or without --system and with --no-packages"
        )
    for system in wanted.systems:
        _sources_named(system)
    notes = _Notes(folder)
    files: dict[str, dict[str, Any]] = {}
    _room(folder, wanted)
    for name in _wheels(wanted, folder, notes, say):
        files[name] = notes.of(name)
    for archive in wanted.archives:
        name = _archive(archive, folder, say)
        files[name] = notes.of(name)
    systems = {}
    for system in wanted.systems:
        packages = {*wanted.packages, *(p for one in wanted.sources for p in one.packages)}
        systems[system.name] = sorted(packages)
        for name in _debian(system, sorted(packages), wanted.sources, folder, root, say):
            files[name] = notes.of(name)
    models = []
    for one in wanted.models:
        about = _weights(one, folder, root, notes, say)
        models.append(about)
        for file in about["files"]:
            name = f"{about['directory']}/{file['path']}"
            files[name] = {"size": file["size"], "sha256": file["sha256"]}
    manifest = {
        "format": onhost.FORMAT,
        "locks": [
            {"sha256": lock.key, "name": lock.name, "python": lock.python} for lock in wanted.locks
        ],
        "archives": [
            {"sha256": archive.sha256, "version": archive.version} for archive in wanted.archives
        ],
        "systems": systems,
        "models": models,
        "files": dict(sorted(files.items())),
    }
    _remove_others(folder, set(files))
    if _read_json(folder / onhost.MANIFEST) != manifest:
        tools.write_json(folder / onhost.MANIFEST, manifest)
    return manifest


def lists_of(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path beside group_vars, text) of the checksums of a bundle's lists of packages."""
    for system in manifest["systems"]:
        checksum = manifest["files"][f"apt/{system}/Packages"]["sha256"]
        yield airgap.packages_lock(system), airgap.packages_text(system, checksum)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _own(folder: Path) -> None:
    """A directory that is empty or a bundle: in no other is anything removed."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / MARK
    if not mark.exists():
        if any(folder.iterdir()):
            raise BundleError(f"{folder} is not empty and no bundle: name a new directory")
        mark.write_text("A bundle of vllm-fleet: what no manifest names is removed here.\n")


def _room(folder: Path, wanted: Wanted) -> None:
    """Refuse at once where the weights, which are listed, find no room."""
    missing = sum(
        file["size"]
        - hub.on_disk(folder / one.directory, hub.Entry(file["path"], file["size"], ""))
        for one in wanted.models
        for file in one.listing.files
    )
    try:
        tools.check_room({"weights of the bundle": (folder, missing + SPARE)})
    except tools.Refusal as refusal:
        raise BundleError(str(refusal)) from None


class _Notes:
    """Checksums of the files of a bundle, kept by size and time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, list[Any]] = {}
        self.asked: list[str] = []  # locks whose wheels all came
        with contextlib.suppress(OSError, ValueError, LookupError):  # then all is hashed again
            noted = json.loads((folder / NOTES).read_text(encoding="utf-8"))
            self.known, self.asked = noted["files"], noted["asked"]
        self.lock = threading.Lock()

    def ask(self, lock: str) -> None:
        """Keep in mind that the wheels of a lock came."""
        self.asked.append(lock)
        self._write()

    def _write(self) -> None:
        tools.write_json(self.folder / NOTES, {"files": self.known, "asked": self.asked})

    def of(self, name: str) -> dict[str, Any]:
        """Size and checksum of a file."""
        path = self.folder / name
        status = path.stat()
        note = [status.st_size, status.st_mtime_ns]
        with self.lock:
            found = self.known.get(name)
        if found is None or found[:2] != note:
            found = [*note, checks.sha256_of(path)]
            with self.lock:
                self.known[name] = found
                self._write()
        return {"size": found[0], "sha256": found[2]}


def _remove_others(folder: Path, names: set[str]) -> None:
    for part in ("wheels", "python", "apt", "weights"):
        for path in sorted((folder / part).rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(folder).as_posix() not in names:
                path.unlink()


# -- wheels


def _wheels(wanted: Wanted, folder: Path, notes: _Notes, say: Say) -> Iterator[str]:
    """Names of the wheels of all locks, one build for each package, fetched by pip."""
    place = folder / "wheels"
    place.mkdir(exist_ok=True)
    found: set[str] = set()
    for lock in wanted.locks:
        pins = release.parse_lock(lock.text)
        have = _by_hash(place, notes)
        # What has a marker may not be for this Python, and so never comes.
        asked = lock.wanted in notes.asked
        lacking = [
            pin
            for pin in pins
            if not any(h in have for h in pin.hashes)
            and not (asked and _left_out(lock.text, pin.line))
        ]
        if lacking:
            say(f"{lock.name}: fetching {len(lacking)} of {len(pins)} wheels, Python {lock.python}")
            _pip_download(lock, wanted.pip, place)
            notes.ask(lock.wanted)
            have = _by_hash(place, notes)
        for pin in pins:
            names = sorted(have[h] for h in pin.hashes if h in have)
            chosen = [n for n in names if _fits(n, lock)] or names
            if not chosen and not _left_out(lock.text, pin.line):
                raise BundleError(
                    f"{lock.name}: line {pin.line}: no wheel of {pin.name} {pin.version} came that "
                    "the lock names: the index serves another build, or has none for Python "
                    f"{lock.python} on {lock.platform}"
                )
            found.update(f"wheels/{name}" for name in chosen[:1])
    yield from sorted(found)


def _left_out(text: str, line: int) -> bool:
    """Whether a pin has a marker, and so may not be for this Python or platform."""
    return ";" in text.splitlines()[line - 1]


def _fits(name: str, lock: LockFile) -> bool:
    """Whether a wheel's name says that it is for the Python of a lock."""
    tag = f"cp{lock.python.replace('.', '')}"
    return f"-{tag}-" in name or "-abi3-" in name or "-none-" in name


def _by_hash(place: Path, notes: _Notes) -> dict[str, str]:
    """Names of wheels by their checksum, as locks write it."""
    return {
        f"sha256:{notes.of(f'wheels/{path.name}')['sha256']}": path.name
        for path in place.glob("*.whl")
    }


def _pip_download(lock: LockFile, more: Sequence[str], place: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(lock.text)
        file.flush()
        argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        argv += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
        argv += ["-r", file.name, "-d", str(place), *more]
        if "--no-index" not in more:
            argv += [part for url in lock.indexes for part in ("--extra-index-url", url)]
        machine = lock.platform.partition("-")[0]
        own = f"3.{sys.version_info[1]}"
        if (lock.python, machine) != (own, os.uname().machine):
            argv += ["--python-version", lock.python, "--implementation", "cp"]
            for abi in (f"cp{lock.python.replace('.', '')}", "abi3", "none"):
                argv += ["--abi", abi]
            for minor in range(*GLIBC, -1):
                argv += ["--platform", f"manylinux_2_{minor}_{machine}"]
            argv += ["--platform", f"manylinux2014_{machine}", "--platform", f"linux_{machine}"]
        try:
            tools.run(argv, os.environ, lock.name, where="this machine's pip configuration")
        except tools.Refusal as refusal:
            text = str(refusal)
            if "No module named pip" in text:
                text = f"{sys.executable} has no pip, which fetches the wheels: install it there"
            raise BundleError(text) from None


# -- Python


def archives_of(fleet: Fleet) -> tuple[PythonArchive, ...]:
    """The archives of Python that the GPU hosts' releases are made with."""
    found = [spec.settings.python_archive for spec in fleet.group("gpu")]
    return tuple({one.sha256: one for one in found if one is not None}.values())


def _archive(archive: PythonArchive, folder: Path, say: Say) -> str:
    """Have an archive in the bundle; its name there."""
    name = airgap.archive_name(archive)
    target = folder / name
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        say(f"Python {archive.version}: fetching {archive.source}")
    try:
        interpreter.fetch(archive.source, archive.sha256, target, {})
    except tools.Refusal as refusal:
        raise BundleError(str(refusal)) from None
    return name


# -- Debian packages


def _sources_named(system: System) -> None:
    """Refuse a system whose packages this machine's own sources do not have."""
    if system.sources is None and system.name != own_system():
        raise BundleError(
            f"{system.name}: this machine is {own_system()}, and its apt sources are of that; name "
            f"those of the other system: --system {system.name}=FILE (a sources.list; with "
            "[signed-by=...] where its keys are not known here)"
        )
    if system.sources is not None and not system.sources.is_file():
        raise BundleError(f"{system.name}: {system.sources} is no file; name its sources.list")


def _sources(
    system: System, more: Iterable[Source], state: Path, root: Path
) -> Iterator[tuple[str, str]]:
    """apt's options for where packages of a system come from."""
    parts, keys = state / "sources.list.d", state / "keyrings"
    for place in (parts, keys):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    if system.sources is None:
        for path in Path("/etc/apt/sources.list.d").glob("*"):
            if path.suffix in (".list", ".sources"):
                shutil.copy(path, parts)
    else:
        yield "Dir::Etc::SourceList", str(system.sources.resolve())
    yield "Dir::Etc::SourceParts", str(parts)
    for number, one in enumerate(more):
        line = one.line
        if one.key_file:
            name = Path(one.key_file).name
            shutil.copy(root / one.key_file, keys / name)
            # The line is written for hosts; here nothing is put into the machine's own apt.
            line = line.replace(f"{APT_KEYS}/{name}", str((keys / name).resolve()))
        (parts / f"vllm-fleet-{number}.list").write_text(f"{line}\n", encoding="utf-8")


def _debian(
    system: System,
    packages: Iterable[str],
    more: Iterable[Source],
    folder: Path,
    root: Path,
    say: Say,
) -> Iterator[str]:
    """Names of the files of one system's flat repository."""
    place = folder / "apt" / system.name
    place.mkdir(parents=True, exist_ok=True)
    state = folder / ".apt" / system.name
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    # Nothing counts as installed, so that whatever is needed comes, on any host of this system.
    (state / "status").touch()
    options = {
        "Dir::State": str(state),
        "Dir::State::Lists": str(state / "lists"),
        "Dir::State::status": str(state / "status"),
        "Dir::Cache": str(state),
        "Dir::Cache::Archives": str(state / "archives"),
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Architecture": system.architecture,
        "APT::Architectures": system.architecture,
        "APT::Get::AllowUnauthenticated": "false",
        "APT::Keep-Downloaded-Packages": "true",
        "APT::Update::Error-Mode": "any",  # else the lists of an earlier run would do
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
    }
    options |= dict(_sources(system, more, state, root))
    apt = ["apt-get", "-q", "-y"]
    for key, value in options.items():
        apt += ["-o", f"{key}={value}"]
    say(f"{system.name}: fetching Debian packages and all that they need")
    _apt([*apt, "update"], system)
    _apt([*apt, "--no-install-recommends", "--download-only", "install", *packages], system)
    # Of older runs some lie here in two versions: apt on a host takes the newer one.
    fresh: dict[str, Path] = {}
    for path in sorted((state / "archives").glob("*.deb")):
        name, version, rest = path.name.split("_", 2)
        fresh[f"{name}_{version.rpartition('%3a')[2]}_{rest}"] = path
    listed = []
    for name, path in fresh.items():
        target = place / name
        if not target.exists() or target.stat().st_size != path.stat().st_size:
            target.unlink(missing_ok=True)
            os.link(path, target)
        listed.append(_stanza(target))
    text = "\n".join(listed)
    _put(place / "Packages", text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    _put(
        place / "Release",
        f"Origin: vllm-fleet\nLabel: vllm-fleet\nSuite: bundle\nCodename: bundle\nDate: {_DATE}\n"
        f"Architectures: {system.architecture}\n"
        f"SHA256:\n {digest} {len(text.encode())} Packages\n",
    )
    for name in ("Packages", "Release", *fresh):
        yield f"apt/{system.name}/{name}"


def _put(path: Path, text: str) -> None:
    """Write a file, unless it is so already: its time stays, and it is not hashed again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _stanza(path: Path) -> str:
    """What a repository's list says of one package."""
    control = subprocess.run(
        ["dpkg-deb", "-f", str(path)], capture_output=True, text=True, check=True
    ).stdout
    digest = checks.sha256_of(path)
    size = path.stat().st_size
    return f"{control.rstrip()}\nFilename: ./{path.name}\nSize: {size}\nSHA256: {digest}\n"


def _apt(argv: Sequence[str], system: System) -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        where = system.sources or "this machine's apt sources"
        tail = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-8:])
        raise BundleError(
            f"{system.name}: apt-get {argv[-1] if argv[-1] == 'update' else 'install'} from "
            f"{where} failed: name sources of that system (--system {system.name}=FILE), or mend "
            f"what it says:\n{tail}"
        )


# -- weights


def _weights(one: Weights, folder: Path, root: Path, notes: _Notes, say: Say) -> dict[str, Any]:
    """Have a model's files as its listing says; what the manifest tells of them."""
    place = folder / one.directory
    place.mkdir(parents=True, exist_ok=True)
    entries = one.entries
    fetch = _source(one, root)
    total = sum(entry.size for entry in entries)
    here = sum(hub.on_disk(place, entry) for entry in entries)
    if here < total:
        say(f"{one.name}: {tools.gib(total - here)} of {tools.gib(total)} to fetch")

    def have(entry: hub.Entry) -> dict[str, Any]:
        path = place / entry.path
        name = f"{one.directory}/{entry.path}"
        for _ in range(2):
            if not path.is_file() or path.stat().st_size != entry.size:
                path.unlink(missing_ok=True)
                fetch(entry, place)
            found = notes.of(name)
            fits = found["sha256"] == (entry.sha256 or found["sha256"])
            if fits and (entry.sha256 or not entry.git or checks.git_id_of(path) == entry.git):
                break
            path.unlink()
            say(f"{one.name}: {entry.path}: is not what {one.listing.path} lists; once more")
        else:
            raise BundleError(
                f"{one.name}: {entry.path}: what the hub sends is not what {one.listing.path} "
                "lists: the branch or tag was moved; give its commit as revision, or freeze anew "
                "(delete the listing)"
            )
        listed = "sha256" if entry.sha256 else "git" if entry.git else ""
        return {"path": entry.path, **found, "git": entry.git, "listed": listed}

    with (
        _Ticker(one.name, place, entries, say),
        concurrent.futures.ThreadPoolExecutor(FILES_AT_ONCE) as pool,
    ):
        try:
            files = list(pool.map(have, entries))
        except tools.Refusal as refusal:
            raise BundleError(f"{one.name}: {refusal}") from None
        except OSError as error:
            full = hub.disk_refusal(error, str(place))
            raise BundleError(f"{one.name}: {full or error}") from None
    return {
        "model": one.name,
        "source": one.model.source,
        "repo": one.model.repo,
        "revision": weights.revision_of(one.model),
        "key": airgap.listing_key(one.model, one.listing),
        "digest": one.listing.digest,
        "directory": one.directory,
        "files": files,
    }


class _Ticker:
    """A line every few seconds while weights come."""

    def __init__(self, name: str, place: Path, entries: Sequence[hub.Entry], say: Say) -> None:
        self.name, self.place, self.entries, self.say = name, place, entries, say
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> _Ticker:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _tick(self) -> None:
        total = sum(entry.size for entry in self.entries)
        before = None
        while not self.ended.wait(tools.TICK_SECONDS):
            here = sum(hub.on_disk(self.place, entry) for entry in self.entries)
            if before is not None:
                self.say(checks.progress_line(self.name, here, before, total, tools.TICK_SECONDS))
            before = here


def _source(one: Weights, root: Path) -> Callable[[hub.Entry, Path], None]:
    """How one file comes from the model's hub into a directory, resumed where it stopped."""
    endpoint, token_file = weights.hub_of(one.model, one.settings)
    token = root / token_file if token_file else None
    about = {"name": one.name, "repo": one.model.repo, "revision": weights.revision_of(one.model)}
    if one.model.source == "huggingface":
        given: Mapping[str, Any] = {"endpoint": endpoint, "token_file": token}
        return hub.HuggingFace({**about, **given}).fetch
    base = (endpoint or listings.MODELSCOPE).rstrip("/")
    headers = {"User-Agent": "vllm-fleet", "Accept-Encoding": "identity"}
    if token is not None:
        headers["Cookie"] = f"m_session_id={token.read_text(encoding='utf-8').strip()}"

    def fetch(entry: hub.Entry, place: Path) -> None:
        query = urllib.parse.urlencode({"Revision": about["revision"], "FilePath": entry.path})
        url = f"{base}/api/v1/models/{urllib.parse.quote(one.model.repo)}/repo?{query}"
        partial = place / f"{entry.path}.incomplete"
        partial.parent.mkdir(parents=True, exist_ok=True)

        def ask(more: Mapping[str, str]) -> Any:
            request = urllib.request.Request(url, headers={**headers, **more})
            return urllib.request.urlopen(request, timeout=hub.IDLE_SECONDS)

        idle = 0
        while True:
            before = hub.on_disk(place, entry)
            try:
                hub.download(entry, partial, ask, f"hub {base}")
                break
            except urllib.error.HTTPError as error:
                raise BundleError(
                    f"{one.name}: {entry.path}: hub {base} answers {error.code}: check `repo`, "
                    "`revision` and hub.token_file"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                full = hub.disk_refusal(error, entry.path)
                idle = 0 if hub.on_disk(place, entry) > before else idle + 1
                if full or idle >= hub.TRIES:
                    raise full or hub.gone(entry.path, base, error, "hub.endpoint") from error
            time.sleep(min(2.0, 0.25 * 2**idle))
        if not partial.exists():
            partial.touch()  # an empty file: nothing was asked for
        partial.replace(place / entry.path)

    return fetch
