from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from snclr.data.datasets.base import ArrayDataset
from snclr.methods.common.queue import NeighborQueue
from snclr.train.tensorboard_images import TILE, neighbor_grid
from tests.helpers.tiny_run import train, write_images
from tests.train.test_metrics import events


def test_the_grid_shows_images_with_their_nearest_neighbors() -> None:
    """Four images of one gray value each: 0 and 2 are near each other, and so are 1 and 3."""
    images = np.stack([np.full((8, 8, 3), 60 * n, np.uint8) for n in range(4)])
    queue = NeighborQueue(length=8, dim=2)
    queue.push(torch.tensor([[0.0, 1.0]] * 4), torch.arange(4))  # older features of the same images
    queue.push(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.1, 0.9]]), torch.arange(4))
    grid = neighbor_grid(queue, ArrayDataset("gray", images), rows=4, k=1)
    assert grid is not None
    pixels = grid[:, :, 0] // 60
    values = [int(pixels[row * (TILE + 4) + 9, left]) for row in range(4) for left in (9, TILE + 20)]
    assert values == [0, 2, 1, 3, 2, 0, 3, 1]
    assert neighbor_grid(NeighborQueue(length=8, dim=2), ArrayDataset("gray", images)) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorboard")
    return train(write_images(folder / "images"), folder / "run", epochs=3)


def test_a_run_writes_neighbor_grids(run: Path) -> None:
    (file,) = (run / "tensorboard").glob("events*")
    found = [(event.step, value) for event in events(file) for value in event.summary.value if value.tag == "neighbors"]
    assert [step for step, _ in found] == [3, 6, 9]  # after each of three epochs of three steps
    for _, value in found:
        with Image.open(io.BytesIO(value.image.encoded_image_string)) as image:
            assert image.size == (value.image.width, value.image.height)


def test_a_run_writes_its_projections_for_the_projector(run: Path) -> None:
    folder = run / "tensorboard"
    features = np.loadtxt(folder / "projections.tsv", delimiter="\t")
    head, *labels = (folder / "projections-labels.tsv").read_text().splitlines()
    assert head == "image\tclass"
    assert len(features) == len(labels) > 30
    assert np.linalg.norm(features, axis=1) == pytest.approx(np.ones(len(features)), abs=1e-3)
    assert all(label.split("\t")[0].startswith(label.split("\t")[1]) for label in labels)  # red/red_1.png, red
    config = (folder / "projector_config.pbtxt").read_text()
    for name in ("projections.tsv", "projections-labels.tsv", "projections.png"):
        assert f'"{name}"' in config
        assert (folder / name).is_file()
