"""Makes the lock of a release, as of the day on which that vLLM came out.

vLLM leaves most of its dependencies open; resolved today, an old version gets libraries that it
never met. uv resolves as of a day, for the hosts' Python and platform; what comes out has
hashes and no addresses, and is the same text on every day and machine.

The index must tell when each file was uploaded (PEP 700). Where it does not, the lock is
refused, or made of what is there now when that is asked for.
"""

from __future__ import annotations

import base64
import datetime
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_fleet import release, variants
from vllm_fleet.onhost import tools
from vllm_fleet.spec.model import PackageIndex

NOW = "now"
PLATFORMS = {"x86_64": "x86_64-manylinux_2_35", "aarch64": "aarch64-manylinux_2_35"}
JSON = "application/vnd.pypi.simple.v1+json"
SECONDS = 60
LARGEST_PAGE = 64 * 2**20
ROUNDS = 8  # of uv, each with one more package known to have no upload times

_UNTIMED = re.compile(r"`([^`]+)` is missing an upload date")
_FILTERED = re.compile(r"`([A-Za-z0-9._-]+)` was filtered by `exclude-newer`")


class LockingError(Exception):
    """No lock can be made; what, where, why and the remedy."""


@dataclass(frozen=True)
class Wanted:
    """What a lock is made for."""

    version: str
    package: str = "vllm"
    variant: str | None = None
    python: str = "3.12"
    platform: str = "x86_64"
    exclude: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()  # further requirements, each with its version
    index: PackageIndex = field(default_factory=PackageIndex)

    @property
    def requirement(self) -> str:
        return variants.requirement(self.version, self.package, self.variant)


@dataclass(frozen=True)
class Lock:
    """A lock, the day that it is of, and what is odd about it."""

    text: str
    as_of: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class File:
    """One file of a package on an index."""

    name: str
    sha256: str
    uploaded: datetime.datetime | None


@dataclass(frozen=True)
class Places:
    """Where packages are looked for from this machine."""

    indexes: tuple[str, ...]  # the ordinary one first
    arguments: tuple[str, ...]  # the same for uv
    env: dict[str, str]
    words: str
    left_out: tuple[str, ...] = ()  # folders that tell no upload times


def find_uv() -> str:
    """uv of this environment, else of the PATH. Raises LockingError."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("uv")
    if not found:
        raise LockingError(
            "uv is not installed here, and it makes the lock: "
            f"{sys.executable} -m pip install uv (the hosts have their own)"
        )
    return found


def make(wanted: Wanted, as_of: str | None, uv: str) -> Lock:
    """A lock of what is wanted.

    ``as_of``: a day (2026-05-15, its end in UTC), a moment with offset, ``now``, or None for
    the day on which the version was first uploaded. Raises LockingError.
    """
    if wanted.platform not in PLATFORMS and "-" not in wanted.platform:
        raise LockingError(
            f"platform {wanted.platform!r} is not known: give {' or '.join(PLATFORMS)}, or one of "
            "uv's, such as x86_64-manylinux_2_28"
        )
    places = _places(wanted, uv, timed=as_of != NOW)
    files = _files(wanted, places)
    warnings = [
        f"{place} is left out: a folder tells no upload times, so its packages cannot be taken "
        "as of a day"
        for place in places.left_out
    ]
    if as_of == NOW:
        text = _resolve(wanted, places, uv, None, [])
        said = "now"
        warnings.append("made as of now: on another day the same command gives another lock")
    else:
        cutoff, said = _cutoff(wanted, as_of, files, places)
        times = [file.uploaded for file in files if file.uploaded]
        if times and len(times) == len(files) and min(times) >= cutoff:
            raise LockingError(
                f"{wanted.requirement} was first uploaded at {min(times):%Y-%m-%dT%H:%M:%SZ}: "
                f"there was none as of {said}; give a later --as-of, or none for its release day"
            )
        untimed: list[str] = []
        if wanted.variant or wanted.package != "vllm":
            untimed += variants.PINNED_BY_VLLM
        if not any(f.uploaded for f in files):
            untimed.append(release.normalise(wanted.package))  # pinned by its version
        text = _resolve(wanted, places, uv, cutoff, untimed)
        files = [f for f in files if f.uploaded is None or f.uploaded < cutoff]
    text = _one_build(text, wanted, files)
    _check(text, wanted, places)
    return Lock(_head(wanted, said) + text, said, tuple(warnings))


def _head(wanted: Wanted, said: str) -> str:
    left_out = f", with {', '.join(wanted.extra)}" if wanted.extra else ""
    left_out += f", without {', '.join(wanted.exclude)}" if wanted.exclude else ""
    return (
        f"# {wanted.requirement} for Python {wanted.python} on {wanted.platform}{left_out}, "
        f"as of {said}.\n"
        "# Made by `fleet lock`; commit it. A change of it makes another release.\n"
    )


# -- where packages are


def _places(wanted: Wanted, uv: str, *, timed: bool) -> Places:
    """The index settings of the hosts where given, else of this machine's pip, as on a host."""
    given = wanted.index.model_dump(mode="json")
    config: dict[str, list[str]] = {} if tools.given(given) else tools.pip_config(sys.executable)
    if not tools.given(given):
        given = {
            "index_url": next(iter(config.get("index-url", [])), None),
            "extra_index_urls": [
                *config.get("extra-index-url", []),
                *variants.indexes(wanted.version, wanted.package, wanted.variant),
            ],
            "find_links": config.get("find-links", []),
            "no_index": config.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"),
        }
    if given["no_index"] and timed:
        raise LockingError(
            "package_index.no_index is set, and a folder tells no upload times: what stood there "
            "on a day cannot be told. Name an index for this command in package_index, or make "
            "the lock of what is in the folder now: --as-of now"
        )
    left_out = [str(place) for place in given["find_links"] or []] if timed else []
    if timed:
        given = {**given, "find_links": []}
    arguments, env = tools.uv_arguments(given, {})
    if not tools.given(given):
        arguments = ["--no-config"]
    if config.get("cert"):
        env["SSL_CERT_FILE"] = config["cert"][0]
    for host in config.get("trusted-host", []):
        arguments += ["--allow-insecure-host", host]
    if not given["no_index"] and not given["index_url"]:
        given = {**given, "index_url": _unasked(uv)}
    indexes = [] if given["no_index"] else [given["index_url"]]
    indexes += [] if given["no_index"] else given["extra_index_urls"] or []
    return Places(
        tuple(map(str, indexes)),
        tuple(arguments),
        env,
        tools.index_words(given, {}),
        tuple(re.sub(r"//[^/@]*@", "//", place) for place in left_out),
    )


def _unasked(uv: str) -> str:
    """The index that uv takes where none is named: its own word, from a lock of nothing."""
    argv = [uv, "--color", "never", "--no-config", "pip", "compile", "-", "--emit-index-url"]
    argv += ["--no-header", "--offline", "--quiet"]
    env = {**tools.base_env({}), "UV_PYTHON_DOWNLOADS": "never"}
    try:
        text = tools.run(argv, env, "fleet lock: asking uv for its package index")
    except tools.Refusal as refusal:
        raise LockingError(str(refusal)) from None
    found = re.search(r"(?m)^--index-url (\S+)$", text)
    if found is None:
        raise LockingError(
            f"{uv} does not tell which package index it uses: name one in package_index.index_url"
        )
    return found[1]


def _files(wanted: Wanted, places: Places) -> list[File]:
    """The files of this very version on all indexes. An index without the package is none."""
    found: list[File] = []
    package = release.normalise(wanted.package)
    prefix = re.sub(r"[-_.]+", "_", wanted.package).lower()
    versions = {wanted.version, wanted.requirement.partition("==")[2]}
    for index in places.indexes:
        for file in _page(f"{index.rstrip('/')}/{package}/", places):
            name, _, rest = file.name.partition("-")
            version = urllib.parse.unquote(rest.partition("-")[0])
            if file.name.endswith(".whl") and name.lower() == prefix and version in versions:
                found.append(file)
    return found


def _page(url: str, places: Places) -> list[File]:
    """The files that a page of an index lists. Raises LockingError where it does not answer."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return []
    headers = {"Accept": f"{JSON}, text/html;q=0.1", "User-Agent": "vllm-fleet"}
    if parts.username:
        words = f"{urllib.parse.unquote(parts.username)}:"
        words += urllib.parse.unquote(parts.password or "")
        headers["Authorization"] = f"Basic {base64.b64encode(words.encode()).decode()}"
        url = url.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1)
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            kind = str(answer.headers.get("Content-Type", ""))
            body: bytes = answer.read(LARGEST_PAGE)
        if "json" in kind:
            return [_file(entry) for entry in json.loads(body)["files"]]
        links = _Links()
        links.feed(body.decode("utf-8", "replace"))
        return [
            File(urllib.parse.unquote(link.rpartition("/")[2].partition("#")[0]), sha256, None)
            for link, sha256 in links.found
        ]
    except urllib.error.HTTPError as error:
        if error.code in (403, 404):  # 403: some indexes of one package say so for all others
            return []
        raise LockingError(f"{url}: answers {error.code}; check package_index") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LockingError(
            f"{url}: cannot be read ({error}); check package_index, and this machine's proxy and "
            "name resolution"
        ) from None


def _file(entry: dict[str, object]) -> File:
    hashes = entry.get("hashes")
    sha256 = str(hashes.get("sha256", "")) if isinstance(hashes, dict) else ""
    time = entry.get("upload-time")
    uploaded = datetime.datetime.fromisoformat(time) if isinstance(time, str) and time else None
    return File(str(entry["filename"]), sha256, uploaded)


class _Links(html.parser.HTMLParser):
    """(link, sha256) of every link of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        link = dict(attrs).get("href")
        if tag == "a" and link:
            self.found.append((link, link.partition("#sha256=")[2]))


def _cutoff(
    wanted: Wanted, as_of: str | None, files: Sequence[File], places: Places
) -> tuple[datetime.datetime, str]:
    """(the moment before which everything was uploaded, the same in words)."""
    if as_of is None:
        uploaded = [file.uploaded for file in files if file.uploaded]
        if not uploaded:
            raise LockingError(_no_times(wanted, files, places))
        day = min(uploaded).astimezone(datetime.UTC).date()
    elif re.fullmatch(r"\d{4}-\d\d-\d\d", as_of):
        try:
            day = datetime.date.fromisoformat(as_of)
        except ValueError:
            raise LockingError(f"--as-of {as_of}: there is no such day") from None
    else:
        try:
            moment = datetime.datetime.fromisoformat(as_of)
        except ValueError:
            raise LockingError(
                f"--as-of {as_of}: must be a day such as 2026-05-15, a moment such as "
                "2026-05-15T12:00:00Z, or now"
            ) from None
        if moment.tzinfo is None:
            raise LockingError(f"--as-of {as_of}: a moment needs its offset, such as Z for UTC")
        moment = moment.astimezone(datetime.UTC)
        return moment, f"{moment:%Y-%m-%dT%H:%M:%SZ}"
    start = datetime.datetime.combine(day, datetime.time(), datetime.UTC)
    return start + datetime.timedelta(days=1), f"{day} (UTC)"


def _no_times(wanted: Wanted, files: Sequence[File], places: Places) -> str:
    if not files:
        return (
            f"{wanted.requirement} has no wheels at {places.words}; check the version and "
            "package_index"
            + (
                ". Builds beside the ordinary one are at "
                + ", ".join(variants.indexes(wanted.version, wanted.package, wanted.variant))
                + ": add these, or mirrors of them, to package_index.extra_index_urls"
                if wanted.variant and tools.given(wanted.index.model_dump(mode="json"))
                else ""
            )
        )
    return (
        f"{places.words} does not tell when {wanted.requirement} was uploaded (PEP 700), so its "
        "release day is not known: give the day by --as-of, set package_index.index_url to an "
        "index that tells upload times, or lock what is there now by --as-of now"
    )


# -- resolution


def _resolve(
    wanted: Wanted,
    places: Places,
    uv: str,
    cutoff: datetime.datetime | None,
    untimed: Iterable[str],
) -> str:
    """The text that uv makes. Raises LockingError."""
    free = list(untimed)
    for _ in range(ROUNDS):
        code, text, output = _uv(wanted, places, uv, cutoff, free)
        if code == 0:
            return text
        package = release.normalise(wanted.package)
        without = {_package_of(name) for name in _UNTIMED.findall(output)}
        missing = {release.normalise(name) for name in _FILTERED.findall(output)} & without
        more = missing & ({*variants.PINNED_BY_VLLM, package} - set(free))
        if not more:
            break
        free += sorted(more)
    if cutoff is not None and missing:
        names = ", ".join(sorted(missing))
        raise LockingError(
            f"{places.words} does not tell upload times (PEP 700) of {names}, so what stood there "
            f"on a day cannot be told: set package_index.index_url to an index that does, or lock "
            "what is there now by --as-of now"
        )
    doing = f"fleet lock: resolving {wanted.requirement}"
    raise LockingError(tools.explain(output, doing, places.words, code))


def _uv(
    wanted: Wanted,
    places: Places,
    uv: str,
    cutoff: datetime.datetime | None,
    untimed: Sequence[str],
) -> tuple[int, str, str]:
    """Run uv once: (exit code, the lock, what it said)."""
    argv = [uv, "--color", "never", "pip", "compile", "-", "--generate-hashes", "--no-header"]
    argv += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    argv += ["--python-version", wanted.python]
    argv += ["--python-platform", PLATFORMS.get(wanted.platform, wanted.platform)]
    argv += places.arguments
    if cutoff is not None:
        argv += ["--exclude-newer", f"{cutoff:%Y-%m-%dT%H:%M:%SZ}"]
        for name in untimed:
            argv += ["--exclude-newer-package", f"{name}=false"]
    env = {
        **tools.base_env({}),
        **places.env,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "UV_HTTP_TIMEOUT": "60",
    }
    for key in ("UV_CACHE_DIR", "UV_HTTP_RETRIES"):
        if key in os.environ:
            env[key] = os.environ[key]
    with tempfile.TemporaryDirectory(prefix="fleet-lock-") as folder:
        if wanted.exclude:
            # A requirement that never holds, in place of the one that vLLM has.
            overrides = Path(folder) / "overrides.txt"
            lines = "".join(f"{name} ; python_version < '0'\n" for name in wanted.exclude)
            overrides.write_text(lines, encoding="utf-8")
            argv += ["--overrides", str(overrides)]
        try:
            done = subprocess.run(
                argv,
                env=env,
                input="".join(f"{one}\n" for one in (wanted.requirement, *wanted.extra)),
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise LockingError(f"{uv}: {error.strerror}") from None
    # The Python of the hosts need not be here; uv warns of it each time.
    said = [line for line in done.stderr.splitlines() if "requested Python version" not in line]
    return done.returncode, done.stdout, "\n".join(said)


def _package_of(filename: str) -> str:
    """The package that a file of an index is of."""
    if filename.endswith(".whl"):
        return release.normalise(filename.partition("-")[0])
    return release.normalise(filename.rpartition("-")[0])


# -- what came out


def _one_build(text: str, wanted: Wanted, files: Sequence[File]) -> str:
    """The lock without the hashes of wheels that a later build of the same version replaced.

    A version may be uploaded again under a build tag (vllm-0.21.0-1-...): two files then pass
    for it, and which one a host gets would follow from its mirror.
    """
    best: dict[str, tuple[int, str]] = {}
    replaced: set[str] = set()
    for file in files:
        parts = file.name.removesuffix(".whl").split("-")
        build = int(re.match(r"\d+", parts[2])[0]) if len(parts) == 6 else 0  # type: ignore[index]
        tags = "-".join([parts[1], *parts[-3:]])
        known = best.get(tags)
        if known is None or build > known[0]:
            best[tags] = (build, file.sha256)
            if known is not None:
                replaced.add(known[1])
        elif build < known[0]:
            replaced.add(file.sha256)
    replaced -= {"", *(sha256 for _, sha256 in best.values())}
    if not replaced:
        return text
    lines = [
        line
        for line in text.splitlines()
        if not any(f"--hash=sha256:{checksum}" in line for checksum in replaced)
    ]
    # The last line of a requirement carries no backslash, also where it was another one before.
    for number, line in enumerate(lines):
        after = lines[number + 1] if number + 1 < len(lines) else ""
        goes_on = after.startswith((" ", "\t")) and after.strip().startswith("--hash")
        lines[number] = line.rstrip(" \\") + (" \\" if goes_on else "")
    return "\n".join(lines) + "\n"


def _check(text: str, wanted: Wanted, places: Places) -> None:
    """Refuse a lock that is not of the build that was asked for."""
    try:
        release.check_lock(text, wanted.version, wanted.package, wanted.extra)
        pins = {pin.name: pin for pin in release.parse_lock(text)}
    except release.LockError as error:
        raise LockingError(f"uv made a lock that cannot be used: {error}") from None
    pin = pins[release.normalise(wanted.package)]
    asked = wanted.requirement.partition("==")[2]
    if wanted.package == "vllm" and pin.version != asked:
        raise LockingError(
            f"{places.words} has {pin.version} in place of {asked}: it holds another build; give "
            f"--variant {pin.version.partition('+')[2]} (vllm_variant), or correct package_index"
        )


def changes(old: str | None, new: str) -> list[str]:
    """What a new lock changes against the one that stands there, package by package."""
    if old is None:
        return []
    try:
        before = {pin.name: pin.version for pin in release.parse_lock(old)}
    except release.LockError as error:
        return [f"the old one was no lock: {error}"]
    after = {pin.name: pin.version for pin in release.parse_lock(new)}
    lines = [
        f"{name} {before.get(name, 'not there')} -> {after.get(name, 'gone')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    if not lines and release.lock_sha256(old) != release.lock_sha256(new):
        lines = ["the same versions with other hashes"]
    return lines
