"""The screen Time: maps of the kept encoders of a run, aligned, and how the neighbors of an image change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, neighbor_graph, overlap, purity
from snclr.evaluation.analysis.layout import Points, align, pca
from snclr.explorer.jobs import Job
from snclr.explorer.opened import Explorer, ImageRef
from snclr.explorer.run_data import Matrix, OpenedRun

K = 15
MAX_STEPS = 24


class StepGraph(NamedTuple):
    """The neighbors of the sampled images by one kept encoder: ids (m,) and the graph over their rows."""

    ids: Tensor
    graph: Graph
    features: Tensor


def kept_steps(run: OpenedRun) -> list[int]:
    """Return the steps of the kept encoders, at most 24, spread evenly, the last included."""
    steps = [step for step, _ in run.kept_encoders()]
    if len(steps) <= MAX_STEPS:
        return steps
    chosen = np.linspace(0, len(steps) - 1, MAX_STEPS).round().astype(int)
    return [steps[i] for i in chosen]


def need_step_graph(explorer: Explorer, run: OpenedRun, step: int) -> StepGraph:
    """Return the neighbors by a kept encoder, inside a job."""
    return explorer.jobs.need(*_step_job(explorer, run, step))


def _step_job(explorer: Explorer, run: OpenedRun, step: int) -> tuple[str, str, Callable[[Job], StepGraph]]:
    paths = dict(run.kept_encoders())
    if step not in paths:
        raise UserError(f"the run keeps no checkpoint of step {step}")

    def compute(job: Job) -> StepGraph:
        sample = explorer.sample()
        matrix: Matrix = run.kept_features(step, paths[step], explorer.sampled(), job.report)
        return StepGraph(sample[matrix.ids], neighbor_graph(matrix.features, K), matrix.features)

    return f"step/{run.name}/{step}", f"features of the encoder at step {step:,}", compute


def timeline(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return the kept steps with the quality of their neighbors, or raise Pending."""
    steps = kept_steps(run)
    if not steps:
        raise UserError("the run keeps no checkpoints; an encoder alone has no time axis")

    def compute(job: Job) -> list[StepGraph]:
        return [need_step_graph(explorer, run, step) for step in steps]

    for step in steps:  # one job each, so that the page shows which is computed
        explorer.jobs.get(*_step_job(explorer, run, step))
    graphs: list[StepGraph] = explorer.jobs.get(f"timeline/{run.name}", "aligned maps", compute)
    labels = explorer.labels(graphs[-1].ids)
    rows = []
    for number, (step, found) in enumerate(zip(steps, graphs, strict=True)):
        before = graphs[number - 1].graph.index if number else None
        of_class = None if labels is None else purity(found.graph.index, labels)
        known = None if of_class is None else of_class[~of_class.isnan()]
        rows.append(
            {
                "step": step,
                "purity": None if known is None or not len(known) else float(known.mean()),
                "kept": None if before is None else float(overlap(found.graph.index, before).mean()),
                "cosine": float(found.graph.cosine.mean()),
            }
        )
    return {
        "steps": rows,
        "count": len(graphs[-1].ids),
        "total": len(explorer.images.dataset),
        "k": K,
        "classes": explorer.images.classes,
        "steps_per_epoch": steps_per_epoch(run),
    }


def steps_per_epoch(run: OpenedRun) -> float | None:
    """Return the number of steps in an epoch, from the metrics."""
    last = next((r for r in reversed(run.metrics()) if r.get("epoch")), None)
    return None if last is None else float(last["step"]) / float(last["epoch"])


def maps(explorer: Explorer, run: OpenedRun) -> npt.NDArray[np.float32]:
    """Return the aligned PCA maps (steps, m, 2): each is rotated and scaled to the next, from the last back."""

    def compute(job: Job) -> npt.NDArray[np.float32]:
        graphs = [need_step_graph(explorer, run, step) for step in kept_steps(run)]
        layouts: list[Points] = [pca(found.features).points for found in graphs]
        aligned = [_unit(layouts[-1])]
        for points in reversed(layouts[:-1]):
            aligned.append(_unit(align(points, aligned[-1])))
        return np.stack(aligned[::-1])

    timeline(explorer, run)
    return explorer.jobs.get(f"timemaps/{run.name}", "aligned maps", compute)


def ids(explorer: Explorer, run: OpenedRun) -> npt.NDArray[np.float32]:
    """Return the image id of each point of the maps (m,)."""
    timeline(explorer, run)
    graphs: list[StepGraph] = explorer.jobs.get(f"timeline/{run.name}", "", lambda job: [])
    return graphs[-1].ids.numpy().astype(np.float32)


def history(explorer: Explorer, run: OpenedRun, index: int, k: int = 8) -> dict[str, Any]:
    """Return the k neighbors of an image at each kept step, and which entered and left since the step before."""
    timeline(explorer, run)
    graphs: list[StepGraph] = explorer.jobs.get(f"timeline/{run.name}", "", lambda job: [])
    rows = (graphs[-1].ids == index).nonzero()
    if not len(rows):
        raise UserError("this image is not in the sample of the time axis; choose one from the map")
    row, steps = int(rows[0, 0]), []
    before: list[int] | None = None
    for step, found in zip(kept_steps(run), graphs, strict=True):
        near = [n for n in found.graph.index[row, :k].tolist() if n >= 0]
        cosine = found.graph.cosine[row, :k].tolist()
        current = [int(found.ids[n]) for n in near]
        entered: list[int] = [] if before is None else [i for i in current if i not in before]
        steps.append(
            {
                "step": step,
                "neighbors": [
                    {**explorer.describe(ImageRef("images", i)), "cosine": c, "entered": i in entered}
                    for i, c in zip(current, cosine, strict=False)
                ],
                "left": [explorer.describe(ImageRef("images", i)) for i in (before or []) if i not in current],
            }
        )
        before = current
    return {"query": explorer.describe(ImageRef("images", index)), "steps": steps}


def _unit(points: Points) -> Points:
    """Center points and scale them to a root mean square distance of 1."""
    centered = points - points.mean(axis=0)
    return np.asarray(centered / max(float(np.sqrt((centered**2).sum(axis=1).mean())), 1e-12), np.float32)
