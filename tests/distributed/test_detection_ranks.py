"""Detection on two ranks: weights equal up to rounding, an identical evaluation, errors reported once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed import fault_worker
from tests.distributed.launcher import run as start
from tests.distributed.launcher import snclr
from tests.helpers import tiny_coco

FLAGS = (
    "--iterations=3", "--batch-size=2", "--short-side=48-64", "--long-side=80", "--width=8", "--rois=16",
    "--proposals=50", "--anchor=16", "--device=cpu", "--json", "--draw=0", "--keep-empty",
)  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    base = tmp_path_factory.mktemp("detection")
    return tiny_coco.write(base / "data", train=6, val=5), tiny_coco.write_run(base / "run"), base


def weights_of(record: dict) -> dict:
    (file,) = Path(record["detector"]).glob("detector/step-*/*.safetensors")
    return load_file(file)


@pytest.mark.timeout(2700)  # six starts of torch; long only on a busy machine
def test_two_ranks_give_the_result_of_one(places):
    data, run, base = places
    twice = Path(shutil.copytree(run, base / "twice"))
    alone = json.loads(snclr(1, "detect", run, "--data", data, *FLAGS, timeout=900).stdout)
    shared = json.loads(snclr(2, "detect", twice, "--data", data, *FLAGS, timeout=900).stdout)  # printed once
    first, second = weights_of(alone), weights_of(shared)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert (value.double() - second[name].double()).abs().max() < 1e-4, name
    assert len((twice / "results.jsonl").read_text().splitlines()) == 1

    # The same detector, evaluated on one rank and on two, has identical numbers.
    folder = ("--detector", alone["detector"])
    again = json.loads(snclr(2, "detect", run, "--data", data, *FLAGS, *folder, timeout=900).stdout)
    for part in ("numbers", "classes", "boxes", "masks", "detections", "model_sha256"):
        assert again[part] == alone[part]


def test_bad_input_is_reported_once(places):
    _, run, base = places
    done = start(2, "-m", "snclr", "detect", str(run), "--data", str(base / "nothing"))
    assert done.returncode == 2
    assert done.stderr.count("is not a folder; give one with COCO annotation files") == 1, done.stderr[-2000:]


def test_ranks_with_different_annotations_are_rejected(places, tmp_path):
    data, run, _ = places
    shutil.copytree(data, tmp_path / "here" / "data")
    tiny_coco.write(tmp_path / "there" / "data", train=5, val=5)
    argv = ("chdir", str(tmp_path / "there"), "detect", str(run), "--data", "data", *FLAGS)
    done = start(2, str(fault_worker.__file__), *argv, cwd=tmp_path / "here")
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.count("snclr detect: rank 1 has different images in data than rank 0") == 1
