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

from tests.faults.harness import (
    CHECKPOINT_EVERY,
    STEPS,
    Workshop,
    assert_lost_little,
    assert_same_end,
    last_step,
    newest,
)

SHARES = (0.02, 0.21, 0.43, 0.68, 0.97)
"""Where the disk fills up: so much of all the bytes that the undisturbed run has on disk at its end."""
SAVED = 0.43
"""From this share on, a checkpoint has been saved by then, which must be whole and of use."""
_SAID = re.compile(r"no space to write (\S+) \(.*\): ([\d,]+) bytes needed, ([\d,]+) free on that disk")


def failing_writer(shop: Workshop, seed: int) -> None:
    """Every write into the run folder fails from byte n on."""
    undisturbed, out = shop.undisturbed(), shop.place()
    share = SHARES[seed % len(SHARES)]
    after = int(_written(undisturbed) * share) + 37 * (seed // len(SHARES))
    fault = {"name": "full_disk", "folder": str(out), "after_bytes": after}
    _fill_and_go_on(shop, out, [fault], undisturbed, saved=share >= SAVED)


def small_tmpfs(shop: Workshop, seed: int) -> None:
    """The run folder lies on a file system of a few hundred kilobytes that is full after byte n, and is then freed."""
    undisturbed = shop.undisturbed()
    share = SHARES[seed % len(SHARES)]
    with mounted(4 * _on_disk(undisturbed)) as disk:
        ballast = disk / "ballast"
        with open(ballast, "wb") as file:
            free = shutil.disk_usage(disk).free
            file.write(b"\0" * max(0, free - int(_on_disk(undisturbed) * share)))
        _fill_and_go_on(shop, disk / "run", [], undisturbed, ballast, saved=share >= SAVED)


def _fill_and_go_on(
    shop: Workshop, out: Path, faults: list[dict[str, object]], undisturbed: Path, ballast: Path | None = None,
    *, saved: bool,
) -> None:  # fmt: skip
    run = shop.pretrain(out, "--resume", faults=faults)
    said = run.ends_with(2)
    told = _SAID.search(said)
    assert told, f"the message names no path and bytes:\n{said}"
    assert Path(told[1]).is_relative_to(out), told[0]
    assert "Traceback" not in said, said
    assert_lost_little(out)
    assert last_step(out) > CHECKPOINT_EVERY or not saved, "too early to say anything of an earlier checkpoint"
    if ballast is not None:
        ballast.unlink()
    kept = newest(out)
    again = shop.pretrain(out, "--resume").ends_with(0)
    assert kept is None or f"resuming after step {kept.step} of {STEPS}" in again, again
    assert_same_end(out, undisturbed)
    shutil.rmtree(out)


def _on_disk(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


def _written(folder: Path) -> int:
    """About as many bytes as a run writes: its checkpoints many times over, of which the last ones are left."""
    kept = sorted((folder / "checkpoints").glob("step-*"))
    return 6 * sum(path.stat().st_size for path in kept[-1].iterdir())


@contextlib.contextmanager
def mounted(size: int) -> Iterator[Path]:
    """A file system of that many bytes; the trial is skipped where none can be mounted."""
    place = Path(tempfile.mkdtemp(prefix="snclr-small-disk-"))
    options = f"size={size},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        place.rmdir()
        pytest.skip(f"no small file system can be mounted here ({done.stderr.strip()})")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()
