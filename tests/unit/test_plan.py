"""`snclr plan`: what it says of a run is what that run then is."""

from __future__ import annotations

import json
import os

import pytest
import tiny_run

from snclr.cli import main
from snclr.commands.plan import as_text, plan
from snclr.errors import UserError
from snclr.train.checkpoint import latest_checkpoint

SMALL = {
    "encoder": "resnet10-tiny", "stem": "half", "image_size": 16, "batch_size": 16, "epochs": 2, "warmup_epochs": 1,
    "hidden": 32, "dim": 16, "neighbors": 5, "queue_length": 40, "views": "cifar", "workers": 0, "accelerator": "cpu",
}  # fmt: skip


@pytest.fixture
def images(tmp_path):
    return tiny_run.write_images(tmp_path / "images")


def test_it_tells_the_size_of_the_run_that_follows(images, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    found = plan(steps=2, data=str(images), **SMALL)
    assert os.listdir(empty) == []  # nothing is written
    out = tiny_run.train(images, tmp_path / "run")
    saved = latest_checkpoint(out / "checkpoints", pytest.fail)
    assert found["steps"] == saved.step == found["steps_per_epoch"] * 2
    assert found["checkpoint_mb"] == pytest.approx(
        sum(tensor.nbytes for tensor in saved.tensors.values()) / 1e6, rel=0.01
    )
    assert found["images"] == 49
    assert found["total_seconds"] == pytest.approx(found["seconds_per_step"] * 6)
    assert found["seconds_per_step"] > 0
    assert found["compute_seconds_per_step"] > 0
    assert found["peak_mb"] > 50


def test_the_life_of_an_entry_and_the_own_class_among_them(images):
    queue = plan(steps=1, data=str(images), **SMALL)["queue"]
    assert queue["epochs_of_life"] == pytest.approx(40 / 49)
    assert queue["same_class"] == pytest.approx(40 * (16**2 + 16**2 + 17**2) / 49**2)
    assert queue["mb"] == pytest.approx(40 * 16 * 4 / 1e6, abs=1e-3)
    both = plan(steps=1, data=str(images), **SMALL, push="both")["queue"]
    assert both["epochs_of_life"] == pytest.approx(40 / 98)
    small = {name: value for name, value in SMALL.items() if name not in ("neighbors", "queue_length")}
    assert plan(steps=1, data=str(images), method="byol", **small)["queue"] is None


def test_a_queue_too_long_and_neighbours_too_many_are_warned_of(images):
    text = as_text(plan(steps=1, data=str(images), **{**SMALL, "queue_length": 200}))
    assert "holds every image 4.1 times over" in text
    assert "--queue-length 49" in text
    text = as_text(plan(steps=1, data=str(images), **{**SMALL, "queue_length": 20, "neighbors": 12}))
    assert "Of K = 12 neighbours at most about 7 can be" in text
    assert "times over" not in text


def test_one_of_several_processes_is_tried_with_its_share(images):
    found = plan(steps=1, data=str(images), **SMALL, devices="2")
    assert found["processes"] == 2
    assert "one of 2 processes, with 8 of them" in as_text(found)
    assert found["steps_per_epoch"] == 3
    with pytest.raises(UserError, match="cannot be shared equally by 3 processes; the nearest that can is 15"):
        plan(steps=1, data=str(images), **SMALL, devices="3")


def test_on_the_command_line(images, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main(["plan", f"--data={images}", "--steps=1", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["batch_size"] == 16
    assert main(["plan", f"--data={images}", "--steps=1", *flags]) == 0
    assert "an entry lives 0.82 epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "data is missing: give --data"),
        (["plan", "--data=nowhere-at-all"], "nowhere-at-all"),
        (["plan", "--data=demo", "--recipe=demo", "--steps=0"], "--steps must be at least 1, not 0"),
    ],
)
def test_bad_input_is_told(arguments, words, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told
