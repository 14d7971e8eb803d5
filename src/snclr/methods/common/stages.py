"""The features of each stage of a ResNet, of torchvision or timm.

torchvision's `create_feature_extractor` traces the encoder once, and batch norms that are replaced later (synchronized
ones) are not in the trace; timm's `features_only` builds another model. Both libraries' ResNets are a chain of children
up to the last stage, so this module passes the images through them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.errors import UserError

STAGES = ("layer1", "layer2", "layer3", "layer4")
"""res2 to res5 of the papers."""


def stage_features(encoder: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the average-pooled features (N, C_i) of the four stages; those of the last equal the encoder's output."""
    features, x = [], images
    for name, child in encoder.named_children():
        x = child(x)
        if name in STAGES:
            features.append(F.adaptive_avg_pool2d(x, 1).flatten(1))
        if name == STAGES[-1]:
            break
    return features


def stage_widths(encoder: nn.Module, method: str) -> list[int]:
    """Return the channels of the four stages; raise UserError if the encoder is not a ResNet."""
    from timm.models.resnet import ResNet as TimmResNet
    from torchvision.models.resnet import ResNet

    if not isinstance(encoder, (ResNet, TimmResNet)):
        raise UserError(
            f"method {method} compares the four stages of a ResNet; {type(encoder).__name__} has none. Choose a ResNet"
            " such as --encoder resnet50."
        )
    training = encoder.training
    with torch.no_grad():  # in eval mode the batch norms stay as they are
        widths = [part.shape[1] for part in stage_features(encoder.eval(), torch.zeros(1, 3, 32, 32))]
    encoder.train(training)
    return widths
