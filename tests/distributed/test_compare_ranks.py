"""A run of a comparison on two ranks counts as one attempt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snclr.studies.options import StudyOptions
from snclr.studies.runs import Evaluation, Row, make_run
from tests.helpers import tiny_run

SMALL = {
    "encoder": "resnet10-tiny", "stem": "half", "image_size": 16, "batch_size": 16, "epochs": 1, "warmup_epochs": 0,
    "hidden": 32, "dim": 16, "neighbors": 5, "queue_length": 40, "views": "cifar", "workers": 0, "device": "cpu",
    "threads": 1, "devices": "2",
}  # fmt: skip


@pytest.mark.slow
def test_an_uninterrupted_run_on_two_ranks_is_one_attempt(tmp_path: Path) -> None:
    images = tiny_run.write_images(tmp_path / "images")
    common = {**SMALL, "data": str(images)}
    run = make_run(Row("snclr", {"method": "snclr"}), 0, common, data="abc", evaluation=Evaluation(k=5))
    job = StudyOptions(out=tmp_path).job(run)
    Path(job["folder"]).parent.mkdir()
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "snclr.studies.worker", str(tmp_path / "job.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(timeout=240) == 0, process.stderr.read()
    lines = [json.loads(line) for line in Path(job["attempts"]).read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["started", "seconds"]
    cost = json.loads(Path(job["record"]).read_text())["cost"]
    assert cost["attempts"] == 1
    assert cost["cpu_seconds"] > 0
