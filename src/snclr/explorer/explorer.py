"""The opened runs and image sets, the images of uploads, and the features that all screens share."""

import contextlib
import io
import itertools
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from snclr.data.decode import RGBImage, decode_stream
from snclr.data.labels import chance_levels
from snclr.data.splits import sample_ids
from snclr.errors import UserError, count
from snclr.evaluation.analysis.graph import Graph, neighbor_graph
from snclr.evaluation.session import Session
from snclr.explorer.jobs import Job, Jobs, Pending
from snclr.explorer.opened_run import ImageFeatures, ImageSet, OpenedRun, open_sets

GRAPH_K = 20
"""Neighbors per image in the graph that colors the map."""
MAX_UPLOAD_BYTES = 20 * 2**20
MAX_QUERIES = 100
SAMPLE = 3_000
"""Images that are encoded again for Time and for the earlier checkpoints and pixels of Compare; larger datasets are
sampled."""
COMPARED = 20_000
"""Images whose neighbors Compare finds by the features of two runs, which exist for all images; the exact search takes
time quadratic in this number."""
TITLES = {
    "encoder": "encoder features", "y1": "projections y1", "y2": "projections y2",
    "target-encoder": "features of the target encoder",
}  # fmt: skip
"""Names of the networks' features in the progress."""
_QUERY_SIDE = 1024


@dataclass(frozen=True)
class ImageRef:
    """An image by the name of its set and its index in it. Uploads are in the set "queries"."""

    set: str
    index: int


class Query(NamedTuple):
    """An uploaded image, or a box of an image."""

    pixels: RGBImage
    title: str


class Explorer:
    """Everything the endpoints read. Features are computed in the background: methods raise Pending until then.

    Inside a background job, they wait instead.
    """

    def __init__(
        self, session: Session, other: str | Path | None = None, *, data: str | None = None, test: str | None = None,
        gallery: str | None = None, served: bool = True,
    ) -> None:  # fmt: skip
        self.jobs = Jobs(low_priority=served)
        self.run = OpenedRun("a", session.run, session)
        self.runs = {"a": self.run} | ({} if other is None else {"b": OpenedRun("b", Path(other), session)})
        """The opened runs by name."""
        self.sets, self.trained_on = open_sets(session.run, data, test, gallery)
        self._queries: dict[int, Query] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # An image of at most `side` pixels, encoded again (no metadata of the file), and its media type. The largest
        # take some hundred kilobytes each.
        self.thumbnail = lru_cache(maxsize=500)(lambda ref, side: encode_image(self.load(ref, side), side))

    def opening(self) -> str:
        """Return what was opened, in one line."""
        step = "" if self.run.step is None else f" at step {self.run.step:,}"
        parts = [f"{self.run.path}{step}, {count(len(self.images.dataset), 'image')} of {self.images.dataset.name}"]
        parts += [f"compared with {self.runs['b'].path}"] if "b" in self.runs else []
        titles = {"extra": "gallery", "test": "test images"}
        parts += [f"{titles[name]} {each.dataset.name}" for name, each in self.sets.items() if name in titles]
        return ", ".join(parts)

    @property
    def images(self) -> ImageSet:
        """The images to explore."""
        return self.sets["images"]

    def run_named(self, name: str) -> OpenedRun:
        """Return a run by its name, a or b."""
        if name not in self.runs:
            raise UserError(f"there is no run {name!r}; open a second one with snclr explore RUN RUN2")
        return self.runs[name]

    # Images

    def ref(self, set_name: str, index: str | int) -> ImageRef:
        """Check and return the reference of an image."""
        number = int(index) if str(index).isdecimal() else -1
        if set_name == "queries" and number not in self._queries:
            raise UserError("this query is no longer kept; upload the image again")
        if set_name != "queries" and not (set_name in self.sets and 0 <= number < len(self.sets[set_name].dataset)):
            raise UserError(f"there is no image {index!r} in {set_name!r}")
        return ImageRef(set_name, number)

    def load(self, ref: ImageRef, min_side: int | None = None) -> RGBImage:
        """Decode an image; raises BadImage."""
        if ref.set == "queries":
            return self._queries[ref.index].pixels
        return self.sets[ref.set].dataset.load(ref.index, min_side)

    def add_query(self, data: bytes, title: str) -> ImageRef:
        """Decode an upload with the safe decoder and keep it for this session; BadImage if it is not an image."""
        return self._keep(decode_stream(io.BytesIO(data), _QUERY_SIDE), title)

    def add_box(self, ref: ImageRef, box: tuple[float, float, float, float]) -> ImageRef:
        """Keep a box (left, top, right, bottom, in shares of the image) of an image as a query."""
        left, top, right, bottom = box
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise UserError(f"the box {box} is not inside the image")
        pixels = self.load(ref)
        height, width, _ = pixels.shape
        x0, y0 = int(left * width), int(top * height)
        x1, y1 = max(x0 + 1, round(right * width)), max(y0 + 1, round(bottom * height))
        return self._keep(pixels[y0:y1, x0:x1], f"box of {self.title(ref)}")

    def _keep(self, pixels: RGBImage, title: str) -> ImageRef:
        image = Image.fromarray(np.ascontiguousarray(pixels))
        image.thumbnail((_QUERY_SIDE, _QUERY_SIDE))  # larger ones only
        with self._lock:
            number = next(self._numbers)
            self._queries[number] = Query(np.array(image), title)
            while len(self._queries) > MAX_QUERIES:
                del self._queries[min(self._queries)]
        return ImageRef("queries", number)

    def title(self, ref: ImageRef) -> str:
        """Return the displayed name of an image."""
        return self._queries[ref.index].title if ref.set == "queries" else self.sets[ref.set].dataset.key(ref.index)

    def describe(self, ref: ImageRef) -> dict[str, Any]:
        """Return set, id, key and label of an image as JSON values."""
        label = None if ref.set == "queries" else self.sets[ref.set].dataset.class_name(ref.index)
        return {"set": ref.set, "id": ref.index, "key": self.title(ref), "label": label}

    def entry(self, index: int | Tensor, **values: Any) -> dict[str, Any]:
        """Describe one of the images to explore as JSON values, with further `values`."""
        return {**self.describe(ImageRef("images", int(index))), **values}

    # Features

    def features(self, run: OpenedRun, network: str, set_name: str = "images") -> ImageFeatures:
        """Return the features of an image set, or raise Pending."""
        images = self.sets[set_name].dataset
        title = f"{TITLES[network]} of {len(images):,} images" + (f" ({run.title})" if run.name == "b" else "")

        def compute(job: Job) -> ImageFeatures:
            matrix = run.features(network, images, job.report)
            _ = matrix.row_of  # built here, because the first click must not wait for it
            return matrix

        return self.jobs.get(f"features/{run.name}/{network}/{set_name}", title, compute)

    def graph(self, run: OpenedRun) -> Graph:
        """Return the exact neighbor graph of the encoder features, or raise Pending."""
        return self.jobs.get(
            f"graph/{run.name}", f"exact neighbors of {len(self.images.dataset):,} images",
            lambda job: neighbor_graph(self.features(run, "encoder").features, GRAPH_K, job.report),
        )  # fmt: skip

    def sample(self, count: int = SAMPLE) -> Tensor:
        """Return the ids of `count` images, or of all if there are fewer."""
        return torch.from_numpy(sample_ids(len(self.images.dataset), count))

    def labels(self, ids: Tensor) -> Tensor:
        """Return the class numbers (n,) of images of the explored set, -1 if unknown."""
        labels = self.images.dataset.labels
        return torch.full_like(ids, -1) if labels is None else torch.from_numpy(labels)[ids]

    def chance(self, run: OpenedRun | None = None) -> dict[str, float]:
        """Return the chance levels of a run's metrics, or of the explored images; {} if the classes are unknown."""
        name = "images" if run is None else self.trained_on if run is self.run else None
        # A static folder has no training set beside its images.
        return chance_levels(self.sets[name].dataset.labels) if name in self.sets else {}

    def start(self) -> None:
        """Start the jobs of the first screens."""
        for network in dict.fromkeys(("y2", "y1", self.run.searched, "encoder")):
            if network in self.run.networks:
                with contextlib.suppress(Pending):
                    self.features(self.run, network)


def encode_image(pixels: RGBImage, side: int, *, jpeg: bool = False) -> tuple[bytes, str]:
    """Encode an image at no more than `side` pixels: small ones as PNG without loss unless `jpeg`, others as JPEG."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    is_small = max(image.size) <= 96
    image.thumbnail((side, side), Image.Resampling.LANCZOS)  # larger ones only
    kind = "png" if is_small and not jpeg else "jpeg"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=95 if max(image.size) <= 96 else 86)
    return buffer.getvalue(), f"image/{kind}"
