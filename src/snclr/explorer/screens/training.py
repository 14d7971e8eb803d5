"""The screen Run: curves, singular values, alerts, bad images and settings of a run, also while it trains."""

from dataclasses import asdict
from typing import Any

import torch

from snclr.explorer.explorer import Explorer
from snclr.explorer.jobs import Job
from snclr.explorer.opened_run import OpenedRun
from snclr.io.jsonl import is_finite_number, read_jsonl
from snclr.recipes import RECIPES
from snclr.reports.curves import METRICS
from snclr.reports.run_state import read_alerts, read_state
from snclr.train.health import effective_rank
from snclr.train.metrics import read_metrics
from snclr.train.sessions import read_sessions

MAX_POINTS = 600
MAX_BAD = 500
_SPECTRUM_ROWS = 8_192


def summary(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return everything of the run directory that needs no image: curves, alerts, bad images, settings."""
    records = read_metrics(run.path)
    bad = read_jsonl(run.dir.skipped)
    alerts = read_alerts(run.dir, records)
    if odd := [record["step"] for record in records if record.get("nonfinite")]:
        alerts.append(f"{len(odd):,} logged steps have values that are not finite, first at step {odd[0]:,}.")
    recipe = None if run.config is None else str(run.config.recipe)
    every = max(1, -(-len(records) // MAX_POINTS))
    return {
        "title": run.title,
        "state": read_state(run.dir, read_sessions(run.path), records).title,
        "step": records[-1]["step"] if records else run.step,
        "epoch": records[-1].get("epoch") if records else None,
        "epochs": None if run.config is None else int(run.config.epochs),
        "metrics": [asdict(metric) for metric in METRICS],
        "chance": explorer.chance(run),
        "points": [point(record) for record in records[::-1][::every][::-1]],  # the last one and an even choice
        "alerts": alerts,
        "bad": [{"key": str(b.get("key", "?")), "reason": str(b.get("reason", "?"))} for b in bad[:MAX_BAD]],
        "bad_total": len(bad),
        "settings": run.settings(),
        "recipe": recipe if recipe in RECIPES else None,
    }


def point(record: dict[str, Any]) -> dict[str, Any]:
    """Return step, epoch and the finite values of a record."""
    flat = {**record, **(record.get("timing") or {})}
    values = {metric.name: flat[metric.name] for metric in METRICS if is_finite_number(flat.get(metric.name))}
    return {"step": record["step"], "epoch": record.get("epoch"), **values}


def spectrum(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return the singular values of the centered, normalized encoder features, divided by the largest."""
    features = explorer.features(run, "encoder")

    def compute(job: Job) -> dict[str, Any]:
        n = len(features.ids)
        rows = features.features[torch.linspace(0, n - 1, min(n, _SPECTRUM_ROWS)).long()]
        values = torch.linalg.svdvals((rows - rows.mean(dim=0)).double())
        energy = (values**2).cumsum(0) / (values**2).sum().clamp(min=1e-300)
        return {
            "values": (values / values[0].clamp(min=1e-300)).tolist(),
            "effective_rank": effective_rank(rows),
            "dims": features.features.shape[1],
            "for_90_percent": int((energy < 0.9).sum()) + 1,
        }

    return explorer.jobs.get(f"spectrum/{run.name}", "singular values", compute)
