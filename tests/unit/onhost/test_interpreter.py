"""A Python from an archive: fetched, compared, unpacked, tried; and what is refused.

The interpreters here are shell scripts that print a version; tests/integration/
test_release_build.py makes a release with a real one.
"""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from vllm_fleet.onhost import interpreter
from vllm_fleet.onhost.tools import Refusal

pytestmark = pytest.mark.slow

SCRIPT = "#!/bin/sh\necho 3.12.7\n"


def archive(path: Path, files: dict[str, str], links: dict[str, str] | None = None) -> str:
    """Write a .tar.gz of these executable files and links; its sha256."""
    with tarfile.open(path, "w:gz") as made:
        for name, text in files.items():
            one = tarfile.TarInfo(name)
            one.mode, one.size = 0o6755, len(text)
            made.addfile(one, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            one = tarfile.TarInfo(name)
            one.type, one.linkname = tarfile.SYMTYPE, target
            made.addfile(one)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def have(tmp_path: Path, source: Path | str, checksum: str, version: str = "3.12") -> str:
    order = {
        "source": str(source),
        "sha256": checksum,
        "version": version,
        "directory": str(tmp_path / "python"),
    }
    return interpreter.have(order, {})


def left(tmp_path: Path) -> list[str]:
    """What lies where Pythons are, less the lock."""
    return sorted(p.name for p in (tmp_path / "python").iterdir() if p.name != ".lock")


@pytest.mark.parametrize("top", ["python/", ""])
def test_an_archive_is_unpacked_tried_and_switched_in(tmp_path: Path, top: str) -> None:
    packed = tmp_path / "a.tar.gz"
    files = {f"{top}bin/python3.12": SCRIPT, f"{top}lib/one.py": "x = 1\n"}
    checksum = archive(packed, files, {f"{top}bin/python3": "python3.12"})
    python = have(tmp_path, packed, checksum)
    assert python == str(tmp_path / f"python/3.12-{checksum[:12]}/bin/python3")
    place = Path(python).parents[1]
    assert left(tmp_path) == [place.name]
    assert (place / "lib/one.py").read_text() == "x = 1\n"
    assert (place / "bin/python3.12").stat().st_mode & 0o7777 == 0o755  # no setuid, whatever came
    packed.unlink()
    assert have(tmp_path, packed, checksum) == python  # it stands: nothing is looked for


def test_another_archive_than_the_one_named_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "a.tar.gz"
    found = archive(packed, {"bin/python3": SCRIPT})
    with pytest.raises(Refusal) as refused:
        have(tmp_path, packed, "0" * 64)
    assert f"sha256 {found}, wanted {'0' * 64}" in str(refused.value)
    assert str(packed) in str(refused.value)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("files", "links", "word"),
    [
        ({"bin/python": SCRIPT}, {}, "holds no bin/python3"),
        ({"bin/python3": "#!/bin/sh\necho no such library; exit 1\n"}, {}, "no such library"),
        ({"bin/python3": "#!/bin/sh\necho 3.13.1\n"}, {}, "is Python 3.13.1"),
        ({"bin/python3": SCRIPT, "../../etc/x": ""}, {}, "leads out of it"),
        ({"bin/python3": SCRIPT}, {"lib/x": "/etc/passwd"}, "leads out of it"),
        ({"bin/python3": SCRIPT}, {"lib/x": "../../x"}, "leads out of it"),
    ],
)
def test_what_is_no_python_for_here_is_refused_and_leaves_nothing(
    tmp_path: Path, files: dict[str, str], links: dict[str, str], word: str
) -> None:
    packed = tmp_path / "a.tar.gz"
    checksum = archive(packed, files, links)
    with pytest.raises(Refusal, match=word):
        have(tmp_path, packed, checksum)
    # The archive itself is right, and kept for the next try with other settings.
    assert left(tmp_path) == [f".{checksum}.tar"]


def test_what_cannot_be_unpacked_says_what_is_wanted(tmp_path: Path) -> None:
    packed = tmp_path / "a.tar.zst"
    packed.write_bytes(b"(\xb5/\xfd" + b"x" * 100)
    checksum = hashlib.sha256(packed.read_bytes()).hexdigest()
    with pytest.raises(Refusal, match="install_only"):
        have(tmp_path, packed, checksum)
    with pytest.raises(Refusal, match=r"python_archive\.source"):
        have(tmp_path, tmp_path / "absent.tar.gz", "1" * 64)


class _Cuts(http.server.BaseHTTPRequestHandler):
    """Sends half of what is left and cuts, the first times."""

    data = b""
    cuts = 0
    ranges: ClassVar[list[str | None]] = []
    sent = 0

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        _Cuts.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        rest = self.data[start:]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(rest)))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(self.data) - 1}/9")
        self.end_headers()
        if _Cuts.cuts:
            _Cuts.cuts -= 1
            rest = rest[: len(rest) // 2]
        self.wfile.write(rest)
        _Cuts.sent += len(rest)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """No news."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Cuts) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()
        thread.join()


def test_a_cut_download_goes_on_where_it_stopped(tmp_path: Path, server: str) -> None:
    packed = tmp_path / "a.tar.gz"
    checksum = archive(packed, {"bin/python3": SCRIPT, "lib/x": "x" * 100_000})
    _Cuts.data, _Cuts.cuts, _Cuts.ranges, _Cuts.sent = packed.read_bytes(), 2, [], 0
    have(tmp_path, f"{server}/a.tar.gz", checksum)
    assert _Cuts.ranges[0] is None
    assert len(_Cuts.ranges) == 3
    assert _Cuts.sent == len(_Cuts.data)


def test_a_source_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"http://127\.0\.0\.1:9/a.* cannot be fetched"):
        have(tmp_path, "http://127.0.0.1:9/a", "0" * 64)
