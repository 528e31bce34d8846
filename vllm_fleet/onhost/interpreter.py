"""Has a Python from an archive on this host: /opt/vllm/python/<version>-<sha256>/.

For hosts whose own Python does not suit a release: too old, too new, or another than the one
that its lock was made for. An archive is a .tar.gz, .tar.xz or .tar.bz2 of a relocatable Python
with bin/python3 in it, alone or below one directory, such as the `install_only` builds of
python-build-standalone. It is fetched (resumed where it was cut), compared with its sha256,
unpacked beside its place, tried, and switched in by rename.

The host's own Python is not touched, and runs our scripts as before; release.py makes releases
with this one. Standard library alone.
"""

import compileall
import contextlib
import errno
import hashlib
import http.client
import os
import posixpath
import shutil
import stat
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Tuple

if __package__:
    from vllm_fleet.onhost import tools
else:  # on a host: a flat directory of scripts
    import tools  # type: ignore[no-redef]

Refusal = tools.Refusal
say = tools.say

STAMP = "python.json"
ROOM = 600 << 20  # an archive (30 to 110 MiB) and what it unpacks to, bytecode included
IDLE_SECONDS = 60
TRIES = 4  # without a new byte
BLOCK = 1 << 20
# What an interpreter is asked for: builds without these make releases that break later.
TRIED = "import ctypes, lzma, sqlite3, ssl, venv, sys; print(sys.version.split()[0])"


def have(archive: Mapping[str, Any], proxy: Mapping[str, Optional[str]]) -> str:
    """Path of the interpreter of an archive {"source", "sha256", "version", "directory"}."""
    version, checksum = str(archive["version"]), str(archive["sha256"])
    root = Path(archive["directory"])
    final = root / f"{version}-{checksum[:12]}"
    root.mkdir(parents=True, exist_ok=True)
    with tools.locked(root / ".lock", "python"):
        if not (final / STAMP).is_file():
            _make(archive, proxy, final)
    return str(final / "bin/python3")


def _make(archive: Mapping[str, Any], proxy: Mapping[str, Optional[str]], final: Path) -> None:
    source, checksum = str(archive["source"]), str(archive["sha256"])
    tools.check_room({"Python": (final.parent, ROOM)})
    packed = final.parent / f".{checksum}.tar"
    part = final.parent / f".{final.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    say(f"python: {final} from {source}")
    fetch(source, checksum, packed, proxy)
    try:
        _unpack(packed, part, source)
        full = _try(part, str(archive["version"]), source)
        compileall.compile_dir(str(part / "lib"), quiet=2)  # nobody can write there later
        stamp = {"source": source, "sha256": checksum, "version": full}
        tools.write_json(part / STAMP, stamp)
        shutil.rmtree(final, ignore_errors=True)  # without a stamp: cut off while it was removed
        os.sync()
        part.rename(final)
        tools.sync_directory(final.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    packed.unlink()
    say(f"python: {final} ready, Python {full}")


def fetch(source: str, checksum: str, target: Path, proxy: Mapping[str, Optional[str]]) -> None:
    """Have an archive in a file, right by its sha256. Refuses what is another."""
    partial = target.with_name(f"{target.name}.incomplete")
    if target.is_file() and _sha256(target) == checksum:
        return
    if "://" in source:
        _download(source, partial, proxy)
    else:
        try:
            shutil.copyfile(source, partial)
        except OSError as error:
            raise Refusal(
                f"python: {source}: {error.strerror}; put the archive there, or correct "
                "python_archive.source"
            ) from None
    found = _sha256(partial)
    if found != checksum:
        partial.unlink()
        raise Refusal(
            f"python: {source} is not the archive that python_archive.sha256 names: sha256 "
            f"{found}, wanted {checksum}; correct the sha256 where you trust that source, else "
            "the source"
        )
    partial.replace(target)


def _download(url: str, partial: Path, proxy: Mapping[str, Optional[str]]) -> None:
    """Fetch a file, resumed where an earlier try stopped."""
    for key, name in (("http", "http_proxy"), ("https", "https_proxy"), ("no_proxy",) * 2):
        if proxy.get(key):
            os.environ[name] = os.environ[name.upper()] = str(proxy[key])
    idle = 0
    while True:
        before = _size(partial)
        try:
            _part(url, partial)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # nothing is left to come: its checksum decides
                return
            raise Refusal(
                f"python: {url}: answers {error.code}; correct python_archive.source"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if _of_the_disk(error):
                raise
            idle = 0 if _size(partial) > before else idle + 1
            if idle >= TRIES:
                raise Refusal(
                    f"python: {url} cannot be fetched ({error}); check python_archive.source, "
                    "proxy and name resolution on this host, then run again: what came is kept"
                ) from None
        time.sleep(min(2.0, 0.25 * 2**idle))


def _part(url: str, partial: Path) -> None:
    here = _size(partial)
    headers = {"User-Agent": "vllm-fleet", "Accept-Encoding": "identity"}
    if here:
        headers["Range"] = f"bytes={here}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=IDLE_SECONDS) as answer:
        goes_on = answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(
            f"bytes {here}-"
        )
        with partial.open("ab" if here and goes_on else "wb") as file:
            left = answer.headers.get("Content-Length")
            wanted = int(left) if left else None
            came = 0
            while True:
                data = answer.read1(BLOCK)
                if not data:
                    break
                file.write(data)
                came += len(data)
        if wanted is not None and came < wanted:
            raise ConnectionError(f"ended after {came} of {wanted} bytes")


def _of_the_disk(error: BaseException) -> bool:
    """Whether a failure is of our own disk, full or locked, and not of what comes."""
    own = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    return isinstance(error, OSError) and error.errno in own


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while True:
            data = file.read(BLOCK)
            if not data:
                return digest.hexdigest()
            digest.update(data)


# -- unpacking


def _unpack(packed: Path, place: Path, source: str) -> None:
    """The files of an archive, less the one directory that all of them may be below.

    Plain files, directories and links alone, all of them inside: whoever wrote the archive
    decides what runs in the engine anyway, but a damaged one must not write elsewhere.
    """
    place.mkdir()
    try:
        with tarfile.open(packed, "r:*") as archive:
            members = [(_inside(one.name, source), one) for one in archive.getmembers()]
            drop = _above(name for name, _ in members)
            for name, one in members:
                short = "/".join(name.split("/")[drop:])
                if short:
                    _put(archive, one, place, short, drop, source)
    except (tarfile.TarError, EOFError, OSError) as error:
        if _of_the_disk(error):
            raise
        why = str(error).split("\n")[0].rstrip(":")
        raise Refusal(
            f"python: {source} cannot be unpacked ({why}); a .tar.gz, .tar.xz or .tar.bz2 of a "
            "relocatable Python is wanted, such as an install_only build of "
            "python-build-standalone"
        ) from None


def _inside(name: str, source: str) -> str:
    """The normal form of a member's name."""
    found = posixpath.normpath(name)
    if found.startswith(("/", "../")) or found == "..":
        raise Refusal(f"python: {source} holds {name!r}, which leads out of it; refused")
    return "" if found == "." else found


def _above(names: Iterable[str]) -> int:
    """How many directories stand above bin/python3: 0 or 1."""
    listed = set(names)
    return 0 if "bin/python3" in listed else 1


def _put(
    archive: tarfile.TarFile, one: tarfile.TarInfo, place: Path, name: str, drop: int, source: str
) -> None:
    target = place / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if one.isdir():
        target.mkdir(exist_ok=True)
        return
    if one.issym():
        _inside(posixpath.join(posixpath.dirname(name), one.linkname), source)
        os.symlink(one.linkname, target)
    elif one.islnk():
        origin = _inside(one.linkname, source).split("/")[drop:]
        os.link(place.joinpath(*origin), target)
    elif one.isfile():
        data = archive.extractfile(one)
        assert data is not None, "a plain file has data"
        with data, target.open("wb") as file:
            shutil.copyfileobj(data, file, BLOCK)
        target.chmod(0o755 if one.mode & stat.S_IXUSR else 0o644)
    else:
        raise Refusal(f"python: {source} holds {one.name!r}, which is no file; refused")


def _try(place: Path, wanted: str, source: str) -> str:
    """Run the interpreter; its full version. Refuses one that does not run here, or is another."""
    python = place / "bin/python3"
    if not os.access(python, os.X_OK):
        raise Refusal(
            f"python: {source} holds no bin/python3; a relocatable Python is wanted, such as an "
            "install_only build of python-build-standalone"
        )
    code, text = _run(str(python))
    if code:
        raise Refusal(
            f"python: the Python of {source} does not run on this host: {text}; take a build for "
            f"this machine ({os.uname().machine}) and its C library"
        )
    if text.split(".")[:2] != wanted.split(".")[:2]:
        raise Refusal(
            f"python: {source} is Python {text}, python_archive.version says {wanted}; correct "
            "one of them"
        )
    return text


def _run(python: str) -> Tuple[int, str]:
    env = {"PATH": tools.SEARCH, "LANG": "C.UTF-8"}
    try:
        done = subprocess.run(
            [python, "-I", "-c", TRIED], env=env, text=True, errors="replace", check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    lines = done.stdout.strip().splitlines() or [f"exit {done.returncode}"]
    return done.returncode, lines[-1]
