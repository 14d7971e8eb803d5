"""What the screens read of a run: networks, images, features, queue and settings.

Only this module opens checkpoints, datasets and settings; the screens compute with what it returns.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.checkpoint.encoder_file import load_encoder, snapshots
from snclr.checkpoint.format import load_checkpoint, saved_checkpoints
from snclr.checkpoint.run_dir import RunDir, open_run
from snclr.data.datasets.base import ArrayDataset, ImageDataset, open_dataset
from snclr.data.decode import RGBImage
from snclr.data.sampler import ViewKey
from snclr.data.splits import has_own_test_split, same_images, source_of
from snclr.data.transforms.crop import center_crop
from snclr.data.transforms.views import VIEW_GROUPS, ViewSettings, color_views, crop_views, normalize
from snclr.errors import UserError
from snclr.evaluation.analysis.graph import OnProgress
from snclr.evaluation.results import ExplainedTerm
from snclr.evaluation.retrieval.explain import QueryFeatures, explain_loss
from snclr.evaluation.retrieval.gallery import Gallery
from snclr.evaluation.retrieval.space import snclr_space, weigh_as_trained
from snclr.evaluation.session import Session, data_of
from snclr.methods.common.queue import nearest_neighbors
from snclr.methods.snclr.loss import SoftNeighborLoss, soft_neighbor_loss
from snclr.models.encoders import build_encoder
from snclr.train.build import encoder_spec, view_settings
from snclr.train.config import read_config, resolve, setting_groups
from snclr.train.load_run import load_trained_method

Space = Literal["encoder", "projection"]
_DRAFT_SIDES = 4  # sides of a view that a JPEG is decoded at, at least: as in the training loader


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
class ImageFeatures:
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
        self.name, self.path, self.session = name, path, replace(session, run=path)
        self.title = path.resolve().name or str(path)
        self.dir: RunDir = open_run(path)
        self.device = session.device
        self.method: Any = None
        self.config: Any = None
        self.step: int | None = None
        if self.dir.config.is_file() and self.dir.has_checkpoints():
            self.method, self.config = load_trained_method(path, torch.device(self.device))
            self.spec = encoder_spec(self.config)
            self.step = max(saved_checkpoints(self.dir.checkpoints), default=None)
        if self.complete:
            (encoder, self.spec), self._encoder_role = load_encoder(path), "encoder"
        elif self.method is not None:
            encoder, self._encoder_role = self.method.exported_encoder, "checkpoint"
        else:
            raise UserError(f"{path} has neither a checkpoint nor an encoder yet; wait for its first checkpoint")
        self.seed = 0 if self.config is None else int(self.config.seed)
        self.image_size = self.spec.image_size
        criterion = getattr(self.method, "criterion", None)
        self.criterion = criterion if isinstance(criterion, SoftNeighborLoss) else None
        """The SNCLR loss of the run, or None for other methods."""
        self.networks = {"encoder": encoder}
        """The networks whose features can be compared; of SNCLR also those of `snclr_space`."""
        self.searched = "y2"
        """Name of the network whose features training searches (Eq. 3)."""
        if self.criterion is not None:
            space = snclr_space(self.method, self.image_size)
            self.networks, self.searched = {**self.networks, **space.networks}, space.searched

    @property
    def complete(self) -> bool:
        """Whether training has finished, or the folder has only an encoder."""
        return self.dir.encoder_weights.is_file()

    @property
    def spaces(self) -> list[Space]:
        """The features by which images can be ranked."""
        return ["projection", "encoder"] if self.criterion is not None else ["encoder"]

    def features(self, network: str, dataset: ImageDataset, report: OnProgress) -> ImageFeatures:
        """Return the features of a dataset from the run's cache, or extract what is missing."""
        role = self._encoder_role if network == "encoder" else network
        return self._extract(self.networks[network], role, dataset, report)

    def _extract(self, network: nn.Module, role: str, dataset: ImageDataset, report: OnProgress) -> ImageFeatures:
        done = 0

        def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
            nonlocal done
            done += len(output)
            report(done, len(dataset))

        report(0, len(dataset))
        hook = network.register_forward_hook(count)
        try:
            found = self.session.features(network, dataset, image_size=self.image_size, role=role)
        finally:
            hook.remove()
        return ImageFeatures(F.normalize(found.features, dim=1), found.ids, found.features if role == "y1" else None)

    @torch.no_grad()
    def encode(self, network: str, views: Tensor) -> Tensor:
        """Return the raw features (n, D) of normalized views (n, 3, S, S)."""
        features: Tensor = self.networks[network].to(self.device).eval()(views.to(self.device))
        return features.float().cpu()

    def queue(self, network: str = "y2") -> ImageFeatures | None:
        """Return the run's queue: its projections ("y2"), else the features that training searches; None if empty."""
        queue = None if self.criterion is None else self.criterion.queue
        if queue is None or len(queue) == 0:
            return None
        features = queue.candidates if network == "y2" else queue.search_candidates
        return ImageFeatures(features.float().cpu(), queue.ids[: len(queue)].cpu())

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
        query = QueryFeatures(*(F.normalize(part, dim=1) for part in (y1, self.predict(y1), y2, search)))
        return explain_loss(self.criterion, query, gallery, own_id=own_id)

    @torch.no_grad()
    def losses(self, y1: ImageFeatures, y2: ImageFeatures, search: ImageFeatures, report: OnProgress) -> Tensor:
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
            w = weigh_as_trained(self.criterion, y1.features[rows], found, near.mask)
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
        return sorted((saved_checkpoints(self.dir.checkpoints) | snapshots(self.dir)).items())

    def kept_features(self, step: int, path: Path, dataset: ImageDataset, report: OnProgress) -> ImageFeatures:
        """Return the features of the encoder in a kept checkpoint or snapshot: the one that the run exports."""
        if path.is_dir():
            exported = self.method.exported_encoder
            name = next(name for name, child in self.method.named_children() if child is exported)
            prefix, tensors = f"method/{name}.", load_checkpoint(path).tensors
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        else:
            state = safetensors.torch.load_file(path)
        encoder = build_encoder(self.spec)
        encoder.load_state_dict(state)
        return self._extract(encoder.eval(), f"step{step}", dataset, report)

    def pixels(self, dataset: ImageDataset, report: OnProgress) -> ImageFeatures:
        """Return the images themselves as features: 16 × 16 pixels."""
        return self._extract(nn.Sequential(nn.AdaptiveAvgPool2d(16), nn.Flatten()), "pixels", dataset, report)

    # Views

    def view_settings(self) -> tuple[ViewSettings, ViewSettings]:
        """Return the augmentation settings of the two views; BYOL's for a folder with an encoder only.

        A method with one view gets it twice.
        """
        views = VIEW_GROUPS["byol"] if self.config is None else view_settings(self.config)
        return views[0], views[min(1, len(views) - 1)]  # a plain view for the search may follow

    def augment(
        self, dataset: ImageDataset, index: int, settings: ViewSettings, *, seed: int, epoch: int, view: int
    ) -> Tensor:
        """Return one augmented view, normalized float32 (1, 3, S, S): bit-identical to that of training."""
        whole, all_ids = source_of(dataset)  # the randomness belongs to the id in the whole dataset
        size, ids = self.image_size, all_ids[[index]]
        if isinstance(whole, ArrayDataset):
            images: RGBImage | list[RGBImage] = whole.images[ids]
        else:
            images = [whole.load(int(ids[0]), min_side=_DRAFT_SIDES * size)]
        key = ViewKey(seed, epoch, ids, view)
        return color_views(crop_views(images, settings, size, key), settings, key)

    def center_view(self, pixels: RGBImage) -> Tensor:
        """Return the evaluation view of an image, normalized (1, 3, S, S)."""
        return normalize(center_crop(pixels, self.image_size)[None])

    # Training

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
        same = ("data", "out", "recipe", "method")  # in `given`
        return [
            {"group": title, "name": name, "value": _text(saved[name]), "help": setting.help,
             "recipe": _text(recipe.get(name)) if name not in same and saved[name] != recipe.get(name) else None}
            for title, group in setting_groups().items()
            for name, setting in group.items()
            if name in saved and name not in ("resume", "overwrite")
        ]  # fmt: skip


def _text(value: Any) -> str:
    return "–" if value is None else "yes" if value is True else "no" if value is False else str(value)


def open_sets(
    path: Path, data: str | None, test: str | None, gallery: str | None
) -> tuple[dict[str, ImageSet], str | None]:
    """Open the images to explore, and those of the training, the gallery and the test if they are others.

    The second value is the name of the set that the run was trained on, or None if it is not available.
    """
    training: ImageDataset | None = None
    try:
        training = open_dataset(data_of(path), split="train", download=False)
    except UserError:
        if data is None:
            raise
    images = training if data is None else open_dataset(data, download=True)
    assert images is not None
    sets, trained_on = [ImageSet("images", images.name, images)], None if training is None else "images"
    if training is not None and training is not images and not torch.equal(*same_images(images, training)):
        sets.append(ImageSet("training", f"training data ({training.name})", training))
        trained_on = "training"
    if gallery is not None:
        extra = open_dataset(gallery, download=True)
        sets.append(ImageSet("extra", extra.name, extra))
    spec = test or data or data_of(path)
    if test is not None or has_own_test_split(spec):
        split = "test" if has_own_test_split(spec) else "train"
        tested = open_dataset(spec, split=split, download=test is not None)
        sets.append(ImageSet("test", f"test images ({tested.name})", tested))
    return {each.name: each for each in sets}, trained_on
