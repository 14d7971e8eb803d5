"""One sandbox for all trials of a test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.harness import Sandbox


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path_factory.mktemp("faults") / "work")
    yield sandbox
    sandbox.close()
