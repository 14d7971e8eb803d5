"""Process settings and fixtures for every test."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.helpers import tiny_run

# Waiting threads must not spin long, or tests on a busy machine take far longer (see `snclr.cli.main`).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# A test run in the background of a script inherits SIGINT ignored, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests assert no timings: an example may take long on a busy machine, or import a library first.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

LONG_FOLDERS = ("tests/distributed/", "tests/reliability/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long files first, so that the short ones fill up the test processes at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FOLDERS))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks and images this small are slower on several threads, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of images with three classes and one broken file."""
    return tiny_run.write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run on those images."""
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run")
