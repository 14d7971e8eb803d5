import contextlib
import dataclasses

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from snclr.config import METHOD_PRESETS, PretrainConfig, resolve
from snclr.errors import UserError
from snclr.recipes import RECIPES, get_recipe
from snclr.soft_neighbors import PRESETS
from snclr.train.build import encoder_spec, soft_neighbor_settings, view_groups


def test_what_is_given_wins_over_preset_over_recipe():
    assert resolve({"recipe": "cifar"}).momentum_schedule == "constant"
    assert resolve({"recipe": "cifar", "preset": "released"}).momentum_schedule == "cosine"
    assert resolve({"preset": "released", "momentum_schedule": "constant"}).momentum_schedule == "constant"
    assert resolve({"recipe": "cifar", "epochs": 3, "warmup_epochs": 1}).epochs == 3


def test_the_presets_are_those_of_the_method():
    for name in METHOD_PRESETS:
        config = resolve({"recipe": "resnet50-imagenet", "preset": name})
        assert soft_neighbor_settings(config) == PRESETS[name]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete(name):
    config = resolve({"recipe": name})
    spec = encoder_spec(config)
    assert spec.num_features > 0
    assert len(view_groups(config)) == 2
    assert get_recipe(name).summary
    assert resolve(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config  # config.yaml repeats the run


def test_the_papers_recipes_are_the_papers_numbers():
    for epochs in (100, 200, 400, 800):
        name = "resnet50-imagenet" + ("" if epochs == 800 else f"-{epochs}ep")
        c = resolve({"recipe": name})
        assert (c.encoder, c.optimizer, c.lr, c.epochs, c.warmup_epochs) == ("resnet50", "lars", 0.3, epochs, 10)
        assert (c.batch_size, c.momentum, c.neighbors, c.queue_length, c.dim) == (4096, 0.99, 30, 128_000, 256)
        assert (c.hidden, c.temperature, c.image_size, c.views, c.loss_form) == (4096, 0.2, 224, "byol", "inside")
    for size in ("small", "base"):
        c = resolve({"recipe": f"vit-{size}-imagenet"})
        assert (c.encoder, c.optimizer, c.lr, c.weight_decay) == (f"vit_{size}", "adamw", 1.5e-4, 0.1)
        assert (c.epochs, c.warmup_epochs, c.batch_size, c.neighbors, c.queue_length) == (300, 40, 4096, 30, 128_000)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"recipe": "cifra"}, ["cifra", "did you mean 'cifar'", "photos"]),
        ({"learning_rate": 1}, ["learning_rate"]),
        ({"epoch": 1}, ["epoch", "did you mean 'epochs'"]),
        ({"loss_form": "in"}, ["loss_form", "inside", "outside"]),
        ({"batch_size": "many"}, ["batch_size", "int"]),
        ({"batch_size": 1}, ["batch_size", "at least 2"]),
        ({"batch_size": True}, ["batch_size", "int"]),
        ({"accumulate": 4}, ["accumulate", "cannot be summed", "--queue-length"]),
        ({"gamma": "min"}, ["gamma", "max"]),
        ({"gamma": -1}, ["gamma"]),
        ({"momentum": 1.5}, ["momentum"]),
        ({"temperature": 0.0}, ["temperature"]),
        ({"warmup_epochs": 50, "epochs": 20}, ["warmup_epochs", "epochs=20"]),
        ({"devices": "two"}, ["devices", "auto"]),
        ({"preset": "published"}, ["preset", "paper, released"]),
        ({"resume": True, "overwrite": True}, ["resume", "overwrite"]),
    ],
)
def test_impossible_settings_say_what_is_possible(bad, words):
    with pytest.raises(UserError) as caught:
        resolve(bad)
    for word in words:
        assert word in str(caught.value)


@given(
    name=st.sampled_from([f.name for f in dataclasses.fields(PretrainConfig)]),
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
)
def test_any_value_gives_a_config_or_a_user_error(name, value):
    with contextlib.suppress(UserError):  # any other exception fails the test
        assert isinstance(resolve({name: value}), PretrainConfig)
