"""Images for TensorBoard, from the features in a run's queue: a neighbor grid, and data for the projector."""

from __future__ import annotations

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
from snclr.data.decode import BadImage, RGBImage
from snclr.io.atomic import write_atomic
from snclr.methods.common.queue import NeighborQueue

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
    index, ids = _newest(queue)
    if len(ids) < 2:
        return None
    picked = torch.linspace(0, len(ids) - 1, min(rows, len(ids)), device=ids.device).round().long()
    cosine = (queue.candidates[index[picked]].float() @ queue.candidates.float().T)[:, index]
    cosine[torch.arange(len(picked)), picked] = -torch.inf
    nearest = cosine.topk(min(k, len(ids) - 1), dim=1).indices
    table = torch.cat([picked[:, None], nearest], dim=1)
    return _grid(dataset, ids[table].flatten().tolist(), TILE, columns=table.shape[1], gap=_GAP)


def write_projector(folder: Path, queue: NeighborQueue, dataset: ImageDataset, *, images: int = 500) -> None:
    """Write the newest projections of the queue, with labels and thumbnails, for TensorBoard's projector."""
    index, ids = _newest(queue)
    if len(ids) < 2:
        return
    picked = torch.linspace(0, len(ids) - 1, min(images, len(ids)), device=ids.device).round().long()
    features, shown = queue.candidates[index[picked]].float().cpu().numpy(), ids[picked].tolist()
    labels = [f"{_clean(dataset.key(image))}\t{_clean(dataset.class_name(image) or '')}" for image in shown]
    sprite = _grid(dataset, shown, _SPRITE_TILE, columns=math.ceil(math.sqrt(len(shown))), gap=0)
    write_atomic(folder / "projections.tsv", "".join("\t".join(f"{v:.5g}" for v in row) + "\n" for row in features))
    write_atomic(folder / "projections-labels.tsv", "image\tclass\n" + "\n".join(labels) + "\n")
    write_atomic(folder / "projections.png", png(sprite))
    write_atomic(folder / "projector_config.pbtxt", _PROJECTOR)


def png(image: RGBImage) -> bytes:
    """Encode an image."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def _newest(queue: NeighborQueue) -> tuple[Tensor, Tensor]:
    """Return the row (n,) of the newest entry of each image in the queue, and the image ids (n,), sorted by id."""
    rows = queue.newest()
    ids, order = queue.ids[rows].sort()
    return rows[order], ids


def _grid(dataset: ImageDataset, images: Sequence[int], side: int, *, columns: int, gap: int) -> RGBImage:
    """Return images as a grid of squares, row by row, on white."""
    tiles = torch.stack([torch.from_numpy(_tile(dataset, image, side)) for image in images]).permute(0, 3, 1, 2)
    grid: RGBImage = make_grid(tiles, columns, padding=gap, pad_value=255).permute(1, 2, 0).numpy()
    return grid


def _tile(dataset: ImageDataset, index: int, side: int) -> RGBImage:
    """Return the center square (side, side, 3) of an image; gray if it cannot be read."""
    try:
        image = Image.fromarray(dataset.load(index, side))
    except BadImage:
        return np.full((side, side, 3), 128, np.uint8)
    return np.array(ImageOps.fit(image, (side, side), Image.Resampling.LANCZOS))


def _clean(text: str) -> str:
    """Keep a name in its column and on its line."""
    return " ".join(text.split())
