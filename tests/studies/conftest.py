from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import tiny_run


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder with train/ and test/ images of three classes."""
    folder = tmp_path_factory.mktemp("images")
    tiny_run.write_images(folder / "train")
    tiny_run.write_images(folder / "test", each=4, seed=1)
    return folder
