"""Images per second of the dataloader, compared with the same work in plain loops.

    python benchmarks/data.py             # 500 × 375 JPEGs, two views of 224 px; about three minutes on two cores
    python benchmarks/data.py --json      # the same, with one JSON object as the last line

bare      the work of the loader's workers per image (read, decode, crop and flip two views) in as many plain processes,
          each over its own part of the files: no batches, no queues, no order
decode    the same processes, decoding only
files     batches of crops from the loader's workers, from a folder
shards    the same, from `snclr pack` of that folder
batches   the loader as the trainer uses it: also color transforms, which run on the same cores on a CPU
lightly   the same views by lightly's BYOLTransform in a torch DataLoader with as many workers

The measurements alternate, so that the load of the machine affects all alike. The start of the processes is not
counted. The numbers to look at are files / bare and shards / bare, at least 0.9, and batches / lightly, at least 1;
medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from snclr.api.export import pack
from snclr.data.datasets.base import ImageDataset, open_dataset
from snclr.data.loader import CropSteps, ViewLoader
from snclr.data.sampler import ViewKey
from snclr.data.transforms.views import VIEW_GROUPS, crop_views
from snclr.data.workers import in_processes

VIEWS = VIEW_GROUPS["byol"]
_source: ImageDataset | None = None


def make_photos(folder: Path, count: int) -> Path:
    """Write JPEGs of about 60 kB: the demo's images, enlarged, with sensor noise."""
    small = open_dataset("demo").images  # type: ignore[attr-defined]
    generator = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        large = Image.fromarray(small[number]).resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.asarray(large, np.float32) + generator.normal(0, 8, (375, 500, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number:05d}.jpg", quality=90)
    return folder


def start_process(spec: str) -> None:
    global _source
    torch.set_num_threads(1)  # as in the loader's workers
    _source = open_dataset(spec)


def bare_work(task: tuple[list[int], int, bool]) -> int:
    ids, size, crops = task
    assert _source is not None
    for index in ids:
        image = _source.load(index, min_side=4 * size)
        if crops:
            for view, settings in enumerate(VIEWS):
                crop_views([image], settings, size, ViewKey(0, 0, np.array([index]), view))
    return len(ids)


def bare_rate(pool: Any, length: int, workers: int, size: int, images: int, *, crops: bool) -> float:
    ids = [number % length for number in range(images)]
    start = time.perf_counter()
    done = sum(pool.map(bare_work, [(ids[part::workers], size, crops) for part in range(workers)], chunksize=1))
    return float(done / (time.perf_counter() - start))


def steady_rate(items: Iterator[Any], batch: int, skip: int, count: int) -> float:
    """Return the images per second between batch `skip` and the batch `count` later.

    More items follow, since some workers would otherwise be idle at the end.
    """
    start = 0.0
    for number, _ in enumerate(items):
        if number == skip:
            start = time.perf_counter()
        elif number == skip + count:
            break
    return count * batch / (time.perf_counter() - start)


def stage1_rate(dataset: ImageDataset, size: int, batch: int, count: int, workers: int) -> float:
    crops = CropSteps(dataset, VIEWS, (size,) * len(VIEWS), batch, seed=0, rank=0, world_size=1)
    skip = 4 * workers
    return steady_rate(in_processes(crops, 0, skip + count + skip, workers=workers), batch, skip, count)


def batches_rate(dataset: ImageDataset, size: int, batch: int, count: int, workers: int) -> float:
    loader = ViewLoader(dataset, views=VIEWS, image_size=size, batch_size=batch, seed=0, workers=workers)
    skip = 4 * workers
    return steady_rate(loader.batches(0, skip + count + skip), batch, skip, count)


class LightlyPhotos(Dataset[list[Tensor]]):
    """The photos with lightly's views, as a user of lightly reads them."""

    def __init__(self, files: list[Path], size: int) -> None:
        from lightly.transforms.byol_transform import BYOLTransform, BYOLView1Transform, BYOLView2Transform

        self.files = files
        self.transform = BYOLTransform(BYOLView1Transform(input_size=size), BYOLView2Transform(input_size=size))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> list[Tensor]:
        with Image.open(self.files[index]) as image:
            views: Any = self.transform(image.convert("RGB"))
        return list(views)


def lightly_rate(photos: Path, size: int, batch: int, count: int, workers: int) -> float:
    files, skip = sorted(photos.iterdir()), 4 * workers
    images = [files[number % len(files)] for number in range((skip + count + skip) * batch)]
    loader = DataLoader(
        LightlyPhotos(images, size), batch, shuffle=True, num_workers=workers, multiprocessing_context="spawn"
    )
    return steady_rate(iter(loader), batch, skip, count)


def measure(a: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    photos = make_photos(folder / "photos", a.images)
    pack(photos, shards=folder / "shards", shard_size="8MB", quiet=True)
    files, shards = open_dataset(photos), open_dataset(folder / "shards")
    count = max(a.measured // a.batch_size, 4)
    rates: dict[str, list[float]] = {"bare": [], "decode": [], "files": [], "shards": [], "batches": [], "lightly": []}
    with multiprocessing.get_context("spawn").Pool(a.workers, start_process, (str(photos),)) as pool:
        bare_rate(
            pool, len(files), a.workers, a.image_size, a.images, crops=True
        )  # now the operating system caches the files
        for number in range(a.rounds):
            bare = {"pool": pool, "length": len(files), "workers": a.workers, "size": a.image_size}
            loader = {"size": a.image_size, "batch": a.batch_size, "count": count, "workers": a.workers}
            rates["bare"].append(bare_rate(**bare, images=a.measured, crops=True))
            rates["files"].append(stage1_rate(files, **loader))
            rates["shards"].append(stage1_rate(shards, **loader))
            rates["bare"].append(bare_rate(**bare, images=a.measured, crops=True))
            rates["decode"].append(bare_rate(**bare, images=a.measured, crops=False))
            rates["batches"].append(batches_rate(files, **loader))
            rates["lightly"].append(lightly_rate(photos, **loader))
            rates["batches"].append(batches_rate(files, **loader))
            print(f"round {number + 1} of {a.rounds}", flush=True)
    return rates


def ratio(rates: dict[str, list[float]], name: str) -> float:
    """Return the median over rounds of a rate divided by the mean of the bare loops before and after it."""
    values = rates[name] if name != "batches" else rates[name][::2]
    pairs = zip(values, rates["bare"][::2], rates["bare"][1::2], strict=True)
    return statistics.median(2 * rate / (before + after) for rate, before, after in pairs)


def lightly_ratio(rates: dict[str, list[float]]) -> float:
    """Return the median over rounds of the mean of our batches before and after lightly's, divided by lightly's."""
    triples = zip(rates["lightly"], rates["batches"][::2], rates["batches"][1::2], strict=True)
    return statistics.median((before + after) / (2 * rate) for rate, before, after in triples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512, help="JPEGs to write")
    parser.add_argument("--measured", type=int, default=1024, help="images in each measurement")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(a, Path(folder))
    result: dict[str, Any] = {
        "workers": a.workers,
        "image_size": a.image_size,
        "batch_size": a.batch_size,
        "images_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "of_bare": {name: ratio(rates, name) for name in ("files", "shards", "batches")},
        "of_lightly": lightly_ratio(rates),
        "rounds": rates,
    }
    print(f"\n{a.workers} processes, 500 × 375 JPEGs, two views of {a.image_size} px; medians of {a.rounds} rounds")
    for name, value in result["images_per_second"].items():
        share = f"  {result['of_bare'][name]:.3f} of bare" if name in result["of_bare"] else ""
        print(f"{name:8} {value:8.1f} images/s{share}")
    print(f"batches / lightly {result['of_lightly']:.3f}")
    if a.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
