from __future__ import annotations

import pytest
import torch
from torchvision.models.detection import maskrcnn_resnet50_fpn

from snclr.evaluation.detection.batches import DetectionSteps, Sample
from snclr.evaluation.detection.coco import open_coco
from snclr.evaluation.detection.model import PaddedBatch, SeededSampler, build_detector, loss_counts, training_inputs
from snclr.evaluation.detection.settings import DetectSettings
from snclr.models.encoders import build_encoder, resolve_encoder
from tests.helpers import tiny_coco

TINY = DetectSettings(
    iterations=4, batch_size=2, short_side=(64, 64), long_side=80, width=8, rois=16, proposals=50, anchor=16
)


def build(name: str = "resnet10-tiny", *, stem: str = "half", image_size: int = 32, settings=TINY, classes: int = 2):
    spec = resolve_encoder(name, image_size=image_size, stem=stem)
    torch.manual_seed(0)
    return build_detector(build_encoder(spec), spec, classes, settings)


def test_resnet50_gives_torchvisions_mask_rcnn_with_batch_norm_in_the_pyramid():
    with torch.device("meta"):  # only shapes are compared
        theirs = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
        ours = build("resnet50", stem="standard", image_size=224, settings=DetectSettings(), classes=90)
    shapes = [{k: tuple(v.shape) for k, v in m.state_dict().items() if ".fpn." not in k} for m in (ours, theirs)]
    assert shapes[0] == shapes[1]
    pyramid = {key for key in ours.state_dict() if ".fpn." in key}
    assert "backbone.fpn.inner_blocks.0.1.running_mean" in pyramid
    assert "backbone.fpn.layer_blocks.3.1.weight" in pyramid
    assert ours.rpn.anchor_generator.sizes == theirs.rpn.anchor_generator.sizes
    for name in ("_pre_nms_top_n", "_post_nms_top_n"):
        assert getattr(ours.rpn, name) == getattr(theirs.rpn, name)
    assert all(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.parametrize("stem", ["standard", "half", "small"])
def test_levels_have_the_strides_4_to_64_for_every_stem(stem):
    model = build(stem=stem).eval()
    with torch.no_grad():
        features = model.backbone(torch.zeros(1, 3, 128, 192))
    assert [tuple(value.shape[1:]) for value in features.values()] == [
        (8, 32, 48), (8, 16, 24), (8, 8, 12), (8, 4, 6), (8, 2, 3)
    ]  # fmt: skip


def test_the_backbone_starts_from_the_weights_of_the_encoder():
    spec = resolve_encoder("resnet10-tiny", image_size=32, stem="half")
    encoder = build_encoder(spec)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    body = build_detector(encoder, spec, 2, TINY).state_dict()
    for key, value in before.items():
        assert torch.equal(body[f"backbone.body.{key}"], value)


@pytest.mark.parametrize("empty", [(), (0,), (0, 1)])
def test_every_weight_gets_a_finite_gradient_with_and_without_objects(tmp_path, empty):
    coco = open_coco(tiny_coco.write(tmp_path))[0].for_training(keep_empty=False)
    samples = DetectionSteps(coco, TINY)[0].samples
    for row in empty:
        s = samples[row]
        samples[row] = Sample(s.number, s.image, s.boxes[:0], s.labels[:0], s.masks[:0], s.seeds)
    model = build().train()
    losses = model(*training_inputs(model, samples, "cpu", (0, 0)))
    assert set(losses) == set(loss_counts(model))
    total = sum(losses.values())
    assert bool(total.isfinite())
    total.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())] == []
    if not empty:
        touched = {name.split(".")[2] for name, p in model.backbone.named_parameters("backbone") if bool(p.grad.any())}
        assert touched >= {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4"}
        assert loss_counts(model)["loss_mask"] > 0
    else:
        assert (loss_counts(model)["loss_mask"] == 0) == (len(empty) == 2)


def test_the_sampling_of_an_image_does_not_depend_on_its_batch():
    matched = [torch.randint(-1, 2, (200,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    sampler = SeededSampler(20, 0.25)
    sampler.seeds = [5, 6, 7]
    positive, negative = sampler(matched)
    assert sampler.counts == (60, 15)
    sampler.seeds = [7]
    alone = sampler([matched[2]])
    assert torch.equal(alone[0][0], positive[2])
    assert torch.equal(alone[1][0], negative[2])
    assert not bool((positive[2].bool() & (matched[2] < 1)).any())
    sampler.seeds = [8]
    assert not torch.equal(sampler([matched[2]])[1][0], negative[2])


def test_images_are_padded_to_the_size_of_the_global_batch():
    batch = PaddedBatch()
    images = [torch.ones(3, 40, 50), torch.ones(3, 30, 60)]
    assert batch(images)[0].tensors.shape == (2, 3, 64, 64)
    batch.pad_to = (65, 20)
    padded, _ = batch(images)
    assert padded.tensors.shape == (2, 3, 96, 64)
    assert padded.image_sizes == [(40, 50), (30, 60)]
    assert float(padded.tensors[0, :, 40:].abs().max()) == 0
