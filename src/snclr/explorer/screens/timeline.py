"""The screen Time: maps of the kept encoders of a run, aligned, and how the neighbors of an image change."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from snclr.data.splits import sample
from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, neighbor_graph, overlap, purity
from snclr.evaluation.analysis.layout import Points, align, pca
from snclr.explorer.explorer import SAMPLE, Explorer
from snclr.explorer.jobs import Job
from snclr.explorer.opened_run import OpenedRun
from snclr.train.metrics import read_metrics

K = 15
HISTORY_K = 8
MAX_STEPS = 24


class SampleGraph(NamedTuple):
    """The neighbors of the sampled images by one encoder: ids (m,), the graph over their rows, and features (m, D)."""

    ids: Tensor
    graph: Graph
    features: Tensor


def kept_steps(run: OpenedRun) -> list[int]:
    """Return the steps of the kept encoders, at most 24, spread evenly, the last included."""
    steps = [step for step, _ in run.kept_encoders()]
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS)).round().astype(int)
    return [steps[i] for i in chosen]


def step_graph(explorer: Explorer, run: OpenedRun, step: int) -> SampleGraph:
    """Return the neighbors by a kept encoder, or raise Pending."""
    paths = dict(run.kept_encoders())
    if step not in paths:
        raise UserError(f"the run keeps no checkpoint of step {step}")

    def compute(job: Job) -> SampleGraph:
        matrix = run.kept_features(step, paths[step], sample(explorer.images.dataset, SAMPLE), job.report)
        return SampleGraph(explorer.sample()[matrix.ids], neighbor_graph(matrix.features, K), matrix.features)

    return explorer.jobs.get(f"step/{run.name}/{step}", f"features of the encoder at step {step:,}", compute)


def step_graphs(explorer: Explorer, run: OpenedRun) -> dict[int, SampleGraph]:
    """Return the neighbors by each kept encoder, by step, or raise Pending."""
    steps = kept_steps(run)
    if not steps:
        raise UserError("the run keeps no checkpoints; an encoder alone has no time axis")
    return {step: step_graph(explorer, run, step) for step in steps}


def sampled_row(ids: Tensor, id: int) -> int:
    """Return the row of an image among the sampled ones (m,); raise UserError if it is none of them."""
    rows = (ids == id).nonzero()
    if not len(rows):
        raise UserError("this image is not in the sample; choose one from the map or the list")
    return int(rows[0, 0])


def mean_purity(index: Tensor, labels: Tensor) -> float | None:
    """Return the mean neighbor purity of a graph (n, k), or None if no class is known."""
    mean = float(purity(index, labels).nanmean())
    return None if math.isnan(mean) else mean


def timeline(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return the kept steps with the quality of their neighbors, or raise Pending."""
    graphs = step_graphs(explorer, run)
    ids = [*graphs.values()][-1].ids
    labels = explorer.labels(ids)
    last = next((r for r in reversed(read_metrics(run.path)) if r.get("epoch")), None)
    return {
        "steps": [
            {
                "step": step,
                "purity": mean_purity(graph.index, labels),
                "kept": None if before is None else float(overlap(graph.index, before.graph.index).mean()),
            }
            for (step, (_, graph, _)), before in zip(graphs.items(), [None, *graphs.values()], strict=False)
        ],
        "count": len(ids),
        "k": K,
        "chance": explorer.chance().get("neighbor_purity"),
        "steps_per_epoch": None if last is None else float(last["step"]) / float(last["epoch"]),
    }


def maps(explorer: Explorer, run: OpenedRun) -> npt.NDArray[np.float32]:
    """Return the aligned PCA maps (steps, m, 2): each is rotated and scaled to the next, from the last back."""
    graphs = step_graphs(explorer, run)

    def compute(job: Job) -> npt.NDArray[np.float32]:
        layouts: list[Points] = [pca(found.features).points for found in graphs.values()]
        aligned = [_unit(layouts[-1])]
        for points in reversed(layouts[:-1]):
            aligned.append(_unit(align(points, aligned[-1])))
        return np.stack(aligned[::-1])

    # A run in progress keeps other steps later.
    return explorer.jobs.get(f"timemaps/{run.name}/{','.join(map(str, graphs))}", "aligned maps", compute)


def ids(explorer: Explorer, run: OpenedRun) -> npt.NDArray[np.float32]:
    """Return the image id of each point of the maps (m,)."""
    return [*step_graphs(explorer, run).values()][-1].ids.numpy().astype(np.float32)


def history(explorer: Explorer, run: OpenedRun, id: int = -1) -> dict[str, Any]:
    """Return the 8 nearest images of an image at each kept step, and which entered and left since the one before."""
    graphs = step_graphs(explorer, run)
    row, steps = sampled_row([*graphs.values()][-1].ids, id), []
    before: list[int] | None = None
    for step, (ids, graph, _) in graphs.items():
        index = graph.index[row, :HISTORY_K]
        current = ids[index][index >= 0].tolist()
        pairs = zip(current, graph.cosine[row].tolist(), strict=False)
        near = [explorer.entry(i, cosine=c, entered=before is not None and i not in before) for i, c in pairs]
        left = [explorer.entry(i) for i in before or [] if i not in current]
        steps.append({"step": step, "neighbors": near, "left": left})
        before = current
    return {"query": explorer.entry(id), "steps": steps}


def _unit(points: Points) -> Points:
    """Center points and scale them to a root mean square distance of 1."""
    centered = points - points.mean(axis=0)
    return np.asarray(centered / max(float(np.sqrt((centered**2).sum(axis=1).mean())), 1e-12), np.float32)
