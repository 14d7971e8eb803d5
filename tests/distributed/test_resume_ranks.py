"""A run that is resumed on three or four ranks ends with the bits of an uninterrupted one."""

import json
import shutil

import pytest
import torch

from snclr.checkpoint.format import latest_checkpoint
from tests.distributed.launcher import snclr
from tests.helpers.tiny_run import write_images

SMALL = (
    "--encoder", "resnet10-tiny", "--stem", "half", "--image-size", 16, "--batch-size", 12, "--epochs", 1,
    "--warmup-epochs", 0, "--hidden", 32, "--dim", 16, "--neighbors", 3, "--queue-length", 30, "--views", "crops",
    "--lr", 0.1, "--workers", 0, "--device", "cpu", "--checkpoint-every", 1, "--keep-checkpoints", 9,
    "--log-every", 1,
)  # fmt: skip


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_resumed_run_is_bit_identical(ranks, tmp_path):
    images = write_images(tmp_path / "images", each=12)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    snclr(ranks, "pretrain", "--data", images, "--out", whole, *SMALL)
    shutil.copytree(whole, cut)
    for later in sorted((cut / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)
    (cut / "encoder.safetensors").unlink()
    snclr(ranks, "pretrain", "--out", cut, "--resume")
    expected, resumed = (latest_checkpoint(run / "checkpoints", warn=pytest.fail) for run in (whole, cut))
    assert resumed.step == expected.step == 3
    different = [key for key, value in expected.tensors.items() if not torch.equal(resumed.tensors[key], value)]
    assert different == []
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (whole, cut)]
    assert [{**line, "timing": None} for line in lines[0]] == [{**line, "timing": None} for line in lines[1]]
