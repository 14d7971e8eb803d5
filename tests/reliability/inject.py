"""Faults injected into a command under test, by wrapping the calls that change the disk."""

from __future__ import annotations

import builtins
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
    # name: (call, pattern of its path, moment: after "half" of the write, "before" or "after" the call)
    "mid-write": ("save_file", _CHECKPOINT_FILE, "half"),
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
"""Points where a run is killed. The path of a rename is the new name."""


def kill_at(point: str, nth: int) -> None:
    """Make this process send SIGKILL to itself when it reaches the point for the nth time."""
    call, pattern, moment = POINTS[point]
    wanted, count = re.compile(pattern), [0]

    def around(real: Callable[..., Any], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not wanted.search(path):
            return real(*args, **kwargs)
        count[0] += 1
        if count[0] != nth:
            return real(*args, **kwargs)
        if moment == "half" and call == "save_file":
            write_part(args[0], path, 0.5)
        elif moment == "half":
            real(args[0], args[1][: len(args[1]) // 2])
        elif moment == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("alive after SIGKILL")

    _wrap(around, call)


def write_part(tensors: dict[str, Any], path: str, share: float) -> None:
    """Write the first part of a safetensors file beside its name, as the library does before it renames the file."""
    from safetensors.torch import save

    data = save(tensors)
    Path(path).with_name(".tmp").write_bytes(data[: int(len(data) * share)])


def full_disk(folder: str, after_bytes: int) -> None:
    """Make writes below `folder` fail with "no space left" after that many bytes in total."""
    left = [after_bytes]

    def around(real: Callable[..., Any], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not path.startswith(folder):
            return real(*args, **kwargs)
        if isinstance(args[0], dict):  # save_file(tensors, path)
            size = sum(tensor.nbytes for tensor in args[0].values())
            left[0] -= min(size, left[0])
            if left[0]:
                return real(*args, **kwargs)
            from safetensors import SafetensorError

            write_part(args[0], path, 0.5)
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        fits = min(len(args[1]), left[0])
        left[0] -= fits
        if fits == 0 and len(args[1]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(args[0], args[1][:fits])

    _wrap(around, "write", "save_file")


def not_finite(what: str, step: int, rank: int, value: str, notes: str) -> None:
    """Make the loss of one rank, or the gradient of its finite loss, nan or inf in the given step.

    Every rank writes the image ids of that step, and a digest of its weights and queue after it has stopped.
    """
    from snclr.distributed.collectives import barrier
    from snclr.methods.snclr.method import SNCLR
    from snclr.train.trainer import Trainer

    own_rank = int(os.environ["RANK"])
    losses, fit, count = SNCLR.losses, Trainer.fit, [0]

    def nonfinite_losses(self: Any, views: Any, ids: Any, **kwargs: Any) -> Any:
        plain = losses(self, views, ids, **kwargs)
        count[0] += 1
        if count[0] != step + 1:
            return (yield from plain)
        (Path(notes) / f"{own_rank}.ids").write_text(json.dumps(ids.tolist()))
        if own_rank != rank:
            return (yield from plain)
        loss = next(plain)  # of the first direction
        if what == "gradient":
            loss.register_hook(lambda gradient: gradient * float(value))
            yield loss
            return (yield from plain)
        yield loss * float(value)
        output = yield from plain
        return output._replace(loss=output.loss * float(value))

    def fit_and_record(trainer: Any, checkpoint: Any) -> None:
        try:
            fit(trainer, checkpoint)
        except Exception:
            tensors = {f"method/{name}": tensor for name, tensor in trainer.task.module.state_dict().items()}
            (Path(notes) / f"{own_rank}.weights").write_text(weights_digest(tensors))
            barrier()  # torchrun ends all ranks when the first one ends
            raise

    SNCLR.losses = nonfinite_losses  # type: ignore[method-assign]
    Trainer.fit = fit_and_record  # type: ignore[method-assign]


def weights_digest(tensors: dict[str, Any]) -> str:
    """Hash the tensors of the method that only an update changes, without the running statistics."""
    from tests.helpers.state_digest import digest

    running = ("running_mean", "running_var", "num_batches_tracked")
    return digest({k: v for k, v in tensors.items() if k.startswith("method/") and not k.endswith(running)}, 0)


def slow_steps(seconds: float) -> None:
    """Make every batch take at least that long, so that a run is still active when it is interrupted."""
    import time

    from snclr.data.loader import ViewLoader

    real = ViewLoader.batches

    def batches(self: Any, start: int, stop: int) -> Any:
        for batch in real(self, start, stop):
            time.sleep(seconds)
            yield batch

    ViewLoader.batches = batches  # type: ignore[method-assign]


def save_every_step() -> None:
    """Save the state of an evaluation after every step instead of every two minutes."""
    from snclr.train import trainer

    trainer.SAVE_SECONDS = 0.0


def tools_first(path: str) -> None:
    """Put a folder first in PATH, where decoders look for programs such as Ghostscript."""
    os.environ["PATH"] = path + os.pathsep + os.environ.get("PATH", "")


def _wrap(around: Callable[..., Any], *calls: str) -> None:
    """Replace functions of `os` and safetensors' `save_file` by `around(real, path, args, kwargs)`.

    "open" is the builtin one too. The path of a file descriptor is recorded when it is opened.
    """
    import safetensors.torch

    names: dict[int, str] = {}
    opened = os.open

    def remember(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = opened(path, *args, **kwargs)
        names[fd] = os.path.abspath(os.fspath(path)) if kwargs.get("dir_fd") is None else os.fspath(path)
        return fd

    open_file: Callable[..., Any] = builtins.open

    def remember_file(file: Any, *args: Any, **kwargs: Any) -> Any:
        def call(file: Any, *args: Any, **kwargs: Any) -> Any:
            opened_file = open_file(file, *args, **kwargs)
            if not isinstance(file, int):
                names[opened_file.fileno()] = os.path.abspath(os.fsdecode(file))
            return opened_file

        if "open" not in calls or isinstance(file, int):
            return call(file, *args, **kwargs)
        return around(call, os.fsdecode(file), (file, *args), kwargs)

    os.open = remember
    builtins.open = remember_file
    for call in calls:
        module = safetensors.torch if call == "save_file" else os
        real = getattr(module, call)

        def wrapped(*args: Any, real: Callable[..., Any] = real, call: str = call, **kwargs: Any) -> Any:
            subject = args[1] if call in ("rename", "replace", "save_file") else args[0]
            path = names.get(subject, "") if isinstance(subject, int) else os.fspath(subject)
            return around(real, str(path), args, kwargs)

        setattr(module, call, wrapped)
