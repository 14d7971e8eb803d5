from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from snclr.evaluation.results import Neighbor, NeighborRow
from snclr.reports.accuracies import by_test_set
from snclr.reports.classes import ClassTable
from snclr.reports.curves import METRICS
from snclr.reports.embedding_map import TILE, build_map
from snclr.reports.page import MAX_SKIPPED, NeighborSection, Page, render, render_overlay, render_within
from snclr.reports.run_state import COMPLETE, RunState
from snclr.reports.text import visible
from snclr.reports.thumbnails import thumbnail_uri
from tests.helpers.report_page import HOSTILE, ParsedPage

LINES = [
    {"step": 10 * n, "epoch": n / 2, "loss": 5.0 - n / 10, "lr": 0.1, "spread": 0.9, "effective_rank": 12.0 + n,
     "neighbor_purity": n / 40, "queue_knn": n / 30, "positiveness_entropy": 0.9, "neighbor_age": float(n)}
    for n in range(1, 21)
]  # fmt: skip
IMAGE_URI = thumbnail_uri(np.zeros((8, 8, 3), np.uint8), 128)


def page(names: list[str], **changes: Any) -> Page:
    """A full page in which every name is one of `names`."""
    some = [names[n % len(names)] for n in range(max(6, len(names)))]
    near = [Neighbor(one, n, 0.8, 1.0 - n / 10, one, n % 2 == 0) for n, one in enumerate(some[:3])]
    rows = [NeighborRow(one, n, one, near) for n, one in enumerate(some)] + [NeighborRow(some[0], -1, None, near)]
    uris = {-1: None, **dict.fromkeys(range(len(some)), IMAGE_URI)}
    points = np.random.default_rng(0).normal(size=(len(some), 2))
    tiles = np.random.default_rng(0).integers(0, 256, (len(some), TILE, TILE, 3), dtype=np.uint8)
    full = Page(
        names[0], state=COMPLETE, settings={"epochs": 10, **{one: one for one in some}, "data": some[0],
        "method": some[1], "encoder": some[2], "recipe": some[3]}, records=LINES,
        results=[{"kind": one, "numbers": {one: 0.5, "top1": 0.731}, "protocol": one, "time": one} for one in some],
        classes=ClassTable(some[:3], np.array([[3, 1, 0], [0, 2, 2], [0, 0, 0]]), some[0]),
        skipped=[{"index": 0, "key": one, "reason": one} for one in some],
        neighbors=NeighborSection(rows, uris, some[0], [0.5, None, 0.25], "how w is computed"),
        map=build_map(points, some, list(some), tiles, "p"),
        sessions=[{"event": "start", "time": some[0], "command": one, "device": one, "cores": 2, "threads": 2,
                   "ranks": 2, "versions": {one: one}, "seconds": 61.0} for one in some[:2]],
        images=1234, alerts=[some[0]], written="2030-01-02",
    )  # fmt: skip
    return replace(full, **changes)


def test_hostile_names_add_no_element_and_no_attribute() -> None:
    # Letters in place of all signs except those at which commands and protocols are split.
    plain = [f"{n:02d}" + re.sub(r"[^ ;:]", "x", one)[2:] for n, one in enumerate(HOSTILE)]
    harmless = ParsedPage(render(page(plain)))
    hostile = ParsedPage(render(page(HOSTILE)))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert [sorted(attributes) for _, attributes in hostile.elements] == [sorted(a) for _, a in harmless.elements]
    for one in HOSTILE:
        assert visible(one) in hostile.text()


def test_no_attribute_loads_or_runs_anything() -> None:
    for tag, attributes in ParsedPage(render(page(HOSTILE))).elements:
        assert tag not in ("iframe", "object", "embed", "base", "form", "audio", "video")
        assert tag != "a" or "href" in attributes
        for key, value in attributes.items():
            assert not key.startswith("on")
            assert key not in ("style", "srcset", "action", "xlink:href", "background", "ping", "data")
            if key == "href":
                assert re.fullmatch(r"#[a-z-]+|data:,", value or "")
            if key == "src":
                assert tag == "img"
                assert re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", value or "")


def test_the_content_security_policy_allows_only_the_style_and_the_script() -> None:
    html = render(page(HOSTILE))
    parsed = ParsedPage(html)
    (meta,) = [one for one in parsed.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in (meta["content"] or "").split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    for rule, content in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    kinds = [one.get("type") for one in parsed.all("script")]
    assert kinds == ["application/json", "application/json", None]
    assert not re.findall(r"@import|url\((?!\"? ?\+)|https?:|fetch|XMLHttp|innerHTML|eval", style + script)


def test_the_page_shows_the_logged_numbers() -> None:
    parsed = ParsedPage(render(page(["n"])))
    data = parsed.data("curves-data")
    for metric in METRICS[:8]:
        (line,) = data[metric.name]["lines"]
        assert line["value"] == [pytest.approx(record[metric.name], rel=1e-5) for record in LINES]
        assert line["step"] == [record["step"] for record in LINES]
    assert [one["data-metric"] for one in parsed.all("figure", "chart")] == [metric.name for metric in METRICS[:8]]
    text = parsed.text()
    for expected in ("73.1%", "73.10%", "50.0%", "25.0%", "w = 0.900", "cosine 0.80", "1,234 images of"):
        assert expected in text.replace("\u202f", " ")


def test_the_page_shows_command_machine_and_wall_time() -> None:
    session = {
        "event": "start", "time": "2030-01-02T03:04:05+00:00", "command": "snclr pretrain --data 'my photos'",
        "device": "Fast CPU", "cores": 8, "threads": 4, "ranks": 2, "versions": {"torch": "9.9"}, "seconds": 3600.0,
    }  # fmt: skip
    resumed = {**session, "command": "snclr pretrain --resume", "time": "2030-01-03T00:00:00+00:00", "seconds": 120.0}
    text = ParsedPage(render(page(["n"], sessions=[session, resumed]))).text()
    for expected in (
        "snclr pretrain --data 'my photos'", "snclr pretrain --resume", "1:02:00", "2030-01-02 03:04:05",
        "Fast CPU, cores: 8, threads: 4, ranks: 2", "torch 9.9",
    ):  # fmt: skip
        assert expected in text
    assert "over 1:00:00" in render(page(["n"], sessions=[session, {**resumed, "seconds": None}]))


def test_classes_have_accuracies_intervals_and_confusions() -> None:
    matrix = np.array([[9, 1, 0], [4, 5, 1], [0, 0, 0]])
    parsed = ParsedPage(render(page(["n"], classes=ClassTable(["cat", "dog", "owl"], matrix, "kNN"))))
    words = " ".join(parsed.text().split())
    assert "cat90.0% 60% to 98%10 dog50.0%" in words  # the Wilson interval of 9 of 10
    assert "dog classified as cat: 4 of 10cat classified as dog: 1 of 10dog classified as owl: 1 of 10" in words
    assert "owl0.0%" not in words  # without test images
    cells = [(cell["title"], cell["class"]) for cell in parsed.all("td") if cell.get("title")]
    assert cells[:3] == [("9 of 10", "h5"), ("1 of 10", "h1"), ("0 of 10", "h0")]
    many = ClassTable([f"class {n}" for n in range(50)], np.eye(50, dtype=np.int64), "kNN")
    parsed = ParsedPage(render(page(["n"], classes=many)))
    assert parsed.all("table", "confusion") == []
    assert "The best and the worst classes of 50." in parsed.text()


def test_images_have_alt_text_and_tables_have_headers() -> None:
    parsed = ParsedPage(render(page(["n"])))
    assert all(one.get("alt") for one in parsed.all("img"))
    assert all(one.get("aria-label") or one.get("aria-hidden") for one in parsed.all("svg"))
    assert all(one.get("scope") in ("row", "col") for one in parsed.all("th"))
    assert ("html", {"lang": "en"}) in parsed.elements


def test_missing_sections_state_the_reason() -> None:
    bare = Page(
        "r", RunState("in progress", "no encoder yet"),
        missing={
            "configuration": "no settings <here>", "curves": "no lines yet", "neighbors": "no checkpoint yet",
            "map": "images are gone",
        },
    )  # fmt: skip
    html = render(bare)
    reasons = ("no settings &lt;here&gt;", "no lines yet", "no checkpoint yet", "images are gone")
    for expected in (*reasons, "in progress", "skipped.jsonl is empty"):
        assert expected in html
    assert not any(bare.included().values())
    assert ParsedPage(html).data("curves-data") == {}
    logged = replace(bare, missing={**bare.missing, "curves": ""})
    assert "nothing was logged yet" in render(logged)
    assert "no numbers that can be drawn" in render(replace(logged, records=[{"step": 1}]))


def test_a_run_with_one_logged_step_has_no_empty_charts() -> None:
    parsed = ParsedPage(render(page(["n"], records=LINES[:1])))
    assert parsed.all("figure", "chart") == []
    assert "Every metric was logged once, and a curve needs two values (see --log-every): loss 4.9," in parsed.text()


SETS = {
    "held out": ("pets, 20% of each class held out for the test (seed 0)", 120),
    "other": ("train pets, test demo", 1200),
}


def test_accuracies_are_grouped_by_test_set() -> None:
    results = [
        {"kind": kind, "numbers": {"top1": top1}, "protocol": "a; b (c)", "data": SETS[tested][0], "n": SETS[tested][1]}
        for kind, top1, tested in [
            ("knn", 0.1, "held out"), ("linear-cached", 0.5, "held out"), ("knn", 0.405, "other"),
            ("knn", 0.375, "held out"),
        ]
    ]  # fmt: skip
    results[2]["baselines"], results[2]["chance"] = {"raw_pixels": {"top1": 0.31, "top5": None}}, 0.2
    text = ParsedPage(render(page(["n"], results=results))).text().replace("\u202f", " ")
    words = " ".join(text[: text.index("Top-1 accuracy, newest")].split())
    assert "The 95 % interval is binomial over test images, also for few-shot results" in text
    held_out, other = words.index("held out for the test (seed 0) n = 120"), words.index("test demo n = 1,200")
    assert held_out < other  # the set of the newest result comes first
    # The standard error is sqrt(p (1 - p) / n), the interval that of Wilson.
    assert "kNN37.5% ± 4.4 95 % interval 29.4 to 46.4 linear probe50.0% ± 4.6" in words[held_out:other]
    assert "kNN40.5% ± 1.4" in words[other:]
    assert "raw pixels 31.0%chance 20.0%" in words[other:]
    assert "10.0%" not in words  # an older result of the same kind and test set


def test_a_folder_with_and_without_a_slash_is_one_test_set() -> None:
    sets = "train photos{0}, test more/test{0}"
    results = [
        {"kind": "knn", "numbers": {"top1": 0.5}, "protocol": "kNN: k = 3", "data": sets.format("/")},
        {"kind": "linear-cached", "numbers": {"top1": 0.6}, "protocol": "linear", "data": sets.format("")},
    ]
    (tested, kinds), *others = by_test_set(results).items()
    assert (tested.name, [accuracy.kind for accuracy in kinds]) == (
        "train photos, test more/test", ["knn", "linear-cached"]
    )  # fmt: skip
    assert others == []


def test_the_purity_of_training_has_its_chance_level_if_classes_are_known() -> None:
    lines = [{**line, "neighbor_purity": 0.4, "queue_knn": 0.5} for line in LINES]
    chance = {"neighbor_purity": 0.208, "queue_knn": 0.25}
    parsed = ParsedPage(render(page(["n"], records=lines, chance=chance)))
    text = " ".join(parsed.text().split())
    assert "neighbor purity40.0%last logged step; chance 20.8%" in text
    assert len(parsed.all("line", "chance")) == 2
    assert "chance 25.0%" in text  # in the chart of the queue's kNN accuracy
    assert "chance" not in ParsedPage(render(page(["n"], records=lines))).text()


def test_overlaid_runs_on_the_same_data_have_the_chance_level_of_neighbor_purity() -> None:
    lines = [{**line, "neighbor_purity": 0.4} for line in LINES]

    def shown(*chances: float) -> str:
        runs = [Page(f"run-{n}", COMPLETE, records=lines, chance={"neighbor_purity": chance})
                for n, chance in enumerate(chances)]  # fmt: skip
        return " ".join(ParsedPage(render_overlay(runs)).text().split())

    assert shown(0.208, 0.208).count("chance 20.8%") == 3  # two cells of the table and the line of the chart
    different = shown(0.208, 0.1)
    assert (different.count("chance 20.8%"), different.count("chance 10.0%")) == (1, 1)


def test_a_repeated_evaluation_is_listed_once() -> None:
    result = {"kind": "knn", "numbers": {"top1": 0.5}, "protocol": "k = 7", "n": 100}
    repeated = [{**result, "time": f"2026-01-0{day}"} for day in (1, 2)]
    text = " ".join(ParsedPage(render(page(["n"], results=[*repeated, {**result, "n": 90}]))).text().split())
    assert "2026-01-02" in text
    assert "2026-01-01" not in text


def test_neighbor_purity_has_its_chance_level_and_unreadable_images_a_name() -> None:
    record = {
        "kind": "neighbors", "numbers": {"neighbor_purity_at_1": 0.35}, "chance": 0.208, "protocol": "the 5 nearest",
    }  # fmt: skip
    knn = {"kind": "knn", "numbers": {"top1": 0.5}, "protocol": "kNN: k = 3", "skipped": 3}
    text = " ".join(ParsedPage(render(page(["n"], results=[record, knn]))).text().split())
    assert "chance 20.8%" in text
    assert "unreadable images 3" in text
    assert "skipped 3" not in text


def test_the_recorded_error_and_number_of_images_win() -> None:
    record = {
        "kind": "knn", "numbers": {"top1": 0.5}, "protocol": "p", "n": 50, "standard_error": 0.123, "chance": {"x": 1},
    }  # fmt: skip
    text = ParsedPage(render(page(["n"], results=[record]))).text().replace("\u202f", " ")
    assert "n = 50" in text
    assert "± 12.3" in text


def test_an_accuracy_shows_its_warnings_and_the_k_that_was_used() -> None:
    record = {
        "kind": "knn", "numbers": {"top1": 0.5}, "chance": 0.2, "k": 80, "settings": {"k": 200},
        "warnings": ["it was trained on; --test helps"],
        "protocol": "kNN: cosine",
    }  # fmt: skip
    html = render(page(["n"], results=[record]))
    text = " ".join(ParsedPage(html).text().replace("\u202f", " ").split())
    assert "k = 80 (200 requested)" in text
    assert "kNN: it was trained on; --test helps." in text
    assert "chance 20.0%" in text
    assert "0.2" not in text
    assert '<span class="flag">--test</span>' in html


def test_a_stopped_run_says_where_it_stopped_and_how_to_continue() -> None:
    stopped = RunState("stopped", "at step 8", "snclr pretrain --resume --out 'my run'")
    text = " ".join(ParsedPage(render(page(["n"], state=stopped))).text().split())
    assert "Training stopped at step 8. To continue, run snclr pretrain --resume --out 'my run'." in text


def test_sections_are_dropped_until_the_page_fits() -> None:
    whole = page([f"n{i}" for i in range(40)])
    size = len(render(whole).encode())
    html, shown = render_within(whole, size)
    assert (html, shown) == (render(whole), whole)
    html, shown = render_within(whole, size - 1)
    assert shown.included()["map"]
    assert ParsedPage(html).data("map-data")["sprite"] is None
    html, shown = render_within(whole, len(html.encode()) - 1)
    assert "exceed 5 MB" in html
    assert (shown.included()["map"], shown.included()["neighbors"]) == (False, True)
    html, shown = render_within(whole, 10)
    assert not shown.included()["neighbors"]
    assert shown.included()["curves"]


def test_long_lists_are_truncated_and_counted() -> None:
    bad = [{"index": n, "key": f"bad-{n}.jpg", "reason": "r"} for n in range(1500)]
    html = render(page(["n"], skipped=bad))
    assert "replaced by others" in html
    assert "left out" not in html
    assert html.count(".jpg<") == MAX_SKIPPED
    assert "The first 100 of 1,500" in html
    assert "1,500 images were" in html


@pytest.mark.parametrize(
    "record", [{"kind": "k", "numbers": {"a": None, "b": "x", "top1": 10**400, "c": [1]}}, {"kind": "", "numbers": {}}]
)
def test_malformed_results_are_shown(record: dict[str, Any]) -> None:
    html = render(page(["n"], results=[record]))
    assert "protocol not recorded" in html
