"""Published wheels, read in part: only the members asked for, by HTTP range requests.

A wheel is a zip file; its list of members stands at its end. Of a vLLM wheel of 250 to 430 MB
about 2 MB are read, nothing is installed and nothing is run. Which index serves the wheel is
pip's own business: ``pip install --dry-run --report`` is asked, so its configuration holds.
"""

from __future__ import annotations

import bisect
import io
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# pip takes a --platform as it stands, so every glibc tag that vLLM has used is named.
GLIBC_TAGS = (39, 35, 34, 31, 28, 24, 17)
JOIN = 1 << 16  # two wanted members less than this apart are read by one request


@dataclass(frozen=True)
class Wheel:
    """One wheel: where it is, and what its metadata says."""

    url: str
    metadata: dict[str, Any]  # core metadata as pip reports it

    @property
    def filename(self) -> str:
        """Name of the wheel file, tags included."""
        return self.url.rsplit("/", 1)[-1]


def find(package: str, version: str, python: str = "3.12") -> Wheel:
    """Ask pip for the wheel of a version for Linux on x86_64; RuntimeError where it has none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--only-binary=:all:", "--target", folder]
        command += ["--python-version", python, "--report", str(report)]
        for tag in GLIBC_TAGS:
            command += ["--platform", f"manylinux_2_{tag}_x86_64"]
        run = subprocess.run(
            [*command, f"{package}=={version}"], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"pip finds no wheel of {package} {version}: {run.stderr.strip()}")
        found = json.loads(report.read_text())["install"][0]
    return Wheel(url=found["download_info"]["url"], metadata=found["metadata"])


def read(wheel: Wheel, wanted: Callable[[str], bool]) -> dict[str, str]:
    """Text of every member whose name ``wanted`` says yes to, by name."""
    return {k: v.decode("utf-8", "replace") for k, v in _members(wheel, wanted).items()}


def read_binary(wheel: Wheel, names: Collection[str]) -> dict[str, bytes]:
    """Content of the members of these names that the wheel has, by name."""
    return _members(wheel, lambda name: name in names)


def _members(wheel: Wheel, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    remote = _Remote(wheel.url)
    with zipfile.ZipFile(remote) as archive:
        names = [i.filename for i in archive.infolist() if wanted(i.filename)]
        starts = sorted(i.header_offset for i in archive.infolist())
        spans = []
        for name in names:
            start = archive.getinfo(name).header_offset
            following = bisect.bisect_right(starts, start)
            end = starts[following] if following < len(starts) else archive.start_dir
            spans.append((start, end))
        remote.load(spans)
        return {name: archive.read(name) for name in names}


class _Remote(io.RawIOBase):
    """A file on an HTTP server, read by ranges; what was read is kept."""

    def __init__(self, url: str) -> None:
        self.url = url
        # The authority bundle that pip was told to use, where there is one.
        bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        self.context = ssl.create_default_context(cafile=bundle)
        self.parts: list[tuple[int, bytes]] = []
        self.position = 0
        tail, self.size = self._get("-65536")
        self.parts.append((self.size - len(tail), tail))

    def _get(self, span: str) -> tuple[bytes, int]:
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={span}"})
        with urllib.request.urlopen(request, context=self.context, timeout=180) as answer:
            if answer.status != 206:
                raise RuntimeError(f"{self.url}: the index does not serve ranges")
            return answer.read(), int(answer.headers["Content-Range"].rsplit("/", 1)[-1])

    def load(self, spans: list[tuple[int, int]]) -> None:
        """Read these spans of bytes, neighbours together."""
        joined: list[list[int]] = []
        for start, end in sorted(spans):
            if joined and start - joined[-1][1] < JOIN:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([start, end])
        for start, end in joined:
            self.parts.append((start, self._get(f"{start}-{end - 1}")[0]))

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = base + offset
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = self.size - self.position
        end = min(self.position + size, self.size)
        for start, part in self.parts:
            if start <= self.position and end <= start + len(part):
                data = part[self.position - start : end - start]
                break
        else:
            data = self._get(f"{self.position}-{end - 1}")[0] if end > self.position else b""
            self.parts.append((self.position, data))
        self.position += len(data)
        return data
