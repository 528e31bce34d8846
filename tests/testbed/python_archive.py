"""An archive of a Python, for tests of python_archive: Debian's own, as a relocatable one.

Debian's interpreter is one file with its library beside it, and finds that by its own place.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from pathlib import Path

LEFT_OUT = re.compile(r"__pycache__|/test$|/idlelib$|/lib2to3$|/config-3")


def pack(root: Path, target: Path, top: str = "python/") -> tuple[str, str]:
    """Pack the Python of a root file system; (its sha256, its version such as 3.11)."""
    python = (root / "usr/bin").joinpath((root / "usr/bin/python3").readlink())
    version = python.name.removeprefix("python")

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if LEFT_OUT.search(member.name):
            return None
        member.uname = member.gname = "builder"
        member.uid = member.gid = 1000
        return member

    with tarfile.open(target, "w:gz", compresslevel=1, dereference=False) as archive:
        archive.add(python, f"{top}bin/{python.name}", filter=kept)
        link = tarfile.TarInfo(f"{top}bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, python.name
        archive.addfile(link)
        library = root / "usr/lib" / python.name
        for path in sorted(library.rglob("*")):
            if path.is_symlink():  # into Debian's other packages
                continue
            name = f"{top}lib/{python.name}/{path.relative_to(library)}"
            if not LEFT_OUT.search(f"/{path.relative_to(library).parent}"):
                archive.add(path, name, recursive=False, filter=kept)
    return hashlib.sha256(target.read_bytes()).hexdigest(), version
