"""Two hosts and a link between them: a cut link ends the job and names the missing rank, and a restart continues."""

import sys

import pytest

from tests.distributed.two_hosts import HANG_SECONDS, Hosts, cut_and_restart, missing_requirement, reference_run
from tests.helpers.noise_images import write_noise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * HANG_SECONDS)]


@pytest.fixture(scope="module")
def hosts():
    if reason := missing_requirement():
        pytest.skip(reason)
    made = Hosts()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_noise(tmp_path_factory.mktemp("photos"), 40, size=(20, 20), classes=("",))


def test_a_cut_link_ends_the_job_and_a_restart_is_bit_identical(hosts, photos, tmp_path):
    """The reference ran on two ranks of one host, so this also shows that two hosts train like one."""
    reference = reference_run(photos, tmp_path / "reference")
    cut_and_restart(hosts, photos, tmp_path / "run", 9, reference)


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_a_missing_requirement_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "`ip` command" in missing_requirement()
    monkeypatch.undo()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in missing_requirement() or "`ip` command" in missing_requirement()
