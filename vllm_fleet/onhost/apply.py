"""Put, check and remove our files on a host, all or nothing.

Runs as root with the host's own Python, standard library only. Reads one JSON object from
standard input::

    {"files": [{"path", "content", "mode", "owner", "group"}],   what to write
     "remove": [path],                                          what to take away
     "checks": [{"command": [...], "paths": [prefix],           run when such a path changed
                 "remedy": text}]}                              told when it refuses; may be ""

Each file is written beside its place and renamed into it. When a check refuses the result,
every file is put back as it was and the exit code is 1: a daemon that is restarted by
somebody else never finds a configuration that its own checker refused. What was put is
remembered in /var/lib/vllm/manifest.json; only paths in there are ever removed. A unit whose file
is removed is stopped, by what it says itself, and no longer enabled.
"""

import glob
import grp
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

Saved = Optional[Tuple[bytes, int, int, int]]

STATE = "/var/lib/vllm"
MANIFEST = STATE + "/manifest.json"
SUFFIX = ".vllm-fleet-new"
UNITS = "/etc/systemd/"
OWN_UNITS = UNITS + "system"  # of whole units; drop-ins are below it


def system_user() -> None:
    """Make the vllm user and our directories where they are missing."""
    try:
        pwd.getpwnam("vllm")
    except KeyError:
        subprocess.run(
            ["useradd", "--system", "--user-group", "--home-dir", STATE, "--no-create-home",
             "--shell", "/usr/sbin/nologin", "vllm"],
            check=True,
        )  # fmt: skip
    for path, mode in (
        ("/opt/vllm", 0o755),
        ("/etc/vllm", 0o755),
        (STATE, 0o755),
        (STATE + "/loaded", 0o755),
        (STATE + "/metrics", 0o755),
    ):
        os.makedirs(path, mode=mode, exist_ok=True)
        os.chmod(path, mode)


def read_manifest() -> Dict[str, str]:
    """Paths that we put here, with their checksums."""
    try:
        with open(MANIFEST, encoding="utf-8") as file:
            manifest: Dict[str, str] = json.load(file)
    except FileNotFoundError:
        return {}
    return manifest


def checksums(files: Sequence[Dict[str, Any]]) -> Dict[str, str]:
    """Checksum by path, as the manifest has it."""
    return {file["path"]: hashlib.sha256(file["content"].encode()).hexdigest() for file in files}


def write(path: str, content: bytes, mode: int, uid: int, gid: int) -> None:
    """Write a file beside its place, then rename it into it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path + SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.chown(path + SUFFIX, uid, gid)
    os.chmod(path + SUFFIX, mode)
    os.replace(path + SUFFIX, path)


def saved(path: str) -> Saved:
    """(content, mode, uid, gid) of a file, or None where there is none."""
    try:
        with open(path, "rb") as file:
            content = file.read()
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return content, status.st_mode & 0o7777, status.st_uid, status.st_gid


def remove(path: str) -> None:
    """Remove a file and the directories that it leaves empty, ours alone."""
    if os.path.lexists(path):
        os.unlink(path)
    folder = os.path.dirname(path)
    while folder.endswith(".service.d") or folder.startswith(("/etc/vllm/", "/opt/vllm/lib/")):
        try:
            os.rmdir(folder)
        except OSError:
            return
        folder = os.path.dirname(folder)


def refused_by(
    checks: Sequence[Dict[str, Any]], changed: Sequence[str], removed: Sequence[str]
) -> Optional[str]:
    """What the first failing check said, or None; a check of a file that is removed is left out."""
    for check in checks:
        if not any(path.startswith(tuple(check["paths"])) for path in changed):
            continue
        if set(check["command"]) & set(removed):
            continue
        if shutil.which(check["command"][0]) is None:
            return f"{check['command'][0]}: not installed on this host"
        done = subprocess.run(
            check["command"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode != 0:
            text = done.stdout.decode(errors="replace").strip()
            remedy = f"; {check['remedy']}" if check.get("remedy") else ""
            return f"{' '.join(check['command'])}: {text}{remedy}"
    return None


def end_units(removed: Sequence[str]) -> None:
    """Stop and disable the units whose files are removed; systemd still knows what they do then.

    Templates are left out: each of their instances is drained and ended by others before.
    """
    units = [
        os.path.basename(path)
        for path in removed
        if os.path.dirname(path) == OWN_UNITS and "@" not in path
    ]
    if not units:
        return
    done = subprocess.run(["systemctl", "stop", *units], check=False)
    if done.returncode != 0:
        print(f"files: {' '.join(units)}: removed, but could not be stopped", file=sys.stderr)
    for unit in units:
        for link in glob.glob(f"{OWN_UNITS}/*.wants/{unit}"):
            os.unlink(link)


def apply(order: Dict[str, Any]) -> Optional[str]:
    """Write and remove; put everything back and return what was said when a check refuses."""
    system_user()
    manifest = read_manifest()
    strangers = [path for path in order["remove"] if path not in manifest]
    if strangers:
        return f"{strangers[0]}: not put here by us, so not removed"
    before: Dict[str, Saved] = {}
    changed: List[str] = [file["path"] for file in order["files"]] + order["remove"]
    for path in changed:
        before[path] = saved(path)
    try:
        for file in order["files"]:
            write(
                file["path"],
                file["content"].encode(),
                int(file["mode"], 8),
                pwd.getpwnam(file["owner"]).pw_uid,
                grp.getgrnam(file["group"]).gr_gid,
            )
        for path in order["remove"]:
            remove(path)
        refusal = refused_by(order["checks"], changed, order["remove"])
    except (OSError, KeyError) as error:
        refusal = str(error)
    if refusal:
        for path, old in before.items():
            if old is None:
                remove(path)
            else:
                write(path, *old)
        return refusal
    manifest.update(checksums(order["files"]))
    for path in order["remove"]:
        manifest.pop(path, None)
    write(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode(), 0o600, 0, 0)
    end_units(order["remove"])
    if any(path.startswith(UNITS) for path in changed):
        subprocess.run(["systemctl", "daemon-reload"], check=True)
    return None


def main() -> int:
    """Apply what stands on standard input."""
    refusal = apply(json.load(sys.stdin))
    if refusal:
        print(f"files: refused, everything put back as it was: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
