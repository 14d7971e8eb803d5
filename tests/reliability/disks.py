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
    Workshop,
    assert_lost_little,
    assert_same_end,
    last_step,
    newest,
)

SHARES = (0.02, 0.21, 0.43, 0.68, 0.97)
"""When the disk fills up, as a share of the bytes that the undisturbed run writes."""
SAVED = 0.43
"""From this share on, a checkpoint has been saved before the disk is full."""
_MESSAGE = re.compile(r"no space to write (\S+) \(.*\): ([\d,]+) bytes needed, ([\d,]+) free on that disk")


def failing_writer(shop: Workshop, seed: int) -> None:
    """Let every write into the run directory fail after n bytes."""
    undisturbed, out = shop.undisturbed(), shop.place()
    share = SHARES[seed % len(SHARES)]
    after = int(_written(undisturbed) * share) + 37 * (seed // len(SHARES))
    fault = {"name": "full_disk", "folder": str(out), "after_bytes": after}
    _fill_and_resume(shop, out, [fault], undisturbed, saved=share >= SAVED)


def small_tmpfs(shop: Workshop, seed: int) -> None:
    """Fill a small file system that holds the run directory, then free it."""
    undisturbed = shop.undisturbed()
    share = SHARES[seed % len(SHARES)]
    with mounted(4 * _on_disk(undisturbed)) as disk:
        filler = disk / "filler"
        with open(filler, "wb") as file:
            free = shutil.disk_usage(disk).free
            file.write(b"\0" * max(0, free - int(_on_disk(undisturbed) * share)))
        _fill_and_resume(shop, disk / "run", [], undisturbed, filler, saved=share >= SAVED)


def _fill_and_resume(
    shop: Workshop, out: Path, faults: list[dict[str, object]], undisturbed: Path, filler: Path | None = None,
    *, saved: bool,
) -> None:  # fmt: skip
    run = shop.pretrain(out, "--resume", faults=faults)
    printed = run.ends_with(2)
    message = _MESSAGE.search(printed)
    assert message, f"no path and bytes in the message:\n{printed}"
    assert Path(message[1]).is_relative_to(out), message[0]
    assert "Traceback" not in printed, printed
    assert_lost_little(out)
    assert last_step(out) > CHECKPOINT_EVERY or not saved, "no checkpoint was saved before the disk was full"
    if filler is not None:
        filler.unlink()
    kept = newest(out)
    again = shop.pretrain(out, "--resume").ends_with(0)
    assert kept is None or f"resuming after step {kept.step} of {STEPS}" in again, again
    assert_same_end(out, undisturbed)
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
