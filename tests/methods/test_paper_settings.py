"""The values of each method's paper that depend on the run, against the papers and the authors' code."""

import pytest

from snclr.methods.paper_settings import Setup, paper_settings
from snclr.train.config import resolve


def settings(method, **run):
    """Return what `resolve` chooses for a recipe, by default ResNet-50 on ImageNet."""
    return resolve({"recipe": "resnet50-imagenet", "method": method, **run})


@pytest.mark.parametrize(
    ("method", "run", "expected"),
    [
        ("simclr", {}, {"temperature": 0.1, "views": "simclr", "final_bn": True, "final_scale": True}),
        ("simclr", {"recipe": "cifar"}, {"temperature": 0.5, "views": "cifar"}),
        ("mocov2", {"views": "infomin"}, {"temperature": 0.15}),
        ("mocov2", {}, {"temperature": 0.2, "symmetric": False}),
        ("mocov3", {"epochs": 100}, {"lr": 0.6, "weight_decay": 1e-6, "momentum": 0.99, "crop_min": 0.2}),
        ("mocov3", {"epochs": 1000}, {"lr": 0.3, "weight_decay": 1.5e-6, "momentum": 0.996, "temperature": 1.0}),
        ("mocov3", {"recipe": "vit-small-imagenet"},
         {"temperature": 0.2, "projector_layers": 3, "predictor_final_bn": True, "weight_decay_on": "all"}),
        ("byol", {"epochs": 1000}, {"lr": 0.2, "weight_decay": 1.5e-6, "momentum": 0.996}),
        ("byol", {"epochs": 300}, {"lr": 0.3, "weight_decay": 1e-6, "momentum": 0.99}),
        ("byol", {"recipe": "cifar"}, {"lr": 0.06, "momentum": "auto"}),
        ("swav", {"batch_size": 256}, {"assignment_queue": 3840, "assignment_queue_start": 15}),
        ("swav", {"batch_size": 4096}, {"assignment_queue": 0}),
        ("swav", {"batch_size": 4096, "local_crops": 6}, {"crop_min": 0.14}),
        ("dino", {}, {"crop_min": 0.14, "clip_gradient": 3.0, "lr": 0.3}),
        ("dino", {"recipe": "vit-small-imagenet", "local_crops": 10},
         {"crop_min": 0.4, "lr": 5e-4, "weight_decay": 0.04, "weight_decay_end": 0.4, "warmup_epochs": 10,
          "drop_path": 0.1, "sincos": False, "freeze_patch_embed": False, "heads": None}),
    ],
)  # fmt: skip
def test_values_are_those_of_the_paper_or_its_official_code(method, run, expected):
    config = settings(method, **run)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(("method", "given"), [("simclr", {"views": "byol"}), ("mocov3", {"lr": 0.7, "epochs": 100})])
def test_a_given_setting_replaces_the_value_of_the_paper(method, given):
    config = settings(method, **given)
    assert {name: getattr(config, name) for name in given} == given


def test_a_method_without_such_values_takes_those_of_its_config():
    setup = Setup(
        encoder="resnet50", image_size=224, epochs=100, batch_size=4096, views="byol", prototypes=512, local_crops=0,
        paper_scale=True,
    )  # fmt: skip
    assert paper_settings("nnclr", setup) == paper_settings("snclr", setup) == {}
