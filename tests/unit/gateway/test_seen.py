"""What is written for people and logs: the small modules of it, run by lua5.1."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LUA = HERE.parents[2] / "vllm_fleet" / "gateway" / "lua"

pytestmark = pytest.mark.skipif(shutil.which("lua5.1") is None, reason="needs Debian's lua5.1")


def lua(what: str, *texts: bytes | str) -> list[bytes]:
    given = [t.encode() if isinstance(t, str) else t for t in texts]
    done = subprocess.run(
        ["lua5.1", HERE / "seen_harness.lua", LUA, what],
        input="".join(f"{t.hex()}\n" for t in given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [bytes.fromhex(line) for line in done.stdout.splitlines()]


# UTF-8 of the access log


def valid(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_valid_text_stays() -> None:
    texts = ["", "/v1/models", "模型", "é", "\U0001f600", "\u07ff\u0800\uffff\U00010000\U0010ffff"]
    assert lua("utf8", *texts) == [b"-"] * len(texts)


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        (b"\xff", "\ufffd"),
        (b"a\x80b", "a\ufffdb"),
        (b"\xc3(", "\ufffd("),
        (b"\xe6\xa8", "\ufffd\ufffd"),  # cut short
        (b"\xc0\xaf", "\ufffd\ufffd"),  # a slash, written too long
        (b"\xe0\x80\xaf", "\ufffd\ufffd\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # half a surrogate pair
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),  # beyond the last character
        ("é".encode() + b"\xff" + "模".encode(), "é\ufffd模"),
    ],
)
def test_bytes_that_are_none_are_replaced(text: bytes, mended: str) -> None:
    assert lua("utf8", text) == [b"+" + mended.encode()]


def test_any_bytes_become_valid_and_what_is_valid_stays() -> None:
    chance = random.Random(7)
    pieces = [b"a", b"/", "é".encode(), "模".encode(), "\U0001f600".encode()]
    texts = [
        b"".join(
            chance.choice(pieces) if chance.random() < 0.6 else bytes([chance.randrange(256)])
            for _ in range(chance.randrange(12))
        )
        for _ in range(3000)
    ]
    for text, got in zip(texts, lua("utf8", *texts), strict=True):
        if valid(text):
            assert got == b"-", text
        else:
            assert got[:1] == b"+"
            mended = got[1:].decode()
            assert "\ufffd" in mended
            left = text.decode(errors="ignore")
            assert [c for c in mended if c != "\ufffd"] == list(left), text


# Names near an unknown one


def test_distance() -> None:
    cases = [("", ""), ("a", ""), ("gpu-01", "gpu-02"), ("kitten", "sitting"), ("ab", "ba")]
    texts = [text for case in cases for text in case]
    assert lua("distance", *texts) == [b"0", b"1", b"1", b"3", b"2"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("gpu-01/ari-a", ["gpu-01/air-a", "gpu-01/air-b", "gpu-02/air-a"]),
        ("small", ["gpu-03/small"]),
        ("zzzzzzzzzz", []),
        ("", []),
    ],
)
def test_nearest(asked: str, expected: list[str]) -> None:
    names = ["gpu-01/air-a", "gpu-01/air-b", "gpu-02/air-a", "gpu-03/small"]
    assert [name.decode() for name in lua("near", asked, *names)] == expected


# The page

HOSTILE = """<script>alert(1)</script>"'&><img src=x onerror=alert(2)>"""


class Read(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


def page(text: str, count: int) -> tuple[str, Read]:
    (got,) = lua("page", text, str(count))
    return got.decode(), Read(got.decode())


def test_no_text_of_others_becomes_part_of_the_page() -> None:
    html, read = page(HOSTILE, 2)
    assert read.open == []
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in read.tags}
    assert {name for _, attrs in read.tags for name in attrs} <= {
        *("class", "id", "lang", "charset", "name", "content", "http-equiv", "rel", "href"),
        *("nonce", "scope", "type", "placeholder", "aria-label", "open", "data-find"),
        *("data-of", "data-open"),
    }
    # in the head line, the title, the pool twice, its alias, and for each instance its id,
    # version, release and address
    assert "".join(read.words).count(HOSTILE) == 2 + 3 + 2 * 4
    (style,) = [attrs["nonce"] for tag, attrs in read.tags if tag == "style"]
    assert style == "NONCE"
    assert "http" not in re.sub(r"http-equiv", "", html)


def test_a_pool_of_many_is_closed_unless_something_is_wrong() -> None:
    def pools(count: int) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in page("x", count)[1].tags if tag == "details"]

    assert "open" in pools(2)[0]
    assert "open" in pools(500)[0]  # half of them are not ready
    html, _ = page("x", 500)
    assert html.count("<tr data-find=") == 500
    assert len(html) < 350_000


def test_numbers_are_short() -> None:
    html, _ = page("x", 2)
    cells = re.findall(r'<td class="n[^"]*" data-of="([^"]*)">([^<]*)</td>', html)
    assert ("req/s", "1234") in cells or ("req/s", "1235") in cells
    assert ("fail/s", "&lt;0.1") in cells
    assert ("fail/s", "0") in cells
    assert ("tokens/s", "3.0") in cells
