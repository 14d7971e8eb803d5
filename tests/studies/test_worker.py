"""One run, executed in the test process; and the exit of a worker with its parent."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import snclr
from snclr.checkpoint.run_dir import RunDir
from snclr.data import splits
from snclr.evaluation.results import read_results
from snclr.io import atomic
from snclr.io.jsonl import append_jsonl
from snclr.runtime.stop import StopRequested
from snclr.studies import worker
from snclr.studies.options import StudyOptions
from snclr.studies.runs import Evaluation, Row, make_run
from snclr.train.build import build_method, encoder_spec
from snclr.train.config import resolve
from snclr.train.pretrain_task import PretrainTask
from tests.helpers import tiny_coco

SMALL = {
    "encoder": "resnet10-tiny", "stem": "half", "image_size": 16, "batch_size": 16, "epochs": 2, "warmup_epochs": 1,
    "hidden": 32, "dim": 16, "neighbors": 5, "queue_length": 40, "views": "cifar", "lr": 0.05, "workers": 0,
    "device": "cpu", "log_every": 1, "threads": 1,
}  # fmt: skip


def job_of(images: Path, out: Path, *, given: dict | None = None, **evaluation: object) -> dict:
    row, common = Row("snclr", {"method": "snclr"}), {**SMALL, "data": str(images), **(given or {})}
    run = make_run(row, 0, common, data="abc", evaluation=Evaluation(**evaluation))
    return StudyOptions(out=out).job(run)


def attempts(job: dict) -> list[dict]:
    return [json.loads(line) for line in Path(job["attempts"]).read_text().splitlines()]


class Killed(BaseException):
    """Stands for a SIGKILL."""


def test_an_interrupted_deletion_of_checkpoints_is_completed_by_the_next_start(images, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    job = job_of(images, tmp_path, k=5)

    def kill(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "remove_partial", kill)
        with pytest.raises(Killed):
            worker.run_job(job)
    assert not Path(job["record"]).exists()  # not finished, so it will be started again
    monkeypatch.setattr(worker, "pretrain", lambda **_: pytest.fail("the training was complete"))
    assert worker.run_job(job) == 0
    assert Path(job["record"]).exists()
    assert not [path for path in Path(job["folder"]).iterdir() if atomic.is_partial(path)]


def test_a_run_writes_its_record_and_keeps_its_encoder(images, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    job = job_of(images, tmp_path, k=5)
    assert worker.run_job(job) == 0
    record = json.loads(Path(job["record"]).read_text())
    assert record["key"] == job["key"]
    assert record["settings"] == job["settings"]
    assert set(record["numbers"]) >= {"knn", "linear"}
    assert all(0 <= record["numbers"][name] <= 1 for name in ("knn", "linear"))
    assert "12 test images" in record["protocols"]["knn"]
    assert record["cost"]["steps"] == 6
    assert record["cost"]["images"] == 6 * 16 * 2
    assert record["cost"]["seconds"] > 0
    assert record["cost"]["peak_mb"] > 50
    assert record["series"]["step"] == [1, 2, 3, 4, 5, 6]
    assert record["series"]["neighbor_purity"][0] is None  # the queue starts empty
    assert record["last"]["step"] == 6
    assert {"snclr", "torch", "python"} <= set(record["versions"])
    assert str(images.parent) not in Path(job["record"]).read_text()
    run = RunDir(job["folder"])
    assert run.encoder_weights.is_file()
    assert not run.checkpoints.exists()
    kept = {result["kind"]: result["numbers"]["top1"] for result in read_results(job["folder"])}
    assert kept == {"knn": record["numbers"]["knn"], "linear-cached": record["numbers"]["linear"]}

    # The same training measured otherwise is not trained again, and the choice of a setting never sees the test part.
    opened = splits.open_splits(str(images))[1]
    monkeypatch.setattr(type(opened), "load", _refuse(type(opened).load, opened.folder))
    other = job_of(images, tmp_path, kind="validation", k=5)
    assert other["folder"] == job["folder"]
    assert worker.run_job(other) == 0
    assert len(attempts(job)) == 2
    chosen = json.loads(Path(other["record"]).read_text())
    assert set(chosen["numbers"]) == {"knn"}
    assert "held out for tuning" in chosen["protocols"]["knn"]


def _refuse(load, folder: Path):
    def refusing(dataset, index, min_side=None):
        assert dataset.folder != folder, "a test image was read"
        return load(dataset, index, min_side)

    return refusing


def test_cost_jobs_measure_some_steps(images, tmp_path):
    job = job_of(images, tmp_path, kind="cost", steps=2)
    assert worker.run_job(job) == 0
    record = json.loads(Path(job["record"]).read_text())
    assert record["numbers"]["seconds_per_step"] > 0
    assert record["cost"]["cpu_seconds_per_step"] > 0
    assert record["cost"]["queue_mb"] == pytest.approx(40 * 16 * 4 / 1e6, abs=1e-3)
    assert not Path(job["folder"]).exists()


def test_cost_jobs_use_the_compile_and_thread_settings(images, tmp_path, monkeypatch):
    compiled, threads = [], []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    monkeypatch.setattr(PretrainTask, "training_step", lambda *_: threads.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        plain = job_of(images, tmp_path, kind="cost", steps=2)
        assert worker.run_job(plain) == 0
        assert not compiled
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2
        fast = job_of(images, tmp_path, given={"compile": True}, kind="cost", steps=2)
        assert fast["record"] != plain["record"]
        assert worker.run_job(fast) == 0
        assert len(compiled) == 2  # the encoder and its momentum copy
        assert json.loads(Path(fast["record"]).read_text())["where"]["compile"] is True
    finally:
        torch.set_num_threads(before)


def test_invalid_input_exits_with_code_2(images, tmp_path, capsys, monkeypatch):
    job = job_of(images, tmp_path)
    job["given"]["encoder"] = "resnet1800"
    (tmp_path / "runs").mkdir()
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setattr(worker, "_stop_when_stdin_closes", lambda: None)
    assert worker.main([str(tmp_path / "job.json")]) == 2
    assert "resnet1800" in capsys.readouterr().err
    assert not Path(job["record"]).exists()


def test_a_killed_attempt_counts_up_to_its_last_checkpoint(tmp_path):
    import os

    file, run = tmp_path / "a.jsonl", RunDir(tmp_path / "run")
    (run.checkpoints / "step-5").mkdir(parents=True)
    os.utime(run.checkpoints / "step-5", (1030.0, 1030.0))
    append_jsonl(file, {"started": 1000.0})
    worker._close_killed_attempt(file, run)
    end = {"seconds": 12.0, "cpu_seconds": 9.0, "peak_mb": 70.0, "memory": "process", "steps": 9, "skipped": 0}
    append_jsonl(file, {"started": 2000.0})
    append_jsonl(file, {**end, "complete": True})
    worker._close_killed_attempt(file, run)  # nothing is open any more
    cost = worker._cost_of({"attempts": str(file), "given": SMALL})
    assert cost["seconds"] == 42.0
    assert cost["images"] == 9 * 16 * 2
    assert cost["cpu_seconds"] is None  # not known of the killed one
    assert cost["attempts"] == 2


def test_a_worker_stops_when_its_parent_exits():
    code = "import time; from snclr.studies import worker; worker._stop_when_stdin_closes(); time.sleep(250)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(timeout=200) == -15


def test_an_untrained_run_is_the_initial_encoder_of_its_seed(images, tmp_path):
    from snclr.checkpoint.encoder_file import load_encoder

    (tmp_path / "runs").mkdir()
    common = {**SMALL, "data": str(images)}
    row = Row("random", {"method": "snclr"}, untrained=True)
    job = StudyOptions(out=tmp_path).job(make_run(row, 3, common, data="abc", evaluation=Evaluation(k=5)))
    assert job["folder"] != StudyOptions(out=tmp_path).job(
        make_run(Row("snclr", {"method": "snclr"}), 3, common, data="abc", evaluation=Evaluation(k=5))
    )["folder"]  # fmt: skip
    assert worker.run_job(job) == 0
    record = json.loads(Path(job["record"]).read_text())
    assert record["cost"]["steps"] == record["cost"]["images"] == 0
    assert 0 <= record["numbers"]["knn"] <= 1
    config = resolve({**common, "method": "simclr", "seed": 3, "hidden": 32, "neighbors": None, "queue_length": None})
    other = build_method(config, encoder_spec(config)).encoder.state_dict()
    found = load_encoder(Path(job["folder"]))[0].state_dict()
    assert all(torch.equal(found[name], value) for name, value in other.items())  # every method starts from it


def test_a_tuning_run_neither_trains_on_nor_is_blind_to_the_validation_images(images, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    job = job_of(images, tmp_path, given={"data": f"{images}#fit", "method": "snclr"}, kind="validation", k=5)
    seen: list[set[str]] = []
    build = worker.pretrain.__globals__["build_task"]

    def spy(*args, **kwargs):
        task = build(*args, **kwargs)
        seen.append({task.dataset.key(i) for i in range(len(task.dataset))})
        return task

    monkeypatch.setitem(worker.pretrain.__globals__, "build_task", spy)
    assert worker.run_job(job) == 0
    held = splits.open_dataset(f"{images}#validation")
    names = {held.key(i) for i in range(len(held))}
    assert names
    assert not names & seen[0]
    record = json.loads(Path(job["record"]).read_text())
    assert set(record["numbers"]) == {"knn"}
    assert "not trained on" in record["protocols"]["knn"]
    readable = [name for name in names if "broken" not in name]
    assert f"{len(readable)} test images" in record["protocols"]["knn"]


def test_a_run_is_fine_tuned_on_few_labels_and_detects_objects(images, tmp_path, monkeypatch):
    from snclr.evaluation.detection import settings as detection
    from snclr.studies import measures

    coco = tiny_coco.write(tmp_path / "coco")
    tiny = detection.DetectSettings(
        iterations=2, batch_size=2, short_side=(64, 64), long_side=96, width=16, rois=8, proposals=20, anchor=16
    )
    monkeypatch.setitem(detection.RECIPES, "cpu", tiny)
    monkeypatch.setattr(
        measures, "evaluate_finetune", functools.partial(_with_epochs, measures.evaluate_finetune, epochs=1)
    )
    (tmp_path / "runs").mkdir()
    wanted = ("knn", "finetune-10", "detect")
    job = job_of(images, tmp_path, k=5, measures=wanted, coco=str(coco), detect_recipe="cpu")
    assert worker.run_job(job) == 0
    record = json.loads(Path(job["record"]).read_text())
    assert 0 <= record["numbers"]["finetune10"] <= 1
    assert {"AP_bb", "AP50_bb", "AP75_bb", "AP_mk", "AP50_mk", "AP75_mk"} <= set(record["numbers"])
    assert "linear" not in record["numbers"]
    assert set(record["protocols"]) == set(wanted)
    kinds = [result["kind"] for result in read_results(job["folder"])]
    assert kinds == ["knn", "finetune", "detect"]
    assert str(tmp_path) not in Path(job["record"]).read_text()


def test_the_papers_linear_protocol_of_a_study_is_that_of_the_command(images, tmp_path):
    (tmp_path / "runs").mkdir()
    job = job_of(images, tmp_path, k=5, measures=("knn", "linear-paper"))
    assert worker.run_job(job) == 0
    record = json.loads(Path(job["record"]).read_text())
    (kept,) = read_results(job["folder"], "linear-paper")
    assert record["numbers"]["linear"] == kept["numbers"]["top1"] > 0.5  # of three colors
    assert "linear probe, frozen encoder: random resized crop and flip" in record["protocols"]["linear-paper"]
    assert "90 epochs" in record["protocols"]["linear-paper"]
    assert str(tmp_path) not in Path(job["record"]).read_text()

    command = snclr.linear(job["folder"], protocol="paper", baselines=False, quiet=True)
    assert {"top1": command.top1, "top5": command.top5} == {"top5": None, **kept["numbers"]}
    assert command.protocol == kept["protocol"]


def _with_epochs(evaluate, *args, epochs, **given):
    return evaluate(*args, **{**given, "epochs": epochs})


def test_a_stop_in_an_evaluation_is_no_failure(images, tmp_path, monkeypatch):
    import signal

    def stop(_job):
        raise StopRequested(signal.SIGTERM)

    (tmp_path / "runs").mkdir()
    job = job_of(images, tmp_path, k=5)
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setattr(worker, "_stop_when_stdin_closes", lambda: None)
    monkeypatch.setattr(worker, "evaluate", stop)
    assert worker.main([str(tmp_path / "job.json")]) == 143
    assert not Path(job["record"]).exists()
