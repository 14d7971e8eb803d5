"""The numbers of the paper's Tables 1 to 7 (Ge et al., ICLR 2023), each table as a study.

Each row names the method and the settings that make it here. `*` after a label marks a row that the paper's authors
trained themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from snclr.studies.runs import UNTRAINED

TOP1 = "linear"
SEMI = ("finetune1", "finetune10", "finetune1_top5", "finetune10_top5")
SEMI_MEASURES = ("knn", "finetune-1", "finetune-10")
DETECTION = ("AP_bb", "AP50_bb", "AP75_bb", "AP_mk", "AP50_mk", "AP75_mk")

SMALL_VIT = {"encoder": "vit4-tiny", "stem": "auto"}
"""The encoder of ViT rows with recipes for little data."""


@dataclass(frozen=True)
class System:
    """A row of a table: its label in the paper, the method that makes it here, and its results in percent."""

    label: str
    method: str
    reported: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By number of epochs and metric."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this row for any data."""
    paper_only: Mapping[str, Any] = field(default_factory=dict)
    """Further settings with recipes at the paper's scale."""
    epochs: int | None = None
    """Epochs of this row, if the rows of its table differ in them."""


@dataclass(frozen=True)
class NamedStudy:
    """Rows and defaults of a study, e.g. of a table of the paper. Flags override the defaults."""

    title: str
    source: str
    systems: tuple[System, ...] = ()
    ablations: tuple[str, ...] = ()
    """Tables of `snclr ablate` whose rows it has, instead of `systems`."""
    measures: tuple[str, ...] = ("knn", "linear")
    kind: str = "test"
    epochs: int | None = None
    """Epochs at the paper's scale: of the column that is repeated, or of the first row if rows differ."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the runs."""
    small: Mapping[str, Any] = field(default_factory=dict)
    """Defaults with recipes for little data."""
    tune: tuple[str, ...] = ()
    seeds: int = 3

    @property
    def needs_coco(self) -> bool:
        """Whether it evaluates detection."""
        return "detect" in self.measures

    @property
    def example(self) -> str:
        """The flags of a run at full scale."""
        data = "" if "data" in self.settings else " --data imagenet/"
        return f"{data}{' --coco coco/' if self.needs_coco else ''}".strip()


def _table(source: str, title: str, recipe: str, systems: tuple[System, ...], **options: Any) -> NamedStudy:
    """Return a table of the paper as a study; with recipes for little data, the rows of a ViT have a small one."""
    small = SMALL_VIT if recipe.startswith("vit") else {}
    return NamedStudy(title, source, systems, settings={"recipe": recipe}, small=small, seeds=1, **options)


def _linear(label: str, method: str, epochs: tuple[int, ...], *values: float | None, **settings: Any) -> System:
    reported = {count: {TOP1: value} for count, value in zip(epochs, values, strict=True) if value is not None}
    return System(label, method, reported, settings)


def _row(label: str, method: str, epochs: int, metrics: tuple[str, ...], *values: float) -> System:
    return System(label, method, {epochs: dict(zip(metrics, values, strict=True))}, epochs=epochs or None)


_RESNET = (100, 200, 400, 800)
_VIT = (100, 200, 300)

TABLES: dict[str, NamedStudy] = {
    "table-1-resnet50": _table(
        "Table 1 (a)", "linear evaluation on ImageNet, ResNet-50", "resnet50-imagenet",
        (
            _linear("SNCLR", "snclr", _RESNET, 69.6, 72.4, 74.5, 75.3),
            _linear("SimCLR", "simclr", _RESNET, 66.5, 68.3, 69.8, 70.4),
            _linear("InfoMin Aug", "mocov2", _RESNET, None, 70.1, None, None, views="infomin"),
            _linear("SwAV", "swav", _RESNET, 66.5, 69.1, 70.7, 71.8),
            _linear("MoCo v2", "mocov2", _RESNET, 67.4, 69.9, 71.0, 72.2, symmetric=True),
            _linear("MoCo v3", "mocov3", _RESNET, 68.1, 72.2, 73.0, 74.1),
            _linear("SimSiam", "simsiam", _RESNET, 68.1, 70.0, 70.8, 71.3),
            _linear("NNCLR", "nnclr", _RESNET, 69.2, 70.7, 74.0, 74.5),
            _linear("BYOL", "byol", _RESNET, 66.5, 70.6, 73.2, 74.3),
            _linear("Barlow Twins", "barlowtwins", _RESNET, None, None, 72.5, 73.2),
        ), epochs=200,
    ),
    "table-1-vit-small": _table(
        "Table 1 (b)", "linear evaluation on ImageNet, ViT-S", "vit-small-imagenet",
        (
            _linear("SNCLR", "snclr", _VIT, 68.5, 72.5, 73.4),
            _linear("BYOL", "byol", _VIT, None, None, 71.0),
            _linear("MoCo v2", "mocov2", _VIT, None, None, 71.6, symmetric=True),
            _linear("MoCo v3*", "mocov3", _VIT, 67.5, 71.8, 72.5),
            _linear("SwAV", "swav", _VIT, None, None, 67.1),
            _linear("DINO", "dino", _VIT, None, None, 72.5),
            _linear("NNCLR*", "nnclr", _VIT, 66.8, 70.9, 71.5),
            _linear("SimCLR", "simclr", _VIT, None, None, 69.0),
            _linear("CAE", "cae", _VIT, None, None, 51.8),
        ), epochs=300,
    ),
    "table-1-vit-base": _table(
        "Table 1 (c)", "linear evaluation on ImageNet, ViT-B", "vit-base-imagenet",
        (
            _linear("SNCLR", "snclr", _VIT, 71.4, 74.3, 76.8),
            _linear("BYOL", "byol", _VIT, None, None, 73.9),
            _linear("MoCo v3", "mocov3", _VIT, None, None, 76.2),
            _linear("NNCLR*", "nnclr", _VIT, 69.1, 71.9, 75.9),
            _linear("SimCLR", "simclr", _VIT, None, None, 73.9),
            _linear("MAE", "mae", _VIT, None, None, 61.5),
            System(
                "MAE (ViT-L)", "mae", {100: {TOP1: 57.3}, 200: {TOP1: 64.4}, 300: {TOP1: 67.3}},
                paper_only={"encoder": "vit_large_patch16_224", "heads": 16},
            ),
            _linear("CAE", "cae", _VIT, None, None, 64.1),
        ), epochs=300,
    ),
    "table-2-resnet50": _table(
        "Table 2 (a)", "fine-tuning on 1 % and 10 % of ImageNet's labels, ResNet-50", "resnet50-imagenet",
        (
            _row("SNCLR", "snclr", 400, SEMI, 56.0, 69.2, 80.1, 89.1),
            # Trained on the labeled subset alone: fine-tuning from random weights.
            _row("Supervised", UNTRAINED, 0, SEMI, 25.4, 56.4, 48.4, 80.4),
            _row("SimCLR", "simclr", 800, SEMI, 48.3, 65.6, 75.5, 87.8),
            _row("NNCLR*", "nnclr", 400, SEMI, 55.1, 69.0, 79.2, 88.6),
            _row("MoCo v3*", "mocov3", 400, SEMI, 51.2, 62.2, 76.1, 82.4),
            _row("BYOL", "byol", 800, SEMI, 53.2, 68.8, 78.4, 89.0),
        ), epochs=400, measures=SEMI_MEASURES,
    ),
    "table-2-vit-small": _table(
        "Table 2 (b)", "fine-tuning on 1 % and 10 % of ImageNet's labels, ViT-S", "vit-small-imagenet",
        (
            _row("SNCLR", "snclr", 300, SEMI, 51.2, 61.9, 76.0, 88.4),
            _row("MoCo v3*", "mocov3", 300, SEMI, 46.9, 58.3, 72.1, 79.4),
            _row("BYOL*", "byol", 300, SEMI, 44.2, 54.5, 71.8, 77.9),
            _row("NNCLR*", "nnclr", 300, SEMI, 45.8, 55.6, 71.7, 78.0),
            _row("DINO*", "dino", 300, SEMI, 50.9, 61.4, 75.3, 87.9),
        ), epochs=300, measures=SEMI_MEASURES,
    ),
    "table-3-detection": _table(
        "Table 3", "detection and instance segmentation on COCO, Mask R-CNN R50-FPN", "resnet50-imagenet",
        (
            _row("SNCLR at 200 epochs", "snclr", 200, DETECTION, 39.4, 60.3, 43.0, 36.0, 57.1, 38.3),
            _row("SNCLR at 800 epochs", "snclr", 800, DETECTION, 39.9, 60.5, 43.7, 36.4, 57.3, 39.0),
            _row("Rand Init", UNTRAINED, 0, DETECTION, 31.0, 49.5, 33.2, 28.5, 46.8, 30.4),
            _row("Supervised", "supervised", 90, DETECTION, 38.9, 59.6, 42.7, 35.4, 56.5, 38.1),
            _row("PIRL", "pirl", 200, DETECTION, 37.5, 57.6, 41.0, 34.0, 54.6, 36.2),
            _row("SwAV", "swav", 200, DETECTION, 38.5, 60.4, 41.4, 35.4, 57.0, 37.7),
            _row("MoCo", "moco", 200, DETECTION, 38.5, 58.9, 42.0, 35.1, 55.9, 37.7),
            _row("MoCo v2 at 200 epochs", "mocov2", 200, DETECTION, 38.9, 59.4, 42.4, 35.5, 56.5, 38.1),
            _row("MoCo v2 at 800 epochs", "mocov2", 800, DETECTION, 39.4, 59.9, 43.0, 35.8, 56.9, 38.4),
            _row("Barlow Twins", "barlowtwins", 1000, DETECTION, 36.9, 58.5, 39.7, 34.3, 55.4, 36.5),
            _row("BYOL at 200 epochs", "byol", 200, DETECTION, 39.1, 59.5, 42.7, 35.6, 56.5, 38.2),
            _row("BYOL at 400 epochs", "byol", 400, DETECTION, 39.2, 59.6, 42.9, 35.6, 56.7, 38.2),
            _row("BYOL at 800 epochs", "byol", 800, DETECTION, 39.4, 59.9, 43.0, 35.8, 56.8, 38.5),
            _row("DetCo", "detco", 200, DETECTION, 39.4, 59.2, 42.3, 34.4, 55.7, 36.6),
        ), epochs=200, measures=("knn", "detect"),
    ),
}  # fmt: skip

ABLATIONS: dict[str, dict[str | int, dict[str, float]]] = {
    "positiveness": {"none": {TOP1: 71.17}, "hard": {TOP1: 72.24}, "soft": {TOP1: 73.38}},
    "neighbors": {"none": {TOP1: 71.17}, 10: {TOP1: 72.81}, 30: {TOP1: 73.38}, 50: {TOP1: 72.92}},
    "queue": {
        "none": {TOP1: 71.17}, 8000: {TOP1: 72.25}, 16_000: {TOP1: 72.67}, 32_000: {TOP1: 72.43},
        64_000: {TOP1: 73.02}, 128_000: {TOP1: 73.38},
    },
    "cost": {
        8000: {"seconds_per_step": 2.687, "more_mb": 8.19}, 16_000: {"seconds_per_step": 2.717, "more_mb": 16.38},
        32_000: {"seconds_per_step": 2.755, "more_mb": 32.77}, 64_000: {"seconds_per_step": 2.824, "more_mb": 65.54},
        128_000: {"seconds_per_step": 2.883, "more_mb": 131.07},
    },
    "sides": {
        "none": {TOP1: 71.17}, "positives": {TOP1: 71.88}, "negatives": {TOP1: 72.43}, "both": {TOP1: 73.38},
    },
}  # fmt: skip
"""Tables 4 to 7: ViT-S, 300 epochs on ImageNet; results by the value that a row changes, in the order of the rows."""
