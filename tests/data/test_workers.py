"""Worker processes end without output, even with an unread item in transit."""

import subprocess
import sys
import threading
import time
from multiprocessing.queues import Queue

import torch

from snclr.data.workers import in_processes

SCRIPT = """
import torch
from snclr.data.workers import in_processes

class Large:
    def __getitem__(self, number):
        return torch.full((40_000_000,), number % 200, dtype=torch.uint8)

if __name__ == "__main__":
    items = in_processes(Large(), 0, 1000, workers=2)
    assert [int(next(items)[0]) for _ in range(4)] == [0, 1, 2, 3]
    items.close()
"""


def test_workers_with_unused_large_items_end_cleanly(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""


class Numbers(torch.utils.data.Dataset):
    def __getitem__(self, number):
        return torch.tensor(number)


def test_the_threads_of_the_queues_end_with_the_iterator(monkeypatch):
    # A thread that deletes semaphores while Python exits leaves a traceback of the resource tracker.
    feed = Queue._feed

    def slow_feed(*args):
        feed(*args)
        time.sleep(1)

    monkeypatch.setattr(Queue, "_feed", staticmethod(slow_feed))
    before = set(threading.enumerate())
    items = in_processes(Numbers(), 0, 100, workers=1)
    assert int(next(items)) == 0
    items.close()
    assert set(threading.enumerate()) <= before
