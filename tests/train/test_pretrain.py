"""`pretrain` in one process on tiny images: files, reproducibility, options, warnings and errors."""

import json
import logging
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import snclr
from snclr import UserError
from snclr.checkpoint.format import latest_checkpoint, save_checkpoint
from snclr.data.loader import Batch, ViewLoader
from snclr.runtime.progress import Progress
from snclr.train import pretrain_task
from snclr.train.build import build_method, build_task, encoder_spec
from snclr.train.config import resolve
from snclr.train.load_run import config_for_resume, load_trained_method
from snclr.train.metrics import read_metrics
from snclr.train.pretrain import launch_run
from snclr.train.trainer import load_latest_checkpoint
from tests.helpers.noise_images import write_noise
from tests.helpers.state_digest import digest

TINY = {
    "encoder": "resnet10-tiny", "stem": "half", "image_size": 16, "batch_size": 8, "epochs": 2, "warmup_epochs": 1,
    "hidden": 16, "dim": 8, "neighbors": 3, "queue_length": 20, "views": "cifar", "log_every": 1, "workers": 0,
    "min_agreement": 0.0, "device": "cpu", "threads": 1, "quiet": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return str(write_noise(tmp_path_factory.mktemp("images"), 24))


def end_digest(out):
    checkpoint = latest_checkpoint(out / "checkpoints", warn=pytest.fail)
    return digest(checkpoint.tensors, checkpoint.step)


def test_a_run_writes_all_documented_files(images, tmp_path):
    out = tmp_path / "run"
    result = snclr.pretrain(data=images, out=str(out), **TINY)
    assert (result.step, result.total_steps, result.skipped) == (6, 6, 0)
    for name in ("config.yaml", "config.json", "encoder.safetensors", "metrics.jsonl", "train.log", "skipped.jsonl"):
        assert (out / name).is_file(), name
    assert list((out / "tensorboard").iterdir())
    lines = read_metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    wanted = {"loss", "lr", "gradient_norm", "spread", "effective_rank", "queue_fill", "collapsed"}
    wanted |= {"positiveness_entropy", "neighbor_age", "neighbor_cosine", "neighbor_purity", "queue_knn"}
    assert wanted <= set(lines[-1])
    assert not wanted & {"neighbor_age", "neighbor_purity"} <= set(lines[0])  # an empty queue has no neighbors
    assert "epoch 2/2" in (out / "train.log").read_text()
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert saved["queue_length"] == 20
    assert saved["resume"] is False
    encoder, spec = snclr.load_encoder(out)
    assert encoder(torch.zeros(1, 3, 16, 16)).shape == (1, spec.num_features)
    method, _ = load_trained_method(out)
    assert len(method.queue) == 20  # the queue is part of the run
    assert torch.equal(method.encoder.state_dict()["conv1.weight"], encoder.state_dict()["conv1.weight"])


def epoch_lines(out):
    return re.findall(r"epoch \d+/\d+: loss [\d.]+ \(mean\)", (out / "train.log").read_text())


def test_an_epoch_line_has_the_mean_loss_and_the_last_step_is_logged(images, tmp_path):
    every, last = tmp_path / "every", tmp_path / "last"
    snclr.pretrain(data=images, out=str(every), **TINY)
    snclr.pretrain(data=images, out=str(last), **{**TINY, "log_every": 100}, checkpoint_every=1, keep_checkpoints=10)
    losses = [line["loss"] for line in read_metrics(every)]
    means = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert epoch_lines(every) == epoch_lines(last) == [f"epoch {n}/2: loss {means[n - 1]:.3f} (mean)" for n in (1, 2)]
    assert [(line["step"], line["loss"]) for line in read_metrics(last)] == [(3, losses[2]), (6, losses[5])]

    for step in (5, 6):
        shutil.rmtree(last / "checkpoints" / f"step-{step:010d}")
    snclr.pretrain(out=str(last), resume=True, quiet=True)  # from the middle of an epoch
    assert epoch_lines(last)[-1] == epoch_lines(every)[-1]


def test_a_run_is_determined_by_settings_and_seed(images, tmp_path):
    digests = {}
    changes = {"a": {}, "b": {}, "c": {"seed": 1}, "d": {"preset": "released"}, "e": {"sides": "neither"}}
    for name, changed in changes.items():
        snclr.pretrain(data=images, out=str(tmp_path / name), **{**TINY, **changed})
        digests[name] = end_digest(tmp_path / name)
    assert digests["a"] == digests["b"]
    assert len(set(digests.values())) == 4
    config = {"data": images, "out": str(tmp_path / "again"), "quiet": True}
    repeat = {**yaml.safe_load((tmp_path / "c" / "config.yaml").read_text()), **config}
    snclr.pretrain(**repeat)  # config.yaml is enough to repeat the run
    assert end_digest(tmp_path / "again") == digests["c"]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "lars", "lr": 0.3},
        {"optimizer": "sgd", "lr": 0.1, "clip_gradient": 0.5},
        {"encoder": "vit_tiny", "stem": "auto", "image_size": 32, "sincos": True, "freeze_patch_embed": True},
        {"push": "both", "gamma": "max", "queue_dtype": "float16", "attention_temperature": 0.1},
        {"attention": "linear", "attention_gradient": True, "momentum_schedule": "cosine", "neighbor_free_epochs": 1},
        {"sides": "other-negatives", "negatives": "both-views", "predictor_layers": 0, "weight_decay_on": "all"},
        {"momentum": 0.0},
    ],
)  # fmt: skip
def test_training_runs_with_each_option(images, tmp_path, changes):
    snclr.pretrain(data=images, out=str(tmp_path / "run"), **{**TINY, **changes})
    lines = read_metrics(tmp_path / "run")
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert "nonfinite" not in lines[-1]
    method, config = load_trained_method(tmp_path / "run")
    before, after = build_method(config, encoder_spec(config)).encoder.state_dict(), method.encoder.state_dict()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert ("patch_embed.proj.weight" in still) is bool(changes.get("freeze_patch_embed"))
    assert len(still) < len(before) / 2
    if changes.get("momentum") == 0.0:  # the target network is the online network
        target = dict(method.momentum_encoder.named_parameters())
        assert all(torch.equal(value, target[name]) for name, value in method.encoder.named_parameters())
    if changes.get("push") == "both":
        ids = method.queue.ids.tolist()
        assert len(ids) == 20
        assert max(ids.count(i) for i in ids) >= 2  # both views of an image


def test_auto_momentum_is_saved_as_the_number_for_the_dataset(images, tmp_path):
    out = tmp_path / "run"
    settings = {**TINY, "epochs": 1, "warmup_epochs": 0, "batch_size": 3}
    snclr.pretrain(data=images, out=str(out), **settings, momentum="auto")
    assert yaml.safe_load((out / "config.yaml").read_text())["momentum"] == 0.609375  # 1 − 3 / (0.32 · 24)
    snclr.pretrain(data=images, out=str(tmp_path / "number"), **settings, momentum=0.609375)
    assert end_digest(out) == end_digest(tmp_path / "number")
    assert snclr.pretrain(out=str(out), resume=True, quiet=True, momentum="auto").step == 8


def test_a_run_warns_once_if_most_neighbors_are_pushed(images, tmp_path, capsys):
    changes = {"temperature": 1.0, "quiet": False}
    for name, gamma in (("pushes", 1000.0), ("pulls", "pull")):
        snclr.pretrain(data=images, out=str(tmp_path / name), **{**TINY, **changes, "gamma": gamma})
        shares = [line["pulled_share"] for line in read_metrics(tmp_path / name) if "pulled_share" in line]
        warnings = (tmp_path / name / "train.log").read_text().count("fewer than half of the neighbors are pulled")
        assert len(shares) == 5  # the queue is empty in the first step
        assert (max(shares) < 0.5) is (name == "pushes")
        assert (min(shares) == 1) is (name == "pulls")
        assert warnings == (name == "pushes")
        if warnings:  # after a whole epoch of three steps, not in the first ones
            assert "warning: step 5: fewer than half" in (tmp_path / name / "train.log").read_text()
    assert "--gamma pull" in capsys.readouterr().err


def test_clipping_bounds_the_gradient_norm(images, tmp_path, monkeypatch):
    norms = []
    original = torch.optim.SGD.step

    def step(self, *args, **kwargs):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    snclr.pretrain(data=images, out=str(tmp_path / "run"), **TINY, optimizer="sgd", clip_gradient=0.01)
    assert max(norms) <= 0.0101
    assert max(line["gradient_norm"] for line in read_metrics(tmp_path / "run")) > 0.1  # the norm before clipping


def test_a_nonfinite_loss_stops_before_the_update(images, tmp_path, monkeypatch):
    out = tmp_path / "run"
    original = ViewLoader.batches

    def poisoned(self, start, stop):
        for batch in original(self, start, stop):
            if batch.step == 4:
                views = (batch.views[0] * float("nan"), batch.views[1])
                yield Batch(ids=batch.ids, views=views, labels=batch.labels, epoch=batch.epoch, step=batch.step)
            else:
                yield batch

    monkeypatch.setattr(ViewLoader, "batches", poisoned)
    with pytest.raises(UserError, match=r"step 4: the loss is not finite; nothing was updated"):
        snclr.pretrain(data=images, out=str(out), **TINY, checkpoint_every=4)
    note = json.loads((out / "nonfinite.json").read_text())
    assert note["step"] == 4
    assert len(note["ids"]) == 8
    checkpoint = latest_checkpoint(out / "checkpoints", warn=pytest.fail)
    assert checkpoint.step == 4
    assert all(t.isfinite().all() for t in checkpoint.tensors.values() if t.is_floating_point())


def test_collapsed_features_print_a_warning(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrain_task, "collapsed", lambda values, max_rank: True)
    snclr.pretrain(data=images, out=str(tmp_path / "run"), **{**TINY, "quiet": False})
    assert capsys.readouterr().err.count("the features have collapsed") == 1
    assert "the features have collapsed" in (tmp_path / "run" / "train.log").read_text()
    assert all(line["collapsed"] for line in read_metrics(tmp_path / "run"))


def test_init_from_loads_the_weights_of_another_run(images, tmp_path, capsys):
    snclr.pretrain(data=images, out=str(tmp_path / "first"), **TINY)
    still = {**TINY, "lr": 0.0, "weight_decay": 0.0, "seed": 5, "quiet": False}
    snclr.pretrain(data=images, out=str(tmp_path / "second"), **still, init_from=str(tmp_path / "first"))
    first, second = (dict(snclr.load_encoder(tmp_path / name)[0].named_parameters()) for name in ("first", "second"))
    for name, value in first.items():
        assert torch.allclose(second[name], value, atol=1e-6), name
    for text in (capsys.readouterr().err, (tmp_path / "second" / "train.log").read_text()):
        assert text.count("initial weights: all") == 1


def test_a_damaged_checkpoint_is_reported_once(tmp_path, monkeypatch, capsys):
    saved = save_checkpoint(tmp_path, {"weights": torch.zeros(2)}, {}, step=1, keep=1)
    (saved / "tensors.safetensors").write_bytes(b"")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in an evaluation, which has no log file
    assert load_latest_checkpoint(tmp_path, "cpu") is None
    assert capsys.readouterr().err.count("is damaged and is not used") == 1


def test_only_the_rank_with_a_log_file_reports_a_warning(images, tmp_path, monkeypatch, capsys):
    """Every rank measures the same values; another rank than 0 is quiet and has no log file."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(pretrain_task, "collapsed", lambda values, max_rank: True)
    settings = {name: value for name, value in TINY.items() if name != "quiet"}
    config = resolve({"data": images, "out": str(tmp_path / "run"), **settings})
    task = build_task(config, launch_run(config))
    with Progress("pretrain", 1, quiet=True) as task.progress:
        assert task.step(next(task.batches(0)), log=True)["collapsed"]
    assert "collapsed" not in capsys.readouterr().err


def test_bad_input_creates_no_run_directory(images, tmp_path):
    out = tmp_path / "run"
    for bad in ({"data": images + "-gone"}, {"encoder": "resnet81"}, {"batch_size": 100}, {"init_from": "nowhere"}):
        with pytest.raises(UserError):
            snclr.pretrain(**{"data": images, "out": str(out), **TINY, **bad})
        assert not out.exists(), bad


def test_resuming_with_changed_images_is_refused(images, tmp_path):
    out = tmp_path / "run"
    folder = tmp_path / "images"
    for i in range(9):
        (folder).mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (i, i, i)).save(folder / f"{i}.png")
    snclr.pretrain(data=str(folder), out=str(out), **TINY)
    (folder / "3.png").unlink()
    with pytest.raises(UserError, match="not those the run was trained on"):
        snclr.pretrain(out=str(out), resume=True, quiet=True)


def test_resuming_without_a_readable_checkpoint_is_refused(images, tmp_path):
    out = tmp_path / "run"
    snclr.pretrain(data=images, out=str(out), **TINY)
    lines = (out / "metrics.jsonl").read_bytes()
    for file in out.glob("checkpoints/step-*/tensors.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read.*--overwrite"):
        snclr.pretrain(out=str(out), resume=True, quiet=True)
    assert (out / "metrics.jsonl").read_bytes() == lines
    assert snclr.pretrain(data=images, out=str(out), overwrite=True, **TINY).step == 6


@pytest.mark.parametrize("change", [{"recipe": "photos"}, {"preset": "released"}])
def test_a_run_keeps_its_recipe_and_preset(images, tmp_path, change):
    out = tmp_path / "run"
    snclr.pretrain(data=images, out=str(out), recipe="demo", **TINY)
    with pytest.raises(UserError, match="a run is resumed with its own settings"):
        snclr.pretrain(out=str(out), resume=True, quiet=True, **change)
    assert snclr.pretrain(out=str(out), resume=True, quiet=True, recipe="demo").step == 6


@pytest.mark.parametrize(
    ("settings", "expected"), [({"sides": "neither"}, 0), ({"neighbor_free_epochs": 2}, 0), ({}, 1)]
)
def test_a_run_with_a_gate_says_whether_neighbors_are_in_the_loss(images, tmp_path, capfd, settings, expected):
    snclr.pretrain(data=images, out=str(tmp_path), **{**TINY, "min_agreement": 1e-6, "quiet": False, **settings})
    used = [line["neighbors_used"] for line in read_metrics(tmp_path) if "neighbors_used" in line]
    assert used == [expected] * 3  # the steps of the second epoch
    assert ("the neighbors are in the loss" in capfd.readouterr().err) == bool(expected)


@pytest.mark.parametrize("given", [{"recipe": "CIFAR"}, {"precision": "bf16-mixed"}, {"method": "MoCo-v3"}])
def test_a_resume_accepts_another_spelling_of_the_same_value(tmp_path, given):
    config = resolve({"data": "demo", "out": str(tmp_path), **given})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    assert config_for_resume({"out": str(tmp_path), "resume": True, **given}) == replace(config, resume=True)


def test_training_accepts_partly_labeled_images(tmp_path):
    generator = np.random.default_rng(0)
    for name in (*(f"{i}.png" for i in range(30)), "2019/a.png", "2020/b.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(path)
    assert snclr.pretrain(data=str(tmp_path / "photos"), out=str(tmp_path / "run"), **TINY).step > 0


def test_config_and_resume_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match="config and resume"):
        snclr.pretrain(out=str(tmp_path), config=tmp_path / "config.yaml", resume=True)


def test_an_early_setting_is_refused_on_resume_before_it_contradicts_others(images, tmp_path):
    snclr.pretrain(data=str(images), out=str(tmp_path / "run"), **TINY)
    with pytest.raises(UserError, match="has epochs=2, not epochs=1: a run is resumed with its own settings"):
        snclr.pretrain(out=str(tmp_path / "run"), resume=True, epochs=1)
