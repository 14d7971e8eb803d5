"""Who is stuck and who is not, as process 0 sees it: with a store and a clock of our own."""

import pytest

from snclr.train import watch as module
from snclr.train.watch import Watch

TIMEOUT = 10.0


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


@pytest.fixture
def judge(monkeypatch):
    """Look at what two processes tell, once a second: the verdict, or None after so many seconds."""
    clock, store, seen = Clock(), Store(), {}
    monkeypatch.setattr(module, "time", clock)
    watch = Watch(TIMEOUT)
    watch._size, watch._store = 2, store
    for rank in range(2):
        store.set(f"host/{rank}", f"node{rank} (pid {rank})")

    def looks(told, seconds):
        """`told(second)` is the beat of each process: a count and a step."""
        for second in range(seconds):
            clock.now += 1
            for rank, (count, step) in enumerate(told(second)):
                store.set(f"beat/{rank}", f"{count} {step}")
            if (verdict := watch._judge(seen)) is not None:
                return verdict
        return None

    return looks


def test_one_that_always_tells_its_step_a_moment_earlier_is_not_stuck(judge):
    assert judge(lambda second: [(second, 20 * second + 7), (second, 20 * second)], 100) is None


def test_a_long_wait_of_both_is_nobodys_fault_when_one_goes_on_first(judge):
    assert judge(lambda second: [(second, 5), (second, 5)], 100) is None
    assert judge(lambda second: [(100 + second, 6), (100 + second, 5)], 9) is None
    assert judge(lambda second: [(200 + second, 6), (200 + second, 6)], 100) is None


@pytest.mark.parametrize("late", [0, 1])
def test_one_that_lives_but_does_not_come_is_stuck(judge, late):
    def told(second):
        return [(second, 6 if rank == late else 7) for rank in range(2)]

    verdict = judge(told, 13)
    assert verdict is not None
    assert verdict.startswith(f"process {late} on node{late}")
    assert "lives, but has not come to step 7" in verdict


def test_one_that_has_fallen_silent_is_not_called_alive(judge):
    assert judge(lambda second: [(second, 6), (second, 6)], 5) is None
    verdict = judge(lambda second: [(5 + second, 7), (4, 6)], 20)
    assert verdict is not None
    assert verdict.startswith("process 1 on node1")
    assert "has shown no sign of life" in verdict
