"""/status in a real browser: what it shows, that it goes on by itself, that it fits.

Every engine is the stand-in of tests/stubs/engine.py. With FLEET_PICTURES set to a folder,
pictures of what is seen are left there, to be looked at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.browser import Browser, program
from tests.integration.test_gateway_nginx import Stream, running
from tests.integration.test_gateway_seen import ask
from tests.stubs.engine import Engine
from tests.stubs.gateway import Nginx, available, wait_for
from tests.unit.gateway.fleet import pool

pytestmark = [
    pytest.mark.integration,
    pytest.mark.browser,
    pytest.mark.skipif(
        not available() or not program(), reason="needs root, nginx with Lua, and Chromium"
    ),
    pytest.mark.timeout(180),
]

PICTURES = os.environ.get("FLEET_PICTURES")
PHONE, DESK = (390, 844), (1280, 800)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Engine(str(n))) for n in range(4)]


@pytest.fixture
def fleet(engines: list[Engine]) -> Iterator[Nginx]:
    """One instance that is drained, one that is not ready, a pool that holds a request."""
    engines[1].ready = False
    engines[3].ready = False
    pools = [
        pool("glm-4.5-air", [e.port for e in engines[:3]], aliases=("glm",)),
        pool("qwen3-8b", [engines[3].port]),
    ]
    with running(pools, ready=False) as nginx:
        wait_for(lambda: nginx.status()["ready"] == 2)
        ask(nginx, "POST", "/drain?instance=gpu-03/glm-4.5-air-3")
        yield nginx


def page(nginx: Nginx) -> str:
    return f"http://127.0.0.1:{nginx.status_port}/status"


def show(browser: Browser, nginx: Nginx, size: tuple[int, int], name: str) -> None:
    browser.go("about:blank#")  # the page before may ask a gateway that is gone
    browser.complaints.clear()
    browser.size(*size, phone=size == PHONE)
    browser.go(page(nginx))
    if PICTURES:
        browser.picture(Path(PICTURES) / f"{name}-{size[0]}.png", whole=True)


def states(browser: Browser) -> list[str]:
    """Instance and state of each row, as they are shown."""
    found: list[str] = browser.value(
        "[...document.querySelectorAll('.instances tbody tr')].map("
        "r => r.querySelector('th').innerText + ' ' + r.querySelector('.state').innerText)"
    )
    return found


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_shows_what_is_and_fits(
    browser: Browser, fleet: Nginx, size: tuple[int, int], dark: bool
) -> None:
    browser.dark(dark)
    show(browser, fleet, size, "dark" if dark else "light")
    assert states(browser) == [
        "gpu-01/glm-4.5-air-1 ready",
        "gpu-02/glm-4.5-air-2 not ready",
        "gpu-03/glm-4.5-air-3 draining",
        "gpu-01/qwen3-8b-1 not ready",
    ]
    assert browser.value("document.title") == "3 not ready · gw-01 · vLLM fleet"
    text = browser.value("document.body.innerText")
    for part in ("1 of 4", "also glm", "0.21.0-abc", "1 ready, 1 draining, 1 not ready"):
        assert part in text
    # nothing is wider than the screen, and no text is cut
    assert browser.value("document.documentElement.scrollWidth") <= size[0]
    assert cut(browser) == []
    # text stands out from what is behind it
    back = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, back[4:-1].split(","))) < 200) is dark
    assert contrast(browser) >= 4.5
    assert browser.complaints == []


def cut(browser: Browser) -> list[str]:
    """Texts that have no room where they stand."""
    found: list[str] = browser.value(
        "[...document.querySelectorAll('td,th,dt,dd,summary')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)"
        ".map(e => e.innerText)"
    )
    return found


def contrast(browser: Browser) -> float:
    """The least contrast of any text to what is behind it, as WCAG reckons it."""
    found: float = browser.value(
        """(() => {
          const parse = c => c.match(/[\\d.]+/g).map(Number);
          const light = c => {
            const [r, g, b] = parse(c).map(v => v / 255)
              .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const behind = e => {
            for (; e; e = e.parentElement) {
              const c = getComputedStyle(e).backgroundColor;
              if ((parse(c)[3] ?? 1) > 0) { return c; }
            }
          };
          return Math.min(...[...document.querySelectorAll(
            'h1,small,#live,dt,dd,h2,a,td,tbody th,.state,summary span,footer')]
            .filter(e => e.innerText.trim() && e.offsetParent)
            .map(e => {
              const a = light(getComputedStyle(e).color), b = light(behind(e));
              return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            }));
        })()"""
    )
    return found


def test_it_goes_on_by_itself(browser: Browser, fleet: Nginx, engines: list[Engine]) -> None:
    browser.dark(False)
    show(browser, fleet, DESK, "live")
    assert "gpu-02/glm-4.5-air-2 not ready" in states(browser)
    browser.value("window.kept = true")
    engines[1].ready = True
    ask(fleet, "POST", "/undrain?instance=gpu-03/glm-4.5-air-3")
    engines[0].chunk_gap, engines[0].chunks = 0.2, 200
    with ExitStack() as stack:
        streams = [Stream(fleet, "glm") for _ in range(3)]
        for stream in streams:
            stack.callback(stream.connection.close)
        busy = f"document.querySelectorAll('.tiles dd')[1].innerText !== {json.dumps('0')}"
        browser.wait("document.querySelectorAll('.state.ready').length === 3")
        browser.wait(busy)
    assert browser.value("window.kept")  # the page was not loaded anew
    assert browser.value("document.title") == "1 not ready · gw-01 · vLLM fleet"
    # what the reader closed stays closed
    browser.value("document.querySelector('summary').click()")
    assert browser.value("document.querySelector('details').open") is False
    before = browser.value("document.getElementById('live').textContent")
    browser.wait(f"document.getElementById('live').textContent !== {json.dumps(before)}")
    assert browser.value("document.querySelector('details').open") is False
    assert browser.complaints == []


def test_the_reader_is_told_when_the_gateway_is_gone(
    browser: Browser, engines: list[Engine]
) -> None:
    with running([pool("m", [engines[0].port])]) as nginx:
        show(browser, nginx, DESK, "gone")
    browser.wait("document.getElementById('live').className === 'old'")
    assert "no answer for" in browser.value("document.getElementById('live').textContent")


def test_without_scripts_the_browser_loads_it_anew(browser: Browser, fleet: Nginx) -> None:
    browser.without_script(True)
    try:
        browser.complaints.clear()
        browser.call("Page.navigate", url=page(fleet))
        browser.wait("document.querySelectorAll('.state').length === 4")
        before = browser.value("document.getElementById('live').textContent")
        browser.wait(
            f"document.getElementById('live')?.textContent > {json.dumps(before)}", seconds=30
        )
        assert browser.value("getComputedStyle(document.getElementById('find')).display") == "none"
    finally:
        browser.without_script(False)


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_five_hundred_instances(
    browser: Browser, engines: list[Engine], size: tuple[int, int]
) -> None:
    """Ten pools of fifty, all of them four stand-ins; in two pools nobody answers for one."""
    ports = [engine.port for engine in engines] * 13
    pools = [pool(f"model-{n}", [*ports[:49], 1 if n < 2 else ports[0]]) for n in range(10)]
    with running(pools, ready=False) as nginx:
        wait_for(lambda: nginx.status()["ready"] == 498, 60)
        show(browser, nginx, size, "many")
        assert len(states(browser)) == 500
        assert cut(browser) == []
        # pools where all is well are closed: what is wrong is found without scrolling for long
        # (on a busy machine one more may be late with an answer, for a while)
        browser.wait("document.querySelectorAll('details[open]').length === 2", 60)
        first = "document.querySelector('details[open] tbody tr th').innerText"
        assert browser.value(first) == "gpu-50/model-0-50"
        assert browser.value("document.documentElement.scrollWidth") <= size[0]
        browser.value(
            "(() => { const f = document.getElementById('find'); f.value = 'gpu-50/model-1';"
            "f.dispatchEvent(new Event('input')); })()"
        )
        seen = browser.value(
            "[...document.querySelectorAll('.instances tbody tr')]"
            ".filter(r => r.offsetParent).map(r => r.querySelector('th').innerText)"
        )
        assert seen == ["gpu-50/model-1-50"]
        if PICTURES:
            browser.picture(Path(PICTURES) / f"found-{size[0]}.png")
        assert browser.complaints == []
