from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from report_page import HOSTILE, Taken

from snclr.report.curves import METRICS
from snclr.report.embedding_map import TILE, EmbeddingMap
from snclr.report.gallery import Gallery, Shown
from snclr.report.markup import picture_uri, visible
from snclr.report.page import Missing, Page, render, render_within
from snclr.report.tables import MOST_SKIPPED

LINES = [
    {"step": 10 * n, "epoch": n / 2, "loss": 5.0 - n / 10, "lr": 0.1, "spread": 0.9, "effective_rank": 12.0 + n,
     "same_class": n / 40, "queue_knn": n / 30, "positiveness_entropy": 0.9, "neighbor_age": float(n)}
    for n in range(1, 21)
]  # fmt: skip
PICTURE = picture_uri(np.zeros((8, 8, 3), np.uint8), 128)


def page(names: list[str], **changes: Any) -> Page:
    """A full page in which every name is one of `names`."""
    some = [names[n % len(names)] for n in range(max(6, len(names)))]
    near = [Shown(one, one, PICTURE, 1.0 - n / 10, 0.8, n % 2 == 0) for n, one in enumerate(some[:3])]
    rows = [(Shown(one, one, PICTURE), near) for one in some] + [(Shown(some[0], None, None), near)]
    places = np.random.default_rng(0).normal(size=(len(some), 2))
    tiles = np.random.default_rng(0).integers(0, 256, (len(some), TILE, TILE, 3), dtype=np.uint8)
    full = Page(
        names[0], "0.1.0", complete=True, settings={"epochs": 10, **{one: one for one in some}, "data": some[0],
        "method": some[1], "encoder": some[2], "recipe": some[3]}, records=LINES,
        results=[{"kind": one, "numbers": {one: 0.5, "top1": 0.731}, "protocol": one, "time": one} for one in some],
        skipped=[{"index": 0, "key": one, "reason": one} for one in some],
        gallery=Gallery(rows, some[0], [0.5, None, 0.25]),
        map=EmbeddingMap(places, (0.5, 0.2), some, list(some), tiles, "p"),
        images=1234, alerts=[some[0]], written="2030-01-02",
    )  # fmt: skip
    return replace(full, **changes)


def test_hostile_names_bring_in_no_element_and_no_attribute() -> None:
    harmless = Taken(render(page([f"name {n:02d}" for n in range(len(HOSTILE))])))
    hostile = Taken(render(page(HOSTILE)))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert [sorted(attributes) for _, attributes in hostile.elements] == [sorted(a) for _, a in harmless.elements]
    for one in HOSTILE:
        assert visible(one) in hostile.text()


def test_no_attribute_leads_out_of_the_page_or_runs_anything() -> None:
    for tag, attributes in Taken(render(page(HOSTILE))).elements:
        assert tag not in (
            "iframe",
            "object",
            "embed",
            "base",
            "form",
            "audio",
            "video",
            "a" if "href" not in attributes else "",
        )
        for key, value in attributes.items():
            assert not key.startswith("on")
            assert key not in ("style", "srcset", "action", "xlink:href", "background", "ping", "data")
            if key == "href":
                assert re.fullmatch(r"#[a-z-]+|data:,", value or "")
            if key == "src":
                assert tag == "img"
                assert re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", value or "")


def test_the_policy_allows_this_style_and_this_script_and_nothing_else() -> None:
    html = render(page(HOSTILE))
    taken = Taken(html)
    (meta,) = [one for one in taken.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in (meta["content"] or "").split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    for rule, content in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    kinds = [one.get("type") for one in taken.all("script")]
    assert kinds == ["application/json", "application/json", None]
    assert not re.findall(r"@import|url\((?!\"? ?\+)|https?:|fetch|XMLHttp|innerHTML|eval", style + script)


def test_the_numbers_on_the_page_are_those_of_the_files() -> None:
    taken = Taken(render(page(["n"])))
    data = taken.data("curves-data")
    for metric in METRICS[:8]:
        assert data[metric.name]["value"] == [pytest.approx(line[metric.name], rel=1e-5) for line in LINES]
        assert data[metric.name]["step"] == [line["step"] for line in LINES]
    assert [one["data-metric"] for one in taken.all("figure", "chart")] == [metric.name for metric in METRICS[:8]]
    text = taken.text()
    for words in ("73.1%", "73.10%", "50.0%", "25.0%", "w = 0.900", "cosine 0.80", "1,234 images of"):
        assert words in text.replace("\u202f", " ")


def test_a_table_has_the_curves_for_those_who_cannot_see_them() -> None:
    html = render(page(["n"]))
    (table,) = re.findall(r'<table class="lines">.*?</table>', html, re.DOTALL)
    rows = re.findall(r'<tr><th scope="row">([\d,]+)</th>', table)
    assert rows == [str(line["step"]) for line in LINES]
    assert ">3<" in table  # the last loss
    long = [{**LINES[0], "step": n, "loss": float(n)} for n in range(1, 1001)]
    (table,) = re.findall(r'<table class="lines">.*?</table>', render(page(["n"], records=long)), re.DOTALL)
    steps = [int(one.replace(",", "")) for one in re.findall(r'<tr><th scope="row">([\d,]+)</th>', table)]
    assert len(steps) == 40
    assert steps[-1] == 1000


def test_every_picture_has_words_and_every_table_headers() -> None:
    taken = Taken(render(page(["n"])))
    assert all(one.get("alt") for one in taken.all("img"))
    assert all(one.get("aria-label") or one.get("aria-hidden") for one in taken.all("svg"))
    assert all(one.get("scope") in ("row", "col") for one in taken.all("th"))
    assert ("html", {"lang": "en"}) in taken.elements


def test_missing_sections_say_why() -> None:
    bare = Page(
        "r", "0.1.0", complete=False, settings=Missing("no settings <here>"), records=Missing("no lines yet"),
        gallery=Missing("no checkpoint yet"), map=Missing("images are gone"),
    )  # fmt: skip
    html = render(bare)
    for words in (
        "no settings &lt;here&gt;",
        "no lines yet",
        "no checkpoint yet",
        "images are gone",
        "in progress",
        "lists no image",
    ):
        assert words in html
    assert not any(bare.included().values())
    assert set(bare.missing()) == {"curves", "neighbors", "map", "configuration"}
    assert Taken(html).data("curves-data") == {}
    assert "nothing was logged yet" in render(replace(bare, records=[]))
    assert "no numbers that can be drawn" in render(replace(bare, records=[{"step": 1}]))


def test_a_large_page_is_made_smaller_and_says_so() -> None:
    whole = page([f"n{i}" for i in range(40)])
    size = len(render(whole).encode())
    html, shown = render_within(whole, size)
    assert (html, shown) == (render(whole), whole)
    html, shown = render_within(whole, size - 1)
    assert shown.included()["map"]
    assert Taken(html).data("map-data")["sheet"] is None
    html, shown = render_within(whole, len(html.encode()) - 1)
    assert "larger than 5 MB" in html
    assert (shown.included()["map"], shown.included()["neighbors"]) == (False, True)
    html, shown = render_within(whole, 10)
    assert not shown.included()["neighbors"]
    assert shown.included()["curves"]


def test_long_lists_are_cut_and_counted() -> None:
    bad = [{"index": n, "key": f"bad-{n}.jpg", "reason": "r"} for n in range(1500)]
    html = render(page(["n"], skipped=bad))
    assert html.count(".jpg<") == MOST_SKIPPED
    assert "The first 100 of 1,500" in html
    assert "1,500 images were" in html


@pytest.mark.parametrize(
    "record", [{"kind": "k", "numbers": {"a": None, "b": "x", "top1": 10**400, "c": [1]}}, {"kind": "", "numbers": {}}]
)
def test_odd_results_do_not_stop_the_page(record: dict[str, Any]) -> None:
    html = render(page(["n"], results=[record]))
    assert "no protocol was written" in html
