"""The report of several runs: their curves in common charts, and a table of results with a column per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from snclr import __version__
from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import open_dataset
from snclr.data.labels import same_class_chance
from snclr.errors import UserError
from snclr.evaluation.results import read_results
from snclr.evaluation.session import data_of
from snclr.io.jsonl import read_jsonl
from snclr.reports import curves
from snclr.reports.accuracies import Accuracy, EvalSet, by_test_set, warnings_of
from snclr.reports.build import ReportResult, or_missing, read_valid_metrics, write_html
from snclr.reports.embedding_map import COLORS
from snclr.reports.page import HEADLINE, Missing, chart_data, environment, trained_epochs, wall_time
from snclr.reports.run_state import RunState, read_state
from snclr.train.config import read_config
from snclr.train.sessions import read_sessions

_PATHS = ("out",)
"""Settings that always differ and mean nothing for a comparison."""


@dataclass(frozen=True)
class OverlaidRun:
    """What the page shows about one run."""

    name: str
    state: RunState
    records: list[dict[str, Any]]
    results: list[dict[str, Any]]
    settings: Mapping[str, Any]
    wall_time: str
    bad_images: int = 0
    purity_chance: float | None = None
    """Neighbor purity of random training images, if their classes are known."""

    @classmethod
    def read(cls, run: RunDir, name: str) -> OverlaidRun:
        """Read the files of a run."""
        records, _ = read_valid_metrics(run)
        sessions = read_sessions(run.path)
        records = [] if isinstance(records, Missing) else records
        logged = any("neighbor_purity" in record for record in records)
        data = or_missing(lambda: open_dataset(data_of(run.path))) if logged else None
        return cls(
            name, read_state(run, sessions, records), records,
            read_results(run.path), read_config(run.config) if run.config.is_file() else {},
            wall_time(sessions) if sessions else "–", len(read_jsonl(run.skipped)),
            None if data is None or isinstance(data, Missing) else same_class_chance(data.labels),
        )  # fmt: skip


def write_overlay(runs: Sequence[RunDir], path: Path) -> ReportResult:
    """Write the page of two runs or more; it encodes no images."""
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("a run was given twice. Give each run once")
    if len(runs) > COLORS:
        raise UserError(f"{len(runs)} runs were given; a chart has colors for {COLORS}")
    names = [run.path.resolve().name for run in runs]
    shown = [
        OverlaidRun.read(run, name if names.count(name) == 1 else str(run.path))
        for run, name in zip(runs, names, strict=True)
    ]
    html = render_overlay(shown, datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
    write_html(path, html)
    included = {
        "curves": any(run.records for run in shown), "evaluations": any(run.results for run in shown),
        "configuration": any(run.settings for run in shown),
    }  # fmt: skip
    return ReportResult(
        str(path), len(html.encode()), included, {}, images=0, evaluations=sum(len(run.results) for run in shown),
        bad_images=sum(run.bad_images for run in shown),
    )  # fmt: skip


def render_overlay(runs: Sequence[OverlaidRun], written: str = "") -> str:
    """Render the page to HTML."""
    levels = {run.purity_chance for run in runs if run.purity_chance is not None}
    chance = dict.fromkeys(["neighbor_purity"], levels.pop()) if len(levels) == 1 else None
    charts = curves.build_charts(*(run.records for run in runs), chance=chance)
    return environment().get_template("overlay.html").render(
        runs=runs, charts=charts, chart_data=chart_data(charts), line_description=curves.describe_lines(charts),
        facts=_facts(runs), accuracies=_accuracies(runs), warnings=_warnings(runs),
        settings=_different_settings(runs), version=__version__, written=written,
    )  # fmt: skip


def _facts(runs: Sequence[OverlaidRun]) -> list[tuple[str, list[str]]]:
    """Return rows of the table: a title and a text per run."""
    rows = [
        ("state", [run.state.text for run in runs]),
        ("epochs", [" ".join(trained_epochs(run.records, run.settings) or ("–",)).strip() for run in runs]),
        ("wall time", [run.wall_time for run in runs]),
    ]
    last = [curves.last_values(run.records) for run in runs]
    for metric in curves.METRICS:
        if metric.name in HEADLINE and any(metric.name in one for one in last):
            texts = [one[metric.name][1] if metric.name in one else "–" for one in last]
            if metric.name == "neighbor_purity":
                texts = [_with_chance(text, run.purity_chance) for text, run in zip(texts, runs, strict=True)]
            rows.append((f"last {metric.title.lower()}", texts))
    return rows


def _with_chance(text: str, chance: float | None) -> str:
    return text if chance is None else f"{text} (chance {chance:.1%})"


def _accuracies(runs: Sequence[OverlaidRun]) -> list[tuple[EvalSet, list[tuple[str, list[Accuracy | None]]]]]:
    """Return, for each test set, the kinds of evaluation with the newest accuracy of each run."""
    by_run = [by_test_set(run.results) for run in runs]
    sets = dict.fromkeys(tested for one in by_run for tested in one)
    rows = []
    for tested in sets:
        found = [{accuracy.title: accuracy for accuracy in one.get(tested, [])} for one in by_run]
        kinds = dict.fromkeys(title for one in found for title in one)
        rows.append((tested, [(title, [one.get(title) for one in found]) for title in kinds]))
    return rows


def _warnings(runs: Sequence[OverlaidRun]) -> list[tuple[str, str]]:
    """Return every warning of the shown accuracies once, with the runs and kinds of evaluation it belongs to."""
    titles: dict[str, dict[str, None]] = {}
    for run in runs:
        for cards in by_test_set(run.results).values():
            for kinds, warning in warnings_of(cards):
                titles.setdefault(warning, {})[f"{run.name} ({kinds})"] = None
    return [(", ".join(of), warning) for warning, of in titles.items()]


def _different_settings(runs: Sequence[OverlaidRun]) -> list[tuple[str, list[Any]]]:
    """Return the settings that are not the same in all runs, with a value per run ("–": the run does not have it)."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in _PATHS)
    rows = [(name, [run.settings.get(name, "–") for run in runs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
