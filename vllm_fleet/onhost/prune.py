"""Removes releases and revisions of weights that are kept no longer. Root, standard library.

    prune.py prune --settings FILE

FILE is JSON: {"releases": [ids], "releases_root", "weights": [directories], "models_root",
"etc": "/etc/vllm", "state": "/var/lib/vllm"}. What to remove was chosen by the plan; here is
made sure that each is a directory of ours that nobody needs: below the root at its depth and no
link on the way, on a file system of this host alone, with our stamp of this very directory,
named by no configuration or state of an instance, in use by no process. What is not so is left
and said. It is renamed first, so that a removal that is cut off leaves nothing with a good name;
leftovers go with the next run.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

if __package__:
    from vllm_fleet.onhost import tools
else:  # on a host: a flat directory of scripts
    import tools  # type: ignore[no-redef]

Refusal = tools.Refusal
say = tools.say

GONE = ".pruned."  # prefix of what is being removed
LARGEST = 1 << 20  # of a file that may name a directory


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["prune"])
    parser.add_argument("--settings", required=True, help="JSON file, or - for standard input")
    options = parser.parse_args()
    return int(tools.guarded("prune", lambda: prune(tools.read_settings(options.settings))))


def prune(settings: Mapping[str, Any]) -> List[Path]:
    """Remove what may be removed; the directories that are gone."""
    releases = Path(settings.get("releases_root") or "/opt/vllm/releases")
    models = Path(settings.get("models_root") or "/opt/vllm/models")
    asked: List[Tuple[Path, Path, int, str]] = [
        (releases / str(one), releases, 1, "release.json") for one in settings.get("releases") or []
    ]
    asked += [
        (Path(str(one)), models, 2, ".verified.json") for one in settings.get("weights") or []
    ]
    named = _named(
        Path(settings.get("etc") or "/etc/vllm"), Path(settings.get("state") or "/var/lib/vllm")
    )
    removed = []
    for path, root, depth, stamp in asked:
        why = _not_ours(path, root, depth, stamp)
        if why:
            say(f"{path}: left: {why}")
            continue
        with _held(path):
            why = _not_ours(path, root, depth, stamp) or _used(path, named, by_name=depth == 1)
            if why:
                say(f"{path}: left: {why}")
                continue
            freed = _bytes_of(path)
            gone = path.with_name(f"{GONE}{path.name}")
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
        shutil.rmtree(gone)
        removed.append(path)
        say(f"{path}: removed, {tools.gib(freed)} freed")
    for root, pattern in ((releases, f"{GONE}*"), (models, f"*/{GONE}*")):
        for left in root.glob(pattern):
            if not left.is_symlink() and left.is_dir():
                shutil.rmtree(left)
    return removed


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """The lock under which such a directory is made."""
    lock = path.parent / f".{path.name}.lock"
    with tools.locked(lock, str(path)):
        yield
    lock.unlink(missing_ok=True)


def _not_ours(path: Path, root: Path, depth: int, stamp: str) -> str:
    """Why a directory is none that we may remove; "" where it is one."""
    try:
        parts = path.relative_to(root).parts
    except ValueError:
        return f"is not below {root}"
    if len(parts) != depth or any(part.startswith(".") for part in parts):
        return f"is no directory of ours below {root}"
    step = root
    for part in parts:
        step = step / part
        if step.is_symlink():
            return f"{step} is a link"
    if not path.is_dir():
        return "is not there"
    kind = tools.shared_kind(path)
    if kind:
        return f"is on shared storage ({kind}), and another host may use it; remove it by hand"
    try:
        known = json.loads((path / stamp).read_text(encoding="utf-8"))
        own = known.get("id") == path.name or known.get("directory") == str(path)
    except (OSError, ValueError, AttributeError):
        own = False
    return "" if own else f"holds no {stamp} of ours"


def _named(etc: Path, state: Path) -> Dict[Path, str]:
    """Texts of the files that may name a directory: of instances, their state and units."""
    places = [*etc.glob("*"), *state.glob("*/*"), *Path("/etc/systemd/system").glob("vllm*/*")]
    texts: Dict[Path, str] = {}
    for path in places:
        # Not audit lines and logs: they tell what once was.
        if path.suffix in (".log", ".jsonl") or path.parent == state / "weights":
            continue
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size <= LARGEST:
                texts[path] = path.read_text(encoding="utf-8", errors="replace")
    for path in (state / "_rollout" / "instances").glob("*.json"):
        texts[path] = _remembered(path)
    return texts


def _remembered(record: Path) -> str:
    """The versions that an instance can go back to, or is about to go to; not those refused."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        versions = [one for one in [*found["goods"], found.get("next")] if one]
        parts = [f'"{one["release"]}"' for one in versions]
        parts += [file["content"] for one in versions for file in one.get("files") or ()]
        return "\n".join(parts)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _used(path: Path, named: Mapping[Path, str], *, by_name: bool) -> str:
    """Who needs a directory; "" where nobody does. ``by_name``: its name alone tells, too."""
    for place, text in named.items():
        for word in (f"{path}/", f'"{path}"', f"{path}\n", f"{path} ", f"{path}'"):
            if word in f"{text}\n":
                return f"{place} names it"
        if by_name and (path.name in text.split() or f'"{path.name}"' in text):
            return f"{place} names it"
    below = f"{path}/"
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            links = [process / "exe", process / "cwd", *(process / "fd").iterdir()]
            for link in links:
                with contextlib.suppress(OSError):
                    if f"{os.readlink(link)}/".startswith(below):
                        return f"process {process.name} uses it"
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(word == str(path) or below in word for word in words):
                return f"process {process.name} was started with it"
            if below in (process / "maps").read_text(encoding="utf-8", errors="replace"):
                return f"process {process.name} uses it"
    return ""


def _bytes_of(path: Path) -> int:
    """Bytes that removing a directory frees: files with a link elsewhere free nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total


if __name__ == "__main__":
    sys.exit(main())
