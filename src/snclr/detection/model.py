"""Mask R-CNN of torchvision with a ResNet of ours under its feature pyramid, every stage of it trained.

Batch norm learns in the backbone and stands in the pyramid, as in the transfer protocol of MoCo and its successors; the
heads have none. Boxes and masks come out at the size the pictures went in: a picture is scaled before, in one way for
training and test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from snclr.data.views import MEAN, STD
from snclr.detection.batches import Sample
from snclr.detection.schedule import DetectSettings
from snclr.encoders import EncoderSpec
from snclr.errors import UserError

STAGES = ("layer1", "layer2", "layer3", "layer4")
_LEVELS = 5  # four stages, and one pooled from the last
_BOX_POOL, _MASK_LAYERS = 7, 4


def build_detector(encoder: nn.Module, spec: EncoderSpec, num_classes: int, settings: DetectSettings) -> MaskRCNN:
    """A Mask R-CNN for `num_classes` classes (background not counted), with new heads, around the encoder's weights.

    The heads' initial weights follow from torch's generator: seed it before.
    """
    width = settings.width
    backbone = BackboneWithFPN(
        pyramid_body(encoder, spec),
        {stage: str(number) for number, stage in enumerate(STAGES)},
        stage_widths(encoder),
        width,
        norm_layer=nn.BatchNorm2d,
    )
    sizes = tuple((settings.anchor * 2**level,) for level in range(_LEVELS))
    model = MaskRCNN(
        backbone,
        rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * _LEVELS),
        rpn_pre_nms_top_n_train=settings.proposals,
        rpn_post_nms_top_n_train=settings.proposals,
        rpn_pre_nms_top_n_test=max(1, settings.proposals // 2),
        rpn_post_nms_top_n_test=max(1, settings.proposals // 2),
        box_head=TwoMLPHead(width * _BOX_POOL**2, 4 * width),
        box_predictor=FastRCNNPredictor(4 * width, num_classes + 1),
        box_batch_size_per_image=settings.rois,
        mask_head=MaskRCNNHeads(width, (width,) * _MASK_LAYERS, 1),
        mask_predictor=MaskRCNNPredictor(width, width, num_classes + 1),
    )
    model.transform = PaddedBatch()
    model.rpn.fg_bg_sampler = SeededSampler.like(model.rpn.fg_bg_sampler)
    model.roi_heads.fg_bg_sampler = SeededSampler.like(model.roi_heads.fg_bg_sampler)
    return model


def pyramid_body(encoder: nn.Module, spec: EncoderSpec) -> nn.Module:
    """Check that the encoder is a ResNet, and give its stages the strides 4, 8, 16 and 32 that a detector expects.

    A low-resolution stem keeps its 3×3 convolution and its weights; it steps by 2, and the pooling behind it is back.
    """
    if not all(isinstance(getattr(encoder, name, None), nn.Module) for name in ("conv1", "bn1", "maxpool", *STAGES)):
        raise UserError(
            f"{spec.name} is not a ResNet. Detection by this protocol needs the four stages of one (resnet18 to "
            "resnet152, ResNeXt, wide or narrow ones); for a ViT there is no standard one. Pre-train a ResNet."
        )
    if spec.stem != "standard":
        conv = encoder.get_submodule("conv1")
        assert isinstance(conv, nn.Conv2d)
        conv.stride = (2, 2)
        encoder.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
    for parameter in encoder.parameters():
        parameter.requires_grad_(True)
    return encoder


def stage_widths(encoder: nn.Module) -> list[int]:
    """The channels of the four stages, found by a forward pass that keeps nothing."""
    body = IntermediateLayerGetter(encoder, {stage: stage for stage in STAGES})
    was_training = encoder.training
    encoder.eval()
    with torch.no_grad():
        features = body(torch.zeros(1, 3, 64, 64, device=next(encoder.parameters()).device))
    encoder.train(was_training)
    return [int(features[stage].shape[1]) for stage in STAGES]


class PaddedBatch(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Normalise and batch pictures that have their size already; results stay at that size, masks at 28 × 28.

    `pad_to` (height, width) is that of the whole batch, over all processes: batch norm sees the padding too, so it must
    not depend on which process has which pictures.
    """

    def __init__(self) -> None:
        super().__init__(min_size=1, max_size=1, image_mean=list(MEAN), image_std=list(STD))
        self.pad_to: tuple[int, int] = (0, 0)

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, Any]:
        """Leave them as they are."""
        return image, target

    def batch_images(self, images: list[Tensor], size_divisible: int = 32) -> Tensor:
        """Pictures (3, H, W) of many sizes as one tensor, zeros at the right and below."""
        height = max(self.pad_to[0], *(image.shape[1] for image in images))
        width = max(self.pad_to[1], *(image.shape[2] for image in images))
        shape = (len(images), 3, *(-(-side // size_divisible) * size_divisible for side in (height, width)))
        batch = images[0].new_zeros(shape)
        for row, image in zip(batch, images, strict=True):
            row[:, : image.shape[1], : image.shape[2]].copy_(image)
        return batch

    def postprocess(self, result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
        """Leave the results in the frame of the scaled picture."""
        return result


class SeededSampler(BalancedPositiveNegativeSampler):  # type: ignore[misc]
    """The usual choice of anchors or regions, by a seed an image: it does not depend on the batch it is in.

    `counts` notes how many were chosen in the last call, (all, positive): what the losses are means over.
    """

    def __init__(self, batch_size_per_image: int, positive_fraction: float) -> None:
        super().__init__(batch_size_per_image, positive_fraction)
        self.seeds: Sequence[int] = ()
        self.counts = (0, 0)

    @classmethod
    def like(cls, sampler: BalancedPositiveNegativeSampler) -> SeededSampler:
        """One with the same numbers."""
        return cls(sampler.batch_size_per_image, sampler.positive_fraction)

    def __call__(self, matched_idxs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Masks of the positives and of the negatives, for each image."""
        positive, negative = [], []
        for seed, matched in zip(self.seeds, matched_idxs, strict=True):
            torch.manual_seed(seed)
            (chosen,), (others,) = super().__call__([matched])
            positive.append(chosen)
            negative.append(others)
        found = sum(int(mask.sum()) for mask in positive)
        self.counts = (found + sum(int(mask.sum()) for mask in negative), found)
        return positive, negative


def prepare(model: MaskRCNN, samples: Sequence[Sample], device: torch.device | str, pad_to: tuple[int, int]) -> Any:
    """The arguments of a training forward pass, with the model's padding and seeds set for it."""
    model.transform.pad_to = pad_to
    model.rpn.fg_bg_sampler.seeds = [sample.seeds[0] for sample in samples]
    model.roi_heads.fg_bg_sampler.seeds = [sample.seeds[1] for sample in samples]
    images = [sample.picture.to(device).float() / 255 for sample in samples]
    targets = [
        {"boxes": s.boxes.to(device), "labels": s.labels.to(device), "masks": s.masks.to(device)} for s in samples
    ]
    return images, targets


def loss_counts(model: MaskRCNN) -> dict[str, int]:
    """Over how many anchors or regions each loss of the last step is a mean."""
    anchors, (regions, positive) = model.rpn.fg_bg_sampler.counts[0], model.roi_heads.fg_bg_sampler.counts
    return {
        "loss_objectness": anchors, "loss_rpn_box_reg": anchors, "loss_classifier": regions, "loss_box_reg": regions,
        "loss_mask": positive,
    }  # fmt: skip
