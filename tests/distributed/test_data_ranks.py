"""Remote shards, end to end: one and two ranks, a kill, a network outage, and a stop during it."""

import contextlib
import json
import re
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from snclr.api.export import pack
from snclr.checkpoint.format import latest_checkpoint
from snclr.data.shards.dataset import WINDOW
from tests.distributed.launcher import snclr, start
from tests.helpers.noise_images import write_noise
from tests.helpers.web import serving

TINY = (
    "pretrain", "--recipe", "demo", "--batch-size", 8, "--epochs", 2, "--image-size", 16, "--queue-length", 30,
    "--neighbors", 3, "--hidden", 16, "--dim", 8, "--optimizer", "sgd", "--lr", 0.1, "--warmup-epochs", 0,
    "--checkpoint-every", 4, "--log-every", 1, "--precision", 64, "--threads", 1,
)  # fmt: skip
IMAGES, SHARDS = 120, 20
STEPS = 2 * IMAGES // 8
TIMEOUT = 240.0


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Serve twenty small shards, more than the shuffle window holds."""
    top = tmp_path_factory.mktemp("web")
    write_noise(top / "photos", IMAGES, size=(20, 20), classes="ab", digits=3)
    with serving(top / "site") as site:
        pack(top / "photos", shards=site.folder / "set", images_per_shard=IMAGES // SHARDS, quiet=True)
        assert len(list((site.folder / "set").glob("*.tar"))) == SHARDS > WINDOW
        yield site


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use a separate cache for each test."""
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def uninterrupted(site, tmp_path_factory):
    top = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNCLR_CACHE", str(top / "cache"))
        snclr(1, *command(site, top / "run", workers=0))
    return top / "run"


def command(site, out, *, workers):
    return (*TINY, "--data", f"{site.url}/set/", "--workers", workers, "--out", out)


@contextlib.contextmanager
def started(site, out, *, workers):
    """Start a run in its own process group, with its output in a file."""
    printed = out.with_suffix(".txt")
    process = start("-m", "snclr", *map(str, command(site, out, workers=workers)), output=printed, errors=printed)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL, group=True)
        process.wait(TIMEOUT)


@contextlib.contextmanager
def few_shards(site, count):
    """Allow `count` downloads, then answer 503, so that a run inside the block cannot finish."""
    site.allowed = count
    try:
        yield
    finally:
        site.allowed = None


def wait_until(process, out, ready):
    deadline = time.monotonic() + TIMEOUT
    while not ready():
        assert process.poll() is None, f"it ended with {process.returncode}: {out.with_suffix('.txt').read_text()}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def last_step(out):
    lines = out / "metrics.jsonl"
    found = re.findall(r'"step": (\d+)', lines.read_text()) if lines.exists() else []
    return int(found[-1]) if found else 0


def assert_same_result(out, uninterrupted):
    """Check that the encoder is bit-identical and the losses are equal."""
    assert (out / "encoder.safetensors").read_bytes() == (uninterrupted / "encoder.safetensors").read_bytes()
    assert losses(out) == losses(uninterrupted)


def test_two_ranks_give_the_result_of_one(site, uninterrupted, tmp_path):
    site.log.clear()
    snclr(2, *command(site, tmp_path / "run", workers=0))
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), rel=1e-6)
    assert len(losses(uninterrupted)) == STEPS
    runs = (uninterrupted, tmp_path / "run")
    one, two = (latest_checkpoint(run / "checkpoints", lambda text: pytest.fail(text)) for run in runs)
    ids = "method/criterion.queue.ids"  # the images of the last batches, in their order
    assert torch.equal(one.tensors[ids], two.tensors[ids])
    expected, found = (load_file(run / "encoder.safetensors") for run in runs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8)
    assert site.fetched(".tar") == SHARDS  # each once for both ranks


def test_a_killed_run_resumes_to_the_same_result(site, uninterrupted, tmp_path):
    out = tmp_path / "run"
    with few_shards(site, 17), started(site, out, workers=1) as process:
        wait_until(process, out, lambda: last_step(out) >= 5)  # one step after a checkpoint
        process.send_signal(signal.SIGKILL, group=True)
        assert process.wait(TIMEOUT) == -signal.SIGKILL
    snclr(1, "pretrain", "--resume", "--out", out)
    assert_same_result(out, uninterrupted)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_outage_is_retried_and_does_not_delay_a_stop(site, uninterrupted, tmp_path, workers):
    out = tmp_path / "run"
    printed = out.with_suffix(".txt")
    with few_shards(site, 14), started(site, out, workers=workers) as process:
        wait_until(process, out, lambda: last_step(out) >= 1 and "retrying for" in printed.read_text())
        process.send_signal(signal.SIGTERM, group=True)  # as a scheduler does
        assert process.wait(TIMEOUT) == 143, printed.read_text()  # the outage would be retried for longer
    assert "Traceback" not in printed.read_text()
    assert "everything is saved" in printed.read_text()
    if workers == 0:  # once is enough
        snclr(1, "pretrain", "--resume", "--out", out)
        assert_same_result(out, uninterrupted)
