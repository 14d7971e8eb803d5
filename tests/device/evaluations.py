"""Every evaluation on the pretended GPU; prints what was counted in each as one JSON object.

python -m tests.device.evaluations WORLD_SIZE FOLDER
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from snclr.data.datasets.base import open_dataset
from snclr.data.sampler import ViewKey
from snclr.data.transforms import compiled_color
from snclr.data.transforms.compiled_color import fused_color
from snclr.data.transforms.views import VIEW_GROUPS, color_views
from snclr.evaluation.detection.coco import open_coco
from snclr.evaluation.detection.model import build_detector
from snclr.evaluation.detection.scoring import detect_objects
from snclr.evaluation.detection.settings import DetectSettings
from snclr.evaluation.detection.task import DetectionTask
from snclr.evaluation.features import BatchPlan, extract_features
from snclr.evaluation.finetune import FinetuneSettings, FinetuneTask, build_classifier
from snclr.evaluation.knn import knn
from snclr.evaluation.linear import linear_cached
from snclr.evaluation.linear_task import AugmentedTask, LinearHeads
from snclr.evaluation.retrieval.explain import explain_loss, project_image
from snclr.evaluation.retrieval.gallery import Gallery, Queries, neighbor_rows
from snclr.evaluation.retrieval.space import encoder_space, open_space
from snclr.evaluation.session import Session, run_encoder
from snclr.runtime.device import to_device
from snclr.runtime.stop import StopFlag
from snclr.train.load_run import load_trained_method
from snclr.train.trainer import TrainTask
from tests.device.evaluations_parts import EVALUATIONS, ON_SEVERAL_RANKS
from tests.device.steps import PretendedFabric, SilentProgress, lines, start
from tests.helpers import tiny_coco, tiny_run
from tests.helpers.pretended_gpu import NAME, PretendedGpu

DEVICE = f"{NAME}:0"
SMALL_DETECTOR: dict[str, Any] = {
    "iterations": 3, "batch_size": 8, "short_side": (48, 64), "long_side": 80, "width": 8, "rois": 16, "proposals": 50,
    "anchor": 16, "keep_empty": True,
}  # fmt: skip


class AutocastFabric(PretendedFabric):
    """Wraps a module as Fabric does: its forward pass runs under autocast."""

    def setup(self, module: Any, optimizer: Any) -> tuple[Any, Any]:
        def forward(*args: Any) -> Any:
            with self.forward_context():
                return module(*args)

        return forward, optimizer


class Evaluations:
    """The parts of the evaluations of a tiny run, each a method that returns the device types of its results."""

    def __init__(self, gpu: PretendedGpu, folder: Path, world_size: int) -> None:
        self.gpu, self.folder, self.world_size = gpu, folder, world_size
        self.run, self.images = folder / "run", folder / "images"
        self.dataset = open_dataset(str(self.images))
        self.labels = torch.from_numpy(self.dataset.labels)
        self.session = Session(self.run, DEVICE, StopFlag(), True, False, 0)

    def features(self) -> Any:
        """Extract the features of all images."""
        encoder, spec = run_encoder(self.run)
        found = extract_features(
            encoder, self.dataset, image_size=spec.image_size, batch_size=64, device=DEVICE, quiet=True
        )
        self.found = found.features
        return next(encoder.parameters()), found.features

    def knn(self) -> Any:
        """Classify by kNN."""
        return knn(self.found, self.classes(), self.found, self.classes(), k=5, device=DEVICE).predictions

    def linear_cached(self) -> Any:
        """Train linear heads on cached features."""
        score = linear_cached(
            self.found, self.classes(), self.found, self.classes(), epochs=2, batch_size=16,
            learning_rates=(0.1, 1.0), device=DEVICE,
        )  # fmt: skip
        return score.predictions

    def linear_step(self) -> Any:
        """Train a step of the linear probe on random crops."""
        encoder, spec = run_encoder(self.run)
        plan = BatchPlan(np.arange(48), batch=16, chunk=16, epochs=1, seed=0, rank=0, world_size=self.world_size)
        heads = LinearHeads(spec.num_features, 3, [0.1], device=DEVICE)
        y = torch.arange(len(self.dataset)) % 3
        task = AugmentedTask(
            heads, plan, y, encoder, self.dataset, image_size=spec.image_size, workers=0, device=DEVICE, stop=None
        )
        self.last_step(task)
        return heads.weight

    def finetune_step(self) -> Any:
        """Train a step of fine-tuning."""
        encoder, spec = run_encoder(self.run)
        settings = FinetuneSettings(epochs=1, batch_size=16, lr=0.1, head_lr=0.1, weight_decay=0.0, seed=0)
        model = build_classifier(encoder, spec, 3, from_scratch=False, seed=0)
        task = FinetuneTask(
            model, self.dataset, torch.arange(3), settings, spec.image_size, nonfinite=self.folder / "bad.json",
            device=DEVICE,
        )  # fmt: skip
        self.last_step(task)
        return task.model.head.weight

    def detection_step(self) -> Any:
        """Train a step of Mask R-CNN."""
        self.coco = open_coco(self.folder / "coco", seed=0)
        encoder, spec = run_encoder(self.folder / "run")
        settings = DetectSettings(**SMALL_DETECTOR)
        train = self.coco[0].for_training(keep_empty=True)
        model = build_detector(encoder, spec, len(train.categories), settings)
        fabric = AutocastFabric(self.world_size, autocast=True)
        task = DetectionTask(model, train, settings, fabric, self.folder / "bad.json")
        self.last_step(task)
        self.detector = task.model, settings
        return next(task.model.parameters())

    def detection_test(self) -> Any:
        """Detect the objects of the validation images."""
        model, settings = self.detector
        detections, _ = detect_objects(model, self.coco[1], settings, device=DEVICE, quiet=True)
        assert isinstance(detections, list)
        return next(model.parameters())

    def search(self) -> Any:
        """Find the most similar images."""
        space = encoder_space(self.run)
        queries = Queries.embed(self.session, space, self.dataset)
        rows, _ = neighbor_rows(queries, Gallery.embed(self.session, space, self.dataset), 3)
        assert len(rows) > 0
        return next(space.networks[space.searched].parameters())

    def neighbors(self) -> Any:
        """Find the neighbors of target projections in the queue, with their weights."""
        space = open_space(self.run, queue=True, device=DEVICE)
        queries = Queries.embed(self.session, space, self.dataset)
        gallery = Gallery.from_queue(self.run, space.queue)
        rows, _ = neighbor_rows(queries, gallery, 3, weigh=space.weigh)
        assert len(rows) > 0
        return next(space.networks[space.searched].parameters())

    def explain(self) -> Any:
        """Compute the loss of one image."""
        method, _ = load_trained_method(self.run, torch.device(DEVICE))
        views = project_image(method, to_device(torch.randn(1, 3, 16, 16), DEVICE))
        loss, terms = explain_loss(method.criterion, views, Gallery.from_queue(self.run, method.queue))
        assert loss == loss
        assert len(terms) > 1
        return views.y1

    def color(self) -> Any:
        """Run the color stage of all sorts of views transform by transform."""
        return self.color_views(8, list(VIEW_GROUPS))

    def color_views(self, count: int, groups: list[str]) -> Any:
        """Return the last of the views, which must all have the values of the CPU."""
        pixels, ids = torch.randint(0, 256, (count, 3, 24, 24), dtype=torch.uint8), np.arange(count)
        images, found = to_device(pixels, DEVICE), None
        for name in groups:
            for view, settings in enumerate(VIEW_GROUPS[name]):
                key = ViewKey(0, 0, ids, view)
                found = color_views(images, settings, key, torch.channels_last)
                difference = found.elem - color_views(pixels, settings, key, torch.channels_last)  # type: ignore[attr-defined]
                assert difference.abs().max() < 1e-3, (name, view)
        return found

    def compiled_color(self) -> Any:
        """Run the function that a GPU compiles, operation by operation."""
        with (
            mock.patch.object(compiled_color, "COMPILED_DEVICES", {NAME}),
            mock.patch.object(compiled_color, "_compiled", return_value=fused_color),
        ):
            found = self.color_views(48, [name for name, pair in VIEW_GROUPS.items() if not pair[0].randaugment])
        assert not compiled_color._failed
        return found

    def classes(self) -> torch.Tensor:
        """Return labels for the extracted features; on pretended ranks these are repeated."""
        return torch.arange(len(self.found)) % 3

    def last_step(self, task: TrainTask[Any]) -> None:
        """Train two steps; only the second is counted."""
        task.progress = SilentProgress()  # type: ignore[assignment]
        batches = task.batches(0)
        task.step(next(batches), log=True)
        batch = next(batches)
        self.gpu.reset()
        task.step(batch, log=True)


PARTS: dict[str, Callable[[Evaluations], Any]] = {
    "color": Evaluations.color,
    "compiled color": Evaluations.compiled_color,
    "features": Evaluations.features,
    "knn": Evaluations.knn,
    "linear cached": Evaluations.linear_cached,
    "linear step": Evaluations.linear_step,
    "finetune step": Evaluations.finetune_step,
    "detection step": Evaluations.detection_step,
    "detection test": Evaluations.detection_test,
    "search": Evaluations.search,
    "neighbors": Evaluations.neighbors,
    "explain": Evaluations.explain,
}


def main(world_size: int, folder: Path) -> None:
    start(world_size)
    assert tuple(PARTS) == EVALUATIONS
    counted: dict[str, Any] = {}
    with PretendedGpu() as gpu:
        evaluations = Evaluations(gpu, folder, world_size)
        for name, part in PARTS.items():
            if world_size > 1 and name not in ON_SEVERAL_RANKS:
                continue
            gpu.reset()
            results = part(evaluations)
            results = results if isinstance(results, tuple) else (results,)
            found: collections.Counter[str] = lines(gpu)
            counted[name] = {
                "waits": sum(found.values()), "lines": found, "kernels": gpu.kernels,
                "devices": sorted({tensor.device.type for tensor in results}),
                "finite": all(bool(tensor.detach().cpu().isfinite().all()) for tensor in results),
                "collectives": dict(gpu.collectives),
                "dtypes": {op: sorted(map(str, kinds)) for op, kinds in gpu.dtypes.items()},
            }  # fmt: skip
    print(json.dumps(counted))


def prepare(folder: Path) -> None:
    """Train the tiny run and write the images, on the CPU."""
    images = tiny_run.write_images(folder / "images")
    (images / "red" / "broken.png").unlink()
    tiny_run.train(images, folder / "run")
    tiny_coco.write(folder / "coco", train=24, val=4)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]), Path(sys.argv[2]))
