"""Mask R-CNN of torchvision on a ResNet encoder, with every stage trained, and the encoder's initial weights.

Batch norm is trained in the backbone and in the feature pyramid, as in the transfer protocol of MoCo and later papers;
the heads have none. Images are scaled before the model, and boxes and masks refer to the scaled image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from snclr.checkpoint.encoder_file import WEIGHTS_NAME, load_encoder
from snclr.checkpoint.external_weights import read_weights
from snclr.data.transforms.views import MEAN, STD
from snclr.errors import UserError
from snclr.evaluation.detection.batches import Sample
from snclr.evaluation.detection.settings import DetectSettings
from snclr.models.encoders import EncoderSpec, build_encoder, resolve_encoder
from snclr.runtime.device import to_device

STAGES = ("layer1", "layer2", "layer3", "layer4")
_LEVELS = 5  # four stages, and one pooled from the last
_BOX_POOL, _MASK_LAYERS = 7, 4
_IMAGE_SIZE = 224  # of an encoder given by name: decides its stem, which is the standard one


@dataclass(frozen=True)
class InitialWeights:
    """An encoder for a detector, and the origin of its weights."""

    encoder: nn.Module
    spec: EncoderSpec
    tag: str
    """"run", "random" or "file"."""
    description: str


def load_initial_weights(run: Path, init: str, encoder: str | None, seed: int) -> InitialWeights:
    """Load the run's encoder, or one given by name, with the weights chosen by `init`; UserError if it is no ResNet."""
    if encoder is not None and init == "run":
        raise UserError(f"--encoder {encoder} needs --init random or --init FILE; a run has its own encoder")
    if encoder is not None:
        spec = resolve_encoder(encoder, image_size=_IMAGE_SIZE)
    elif (run / WEIGHTS_NAME).is_file() or init == "run":
        loaded, spec = load_encoder(run)
    else:
        raise UserError(f"{run} has no encoder; give an architecture by name, such as --encoder resnet50")
    check_detectable(spec)
    if init == "run":
        return InitialWeights(loaded, spec, "run", f"the weights of {run}")
    torch.manual_seed(seed + 1_000_003)  # different from the seed of the heads
    made = build_encoder(spec)
    if init == "random":
        return InitialWeights(made, spec, "random", f"random weights (seed {seed})")
    made.load_state_dict(read_weights(init, spec).state)
    return InitialWeights(made, spec, "file", f"the weights of {init}")


def build_detector(encoder: nn.Module, spec: EncoderSpec, num_classes: int, settings: DetectSettings) -> MaskRCNN:
    """Build a Mask R-CNN with new heads for `num_classes` classes, without the background, on a ResNet.

    All weights are trained. A low-resolution stem keeps its 3×3 convolution; it gets stride 2 and max pooling, so that
    the stages have the strides 4, 8, 16 and 32. The heads' initial weights come from torch's global generator: seed it
    before.
    """
    if spec.stem != "standard":
        conv = encoder.get_submodule("conv1")
        assert isinstance(conv, nn.Conv2d)
        conv.stride = (2, 2)
        encoder.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
    width = settings.width
    backbone = BackboneWithFPN(
        encoder.requires_grad_(True),
        {stage: str(number) for number, stage in enumerate(STAGES)},
        [spec.num_features // 2**level for level in (3, 2, 1, 0)],  # the stages of a ResNet double their channels
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
    for part in (model.rpn, model.roi_heads):
        sampler = part.fg_bg_sampler
        part.fg_bg_sampler = SeededSampler(sampler.batch_size_per_image, sampler.positive_fraction)
    return model


def check_detectable(spec: EncoderSpec) -> None:
    """Raise UserError for an encoder that is not a ResNet, without memory for its weights."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        encoder = build_encoder(spec)
    if not all(isinstance(getattr(encoder, name, None), nn.Module) for name in ("conv1", "bn1", "maxpool", *STAGES)):
        raise UserError(
            f"{spec.name} is not a ResNet. Detection needs the four stages of a ResNet (resnet18 to resnet152, ResNeXt,"
            " wide or narrow ones). Pre-train a ResNet."
        )


class PaddedBatch(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Normalize and batch images that are already scaled; results stay at that size, masks at 28 × 28.

    `pad_to` (height, width) is that of the global batch: batch norm includes the padding, which must not depend on the
    rank of an image.
    """

    def __init__(self) -> None:
        super().__init__(min_size=1, max_size=1, image_mean=list(MEAN), image_std=list(STD))
        self.pad_to: tuple[int, int] = (0, 0)

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, Any]:
        """Return the arguments unchanged."""
        return image, target

    def batch_images(self, images: list[Tensor], size_divisible: int = 32) -> Tensor:
        """Stack images (3, H, W) of different sizes, with zeros on the right and at the bottom."""
        smallest = images[0].new_zeros(1).expand(3, *self.pad_to)
        batch: Tensor = super().batch_images([*images, smallest], size_divisible)
        return batch[:-1]

    def postprocess(self, result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
        """Return the results unchanged, in pixels of the scaled image."""
        return result


class SeededSampler(BalancedPositiveNegativeSampler):  # type: ignore[misc]
    """Sample anchors or regions with one seed per image, so that the choice does not depend on the batch.

    `counts` (all, positive) of the last call are the numbers that the losses are means over.
    """

    def __init__(self, batch_size_per_image: int, positive_fraction: float) -> None:
        super().__init__(batch_size_per_image, positive_fraction)
        self.seeds: Sequence[int] = ()
        self.counts = (0, 0)

    def __call__(self, matched_idxs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the masks of the positives and of the negatives, for each image."""
        positives, negatives = [], []
        for seed, matched in zip(self.seeds, matched_idxs, strict=True):
            torch.manual_seed(seed)
            (positive,), (negative,) = super().__call__([matched])
            positives.append(positive)
            negatives.append(negative)
        sampled = torch.stack([mask.sum() for mask in (*positives, *negatives)]).tolist()  # the device is read once
        self.counts = (sum(sampled), sum(sampled[: len(positives)]))
        return positives, negatives


def training_inputs(
    model: MaskRCNN, samples: Sequence[Sample], device: torch.device | str, pad_to: tuple[int, int]
) -> Any:
    """Return images and targets of a forward pass in training, and set the model's padding and seeds for it."""
    model.transform.pad_to = pad_to
    model.rpn.fg_bg_sampler.seeds = [sample.seeds[0] for sample in samples]
    model.roi_heads.fg_bg_sampler.seeds = [sample.seeds[1] for sample in samples]
    images = [to_device(sample.image, device).float() / 255 for sample in samples]
    targets = [{name: to_device(getattr(s, name), device) for name in ("boxes", "labels", "masks")} for s in samples]
    return images, targets


def loss_counts(model: MaskRCNN) -> dict[str, int]:
    """Return the number of anchors or regions that each loss of the last step is a mean over."""
    anchors, (regions, positive) = model.rpn.fg_bg_sampler.counts[0], model.roi_heads.fg_bg_sampler.counts
    return {
        "loss_objectness": anchors, "loss_rpn_box_reg": anchors, "loss_classifier": regions, "loss_box_reg": regions,
        "loss_mask": positive,
    }  # fmt: skip
