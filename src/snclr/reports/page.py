"""The report of one run or several as one self-contained HTML page that loads nothing from the network."""

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from snclr import __version__
from snclr.evaluation.results import TITLES, NeighborRow
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
class Page:
    """What a report shows about a run: its files, and the sections that are computed from its images."""

    run: str
    """Name of the run."""
    state: RunState
    settings: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[dict[str, Any]] = ()
    """The lines of metrics.jsonl."""
    invalid_lines: int = 0
    """Lines of metrics.jsonl that are not records."""
    results: Sequence[Mapping[str, Any]] = ()
    classes: ClassTable | None = None
    """Accuracy by class; None without a kNN result."""
    skipped: Sequence[Mapping[str, Any]] = ()
    neighbors: NeighborSection | None = None
    map: EmbeddingMap | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a section is left out, by its name: configuration, curves, neighbors, map, classes."""
    images: int | None = None
    """Number of training images, if known."""
    chance: Mapping[str, float] = field(default_factory=dict)
    """Chance levels by the name of the metric, if the classes of the training images are known."""
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
        parts: dict[str, Any] = {
            "curves": self.records, "neighbors": self.neighbors, "map": self.map, "evaluations": self.results,
            "configuration": self.settings,
        }  # fmt: skip
        return {name: bool(part) for name, part in parts.items()}

    @property
    def epochs(self) -> tuple[str, str] | None:
        """The epochs trained so far and, if known, "of" how many, as text; None if nothing was logged."""
        epoch, total = self.records[-1].get("epoch") if self.records else None, self.settings.get("epochs")
        if not is_finite_number(epoch):
            return None
        return format_number(epoch), f"of {format_number(total)}" if is_finite_number(total) else ""  # type: ignore[arg-type]

    @property
    def wall_time(self) -> str:
        """The training time over all sessions, as text; one that was killed did not record its time."""
        seconds = [session.get("seconds") for session in self.sessions]
        total = duration(sum(value for value in seconds if is_finite_number(value)))  # type: ignore[misc]
        return "–" if not seconds else total if all(map(is_finite_number, seconds)) else f"over {total}"


def render_within(page: Page, max_bytes: int = MAX_BYTES) -> tuple[str, Page]:
    """Render a page of at most `max_bytes`, and return it with the content it shows.

    The map's thumbnails are dropped first, then the map, then the neighbors.
    """
    candidates = [page]
    if page.map is not None:
        candidates.append(replace(page, map=replace(page.map, data={**page.map.data, "sprite": None})))
        candidates.append(replace(page, map=None, missing={**page.missing, "map": _TOO_LARGE}))
    if page.neighbors is not None:
        missing = {**candidates[-1].missing, "neighbors": _TOO_LARGE}
        candidates.append(replace(candidates[-1], neighbors=None, missing=missing))
    for shown in candidates:
        html = render(shown)
        if len(html.encode()) <= max_bytes:
            break
    return html, shown


def render(page: Page) -> str:
    """Render the page to HTML."""
    charts, logged = curves.build_charts(page.records, chance=page.chance), curves.last_values(page.records)
    missing = dict(page.missing)
    if not logged and not missing.get("curves"):
        missing["curves"] = (
            "metrics.jsonl has no numbers that can be drawn" if page.records else "nothing was logged yet"
        )
    drawn = {chart.metric.name for chart in charts}
    return environment().get_template("report.html").render(
        page=page, missing=missing, charts=charts, chart_data=chart_data(charts), logged=logged,
        single_values=[(metric.title, value) for name, (metric, value) in logged.items() if name not in drawn],
        line_description=curves.describe_lines(charts) if charts else "", results=_without_repeats(page.results),
        how_it_ran=_how_it_ran(page),
        accuracies=list(accuracies.by_test_set(page.results).items())[:MAX_TEST_SETS],
    )  # fmt: skip


def render_overlay(runs: Sequence[Page]) -> str:
    """Render the page of several runs, with common charts and a column per run, to HTML."""
    levels = [run.chance for run in runs if run.chance]
    chance = levels[0] if levels and all(level == levels[0] for level in levels) else None
    charts = curves.build_charts(*(run.records for run in runs), chance=chance)
    return environment().get_template("overlay.html").render(
        runs=runs, charts=charts, chart_data=chart_data(charts), line_description=curves.describe_lines(charts),
        last=[curves.last_values(run.records) for run in runs], accuracies=_accuracies_by_kind(runs),
        warnings=_warnings(runs), settings=_different_settings(runs), written=runs[0].written,
    )  # fmt: skip


def _accuracies_by_kind(
    runs: Sequence[Page],
) -> list[tuple[accuracies.EvalSet, list[tuple[str, list[accuracies.Accuracy | None]]]]]:
    """Return, for each test set, the kinds of evaluation with the newest accuracy of each run."""
    by_run = [accuracies.by_test_set(run.results) for run in runs]
    sets = dict.fromkeys(tested for one in by_run for tested in one)
    rows = []
    for tested in sets:
        found = [{accuracy.title: accuracy for accuracy in one.get(tested, [])} for one in by_run]
        kinds = dict.fromkeys(title for one in found for title in one)
        rows.append((tested, [(title, [one.get(title) for one in found]) for title in kinds]))
    return rows


def _warnings(runs: Sequence[Page]) -> list[tuple[str, str]]:
    """Return every warning of the shown accuracies once, with the runs and kinds of evaluation it belongs to."""
    titles: dict[str, dict[str, None]] = {}
    for run in runs:
        for cards in accuracies.by_test_set(run.results).values():
            for kinds, warning in accuracies.warnings_of(cards):
                titles.setdefault(warning, {})[f"{run.run} ({kinds})"] = None
    return [(", ".join(of), warning) for warning, of in titles.items()]


def _different_settings(runs: Sequence[Page]) -> list[tuple[str, list[Any]]]:
    """Return the settings that are not the same in all runs, with a value per run ("–": the run does not have it)."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "out")
    rows = [(name, [run.settings.get(name, "–") for run in runs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


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
        "accuracy_of": accuracies.accuracy_of, "warnings_of": accuracies.warnings_of, "kinds": TITLES,
        "curves": curves, "map_module": embedding_map, "image_side": SIDE,
        "policy": content_security_policy(), "style": Markup(_asset("report.css")),
        "script": Markup(_asset("report.js")), "max_results": MAX_RESULTS, "max_skipped": MAX_SKIPPED,
        "max_matrix": MAX_MATRIX, "headline": HEADLINE, "version": __version__,
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


def _how_it_ran(page: Page) -> list[tuple[str, str]]:
    """Return name and text of what is known about the sessions; machine and versions are those of the last one."""
    if not page.sessions:
        return []
    commands = list(dict.fromkeys(str(session.get("command") or "Python API") for session in page.sessions))
    first, last = page.sessions[0], page.sessions[-1]
    counted = ["cores", "threads", *(["ranks"] if last.get("ranks", 1) != 1 else [])]
    hardware = [str(last.get("device", "unknown")), *(f"{name}: {last.get(name, '?')}" for name in counted)]
    versions = last.get("versions")
    known = [f"{name} {value}" for name, value in versions.items()] if isinstance(versions, dict) else ["not recorded"]
    return [
        *(("command", command) for command in commands[:5]),
        ("started (UTC)", str(first.get("time", "")).replace("T", " ").split("+")[0]),
        ("wall time", page.wall_time), ("starts", f"{len(page.sessions):,}"),
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
