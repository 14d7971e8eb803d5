"""The screen Compare: the neighbors of each image by two encoders, and where they differ most."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.data.decode import load_or_none
from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, neighbor_graph, overlap
from snclr.explorer.explorer import COMPARED, SAMPLE, Explorer, ImageRef
from snclr.explorer.jobs import Job
from snclr.explorer.screens.timeline import SampleGraph, kept_steps, mean_purity, step_graph

K = 10
_PIXEL_SIDE = 16


def encoders(explorer: Explorer) -> list[dict[str, str]]:
    """Return the encoders that can be compared: both runs, earlier checkpoints of the first, and raw pixels."""
    found = [{"name": "a", "title": explorer.run.title}]
    if explorer.other is not None:
        found.append({"name": "b", "title": explorer.other.title})
    found += [
        {"name": f"step-{step}", "title": f"{explorer.run.title} at step {step:,}"}
        for step in kept_steps(explorer.run)[:-1]
    ]
    return [*found, {"name": "pixels", "title": "raw pixels"}]


def default_other(explorer: Explorer) -> str:
    """Return the encoder to compare with at first."""
    return encoders(explorer)[1]["name"]


def _side(explorer: Explorer, name: str, count: int) -> SampleGraph:
    """Return the neighbors among `count` images by one encoder, or raise Pending."""
    titles = {each["name"]: each["title"] for each in encoders(explorer)}
    if name not in titles:
        raise UserError(f"there is no encoder {name!r} to compare; choose from {', '.join(titles)}")

    def compute(job: Job) -> SampleGraph:
        sample = explorer.sample(count)
        if name.startswith("step-"):
            found = step_graph(explorer, explorer.run, int(name.removeprefix("step-")))
            return found._replace(graph=Graph(found.graph.cosine[:, :K], found.graph.index[:, :K]))
        if name == "pixels":
            ids, features = _pixels(explorer, sample, job)
        else:
            matrix = explorer.features(explorer.opened(name), "encoder")
            rows = torch.tensor([r for i in sample.tolist() if (r := matrix.row_of.get(i)) is not None])
            ids, features = matrix.ids[rows], matrix.features[rows]
        return SampleGraph(ids, neighbor_graph(features, K, job.report), features)

    return explorer.jobs.get(f"compare/{name}/{count}", f"neighbors by {titles[name]}", compute)


def _pixels(explorer: Explorer, sample: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Return ids and normalized pixels (m, 3·16·16) of the readable sampled images."""
    run, ids, rows = explorer.run, [], []
    for number, index in enumerate(sample.tolist()):
        pixels = load_or_none(explorer.load, ImageRef("images", index), 2 * run.image_size)
        if pixels is not None:
            ids.append(index)
            rows.append(F.adaptive_avg_pool2d(run.center_view(pixels), _PIXEL_SIDE).flatten())
        if number % 100 == 0:
            job.report(number, len(sample))
    return torch.tensor(ids), F.normalize(torch.stack(rows), dim=1)


def compare(explorer: Explorer, one: str, other: str, *, limit: int = 60, offset: int = 0) -> dict[str, Any]:
    """Return the images whose neighbors differ most between two encoders, and the overlap over all images."""
    a, b, ids = _sides(explorer, one, other)
    shared = overlap(a.index, b.index)
    order = shared.argsort(stable=True)
    labels = explorer.labels(ids)
    counts = torch.bincount((shared * a.index.shape[1]).round().long(), minlength=a.index.shape[1] + 1)
    return {
        "k": a.index.shape[1],
        "count": len(ids),
        "total": len(explorer.images.dataset),
        "overlap": float(shared.mean()),
        "histogram": counts.tolist(),
        "purity": [mean_purity(a.index, labels), mean_purity(b.index, labels)],
        "images": [
            explorer.image(ids[row], overlap=float(shared[row])) for row in order[offset : offset + limit].tolist()
        ],
    }


def pair(explorer: Explorer, one: str, other: str, index: int) -> dict[str, Any]:
    """Return the neighbors of one image by both encoders; `common` marks those in both lists."""
    a, b, ids = _sides(explorer, one, other)
    rows = (ids == index).nonzero()
    if not len(rows):
        raise UserError("this image is not among the compared ones; choose one from the list")
    row = int(rows[0, 0])
    lists = [[int(ids[n]) for n in side.index[row].tolist() if n >= 0] for side in (a, b)]
    label = explorer.images.dataset.class_name(index)
    sides = []
    for side, own, others in ((a, lists[0], lists[1]), (b, lists[1], lists[0])):
        near = []
        for i, cosine in zip(own, side.cosine[row].tolist(), strict=False):
            image = explorer.image(i)
            same = None if label is None or image["label"] is None else label == image["label"]
            near.append({**image, "cosine": cosine, "common": i in others, "same": same})
        sides.append(near)
    return {"query": explorer.image(index), "one": sides[0], "other": sides[1]}


def _sides(explorer: Explorer, one: str, other: str) -> tuple[Graph, Graph, Tensor]:
    """Return both graphs over the same images; an image that one encoder could not read is an error of the data."""
    count = COMPARED if {one, other} <= {"a", "b"} else SAMPLE
    a, b = (_side(explorer, name, count) for name in (one, other))
    if not torch.equal(a.ids, b.ids):
        raise UserError("the two encoders could not read the same images; remove the bad images first")
    return a.graph, b.graph, a.ids
