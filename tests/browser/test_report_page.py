"""The report in a real browser: what it shows, what it does on hover, and what no name in it can make it do."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snclr.report import page as page_module
from snclr.report.embedding_map import TILE, EmbeddingMap
from snclr.report.gallery import Gallery, Shown
from snclr.report.markup import picture_uri
from snclr.report.page import Page, render
from tests.browser.chromium import Tab, find_chromium, open_tab
from tests.browser.visit import hostile, requests, use

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (apt-get install chromium)")

PICTURE = picture_uri(np.full((8, 8, 3), 90, np.uint8), 128)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server in `tmp_path`, and the list of what was asked of it."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}", asked
        running.shutdown()
        thread.join()


def a_page(names: list[str], **changes: Any) -> Page:
    some = [names[n % len(names)] for n in range(max(12, len(names)))]
    near = [Shown(one, one, PICTURE, 1.0 - n / 10, 0.8, n % 2 == 0) for n, one in enumerate(some[:5])]
    angle = np.linspace(0, 5, len(some))
    full = Page(
        names[0], "0.1.0", complete=True, settings={"epochs": 5, "data": some[0], some[1]: some[2], "method": some[0],
        "encoder": some[1]}, records=[{"step": 10 * n, "epoch": n / 2, "loss": 9.0 - n} for n in range(1, 9)],
        results=[{"kind": one, "numbers": {"top1": 0.5, one: 1.0}, "protocol": one, "time": one} for one in some],
        skipped=[{"key": one, "reason": one} for one in some],
        gallery=Gallery([(Shown(one, one, PICTURE), near) for one in some], some[0], [0.5]), alerts=some[:2],
        map=EmbeddingMap(
            np.stack([np.cos(angle), np.sin(angle)], 1), (0.5, 0.2), some, list(some),
            np.full((len(some), TILE, TILE, 3), 200, np.uint8), some[0],
        ),
    )  # fmt: skip
    return replace(full, **changes)


def test_no_name_runs_anything_or_fetches_anything(tab: Tab, server: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = server
    names = hostile(address)
    (tmp_path / "report.html").write_text(render(a_page(names)))
    for url in (f"{address}/report.html", (tmp_path / "report.html").as_uri()):
        tab.open(url)
        use(tab)
        assert tab.run("typeof window.canary") == "undefined"
        assert tab.run("document.title") == f"{names[0]} · snclr"
        assert tab.run("document.querySelector('h1').textContent") == names[0]
        assert tab.run("document.querySelectorAll('iframe,object,embed,base,video,link[rel=stylesheet]').length") == 0
        assert tab.run("document.querySelectorAll('script').length") == 3
        assert requests(tab) == []
        assert tab.told("Runtime.exceptionThrown") == []
        assert tab.told("Log.entryAdded") == []  # nothing even tried what the policy forbids
    assert asked == ["/report.html"]


def test_the_policy_stops_what_an_escape_would_miss(
    tab: Tab, server: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, asked = server
    monkeypatch.setattr(page_module, "name", lambda value, most=200: str(value))  # as if names were not escaped at all
    (tmp_path / "report.html").write_text(render(a_page(hostile(address)[:5])))
    tab.open(f"{address}/report.html")
    assert tab.run("document.querySelectorAll('script').length") > 3  # it did get in
    assert tab.run("typeof window.canary") == "undefined"
    assert asked == ["/report.html"]


def test_pointing_at_a_chart_tells_its_numbers(tab: Tab, tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    place.write_text(render(a_page(["n"])))
    tab.open(place.as_uri(), height=2000)
    told = "Array.from(document.querySelectorAll('.chart output,.chart small'), e => e.textContent).join(' | ')"
    before = tab.run(told)
    assert before.startswith("1 | ")
    left, top, width, height = tab.run(
        "(r => [r.x, r.y, r.width, r.height])(document.querySelector('.chart svg').getBoundingClientRect())"
    )
    # Epoch 1 of 0 … 4, with the margins of the drawing.
    tab.point_at(left + (46 + (340 - 56) / 4) / 340 * width, top + height / 2)
    assert tab.run(told) == "7 | step 20, epoch 1"
    tab.point_at(5, 5)
    assert tab.run(told) == before


def test_pointing_at_the_map_shows_name_class_and_picture(tab: Tab, tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    names = [f"image-{n}.jpg" for n in range(12)]
    page = a_page(names)
    assert isinstance(page.map, EmbeddingMap)
    place.write_text(render(replace(page, map=replace(page.map, classes=["cat", "dog"] * 6))))
    tab.open(place.as_uri(), height=2000)
    tab.run("document.querySelector('.map').scrollIntoView({behavior: 'instant'})")
    dot = "document.querySelectorAll('.map circle')[{}].getBoundingClientRect()"
    where = f"(r => [r.x + r.width / 2, r.y + r.height / 2])({dot})"
    assert tab.run("document.querySelector('.tip').hidden") is True
    tab.point_at(*tab.run(where.format(7)))
    assert tab.run("document.querySelector('.tip p').innerText") == "dog\nimage-7.jpg"
    assert tab.run("getComputedStyle(document.querySelector('.shot')).backgroundImage").startswith(
        'url("data:image/jpeg'
    )
    assert (
        tab.run("document.querySelector('.shot').style.backgroundPosition") == f"{-(7 % 4) * 64}px {-(7 // 4) * 64}px"
    )
    tab.run("document.querySelector('.legend button').click()")  # cats alone
    assert (
        tab.run("Array.from(document.querySelectorAll('.map circle'), d => d.classList.contains('dim'))")
        == [False, True] * 6
    )
    tab.run("document.querySelector('.legend button').click()")
    assert tab.run("document.querySelectorAll('.map .dim').length") == 0


@pytest.mark.parametrize("width", [360, 768, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_and_can_be_read(tab: Tab, tmp_path: Path, width: int, dark: bool) -> None:
    place = tmp_path / "report.html"
    place.write_text(render(a_page(["a" * 150, "images/of a cat.jpg"])))
    tab.open(place.as_uri(), width=width, dark=dark)
    assert tab.run("document.documentElement.scrollWidth") <= width
    seen = tab.run("Array.from(document.querySelectorAll('section'), s => s.getBoundingClientRect().height)")
    assert len(seen) == 6
    assert min(seen) > 60
    assert tab.run("Array.from(document.images).every(i => i.complete && i.naturalWidth > 0 && i.width > 40)")
    pale = tab.run(
        """(() => {
          const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const ground = e => { for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor; if (!c.includes('rgba')) return c; } };
          return Array.from(document.querySelectorAll('h1,h2,p,td,th,dt,dd,small,a,b,output,summary,span,button'))
            .filter(e => e.textContent.trim() && e.offsetWidth)
            .map(e => { const a = light(getComputedStyle(e).color), b = light(ground(e));
              return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 80)]; })
            .filter(([ratio]) => ratio < 4.5); })()"""
    )
    assert pale == []
