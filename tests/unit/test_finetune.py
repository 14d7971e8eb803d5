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
import tiny_run
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import snclr
from snclr import durable
from snclr.cli import main
from snclr.commands import finetune as command
from snclr.data.loader import ViewLoader
from snclr.data.sources import ArraySource
from snclr.data.splits import open_splits
from snclr.data.views import TRAIN_CROP
from snclr.durable import FileLock
from snclr.errors import UserError
from snclr.evaluate import finetune as engine
from snclr.evaluate.finetune import Classifier, FinetuneSettings, Finetuning, build_classifier
from snclr.evaluate.results import read_results
from snclr.export.encoder import load_encoder
from snclr.progress import Progress
from snclr.train.signals import StopRequest

SMALL = {"labels": "50%", "epochs": 6, "batch_size": 8, "lr": 0.5, "quiet": True}


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory) -> Path:
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


# ---- the training


def toy(n: int = 20) -> ArraySource:
    rng = np.random.default_rng(0)
    labels = np.arange(n, dtype=np.int64) % 2 * 4 + 1  # classes 1 and 5: numbers with gaps
    images = np.clip(labels[:, None, None, None] * 40 + rng.integers(0, 60, (n, 8, 8, 3)), 0, 255).astype(np.uint8)
    return ArraySource("toy", images, labels)


def toy_model() -> Classifier:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(nn.Sequential(*parts), 6, 2)


def test_the_steps_are_those_of_the_protocol(tmp_path):
    settings = FinetuneSettings(epochs=3, batch_size=8, lr=0.05, head_lr=0.4, weight_decay=0.01, seed=3)
    job = Finetuning(toy_model(), toy(), torch.tensor([1, 5]), settings, 8, tmp_path / "c", {})
    with StopRequest() as stop, Progress("t", None, quiet=True) as progress:
        assert job.train(progress, stop) == 3 * 2

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
        torch.testing.assert_close(job.model.state_dict()[name], value, msg=name)


def test_the_head_starts_at_zero_and_scratch_is_new_weights(trained):
    encoder, spec = load_encoder(trained)
    kept = build_classifier(encoder, spec, 3, from_scratch=False, seed=0)
    assert kept.encoder is encoder
    assert not bool(kept.head.weight.any()) and not bool(kept.head.bias.any())  # noqa: PT018
    first, again, other = (build_classifier(encoder, spec, 3, from_scratch=True, seed=seed) for seed in (0, 0, 1))
    weights = [model.encoder.state_dict()["layer1.0.conv1.weight"] for model in (kept, first, again, other)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[3])


def test_epochs_follow_the_share_of_labels(run, monkeypatch):
    asked = []
    monkeypatch.setattr(
        Finetuning, "train", lambda self, progress, stop: asked.append(self.settings) or self.total_steps
    )
    for labels in ("1%", "10%"):
        snclr.finetune(run, labels=labels, quiet=True)
    assert [(s.epochs, s.batch_size) for s in asked] == [(60, 3), (30, 4)]
    assert asked[1].lr == asked[1].head_lr == pytest.approx(0.05 * 4 / 256)


def test_a_loss_that_is_not_finite_stops_it(tmp_path):
    settings = FinetuneSettings(epochs=3, batch_size=8, lr=0.1, head_lr=0.1)
    job = Finetuning(toy_model(), toy(), torch.tensor([1, 5]), settings, 8, tmp_path / "c", {})
    job.model.head.bias.data[0] = torch.nan  # as after a step that was too long
    with StopRequest() as stop, Progress("t", None, quiet=True) as progress, pytest.raises(UserError, match="--lr"):
        job.train(progress, stop)
    assert not (tmp_path / "c").exists()


# ---- the command


def test_the_result_comes_with_its_protocol_and_its_list(run, images):
    record = snclr.finetune(run, **SMALL)
    assert record["numbers"]["top1"] >= 0.75  # three colours
    assert record["numbers"]["top5"] is None
    for words in (
        "from the pre-trained encoder", "50% of the labels (20 images, class-balanced, seed 0)",
        "Nesterov momentum 0.9", "6 epochs of 2 steps", "batch 8",
        "learning rate 0.015625 for the encoder (0.5 × batch/256)", "cosine to 0",
        "random resized crop and flip at 16 px", "held out", "3 classes", "1 images could not be read",
    ):  # fmt: skip
        assert words in record["protocol"], words
    names = (run / "finetune-50pct-seed0.txt").read_text().splitlines()
    assert len(names) == 20
    assert all((images / name).is_file() for name in names)
    assert record["list"] == "finetune-50pct-seed0.txt"
    assert record["list_sha256"] == hashlib.sha256((run / record["list"]).read_bytes()).hexdigest()
    assert read_results(run, "finetune") == [record]
    assert not [path for path in run.iterdir() if path.is_dir() and path.name.startswith("finetune")]
    again = snclr.finetune(run, **{**SMALL, "labels": run / "finetune-50pct-seed0.txt"})
    assert again["model_sha256"] == record["model_sha256"]  # the list alone gives the same training
    scratch = snclr.finetune(run, **SMALL, from_scratch=True)
    assert scratch["kind"] == "finetune-scratch"
    assert "from scratch" in scratch["protocol"]
    assert scratch["model_sha256"] != record["model_sha256"]
    assert load_encoder(run)  # the run's own weights are as they were


def test_top5_and_the_head_rate(run, tmp_path):
    rng = np.random.default_rng(0)
    for label in range(7):
        for i in range(4):
            (tmp_path / f"data/c{label}").mkdir(parents=True, exist_ok=True)
            pixels = np.clip(label * 36 + rng.integers(0, 30, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"data/c{label}/{i}.png")
    record = snclr.finetune(run, **{**SMALL, "labels": "100%", "data": str(tmp_path / "data"), "head_lr": 2.0})
    assert record["numbers"]["top5"] >= record["numbers"]["top1"]
    assert record["numbers"]["top5"] is not None
    assert record["settings"]["head_lr"] == pytest.approx(4 * record["settings"]["lr"])
    (run / "finetune-100pct-seed0.txt").write_text("another data set's list\n")
    other = snclr.finetune(run, **{**SMALL, "labels": "100%", "data": str(tmp_path / "data")})
    assert other["list"] == f"finetune-100pct-seed0-{other['list_sha256'][:8]}.txt"
    assert (run / "finetune-100pct-seed0.txt").read_text() == "another data set's list\n"


def interrupt_at(monkeypatch, step: int, action) -> None:
    plain = Finetuning._step

    def wrapped(self, batch):
        loss = plain(self, batch)
        if batch.step == step:
            action()
        return loss

    monkeypatch.setattr(Finetuning, "_step", wrapped)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_and_the_same_command_goes_on_to_the_same_end(run, monkeypatch, capsys, number):
    undisturbed = snclr.finetune(run, **SMALL)
    argv = ["finetune", str(run), "--labels", "50%", "--epochs", "6", "--batch-size", "8", "--lr", "0.5"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, lambda: os.kill(os.getpid(), number))
        assert main(argv) == 128 + number
    err = capsys.readouterr().err
    assert f"stopped by {number.name} after step 5 of 12" in err
    command = err.split("same command:\n  snclr ")[1].strip()
    assert len(read_results(run)) == 1
    done = []
    plain = Finetuning._step
    with monkeypatch.context() as patch:
        patch.setattr(Finetuning, "_step", lambda self, batch: done.append(batch.step) or plain(self, batch))
        assert main([*command.split(), "--json"]) == 0
    assert done == list(range(5, 12))  # nothing is done twice
    record = json.loads(capsys.readouterr().out)
    assert record["model_sha256"] == undisturbed["model_sha256"]
    assert record["numbers"] == undisturbed["numbers"]
    assert record["protocol"] == undisturbed["protocol"]
    assert record["skipped"] == undisturbed["skipped"]


class Killed(BaseException):
    """Stands for a SIGKILL: nothing is saved after it."""


def kill() -> None:
    raise Killed


def test_a_kill_loses_what_came_after_the_last_checkpoint_and_nothing_else(run, monkeypatch):
    undisturbed = snclr.finetune(run, **SMALL)
    monkeypatch.setattr(engine, "SAVE_SECONDS", 0.0)  # a checkpoint after each step
    for step in (0, 6, 11):
        with monkeypatch.context() as patch:
            interrupt_at(patch, step, kill)
            with pytest.raises(Killed):
                snclr.finetune(run, **SMALL)
    with monkeypatch.context() as patch:  # in the test after the last step
        patch.setattr("snclr.evaluate.finetune.evaluate_classifier", lambda *a, **k: kill())
        with pytest.raises(Killed):
            snclr.finetune(run, **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(Finetuning, "_step", lambda self, batch: pytest.fail("the training was complete"))
        record = snclr.finetune(run, **SMALL)
    assert record["model_sha256"] == undisturbed["model_sha256"]
    assert record["numbers"] == undisturbed["numbers"]


def test_a_kill_in_the_last_deletion_leaves_nothing_behind_for_ever(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(durable, "remove_partial", lambda path: kill())
        with pytest.raises(Killed):
            snclr.finetune(run, **SMALL)
    assert [path for path in run.iterdir() if durable.is_partial(path)]
    snclr.finetune(run, **SMALL)
    assert not [path for path in run.iterdir() if durable.is_partial(path) or (path.is_dir() and "50pct" in path.name)]


def test_other_settings_never_go_on_with_its_checkpoint(run, monkeypatch):
    undisturbed = snclr.finetune(run, **{**SMALL, "lr": 0.1})
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
        stopped = snclr.finetune(run, **SMALL)
    assert (stopped["complete"], stopped["exit_code"], stopped["step"]) == (False, 130, 5)
    assert snclr.finetune(run, **{**SMALL, "lr": 0.1})["model_sha256"] == undisturbed["model_sha256"]
    assert Path(stopped["checkpoints"]).is_dir()  # still there to go on with


def test_the_same_fine_tuning_twice_at_once_is_refused(run, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        stopped = snclr.finetune(run, **SMALL)
    lock = FileLock(Path(stopped["checkpoints"]).parent / ".finetune.lock")
    assert lock.acquire()
    try:
        with pytest.raises(UserError, match="under way"):
            snclr.finetune(run, **SMALL)
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--labels", "lots"], "1% or 10%"),
        (["--labels", "0%"], "0%"),
        (["--labels", "{tmp}/unknown.txt"], "n9_1.JPEG"),
        (["--labels", "{tmp}/one.txt"], "one class"),
        (["--labels", "{tmp}/two.txt"], "no labelled training image"),
        (["--epochs", "0"], "epochs is 0"),
        (["--batch-size", "1"], "batch_size 1"),
        (["--lr", "-1"], "lr is"),
        (["--lr", "nan"], "lr is nan"),
        (["--data", "{tmp}/flat"], "no labels"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_input(run, images, tmp_path, flags, words, capsys):
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
    assert words in err
    assert not (run / "results.jsonl").exists()


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert main(["finetune", str(tmp_path)]) == 2
    assert "snclr finetune: " in capsys.readouterr().err


# ---- processes and disks


@pytest.mark.parametrize(
    ("given", "images", "processes", "batch"), [(256, 33, 2, 32), (256, 33, 1, 33), (8, 33, 2, 8), (256, 5, 3, 3)]
)
def test_the_batch_of_few_labels_can_be_shared_by_the_processes(monkeypatch, given, images, processes, batch):
    monkeypatch.setattr("snclr.distributed.rank_and_size", lambda: (0, processes))
    assert command._shared_batch(given, images) == batch


def test_fewer_labels_than_processes_are_refused(monkeypatch):
    monkeypatch.setattr("snclr.distributed.rank_and_size", lambda: (0, 4))
    with pytest.raises(UserError, match=r"3 labelled images.*4 processes"):
        command._shared_batch(256, 3)


def test_a_batch_that_was_given_is_not_changed_silently(monkeypatch):
    monkeypatch.setattr("snclr.distributed.rank_and_size", lambda: (0, 2))
    assert command._shared_batch(7, 33) == 7  # refused by the loader, which says what can be shared


def test_a_run_that_cannot_be_written_is_said(run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("snclr.durable.write_atomic", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not yours")))
        assert main(["finetune", str(run), "--epochs", "1"]) == 2
    err = capsys.readouterr().err
    assert "cannot write" in err
    assert "(not yours)" in err
    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not yours")))
        assert main(["finetune", str(run), "--epochs", "1"]) == 2
    assert "copy the run" in capsys.readouterr().err
