"""The promises of docs/reliability.md, a few trials of each; `make soak` runs them all. See `promises.py`."""

from __future__ import annotations

import pytest

from tests.reliability.harness import Sandbox
from tests.reliability.promises import PROMISES, Promise

SINGLE_RANK = [promise for promise in PROMISES if not promise.multi_rank]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("promise", "seed"),
    [pytest.param(promise, seed, id=f"{promise.name} {seed}") for promise in SINGLE_RANK for seed in promise.short],
)
def test_promise(sandbox: Sandbox, promise: Promise, seed: int) -> None:
    promise.trial(sandbox, seed)


def test_every_promise_is_tried() -> None:
    assert {promise.row for promise in PROMISES} == {str(row) for row in range(1, 16)}
    assert len({promise.name for promise in PROMISES}) == len(PROMISES)
    assert all(promise.full for promise in PROMISES)
    elsewhere = {promise.trial.__name__ for promise in PROMISES if not promise.short}
    # These take long; `promises.py` names the test that has a shorter one.
    assert elsewhere == {"two_hundred_steps", "link_cut", "repeat_ranks", "resized"}
