"""Faults that happen inside a command under test. They wrap the calls that change the disk."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHECKPOINT_FILE = r"checkpoints/\.step-\d+\.\w+\.partial/tensors\.safetensors$"

POINTS: dict[str, tuple[str, str, str]] = {
    # name: (call, what its path must match, "half" of the work done, "before" or "after" it)
    "mid-write": ("write", _CHECKPOINT_FILE, "half"),
    "before the manifest": ("open", r"\.partial/manifest\.json$", "before"),
    "before fsync": ("fsync", _CHECKPOINT_FILE, "before"),
    "before fsync of the folder": ("fsync", r"checkpoints/\.step-\d+\.\w+\.partial$", "before"),
    "before rename": ("rename", r"checkpoints/step-\d+$", "before"),
    "after rename": ("rename", r"checkpoints/step-\d+$", "after"),
    "while pruning, first file": ("unlink", r"(manifest|info)\.json$|tensors\.safetensors$", "after"),
    "while pruning, folder": ("rmdir", r"\.partial$", "before"),
    "mid-line of the metrics": ("write", r"metrics\.jsonl$", "half"),
    "before the settings": ("replace", r"config\.yaml$", "before"),
    "before skipped.jsonl": ("replace", r"skipped\.jsonl$", "before"),
}
"""Where a run can be killed by force. The path is the file's, for a rename the new name."""


def kill_at(point: str, nth: int) -> None:
    """Make this process kill itself, as kill -9 would, at the nth time it gets to that point."""
    call, pattern, moment = POINTS[point]
    wanted, count = re.compile(pattern), [0]

    def around(real: Callable[..., Any], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not wanted.search(path):
            return real(*args, **kwargs)
        count[0] += 1
        if count[0] != nth:
            return real(*args, **kwargs)
        if moment == "half":
            real(args[0], args[1][: len(args[1]) // 2])
        elif moment == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("alive after SIGKILL")

    _wrap(around, call)


def full_disk(folder: str, after_bytes: int) -> None:
    """Let writes below `folder` fail with "no space left" from the byte on, whichever file it falls in, for good."""
    left = [after_bytes]

    def around(real: Callable[..., Any], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not path.startswith(folder):
            return real(*args, **kwargs)
        fits = min(len(args[1]), left[0])
        left[0] -= fits
        if fits == 0 and len(args[1]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(args[0], args[1][:fits])

    _wrap(around, "write")


def not_finite(what: str, step: int, rank: int, value: str, notes: str) -> None:
    """Make the loss of one process, or the gradient of its finite loss, nan or inf in the given step.

    Every process notes the images of that step, and what it has for weights and queue when it has stopped.
    """
    from snclr.distributed import barrier
    from snclr.methods.snclr import SNCLR
    from snclr.train import pretrain

    me = int(os.environ["RANK"])
    forward, train, count = SNCLR.forward, pretrain.train, [0]

    def poisoned(self: Any, views: Any, ids: Any, **kwargs: Any) -> Any:
        output = forward(self, views, ids, **kwargs)
        count[0] += 1
        if count[0] != step + 1:
            return output
        (Path(notes) / f"{me}.ids").write_text(json.dumps(ids.tolist()))
        if me != rank:
            return output
        if what == "gradient":
            output.loss.register_hook(lambda gradient: gradient * float(value))
            return output
        return output._replace(loss=output.loss * float(value))

    def watched(t: Any, **kwargs: Any) -> Any:
        try:
            return train(t, **kwargs)
        except Exception:
            tensors = {f"method/{name}": tensor for name, tensor in t.core.state_dict().items()}
            (Path(notes) / f"{me}.weights").write_text(weights_digest(tensors))
            barrier()  # once the first process has ended, torchrun ends the others
            raise

    SNCLR.forward = poisoned  # type: ignore[method-assign]
    pretrain.train = watched


def weights_digest(tensors: dict[str, Any]) -> str:
    """Of what only an update changes in a checkpoint's method: not the statistics that a forward pass keeps."""
    from snclr.train.state import digest

    passing = ("running_mean", "running_var", "num_batches_tracked")
    return digest({k: v for k, v in tensors.items() if k.startswith("method/") and not k.endswith(passing)}, 0)


def slow_steps(seconds: float) -> None:
    """Make every batch take at least that long, so that a run lives long enough to be met in the middle."""
    import time

    from snclr.data.loader import ViewLoader

    real = ViewLoader.batches

    def batches(self: Any, start: int, stop: int) -> Any:
        for batch in real(self, start, stop):
            time.sleep(seconds)
            yield batch

    ViewLoader.batches = batches  # type: ignore[method-assign]


def tools_first(path: str) -> None:
    """Put a folder of programs before all others, where decoders look for helpers such as Ghostscript."""
    os.environ["PATH"] = path + os.pathsep + os.environ.get("PATH", "")


def _wrap(around: Callable[..., Any], *calls: str) -> None:
    """Put `around(real, path, args, kwargs)` in the place of functions of `os`; files are known by their opening."""
    names: dict[int, str] = {}
    opened = os.open

    def remember(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = opened(path, *args, **kwargs)
        names[fd] = os.path.abspath(os.fspath(path)) if kwargs.get("dir_fd") is None else os.fspath(path)
        return fd

    os.open = remember
    for call in calls:
        real = getattr(os, call)

        def wrapped(*args: Any, real: Callable[..., Any] = real, call: str = call, **kwargs: Any) -> Any:
            subject = args[1] if call in ("rename", "replace") else args[0]
            path = names.get(subject, "") if isinstance(subject, int) else os.fspath(subject)
            return around(real, str(path), args, kwargs)

        setattr(os, call, wrapped)
