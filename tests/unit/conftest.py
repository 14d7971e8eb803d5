"""For every unit test: one thread; for those that want one: a small run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_run
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks and images this small are slower on several threads, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on those images."""
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run")
