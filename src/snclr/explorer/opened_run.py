"""What the screens read of a run: networks, images, features, queue, metrics and settings.

Only this module opens checkpoints, datasets and settings; the screens compute with what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.checkpoint.encoder_file import load_encoder
from snclr.checkpoint.format import load_checkpoint
from snclr.checkpoint.run_dir import RunDir, open_run
from snclr.checkpoint.snapshots import load_snapshot, snapshots
from snclr.data.datasets.base import ArrayDataset, ImageDataset, open_dataset
from snclr.data.decode import RGBImage
from snclr.data.same_images import same_images
from snclr.data.splits import Subset, has_own_test_split
from snclr.data.transforms.crop import center_crop
from snclr.data.transforms.views import (
    MEAN,
    STD,
    VIEW_GROUPS,
    ViewSettings,
    color_views,
    crop_view,
    crop_views,
    normalize,
)
from snclr.errors import UserError
from snclr.evaluation.features import Features
from snclr.evaluation.results import ExplainedTerm
from snclr.evaluation.retrieval.explain import Views, explain_loss
from snclr.evaluation.retrieval.gallery import Gallery
from snclr.evaluation.retrieval.space import weigh_as_trained
from snclr.evaluation.session import Session, data_of
from snclr.methods.common.queue import nearest_neighbors
from snclr.methods.snclr.loss import SoftNeighborLoss, soft_neighbor_loss
from snclr.models.encoders import EncoderSpec, build_encoder
from snclr.recipes import RECIPES
from snclr.reports.curves import METRICS
from snclr.reports.run_state import saved_checkpoints
from snclr.train.build import encoder_spec, view_settings
from snclr.train.config import read_config, resolve, setting_groups
from snclr.train.load_run import load_trained_method

Space = Literal["encoder", "projection"]
Network = Literal["encoder", "y1", "y2", "target-encoder"]
_DRAFT_SIDES = 4  # as the training loader decodes


@dataclass(frozen=True)
class ImageSet:
    """Images that the page may show, by id: `name` is the id of the set in addresses."""

    name: str
    title: str
    dataset: ImageDataset

    @cached_property
    def classes(self) -> list[str] | None:
        """Class names, or None without labels."""
        labels = self.dataset.labels
        return None if labels is None or not bool((labels >= 0).any()) else self.dataset.class_names()


@dataclass(frozen=True)
class Matrix:
    """Normalized features (m, D) of images `ids` (m,) of an image set."""

    features: Tensor
    ids: Tensor
    raw: Tensor | None = None
    """Features before normalization, if they are needed again (y1)."""

    @cached_property
    def row_of(self) -> dict[int, int]:
        """The row of each image id."""
        return {index: row for row, index in enumerate(self.ids.tolist())}


class OpenedRun:
    """A run, or a folder with an encoder only: its networks at the time of opening, in evaluation mode."""

    def __init__(self, name: str, path: Path, session: Session) -> None:
        self.name, self.session = name, replace(session, run=path)
        self.dir: RunDir = open_run(path)
        self.path = path
        self.title = path.resolve().name or str(path)
        self.device = session.device
        self.method: Any = None
        self.config: Any = None
        self.step: int | None = None
        self.spec: EncoderSpec
        self.encoder: nn.Module
        if self.dir.config.is_file() and self.dir.has_checkpoints():
            self.method, self.config = load_trained_method(path, torch.device(self.device))
            self.spec = encoder_spec(self.config)
            self.step = max(saved_checkpoints(self.dir), default=None)
        if self.dir.encoder_weights.is_file():
            self.encoder, self.spec = load_encoder(path)
            self.role = "encoder"
        elif self.method is not None:
            self.encoder, self.role = self.method.exported_encoder, "checkpoint"
        else:
            raise UserError(f"{path} has neither a checkpoint nor an encoder yet; wait for its first checkpoint")
        self.image_size = self.spec.image_size

    @property
    def criterion(self) -> SoftNeighborLoss | None:
        """The SNCLR loss of the run, or None for other methods."""
        criterion = getattr(self.method, "criterion", None)
        return criterion if isinstance(criterion, SoftNeighborLoss) else None

    @property
    def spaces(self) -> list[Space]:
        """The features by which images can be ranked."""
        return ["projection", "encoder"] if self.criterion is not None else ["encoder"]

    @property
    def neighbors(self) -> int | None:
        """K of the loss."""
        return None if self.criterion is None else self.criterion.config.neighbors

    def network(self, name: Network) -> tuple[nn.Module, str]:
        """Return a network of the run and its role in the feature cache."""
        if name == "encoder":
            return self.encoder, self.role
        if self.method is None:
            raise UserError(f"{self.path} has no projection heads")
        if name == "y2":
            return self.method.target_network, "y2"
        if name == "target-encoder":
            return self.method.momentum_encoder, name
        return nn.Sequential(self.method.encoder, self.method.projector), "y1"

    def features(self, name: Network, dataset: ImageDataset, report: Callable[[int, int], None]) -> Matrix:
        """Return the features of a dataset from the run's cache, or extract what is missing."""
        network, role = self.network(name)
        return self._extract(network, role, dataset, report, keep_raw=name == "y1")

    def _extract(
        self, network: nn.Module, role: str, dataset: ImageDataset, report: Callable[[int, int], None], *,
        keep_raw: bool = False,
    ) -> Matrix:  # fmt: skip
        done = 0

        def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
            nonlocal done
            done += len(output)
            report(done, len(dataset))

        report(0, len(dataset))
        hook = network.register_forward_hook(count)
        try:
            found: Features = self.session.features(
                network, dataset, image_size=self.image_size, role=role, description="features"
            )
        finally:
            hook.remove()
        return Matrix(F.normalize(found.features, dim=1), found.ids, found.features if keep_raw else None)

    @torch.no_grad()
    def encode(self, name: Network, views: Tensor) -> Tensor:
        """Return the raw features (n, D) of normalized views (n, 3, S, S)."""
        network, _ = self.network(name)
        features: Tensor = network.to(self.device).eval()(views.to(self.device))
        return features.float().cpu()

    @property
    def search_network(self) -> Network:
        """The network whose features training searches (Eq. 3)."""
        by_encoder = self.criterion is not None and self.criterion.queue.search_features is not None
        return "target-encoder" if by_encoder else "y2"

    def queue(self, network: Network = "y2") -> Matrix | None:
        """Return the projections of the run's queue, or with `search_network` the searched features; None if empty."""
        queue = None if self.criterion is None else self.criterion.queue
        if queue is None or len(queue) == 0:
            return None
        features = queue.candidates if network == "y2" else queue.search_candidates
        return Matrix(features.float().cpu(), queue.ids[: len(queue)].cpu())

    @torch.no_grad()
    def predict(self, y1: Tensor) -> Tensor:
        """Return z1 (n, D) of raw projections y1 (n, D)."""
        z1: Tensor = self.method.predictor(y1.to(self.device))
        return z1.float().cpu()

    @torch.no_grad()
    def explain(
        self, y1: Tensor, y2: Tensor, search: Tensor, gallery: Gallery, own_id: int
    ) -> tuple[float, list[ExplainedTerm]]:
        """Return the loss of one image among a gallery and its terms: y2, then the run's K neighbors by cosine."""
        assert self.criterion is not None
        views = Views(*(F.normalize(part, dim=1) for part in (y1, self.predict(y1), y2, search)))
        return explain_loss(self.criterion, views, gallery, own_id=own_id)

    @torch.no_grad()
    def losses(self, y1: Matrix, y2: Matrix, search: Matrix, report: Callable[[int, int], None]) -> Tensor:
        """Return the loss (n,) of each image among all others, each as a batch of one image (as `explain`)."""
        assert self.criterion is not None
        assert y1.raw is not None
        s = self.criterion.config
        z1 = F.normalize(self.predict(y1.raw), dim=1)
        result = torch.empty(len(z1))
        for start in range(0, len(z1), 256):
            rows = slice(start, min(start + 256, len(z1)))
            near = nearest_neighbors(
                search.features[rows], search.features, s.neighbors, ids=y2.ids[rows], candidate_ids=y2.ids
            )
            found = y2.features[near.index.clamp(min=0)]
            w = weigh_as_trained(self.criterion, y1.features[rows], found, near.mask, gamma=s.gamma)
            for row in range(rows.start, rows.stop):
                at = slice(row - start, row - start + 1)
                loss = soft_neighbor_loss(
                    z1[row : row + 1], y2.features[row : row + 1], y2.features, near.index[at], w[at],
                    tau=s.temperature, form=s.loss_form, sides=s.sides, pull=self.criterion.raises_weights,
                )  # fmt: skip
                result[row] = float(loss) * (2 * s.temperature if s.times_2tau else 1)
            report(rows.stop, len(z1))
        return result

    def kept_encoders(self) -> list[tuple[int, Path]]:
        """Return step and path of the checkpoints and encoder snapshots of the run, oldest first."""
        return sorted((saved_checkpoints(self.dir) | snapshots(self.dir)).items())

    def kept_features(self, step: int, path: Path, dataset: ImageDataset, report: Callable[[int, int], None]) -> Matrix:
        """Return the features of the encoder in a kept checkpoint or snapshot: the one that the run exports."""
        if path.is_dir():
            teacher = getattr(self.method, "momentum_encoder", None)
            is_exported = teacher is not None and self.method.exported_encoder is teacher  # DINO
            prefix, tensors = f"method/{'momentum_' * is_exported}encoder.", load_checkpoint(path).tensors
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        else:
            state = load_snapshot(path)
        encoder = build_encoder(self.spec)
        encoder.load_state_dict(state)
        return self._extract(encoder.eval(), f"step{step}", dataset, report)

    # Views

    def view_settings(self) -> tuple[ViewSettings, ViewSettings]:
        """Return the augmentation settings of the two views; BYOL's for a folder with an encoder only.

        A method with one view gets it twice.
        """
        if self.config is not None:
            views = view_settings(self.config)  # a plain view for the search may follow
            return views[0], views[min(1, len(views) - 1)]
        return VIEW_GROUPS["byol"]

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return 0 if self.config is None else int(self.config.seed)

    @property
    def epochs(self) -> int:
        """Epochs of the run."""
        return 1 if self.config is None else int(self.config.epochs)

    def augment(
        self, dataset: ImageDataset, index: int, settings: ViewSettings, *, seed: int, epoch: int, view: int
    ) -> Tensor:
        """Return one augmented view, normalized float32 (1, 3, S, S): bit-identical to that of training."""
        if isinstance(dataset, Subset):  # the randomness belongs to the id in the whole dataset
            return self.augment(dataset.dataset, int(dataset.index[index]), settings, seed=seed, epoch=epoch, view=view)
        size, ids = self.image_size, np.array([index], dtype=np.int64)
        if isinstance(dataset, ArrayDataset):
            crops = crop_views(dataset.images[ids], settings, size, seed=seed, epoch=epoch, ids=ids, view=view)
        else:
            image = dataset.load(index, min_side=_DRAFT_SIDES * size)
            crop = crop_view(image, settings, size, seed=seed, epoch=epoch, index=index, view=view)
            crops = torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1)))[None]
        return color_views(crops, settings, seed=seed, epoch=epoch, ids=ids, view=view)

    def center_view(self, pixels: RGBImage) -> Tensor:
        """Return the evaluation view of an image, normalized (1, 3, S, S)."""
        return normalize(center_crop(pixels, self.image_size)[None])

    # Training

    @property
    def complete(self) -> bool:
        """Whether training has finished."""
        return self.dir.encoder_weights.is_file()

    def settings(self) -> list[dict[str, Any]]:
        """Return every setting by group, with the recipe's value if the run differs from it."""
        if not self.dir.config.is_file():
            return []
        saved = read_config(self.dir.config)
        given = {name: saved[name] for name in ("recipe", "method", "data", "out", "preset") if saved.get(name)}
        try:
            recipe = resolve(given).to_dict()
        except UserError:
            recipe = {}
        rows = []
        for title, group in setting_groups().items():
            for name, setting in group.items():
                if name in saved and name not in ("resume", "overwrite"):
                    value, default = saved[name], recipe.get(name)
                    changed = name not in ("data", "out", "recipe", "method") and value != default
                    rows.append(
                        {"group": title, "name": name, "value": _text(value), "help": setting.help,
                         "recipe": _text(default) if changed else None}
                    )  # fmt: skip
        return rows

    @property
    def recipe(self) -> str | None:
        """Name of the run's recipe."""
        name = None if self.config is None else str(self.config.recipe)
        return name if name in RECIPES else None


def _text(value: Any) -> str:
    return "–" if value is None else "yes" if value is True else "no" if value is False else str(value)


METRIC_NAMES = [
    {"name": metric.name, "title": metric.title, "description": metric.description, "share": metric.share}
    for metric in METRICS
]


def open_images(path: Path, data: str | None) -> tuple[ImageSet, ImageSet | None, str | None]:
    """Open the images to explore, and the run's training images if they are others and available.

    The third value is the name of the set that the run was trained on, or None if it is not available.
    """
    training: ImageDataset | None = None
    try:
        training = open_dataset(data_of(path), split="train", download=False)
    except UserError:
        if data is None:
            raise
    if data is None:
        assert training is not None
        return ImageSet("images", training.name, training), None, "images"
    dataset = open_dataset(data, download=True)
    images = ImageSet("images", dataset.name, dataset)
    if training is None:
        return images, None, None
    if torch.equal(*same_images(dataset, training)):
        return images, None, "images"
    return images, ImageSet("training", f"training data ({training.name})", training), "training"


def open_test(data: str | None, path: Path, test: str | None) -> ImageSet | None:
    """Open the test images: those given, or the test split of the images; None if there is none."""
    spec = data or data_of(path)
    if test is not None:
        dataset = open_dataset(test, split="test" if has_own_test_split(test) else "train", download=True)
    elif has_own_test_split(spec):
        dataset = open_dataset(spec, split="test")
    else:
        return None
    return ImageSet("test", f"test images ({dataset.name})", dataset)


def to_pixels(view: Tensor) -> RGBImage:
    """Undo the normalization of a view (3, S, S) → uint8 (S, S, 3)."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (view.cpu() * std + mean).clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).contiguous().numpy()
