"""Has a model's weights on this host: downloaded, verified, stamped, switched in by rename.

    weights.py fetch --settings FILE
    weights.py status [--models DIR] [--state DIR]

FILE is the JSON that vllm_fleet.weights.order() makes: {"name", "source": "modelscope" |
"path", "repo", "revision", "directory", "stamp", "needs": ["tokenizer", "chat_template"],
"trust_remote_code", "endpoint", "token_file": file on this host, "proxy", "state",
"files_at_once", "parts"}. Exit 0 when the weights are there and verified, else 1; then nothing
was switched, and what was fetched is kept for the next run.

Files come by the modelscope library into `.<revision>.part` beside the final directory. The
library moves the bytes (and resumes them); whether they are right is decided here: it believes
a listing without sha256, hashes everything again on each run, and stops after the first eight
digits of a checksum where an operator wants all. It is called file by file, so that a file is
hashed while others are still loading and a dead hub ends the run instead of being asked once
for each file.

Runs with the tools venv's Python (`/opt/vllm/tools/current/bin/python`).
"""

import argparse
import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

if __package__:
    from vllm_fleet.onhost import tools
else:  # on a host: a flat directory of scripts
    import tools  # type: ignore[no-redef]

Refusal = tools.Refusal
say = tools.say

STAMP = ".verified.json"
PROGRESS = ".progress.json"  # in a .part directory: the files verified so far, as in a stamp
BLOCK = 8 << 20
LARGEST_HEADER = 100 << 20  # what the safetensors library itself accepts
SPARE = 256 << 20  # disk left free beside the weights
TICK_SECONDS = 5.0
FILES_AT_ONCE = 8
CONNECT_SECONDS = 10
ANSWER_SECONDS = 25  # for a listing, the library's own retries included
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Copies of the same weights in other formats; vLLM takes safetensors where there are any.
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".tflite")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
# Files that an engine would load, or run, although no stamp knows them.
LOADED = (*WEIGHT_SUFFIXES, ".json", ".jinja", ".model", ".tiktoken", ".py")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("fetch", help="have a model's weights")
    get.add_argument("--settings", required=True, help="JSON file, or - for standard input")
    show = commands.add_parser("status", help="stamps of this host, as JSON")
    show.add_argument("--models", default="/opt/vllm/models")
    show.add_argument("--state", default="/var/lib/vllm/weights")
    options = parser.parse_args()
    if options.command == "status":
        print(json.dumps(stamps(options.models, options.state)))
        return 0
    return int(tools.guarded("weights", lambda: named(tools.read_settings(options.settings))))


def named(settings: Mapping[str, Any]) -> None:
    """Fetch; a refusal names the model, whatever step it comes from."""
    try:
        fetch(settings)
    except Refusal as refusal:
        name = str(settings["name"])
        if name in str(refusal).split():
            raise
        raise Refusal(f"{name}: {refusal}") from None


def stamps(models: str, state: str) -> Dict[str, Dict[str, Any]]:
    """Stamps of all verified directories, by directory; no file's data is read.

    Each as written, with the number of `files` instead of their list, and `changed`: those that
    are missing or differ from the stamp in size or time.
    """
    found: Dict[str, Dict[str, Any]] = {}
    for path in [*Path(models).glob(f"*/[!.]*/{STAMP}"), *Path(state).glob("*.json")]:
        stamp = read_stamp(path)
        if stamp is not None:
            directory = str(stamp.get("directory") or path.parent)
            changed = differing(Path(directory), stamp["files"])
            found[directory] = {**stamp, "files": len(stamp["files"]), "changed": changed}
    return found


def read_stamp(path: Path) -> Optional[Dict[str, Any]]:
    """A stamp; None where there is none, or none that can be read."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return stamp if isinstance(stamp, dict) and isinstance(stamp.get("files"), dict) else None


def differing(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """The files that are missing, or of another size or time than noted."""
    changed = []
    for name, noted in files.items():
        try:
            status = os.stat(directory / name)
        except OSError:
            changed.append(name)
            continue
        if (status.st_size, status.st_mtime_ns) != (noted["size"], noted["mtime_ns"]):
            changed.append(name)
    return changed


@dataclass(frozen=True)
class Entry:
    """One file of a repository, as its listing says; sha256 is empty where it says none."""

    path: str
    size: int
    sha256: str


def fetch(settings: Mapping[str, Any]) -> None:
    """Have the weights of these settings, or refuse."""
    source = settings.get("source") or "modelscope"
    if source == "path":
        _Own(settings).run()
    elif source == "modelscope":
        _Download(settings).run()
    else:
        raise Refusal(
            f"{settings['name']}: source {source} is not supported yet; use modelscope, or put the "
            "files on every host and use source: path"
        )


class _Own:
    """Weights in a directory of the operator's: looked at, never written."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.name = str(settings["name"])
        self.directory = Path(settings.get("directory") or settings["repo"])
        self.stamp = Path(settings["stamp"])
        self.needs = [str(need) for need in settings.get("needs") or []]
        self.identity = _identity(settings)

    def run(self) -> None:
        if not self.directory.is_dir():
            raise Refusal(
                f"{self.name}: {self.directory} is not a directory on this host; put the weights "
                "there, or correct `repo` (source: path)"
            )
        files = dict(_noted(self.directory))
        stamp = read_stamp(self.stamp)
        if (
            stamp is not None
            and stamp["files"] == files
            and _passed(stamp, self.identity, self.needs)
        ):
            say(f"{self.name}: {self.directory} stands, {len(files)} files as checked before")
            return
        found = check_structure(self.name, self.directory, sorted(files), self.needs)
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        total = sum(noted["size"] for noted in files.values())
        record = _record(self.identity, self.directory, files, self.needs, found)
        tools.write_json(self.stamp, record)
        for warning in found.warnings:
            say(f"{self.name}: warning: {warning}")
        say(
            f"{self.name}: {self.directory} has the right structure, {len(files)} files, "
            f"{tools.gib(total)}; without a listing no checksum can be compared"
        )


def _noted(directory: Path) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """(path, what a stamp notes) of every file below a directory."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(set(folders) - {".git", "__pycache__"})
        for name in names:
            path = Path(folder) / name
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                yield (
                    path.relative_to(directory).as_posix(),
                    {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": None},
                )


def _identity(settings: Mapping[str, Any]) -> Dict[str, str]:
    return {key: str(settings.get(key) or "") for key in ("source", "repo", "revision")}


def _passed(stamp: Mapping[str, Any], identity: Mapping[str, str], needs: Iterable[str]) -> bool:
    same = all(stamp.get(key) == value for key, value in identity.items())
    return same and set(needs) <= set(stamp.get("passed") or [])


def _record(
    identity: Mapping[str, str],
    directory: Path,
    files: Mapping[str, Any],
    needs: Iterable[str],
    found: "Structure",
) -> Dict[str, Any]:
    return {
        "format": 1,
        **identity,
        "directory": str(directory),
        "architectures": found.architectures,
        "bytes": sum(noted["size"] for noted in files.values()),
        "passed": sorted(needs),
        "warnings": found.warnings,
        "verified_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": dict(files),
    }


class _Download:
    """Weights from a hub, in a directory of ours."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.name = str(settings["name"])
        self.repo = str(settings["repo"])
        self.revision = str(settings.get("revision") or "master")
        self.final = Path(settings["directory"])
        self.needs = [str(need) for need in settings.get("needs") or []]
        self.identity = _identity(settings)
        self.part = self.final.parent / f".{self.final.name}.part"
        self.files_at_once = int(settings.get("files_at_once") or FILES_AT_ONCE)
        self.hub: Optional[_ModelScope] = None
        self.warnings: List[str] = []

    def run(self) -> None:
        if self.settings.get("trust_remote_code") and not COMMIT.fullmatch(self.revision):
            raise Refusal(
                f"{self.name}: trust_remote_code runs code from {self.repo}, and revision "
                f"{self.revision!r} can move; give the commit (40 hex digits)"
            )
        for place in (self.final, self.final.parent):
            if place.is_symlink():
                raise Refusal(f"{self.name}: {place} is a link; weights are kept in directories")
        if self._stands():
            return
        self.final.parent.mkdir(parents=True, exist_ok=True)
        with tools.locked(self.final.parent / f".{self.final.name}.lock", self.name):
            if self._stands():
                return
            if self.final.exists():
                self._mend()
            else:
                self._fresh()

    def _stands(self) -> bool:
        """Whether the final directory is complete by its stamp: no request, no data read."""
        stamp = read_stamp(self.final / STAMP)
        if stamp is None:
            return False
        if any(stamp.get(key) != value for key, value in self.identity.items()):
            raise Refusal(
                f"{self.name}: {self.final} holds {stamp.get('repo')} at {stamp.get('revision')}, "
                f"wanted is {self.repo} at {self.revision}; give the model another name or "
                "revision, or remove that directory when no instance serves from it"
            )
        if differing(self.final, stamp["files"]):
            return False
        self._refuse_strangers(stamp["files"])
        if not _passed(stamp, self.identity, self.needs):
            found = check_structure(self.name, self.final, sorted(stamp["files"]), self.needs)
            self._write_stamp(self.final, stamp["files"], found)
        say(
            f"{self.name}: {self.final} stands, {len(stamp['files'])} files, "
            f"{tools.gib(stamp.get('bytes', 0))}"
        )
        return True

    def _refuse_strangers(self, known: Mapping[str, Any]) -> None:
        strangers = sorted(
            path for path, _ in _noted(self.final) if path not in known and path != STAMP
        )
        loaded = [path for path in strangers if path.endswith(LOADED)]
        if loaded:
            raise Refusal(
                f"{self.name}: {self.final} holds {', '.join(loaded[:5])}, which no listing knows "
                "and the engine might load; remove it"
            )

    def _fresh(self) -> None:
        entries = self._listing()
        known = read_stamp(self.part / PROGRESS)
        self.part.mkdir(exist_ok=True)
        present = sum(_on_disk(self.part, entry) for entry in entries)
        total = sum(entry.size for entry in entries)
        tools.check_room({f"weights of {self.name}": (self.part, total - present + SPARE)})
        say(
            f"{self.name}: {self.repo} at {self.revision}: {len(entries)} files, "
            f"{tools.gib(total)}, {tools.gib(present)} here already"
        )
        noted = known["files"] if known else {}
        config = [entry for entry in entries if entry.path == "config.json"]
        if config and config[0].path not in noted:
            self._complete(self.part, config, noted)  # first, since it tells what cannot be served
        self._refuse_unserved(self.part)
        files = self._complete(self.part, entries, noted)
        keep = {entry.path for entry in entries}
        for path, _ in list(_noted(self.part)):
            if path not in keep:  # leftovers of an earlier listing, in a directory of ours
                (self.part / path).unlink()
        found = check_structure(self.name, self.part, sorted(files), self.needs)
        self._write_stamp(self.part, files, found)
        for folder, _, _ in os.walk(self.part):
            tools.sync_directory(Path(folder))
        self.part.rename(self.final)
        tools.sync_directory(self.final.parent)
        say(f"{self.name}: {self.final} verified, {len(files)} files, {tools.gib(total)}")

    def _refuse_unserved(self, place: Path) -> None:
        """Refuse an architecture that the wanted release does not know, before the weights come."""
        try:
            config = _json(place / "config.json")
        except (OSError, ValueError):
            return  # told with everything else that is wrong, once all is there
        problem = unserved(config, self.settings.get("engines") or [])
        if problem:
            raise Refusal(f"{self.name}: {problem}; nothing but config.json was downloaded")

    def _mend(self) -> None:
        """Bring a directory that was switched in back to what its stamp says.

        Only what differs is hashed, only what is wrong is fetched again: into the .part
        directory, then file by file over the bad ones, so that an engine that has the old file
        open keeps it.
        """
        stamp = read_stamp(self.final / STAMP)
        if stamp is None:  # not ours, or cut off before the first stamp: all is looked at
            entries, noted = self._listing(), {}
        else:
            noted = stamp["files"]
            entries = [Entry(path, n["size"], n["sha256"] or "") for path, n in noted.items()]
        changed = set(differing(self.final, noted))
        suspects = [entry for entry in entries if entry.path not in noted or entry.path in changed]
        say(f"{self.name}: {self.final}: {len(suspects)} files differ from the stamp; hashing them")
        good: Dict[str, Dict[str, Any]] = {
            path: dict(n) for path, n in noted.items() if path not in changed
        }
        bad: List[Entry] = []
        for entry in suspects:
            path = self.final / entry.path
            found = ""
            if path.is_file() and path.stat().st_size == entry.size:
                found = sha256_of(path)
            if found and found == (entry.sha256 or found):
                good[entry.path] = _note(path, found)
            else:
                bad.append(entry)
        if bad:
            say(f"{self.name}: bad or missing: {', '.join(entry.path for entry in bad)}")
            self.part.mkdir(exist_ok=True)
            size = sum(entry.size - _on_disk(self.part, entry) for entry in bad)
            tools.check_room({f"weights of {self.name}": (self.part, size + SPARE)})
            fetched = self._complete(self.part, bad, {})
            for name, note in fetched.items():
                (self.final / name).parent.mkdir(parents=True, exist_ok=True)
                (self.part / name).replace(self.final / name)
                good[name] = note
            _remove_tree(self.part)
        self._refuse_strangers(good)
        structure = check_structure(self.name, self.final, sorted(good), self.needs)
        self._write_stamp(self.final, good, structure)
        tools.sync_directory(self.final)
        say(f"{self.name}: {self.final} verified again, {len(bad)} files fetched")

    def _write_stamp(self, place: Path, files: Mapping[str, Any], found: "Structure") -> None:
        warnings = [*self.warnings, *found.warnings]
        for warning in warnings:
            say(f"{self.name}: warning: {warning}")
        record = _record(self.identity, self.final, files, self.needs, found)
        tools.write_json(place / STAMP, {**record, "warnings": warnings})

    def _listing(self) -> List[Entry]:
        entries, warnings = wanted(self.name, self._source().listing())
        self.warnings = warnings
        return entries

    def _source(self) -> "_ModelScope":
        if self.hub is None:
            self.hub = _ModelScope(self.settings)
        return self.hub

    def _complete(
        self, place: Path, entries: List[Entry], known: Mapping[str, Mapping[str, Any]]
    ) -> Dict[str, Dict[str, Any]]:
        """Have every file in a directory with the right checksum; what a stamp notes of each.

        One bad file does not stop the others, so that a later run needs that file alone.
        """
        changed = set(differing(place, known))
        done: Dict[str, Dict[str, Any]] = {
            entry.path: dict(known[entry.path])
            for entry in entries
            if entry.path in known
            and entry.path not in changed
            and (known[entry.path]["size"], known[entry.path]["sha256"])
            == (entry.size, entry.sha256 or known[entry.path]["sha256"])
        }
        todo = [entry for entry in entries if entry.path not in done]
        todo.sort(key=lambda entry: -entry.size)  # the largest first: no long one alone at the end
        lock = threading.Lock()
        gone = threading.Event()
        failures: Dict[str, Exception] = {}
        with _Progress(self.name, place, entries) as progress:

            def work(entry: Entry) -> None:
                with progress.active(entry):
                    noted = self._one(place, entry)
                with lock:
                    done[entry.path] = noted
                    tools.write_json(place / PROGRESS, {"files": done})

            with concurrent.futures.ThreadPoolExecutor(self.files_at_once) as pool:
                futures = {pool.submit(self._ending(gone, work), entry): entry for entry in todo}
                for future in concurrent.futures.as_completed(futures):
                    try:
                        future.result()
                    except Refusal as refusal:
                        failures[futures[future].path] = refusal
                        say(f"{self.name}: {refusal}")
        if failures:
            lost = [f for f in failures.values() if isinstance(f, _HubGone)]
            first = lost[0] if lost else next(iter(failures.values()))
            raise Refusal(
                f"{self.name}: {first}"
                + (f" ({len(failures)} files failed: {', '.join(sorted(failures))})"
                   if len(failures) > 1 else "")
                + "; nothing was switched, what is right is kept"
            )  # fmt: skip
        (place / PROGRESS).unlink(missing_ok=True)
        return done

    @staticmethod
    def _ending(gone: threading.Event, work: Callable[[Entry], None]) -> Callable[[Entry], None]:
        """`work`, which begins nothing more once the hub is gone."""

        def ended(entry: Entry) -> None:
            if not gone.is_set():
                try:
                    work(entry)
                except _HubGone:
                    gone.set()
                    raise

        return ended

    def _one(self, place: Path, entry: Entry) -> Dict[str, Any]:
        """Have one file, hashed and on the disk. Refuses when the hub's bytes stay wrong."""
        path = place / entry.path
        found = ""
        tries = 0
        while tries < 2:
            if not (path.is_file() and path.stat().st_size == entry.size):
                tries += 1
                path.unlink(missing_ok=True)
                self._source().fetch(entry, place)
            found = sha256_of(path)
            if not entry.sha256 or found == entry.sha256:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                return _note(path, found)
            path.unlink()
            say(f"{self.name}: {entry.path}: wrong sha256, fetching it again")
        raise Refusal(
            f"{entry.path}: sha256 expected {entry.sha256}, found {found} (fetched {tries} times "
            f"from {self._source().endpoint}); the hub or what lies before it serves wrong bytes: "
            "try another hub.endpoint, or have the hub's copy mended"
        )


def _note(path: Path, checksum: str) -> Dict[str, Any]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": checksum}


def _on_disk(place: Path, entry: Entry) -> int:
    """Bytes of a file that are here already, whole or partial."""
    for path in (place / entry.path, place / f"{entry.path}.incomplete"):
        with contextlib.suppress(OSError):
            return min(entry.size, path.stat().st_size)
    return 0


def _remove_tree(place: Path) -> None:
    for folder, _, names in os.walk(place, topdown=False):
        for name in names:
            (Path(folder) / name).unlink()
        Path(folder).rmdir()


def sha256_of(path: Path) -> str:
    """Checksum of a file, in hex. hashlib frees the interpreter, so threads hash in parallel."""
    digest = hashlib.sha256()
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while True:
            count = file.readinto(buffer)
            if not count:
                return digest.hexdigest()
            digest.update(view[:count])


def wanted(name: str, listing: Iterable[Entry]) -> Tuple[List[Entry], List[str]]:
    """(files to fetch, warnings) of a listing. Refuses what cannot be verified or written.

    Weights without sha256 are refused: one wrong byte in there changes answers and nothing else
    would show it. A small file without one is taken by its size, with a warning: it is read
    and parsed below, and a bad one shows at the first start.
    """
    entries = list(listing)
    for entry in entries:
        parts = entry.path.split("/")
        if not all(parts) or {".", ".."} & set(parts) or re.search(r"[\0-\x1f\\]", entry.path):
            raise Refusal(f"{name}: the hub lists a file {entry.path!r}; refused as a path")
    if any(entry.path.endswith(".safetensors") for entry in entries):
        indexed = any(entry.path == "model.safetensors.index.json" for entry in entries)
        entries = [entry for entry in entries if not _copy(entry.path, indexed)]
    entries = [e for e in entries if e.path not in (STAMP, PROGRESS) and ".git/" not in e.path]
    if not any(entry.path.endswith(WEIGHT_SUFFIXES) for entry in entries):
        raise Refusal(f"{name}: the hub lists no weights ({len(entries)} files); check repo")
    unknown = [entry for entry in entries if not SHA256.fullmatch(entry.sha256)]
    heavy = [entry.path for entry in unknown if entry.path.endswith(WEIGHT_SUFFIXES)]
    if heavy:
        raise Refusal(
            f"{name}: the hub lists {', '.join(heavy[:5])} without sha256; weights that cannot be "
            "verified are not served: ask the hub's owner, or use source: path"
        )
    warnings = [f"{e.path}: the hub lists no sha256, its size alone was compared" for e in unknown]
    return [Entry(e.path, e.size, e.sha256 if e not in unknown else "") for e in entries], warnings


def _copy(path: str, indexed: bool) -> bool:
    """Whether a file only repeats safetensors weights in another format."""
    consolidated = indexed and re.fullmatch(r"consolidated.*\.safetensors", path) is not None
    return path.endswith(OTHER_FORMATS) or path.startswith("original/") or consolidated


class _HubGone(Refusal):
    """The hub does not answer: no use in asking it for further files."""


class _ModelScope:
    """The modelscope library, set up for this run."""

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
            before = _on_disk(place, entry)
            try:
                self.api.download_file(
                    self.repo, "model", entry.path, revision=self.revision,
                    local_dir=str(place), file_size=entry.size,
                )  # fmt: skip
                return
            except Exception as error:
                refusal = self._refusal(error, entry.path)
                if not isinstance(refusal, _HubGone) or _on_disk(place, entry) <= before:
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

    def _gone(self, what: str, error: BaseException) -> _HubGone:
        return _HubGone(
            f"{what}: hub {self.endpoint} does not answer ({_cause(error)}); check hub.endpoint, "
            "proxy and name resolution on this host, then run again: what was fetched is kept"
        )

    def _refusal(self, error: BaseException, what: str) -> Exception:
        """The library's exception in an operator's words."""
        errors = self.errors
        at = f"{self.repo} at {self.revision}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Refusal(
                f"{what}: the disk became full; make room and run again, the rest is kept"
            )
        if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES):
            return Refusal(f"{what}: {error.strerror}: {error.filename}")
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
                f"{what}: the hub's listing and what it sends differ in size ({_cause(error)}); "
                "the upload is broken or has just changed: pin a tag or commit, or run again later"
            )
        if isinstance(error, errors.FileIntegrityError):
            return Refusal(f"{what}: {_cause(error)}")
        return self._gone(what, error)


def _cause(error: BaseException) -> str:
    """The innermost cause, short, on one line."""
    seen = error
    while seen.__cause__ is not None or seen.__context__ is not None:
        seen = seen.__cause__ or seen.__context__ or seen
    text = " ".join(str(seen).split()) or type(seen).__name__
    return text[:300]


class _Progress:
    """Prints every few seconds: all files together, and each that is being worked on."""

    def __init__(self, name: str, place: Path, entries: List[Entry]) -> None:
        self.name = name
        self.place = place
        self.entries = entries
        self.current: Dict[str, Entry] = {}
        self.last: Dict[str, int] = {}
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "_Progress":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    @contextlib.contextmanager
    def active(self, entry: Entry) -> Iterator[None]:
        with self.lock:
            self.current[entry.path] = entry
        try:
            yield
        finally:
            with self.lock:
                self.current.pop(entry.path, None)

    def _tick(self) -> None:
        total = sum(entry.size for entry in self.entries)
        before = {entry.path: _on_disk(self.place, entry) for entry in self.entries}
        while not self.ended.wait(TICK_SECONDS):
            now = {entry.path: _on_disk(self.place, entry) for entry in self.entries}
            say(_line(self.name, sum(now.values()), sum(before.values()), total))
            with self.lock:
                current = list(self.current.values())
            for entry in current:
                here = now[entry.path]
                if here == entry.size:
                    say(f"{self.name}:   {entry.path}: {tools.gib(here)} here, hashing")
                else:
                    say(_line(f"{self.name}:   {entry.path}", here, before[entry.path], entry.size))
            before = now


def _line(what: str, here: int, before: int, total: int) -> str:
    rate = max(0.0, (here - before) / TICK_SECONDS)
    left = f"{_clock((total - here) / rate)} left" if rate else "waiting"
    share = 100 * here // total if total else 100
    return f"{what}: {tools.gib(here)} of {tools.gib(total)}, {share}%, {tools.gib(rate)}/s, {left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True)
class Structure:
    """What looking at the files of a directory found out."""

    architectures: List[str]
    warnings: List[str]


def check_structure(
    name: str, directory: Path, files: List[str], needs: Iterable[str]
) -> Structure:
    """Look at the files without their tensors' data. Refuses with every complaint at once."""
    complaints: List[str] = []
    warnings: List[str] = []
    shards: Dict[str, Dict[str, Any]] = {}
    for path in files:
        if _is_lfs_pointer(directory / path):
            complaints.append(
                f"{path}: is a Git LFS pointer, not the file; fetch it by the hub's library or "
                "`git lfs pull`"
            )
        elif path.endswith(".safetensors"):
            try:
                shards[path] = safetensors_header(directory / path)
            except ValueError as error:
                complaints.append(f"{path}: {error}")
    complaints += _check_index(directory, files, shards)
    if not any(path.endswith(".safetensors") for path in files):
        if any(path.endswith((".bin", ".pt", ".pth")) for path in files):
            warnings.append("weights are pickles (.bin, .pt): loading them can run code")
        elif any(path.endswith(".gguf") for path in files):
            complaints.append(
                "weights are GGUF, for llama.cpp; use the model's safetensors repository"
            )
        else:
            complaints.append("no weights (*.safetensors) in it")
    architectures: List[str] = []
    try:
        architectures = _architectures(directory)
    except ValueError as error:
        complaints.append(f"config.json: {error}")
    wanted_checks = set(needs)
    if "tokenizer" in wanted_checks and not _has_tokenizer(files):
        complaints.append(
            "no tokenizer (tokenizer.json, tokenizer.model, *.tiktoken); every request would fail: "
            "take a complete repository, or name one with vllm_args: {tokenizer: ...}"
        )
    if "chat_template" in wanted_checks:
        try:
            if not _has_chat_template(directory, files):
                complaints.append(
                    "no chat template (tokenizer_config.json, chat_template.jinja); every chat "
                    "would be answered 400: give one by vllm_args: {chat-template: ...}, or set "
                    "task: embed or rerank"
                )
        except ValueError as error:
            complaints.append(str(error))
    if complaints:
        text = "\n".join(f"    {complaint}" for complaint in complaints)
        raise Refusal(f"{name}: {directory}: these weights cannot be served:\n{text}")
    return Structure(architectures, warnings)


def safetensors_header(path: Path) -> Dict[str, Any]:
    """The header of a safetensors file: tensor to {dtype, shape, data_offsets}.

    ValueError in words when it is none, or is longer or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] == b"GGUF":
            raise ValueError("is a GGUF file under a wrong name")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise ValueError(f"is no safetensors file, or cut short ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            raise ValueError("its header is damaged") from None
    if 8 + length + end != size:
        raise ValueError(f"is {size} bytes, its header says {8 + length + end}: cut short or mixed")
    return dict(header)


def _check_index(
    directory: Path, files: List[str], shards: Mapping[str, Mapping[str, Any]]
) -> List[str]:
    index = "model.safetensors.index.json"
    if index not in files:
        return []
    try:
        where = _json(directory / index)["weight_map"]
        pairs = [(str(tensor), str(shard)) for tensor, shard in where.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{index}: cannot be read ({error})"]
    complaints = [
        f"{shard}: is missing, {index} names it"
        for shard in sorted({shard for _, shard in pairs} - set(files))
    ]
    lost = [(tensor, shard) for tensor, shard in pairs
            if shard in shards and tensor not in shards[shard]]  # fmt: skip
    if lost:
        tensor, shard = lost[0]
        complaints.append(f"{shard}: lacks {tensor} and {len(lost) - 1} more that {index} names")
    return complaints


def unserved(config: Any, engines: Iterable[Mapping[str, Any]]) -> Optional[str]:
    """Why one of the wanted releases cannot serve a config.json; None where all can, or may.

    Each engine: "known": its architectures; "advice": sentence by other ones; "unknown": the
    sentence for all the rest, with ARCHITECTURE in it; "pooling": endings of those that it makes
    of the known ones that end in one of "suffixes".
    """
    named = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(named, list) or not named or "auto_map" in config:
        return None  # the code of a custom one comes with the repository
    for engine in engines:
        if not any(_serves(engine, str(one)) for one in named):
            one = str(named[0])
            sentence = engine["advice"].get(one) or engine["unknown"].replace("ARCHITECTURE", one)
            return str(sentence)
    return None


def _serves(engine: Mapping[str, Any], one: str) -> bool:
    """Whether an engine has an architecture, or makes it of another: engine_data.serves."""
    suffix = next((s for s in engine["pooling"] if one.endswith(s)), "")
    stem = one[: len(one) - len(suffix)]
    names = [stem + s for s in engine["suffixes"]] if suffix and stem else []
    return any(name in engine["known"] for name in [one, *names])


def _architectures(directory: Path) -> List[str]:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError("is missing")
    config = _json(path)
    named = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(named, list) or not named:
        raise ValueError("names no architectures")
    return [str(architecture) for architecture in named]


def _has_tokenizer(files: Iterable[str]) -> bool:
    return any(path in TOKENIZERS or path.endswith((".tiktoken", ".spm")) for path in files)


def _has_chat_template(directory: Path, files: Iterable[str]) -> bool:
    names = set(files)
    if names & set(TEMPLATES) or any(n.startswith("additional_chat_templates/") for n in names):
        return True
    if "tokenizer_config.json" not in names:
        return False
    config = _json(directory / "tokenizer_config.json")
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _is_lfs_pointer(path: Path) -> bool:
    if path.stat().st_size > 1024:
        return False
    with path.open("rb") as file:
        return file.read(24) == b"version https://git-lfs."


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: is no JSON ({error})") from None


if __name__ == "__main__":
    sys.exit(main())
