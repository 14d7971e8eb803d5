from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import snclr
from snclr.checkpoint.encoder_file import load_encoder
from snclr.cli import main as cli
from snclr.errors import UserError
from snclr.evaluation.detection import task as detection_task
from snclr.evaluation.detection.task import DetectionTask, open_detector
from snclr.evaluation.results import read_results
from snclr.io.locking import FileLock
from snclr.reports.figures.detection import DrawnObject, blend, draw_panels
from snclr.runtime.stop import StopRequested
from tests.helpers import tiny_coco, tiny_run

SMALL = {
    "iterations": 3, "batch_size": 2, "short_side": (64, 64), "long_side": 80, "width": 8, "rois": 16, "proposals": 50,
    "anchor": 16, "device": "cpu", "quiet": True, "draw": 2, "draw_score": 0.05,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_coco.write(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(tmp_path) -> Path:
    return tiny_coco.write_run(tmp_path / "run")


def detect(run, **settings) -> dict:
    return snclr.detect(run, **settings).to_dict()


def test_detect_trains_evaluates_draws_and_records(run, data):
    record = detect(run, data=data, **SMALL)
    assert read_results(run, "detect") == [json.loads(json.dumps(record))]
    assert set(record["numbers"]) == {"AP_bb", "AP50_bb", "AP75_bb", "AP_mk", "AP50_mk", "AP75_mk"}
    assert all(0 <= value <= 1 for value in record["numbers"].values())
    assert [entry["name"] for entry in record["classes"]] == ["square", "disc"]
    parts = ("3 iterations of 2 images", "learning rate 0.0025", "stem 'half'", "5 images (1 without objects left out)")
    for part in (*parts, "4 images", "short side 64", str(run)):
        assert part in record["protocol"]
    with Image.open(record["figure"]) as figure:
        assert figure.size[0] > 800
    folder = Path(record["detector"])
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "detector", "predictions.png"]

    again = detect(run, data=data, **SMALL)  # already trained: only evaluated
    assert again["numbers"] == record["numbers"]
    assert again["model_sha256"] == record["model_sha256"]
    alone = detect(run, data=data, detector=folder, device="cpu", quiet=True, draw=0)
    assert alone["numbers"] == record["numbers"]
    assert alone["protocol"] == record["protocol"]
    assert alone["figure"] is None


def test_a_stopped_training_resumes_to_the_same_weights(run, data, monkeypatch):
    whole = detect(run, data=data, **SMALL)
    other = tiny_coco.write_run(run.parent / "other")
    step = DetectionTask.step

    def interrupted(self, batch, *, log):
        values = step(self, batch, log=log)
        if batch.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return values

    monkeypatch.setattr(DetectionTask, "step", interrupted)
    with pytest.raises(StopRequested) as stopped:
        detect(other, data=data, **SMALL)
    assert (stopped.value.step, stopped.value.total_steps, stopped.value.exit_code) == (2, 3, 143)
    assert read_results(other) == []
    monkeypatch.setattr(DetectionTask, "step", step)
    assert detect(other, data=data, **SMALL)["model_sha256"] == whole["model_sha256"]


def test_initial_weights_come_from_a_run_a_seed_or_a_file(run, data, tmp_path):
    encoder, _ = load_encoder(run)
    file = tmp_path / "weights.pth"
    torch.save({**encoder.state_dict(), "fc.weight": torch.zeros(2, 128)}, file)
    once = {**SMALL, "iterations": 1, "draw": 0}
    rows = [detect(run, data=data, init=init, **once) for init in ("run", "random", str(file))]
    assert rows[0]["model_sha256"] == rows[2]["model_sha256"] != rows[1]["model_sha256"]
    assert [row["start"].split(" of ")[0] for row in rows] == ["the weights", "random weights (seed 0)", "the weights"]
    new = detect(tmp_path / "new", data=data, init="random", encoder="resnet10-tiny", **once)
    assert read_results(tmp_path / "new")[0]["numbers"] == new["numbers"]
    assert "stem" not in new["protocol"]


def test_bad_input_is_refused(run, data, tmp_path):
    with pytest.raises(UserError, match="--encoder resnet50"):
        detect(tmp_path / "none", data=data, init="random", **SMALL)
    with pytest.raises(UserError, match="a run has its own encoder"):
        detect(run, data=data, encoder="resnet18", **SMALL)
    with pytest.raises(UserError, match="no finished detector"):
        detect(run, data=data, detector=tmp_path, **SMALL)
    with pytest.raises(UserError, match="fewer than one batch of 16"):
        detect(run, data=data, **{**SMALL, "batch_size": 16})
    vit = tiny_coco.write_run(tmp_path / "vit", "vit_tiny", stem="auto")
    with pytest.raises(UserError, match="is not a ResNet"):
        detect(vit, data=data, **SMALL)
    assert not list(vit.glob("detect-*"))


def test_faults_are_listed_and_unreadable_images_are_left_out(run, tmp_path, capsys):
    folder = tiny_coco.write(tmp_path / "set")
    file = folder / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["annotations"].append({**content["annotations"][0], "id": 77, "category_id": 9})
    file.write_text(json.dumps(content))
    (folder / "val2017" / "002.png").write_bytes(b"")
    (folder / "train2017" / "002.png").write_bytes(b"")
    record = detect(run, data=folder, max_bad_share=0.5, **{**SMALL, "quiet": False, "keep_empty": True})
    assert "annotation 77: category id 9 is unknown (left out)" in capsys.readouterr().err
    lines = [json.loads(line) for line in Path(record["faults_file"]).read_text().splitlines()]
    assert [(line["kind"], line["id"], line["action"]) for line in lines] == [
        ("annotation", 77, "left out"), ("image", 2, "left out"), ("image", 2, "replaced")
    ]  # fmt: skip
    assert "1 of them unreadable and left out" in record["protocol"]


def test_a_second_process_with_the_same_training_is_refused(run, data):
    folder = Path(detect(run, data=data, **{**SMALL, "iterations": 1, "draw": 0})["detector"])
    lock = FileLock(folder / ".lock")
    assert lock.acquire()
    with pytest.raises(UserError, match="already running"):
        detect(run, data=data, **{**SMALL, "iterations": 1})
    lock.release()


def test_a_nonfinite_loss_stops_the_training(run, data, monkeypatch):
    monkeypatch.setattr(detection_task, "learning_rate", lambda step, settings: float("inf"))
    with pytest.raises(UserError, match="lower --lr"):
        detect(run, data=data, **SMALL)


def test_the_command_prints_a_table_or_json(run, data, capsys):
    flags = ["--iterations=1", "--batch-size=2", "--short-side=64", "--long-side=80", "--width=8", "--rois=16"]
    command = ["detect", str(run), "--data", str(data), *flags, "--anchor=16", "--proposals=50", "--device=cpu"]
    assert cli.main([*command, "--draw=0"]) == 0
    text = capsys.readouterr().out
    assert "AP^bb_50" in text
    assert "class" in text
    assert cli.main([*command, "--draw=0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "detect"
    assert cli.main(["detect", str(run), "--data", str(data), "--short-side=x"]) == 2


def test_the_figure_shows_masks_and_accepts_any_name(tmp_path):
    image = np.full((40, 60, 3), 100, np.uint8)
    mask = np.zeros((40, 60), np.uint8)
    mask[10:20, 10:20] = 1
    drawn = DrawnObject("a $name_with^maths$", 0.5, (10, 10, 10, 10), mask)
    changed = (blend(image, [drawn]) != image).any(-1)
    assert np.array_equal(changed, mask.astype(bool))
    draw_panels([("x.png", image, [drawn]), ("predicted", image, [])] * 3, tmp_path / "f.png", title="t")
    with Image.open(tmp_path / "f.png") as figure:
        assert figure.size == (1720, 50 + 2 * (280 + 60))  # two pairs in the first row, one in the second


def test_a_detector_evaluated_on_other_images_still_lists_its_unreadable_training_images(run, tmp_path):
    own = tiny_coco.write(tmp_path / "own")
    (own / "train2017" / "005.png").write_bytes(b"")
    trained = detect(run, data=own, max_bad_share=0.5, **{**SMALL, "iterations": 4, "draw": 0})
    listed = [json.loads(line) for line in Path(trained["faults_file"]).read_text().splitlines()]
    assert [(line["id"], line["action"]) for line in listed] == [(5, "replaced")]
    other = tiny_coco.write(tmp_path / "other", train=3, val=2)
    record = detect(run, data=other, detector=trained["detector"], device="cpu", quiet=True, draw=0)
    again = [json.loads(line) for line in Path(record["faults_file"]).read_text().splitlines()]
    assert again == listed  # of the training set, not of the new one
    assert str(own / "train2017" / "005.png") in again[0]["reason"]


def test_an_unwritable_run_is_refused_before_anything_is_computed(run, data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        detect(tmp_path / "file" / "run", data=data, init="random", encoder="resnet10-tiny", **SMALL)
    record = detect(run, data=data, **{**SMALL, "iterations": 1, "draw": 0})
    monkeypatch.setattr("snclr.evaluation.detection.evaluate.detect_objects", lambda *a, **k: pytest.fail("computed"))
    again = {"data": data, "detector": record["detector"], "device": "cpu", "quiet": True}
    with pytest.raises(UserError, match="cannot write"):
        detect(tmp_path / "file" / "run", **again)


VIT = {"encoder": "vit4-tiny", "stem": "auto", "views": "crops", "decoder_layers": 1}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return tiny_run.write_images(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize("method", ["moco", "pirl", "detco"])
def test_the_backbone_starts_with_the_encoder_of_any_method_with_a_resnet(method, images, data, tmp_path):
    run = tiny_run.train(images, tmp_path / "run", method=method)
    record = detect(run, data=data, **{**SMALL, "iterations": 1, "lr": 1e-12, "draw": 0})
    assert set(record["numbers"]) == {"AP_bb", "AP50_bb", "AP75_bb", "AP_mk", "AP50_mk", "AP75_mk"}
    backbone = open_detector(Path(record["detector"]), "cpu").model.backbone.body.state_dict()
    encoder = load_encoder(run)[0].state_dict()
    weights = [name for name in backbone if name.endswith(("weight", "bias"))]
    assert sum(name.startswith("layer") for name in weights) > 8
    for name in weights:
        torch.testing.assert_close(backbone[name], encoder[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", ["mae", "cae"])
def test_runs_of_methods_for_vits_are_refused_before_the_annotations_are_read(method, images, tmp_path):
    run = tiny_run.train(images, tmp_path / "run", method=method, **VIT)
    with pytest.raises(UserError, match=r"vit4-tiny is not a ResNet\. Detection needs .* Pre-train a ResNet\."):
        detect(run, data=tmp_path / "no data", **SMALL)
    assert not list(run.glob("detect-*"))
