"""The report of a run as one self-contained HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from snclr.evaluation.results import NeighborRow
from snclr.io.jsonl import is_finite_number
from snclr.reports import accuracies, curves, embedding_map
from snclr.reports.classes import MAX_MATRIX, ClassTable
from snclr.reports.embedding_map import EmbeddingMap
from snclr.reports.run_state import RunState
from snclr.reports.text import format_number, visible
from snclr.runtime.progress import duration

MAX_BYTES = 5_000_000
"""Largest page, small enough for an email; sections that do not fit are left out, with a note."""
MAX_RESULTS = MAX_SKIPPED = 100
"""Rows of the tables of evaluations and bad images."""
MAX_TEST_SETS = 6
"""Test sets with a row of cards; the table of evaluations has all."""
_TOO_LARGE = f"left out: the page would exceed {MAX_BYTES / 1e6:.0f} MB. Use fewer images (--images, --rows)"
HEADLINE = ("loss", "neighbor_purity", "effective_rank")
"""Metrics whose last value is shown above the charts."""
SIDE = 128
"""Pixels of an image with neighbors; smaller images are embedded at their own size."""


@dataclass(frozen=True)
class NeighborSection:
    """Query images with their neighbors by decreasing w."""

    rows: Sequence[NeighborRow]
    uris: Mapping[int, str | None]
    """Data URIs by the index of the image; None for an image that cannot be read."""
    protocol: str
    neighbor_purity: list[float | None]
    """Share of queries whose 1st, 2nd, … neighbor has their class; None without labels."""
    weights: str | None = None
    """How w is computed; None if the run's loss has no w, which is then not shown."""
    chance: float | None = None
    """Chance level of the neighbor purity, if there are labels."""


@dataclass(frozen=True)
class Missing:
    """The reason why a section is empty."""

    reason: str


@dataclass(frozen=True)
class Page:
    """The content of a report."""

    run: str
    version: str
    state: RunState
    settings: Mapping[str, Any] | Missing
    records: Sequence[dict[str, Any]] | Missing
    """The lines of metrics.jsonl."""
    invalid_lines: int = 0
    """Lines of metrics.jsonl that are not records."""
    results: Sequence[Mapping[str, Any]] = ()
    classes: ClassTable | Missing | None = None
    """Accuracy by class; None without a kNN result."""
    skipped: Sequence[Mapping[str, Any]] = ()
    neighbors: NeighborSection | Missing = Missing("not requested")
    map: EmbeddingMap | Missing = Missing("not requested")
    images: int | None = None
    """Number of training images, if known."""
    purity_chance: float | None = None
    """Neighbor purity of random training images, if their classes are known."""
    sessions: Sequence[Mapping[str, Any]] = ()
    """The starts of the training, oldest first: see `snclr.train.sessions`."""
    alerts: Sequence[str] = ()
    explore_link: str | None = None
    """Address of a static explorer folder, relative to the page."""
    explore_command: str = "snclr explore RUN"
    written: str = ""
    """Time of writing; empty leaves it out."""

    def included(self) -> dict[str, bool]:
        """Return which sections the page has."""
        return {name: bool(part) and not isinstance(part, Missing) for name, part in self._parts().items()}

    def missing(self) -> dict[str, str]:
        """Return why sections are missing."""
        return {name: part.reason for name, part in self._parts().items() if isinstance(part, Missing)}

    def _parts(self) -> dict[str, Any]:
        parts = {"curves": self.records, "neighbors": self.neighbors, "map": self.map}
        return {**parts, "evaluations": self.results, "configuration": self.settings}


def render_within(page: Page, max_bytes: int = MAX_BYTES) -> tuple[str, Page]:
    """Render a page of at most `max_bytes`, and return it with the content it shows.

    The map's thumbnails are dropped first, then the map, then the neighbors.
    """
    candidates = [page]
    if isinstance(page.map, EmbeddingMap):
        candidates.append(replace(page, map=replace(page.map, data={**page.map.data, "sprite": None})))
        candidates.append(replace(page, map=Missing(_TOO_LARGE)))
    if isinstance(page.neighbors, NeighborSection):
        candidates.append(replace(candidates[-1], neighbors=Missing(_TOO_LARGE)))
    for shown in candidates:
        html = render(shown)
        if len(html.encode()) <= max_bytes:
            break
    return html, shown


def render(page: Page) -> str:
    """Render the page to HTML."""
    records = () if isinstance(page.records, Missing) else page.records
    chance = {} if page.purity_chance is None else {"neighbor_purity": page.purity_chance}
    charts, logged = curves.build_charts(records, chance=chance), curves.last_values(records)
    missing = page.missing()
    if not logged:
        why = "metrics.jsonl has no numbers that can be drawn" if records else "nothing was logged yet"
        missing.setdefault("curves", why)
    drawn = {chart.metric.name for chart in charts}
    return environment().get_template("report.html").render(
        page=page, missing=missing, settings={} if isinstance(page.settings, Missing) else page.settings,
        tiles=_tiles(page, records, logged, chance), charts=charts, chart_data=chart_data(charts),
        single_values=[(metric.title, value) for name, (metric, value) in logged.items() if name not in drawn],
        line_description=curves.describe_lines(charts) if charts else "",
        map=None if isinstance(page.map, Missing) else page.map, results=_without_repeats(page.results),
        class_table=page.classes if isinstance(page.classes, ClassTable) else None,
        class_reason=page.classes.reason if isinstance(page.classes, Missing) else "",
        how_it_ran=_how_it_ran(page.sessions),
        accuracies=list(accuracies.by_test_set(page.results).items())[:MAX_TEST_SETS],
    )  # fmt: skip


def content_security_policy() -> str:
    """Return the policy: our own style and script by hash, embedded images, nothing else.

    Markup that escaping missed could therefore neither run nor load anything.
    """
    return (
        f"default-src 'none'; img-src data:; style-src '{_sha256(_asset('report.css'))}'; "
        f"script-src '{_sha256(_asset('report.js'))}'; base-uri 'none'; form-action 'none'"
    )


@functools.cache
def environment() -> Environment:
    """Return the template environment: autoescaping, and invisible characters of every string shown by their codes."""
    env = Environment(
        loader=PackageLoader("snclr.reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: visible(value) if type(value) is str else value,
    )  # fmt: skip
    env.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    env.filters |= {"clip": visible, "number": format_number, "score": _score, "setting": _setting}
    env.filters |= {"clauses": accuracies.clauses, "flags": _flags}
    env.tests["finite"] = is_finite_number
    env.globals |= {
        "accuracy_of": accuracies.accuracy_of, "warnings_of": accuracies.warnings_of, "kinds": accuracies.KINDS,
        "curves": curves, "map_module": embedding_map, "image_side": SIDE,
        "policy": content_security_policy(), "style": Markup(_asset("report.css")),
        "script": Markup(_asset("report.js")), "max_results": MAX_RESULTS, "max_skipped": MAX_SKIPPED,
        "max_matrix": MAX_MATRIX,
    }  # fmt: skip
    return env


def _without_repeats(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the results, newest first, without those that a newer one repeats."""
    newest: dict[str, Mapping[str, Any]] = {}
    for result in reversed(results):
        newest.setdefault(repr({name: value for name, value in result.items() if name != "time"}), result)
    return list(newest.values())


def chart_data(charts: Sequence[curves.Chart]) -> dict[str, Any]:
    """Return what the script reads: the points of every line by metric."""
    return {c.metric.name: {"share": c.metric.share, "lines": [line.points for line in c.lines]} for c in charts}


def _tiles(
    page: Page, records: Sequence[dict[str, Any]], logged: Mapping[str, tuple[curves.Metric, str]],
    chance: Mapping[str, float],
) -> list[tuple[str, str, str]]:  # fmt: skip
    """Return name, value and note of each headline number."""
    tiles = [("state", page.state.title, page.state.note)]
    if epochs := trained_epochs(records, {} if isinstance(page.settings, Missing) else page.settings):
        tiles.append(("epochs", *epochs))
    tiles += [
        (metric.title.lower(), last,
         "last logged step" + (f"; chance {metric.format(chance[name])}" if name in chance else ""))
        for name, (metric, last) in logged.items() if name in HEADLINE
    ]  # fmt: skip
    if page.sessions:
        tiles.append(("wall time", wall_time(page.sessions), "training only"))
    return [*tiles, ("unreadable images", f"{len(page.skipped):,}", "replaced by others" if page.skipped else "")]


def trained_epochs(records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the epochs trained so far and, if known, "of" how many, as text; None if nothing was logged."""
    epoch, total = records[-1].get("epoch") if records else None, settings.get("epochs")
    if not is_finite_number(epoch):
        return None
    return format_number(epoch), f"of {format_number(total)}" if is_finite_number(total) else ""  # type: ignore[arg-type]


def wall_time(sessions: Sequence[Mapping[str, Any]]) -> str:
    """Return the training time over all sessions, as text; one that was killed did not record its time."""
    seconds = [session.get("seconds") for session in sessions]
    total = duration(sum(value for value in seconds if is_finite_number(value)))  # type: ignore[misc]
    return total if all(map(is_finite_number, seconds)) else f"over {total}"


def _how_it_ran(sessions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return name and text of what is known about the sessions; machine and versions are those of the last one."""
    if not sessions:
        return []
    commands = list(dict.fromkeys(str(session.get("command") or "Python API") for session in sessions))
    last = sessions[-1]
    hardware = [
        str(last.get("device", "unknown")),
        f"cores: {last.get('cores', '?')}",
        f"threads: {last.get('threads', '?')}",
    ]
    if last.get("ranks", 1) != 1:
        hardware.append(f"ranks: {last['ranks']}")
    versions = last.get("versions")
    known = [f"{name} {value}" for name, value in versions.items()] if isinstance(versions, dict) else ["not recorded"]
    started = str(sessions[0].get("time", "")).replace("T", " ").split("+")[0]
    return [
        *(("command", command) for command in commands[:5]),
        ("started (UTC)", started), ("wall time", wall_time(sessions)), ("starts", f"{len(sessions):,}"),
        ("hardware", ", ".join(hardware)), ("versions", ", ".join(known)),
    ]  # fmt: skip


def _score(value: float, name: str) -> str:
    """Format a result: accuracies and shares as percent."""
    is_share = name.startswith(("top", "neighbor_purity_at_", "same_class_at_", "accuracy")) and 0 <= value <= 1
    return f"{value:.2%}" if is_share else format_number(value)


def _flags(text: str) -> Markup:
    """Keep the flags in a text from being broken at a hyphen."""
    flag = Markup('<span class="flag">{}</span>')
    return Markup(" ").join(flag.format(word) if word.startswith("--") else escape(word) for word in text.split())


def _setting(value: object) -> str:
    """Format a setting as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value, default=str)


@functools.cache
def _asset(name: str) -> str:
    return files("snclr.reports").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _sha256(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
