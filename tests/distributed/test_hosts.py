"""Two hosts with a link between them: they train as one, a cut link ends the job and names who is missing, and the
same command goes on afterward, bit for bit."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from snclr import pretrain
from tests.distributed.two_hosts import HANG_SECONDS, SETTINGS, Hosts, Job, cut_and_restart, end_of, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * HANG_SECONDS)]


@pytest.fixture(scope="module")
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    made = Hosts()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for index in range(40):
        pixels = generator.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((20, 20), Image.Resampling.BICUBIC).save(folder / f"{index:02}.png")
    return folder


@pytest.fixture(scope="module")
def reference(hosts, photos, tmp_path_factory):
    job = Job(hosts, photos, tmp_path_factory.mktemp("reference") / "run")
    assert job.wait() == [0, 0], job.said
    return job.out


def test_two_hosts_train_as_one_process_does(photos, reference, tmp_path):
    pretrain(**SETTINGS, data=str(photos), out=str(tmp_path / "alone"), quiet=True)
    expected, found = end_of(tmp_path / "alone"), end_of(reference)
    assert found.step == expected.step == 40
    for name in ("ids", "births", "_extra_state"):
        key = f"method/criterion.queue.{name}"
        assert torch.equal(found.tensors[key], expected.tensors[key]), name
    assert (reference / "encoder.safetensors").exists()


def test_a_cut_link_ends_the_job_and_a_restart_is_bit_identical(hosts, photos, reference, tmp_path):
    cut_and_restart(hosts, photos, tmp_path / "run", 9, reference)


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_without_the_means_there_is_a_reason(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "`ip` command" in why_not()
    monkeypatch.undo()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in why_not() or "`ip` command" in why_not()
