import contextlib
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from snclr.errors import UserError
from snclr.methods.config import METHOD_SETTINGS, METHODS, PRESETS
from snclr.recipes import RECIPES, get_recipe
from snclr.runtime.settings import RENAMED_SETTINGS
from snclr.train.build import build_method, encoder_spec, view_settings
from snclr.train.config import (
    EARLIER_VALUES,
    PretrainConfig,
    all_settings,
    read_config,
    resolve,
    settings_for_method,
)


def test_flags_win_over_the_preset_and_the_preset_over_the_recipe():
    assert resolve({"recipe": "cifar"}).momentum_schedule == "constant"
    assert resolve({"recipe": "cifar", "preset": "released"}).momentum_schedule == "cosine"
    assert resolve({"preset": "released", "momentum_schedule": "constant"}).momentum_schedule == "constant"
    assert resolve({"recipe": "cifar", "epochs": 3, "warmup_epochs": 1}).epochs == 3


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reaches_the_loss(name):
    config = resolve({"recipe": "demo", "preset": name})
    criterion = build_method(config, encoder_spec(config)).criterion
    assert criterion.config.times_2tau == config.times_2tau == (name == "released")
    assert criterion.config.loss_form == config.loss_form == ("outside" if name == "released" else "inside")
    assert criterion.config.neighbors == 10


# SHA-256 of the resolved settings of every recipe, as the first version of the package gave them: without settings that
# were added later (ADDED), under their names and with the momentum of that version. The other methods were corrected
# since then; their values are in tests/methods/test_paper_settings.py.
UNCORRECTED = [("nnclr", None), ("supervised", None), *(("snclr", preset) for preset in PRESETS)]
ADDED = {
    "final_bias": {"snclr": False, "nnclr": True},
    "predictor_final_bn": {"snclr/paper": False, "snclr/released": True, "nnclr": False},
    "zero_init_residual": True, "weight_decay_on": "weights", "negatives": "other-view",
    "unique_neighbors": False, "search_view": "augmented", "search_space": "projection", "cache_images": "auto",
    "keep_encoders": 0, "drop_path": 0.0, "weight_decay_end": None, "beta2": 0.999, "tf32": True,
    "deterministic": False, "activation_checkpointing": False, "micro_batch": 0, "agreeing_neighbors": False,
}  # fmt: skip
RESOLVED = {
    "photos": "cdabfed9e6b0722c",
    "cifar": "4c6b35284b60c5c6",
    "cifar-cpu": "ccd4470da0bc1040",
    "demo": "d3fe44601d1776b5",
    "resnet50-imagenet": "62c1c2b1065057ed",
    "resnet50-imagenet-100ep": "ae6245d434420292",
    "resnet50-imagenet-200ep": "33c80380990e3d58",
    "resnet50-imagenet-400ep": "bd4b6033fe88be3e",
    "vit-small-imagenet": "d806f809b8bff522",
    "vit-small-imagenet-100ep": "0453e3290e3a1264",
    "vit-small-imagenet-200ep": "49d87d7a9a4e9443",
    "vit-base-imagenet": "93dbb9b0e4394b6d",
    "vit-base-imagenet-100ep": "21748340f2668682",
    "vit-base-imagenet-200ep": "da6211e28c38dcde",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_resolved_settings_never_change(recipe):
    resolved = {
        f"{method}/{preset}": resolve({"recipe": recipe, "method": method, "preset": preset}).to_dict()
        for method, preset in UNCORRECTED
    }
    for case, values in resolved.items():
        for name, value in ADDED.items():
            expected = value.get(case, value.get(case.partition("/")[0])) if isinstance(value, dict) else value
            assert values.pop(name, expected) == expected, (case, name)
        gate = 0.5 if recipe in ("photos", "cifar", "cifar-cpu") and case.startswith("snclr") else 0.0
        assert values.pop("min_agreement", 0.0) == gate, case
        if values.get("momentum") == "auto":
            assert get_recipe(recipe).scale == "small"
            values["momentum"] = 0.99
        for earlier, present in RENAMED_SETTINGS.items():
            if present in values:
                values[earlier] = values.pop(present)
    digest = hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == RESOLVED[recipe]


def test_a_config_file_wins_over_the_recipe_and_a_flag_over_the_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"recipe": "cifar", "epochs": 9, "neighbors": 7, "out": "other", "resume": True}))
    config = resolve({"epochs": 3, "out": "mine"}, config=file)
    assert (config.recipe, config.neighbors, config.epochs, config.out, config.resume) == ("cifar", 7, 3, "mine", False)
    assert config.warmup_epochs == 0.3  # a tenth
    assert resolve({"method": "byol"}, config=file).dim == 256  # a file for another method: unused settings are ignored
    assert resolve({"preset": "released"}, config=file).loss_form == "outside"


def test_the_warm_up_of_a_shorter_run_is_at_most_a_tenth_unless_given(tmp_path):
    usual = {name: resolve({"recipe": name}) for name in RECIPES}
    assert all(c.warmup_epochs == RECIPES[name].settings["warmup_epochs"] for name, c in usual.items())
    assert resolve({"epochs": 6}).warmup_epochs == 0.6
    assert resolve({"epochs": 50}).warmup_epochs == 5  # the recipe's, which is a tenth
    assert resolve({"epochs": 500}).warmup_epochs == 5
    assert resolve({"epochs": 6, "warmup_epochs": 5}).warmup_epochs == 5
    assert resolve({"epochs": 6, "method": "simclr"}).warmup_epochs == 0.6
    file = tmp_path / "config.yaml"  # of a run: its own number stays, until other epochs are given
    file.write_text(yaml.safe_dump({**resolve({"epochs": 6, "warmup_epochs": 5, "out": "run"}).to_dict()}))
    assert resolve({}, config=file).warmup_epochs == 5
    assert resolve({"epochs": 4}, config=file).warmup_epochs == 0.4
    assert resolve({"epochs": 8}, config=file).warmup_epochs == 5
    assert resolve(read_config(file)).warmup_epochs == 5  # as on a resume


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method: byol\nneighbors: 5", "byol does not use neighbors=5"),
        ("epoch: 5", "'epoch'"),
        ("- 1", "is not a settings file"),
    ],
)
def test_a_config_file_is_checked(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        resolve({}, config=tmp_path / "config.yaml")
    with pytest.raises(UserError, match="there is no settings file"):
        resolve({}, config=tmp_path / "missing.yaml")


def test_a_config_of_an_earlier_version_with_accumulate_loads():
    assert resolve({"recipe": "demo", "accumulate": 1}) == resolve({"recipe": "demo"})
    with pytest.raises(UserError, match="no setting 'accumulate'"):
        resolve({"accumulate": 4})


def test_a_run_of_an_earlier_version_keeps_what_it_computed(tmp_path):
    golden = Path(__file__).parents[1] / "reliability" / "golden" / "schema-1.zip"
    shutil.unpack_archive(golden, tmp_path)
    saved = read_config(tmp_path / "config.yaml")
    earlier = settings_for_method("snclr", {**EARLIER_VALUES, "predictor_final_bn": False})
    assert {name: saved[name] for name in earlier} == earlier
    for config in (resolve(saved), resolve({}, config=tmp_path / "config.yaml")):
        assert {name: getattr(config, name) for name in earlier} == earlier
    resolved = resolve(saved).to_dict()
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    new = resolved.keys() - {RENAMED_SETTINGS.get(name, name) for name in written}
    assert new >= earlier.keys()  # the others have a default that describes the earlier version
    assert {name: resolved[name] for name in new - earlier.keys()} == {
        "negatives": "other-view", "unique_neighbors": False, "search_view": "augmented", "search_space": "projection",
        "cache_images": "auto", "keep_encoders": 0, "drop_path": 0.0, "weight_decay_end": None, "beta2": 0.999,
        "tf32": True, "deterministic": False, "activation_checkpointing": False, "micro_batch": 0,
        "agreeing_neighbors": False,
    }  # fmt: skip
    # A file of a few settings is not a run's: it gets today's defaults.
    (tmp_path / "few.yaml").write_text("recipe: demo\nneighbors: 7\n")
    assert resolve({}, config=tmp_path / "few.yaml").final_bias is False


def test_every_setting_has_help_text():
    assert [name for name, setting in all_settings().items() if not setting.help] == []


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete(name):
    config = resolve({"recipe": name})
    spec = encoder_spec(config)
    assert spec.num_features > 0
    assert len(view_settings(config)) == 2
    assert get_recipe(name).summary


def test_paper_recipes_have_the_papers_settings():
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


def test_a_methods_paper_wins_over_the_recipe_and_a_flag_over_both():
    assert resolve({"recipe": "demo"}).temperature == 0.1
    assert resolve({"recipe": "demo", "method": "mocov3"}).temperature == 1.0
    assert resolve({"recipe": "demo", "method": "mocov3", "temperature": 0.5}).temperature == 0.5
    assert resolve({"recipe": "demo", "method": "byol"}).momentum_schedule == "cosine"


def test_sizes_come_from_a_small_recipe_and_from_the_methods_paper_at_paper_scale():
    small = {name: resolve({"recipe": "cifar", "method": name}) for name in METHODS}
    heads = {(c.hidden, c.dim) for name, c in small.items() if "hidden" in METHODS[name].setting_names()}
    assert heads == {(2048, 256)}
    assert (small["mocov2"].queue_length, small["mocov2"].momentum) == (16_384, "auto")
    large = {name: resolve({"recipe": "resnet50-imagenet", "method": name}) for name in METHODS}
    assert (large["mocov2"].queue_length, large["mocov2"].momentum, large["mocov2"].dim) == (65_536, 0.999, 128)
    assert (large["nnclr"].queue_length, large["nnclr"].temperature) == (98_304, 0.1)
    assert (large["barlowtwins"].hidden, large["barlowtwins"].dim) == (8192, 8192)
    assert (large["swav"].prototypes, large["dino"].prototypes, large["dino"].teacher_temperature) == (
        3000, 65_536, 0.07,
    )  # fmt: skip
    assert (large["byol"].momentum, large["simsiam"].dim) == (0.996, 2048)
    assert large["mocov3"].times_2tau
    assert not large["snclr"].times_2tau


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", ["demo", "resnet50-imagenet", "vit-small-imagenet"])
def test_config_yaml_repeats_a_run_and_has_only_used_settings(tmp_path, method, recipe):
    config = resolve({"recipe": recipe, "method": method})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    saved = read_config(tmp_path / "config.yaml")
    assert resolve(saved) == resolve({}, config=tmp_path / "config.yaml") == config
    assert METHODS[method].setting_names() <= set(saved)
    assert not (METHOD_SETTINGS - METHODS[method].setting_names()) & set(saved)


def test_a_setting_the_method_does_not_use_is_rejected():
    with pytest.raises(UserError, match="method=byol does not use neighbors") as caught:
        resolve({"method": "byol", "neighbors": 5})
    for text in ("used by snclr", "`snclr methods byol` lists its settings"):
        assert text in str(caught.value)
    with pytest.raises(UserError, match="simclr does not use preset"):
        resolve({"method": "simclr", "preset": "released"})
    for method in METHODS:
        resolve(settings_for_method(method, {"method": method, **dict.fromkeys(METHOD_SETTINGS), "neighbors": 5}))


@pytest.mark.parametrize(
    ("bad", "texts"),
    [
        ({"method": "simcrl"}, ["method", "did you mean 'simclr'", "barlowtwins"]),
        ({"method": "dino", "teacher_temperature": 0.0}, ["teacher_temperature"]),
        ({"method": "dino", "center_momentum": 1.5}, ["center_momentum"]),
        ({"recipe": "cifra"}, ["cifra", "did you mean 'cifar'", "photos"]),
        ({"learning_rate": 1}, ["learning_rate"]),
        ({"epoch": 1}, ["epoch", "did you mean 'epochs'"]),
        ({"loss_form": "in"}, ["loss_form", "inside", "outside"]),
        ({"batch_size": "many"}, ["batch_size", "whole number"]),
        ({"batch_size": 1}, ["batch_size", "at least 2"]),
        ({"batch_size": True}, ["batch_size", "whole number"]),
        ({"attention": "linear"}, ["attention_gradient"]),
        ({"gamma": "min"}, ["gamma", "max"]),
        ({"gamma": -1}, ["gamma"]),
        ({"gamma": "pull", "loss_form": "outside"}, ["pull", "loss_form", "inside"]),
        ({"search_view": "plain", "push": "both"}, ["push", "search_view", "augmented"]),
        ({"momentum": 1.5}, ["momentum", "at least 0 and at most 1", "auto"]),
        ({"temperature": 0.0}, ["temperature"]),
        ({"clip_gradient": 0.0}, ["clip_gradient", "above 0"]),
        ({"seed": 2**32}, ["seed", "below 4,294,967,296"]),
        ({"warmup_epochs": 50, "epochs": 20}, ["warmup_epochs", "epochs=20"]),
        ({"devices": "two"}, ["devices", "auto"]),
        ({"preset": "published"}, ["preset", "paper, released"]),
        ({"resume": True, "overwrite": True}, ["resume", "overwrite"]),
    ],
)
def test_errors_state_the_allowed_values(bad, texts):
    with pytest.raises(UserError) as caught:
        resolve(bad)
    for text in texts:
        assert text in str(caught.value)


@given(
    name=st.sampled_from(list(all_settings())),
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
)
def test_any_value_gives_a_config_or_a_user_error(name, value):
    with contextlib.suppress(UserError):  # any other exception fails the test
        assert isinstance(resolve({name: value}), PretrainConfig)


@pytest.mark.parametrize("name", ["temperature", "lr", "momentum", "gamma", "max_bad_share"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(name, value):
    with pytest.raises(UserError, match=f"{name} must be a number"):
        resolve({name: value})


def test_a_setting_name_must_be_a_string():
    """A damaged config.yaml may contain one."""
    with pytest.raises(UserError, match=r"there is no setting 12; `snclr pretrain --help`"):
        resolve({"data": "demo", 12: "x"})


def test_earlier_names_of_settings_are_accepted(tmp_path):
    assert resolve({"recipe": "demo", "accelerator": "cpu", "weights": "hard"}) == resolve(
        {"recipe": "demo", "device": "cpu", "neighbor_weights": "hard"}
    )
    (tmp_path / "config.yaml").write_text("recipe: demo\nweights: hard\naccelerator: cpu\n")
    config = resolve({"accelerator": "auto"}, config=tmp_path / "config.yaml")
    assert (config.neighbor_weights, config.device) == ("hard", "auto")
