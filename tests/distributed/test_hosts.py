"""Two hosts and a link between them: a cut link ends the job and names the missing rank, and a restart continues."""

import sys

import numpy as np
import pytest
from PIL import Image

from tests.distributed.two_hosts import HANG_SECONDS, Hosts, cut_and_restart, reference_run, why_not

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


def test_a_cut_link_ends_the_job_and_a_restart_is_bit_identical(hosts, photos, tmp_path):
    """The reference ran on two ranks of one host, so this also shows that two hosts train like one."""
    reference = reference_run(photos, tmp_path / "reference")
    cut_and_restart(hosts, photos, tmp_path / "run", 9, reference)


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_without_the_means_there_is_a_reason(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "`ip` command" in why_not()
    monkeypatch.undo()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in why_not() or "`ip` command" in why_not()
