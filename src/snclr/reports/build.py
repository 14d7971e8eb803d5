"""Build the report of a run: read its files, compute gallery and map, and write the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from snclr.errors import UserError
from snclr.io.jsonl import read_jsonl

if TYPE_CHECKING:
    from snclr.checkpoint.run_dir import RunDir
    from snclr.data.datasets.base import ImageDataset
    from snclr.evaluation.session import Session
    from snclr.reports.embedding_map import EmbeddingMap
    from snclr.reports.page import Gallery, Missing, Page

LIMITS = {"images": (3, 5_000), "rows": (1, 24), "k": (1, 20)}
T = TypeVar("T")


@dataclass(frozen=True)
class ReportOptions:
    """What to show: at most `images` images on the map, and `rows` images with `k` neighbors each."""

    images: int = 2_000
    rows: int = 6
    k: int = 5
    embeddings: bool = True
    """False encodes no images."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise UserError(f"{name} is {value}; a report takes {low} to {high:,}")


@dataclass(frozen=True)
class ReportResult:
    """A written report: its path and size, which sections it has, and why others are missing."""

    report: str
    bytes: int
    included: dict[str, bool]
    missing: dict[str, str]
    images: int
    """Images on the map."""
    evaluations: int
    bad_images: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def write_report(
    session: Session, run: RunDir, path: Path, options: ReportOptions, data: str | None = None
) -> ReportResult:
    """Build the page and write it on rank 0; `data` replaces the run's own images."""
    from snclr.io.atomic import write_atomic
    from snclr.reports.embedding_map import EmbeddingMap
    from snclr.reports.page import render_within

    html, page = render_within(build_page(session, run, options, data))
    if session.is_rank_zero:
        try:
            write_atomic(path, html)
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror}); choose another --out") from error
    return ReportResult(
        str(path), len(html.encode()), page.included(), page.missing(),
        images=len(page.map.keys) if isinstance(page.map, EmbeddingMap) else 0, evaluations=len(page.results),
        bad_images=len(page.skipped),
    )  # fmt: skip


def report_path(run: RunDir, out: str | Path | None) -> Path:
    """Return the path of the page, RUN/report.html by default; raise UserError if it cannot be written there."""
    path = run.report if out is None else Path(out)
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise UserError(f"--out {path} is not an HTML file; give a path that ends in .html")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} for {path.name}; create it or choose another --out")
    return path


def build_page(session: Session, run: RunDir, options: ReportOptions, data: str | None = None) -> Page:
    """Collect the content of the page; a part that is not available is replaced by the reason."""
    from snclr import __version__
    from snclr.data.datasets.base import open_dataset
    from snclr.evaluation.results import read_results
    from snclr.evaluation.session import data_of
    from snclr.reports.page import Missing, Page
    from snclr.train.config import read_config
    from snclr.train.metrics import read_metrics

    records = _or_missing(lambda: read_metrics(run.path))
    if records == []:
        empty = run.metrics.exists()
        records = Missing(f"{run.metrics.name} is empty" if empty else f"there is no {run.metrics.name}")
    settings: Any = Missing(f"there is no {run.config.name}")
    if run.config.exists():
        settings = _or_missing(lambda: read_config(run.config))
    dataset = _or_missing(lambda: session.open(lambda: open_dataset(data or data_of(run.path))))
    gallery, embedding_map = (
        (dataset, dataset) if isinstance(dataset, Missing) else _embeddings(session, run, dataset, options)
    )
    return Page(
        run.path.resolve().name or str(run.path), __version__, complete=run.encoder_weights.is_file(),
        settings=settings, records=records, results=read_results(run.path), skipped=read_jsonl(run.skipped),
        gallery=gallery, map=embedding_map, images=None if isinstance(dataset, Missing) or data else len(dataset),
        alerts=_alerts(run, records), written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def _embeddings(
    session: Session, run: RunDir, dataset: ImageDataset, options: ReportOptions
) -> tuple[Gallery | Missing, EmbeddingMap | Missing]:
    from snclr.reports.page import Missing
    from snclr.reports.run_images import compute_gallery, compute_map, sample

    if not options.embeddings:
        disabled = Missing("images were not encoded (--no-embeddings)")
        return disabled, disabled
    some = sample(dataset, options.images, options.seed)
    gallery = _or_missing(lambda: compute_gallery(session, run, some, options))
    return gallery, _or_missing(lambda: compute_map(session, run, some, options))


def _or_missing(compute: Callable[[], T]) -> T | Missing:
    """Return a part of the page, or the reason why it is missing."""
    from snclr.reports.page import Missing

    try:
        return compute()
    except UserError as error:
        return Missing(str(error))


def _alerts(run: RunDir, records: Any) -> list[str]:
    """Describe collapsed features and non-finite steps."""
    alerts = []
    collapsed = [r["step"] for r in records if r.get("collapsed") is True] if isinstance(records, list) else []
    if collapsed:
        alerts.append(
            f"The features collapsed (spread below 0.1 or effective rank below 2) at {len(collapsed):,} logged steps, "
            f"first at step {collapsed[0]:,}, last at step {collapsed[-1]:,}."
        )
    if run.nonfinite.is_file():
        stop = next(iter(read_jsonl(run.nonfinite)), {})
        alerts.append(
            f"Training stopped at step {stop.get('step', '?')}: loss {stop.get('loss', '?')}, gradient norm "
            f"{stop.get('gradient_norm', '?')}. {run.nonfinite.name} lists the images of that step."
        )
    return alerts
