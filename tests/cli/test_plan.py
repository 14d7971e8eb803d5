"""`snclr plan`: its figures match the run that follows."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest

from snclr.api.pretrain import plan, pretrain
from snclr.checkpoint.format import latest_checkpoint
from snclr.cli.main import main
from snclr.cli.pretrain import show_plan, show_pretrain
from snclr.data.read_check import check_images
from snclr.errors import UserError
from snclr.train.config import resolve
from snclr.train.planning.run_plan import _stem_advice, busy_advice, neighbor_advice
from tests.helpers import tiny_run

SMALL = {
    "encoder": "resnet10-tiny", "stem": "half", "image_size": 16, "batch_size": 16, "epochs": 2, "warmup_epochs": 1,
    "hidden": 32, "dim": 16, "neighbors": 5, "queue_length": 40, "views": "cifar", "workers": 0, "device": "cpu",
}  # fmt: skip


@pytest.fixture
def images(tmp_path):
    return tiny_run.write_images(tmp_path / "images")


def test_steps_and_checkpoint_size_match_the_run_that_follows(images, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    found = plan(steps=2, data=str(images), **SMALL)
    assert os.listdir(empty) == []  # nothing is written
    out = tiny_run.train(images, tmp_path / "run")
    saved = latest_checkpoint(out / "checkpoints", pytest.fail)
    assert found.steps == saved.step == found.steps_per_epoch * 2
    assert found.checkpoint_mb == pytest.approx(sum(tensor.nbytes for tensor in saved.tensors.values()) / 1e6, rel=0.01)
    assert found.images == 49
    assert found.total_seconds == pytest.approx(found.seconds_per_step * 6)
    assert found.seconds_per_step > 0
    assert found.compute_seconds_per_step > 0
    assert found.peak_mb > 50
    parts = {name: size for name, size in found.tensor_mb.items() if name != "total"}
    assert found.tensor_mb["total"] == pytest.approx(sum(parts.values()))
    optimizer = [tensor.nbytes for key, tensor in saved.tensors.items() if key.startswith("optimizer/")]
    assert parts["optimizer"] == pytest.approx(sum(optimizer) / 1e6, rel=0.01)


def test_queue_age_and_share_of_the_own_class(images):
    found = plan(steps=1, data=str(images), **SMALL)
    queue = found.queue
    assert queue.epochs_of_life == pytest.approx(40 / 49)
    assert queue.same_class == pytest.approx(40 * (16**2 + 16**2 + 17**2) / 49**2)
    assert queue.mb == found.tensor_mb["queue"] > 40 * 16 * 4 / 1e6  # features, ids and ages
    long = plan(steps=1, data=str(images), **{**SMALL, "queue_length": 98}).queue
    assert (long.epochs_of_life, long.share_of_images) == (2.0, 1.0)
    assert long.same_class == pytest.approx(queue.same_class * 49 / 40)  # different images, not features
    both = plan(steps=1, data=str(images), **SMALL, push="both").queue
    assert both.epochs_of_life == pytest.approx(40 / 98)
    small = {name: value for name, value in SMALL.items() if name not in ("neighbors", "queue_length")}
    assert plan(steps=1, data=str(images), method="byol", **small).queue is None


def test_a_queue_that_is_too_long_or_too_short_is_warned_about(images, capsys):
    show_plan(plan(steps=1, data=str(images), **{**SMALL, "queue_length": 200}))
    text = capsys.readouterr().out
    assert "it holds up to 4.1 features of each" in text
    assert "--queue-length 49" in text
    show_plan(plan(steps=1, data=str(images), **{**SMALL, "queue_length": 20, "neighbors": 12}))
    text = capsys.readouterr().out
    assert "At most about 7 of K = 12 neighbors" in text
    assert "longer than the number of images" not in text


@pytest.mark.parametrize(
    ("image_size", "stem", "slow"), [(64, "auto", True), (32, "auto", False), (96, "auto", False), (64, "half", False)]
)
def test_a_slow_default_stem_gets_advice(image_size, stem, slow):
    run = resolve({"data": "demo", "out": "x", "encoder": "resnet18", "image_size": image_size, "stem": stem})
    assert ("--stem half or --stem standard" in _stem_advice(run)) == slow


def test_unreadable_images_are_counted_as_training_and_evaluation_do(images, tmp_path, capsys):
    many = images
    whole = (many / "red" / "red_1.png").read_bytes()
    (many / "blue" / "half.png").write_bytes(whole[: len(whole) // 2])
    (many / "blue" / "text.jpg").write_text("not an image")
    found = plan(steps=1, data=str(many), **SMALL)
    assert (found.images, found.checked) == (51, 51)
    assert sorted(found.unreadable) == ["blue/half.png", "blue/text.jpg", "red/broken.png"]
    show_plan(found)
    assert "unreadable images: 3, e.g. blue/half.png: " in capsys.readouterr().out
    run = tmp_path / "run"
    trained = pretrain(data=str(many), out=str(run), quiet=True, **{**SMALL, "epochs": 6})
    assert trained.skipped == 3
    show_pretrain(trained)
    assert "unreadable images: 3, " in capsys.readouterr().out
    assert main(["knn", str(run), "--k=5", "--no-baselines"]) == 0
    assert "  unreadable images: 3, left out\n" in capsys.readouterr().out
    assert check_images(str(many), min_side=16, limit=10)[0] == 10
    assert check_images("demo", min_side=16) == (0, {})


def test_with_several_processes_one_rank_is_measured(images, capsys):
    found = plan(steps=1, data=str(images), **SMALL, devices="2")
    assert found.ranks == 2
    show_plan(found)
    text = capsys.readouterr().out
    assert "(rank 0 of 2, 8 images)" in text
    assert re.search(r"tensors +[\d.]+ MB per rank at the peak of a step \(counted\): weights [\d.]+ MB, target", text)
    assert found.steps_per_epoch == 3
    assert plan(steps=1, data=str(images), **{**SMALL, "batch_size": 2}, devices="2", probe_minutes=0).batch_size == 2
    with pytest.raises(UserError, match="is not divisible by 3 ranks; the nearest that is: 15"):
        plan(steps=1, data=str(images), **SMALL, devices="3")


def test_a_probe_trains_and_measures_the_neighbors(images, capsys):
    found = plan(steps=1, data=str(images), **{**SMALL, "epochs": 4}, min_agreement=0.0, probe_minutes=5)
    assert found.probe.steps == 12  # the whole run, which is shorter than the probe
    assert 0 <= found.probe.agreement <= 1
    assert 0 <= found.probe.purity <= 1
    assert 0 <= found.probe.pulled_share <= 1
    show_plan(found)
    text = capsys.readouterr().out
    assert f"{found.probe.agreement:.0%} agree between two views" in text
    assert found.probe.advice in text
    assert found.probe.advice == neighbor_advice(found.probe.agreement, found.probe.purity, found.probe.pulled_share)
    assert re.search(r"have the image's class \(chance \d+%\)", text)
    short = plan(steps=1, data=str(images), **SMALL, probe_minutes=1e-6, search_view="plain", sides="neither").probe
    assert (short.steps, short.agreement, short.pulled_share) == (1, None, None)
    assert "after 1 step are those of an almost untrained encoder" in short.advice
    assert short.advice.endswith("about 50 steps: --probe-minutes 1")
    assert plan(steps=1, data=str(images), **SMALL).probe.minutes == 1  # the default for SNCLR
    assert plan(steps=1, data=str(images), **SMALL, probe_minutes=0).probe is None


def test_a_plan_starts_from_the_given_weights(images, tmp_path):
    run = tiny_run.train(images, tmp_path / "run", encoder="resnet10-narrow")
    assert plan(steps=1, data=str(images), **{**SMALL, "encoder": "resnet10-narrow"}, init_from=str(run)).steps == 6
    with pytest.raises(UserError, match="resnet10-tiny"):
        plan(steps=1, data=str(images), **SMALL, init_from=str(run))


def test_slow_steps_end_the_measurement(images, monkeypatch):
    monkeypatch.setattr("snclr.train.planning.run_plan.MEASURE_SECONDS", 0.0)
    assert plan(steps=10, data=str(images), **SMALL, probe_minutes=0).tried_steps == 1


def test_a_measurement_on_busy_cores_is_noted(images):
    assert "had 15% of one core" in busy_advice(0.15)
    assert busy_advice(1.7) == ""
    found = plan(steps=1, data=str(images), **SMALL, probe_minutes=0)
    assert "on an idle machine" in " ".join(replace(found, busy_advice=busy_advice(0.15)).warnings)


def test_a_rate_below_one_image_per_second_is_not_printed_as_zero(images, capsys):
    found = plan(steps=1, data=str(images), **SMALL, probe_minutes=0)
    show_plan(replace(found, images_per_second=0.345))
    assert "at 0.34 images/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("agreement", "purity", "pulled", "texts"),
    [
        (0.6, None, 1.0, ["60% agree", "are likely to help", "--sides neither"]),
        (0.6, 0.7, 0.4, ["60% agree", "are likely to help", "40%", "--gamma pull"]),
        (0.6, 0.3, 1.0, ["30% have the image's class", "not likely to help", "--min-agreement 0.5"]),
        (0.2, 0.9, 1.0, ["20% agree", "not likely to help", "--min-agreement 0.5"]),
        (None, None, None, ["unknown", "--sides neither"]),
    ],
)
def test_the_advice_follows_agreement_purity_and_pulled_share(agreement, purity, pulled, texts):
    advice = neighbor_advice(agreement, purity, pulled)
    assert [text for text in texts if text not in advice] == []
    assert ("--gamma pull" in advice) is ("--gamma pull" in texts)


def test_a_probe_needs_snclr_and_a_time(images):
    with pytest.raises(UserError, match="--probe-minutes is for --method snclr"):
        plan(data=str(images), method="byol", probe_minutes=1)
    with pytest.raises(UserError, match="at least 0, not -1"):
        plan(data=str(images), probe_minutes=-1)


def test_the_command_prints_text_or_json(images, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main(["plan", f"--data={images}", "--steps=1", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["batch_size"] == 16
    assert main(["plan", f"--data={images}", "--steps=1", *flags]) == 0
    assert "a feature stays for 0.82 epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "--data is missing"),
        (["plan", "--data=nowhere-at-all"], "nowhere-at-all"),
        (["plan", "--data=demo", "--recipe=demo", "--steps=0"], "--steps must be at least 1, not 0"),
    ],
)
def test_bad_input_is_reported(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
