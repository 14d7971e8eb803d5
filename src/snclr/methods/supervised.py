"""Supervised: cross-entropy on labels with a linear classifier, the upper row of the tables.

Not self-supervised: it shows what the same encoder reaches, with the same views and steps, when it is told the classes.
The loss is the mean over both views, so that a step sees as many images as any other method's.

x1 ── encoder ── classifier ┐
                             ├ cross-entropy with the label
x2 ── encoder ── classifier ┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.distributed import rank_and_size, sum_over_processes
from snclr.errors import UserError
from snclr.methods.base import StepOutput
from snclr.methods.features import full_precision, precise, unit


def build(encoder: nn.Module, features: int, *, classes: int) -> Supervised:
    """A linear classifier over an encoder of that many features."""
    if classes < 2:
        raise UserError(f"the data has {classes} class, and a classifier needs two or more; choose another --method")
    return Supervised(encoder, nn.Linear(features, classes))


class Supervised(nn.Module):
    """Both views must be given the image's label; an image without one (−1) is left out of the loss."""

    queue = None

    def __init__(self, encoder: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier

    @property
    def encoders(self) -> list[nn.Module]:
        """The one encoder."""
        return [self.encoder]

    @property
    def key_network(self) -> nn.Module:
        """Images → the encoder's features."""
        return self.encoder

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """The loss of views (N, 3, S, S) of images with `labels` (N,)."""
        if labels is None:
            raise UserError("method supervised learns from labels, and these images have none; choose another --method")
        features = [self.encoder(view) for view in views]
        scores = torch.cat([self.classifier(f) for f in features])
        targets = labels.repeat(len(features))
        with full_precision(scores):
            total = F.cross_entropy(precise(scores), targets, ignore_index=-1, reduction="sum")
        # The mean over all labelled views of the batch; data parallelism divides by the number of processes once more.
        labelled = sum_over_processes((targets >= 0).sum().to(total.dtype)).clamp(min=1)
        loss = total * rank_and_size()[1] / labelled
        return StepOutput(loss=loss, features=unit(features[1].detach()))

    def finish_step(self, step: int, total_steps: int) -> None:
        """Nothing follows the optimiser's step."""
