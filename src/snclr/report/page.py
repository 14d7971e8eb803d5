"""One self-contained page about a run. It asks nothing of the network, and shows names without ever obeying them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from snclr.json_values import is_number
from snclr.report.curves import METRICS, MORE_METRICS, draw_all, line_words, read_series, value_words
from snclr.report.embedding_map import EmbeddingMap, draw_map
from snclr.report.gallery import Gallery, draw_gallery
from snclr.report.markup import data_block, escape, figure, name
from snclr.report.page_style import SCRIPT, STYLE
from snclr.report.tables import headline, lines_table, results_table, settings_table, skipped_table

MOST_BYTES = 5_000_000
"""A page stays small enough to be sent by mail; what does not fit is left out, and the page says so."""
_TOO_LARGE = (
    f"left out: the page would be larger than {MOST_BYTES / 1e6:.0f} MB. Ask for fewer images (--images, --rows)"
)


@dataclass(frozen=True)
class Missing:
    """Why a section is not there."""

    why: str


@dataclass(frozen=True)
class Page:
    """All that a page says of a run."""

    run: str
    version: str
    complete: bool
    settings: Mapping[str, Any] | Missing
    records: Sequence[dict[str, Any]] | Missing
    """The lines of metrics.jsonl."""
    results: Sequence[Mapping[str, Any]] = ()
    skipped: Sequence[Mapping[str, Any]] = ()
    gallery: Gallery | Missing = field(default_factory=lambda: Missing("not asked for"))
    map: EmbeddingMap | Missing = field(default_factory=lambda: Missing("not asked for"))
    images: int | None = None
    """How many images the run's data have, where that is known."""
    alerts: Sequence[str] = ()
    written: str = ""
    """When, in words; empty leaves it out."""

    def included(self) -> dict[str, bool]:
        """Which sections the page has."""
        return {
            "curves": bool(self.records) and not isinstance(self.records, Missing),
            "neighbors": isinstance(self.gallery, Gallery),
            "map": isinstance(self.map, EmbeddingMap),
            "evaluations": bool(self.results),
            "configuration": not isinstance(self.settings, Missing),
        }

    def missing(self) -> dict[str, str]:
        """Why the others are not there."""
        parts = {"curves": self.records, "neighbors": self.gallery, "map": self.map, "configuration": self.settings}
        return {key: part.why for key, part in parts.items() if isinstance(part, Missing)}


def render_within(page: Page, most: int = MOST_BYTES) -> tuple[str, Page]:
    """The page and what it shows, without the pictures on the map, then the map, then the gallery, until it fits."""
    smaller = [page]
    if isinstance(page.map, EmbeddingMap):
        smaller.append(replace(page, map=replace(page.map, tiles=None)))
        smaller.append(replace(page, map=Missing(_TOO_LARGE)))
    if isinstance(page.gallery, Gallery):
        smaller.append(replace(smaller[-1], gallery=Missing(_TOO_LARGE)))
    for one in smaller:
        html = render(one)
        if len(html.encode()) <= most:
            break
    return html, one


def render(page: Page) -> str:
    """The whole page as HTML."""
    curves, points = _curves(page)
    mapped, facts = draw_map(page.map) if isinstance(page.map, EmbeddingMap) else (_missing(page.map), {})
    near = draw_gallery(page.gallery) if isinstance(page.gallery, Gallery) else _missing(page.gallery)
    sections = [
        ("evaluation", "Evaluation", "Frozen features, unless a protocol says otherwise.", _results(page)),
        ("curves", "Training", "", curves),
        ("neighbors", "Neighbours", _GALLERY_HINT, near),
        ("map-section", "Embedding map", _MAP_HINT, mapped),
        ("bad-images", "Bad images", "", _skipped(page)),
        ("configuration", "Configuration", "Every setting, as in config.yaml.", _settings(page)),
    ]
    body = "".join(
        f'<section id="{key}"><h2>{escape(title)}</h2>{f"<p class=hint>{escape(hint)}</p>" if hint else ""}{content}'
        "</section>"
        for key, title, hint, content in sections
    )
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _, _ in sections)
    data = data_block("curves-data", points) + data_block("map-data", facts or None)
    written = f"Written {escape(page.written)} by" if page.written else "Written by"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><title>{escape(page.run)} · snclr</title><style>{STYLE}</style></head>\n<body>'
        f"<header>{_top(page)}<nav aria-label=Sections>{links}</nav></header><main>{body}</main>"
        f"<footer>{written} snclr {escape(page.version)}. This page is complete in itself and loads nothing.</footer>"
        f"{data}<script>{SCRIPT}</script></body></html>\n"
    )


def policy() -> str:
    """What a browser may do with the page: this very style, this very script, embedded pictures, and nothing else.

    So even a name that slipped through as markup could neither run nor load anything.
    """
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )


_MAP_HINT = "Point at a dot for its image. Where there are classes, a click on one singles it out."
_GALLERY_HINT = (
    "An image and its nearest neighbours, with their positiveness w (the largest is 1): how much the loss counts each "
    "of them as the same thing."
)


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _top(page: Page) -> str:
    """Name, one sentence, the numbers people ask for first, and what went wrong."""
    settings = {} if isinstance(page.settings, Missing) else page.settings
    known = {key: settings[key] for key in ("method", "encoder", "data", "recipe") if settings.get(key)}
    words = []
    if "method" in known and "encoder" in known:
        words.append(f"<b>{name(known['encoder'], 60)}</b> trained with <b>{name(known['method'], 60)}</b>")
    if "data" in known:
        count = f"{page.images:,} images of " if page.images is not None else ""
        words.append(f"on {count}<b>{name(known['data'], 120)}</b>")
    if "recipe" in known:
        words.append(f"by the recipe {name(known['recipe'], 60)}")
    tiles = "".join(
        f"<div><dt>{name(key, 40)}</dt><dd>{escape(value, 40)}<small>{escape(note)}</small></dd></div>"
        for key, value, note in _tiles(page)
    )
    alerts = "".join(f"<li>{escape(alert, 400)}</li>" for alert in page.alerts)
    return (
        f"<p class=kicker>Report of a run</p><h1>{name(page.run)}</h1><p class=lead>{' '.join(words)}</p>"
        f'<dl class="tiles">{tiles}</dl>{f"<ul class=alerts>{alerts}</ul>" if alerts else ""}'
    )


def _tiles(page: Page) -> list[tuple[str, str, str]]:
    """Name, value and a word on it."""
    records = () if isinstance(page.records, Missing) else page.records
    settings = {} if isinstance(page.settings, Missing) else page.settings
    tiles = [
        (
            "state",
            "complete" if page.complete else "in progress",
            "encoder written" if page.complete else "no encoder yet",
        )
    ]
    if records and is_number(epoch := records[-1].get("epoch")):
        total = settings.get("epochs")
        whole = f"of {figure(total)}" if is_number(total) else ""  # type: ignore[arg-type]
        tiles.append(("epochs", figure(epoch), whole))  # type: ignore[arg-type]
    tiles += headline(page.results)[:4]
    for metric in METRICS:
        series = read_series(records, metric) if metric.name in ("loss", "same_class", "effective_rank") else None
        if series is not None:
            tiles.append((metric.title.lower(), value_words(series.known[-1], metric), "last logged step"))
    tiles.append(("bad images", f"{len(page.skipped):,}", "left out"))
    return tiles


def _curves(page: Page) -> tuple[str, dict[str, Any]]:
    if isinstance(page.records, Missing) or not page.records:
        return _missing(page.records), {}
    charts, points = draw_all(page.records, METRICS)
    more, further = draw_all(page.records, MORE_METRICS)
    if not points and not further:
        return _missing(Missing("metrics.jsonl has no numbers that can be drawn")), {}
    hint = f"<p class=hint>{escape(line_words(page.records, METRICS))}</p>"
    folded = f"<details><summary>More curves</summary>{more}</details>" if more else ""
    table = f"<details><summary>The numbers as a table</summary>{lines_table(page.records, METRICS)}</details>"
    return f"{hint}{charts}{folded}{table}", {**points, **further}


def _results(page: Page) -> str:
    if page.results:
        return results_table(page.results)
    return _missing(Missing("none yet. snclr knn RUN and snclr linear RUN add theirs here"))


def _skipped(page: Page) -> str:
    if page.skipped:
        count = len(page.skipped)
        words = "1 image was" if count == 1 else f"{count:,} images were"
        return f"<p class=hint>{words} left out of the training.</p>{skipped_table(page.skipped)}"
    return "<p class=hint>None: skipped.jsonl lists no image.</p>"


def _settings(page: Page) -> str:
    return _missing(page.settings) if isinstance(page.settings, Missing) else settings_table(page.settings)


def _missing(part: object) -> str:
    why = part.why if isinstance(part, Missing) else "nothing was logged yet"
    return f"<p class=missing>Not here: {escape(why, 600)}</p>"
