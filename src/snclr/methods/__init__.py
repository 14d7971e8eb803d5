"""The methods, by name. Each is a page of its own; the training loop knows only `base.Method`.

A page has `build(encoder, features, *, ...)`, whose keywords are the settings that the method uses, by their names in
`PretrainConfig`; a setting that is not among them means nothing to it. Nothing here loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """What is to be known of a method before it is built."""

    module: str
    """Its page in `snclr.methods`."""
    paper: str
    """The paper, and the equation of it that the page implements."""
    settings: frozenset[str]
    """The settings of `PretrainConfig` that it uses, of those that not every method does."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Its own paper's choices, which go before a recipe's."""
    full_size: dict[str, Any] = field(default_factory=dict)
    """Its own paper's sizes, for recipes of the paper's size (see `config.resolve`)."""
    needs_labels: bool = False
    """Whether it learns from labels."""


_HEAD = frozenset({"hidden", "dim", "projector_layers", "final_bn"})
_MOMENTUM = frozenset({"momentum", "momentum_schedule"})
_QUEUE = frozenset({"queue_length", "queue_dtype"})
_PROTOTYPES = frozenset({"prototypes", "freeze_prototypes_epochs"})

METHODS: dict[str, MethodInfo] = {
    "snclr": MethodInfo(
        module="snclr",
        paper="Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning (ICLR 2023), Eq. 2",
        settings=_HEAD | _MOMENTUM | _QUEUE | {
            *("preset", "predictor_layers", "temperature", "neighbors", "gamma", "loss_form", "sides", "weights"),
            *("attention", "attention_temperature", "attention_gradient", "times_2tau", "neighbor_free_epochs", "push"),
        },
    ),
    "simclr": MethodInfo(
        module="simclr",
        paper="A Simple Framework for Contrastive Learning of Visual Representations (ICML 2020), Eq. 1",
        settings=_HEAD | {"temperature"},
        defaults={"projector_layers": 2, "final_bn": False, "temperature": 0.1},
        full_size={"hidden": 2048, "dim": 128},
    ),
    "mocov2": MethodInfo(
        module="mocov2",
        paper="Improved Baselines with Momentum Contrastive Learning (2020), Eq. 1",
        settings=_MOMENTUM | _QUEUE | {"hidden", "dim", "projector_layers", "temperature"},
        defaults={"projector_layers": 2, "temperature": 0.2, "momentum_schedule": "constant"},
        full_size={"hidden": 2048, "dim": 128, "queue_length": 65_536, "momentum": 0.999},
    ),
    "mocov3": MethodInfo(
        module="mocov3",
        paper="An Empirical Study of Training Self-Supervised Vision Transformers (ICCV 2021), Eq. 1 and Algorithm 1",
        settings=_HEAD | _MOMENTUM | {"predictor_layers", "temperature", "times_2tau"},
        defaults={
            "projector_layers": 3, "predictor_layers": 2, "final_bn": True, "temperature": 0.2, "times_2tau": True,
            "momentum_schedule": "cosine",
        },
        full_size={"hidden": 4096, "dim": 256, "momentum": 0.99},
    ),
    "byol": MethodInfo(
        module="byol",
        paper="Bootstrap Your Own Latent (NeurIPS 2020), Eq. 2",
        settings=_HEAD | _MOMENTUM | {"predictor_layers"},
        defaults={"projector_layers": 2, "predictor_layers": 2, "final_bn": False, "momentum_schedule": "cosine"},
        full_size={"hidden": 4096, "dim": 256, "momentum": 0.996},
    ),
    "simsiam": MethodInfo(
        module="simsiam",
        paper="Exploring Simple Siamese Representation Learning (CVPR 2021), Eq. 4",
        settings=_HEAD | {"predictor_layers"},
        defaults={"projector_layers": 3, "predictor_layers": 2, "final_bn": True},
        full_size={"hidden": 2048, "dim": 2048},
    ),
    "nnclr": MethodInfo(
        module="nnclr",
        paper="With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning (ICCV 2021), Eq. 3",
        settings=_HEAD | _QUEUE | {"predictor_layers", "temperature"},
        defaults={"projector_layers": 3, "predictor_layers": 2, "final_bn": True, "temperature": 0.1},
        full_size={"hidden": 2048, "dim": 256, "queue_length": 98_304},
    ),
    "swav": MethodInfo(
        module="swav",
        paper="Unsupervised Learning of Visual Features by Contrasting Cluster Assignments (NeurIPS 2020), Eq. 1 to 3",
        settings=_HEAD | _PROTOTYPES | {"temperature"},
        defaults={"projector_layers": 2, "final_bn": False, "temperature": 0.1},
        full_size={"hidden": 2048, "dim": 128, "prototypes": 3000},
    ),
    "barlowtwins": MethodInfo(
        module="barlowtwins",
        paper="Barlow Twins: Self-Supervised Learning via Redundancy Reduction (ICML 2021), Eq. 1",
        settings=_HEAD | {"redundancy_weight"},
        defaults={"projector_layers": 3, "final_bn": False},
        full_size={"hidden": 8192, "dim": 8192},
    ),
    "dino": MethodInfo(
        module="dino",
        paper="Emerging Properties in Self-Supervised Vision Transformers (ICCV 2021), Eq. 3 and 4",
        settings=_MOMENTUM | _PROTOTYPES | {
            *("hidden", "dim", "projector_layers", "temperature"),
            *("teacher_temperature", "teacher_warmup_epochs", "center_momentum"),
        },
        defaults={"projector_layers": 3, "temperature": 0.1, "momentum_schedule": "cosine"},
        full_size={"hidden": 2048, "dim": 256, "prototypes": 65_536, "momentum": 0.996},
    ),
    "supervised": MethodInfo(
        module="supervised",
        paper="Cross-entropy on labels with a linear classifier: the upper row of the tables, not self-supervised",
        settings=frozenset(),
        needs_labels=True,
    ),
}  # fmt: skip

METHOD_SETTINGS: frozenset[str] = frozenset().union(*(info.settings for info in METHODS.values()))
"""Every setting that some method uses and another may not."""
