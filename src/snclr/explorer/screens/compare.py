"""The screen Compare: the neighbors of each image by two encoders, and where they differ most."""

from typing import Any

import torch
from torch import Tensor

from snclr.data.splits import sample
from snclr.errors import UserError
from snclr.evaluation.analysis.graph import Graph, neighbor_graph, overlap
from snclr.evaluation.retrieval.gallery import same_class
from snclr.explorer.explorer import COMPARED, SAMPLE, Explorer
from snclr.explorer.jobs import Job
from snclr.explorer.screens.timeline import SampleGraph, kept_steps, mean_purity, sampled_row, step_graph

K = 10


def encoders(explorer: Explorer) -> list[dict[str, str]]:
    """Return the encoders that can be compared: both runs, earlier checkpoints of the first, and raw pixels."""
    titles = {run.name: run.title for run in explorer.runs.values()}
    titles |= {f"step-{step}": f"{explorer.run.title} at step {step:,}" for step in kept_steps(explorer.run)[:-1]}
    titles["pixels"] = "raw pixels"
    return [{"name": name, "title": title} for name, title in titles.items()]


def _side(explorer: Explorer, name: str, count: int) -> SampleGraph:
    """Return the neighbors among `count` images by one encoder, or raise Pending."""
    titles = {each["name"]: each["title"] for each in encoders(explorer)}
    if name not in titles:
        raise UserError(f"there is no encoder {name!r} to compare; choose from {', '.join(titles)}")

    def compute(job: Job) -> SampleGraph:
        sampled = explorer.sample(count)
        if name.startswith("step-"):
            found = step_graph(explorer, explorer.run, int(name.removeprefix("step-")))
            return found._replace(graph=Graph(found.graph.cosine[:, :K], found.graph.index[:, :K]))
        if name == "pixels":
            matrix = explorer.run.pixels(sample(explorer.images.dataset, count), job.report)
            ids, features = sampled[matrix.ids], matrix.features
        else:
            matrix = explorer.features(explorer.run_named(name), "encoder")
            rows = torch.tensor([r for i in sampled.tolist() if (r := matrix.row_of.get(i)) is not None])
            ids, features = matrix.ids[rows], matrix.features[rows]
        return SampleGraph(ids, neighbor_graph(features, K, job.report), features)

    return explorer.jobs.get(f"compare/{name}/{count}", f"neighbors by {titles[name]}", compute)


def compare(explorer: Explorer, one: str = "a", other: str = "", limit: int = 60, offset: int = 0) -> dict[str, Any]:
    """Return the images whose neighbors differ most between two encoders, and the overlap over all images."""
    a, b, ids = _sides(explorer, one, other)
    shared = overlap(a.index, b.index)
    k, labels = a.index.shape[1], explorer.labels(ids)
    rows = shared.argsort(stable=True)[offset : offset + limit].tolist()
    return {
        "k": k,
        "count": len(ids),
        "overlap": float(shared.mean()),
        "histogram": torch.bincount((shared * k).round().long(), minlength=k + 1).tolist(),
        "chance": explorer.chance().get("neighbor_purity"),
        "purity": [mean_purity(a.index, labels), mean_purity(b.index, labels)],
        "images": [explorer.entry(ids[row], overlap=float(shared[row])) for row in rows],
    }


def pair(explorer: Explorer, one: str = "a", other: str = "", id: int = -1) -> dict[str, Any]:
    """Return the neighbors of one image by both encoders; `common` marks those in both lists."""
    a, b, ids = _sides(explorer, one, other)
    row, query = sampled_row(ids, id), explorer.entry(id)
    lists = [ids[side.index[row]][side.index[row] >= 0].tolist() for side in (a, b)]
    common = {*lists[0]} & {*lists[1]}

    def describe(near: list[int], cosines: Tensor) -> list[dict[str, Any]]:
        pairs = zip(near, cosines.tolist(), strict=False)
        images = [explorer.entry(index, common=index in common, cosine=cosine) for index, cosine in pairs]
        return [{**image, "same": same_class(query["label"], image["label"])} for image in images]

    return {"query": query, "one": describe(lists[0], a.cosine[row]), "other": describe(lists[1], b.cosine[row])}


def _sides(explorer: Explorer, one: str, other: str) -> tuple[Graph, Graph, Tensor]:
    """Return both graphs over the same images; an image that one encoder could not read is an error of the data.

    Without `other`, the first encoder is compared with the second.
    """
    other = other or encoders(explorer)[1]["name"]
    count = COMPARED if {one, other} <= {"a", "b"} else SAMPLE
    a, b = (_side(explorer, name, count) for name in (one, other))
    if not torch.equal(a.ids, b.ids):
        raise UserError("the two encoders could not read the same images; remove the bad images first")
    return a.graph, b.graph, a.ids
