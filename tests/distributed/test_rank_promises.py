"""The promises of docs/reliability.md about several ranks, a trial of each; `make soak` runs all trials."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.harness import Sandbox
from tests.reliability.promises import PROMISES, Promise

MULTI_RANK = [promise for promise in PROMISES if promise.multi_rank]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path_factory.mktemp("faults") / "work")
    yield sandbox
    sandbox.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("promise", "seed"),
    [pytest.param(promise, seed, id=f"{promise.name} {seed}") for promise in MULTI_RANK for seed in promise.short],
)
def test_promise(sandbox: Sandbox, promise: Promise, seed: int) -> None:
    promise.trial(sandbox, seed)
