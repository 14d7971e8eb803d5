"""The screen Curate: near-duplicates, leaks, outliers, suspect labels and a diverse subset, and the exported list."""

from typing import Any

import torch

from snclr.errors import UserError
from snclr.evaluation.analysis.curation import diverse_subset, format_list, leaks, outlier_scores, suspect_labels
from snclr.evaluation.analysis.graph import mutual
from snclr.explorer.explorer import GRAPH_K, Explorer, ImageRef
from snclr.explorer.opened_run import OpenedRun

MAX_PAIRS = 4_000
MAX_LISTED = 400
MAX_SUBSET = 1_000


def duplicates(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return the most similar pairs of the neighbor graph; the page joins those above its threshold to groups."""
    features, graph = explorer.features(run, "encoder"), explorer.graph(run)
    rows = torch.arange(len(graph.index))[:, None].expand_as(graph.index)
    once = (graph.index >= 0) & ((rows < graph.index) | ~mutual(graph.index))
    one, other, cosine = rows[once], graph.index[once], graph.cosine[once]
    best = cosine.argsort(descending=True)[:MAX_PAIRS]
    columns = [column[best].tolist() for column in (features.ids[one], features.ids[other], cosine)]
    return {
        "pairs": [[a, b, round(c, 5)] for a, b, c in zip(*columns, strict=True)],
        "images": {str(index): explorer.entry(index) for index in sorted({*columns[0], *columns[1]})},
        "floor": round(float(cosine[best].min()), 4) if len(best) else 1.0,
        "note": f"the {len(best):,} most similar pairs among the {GRAPH_K} nearest neighbors of each image",
    }


def leaking(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return the test images with the most similar training image, most similar first."""
    if "test" not in explorer.sets:
        raise UserError("there are no test images: give --test, or data with a train and a test folder")
    train, test = explorer.features(run, "encoder"), explorer.features(run, "encoder", "test")
    found = leaks(train.features, test.features, -1.0)
    pairs = []
    for a, b, cosine in found[:MAX_LISTED]:
        one = explorer.describe(ImageRef("test", int(test.ids[a])))
        pairs.append({"test": one, "train": explorer.entry(train.ids[b]), "cosine": cosine})
    return {"pairs": pairs, "count": len(test.ids)}


def outliers(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return the images that are least like their nearest neighbors."""
    features, graph = explorer.features(run, "encoder"), explorer.graph(run)
    scores = outlier_scores(graph)
    order = scores.argsort(descending=True)[:MAX_LISTED].tolist()
    images = [explorer.entry(features.ids[row], score=float(scores[row])) for row in order]
    return {"images": images, "k": graph.index.shape[1], "median": float(scores.median())}


def suspects(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return the images whose neighbors vote for another class than their label."""
    features, graph = explorer.features(run, "encoder"), explorer.graph(run)
    labels, classes = explorer.labels(features.ids), explorer.images.classes
    if classes is None:
        raise UserError("suspect labels need labels: one folder per class, or a list with labels")
    found = suspect_labels(graph, labels)
    images = [
        explorer.entry(features.ids[s.row], voted=classes[s.voted], share=s.share, own=s.own_share)
        for s in found[:MAX_LISTED]
    ]
    return {"images": images, "total": len(found), "labeled": int((labels >= 0).sum()), "k": graph.index.shape[1]}


def diverse(explorer: Explorer, run: OpenedRun) -> dict[str, Any]:
    """Return up to 1,000 images in the order of a diverse subset; the first m are the subset of m."""
    features = explorer.features(run, "encoder")
    rows, cosines = explorer.jobs.get(
        f"diverse/{run.name}", "diverse subset",
        lambda job: diverse_subset(features.features, min(MAX_SUBSET, len(features.ids)), job.report),
    )  # fmt: skip
    chosen = zip(features.ids[rows].tolist(), cosines.tolist(), strict=True)
    images = [explorer.entry(index, cosine=cosine) for index, cosine in chosen]
    return {"images": images, "count": len(features.ids)}


def export(explorer: Explorer, body: dict[str, Any]) -> str:
    """Return the text of a list file: the given entries with their reasons, or all images but these.

    `body` has the kind of the finding, `entries` [{id, reason}] and `rest`.
    """
    try:
        set_name = str(body.get("set", "images"))
        reasons = {int(entry["id"]): str(entry["reason"])[:500] for entry in body["entries"]}
        kind, rest = str(body["kind"])[:80], bool(body.get("rest", False))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"the entries of the list cannot be read: {error}") from error
    for index in (0, *reasons):
        explorer.ref(set_name, index)
    dataset = explorer.sets[set_name].dataset
    title = f"{kind}: {len(reasons):,} of {len(dataset):,} images of {explorer.sets[set_name].title}"
    header = [title, "by snclr explore"]
    if not rest:
        return format_list(dataset, reasons, header)
    header += [f"left out: {dataset.key(index)}: {reason}" for index, reason in reasons.items()]
    kept = dict.fromkeys((index for index in range(len(dataset)) if index not in reasons), "")
    return format_list(dataset, kept, header)
