"""Worker processes end without output, even with an unread item in transit."""

import subprocess
import sys

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
