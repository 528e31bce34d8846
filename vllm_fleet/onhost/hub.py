"""Where weights come from: ModelScope by its library, Hugging Face by plain HTTP.

Both give the same: a listing, and one file into a directory, resumed where an earlier try
stopped. Whether the bytes are right is decided in weights.py.

Runs with the tools venv's Python.
"""

import concurrent.futures
import contextlib
import errno
import http.client
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Optional, Tuple, Union

if __package__:
    from vllm_fleet.onhost import tools
else:  # on a host: a flat directory of scripts
    import tools  # type: ignore[no-redef]

Refusal = tools.Refusal

HUGGINGFACE = "https://huggingface.co"
CONNECT_SECONDS = 10
ANSWER_SECONDS = 25  # for a listing, retries included
IDLE_SECONDS = 30  # without a byte, then the connection counts as lost
TRIES = 4  # without a new byte
BLOCK = 1 << 20
LARGEST_PAGE = 64 << 20
LARGEST_LISTING = 1000  # pages


@dataclass(frozen=True)
class Entry:
    """One file of a repository, as its listing says.

    sha256 is empty where it says none; git is then its id in git, of files that are no LFS
    objects, at a hub that tells it.
    """

    path: str
    size: int
    sha256: str
    git: str = ""


def on_disk(place: Path, entry: Entry) -> int:
    """Bytes of a file that are here already, whole or partial."""
    for path in (place / entry.path, place / f"{entry.path}.incomplete"):
        with contextlib.suppress(OSError):
            return min(entry.size, path.stat().st_size)
    return 0


def source(settings: Mapping[str, Any]) -> "Source":
    """The hub that these settings name."""
    return (
        HuggingFace(settings) if settings.get("source") == "huggingface" else ModelScope(settings)
    )


class Bound:
    """A bound of bytes a second over all connections of this process to the hub.

    Kept where every library reads at last: http.client's answers. One that reads more slowly
    than the hub sends is waited for by TCP itself.
    """

    BURST_SECONDS = 0.1

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.until = 0.0  # when what was read so far is paid for
        self.lock = threading.Lock()
        self.inside = threading.local()  # a read that calls another one counts once

    def pay(self, count: int) -> None:
        """Wait as long as these bytes may take."""
        with self.lock:
            self.until = max(self.until, time.monotonic()) + count / self.rate
            wait = self.until - time.monotonic() - self.BURST_SECONDS
        if wait > 0:
            time.sleep(wait)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Bound what is read meanwhile; answers marked `unbounded` are left out."""
        kept = {name: getattr(http.client.HTTPResponse, name) for name in READS}
        for name, plain in kept.items():
            setattr(http.client.HTTPResponse, name, self._bounded(plain))
        try:
            yield
        finally:
            for name, plain in kept.items():
                setattr(http.client.HTTPResponse, name, plain)

    def _bounded(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(answer: Any, *arguments: Any, **named: Any) -> Any:
            if getattr(self.inside, "on", False) or getattr(answer, "unbounded", False):
                return plain(answer, *arguments, **named)
            self.inside.on = True
            try:
                found = plain(answer, *arguments, **named)
            finally:
                self.inside.on = False
            self.pay(found if isinstance(found, int) else len(found))
            return found

        return read


READS = ("read", "read1", "readinto")


class HubGone(Refusal):
    """The hub does not answer: no use in asking it for further files."""


class DiskFull(Refusal):
    """Nothing more can be written: no use in fetching further files."""


class ModelScope:
    """The modelscope library, set up for this run."""

    setting = "hub.endpoint"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.name = str(settings["name"])
        self.repo = str(settings["repo"])
        self.revision = str(settings.get("revision") or "master")
        state = Path(settings.get("state") or "/var/lib/vllm/weights")
        proxy = settings.get("proxy") or {}
        environment = {
            "MODELSCOPE_CACHE": str(state / "modelscope"),
            "MODELSCOPE_HOME": str(state / "modelscope"),
            "MODELSCOPE_LOG_LEVEL": "CRITICAL",
            "TQDM_DISABLE": "1",
            # This run holds a lock of its own over the whole directory.
            "MODELSCOPE_DOWNLOAD_FILE_LOCK": "false",
            # Off: a probe that only Alibaba Cloud answers.
            "MODELSCOPE_DOWNLOAD_INTRA_CLOUD": "false",
            # Parts of one file are written twice, and lost when cut off in the merge; files in
            # parallel fill a line as well. `parts` turns them on for slow single connections.
            "MODELSCOPE_DOWNLOAD_PARALLEL_WORKERS": str(int(settings.get("parts") or 1)),
            # The default ends a file after an hour: 10 GB at less than 2.8 MB/s.
            "MODELSCOPE_DOWNLOAD_TOTAL_TIMEOUT": str(7 * 86400),
            "MODELSCOPE_DOWNLOAD_TIMEOUT": "30",
            "MODELSCOPE_DOWNLOAD_MAX_RETRIES": "4",
            "MODELSCOPE_API_TIMEOUT": str(ANSWER_SECONDS),
            "MODELSCOPE_API_MAX_RETRIES": "1",
        }
        for key, name in (("http", "http_proxy"), ("https", "https_proxy"), ("no_proxy",) * 2):
            if proxy.get(key):
                environment[name] = environment[name.upper()] = str(proxy[key])
        if settings.get("endpoint"):
            environment["MODELSCOPE_ENDPOINT"] = str(settings["endpoint"]).rstrip("/")
        if settings.get("token_file"):
            token = Path(settings["token_file"]).read_text(encoding="utf-8").strip()
            environment["MODELSCOPE_API_TOKEN"] = token
        (state / "modelscope").mkdir(parents=True, exist_ok=True)
        os.environ.update(environment)  # the library reads them once, when imported
        try:
            import modelscope_hub
            from modelscope_hub import config, errors
        except ImportError as error:
            raise Refusal(f"{error}; run this with the tools venv's Python") from None
        self.errors: Any = errors
        hub = config.HubConfig()
        self.api: Any = modelscope_hub.HubApi(config=hub)
        self.endpoint = str(hub.endpoint)

    def listing(self) -> List[Entry]:
        """The files of the repository at the revision. One request."""
        self._reachable()
        answer: "concurrent.futures.Future[Any]" = concurrent.futures.Future()

        def ask() -> None:
            try:
                answer.set_result(
                    self.api.list_repo_files(self.repo, "model", revision=self.revision)
                )
            except Exception as error:
                answer.set_exception(error)

        # In a thread that dies with the process: the library asks four times, and a hub that
        # accepts and stays silent would hold each of them up to the time-out.
        threading.Thread(target=ask, daemon=True).start()
        try:
            files = answer.result(ANSWER_SECONDS)
        except concurrent.futures.TimeoutError:
            silent = TimeoutError(f"no answer for {ANSWER_SECONDS} s")
            raise self._gone("listing", silent) from None
        except Exception as error:
            raise self._refusal(error, "listing") from error
        return [Entry(f.path, f.size, (f.sha256 or "").lower()) for f in files if not f.is_dir]

    def fetch(self, entry: Entry, place: Path) -> None:
        """One file into a directory, resumed where it stopped, while the hub gives bytes.

        The library gives up after a number of failures; here a failure after new bytes is
        followed by another try, since a poor line must not end a download of hours.
        """
        while True:
            before = on_disk(place, entry)
            try:
                self.api.download_file(
                    self.repo, "model", entry.path, revision=self.revision,
                    local_dir=str(place), file_size=entry.size,
                )  # fmt: skip
                return
            except Exception as error:
                refusal = self._refusal(error, entry.path)
                if not isinstance(refusal, HubGone) or on_disk(place, entry) <= before:
                    raise refusal from error
            time.sleep(1)

    def _reachable(self) -> None:
        """Refuse at once where nothing listens, instead of after the library's retries."""
        url = urllib.parse.urlsplit(self.endpoint)
        host = url.hostname or ""
        proxied = urllib.request.getproxies().get(url.scheme)
        if proxied and not urllib.request.proxy_bypass(host):
            return
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
        except OSError as error:
            raise self._gone("listing", error) from None

    def _gone(self, what: str, error: BaseException) -> HubGone:
        return gone(what, self.endpoint, error, self.setting)

    def _refusal(self, error: BaseException, what: str) -> Exception:
        """The library's exception in an operator's words."""
        errors = self.errors
        at = f"{self.repo} at {self.revision}"
        disk = disk_refusal(error, what)
        if disk is not None:
            return disk
        if isinstance(error, errors.NotExistError):
            return Refusal(
                f"{what}: hub {self.endpoint} does not know it ({at}); check repo and revision"
            )
        if isinstance(error, (errors.AuthenticationError, errors.PermissionDeniedError)):
            return Refusal(
                f"{what}: hub {self.endpoint} refuses access to {at}; set hub.token_file to a "
                "token that may read it"
            )
        if isinstance(error, errors.FileSizeMismatchError):
            return Refusal(
                f"{what}: the hub's listing and what it sends differ in size ({cause(error)}); "
                "the upload is broken or has just changed: pin a tag or commit, or run again later"
            )
        if isinstance(error, errors.FileIntegrityError):
            return Refusal(f"{what}: {cause(error)}")
        return self._gone(what, error)


def cause(error: BaseException) -> str:
    """The innermost cause, short, on one line."""
    seen = error
    while seen.__cause__ is not None or seen.__context__ is not None:
        seen = seen.__cause__ or seen.__context__ or seen
    text = " ".join(str(seen).split()) or type(seen).__name__
    return text[:300]


class HuggingFace:
    """Hugging Face, or a mirror that answers like it, by plain HTTP.

    The revision is turned into its commit once, and everything is asked for at that commit: a
    branch that moves meanwhile does not mix two states.
    """

    setting = "hub.huggingface_endpoint"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.name = str(settings["name"])
        self.repo = str(settings["repo"])
        self.revision = str(settings.get("revision") or "main")
        self.endpoint = str(settings.get("endpoint") or HUGGINGFACE).rstrip("/")
        self.token = ""
        self.commit = ""
        if settings.get("token_file"):
            self.token = Path(settings["token_file"]).read_text(encoding="utf-8").strip()
        proxy = settings.get("proxy") or {}
        for key, name in (("http", "http_proxy"), ("https", "https_proxy"), ("no_proxy",) * 2):
            if proxy.get(key):
                os.environ[name] = os.environ[name.upper()] = str(proxy[key])

    def listing(self) -> List[Entry]:
        """The files of the repository at the revision."""
        ends = time.monotonic() + ANSWER_SECONDS
        info = self._json(f"{self._api()}/revision/{_quoted(self.revision)}", "listing", ends)[0]
        commit = info.get("sha") if isinstance(info, dict) else None
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise self._gone("listing", ValueError("its answer names no commit"))
        self.commit = commit
        found: List[Entry] = []
        url: Optional[str] = f"{self._api()}/tree/{commit}?recursive=true"
        for _ in range(LARGEST_LISTING):
            if url is None:
                return found
            page, url = self._json(url, "listing", time.monotonic() + ANSWER_SECONDS)
            try:
                for one in page:
                    if one["type"] == "file":
                        lfs = one.get("lfs") or {}
                        size = lfs.get("size", one["size"])
                        sha256 = str(lfs.get("oid") or "").lower()
                        git = "" if lfs else str(one.get("oid") or "").lower()
                        found.append(Entry(one["path"], int(size), sha256, git))
            except (TypeError, KeyError, ValueError, AttributeError):
                raise self._gone("listing", ValueError("its answer is no listing")) from None
        raise self._gone("listing", ValueError("its listing does not end"))

    def fetch(self, entry: Entry, place: Path) -> None:
        """One file into a directory, resumed where it stopped, while the hub gives bytes."""
        if not self.commit:
            self.commit = self.revision  # a frozen listing was used: files are checked by sha256
        partial = place / f"{entry.path}.incomplete"
        partial.parent.mkdir(parents=True, exist_ok=True)
        idle = 0
        while True:
            before = on_disk(place, entry)
            try:
                self._part(entry, partial)
                partial.replace(place / entry.path)
                return
            except (OSError, http.client.HTTPException) as error:
                refusal = self._refusal(error, entry.path)
                if not isinstance(refusal, HubGone):
                    raise refusal from error
                idle = 0 if on_disk(place, entry) > before else idle + 1
                if idle >= TRIES:
                    raise refusal from error
            time.sleep(min(2.0, 0.25 * 2**idle))

    def _part(self, entry: Entry, partial: Path) -> None:
        url = f"{self.endpoint}/{_quoted(self.repo)}/resolve/{self.commit}/{_quoted(entry.path)}"
        download(
            entry, partial, lambda more: self._open(url, more, IDLE_SECONDS), f"hub {self.endpoint}"
        )

    def _api(self) -> str:
        return f"{self.endpoint}/api/models/{_quoted(self.repo)}"

    def _json(self, url: str, what: str, ends: float) -> Tuple[Any, Optional[str]]:
        """(answer, address of the next page); tried again until a moment."""
        while True:
            try:
                with self._open(url, {}, max(1.0, ends - time.monotonic())) as answer:
                    following = _next_page(answer.headers.get("Link") or "")
                    value = json.loads(answer.read(LARGEST_PAGE))
                if following and not following.startswith(("http://", "https://")):
                    following = urllib.parse.urljoin(url, following)
                return value, following
            except (OSError, http.client.HTTPException, ValueError) as error:
                refusal = self._refusal(error, what)
                if not isinstance(refusal, HubGone) or time.monotonic() + 2 > ends:
                    raise refusal from error
            time.sleep(1)

    def _open(self, url: str, headers: Mapping[str, str], seconds: float) -> Any:
        request = urllib.request.Request(
            url, headers={"User-Agent": "vllm-fleet", "Accept-Encoding": "identity", **headers}
        )
        if self.token:
            # Not sent on to where a file's answer redirects: that address carries its own right.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        return urllib.request.urlopen(request, timeout=seconds)

    def _gone(self, what: str, error: BaseException) -> "HubGone":
        return gone(what, self.endpoint, error, self.setting)

    def _refusal(self, error: BaseException, what: str) -> Exception:
        if isinstance(error, Refusal):
            return error
        at = f"{self.repo} at {self.revision}"
        if isinstance(error, urllib.error.HTTPError):
            if error.code in (401, 403):
                return Refusal(
                    f"{what}: hub {self.endpoint} refuses access to {at}; set "
                    "hub.huggingface_token_file to a token that may read it, or accept the "
                    "model's terms with its account"
                )
            if error.code in (404, 410):
                return Refusal(
                    f"{what}: hub {self.endpoint} does not know it ({at}); check repo and revision"
                )
        return disk_refusal(error, what) or self._gone(what, error)


Source = Union[ModelScope, HuggingFace]


def download(
    entry: Entry, partial: Path, ask: Callable[[Mapping[str, str]], Any], whom: str
) -> None:
    """Ask for what is missing of a file and append it. Raises OSError where it ends too early.

    ``ask``: given headers, opens the answer; ``whom``: who is asked, for messages.
    """
    here = partial.stat().st_size if partial.exists() else 0
    if here > entry.size:
        partial.unlink()
        here = 0
    if here == entry.size and entry.size:
        return
    headers = {"Range": f"bytes={here}-"} if here else {}
    with ask(headers) as answer:
        if here and not _continues(answer, here):
            here = 0  # the whole file, whatever was asked for
        with partial.open("ab" if here else "wb") as file:
            while here < entry.size:
                data = answer.read1(min(BLOCK, entry.size - here))
                if not data:
                    raise ConnectionError(f"ended after {here} of {entry.size} bytes")
                file.write(data)
                here += len(data)
            if answer.read(1):
                raise Refusal(
                    f"{entry.path}: {whom} sends more than the {entry.size} bytes that are listed; "
                    "the upload has just changed: pin a commit, or run again"
                )


def _quoted(text: str) -> str:
    return urllib.parse.quote(text)


def _continues(answer: Any, here: int) -> bool:
    """Whether an answer to a Range goes on where we are."""
    if answer.status != 206:
        return False
    match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range") or "")
    return match is not None and int(match[1]) == here


def _next_page(link: str) -> Optional[str]:
    match = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', link)
    return match[1] if match else None


def gone(what: str, endpoint: str, error: BaseException, setting: str) -> HubGone:
    """A hub that does not answer, in an operator's words."""
    return HubGone(
        f"{what}: hub {endpoint} does not answer ({cause(error)}); check {setting}, "
        "proxy and name resolution on this host, then run again: what was fetched is kept"
    )


def disk_refusal(error: BaseException, what: str) -> Optional[Exception]:
    """A full or locked disk in an operator's words; None for every other cause."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{what}: the disk became full")
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES):
        return Refusal(f"{what}: {error.strerror}: {error.filename}")
    return None
