"""The memory of a step, counted on fake tensors: equal to that of a real step, and to what the recipes say."""

import re
from pathlib import Path

import pytest
import torch

from snclr import recipes
from snclr.train.build import build_method, encoder_spec
from snclr.train.config import resolve, settings_for_method
from snclr.train.planning.memory import LiveBytes, count_memory
from tests.methods.test_methods import SMALL

RECIPES = {"ResNet-50": "resnet50-imagenet", "ViT-S": "vit-small-imagenet", "ViT-B": "vit-base-imagenet"}


def config_for(name, **settings):
    return resolve(settings_for_method(name, {**SMALL, "method": name, "batch_size": 32, **settings}))


def real_peak(config, images):
    """Bytes of real tensors at the peak of the second step, without optimizer and views."""
    method = build_method(config, encoder_spec(config), classes=5).train()
    views = [torch.randn(images, 3, 16, 16) for _ in range(2)]
    live = LiveBytes()
    for number in range(2):
        method.zero_grad()
        with live:
            live.track([*method.parameters(), *method.buffers(), *views])
            live.peak = 0
            losses = method.losses(
                views, torch.arange(images) + images * number, epoch=1, labels=torch.arange(images) % 5
            )
            for _ in range(method.loss_parts):
                next(losses).backward()
            next(losses, None)
            method.after_step(number, 2)
    return live.peak


@pytest.mark.parametrize("name", ["snclr", "simclr", "mocov2", "swav", "dino", "supervised"])
def test_the_count_is_that_of_a_real_step(name):
    config = config_for(name, queue_length=32, optimizer="sgd")
    found = count_memory(config, images=32, classes=5)
    real = real_peak(config, 32)
    assert found["total"] - found["optimizer"] == pytest.approx(real, rel=0.05)


def test_the_parts_are_those_of_the_method():
    config = config_for("snclr", optimizer="adamw")
    method = build_method(config, encoder_spec(config))
    found = count_memory(config, images=8, ranks=2)
    size = {name: sum(t.nbytes for t in child.state_dict().values()) for name, child in method.named_children()}
    online = size["encoder"] + size["projector"] + size["predictor"]
    assert found["weights"] == online
    assert found["target"] == size["momentum_encoder"] + size["momentum_projector"]
    assert found["queue"] == 40 * (16 * 4 + 8 + 8)
    trained = [p for p in method.parameters() if p.requires_grad]
    assert found["gradients"] == 2 * sum(p.nbytes for p in trained)  # and the buckets
    assert found["optimizer"] == 2 * sum(p.nbytes for p in trained) + 4 * len(trained)  # two moments and a counter


@pytest.mark.parametrize("name", ["detco", "pirl"])
def test_all_queues_and_memory_banks_count_as_queue(name):
    config = config_for(name, queue_length=40)
    method = build_method(config, encoder_spec(config), images=500)
    buffers = {key: tensor.nbytes for key, tensor in method.named_buffers() if "queue" in key or "bank" in key}
    assert len(buffers) == {"detco": 8 * 3, "pirl": 2}[name]
    found = count_memory(config, images=8, dataset_images=500)
    assert found["queue"] == sum(buffers.values())
    trained = sum(p.nbytes for p in method.parameters() if p.requires_grad)
    assert trained <= found["weights"] < 1.1 * trained


def test_half_precision_and_checkpointing_need_less():
    plain = count_memory(config_for("byol"), images=512)
    half = count_memory(config_for("byol", precision="bf16"), images=512)
    saving = count_memory(config_for("byol", activation_checkpointing=True), images=512)
    assert half["activations"] < 0.7 * plain["activations"]
    assert saving["activations"] < 0.8 * plain["activations"]
    assert (half["weights"], half["optimizer"]) == (plain["weights"], plain["optimizer"])


def test_nothing_is_allocated_and_the_random_state_is_kept():
    before = torch.get_rng_state()
    huge = count_memory(config_for("byol", image_size=128), images=100_000)
    assert huge["total"] > 100e9
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}])
@pytest.mark.parametrize("title", RECIPES)
def test_the_recipes_state_their_memory(title, options):
    text = Path(recipes.__file__).with_name("recipes.yaml").read_text(encoding="utf-8")
    stated = re.findall(rf"{title} ([\d.]+) GB", text)[len(options)]
    config = resolve({"recipe": RECIPES[title], **options})
    assert config.precision == "bf16"
    found = count_memory(config, images=config.batch_size // 8, ranks=8)
    assert f"{found['total'] / 1e9:.1f}" == stated
