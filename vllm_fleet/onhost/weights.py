"""Has a model's weights on this host: downloaded, verified, stamped, switched in by rename.

    weights.py fetch --settings FILE
    weights.py status [--models DIR] [--state DIR]
    weights.py verify [--models DIR] [NAME ...]

FILE is the JSON that vllm_fleet.weights.order() makes: {"name", "source": "modelscope" |
"huggingface" | "path", "repo", "revision", "directory", "stamp", "needs": ["tokenizer",
"chat_template"], "listing": frozen files [{"path", "size", "sha256", "git"}] or absent,
"listing_file": its name for messages, "trust_remote_code", "endpoint", "token_file": file on
this host, "proxy", "state", "files_at_once", "parts"}. Exit 0 when the weights are there and
verified, else 1; then nothing was switched, and what was fetched is kept for the next run.

Files come from the hub (hub.py) into `.<revision>.part` beside the final directory. What is on
disk already in another revision of ours, by its sha256, is linked instead. The modelscope
library moves the bytes (and resumes them); whether they are right is decided here: it believes
a listing without sha256, hashes everything again on each run, and stops after the first eight
digits of a checksum where an operator wants all. It is called file by file, so that a file is
hashed while others are still loading and a dead hub ends the run instead of being asked once
for each file.

`verify` reads every byte again, names what is no longer as stamped and exits 1; the next fetch
then gets these files alone.

Runs with the tools venv's Python (`/opt/vllm/tools/current/bin/python`).
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Union

if __package__:
    from vllm_fleet.onhost import hub, peers, structure, tools
else:  # on a host: a flat directory of scripts
    import hub  # type: ignore[import-not-found,no-redef]
    import peers  # type: ignore[import-not-found,no-redef]
    import structure  # type: ignore[import-not-found,no-redef]

    import tools  # type: ignore[no-redef]

Refusal = tools.Refusal
say = tools.say
Entry = hub.Entry
on_disk = hub.on_disk

STAMP = ".verified.json"
PROGRESS = ".progress.json"  # in a .part directory: the files verified so far, as in a stamp
BLOCK = 8 << 20
SPARE = 256 << 20  # disk left free beside the weights
FILES_SHOWN = 3
FILES_AT_ONCE = 8
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
WEIGHT_SUFFIXES = structure.WEIGHT_SUFFIXES
# Copies of the same weights in other formats; vLLM takes safetensors where there are any.
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".tflite")
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
    again = commands.add_parser("verify", help="hash every file again")
    again.add_argument("--models", default="/opt/vllm/models")
    again.add_argument("names", nargs="*", metavar="NAME", help="models; default: all")
    options = parser.parse_args()
    if options.command == "verify":
        return int(tools.guarded("weights", lambda: verify(options.models, options.names)))
    if options.command == "status":
        print(json.dumps(stamps(options.models, options.state)))
        return 0
    return int(tools.guarded("weights", lambda: named(tools.read_settings(options.settings))))


def named(settings: Mapping[str, Any]) -> None:
    """Fetch; a refusal names the model, whatever step it comes from."""
    limit = int(settings.get("limit") or 0)
    try:
        with hub.Bound(limit).kept() if limit else contextlib.nullcontext():
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


def fetch(settings: Mapping[str, Any]) -> None:
    """Have the weights of these settings, or refuse."""
    source = settings.get("source") or "modelscope"
    if source == "path":
        _Own(settings).run()
    else:
        _Download(settings).run()


def verify(models: str, names: Iterable[str]) -> None:
    """Hash every file of the stamped directories again. Refuses with all that are bad.

    A bad file is marked in its stamp, so that the next fetch gets it, and it alone.
    """
    wanted_names = set(names)
    bad: List[str] = []
    for path in sorted(Path(models).glob(f"*/[!.]*/{STAMP}")):
        stamp, directory = read_stamp(path), path.parent
        if stamp is None or (wanted_names and directory.parent.name not in wanted_names):
            continue
        began = time.monotonic()
        files = {name: noted for name, noted in stamp["files"].items() if noted["sha256"]}
        found = _hashed([directory / name for name in files], str(directory), tools.TICK_SECONDS)
        wrong = {
            name: found[directory / name] or "missing"
            for name, noted in files.items()
            if found[directory / name] != noted["sha256"]
        }
        seconds = max(time.monotonic() - began, 0.001)
        total = sum(noted["size"] for noted in files.values())
        say(
            f"{directory}: {len(files)} files, {tools.gib(total)} hashed in {seconds:.0f} s "
            f"({tools.gib(total / seconds)}/s), {len(wrong)} bad"
        )
        for name, checksum in sorted(wrong.items()):
            bad.append(f"{directory / name}: sha256 {checksum}, stamped {files[name]['sha256']}")
            stamp["files"][name]["mtime_ns"] = -1
        if wrong:
            tools.write_json(path, stamp)
    if bad:
        text = "\n".join(f"    {line}" for line in bad)
        raise Refusal(
            f"{len(bad)} files are no longer what was verified; deploy again, which fetches them "
            f"alone, and look at the disk (dmesg, smartctl):\n{text}"
        )


def _hashed(paths: List[Path], what: str, every: float) -> Dict[Path, str]:
    """sha256 of each file, side by side; "" where it cannot be read. Told every few seconds."""
    lock = threading.Lock()
    ended = threading.Event()
    here = 0

    def count(more: int) -> None:
        nonlocal here
        with lock:
            here += more

    def one(path: Path) -> str:
        try:
            return sha256_of(path, count)
        except OSError:
            return ""

    sizes = {path: path.stat().st_size if path.exists() else 0 for path in paths}
    total = sum(sizes.values())

    def tick() -> None:
        before = 0
        while not ended.wait(every):
            now = here
            say(progress_line(f"{what}: hashed", now, before, total, every))
            before = now

    paths = sorted(paths, key=lambda path: -sizes[path])
    ticker = threading.Thread(target=tick, daemon=True)
    if every:
        ticker.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(min(FILES_AT_ONCE, os.cpu_count() or 1)) as pool:
            return dict(zip(paths, pool.map(one, paths), strict=True))
    finally:
        ended.set()


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
        found = structure.check_structure(self.name, self.directory, sorted(files), self.needs)
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
    found: structure.Structure,
    listing: str = "",
) -> Dict[str, Any]:
    return {
        "format": 1,
        **identity,
        "directory": str(directory),
        "architectures": found.architectures,
        "bytes": sum(noted["size"] for noted in files.values()),
        "passed": sorted(needs),
        "listing": listing,
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
        self.hub: Optional[hub.Source] = None
        self.share: Optional[peers.Share] = None
        self.fanout: Optional[peers.Fanout] = None
        self.warnings: List[str] = []
        self.frozen: Optional[List[Entry]] = None
        if settings.get("listing") is not None:
            self.frozen = [_entry(one) for one in settings["listing"]]
        self.frozen_in = str(settings.get("listing_file") or "the frozen listing")
        self.digest = digest(self.frozen) if self.frozen is not None else ""

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
            self._seed()
            return
        self.final.parent.mkdir(parents=True, exist_ok=True)
        with tools.locked(self.final.parent / f".{self.final.name}.lock", self.name):
            if self._stands():
                return
            if self.final.exists():
                self._mend()
            elif self.settings.get("fanout"):
                self._fresh_with_others()
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
        if self.frozen is not None and stamp.get("listing") != self.digest:
            self._refuse_other(stamp["files"])
        if differing(self.final, stamp["files"]):
            return False
        self._refuse_strangers(stamp["files"])
        self.digest = self.digest or str(stamp.get("listing") or "")
        if (
            not _passed(stamp, self.identity, self.needs)
            or str(stamp.get("listing") or "") != self.digest
        ):
            found = structure.check_structure(
                self.name, self.final, sorted(stamp["files"]), self.needs
            )
            self._write_stamp(self.final, stamp["files"], found)
        say(
            f"{self.name}: {self.final} stands, {len(stamp['files'])} files, "
            f"{tools.gib(stamp.get('bytes', 0))}"
        )
        return True

    def _refuse_other(self, noted: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse where the directory holds something else than the frozen listing says."""
        assert self.frozen is not None, "called with a frozen listing alone"
        held = {
            path: Entry(path, note["size"], note["sha256"] or "", str(note.get("git") or ""))
            for path, note in noted.items()
        }
        for entry in self.frozen:
            one = held.get(entry.path)
            if one and not entry.sha256 and entry.git and not one.git:
                with contextlib.suppress(OSError):
                    held[entry.path] = Entry(
                        one.path, one.size, one.sha256, git_id_of(self.final / one.path)
                    )
        wrong = differences(self.frozen, held, "on this host")
        known = {entry.path for entry in self.frozen}
        wrong += [
            f"{path}: on this host, not listed"
            for path in sorted(held)
            if path not in known and path.endswith(LOADED)
        ]
        if wrong:
            raise Refusal(
                f"{self.name}: {self.final} is not what {self.frozen_in} lists: {_some(wrong)}; "
                f"{self.repo} at {self.revision} was changed at the hub between the two: give a "
                "commit as revision, which gets a directory of its own"
            )

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

    def _seed(self) -> None:
        """Serve what stands here to the hosts that lack it, until they have it."""
        if not self.settings.get("fanout"):
            return
        noted = (read_stamp(self.final / STAMP) or {"files": {}})["files"]
        entries = [
            Entry(path, note["size"], note["sha256"] or "", str(note.get("git") or ""))
            for path, note in noted.items()
        ]
        with peers.Share(self.settings, (self.final,)) as share:
            share.add(entries)
            share.state = peers.DONE
            peers.Fanout(self.settings, None, entries, share).serve_out()

    def _fresh_with_others(self) -> None:
        """Fetch, sharing what is verified with the other hosts until they have it, too."""
        with peers.Share(self.settings, (self.part, self.final)) as share:
            self.share = share
            try:
                self._fresh()
                share.state = peers.DONE
            except BaseException:
                share.state = peers.FAILED
                if self.fanout is not None:
                    time.sleep(2 * peers.POLL_SECONDS)  # long enough that the others hear of it
                raise
            if self.fanout is not None:
                got = f"{tools.gib(self.fanout.from_peers)} from other hosts"
                hubs = f"{tools.gib(self.fanout.from_hub)} from the hub"
                say(f"{self.name}: {got}, {hubs}")
                self.fanout.serve_out()

    def _fresh(self) -> None:
        entries = self._listing()
        if self.share is not None:
            self.fanout = peers.Fanout(self.settings, self._source(), entries, self.share)
        known = read_stamp(self.part / PROGRESS)
        self.part.mkdir(exist_ok=True)
        noted = known["files"] if known else {}
        linked = self._link(entries, noted)
        present = sum(on_disk(self.part, entry) for entry in entries)
        total = sum(entry.size for entry in entries)
        tools.check_room({f"weights of {self.name}": (self.part, total - present + SPARE)})
        say(
            f"{self.name}: {self.repo} at {self.revision}: {len(entries)} files, "
            f"{tools.gib(total)}, {tools.gib(present)} here already"
            + (f", of it {tools.gib(linked)} linked from other revisions" if linked else "")
        )
        config = [entry for entry in entries if entry.path == "config.json"]
        if config and config[0].path not in noted:
            self._complete(self.part, config, noted)  # first, since it tells what cannot be served
        self._refuse_unserved(self.part)
        files = self._complete(self.part, entries, noted)
        keep = {entry.path for entry in entries}
        for path, _ in list(_noted(self.part)):
            if path not in keep:  # leftovers of an earlier listing, in a directory of ours
                (self.part / path).unlink()
        found = structure.check_structure(self.name, self.part, sorted(files), self.needs)
        self._write_stamp(self.part, files, found)
        for folder, _, _ in os.walk(self.part):
            tools.sync_directory(Path(folder))
        self.part.rename(self.final)
        tools.sync_directory(self.final.parent)
        say(f"{self.name}: {self.final} verified, {len(files)} files, {tools.gib(total)}")

    def _link(self, entries: List[Entry], noted: Dict[str, Any]) -> int:
        """Link what lies in another directory of ours with the same sha256; bytes linked.

        By its stamp: such a file is served from there, so it is right for here, too. ``noted``
        gets what a stamp notes of each.
        """
        missing = [e for e in entries if e.sha256 and not (self.part / e.path).exists()]
        if not missing:
            return 0
        known: Dict[str, Tuple[Path, Mapping[str, Any]]] = {}
        for stamp in self.final.parent.parent.glob(f"*/[!.]*/{STAMP}"):
            for name, note in (read_stamp(stamp) or {"files": {}})["files"].items():
                known[str(note["sha256"])] = (stamp.parent / name, note)
        linked = 0
        for entry in missing:
            path, note = known.get(entry.sha256, (None, {}))
            if path is None or path.is_symlink() or differing(path.parent, {path.name: note}):
                continue
            target = self.part / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, target)
            except OSError:
                continue  # another file system, or too many links: it is fetched
            noted[entry.path] = {key: note[key] for key in ("size", "mtime_ns", "sha256")}
            linked += entry.size
        if linked:
            tools.write_json(self.part / PROGRESS, {"files": noted})
        return linked

    def _refuse_unserved(self, place: Path) -> None:
        """Refuse an architecture that the wanted release does not know, before the weights come."""
        try:
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return  # told with everything else that is wrong, once all is there
        problem = structure.unserved(config, self.settings.get("engines") or [])
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
            self.digest = self.digest or str(stamp.get("listing") or "")
        changed = set(differing(self.final, noted))
        suspects = [entry for entry in entries if entry.path not in noted or entry.path in changed]
        say(f"{self.name}: {self.final}: {len(suspects)} files differ from the stamp; hashing them")
        good: Dict[str, Dict[str, Any]] = {
            path: dict(n) for path, n in noted.items() if path not in changed
        }
        bad: List[Entry] = []
        sized = [
            self.final / entry.path
            for entry in suspects
            if (self.final / entry.path).is_file()
            and (self.final / entry.path).stat().st_size == entry.size
        ]
        found = _hashed(sized, f"{self.name}: {self.final}", tools.ticks(self.settings))
        for entry in suspects:
            path = self.final / entry.path
            checksum = found.get(path, "")
            if checksum and checksum == (entry.sha256 or checksum) and _git_fits(path, entry):
                good[entry.path] = _note(path, checksum, entry)
            else:
                bad.append(entry)
        if bad:
            say(f"{self.name}: bad or missing: {', '.join(entry.path for entry in bad)}")
            self.part.mkdir(exist_ok=True)
            size = sum(entry.size - on_disk(self.part, entry) for entry in bad)
            tools.check_room({f"weights of {self.name}": (self.part, size + SPARE)})
            fetched = self._complete(self.part, bad, {})
            for name, note in fetched.items():
                (self.final / name).parent.mkdir(parents=True, exist_ok=True)
                (self.part / name).replace(self.final / name)
                good[name] = note
            _remove_tree(self.part)
        self._refuse_strangers(good)
        looked_at = structure.check_structure(self.name, self.final, sorted(good), self.needs)
        self._write_stamp(self.final, good, looked_at)
        tools.sync_directory(self.final)
        say(f"{self.name}: {self.final} verified again, {len(bad)} files fetched")

    def _write_stamp(
        self, place: Path, files: Mapping[str, Any], found: structure.Structure
    ) -> None:
        warnings = [*self.warnings, *found.warnings]
        for warning in warnings:
            say(f"{self.name}: warning: {warning}")
        record = _record(self.identity, self.final, files, self.needs, found, self.digest)
        tools.write_json(place / STAMP, {**record, "warnings": warnings})

    def _listing(self) -> List[Entry]:
        """The files to have: the frozen ones, which the hub must list alike, else the hub's."""
        listed, warnings = wanted(self.name, self._source().listing())
        if self.frozen is None:
            self.warnings, self.digest = warnings, digest(listed)
            return listed
        frozen, self.warnings = wanted(self.name, self.frozen)
        wrong = differences(frozen, {entry.path: entry for entry in listed}, "hub")
        if wrong:
            raise Refusal(
                f"{self.name}: hub {self._source().endpoint} lists {self.repo} at {self.revision} "
                f"otherwise than {self.frozen_in}: {_some(wrong)}; the branch or tag was moved, or "
                "somebody tampers with the hub. To take the new state, give its commit as "
                "revision; nothing was fetched"
            )
        return frozen

    def _fetcher(self) -> Union[hub.Source, peers.Fanout]:
        """Where files come from: other hosts and the hub, or the hub alone."""
        return self.fanout or self._source()

    def _source(self) -> hub.Source:
        if self.hub is None:
            self.hub = hub.source(self.settings)
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
            and (entry.sha256 or str(known[entry.path].get("git") or "") == entry.git)
        }
        todo = [entry for entry in entries if entry.path not in done]
        todo.sort(key=lambda entry: -entry.size)  # the largest first: no long one alone at the end
        if self.share is not None:
            self.share.add(entry for entry in entries if entry.path in done)
        workers = self.files_at_once
        if self.fanout is not None:
            # Threads that wait for a file take no line; how many load is the fan-out's to say.
            todo, workers = self.fanout.order(todo), max(1, min(len(todo), peers.MOST_WAITING))
        lock = threading.Lock()
        gone = threading.Event()
        failures: Dict[str, Exception] = {}
        every = tools.ticks(self.settings)
        with _Progress(self.name, place, entries, every) as progress:

            def work(entry: Entry) -> None:
                try:
                    with progress.active(entry):
                        noted = self._one(place, entry)
                    if self.share is not None:
                        self.share.add([entry])
                    with lock:
                        done[entry.path] = noted
                        tools.write_json(place / PROGRESS, {"files": done})
                except OSError as error:
                    refusal = hub.disk_refusal(error, entry.path)
                    if refusal is None:
                        raise
                    raise refusal from error

            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                futures = {pool.submit(self._ending(gone, work), entry): entry for entry in todo}
                for future in concurrent.futures.as_completed(futures):
                    try:
                        future.result()
                    except Refusal as refusal:
                        failures[futures[future].path] = refusal
                        say(f"{self.name}: {refusal}")
        if failures:
            lost = [f for f in failures.values() if isinstance(f, (hub.DiskFull, hub.HubGone))]
            lost.sort(key=lambda failure: isinstance(failure, hub.HubGone))
            first = lost[0] if lost else next(iter(failures.values()))
            if isinstance(first, hub.DiskFull):
                first = hub.DiskFull(f"{first}; {self._short_of(place, entries, done)}")
            raise Refusal(
                f"{self.name}: {first}"
                + (f" ({len(failures)} files failed: {', '.join(sorted(failures))})"
                   if len(failures) > 1 else "")
                + "; nothing was switched, what is right is kept"
            )  # fmt: skip
        (place / PROGRESS).unlink(missing_ok=True)
        return done

    @staticmethod
    def _short_of(place: Path, entries: List[Entry], done: Mapping[str, Any]) -> str:
        """How much room a full disk lacks."""
        missing = sum(e.size - on_disk(place, e) for e in entries if e.path not in done)
        status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        return (
            f"{tools.gib(missing)} are still to come to {place}, {tools.gib(free)} are free: make "
            f"{tools.gib(max(0, missing + SPARE - free))} of room and run again"
        )

    @staticmethod
    def _ending(gone: threading.Event, work: Callable[[Entry], None]) -> Callable[[Entry], None]:
        """`work`, which begins nothing more once the hub is gone or the disk is full."""

        def ended(entry: Entry) -> None:
            if not gone.is_set():
                try:
                    work(entry)
                except (hub.HubGone, hub.DiskFull):
                    gone.set()
                    raise

        return ended

    def _one(self, place: Path, entry: Entry) -> Dict[str, Any]:
        """Have one file, hashed and on the disk. Refuses when the hub's bytes stay wrong."""
        path = place / entry.path
        found = ""
        tries = 0
        while tries < 2:
            if not _whole(path, entry):
                tries += 1
                path.unlink(missing_ok=True)
                self._fetcher().fetch(entry, place)
                if not _whole(path, entry):  # whatever the library says
                    here = tools.gib(on_disk(place, entry))
                    say(f"{self.name}: {entry.path}: {here} came of {tools.gib(entry.size)}")
                    if tries < 2:
                        continue
                    raise Refusal(
                        f"{entry.path}: its download ended without an error, and {here} of "
                        f"{tools.gib(entry.size)} are there: the hub at {self._source().endpoint} "
                        "or its library is broken; try another hub.endpoint, or run again later"
                    )
            found = sha256_of(path)
            if found == (entry.sha256 or found) and _git_fits(path, entry):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                return _note(path, found, entry)
            path.unlink()
            say(f"{self.name}: {entry.path}: wrong checksum, fetching it again")
            if self.fanout is not None:
                self.fanout.distrust(entry)
        if not entry.sha256:
            raise Refusal(
                f"{entry.path}: is not the file of git id {entry.git} (fetched {tries} times from "
                f"{self._source().endpoint}); the hub or what lies before it serves wrong bytes: "
                "try another endpoint"
            )
        raise Refusal(
            f"{entry.path}: sha256 expected {entry.sha256}, found {found} (fetched {tries} times "
            f"from {self._source().endpoint}); the hub or what lies before it serves wrong bytes: "
            "try another hub.endpoint, or have the hub's copy mended"
        )


def _whole(path: Path, entry: Entry) -> bool:
    return path.is_file() and path.stat().st_size == entry.size


def _note(path: Path, checksum: str, entry: Entry) -> Dict[str, Any]:
    status = path.stat()
    noted = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": checksum}
    return {**noted, "git": entry.git} if entry.git else noted


def _git_fits(path: Path, entry: Entry) -> bool:
    """Whether a file that has a git id and no sha256 in the listing is the one of this id."""
    return bool(entry.sha256) or not entry.git or git_id_of(path) == entry.git


def git_id_of(path: Path) -> str:
    """The id that git gives to a file's content."""
    data = path.read_bytes()  # files with a git id alone are small: larger ones are LFS objects
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(listed: Mapping[str, Any]) -> Entry:
    """An entry of a frozen listing. Refuses what is none."""
    try:
        return Entry(
            str(listed["path"]),
            int(listed["size"]),
            str(listed.get("sha256") or ""),
            str(listed.get("git") or ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refusal("the frozen listing is damaged: restore it from version control") from None


def digest(entries: Iterable[Entry]) -> str:
    """One checksum over a listing."""
    lines = sorted(f"{e.path}\0{e.size}\0{e.sha256 or e.git}\n" for e in entries)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def differences(frozen: Iterable[Entry], others: Mapping[str, Entry], where: str) -> List[str]:
    """Files that are another elsewhere than in a frozen listing, each with both checksums."""
    found = []
    for entry in frozen:
        other = others.get(entry.path)
        if other is None:
            found.append(f"{entry.path}: not there ({where})")
            continue
        pairs = [(entry.sha256, other.sha256), (entry.git, other.git)]
        for mine, its in pairs:
            if mine and its and mine != its:
                found.append(f"{entry.path}: frozen {mine}, {where} {its}")
                break
        else:
            if entry.size != other.size:
                found.append(f"{entry.path}: frozen {entry.size} bytes, {where} {other.size}")
            elif not any(mine and its for mine, its in pairs) and (entry.sha256 or entry.git):
                found.append(
                    f"{entry.path}: frozen {entry.sha256 or entry.git}, {where} without checksum"
                )
    return found


def _some(texts: List[str]) -> str:
    more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _remove_tree(place: Path) -> None:
    for folder, _, names in os.walk(place, topdown=False):
        for name in names:
            (Path(folder) / name).unlink()
        Path(folder).rmdir()


def sha256_of(path: Path, seen: Optional[Callable[[int], None]] = None) -> str:
    """Checksum of a file, in hex. hashlib frees the interpreter, so threads hash in parallel.

    ``seen`` is told of each block.
    """
    digest = hashlib.sha256()
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while True:
            count = file.readinto(buffer)
            if not count:
                return digest.hexdigest()
            digest.update(view[:count])
            if seen is not None:
                seen(count)


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
    unknown = [e for e in entries if not SHA256.fullmatch(e.sha256) and not e.git]
    heavy = [entry.path for entry in unknown if entry.path.endswith(WEIGHT_SUFFIXES)]
    if heavy:
        raise Refusal(
            f"{name}: the hub lists {', '.join(heavy[:5])} without sha256; weights that cannot be "
            "verified are not served: ask the hub's owner, or use source: path"
        )
    warnings = [f"{e.path}: the hub lists no sha256, its size alone was compared" for e in unknown]
    return [
        Entry(e.path, e.size, e.sha256 if e not in unknown else "", e.git) for e in entries
    ], warnings


def _copy(path: str, indexed: bool) -> bool:
    """Whether a file only repeats safetensors weights in another format."""
    consolidated = indexed and re.fullmatch(r"consolidated.*\.safetensors", path) is not None
    return path.endswith(OTHER_FORMATS) or path.startswith("original/") or consolidated


class _Progress:
    """Prints every few seconds: all files together, and each that is being worked on."""

    def __init__(self, name: str, place: Path, entries: List[Entry], every: float) -> None:
        self.name = name
        self.place = place
        self.every = every
        self.entries = entries
        self.current: Dict[str, Entry] = {}
        self.last: Dict[str, int] = {}
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "_Progress":
        if self.every:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.every:
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
        before = {entry.path: on_disk(self.place, entry) for entry in self.entries}
        while not self.ended.wait(self.every):
            now = {entry.path: on_disk(self.place, entry) for entry in self.entries}
            say(
                progress_line(self.name, sum(now.values()), sum(before.values()), total, self.every)
            )
            with self.lock:
                current = list(self.current.values())
            # What is waited for is no news; the largest are what the end waits for.
            moving = [e for e in current if now[e.path] > before[e.path] or now[e.path] == e.size]
            moving.sort(key=lambda e: now[e.path] - e.size)
            for entry in moving[:FILES_SHOWN]:
                what, here = f"{self.name}:   {entry.path}", now[entry.path]
                if here == entry.size:
                    say(f"{what}: {tools.gib(here)} here, hashing")
                else:
                    say(progress_line(what, here, before[entry.path], entry.size, self.every))
            if len(moving) > FILES_SHOWN:
                say(f"{self.name}:   and {len(moving) - FILES_SHOWN} more files")
            before = now


def progress_line(what: str, here: int, before: int, total: int, every: float) -> str:
    """Bytes, rate and time left, between two ticks."""
    rate = max(0.0, (here - before) / every)
    left = f"{_clock((total - here) / rate)} left" if rate else "waiting"
    share = 100 * here // total if total else 100
    return f"{what}: {tools.gib(here)} of {tools.gib(total)}, {share}%, {tools.gib(rate)}/s, {left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


if __name__ == "__main__":
    sys.exit(main())
