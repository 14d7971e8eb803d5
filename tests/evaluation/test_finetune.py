from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import snclr
from snclr.checkpoint.encoder_file import load_encoder
from snclr.cli.main import main
from snclr.data.datasets.base import ArrayDataset
from snclr.data.loader import ViewLoader
from snclr.data.splits import open_splits
from snclr.data.transforms.views import TRAIN_CROP
from snclr.errors import UserError
from snclr.evaluation.finetune import Classifier, FinetuneSettings, FinetuneTask, build_classifier, shared_batch_size
from snclr.evaluation.results import read_results
from snclr.io import atomic as durable
from snclr.io.locking import FileLock
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train import trainer
from snclr.train.trainer import Trainer
from tests.helpers import tiny_run

SMALL = {"labels": "50%", "epochs": 6, "batch_size": 8, "lr": 0.5, "quiet": True}


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory) -> Path:
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def finetune(run, **settings) -> dict:
    return snclr.finetune(run, baselines=False, **settings).to_dict()


# ---- training


def toy(n: int = 20) -> ArrayDataset:
    rng = np.random.default_rng(0)
    labels = np.arange(n, dtype=np.int64) % 2 * 4 + 1  # classes 1 and 5: numbers with gaps
    images = np.clip(labels[:, None, None, None] * 40 + rng.integers(0, 60, (n, 8, 8, 3)), 0, 255).astype(np.uint8)
    return ArrayDataset("toy", images, labels)


def toy_model() -> Classifier:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(nn.Sequential(*parts), 6, 2)


def test_training_matches_a_naive_loop(tmp_path):
    settings = FinetuneSettings(epochs=3, batch_size=8, lr=0.05, head_lr=0.4, weight_decay=0.01, seed=3)
    task = FinetuneTask(toy_model(), toy(), torch.tensor([1, 5]), settings, 8, tmp_path / "nonfinite.json")
    assert task.total_steps == 3 * 2
    Trainer(task=task, description="t", checkpoints=None, stop=StopFlag(), quiet=True).fit()

    model = toy_model().train()
    loader = ViewLoader(toy(), views=(TRAIN_CROP,), image_size=8, batch_size=8, seed=3)
    groups = [{"params": model.encoder.parameters(), "lr": 0.05}, {"params": model.head.parameters(), "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    for batch in loader.batches(0, 6):
        for group, peak in zip(optimizer.param_groups, (0.05, 0.4), strict=True):
            group["lr"] = peak * (1 + math.cos(math.pi * batch.step / 6)) / 2
        torch.manual_seed(3 * 1_000_003 + batch.step)
        loss = F.cross_entropy(model(batch.views[0]), (batch.labels == 5).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(task.model.state_dict()[name], value, msg=name)


def test_the_head_starts_at_zero_and_from_scratch_gives_new_weights(trained):
    encoder, spec = load_encoder(trained)
    kept = build_classifier(encoder, spec, 3, from_scratch=False, seed=0)
    assert kept.encoder is encoder
    assert not bool(kept.head.weight.any()) and not bool(kept.head.bias.any())  # noqa: PT018
    first, again, other = (build_classifier(encoder, spec, 3, from_scratch=True, seed=seed) for seed in (0, 0, 1))
    weights = [model.encoder.state_dict()["layer1.0.conv1.weight"] for model in (kept, first, again, other)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[3])


def test_default_epochs_depend_on_the_share_of_labels(run, monkeypatch):
    used = []
    monkeypatch.setattr(Trainer, "fit", lambda self, checkpoint: used.append(self.task.settings))
    for labels in ("1%", "10%"):
        finetune(run, labels=labels, quiet=True)
    assert [(s.epochs, s.batch_size) for s in used] == [(60, 3), (30, 4)]
    assert used[1].lr == used[1].head_lr == pytest.approx(0.05 * 4 / 256)


def test_a_nonfinite_loss_stops_the_training(tmp_path):
    settings = FinetuneSettings(epochs=3, batch_size=8, lr=0.1, head_lr=0.1)
    task = FinetuneTask(toy_model(), toy(), torch.tensor([1, 5]), settings, 8, tmp_path / "nonfinite.json")
    task.model.head.bias.data[0] = torch.nan
    loop = Trainer(task=task, description="t", checkpoints=tmp_path / "c", stop=StopFlag(), quiet=True)
    with pytest.raises(UserError, match=r"step 0: the loss is not finite; nothing was updated.*--lr"):
        loop.fit()
    assert len(json.loads((tmp_path / "nonfinite.json").read_text())["ids"]) == 8
    assert not (tmp_path / "c").exists()


# ---- command


def test_the_result_has_its_protocol_and_its_list(run, images):
    record = finetune(run, **SMALL)
    assert record["numbers"]["top1"] >= 0.75  # three colors
    assert record["numbers"]["top5"] is None
    for part in (
        "from the pre-trained encoder", "50% of the labels (20 images, class-balanced, seed 0)",
        "Nesterov momentum 0.9", "6 epochs of 2 steps", "batch 8",
        "learning rate 0.015625 for the encoder (0.5 × batch/256)", "cosine to 0",
        "random resized crop and flip at 16 px", "held out", "3 classes", "1 image could not be read",
    ):  # fmt: skip
        assert part in record["protocol"], part
    names = (run / "finetune-50pct-seed0.txt").read_text().splitlines()
    assert len(names) == 20
    assert all((images / name).is_file() for name in names)
    assert record["list"] == "finetune-50pct-seed0.txt"
    assert record["list_sha256"] == hashlib.sha256((run / record["list"]).read_bytes()).hexdigest()
    assert read_results(run, "finetune") == [record]
    assert not [path for path in run.iterdir() if path.is_dir() and path.name.startswith("finetune")]
    again = finetune(run, **{**SMALL, "labels": run / "finetune-50pct-seed0.txt"})
    assert again["model_sha256"] == record["model_sha256"]  # the list gives the same training
    scratch = finetune(run, **SMALL, from_scratch=True)
    assert scratch["kind"] == "finetune-scratch"
    assert "from scratch" in scratch["protocol"]
    assert scratch["model_sha256"] != record["model_sha256"]
    assert load_encoder(run)  # the run still opens


def test_top5_head_lr_and_an_existing_list_of_other_images(run, tmp_path):
    rng = np.random.default_rng(0)
    for label in range(7):
        for i in range(4):
            (tmp_path / f"data/c{label}").mkdir(parents=True, exist_ok=True)
            pixels = np.clip(label * 36 + rng.integers(0, 30, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"data/c{label}/{i}.png")
    record = finetune(run, **{**SMALL, "labels": "100%", "data": str(tmp_path / "data"), "head_lr": 2.0})
    assert record["numbers"]["top5"] >= record["numbers"]["top1"]
    assert record["numbers"]["top5"] is not None
    assert record["settings"]["head_lr"] == pytest.approx(4 * record["settings"]["lr"])
    (run / "finetune-100pct-seed0.txt").write_text("another data set's list\n")
    other = finetune(run, **{**SMALL, "labels": "100%", "data": str(tmp_path / "data")})
    assert other["list"] == f"finetune-100pct-seed0-{other['list_sha256'][:8]}.txt"
    assert (run / "finetune-100pct-seed0.txt").read_text() == "another data set's list\n"


def interrupt_at(monkeypatch, step: int, action) -> None:
    plain = FinetuneTask.step

    def wrapped(self, batch, *, log):
        values = plain(self, batch, log=log)
        if batch.step == step:
            action()
        return values

    monkeypatch.setattr(FinetuneTask, "step", wrapped)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_and_the_same_command_continues_to_the_same_result(run, monkeypatch, capsys, number):
    uninterrupted = finetune(run, **SMALL)
    argv = ["finetune", str(run), "--labels", "50%", "--epochs", "6", "--batch-size", "8", "--lr", "0.5"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, lambda: os.kill(os.getpid(), number))
        assert main(argv) == 128 + number
    err = capsys.readouterr().err
    assert f"stopped by {number.name} after step 5 of 12" in err
    command = err.split("Continue with:\n  snclr ")[1].strip()
    assert len(read_results(run)) == 1
    done = []
    plain = FinetuneTask.step
    with monkeypatch.context() as patch:
        patch.setattr(FinetuneTask, "step", lambda self, b, *, log: done.append(b.step) or plain(self, b, log=log))
        assert main([*command.split(), "--json"]) == 0
    assert done == list(range(5, 12))  # nothing is done twice
    record = json.loads(capsys.readouterr().out)
    assert record["model_sha256"] == uninterrupted["model_sha256"]
    assert record["numbers"] == uninterrupted["numbers"]
    assert record["protocol"] == uninterrupted["protocol"]
    assert record["skipped"] == uninterrupted["skipped"]


class Killed(BaseException):
    """Stands for a SIGKILL: nothing is saved after it."""


def kill() -> None:
    raise Killed


def test_a_kill_loses_only_the_steps_after_the_last_checkpoint(run, monkeypatch):
    uninterrupted = finetune(run, **SMALL)
    monkeypatch.setattr(trainer, "SAVE_SECONDS", 0.0)  # a checkpoint after each step
    for step in (0, 6, 11):
        with monkeypatch.context() as patch:
            interrupt_at(patch, step, kill)
            with pytest.raises(Killed):
                finetune(run, **SMALL)
    with monkeypatch.context() as patch:  # in the test after the last step
        patch.setattr("snclr.evaluation.finetune.evaluate_classifier", lambda *a, **k: kill())
        with pytest.raises(Killed):
            finetune(run, **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(FinetuneTask, "step", lambda self, batch, log: pytest.fail("the training was complete"))
        record = finetune(run, **SMALL)
    assert record["model_sha256"] == uninterrupted["model_sha256"]
    assert record["numbers"] == uninterrupted["numbers"]


def test_leftovers_of_a_killed_deletion_are_removed_by_the_next_run(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(durable, "remove_partial", lambda path: kill())
        with pytest.raises(Killed):
            finetune(run, **SMALL)
    assert [path for path in run.iterdir() if durable.is_partial(path)]
    finetune(run, **SMALL)
    assert not [path for path in run.iterdir() if durable.is_partial(path) or (path.is_dir() and "50pct" in path.name)]


def test_other_settings_do_not_resume_the_checkpoint(run, monkeypatch):
    uninterrupted = finetune(run, **{**SMALL, "lr": 0.1})
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(StopRequested) as stopped:
            finetune(run, **SMALL)
    assert (stopped.value.exit_code, stopped.value.step, stopped.value.total_steps) == (130, 5, 12)
    assert finetune(run, **{**SMALL, "lr": 0.1})["model_sha256"] == uninterrupted["model_sha256"]
    assert list(run.glob("finetune-50pct-*/checkpoints/step-*"))  # kept, to continue from


def test_a_second_process_with_the_same_fine_tuning_is_refused(run, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(StopRequested):
            finetune(run, **SMALL)
    (checkpoints,) = run.glob("finetune-50pct-*/checkpoints")
    lock = FileLock(checkpoints.parent / ".lock")
    assert lock.acquire()
    try:
        with pytest.raises(UserError, match="already running"):
            finetune(run, **SMALL)
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--labels", "lots"], "1% or 10%"),
        (["--labels", "0%"], "0%"),
        (["--labels", "{tmp}/unknown.txt"], "n9_1.JPEG"),
        (["--labels", "{tmp}/one.txt"], "one class"),
        (["--labels", "{tmp}/two.txt"], "no labeled training image"),
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--batch-size", "1"], "--batch-size is 1; give at least 2"),
        (["--lr", "-1"], "--lr must be above 0, not -1"),
        (["--lr", "nan"], "--lr must be above 0, not nan"),
        (["--data", "{tmp}/flat"], "no labels"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_input_is_refused(run, images, tmp_path, flags, message, capsys):
    (tmp_path / "unknown.txt").write_text("n9_1.JPEG\n")
    kept, _, _ = open_splits(str(images))
    keys = [kept.key(i) for i in range(len(kept))]
    (tmp_path / "one.txt").write_text("\n".join(key for key in keys if "red" in key) + "\n")
    (tmp_path / "two.txt").write_text("\n".join(key for key in keys if "blue" not in key) + "\n")
    (tmp_path / "flat").mkdir()
    for i in range(3):
        shutil.copy(images / f"red/red_{i}.png", tmp_path / "flat")
    assert main(["finetune", str(run), *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert message in err
    assert not (run / "results.jsonl").exists()


# ---- ranks and disks


@pytest.mark.parametrize(
    ("given", "images", "processes", "batch"), [(256, 33, 2, 32), (256, 33, 1, 33), (8, 33, 2, 8), (256, 5, 3, 3)]
)
def test_the_batch_of_few_labels_is_divisible_by_the_world_size(monkeypatch, given, images, processes, batch):
    monkeypatch.setattr("snclr.evaluation.finetune.rank_and_size", lambda: (0, processes))
    assert shared_batch_size(given, images) == batch


def test_fewer_labels_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr("snclr.evaluation.finetune.rank_and_size", lambda: (0, 4))
    with pytest.raises(UserError, match=r"3 labeled images.*4 ranks"):
        shared_batch_size(256, 3)


def test_a_given_batch_size_is_not_changed(monkeypatch):
    monkeypatch.setattr("snclr.evaluation.finetune.rank_and_size", lambda: (0, 2))
    assert shared_batch_size(8, 33) == 8
    with pytest.raises(UserError, match="7 is not divisible by 2 ranks"):
        shared_batch_size(7, 33)


def test_an_unwritable_run_is_refused(run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(
            "snclr.evaluation.finetune.write_atomic", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not yours"))
        )
        assert main(["finetune", str(run), "--epochs", "1"]) == 2
    err = capsys.readouterr().err
    assert "cannot write" in err
    assert "(not yours)" in err
    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not yours")))
        assert main(["finetune", str(run), "--epochs", "1"]) == 2
    assert "copy the run" in capsys.readouterr().err
