"""What a page shows of a run's images: a seeded sample of them, their neighbours, and a map."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.nn.functional as F
from torch import nn

from snclr.data.decode import BadImage, Picture
from snclr.data.order import epoch_order
from snclr.data.sources import Source
from snclr.data.splits import Subset
from snclr.errors import UserError
from snclr.evaluate.features import Features
from snclr.evaluate.neighbor_space import open_space
from snclr.evaluate.neighbors import class_names, neighbor_table, pick_queries, same_class_share
from snclr.json_values import is_number
from snclr.report.embedding_map import TILE, EmbeddingMap, project
from snclr.report.gallery import SIDE, Gallery, Shown
from snclr.report.markup import picture_uri, tile
from snclr.train.run_folder import RunFolder, open_run

Extract = Callable[[nn.Module, Source, str, int, str], Features]
"""A network, images, the network's role in the run, the image size and a word for people, to features."""
Made = TypeVar("Made")


def sample(source: Source, count: int, seed: int) -> Source:
    """At most `count` images, chosen by the seed, under their own keys and in their own order."""
    if len(source) <= count:
        return source
    return Subset(source, np.sort(epoch_order(len(source), seed, epoch=0)[:count]))


def saved_gallery(run: RunFolder, source: Source, *, rows: int, k: int) -> Gallery | None:
    """The rows that `snclr neighbors` drew of these images with the run's present weights; None where it has not."""
    path = run.figures / "neighbors.json"
    try:
        newest = max(file.stat().st_mtime for file in [run.encoder_weights, run.checkpoints] if file.exists())
        if path.stat().st_mtime < newest:
            return None
        saved = json.loads(path.read_bytes())
        shares = [float(one) if is_number(one) else None for one in saved["same_class_by_rank"][:k]]
        drawn = [(_shown(source, row), [_shown(source, one) for one in row["neighbors"][:k]]) for row in saved["rows"]]
        enough = len(drawn) >= min(rows, len(source)) and all(len(near) >= min(k, len(source) - 1) for _, near in drawn)
        return Gallery(drawn[:rows], str(saved["protocol"]), shares) if enough else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None  # not there, of other images, or not ours: the rows are computed instead


def find_gallery(
    run: str | Path, source: Source, extract: Extract, *, rows: int, k: int, seed: int, device: str
) -> Gallery:
    """Some images and their neighbours among all of the source, found and weighed as the run was trained."""
    space = open_space(run, device=device)
    y2 = extract(space.search, source, space.role, space.image_size, "neighbours")
    if len(y2.ids) < 2:
        raise UserError(f"neighbours need two images that can be read; {source.name} has {len(y2.ids)}")
    y1 = y2 if space.attend is None else extract(space.attend, source, "y1", space.image_size, "positiveness")
    order = pick_queries(y2, len(y2.ids), seed=seed)
    keys, labels = [source.key(index) for index in y2.ids.tolist()], class_names(source, y2.ids)
    table = neighbor_table(
        y2.features[order], F.normalize(y2.features, dim=1),
        query_keys=[keys[place] for place in order.tolist()], candidate_keys=keys,
        query_ids=y2.ids[order], candidate_ids=y2.ids,
        query_labels=None if labels is None else [labels[place] for place in order.tolist()], candidate_labels=labels,
        attention_features=y1.features[order], k=k, weigh=space.weigh,
    )  # fmt: skip
    ranked = [replace(row, neighbors=sorted(row.neighbors, key=lambda found: -found.w)) for row in table]
    drawn = []
    for row in ranked[:rows]:
        query = Shown(row.key, row.label, _uri(source, int(y2.ids[order[row.index]])))
        near = [
            Shown(one.key, one.label, _uri(source, int(y2.ids[one.index])), one.w, one.cosine, one.same_class)
            for one in row.neighbors
        ]
        drawn.append((query, near))
    protocol = (
        f"the {k} nearest by cosine of {space.words}; candidates: {len(y2.ids):,} images of {source.name}; an image is "
        f"never its own neighbour; centre crops; shares over all {len(table):,} images, seed {seed}"
    )
    return Gallery(drawn, protocol, same_class_share(ranked))


def find_map(run: str | Path, source: Source, extract: Extract, *, device: str) -> EmbeddingMap:
    """The map of a source by the run's encoder: the finished one, or that of the last checkpoint."""
    encoder, image_size, role = _encoder(run, device)
    found = extract(encoder, source, role, image_size, "map")
    if len(found.ids) < 3:
        raise UserError(f"a map needs three images that can be read; {source.name} has {len(found.ids)}")
    places, explained = project(F.normalize(found.features, dim=1).double().numpy())
    ids = found.ids.tolist()
    classes = class_names(source, found.ids)
    blank = np.full((TILE, TILE, 3), 128, np.uint8)
    small = [_picture(source, index, lambda picture: tile(picture, TILE)) for index in ids]
    tiles = np.stack([blank if picture is None else picture for picture in small])
    protocol = (
        f"The encoder's features of {len(ids):,} images of {source.name}, scaled to length 1, seen from the two "
        "directions in which they differ most (PCA, exact). These have "
        f"{explained[0]:.1%} and {explained[1]:.1%} of the variance: what is near on the map need not be near "
        "in all directions. Labels colour the map, nothing else."
    )
    known = classes if classes is not None and any(one is not None for one in classes) else None
    return EmbeddingMap(places, explained, [source.key(index) for index in ids], known, tiles, protocol)


def _encoder(run: str | Path, device: str) -> tuple[nn.Module, int, str]:
    """The encoder, its image size, and its role for the store of features."""
    import torch

    from snclr.export.encoder import load_encoder
    from snclr.train.saved_run import load_method

    if open_run(run).encoder_weights.is_file():
        encoder, spec = load_encoder(Path(run))
        return encoder, spec.image_size, "encoder"
    method, config, _ = load_method(run, torch.device(device))
    return method.encoder, config.image_size, "checkpoint"


def _shown(source: Source, one: dict[str, Any]) -> Shown:
    """A picture of a saved table; ValueError where the source has another image under its number."""
    key, index, label, same = one["key"], one["index"], one["label"], one.get("same_class")
    if type(index) is not int or not 0 <= index < len(source) or source.key(index) != key:
        raise ValueError("of other images")
    w, cosine = one.get("w"), one.get("cosine")
    return Shown(
        key, None if label is None else str(label), _uri(source, index), float(w) if is_number(w) else None,  # type: ignore[arg-type]
        float(cosine) if is_number(cosine) else None, same if isinstance(same, bool) else None,  # type: ignore[arg-type]
    )  # fmt: skip


def _uri(source: Source, index: int) -> str | None:
    return _picture(source, index, lambda picture: picture_uri(picture, SIDE))


def _picture(source: Source, index: int, make: Callable[[Picture], Made]) -> Made | None:
    """What is made of an image; None where it cannot be read any more."""
    try:
        return make(source.load(index, SIDE))
    except BadImage:
        return None
