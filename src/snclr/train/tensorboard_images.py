"""Images for TensorBoard, from the features in a run's queue: a neighbor grid, and data for the projector."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.utils import make_grid

from snclr.data.datasets.base import ImageDataset
from snclr.data.decode import RGBImage, load_or_none
from snclr.io.atomic import write_atomic
from snclr.methods.common.queue import NeighborQueue, nearest_neighbors

TILE = 64
"""Pixels of an image in the grid."""
_SPRITE_TILE = 32
_GAP = 4
_PROJECTOR = """embeddings {
  tensor_name: "projections"
  tensor_path: "projections.tsv"
  metadata_path: "projections-labels.tsv"
  sprite { image_path: "projections.png" single_image_dim: 32 single_image_dim: 32 }
}
"""


def neighbor_grid(queue: NeighborQueue, dataset: ImageDataset, *, rows: int = 4, k: int = 5) -> RGBImage | None:
    """Return images of the queue, each followed by its k nearest other images; None if the queue has fewer than two.

    The queries are spread over the image ids, so that they stay the same from grid to grid if the data fit the queue.
    """
    index, ids, picked = _newest(queue, rows)
    if len(ids) < 2:
        return None
    features = queue.candidates[index].float()
    found = nearest_neighbors(features[picked], features, min(k, len(ids) - 1), ids=ids[picked], candidate_ids=ids)
    table = torch.cat([picked[:, None], found.index], dim=1)
    return _grid(dataset, ids[table].flatten().tolist(), TILE, columns=table.shape[1], gap=_GAP)


def write_projector(folder: Path, queue: NeighborQueue, dataset: ImageDataset, *, images: int = 500) -> None:
    """Write the newest projections of the queue, with labels and thumbnails, for TensorBoard's projector."""
    index, ids, picked = _newest(queue, images)
    if len(ids) < 2:
        return
    features, shown = queue.candidates[index[picked]].float().cpu().numpy(), ids[picked].tolist()
    labels = [f"{_clean(dataset.key(image))}\t{_clean(dataset.class_name(image) or '')}" for image in shown]
    sprite = _grid(dataset, shown, _SPRITE_TILE, columns=math.ceil(math.sqrt(len(shown))), gap=0)
    write_atomic(folder / "projections.tsv", "".join("\t".join(f"{v:.5g}" for v in row) + "\n" for row in features))
    write_atomic(folder / "projections-labels.tsv", "image\tclass\n" + "\n".join(labels) + "\n")
    png = io.BytesIO()
    Image.fromarray(sprite).save(png, "PNG")
    write_atomic(folder / "projections.png", png.getvalue())
    write_atomic(folder / "projector_config.pbtxt", _PROJECTOR)


def _newest(queue: NeighborQueue, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row (n,) of the newest entry of each image in the queue, and the image ids (n,), sorted by id.

    The third tensor has the positions of `count` of them, evenly spread.
    """
    rows = queue.newest()
    ids, order = queue.ids[rows].sort()
    picked = torch.linspace(0, len(ids) - 1, min(count, len(ids)), device=ids.device).round().long()
    return rows[order], ids, picked


def _grid(dataset: ImageDataset, images: Sequence[int], side: int, *, columns: int, gap: int) -> RGBImage:
    """Return images as a grid of squares, row by row, on white."""
    tiles = torch.stack([torch.from_numpy(_tile(dataset, image, side)) for image in images]).permute(0, 3, 1, 2)
    return make_grid(tiles, columns, padding=gap, pad_value=255).permute(1, 2, 0).numpy()


def _tile(dataset: ImageDataset, index: int, side: int) -> RGBImage:
    """Return the center square (side, side, 3) of an image; gray if it cannot be read."""
    image = load_or_none(dataset.load, index, side)
    if image is None:
        return np.full((side, side, 3), 128, np.uint8)
    return np.array(ImageOps.fit(Image.fromarray(image), (side, side), Image.Resampling.LANCZOS))


def _clean(text: str) -> str:
    """Keep a name in its column and on its line."""
    return " ".join(text.split())
