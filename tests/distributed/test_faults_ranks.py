"""The promises of docs/reliability.md about several processes, one trial of each; `make soak` runs them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.harness import Workshop
from tests.reliability.promises import PROMISES, Promise

SEVERAL = [promise for promise in PROMISES if promise.several]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    shop = Workshop(tmp_path_factory.mktemp("faults") / "work")
    yield shop
    shop.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("promise", "seed"),
    [pytest.param(promise, seed, id=f"{promise.name} {seed}") for promise in SEVERAL for seed in promise.short],
)
def test_promise(shop: Workshop, promise: Promise, seed: int) -> None:
    promise.trial(shop, seed)
