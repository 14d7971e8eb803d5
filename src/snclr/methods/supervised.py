"""Supervised: cross-entropy on labels with a linear classifier: the supervised baseline.

It shows the accuracy of the same encoder with the same views and steps if labels are used. The loss is the mean over
both views, so a step uses both views, as in every other method.

x1 ── encoder ── classifier ┐
                             ├ cross-entropy with the label
x2 ── encoder ── classifier ┘
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.distributed.collectives import all_reduce_sum, rank_and_size
from snclr.errors import UserError
from snclr.methods.base import Method, StepOutput, Views
from snclr.methods.common.features import at_least_float32, autocast_disabled, l2_normalize
from snclr.methods.config import SupervisedConfig


class Supervised(Method):
    """A linear classifier on the encoder's features; images without a label (−1) do not contribute to the loss."""

    def __init__(self, encoder: nn.Module, num_features: int, config: SupervisedConfig, *, classes: int) -> None:
        super().__init__(encoder, num_features, config)
        if classes < 2:
            raise UserError(f"the data has {classes} class, a classifier needs two or more; choose another --method")
        self.classifier = nn.Linear(num_features, classes)

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both views."""
        if labels is None:
            raise UserError("method supervised needs labels, and these images have none; choose another --method")
        features = [self.project(view) for view in views]
        logits = torch.cat([self.classifier(y) for y in features])
        targets = labels.repeat(len(features))
        with autocast_disabled(logits):
            total = F.cross_entropy(at_least_float32(logits), targets, ignore_index=-1, reduction="sum")
        # The mean over all labeled views of all ranks; averaging divides the gradient by the world size.
        labeled = all_reduce_sum((targets >= 0).sum().to(total.dtype)).clamp(min=1)
        loss = total * rank_and_size()[1] / labeled
        return StepOutput(loss=loss, features=l2_normalize(features[1].detach()))
