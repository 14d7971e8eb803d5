"""Lists of images to start from: pages of a set, filtered by class or text, and the state of the page."""

from __future__ import annotations

from typing import Any

import numpy as np

from snclr import __version__
from snclr.explorer.explorer import Explorer, ImageRef
from snclr.explorer.opened_run import OpenedRun
from snclr.explorer.screens.neighbors import galleries

PAGE = 60


def state(explorer: Explorer) -> dict[str, Any]:
    """Return what the page needs at first: runs, image sets, classes."""
    return {
        "version": __version__,
        "runs": [_run(explorer, run) for run in (explorer.run, explorer.other) if run is not None],
        "sets": [
            {"name": each.name, "title": each.title, "count": len(each.dataset), "classes": each.classes}
            for each in explorer.sets.values()
        ],
        "static": False,
    }


def _run(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "title": run.title,
        "method": None if run.config is None else run.config.method,
        "encoder": run.spec.name,
        "image_size": run.image_size,
        "step": run.step,
        "complete": run.complete,
        "spaces": run.spaces,
        "neighbors": run.neighbors,
        "galleries": galleries(explorer, run),
        "kept": [step for step, _ in run.kept_encoders()],
    }


def page(
    explorer: Explorer, set_name: str, *, offset: int = 0, limit: int = PAGE, label: str = "", text: str = "",
    shuffle: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return one page of the images of a set, optionally of one class or whose key contains a text."""
    images = explorer.sets[explorer.ref(set_name, 0).set]
    ids = np.arange(len(images.dataset))
    if label and images.classes is not None and label in images.classes and images.dataset.labels is not None:
        ids = ids[images.dataset.labels == images.classes.index(label)]
    if text:
        ids = np.array([i for i in ids.tolist() if text.lower() in images.dataset.key(i).lower()], dtype=np.int64)
    if shuffle:
        ids = np.random.default_rng(0).permutation(ids)
    chosen = ids[offset : offset + min(limit, 500)]
    return {
        "total": len(ids),
        "offset": offset,
        "images": [explorer.describe(ImageRef(set_name, int(index))) for index in chosen],
    }
