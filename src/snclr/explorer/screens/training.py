"""The screen Run: curves, singular values, alerts, bad images and settings of a run, also while it trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from snclr.explorer.explorer import Explorer
from snclr.explorer.jobs import Job
from snclr.explorer.opened_run import METRIC_NAMES, OpenedRun
from snclr.io.jsonl import is_finite_number, read_jsonl
from snclr.reports.run_state import read_alerts
from snclr.train.health import effective_rank
from snclr.train.metrics import read_metrics

MAX_POINTS = 600
MAX_BAD = 500
_SPECTRUM_ROWS = 8_192


def summary(run: OpenedRun) -> dict[str, Any]:
    """Return everything of the run directory that needs no image: curves, alerts, bad images, settings."""
    records = read_metrics(run.path)
    bad = read_jsonl(run.dir.skipped)
    return {
        "title": run.title,
        "complete": run.complete,
        "step": records[-1]["step"] if records else run.step,
        "epoch": records[-1].get("epoch") if records else None,
        "epochs": run.epochs if run.config is not None else None,
        "metrics": METRIC_NAMES,
        "points": points(records),
        "alerts": alerts(run, records),
        "bad": [{"key": str(b.get("key", "?")), "reason": str(b.get("reason", "?"))} for b in bad[:MAX_BAD]],
        "bad_total": len(bad),
        "settings": run.settings(),
        "recipe": run.recipe,
    }


def points(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the finite values of the records, of at most 600 records: the last one and an even choice of others."""
    every = -(-len(records) // MAX_POINTS)
    chosen = [record for number, record in enumerate(records) if (len(records) - 1 - number) % max(every, 1) == 0]
    return [point(record) for record in chosen]


def point(record: dict[str, Any]) -> dict[str, Any]:
    """Return step, epoch and the finite values of a record."""
    flat = {**record, **(record.get("timing") or {})}
    names = {str(metric["name"]) for metric in METRIC_NAMES}
    values = {name: flat[name] for name in names if is_finite_number(flat.get(name))}
    return {"step": record["step"], "epoch": record.get("epoch"), **values}


def alerts(run: OpenedRun, records: list[dict[str, Any]]) -> list[str]:
    """Describe collapse and values that are not finite."""
    found = read_alerts(run.dir, records)
    odd = [record["step"] for record in records if record.get("nonfinite")]
    if odd:
        found.append(f"{len(odd):,} logged steps have values that are not finite, first at step {odd[0]:,}.")
    return found


def spectrum(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return the singular values of the centered, normalized encoder features, divided by the largest."""
    features = explorer.features(run, "encoder")

    def compute(job: Job) -> dict[str, Any]:
        rows = features.features[
            torch.linspace(0, len(features.ids) - 1, min(len(features.ids), _SPECTRUM_ROWS)).long()
        ]
        values = torch.linalg.svdvals((rows - rows.mean(dim=0)).double())
        energy = (values**2).cumsum(0) / (values**2).sum().clamp(min=1e-300)
        return {
            "values": (values / values[0].clamp(min=1e-300)).tolist(),
            "effective_rank": effective_rank(rows),
            "dims": features.features.shape[1],
            "for_90_percent": int((energy < 0.9).sum()) + 1,
            "images": len(rows),
            "mean_cosine": float(F.normalize(rows.mean(dim=0), dim=0) @ rows.mean(dim=0)),
        }

    return explorer.jobs.get(f"spectrum/{run.name}", "singular values", compute)
