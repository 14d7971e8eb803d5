"""Promise 7: a full disk loses nothing."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.harness import (
    CHECKPOINT_EVERY,
    STEPS,
    Command,
    Sandbox,
    assert_one_interval_lost_at_most,
    assert_same_result,
    last_step,
    newest_checkpoint,
)

SHARES = (0.02, 0.21, 0.43, 0.68, 0.97)
"""When the disk fills up, as a share of the bytes that the reference run writes."""
SAVED = 0.43
"""From this share on, a checkpoint has been saved before the disk is full."""
_MESSAGE = re.compile(r"no space to write (\S+) \(.*\): ([\d,]+) bytes needed, ([\d,]+) free on that disk")


def failing_writer(sandbox: Sandbox, seed: int) -> None:
    """Let every write into the run directory fail after n bytes."""
    reference, out = sandbox.reference_run(), sandbox.new_path()
    share = SHARES[seed % len(SHARES)]
    after = int(_written(reference) * share) + 37 * (seed // len(SHARES))
    fault = {"name": "full_disk", "folder": str(out), "after_bytes": after}
    _fill_and_resume(sandbox, sandbox.pretrain(out, "--resume", faults=[fault]), reference, saved=share >= SAVED)


def small_tmpfs(sandbox: Sandbox, seed: int) -> None:
    """Fill a small file system that holds the run directory, then free it."""
    reference, step = sandbox.reference_run(), 1 + 2 * (seed % 5)
    with mounted(4 * _on_disk(reference)) as disk:
        run = sandbox.pretrain(disk / "run", "--resume", faults=[{"name": "slow_steps", "seconds": 0.05}])
        run.wait_for_step(step)  # before that, a disk that is too small is refused
        filler = disk / "filler"
        with open(filler, "wb") as file:
            file.write(b"\0" * max(0, shutil.disk_usage(disk).free - 4096))
        _fill_and_resume(sandbox, run, reference, filler, saved=step > CHECKPOINT_EVERY)


def _fill_and_resume(
    sandbox: Sandbox, run: Command, reference: Path, filler: Path | None = None, *, saved: bool
) -> None:
    out, printed = run.out, run.expect_exit(2)
    message = _MESSAGE.search(printed)
    assert message, f"no path and bytes in the message:\n{printed}"
    assert Path(message[1]).is_relative_to(out), message[0]
    assert "Traceback" not in printed, printed
    assert_one_interval_lost_at_most(out)
    assert last_step(out) > CHECKPOINT_EVERY or not saved, "no checkpoint was saved before the disk was full"
    if filler is not None:
        filler.unlink()
    kept = newest_checkpoint(out)
    again = sandbox.pretrain(out, "--resume").expect_exit(0)
    assert kept is None or f"resuming after step {kept.step} of {STEPS}" in again, again
    assert_same_result(out, reference)
    shutil.rmtree(out)


def _on_disk(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


def _written(folder: Path) -> int:
    """Estimate the bytes that a run writes: it writes six checkpoints and keeps the last ones."""
    kept = sorted((folder / "checkpoints").glob("step-*"))
    return 6 * sum(path.stat().st_size for path in kept[-1].iterdir())


@contextlib.contextmanager
def mounted(size: int) -> Iterator[Path]:
    """Mount a tmpfs of `size` bytes; skip the trial if that is not permitted."""
    folder = Path(tempfile.mkdtemp(prefix="snclr-small-disk-"))
    options = f"size={size},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        folder.rmdir()
        pytest.skip(f"cannot mount a tmpfs ({done.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()
