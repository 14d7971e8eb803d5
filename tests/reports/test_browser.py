"""The report in Chromium: layout, contrast, hover, and hostile names."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snclr.evaluation.results import Neighbor, NeighborRow
from snclr.reports import page as page_module
from snclr.reports.classes import ClassTable
from snclr.reports.embedding_map import TILE, build_map
from snclr.reports.page import NeighborSection, Page, render, render_overlay
from snclr.reports.run_state import COMPLETE
from snclr.reports.thumbnails import thumbnail_uri
from tests.helpers.chromium import Tab, find_chromium, open_tab
from tests.helpers.visit import hostile, requests, use

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (apt-get install chromium)")

IMAGE_URI = thumbnail_uri(np.full((8, 8, 3), 90, np.uint8), 128)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server in `tmp_path`, and the list of requested paths."""
    requested: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            requested.append(self.path)
            super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}", requested
        running.shutdown()
        thread.join()


def a_page(names: list[str], classes: list[str] | None = None) -> Page:
    used = [names[n % len(names)] for n in range(max(12, len(names)))]
    near = [Neighbor(one, n, 0.8, 1.0 - n / 10, one, n % 2 == 0) for n, one in enumerate(used[:5])]
    rows = [NeighborRow(one, n, one, near) for n, one in enumerate(used)]
    angle = np.linspace(0, 5, len(used))
    return Page(
        names[0], state=COMPLETE, settings={"epochs": 5, "data": used[0], used[1]: used[2], "method": used[0],
        "encoder": used[1]}, records=[{"step": 10 * n, "epoch": n / 2, "loss": 9.0 - n} for n in range(1, 9)],
        results=[{"kind": one, "numbers": {"top1": 0.5, one: 1.0}, "protocol": one, "time": one, "data": "test"}
                 for one in used],
        classes=ClassTable(used, np.arange(len(used) ** 2).reshape(len(used), -1), used[0]),
        skipped=[{"key": one, "reason": one} for one in used],
        neighbors=NeighborSection(rows, dict.fromkeys(range(len(used)), IMAGE_URI), used[0], [0.5], used[1]),
        alerts=used[:2],
        map=build_map(
            np.stack([np.cos(angle), np.sin(angle)], 1), used, classes or used,
            np.full((len(used), TILE, TILE, 3), 200, np.uint8), used[0],
        ),
    )  # fmt: skip


def test_hostile_names_neither_run_nor_load_anything(tab: Tab, server: tuple[str, list[str]], tmp_path: Path) -> None:
    address, requested = server
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
        assert tab.events_of("Runtime.exceptionThrown") == []
        assert tab.events_of("Log.entryAdded") == []  # the policy had nothing to block
    assert requested == ["/report.html"]


def test_the_content_security_policy_blocks_unescaped_names(
    tab: Tab, server: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, requested = server
    unescaped = page_module.environment().overlay(autoescape=False)
    monkeypatch.setattr(page_module, "environment", lambda: unescaped)
    (tmp_path / "report.html").write_text(render(a_page(hostile(address)[:5])))
    tab.open(f"{address}/report.html")
    assert tab.run("document.querySelectorAll('script').length") > 3  # the names became markup
    assert tab.run("typeof window.canary") == "undefined"
    assert requested == ["/report.html"]


def test_hovering_over_a_chart_shows_step_epoch_and_value(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(a_page(["n"])))
    tab.open(path.as_uri(), height=2000)
    labels = "Array.from(document.querySelectorAll('.chart output,.chart small'), e => e.textContent).join(' | ')"
    tab.run("document.querySelector('.charts').scrollIntoView({behavior: 'instant'})")
    before = tab.run(labels)
    assert before.startswith("1 | ")
    left, top, width, height = tab.run(
        "(r => [r.x, r.y, r.width, r.height])(document.querySelector('.chart svg').getBoundingClientRect())"
    )
    # Epoch 1 of 0 … 4, with the margins of the drawing.
    tab.point_at(left + (46 + (340 - 56) / 4) / 340 * width, top + height / 2)
    assert tab.run(labels) == "7 | step 20, epoch 1"
    tab.point_at(5, 5)
    assert tab.run(labels) == before


def test_overlaid_runs_fit_the_window_and_show_all_values(tab: Tab, tmp_path: Path) -> None:
    runs = [
        Page(f"run-{n}", COMPLETE, {"seed": n, "data": "a" * 90},
             [{"step": i, "epoch": i / 2, "loss": 9.0 - i - n} for i in range(1, 9)],
             results=[{"kind": "knn", "numbers": {"top1": 0.5}, "n": 100}])
        for n in range(3)
    ]  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(render_overlay(runs))
    for width in (390, 1280):
        tab.open(path.as_uri(), width=width)
        assert tab.run("document.documentElement.scrollWidth") <= width
    strokes = "new Set(Array.from(document.querySelectorAll('.chart .raw'), p => getComputedStyle(p).stroke)).size"
    assert tab.run(strokes) == 3
    tab.run("document.querySelector('.charts').scrollIntoView({behavior: 'instant'})")
    left, top, width, height = tab.run(
        "(r => [r.x, r.y, r.width, r.height])(document.querySelector('.chart svg').getBoundingClientRect())"
    )
    tab.point_at(left + (46 + (340 - 56) / 4) / 340 * width, top + height / 2)
    assert tab.run("document.querySelector('.chart output').textContent") == "epoch 1"
    assert tab.run("document.querySelector('.chart small').textContent") == "run-0 7, run-1 6, run-2 5"
    assert tab.events_of("Runtime.exceptionThrown") == []


def test_hovering_over_the_map_shows_name_class_and_thumbnail(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    names = [f"image-{n}.jpg" for n in range(12)]
    path.write_text(render(a_page(names, ["cat", "dog"] * 6)))
    tab.open(path.as_uri(), height=2000)
    tab.run("document.querySelector('.map').scrollIntoView({behavior: 'instant'})")
    dot = "document.querySelectorAll('.map circle')[{}].getBoundingClientRect()"
    where = f"(r => [r.x + r.width / 2, r.y + r.height / 2])({dot})"
    assert tab.run("document.querySelector('.tip').hidden") is True
    tab.point_at(*tab.run(where.format(7)))
    assert tab.run("document.querySelector('.tip p').innerText") == "dog\nimage-7.jpg"
    assert tab.run("getComputedStyle(document.querySelector('.thumbnail')).backgroundImage").startswith(
        'url("data:image/jpeg'
    )
    assert (
        tab.run("document.querySelector('.thumbnail').style.backgroundPosition")
        == f"{-(7 % 4) * 64}px {-(7 // 4) * 64}px"
    )
    tab.run("document.querySelector('.legend button').click()")  # highlight cats
    assert (
        tab.run("Array.from(document.querySelectorAll('.map circle'), d => d.classList.contains('dim'))")
        == [False, True] * 6
    )
    tab.run("document.querySelector('.legend button').click()")
    assert tab.run("document.querySelectorAll('.map .dim').length") == 0


def test_a_tap_on_the_map_or_a_chart_shows_its_point(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(a_page([f"image-{n}.jpg" for n in range(12)])))
    tab.open(path.as_uri(), width=390, height=2000)
    center = "(r => [r.x + r.width / 2, r.y + r.height / 2])({}.getBoundingClientRect())"
    tab.run("document.querySelector('.map').scrollIntoView({behavior: 'instant'})")
    tab.tap(*tab.run(center.format("document.querySelectorAll('.map circle')[7]")))
    assert "image-7.jpg" in tab.run("document.querySelector('.tip p').innerText")
    assert tab.run("document.querySelector('.tip').hidden") is False
    tab.run("document.querySelector('.chart').scrollIntoView({behavior: 'instant'})")
    tab.tap(*tab.run(center.format("document.querySelector('.chart svg')")))
    assert tab.run("document.querySelector('.tip').hidden") is True  # a tap elsewhere
    assert "step" in tab.run("document.querySelector('.chart small').textContent")


@pytest.mark.parametrize("width", [360, 768, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_the_window_and_has_readable_contrast(tab: Tab, tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(a_page(["a" * 150, "images/of a cat.jpg"])))
    tab.open(path.as_uri(), width=width, dark=dark)
    assert tab.run("document.documentElement.scrollWidth") <= width
    heights = tab.run("Array.from(document.querySelectorAll('section'), s => s.getBoundingClientRect().height)")
    assert len(heights) == 9  # one is the row of cards
    assert min(heights) > 60
    assert tab.run("Array.from(document.images).every(i => i.complete && i.naturalWidth > 0 && i.width > 40)")
    low_contrast = tab.run(
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
    assert low_contrast == []
