"""Lists of images to start from: pages of a set, filtered by class or text, and the state of the page."""

from typing import Any

import numpy as np

from snclr.explorer.explorer import Explorer, ImageRef
from snclr.explorer.screens.neighbors import galleries

PAGE = 60


def state(explorer: Explorer) -> dict[str, Any]:
    """Return what the page needs at first: runs, image sets, classes."""
    return {
        "runs": [
            {
                "name": run.name,
                "title": run.title,
                "method": None if run.config is None else run.config.method,
                "encoder": run.spec.name,
                "step": run.step,
                "spaces": run.spaces,
                "galleries": galleries(explorer, run),
            }
            for run in explorer.runs.values()
        ],
        "sets": [
            {"name": each.name, "title": each.title, "count": len(each.dataset), "classes": each.classes}
            for each in explorer.sets.values()
        ],
    }


def page(
    explorer: Explorer, set: str = "images", offset: int = 0, limit: int = PAGE, label: str = "", text: str = "",
    shuffle: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return one page of the images of a set, optionally of one class or whose key contains a text."""
    images = explorer.sets[explorer.ref(set, 0).set]
    ids = np.arange(len(images.dataset))
    if label and images.classes is not None and label in images.classes and images.dataset.labels is not None:
        ids = ids[images.dataset.labels == images.classes.index(label)]
    if text:
        ids = np.array([i for i in ids.tolist() if text.lower() in images.dataset.key(i).lower()], dtype=np.int64)
    if shuffle == "1":
        ids = np.random.default_rng(0).permutation(ids)
    chosen = ids[offset : offset + min(limit, 500)]
    described = [explorer.describe(ImageRef(set, int(index))) for index in chosen]
    return {"total": len(ids), "images": described}
