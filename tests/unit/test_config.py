import contextlib
import dataclasses

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from snclr.config import METHOD_PRESETS, PretrainConfig, resolve, settings_of
from snclr.errors import UserError
from snclr.methods import METHOD_SETTINGS, METHODS
from snclr.recipes import RECIPES, get_recipe
from snclr.soft_neighbors import PRESETS
from snclr.train.build import build_method, encoder_spec, view_groups


def test_what_is_given_wins_over_preset_over_recipe():
    assert resolve({"recipe": "cifar"}).momentum_schedule == "constant"
    assert resolve({"recipe": "cifar", "preset": "released"}).momentum_schedule == "cosine"
    assert resolve({"preset": "released", "momentum_schedule": "constant"}).momentum_schedule == "constant"
    assert resolve({"recipe": "cifar", "epochs": 3, "warmup_epochs": 1}).epochs == 3


def test_the_presets_are_those_of_the_method():
    for name in METHOD_PRESETS:
        config = resolve({"recipe": "demo", "preset": name, "temperature": 0.2, "neighbors": 30})
        assert build_method(config, encoder_spec(config)).criterion.settings == PRESETS[name]


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


def test_a_methods_own_paper_goes_before_the_recipe_and_what_is_given_before_both():
    assert resolve({"recipe": "demo"}).temperature == 0.1
    assert resolve({"recipe": "demo", "method": "mocov3"}).temperature == 0.2
    assert resolve({"recipe": "demo", "method": "mocov3", "temperature": 0.5}).temperature == 0.5
    assert resolve({"recipe": "demo", "method": "byol"}).momentum_schedule == "cosine"


def test_sizes_are_the_recipes_for_little_data_and_the_methods_own_at_the_papers_scale():
    small = {name: resolve({"recipe": "cifar", "method": name}) for name in METHODS}
    assert {(c.hidden, c.dim) for name, c in small.items() if name != "supervised"} == {(2048, 256)}
    assert (small["mocov2"].queue_length, small["mocov2"].momentum) == (16_384, 0.99)
    large = {name: resolve({"recipe": "resnet50-imagenet", "method": name}) for name in METHODS}
    assert (large["mocov2"].queue_length, large["mocov2"].momentum, large["mocov2"].dim) == (65_536, 0.999, 128)
    assert (large["nnclr"].queue_length, large["nnclr"].temperature) == (98_304, 0.1)
    assert (large["barlowtwins"].hidden, large["barlowtwins"].dim, large["barlowtwins"].redundancy_weight) == (
        8192, 8192, 0.005,
    )  # fmt: skip
    assert (large["swav"].prototypes, large["dino"].prototypes, large["dino"].teacher_temperature) == (
        3000, 65_536, 0.07,
    )  # fmt: skip
    assert (large["byol"].momentum, large["simsiam"].dim) == (0.996, 2048)
    assert large["mocov3"].times_2tau
    assert not large["snclr"].times_2tau


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", ["demo", "resnet50-imagenet"])
def test_config_yaml_repeats_a_run_of_any_method_and_says_only_what_it_uses(method, recipe):
    config = resolve({"recipe": recipe, "method": method})
    saved = yaml.safe_load(yaml.safe_dump(config.to_dict()))
    assert resolve(saved) == config
    assert METHODS[method].settings <= set(saved)
    assert not (METHOD_SETTINGS - METHODS[method].settings) & set(saved)


def test_a_setting_that_the_method_ignores_is_refused():
    with pytest.raises(UserError, match="method byol does not use neighbors") as caught:
        resolve({"method": "byol", "neighbors": 5})
    for word in ("used by snclr", "predictor_layers", "momentum", "--method"):
        assert word in str(caught.value)
    with pytest.raises(UserError, match="simclr does not use preset"):
        resolve({"method": "simclr", "preset": "released"})
    for method in METHODS:  # the same settings can serve all, once sorted out
        resolve(settings_of(method, {"method": method, **dict.fromkeys(METHOD_SETTINGS), "neighbors": 5}))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"method": "simcrl"}, ["method", "did you mean 'simclr'", "barlowtwins"]),
        ({"method": "dino", "teacher_temperature": 0.0}, ["teacher_temperature"]),
        ({"method": "dino", "center_momentum": 1.5}, ["center_momentum"]),
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
        ({"clip_gradient": 0.0}, ["clip_gradient", "above 0", "leave it out"]),
        ({"seed": 2**32}, ["seed", "below 2**32"]),
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


@settings(deadline=None)
@given(
    name=st.sampled_from([f.name for f in dataclasses.fields(PretrainConfig)]),
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
)
def test_any_value_gives_a_config_or_a_user_error(name, value):
    with contextlib.suppress(UserError):  # any other exception fails the test
        assert isinstance(resolve({name: value}), PretrainConfig)


@pytest.mark.parametrize("name", ["temperature", "lr", "momentum", "gamma", "max_bad_share"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(name, value):
    with pytest.raises(UserError, match=f"{name} must be a finite number"):
        resolve({name: value})


def test_a_name_that_is_no_text_is_no_setting():
    """As a damaged config.yaml may have it."""
    with pytest.raises(UserError, match=r"there is no setting 12; `snclr pretrain --help`"):
        resolve({"data": "demo", 12: "x"})
