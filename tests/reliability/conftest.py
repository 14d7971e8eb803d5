"""One workshop for all the trials: its zygote loads torch once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.harness import Workshop


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    shop = Workshop(tmp_path_factory.mktemp("faults") / "work")
    yield shop
    shop.close()
