"""What an evaluation continues from after a stop: its saved state and cached features. Stop signals of any rank.

    RUN/evaluation/features/ROLE-KEY/info.json                   what the features are of
                                     block-000012.safetensors    features, ids; metadata: skipped images, sha256 of
                                                                 the tensors, stamp (digest of the images)

Features are cached in blocks: a stopped extraction continues, and the next evaluation reuses them. The key is a hash of
the weights, the dataset fingerprint, the view and the device type. A block is used only while its images are unchanged:
by content (arrays) or by size and mtime (files). The directory may be deleted at any time.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from snclr.checkpoint.format import Checkpoint, save_checkpoint
from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset
from snclr.data.loader import Skip
from snclr.data.sampler import Ids
from snclr.data.splits import Subset
from snclr.distributed.collectives import all_gather_objects, broadcast_object, raise_on_all_ranks, rank_and_size
from snclr.errors import UserError
from snclr.io.atomic import discard, remove_leftovers, write_atomic
from snclr.io.hashing import sha256_json
from snclr.io.locking import FileLock, lock_folder
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.trainer import Trainer, TrainTask, load_latest_checkpoint

ValueT = TypeVar("ValueT")
_INFO = "info.json"


def requested_stop(stop: StopFlag | None) -> int | None:
    """Return the stop signal that any rank received, or None; every rank must call this."""
    signals = all_gather_objects(None if stop is None else stop.requested)
    return next((signum for signum in signals if signum is not None), None)


def raise_if_stop_requested(stop: StopFlag | None) -> None:
    """Raise StopRequested on every rank if any rank received a stop signal; every rank must call this."""
    if (signum := requested_stop(stop)) is not None:
        raise StopRequested(signum)


def on_rank_zero(function: Callable[[], ValueT]) -> ValueT:
    """Call a function on rank 0 only; return its result, or raise its error, on every rank."""
    result: Any = None
    with raise_on_all_ranks():
        if rank_and_size()[0] == 0:
            result = function()
    return broadcast_object(result)


def short_hash(identity: dict[str, Any]) -> str:
    """Return 12 hex digits that identify JSON values, for directory names.

    >>> short_hash({"seed": 0, "epochs": 90}) == short_hash({"epochs": 90, "seed": 0})
    True
    """
    return sha256_json(identity)[:12]


@dataclass
class EvalState:
    """The saved state of one unfinished evaluation; locked inside a `with` block and deleted on success.

    `identity` are the JSON values that determine the result: each has a directory of its own. Rank 0 reads and writes;
    the other ranks receive what it read.
    """

    parent: Path
    name: str
    identity: dict[str, Any]
    keep: bool = False
    """Whether the folder is kept, with other files of the caller."""

    def __post_init__(self) -> None:
        self.identity = json.loads(json.dumps(self.identity))  # tuples become lists, as in the saved state
        self.folder = self.parent / f"{self.name}-{short_hash(self.identity)}"
        self._lock = FileLock(self.folder / ".lock")

    def __enter__(self) -> "EvalState":
        def lock() -> None:
            lock_folder(self._lock, "the same evaluation", "copy the run to a directory you own")
            remove_leftovers(self.folder)

        on_rank_zero(lock)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if rank_and_size()[0] > 0:  # rank 0 may have deleted the folder already
            return
        if not self.keep and (kind is None or not any(path.is_dir() for path in self.folder.iterdir())):
            discard(self.folder)  # finished, or nothing was saved
        self._lock.release()

    def load(self, stage: str, device: torch.device | str, *, quiet: bool) -> Checkpoint | None:
        """Return the saved state of a stage on every rank, or None."""
        return load_latest_checkpoint(self.folder / stage, device, self.identity, quiet=quiet)

    def save(self, stage: str, step: int, tensors: dict[str, Tensor]) -> None:
        """Save the state of a stage after `step` steps, on rank 0."""
        if rank_and_size()[0] == 0:
            save_checkpoint(self.folder / stage, tensors, {"identity": self.identity}, step=step, keep=1)


def fit_task(
    task: TrainTask[Any], state: EvalState | None, stage: str, *, stop: StopFlag | None, device: torch.device | str,
    quiet: bool, **options: Any,
) -> None:  # fmt: skip
    """Train a task to its last step; with `state`, save and resume in its subfolder `stage`.

    `options` are further fields of `Trainer`.
    """
    folder, identity, checkpoint = None, None, None
    quiet = quiet or rank_and_size()[0] > 0
    if state is not None:
        folder, identity, checkpoint = state.folder / stage, state.identity, state.load(stage, device, quiet=quiet)
    trainer = Trainer(task=task, checkpoints=folder, stop=stop or StopFlag(), identity=identity, quiet=quiet, **options)
    trainer.fit(checkpoint)


class EncodedBatch(NamedTuple):
    """Ids (n,) and features (n, d) of the images of a batch, and those that could not be read."""

    ids: Ids
    features: Tensor
    skipped: list[Skip]


@dataclass
class FeatureStore:
    """The cached features of one dataset by one network; a cache that fails is disabled, never an error.

    `role` names the network of the run (encoder, y1, y2 …), `weights` is its digest.
    """

    run: Path
    role: str
    weights: str
    dataset: ImageDataset
    image_size: int
    device: str = "cpu"
    precision: str = "32"
    writable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.info = {
            "schema": 1, "role": self.role, "weights_sha256": self.weights, "fingerprint": self.dataset.fingerprint(),
            "images": len(self.dataset), "image_size": self.image_size, "view": "center crop",
            "device": torch.device(self.device).type,
        }  # fmt: skip
        if self.precision != "32":
            self.info["precision"] = self.precision
        self.parent = RunDir(self.run).evaluation / "features"
        self.folder = self.parent / f"{self.role}-{short_hash(self.info)}"

    def read(self, number: int, ids: Ids) -> EncodedBatch | None:
        """Return a block if it is intact and its images `ids` have not changed since, else None."""
        from safetensors import safe_open

        try:
            with safe_open(self._path(number), framework="pt") as file:
                metadata, features, kept = file.metadata(), file.get_tensor("features"), file.get_tensor("ids").numpy()
            intact = metadata["sha256"] == _digest(features, kept) and len(kept) == len(features)
            if not intact or metadata["stamp"] != images_digest(self.dataset, ids):
                return None
            return EncodedBatch(kept, features, [Skip(**entry) for entry in json.loads(metadata["skipped"])])
        except Exception:  # missing, truncated or of another schema: computed again
            return None

    def write(self, number: int, ids: Ids, block: EncodedBatch, warn: Callable[[str], None]) -> None:
        """Write a block; the first failure (no space, no permission) is reported and disables the cache."""
        if not self.writable:
            return
        from safetensors.torch import save

        try:
            if not self.folder.is_dir():
                self._drop_outdated()
                write_atomic(self.folder / _INFO, json.dumps({**self.info, "data": self.dataset.name}, indent=1) + "\n")
            metadata = {
                "stamp": images_digest(self.dataset, ids),
                "skipped": json.dumps([asdict(skip) for skip in block.skipped]),
                "sha256": _digest(block.features, block.ids),
            }
            kept = torch.from_numpy(np.ascontiguousarray(block.ids))
            write_atomic(self._path(number), save({"features": block.features.contiguous(), "ids": kept}, metadata))
        except (OSError, UserError) as error:
            self.writable = False
            warn(f"features are not cached, so a stopped extraction starts again from the beginning: {error}")

    def _path(self, number: int) -> Path:
        return self.folder / f"block-{number:06d}.safetensors"

    def _drop_outdated(self) -> None:
        """Delete features of weights that the run no longer has."""
        for path in self.parent.glob(f"{self.role}-*"):
            try:
                outdated = json.loads((path / _INFO).read_bytes())["weights_sha256"] != self.weights
            except (OSError, ValueError, KeyError, TypeError):
                outdated = True
            if outdated:
                discard(path)


def images_digest(dataset: ImageDataset, ids: Ids) -> str:
    """Return a digest that changes with the images: of pixels in memory, or of file names, sizes and mtimes.

    >>> images = ArrayDataset("a", np.zeros((2, 4, 4, 3), np.uint8))
    >>> before = images_digest(images, np.array([0])); images.images[1] = 9
    >>> before == images_digest(images, np.array([0])), before == images_digest(images, np.array([0, 1]))
    (True, False)
    """
    if isinstance(dataset, Subset):
        return images_digest(dataset.dataset, dataset.index[ids])
    digest = hashlib.sha256(np.ascontiguousarray(ids).tobytes())
    if isinstance(dataset, ArrayDataset):
        digest.update(np.ascontiguousarray(dataset.images[ids]).data)
    elif isinstance(dataset, FileDataset):
        for name in (dataset.files[index] for index in ids.tolist()):
            try:
                status = os.stat(dataset.folder / name)
                state = f"{status.st_size} {status.st_mtime_ns}"
            except OSError as error:
                state = str(error.errno)
            digest.update(os.fsencode(name) + b"\0" + state.encode() + b"\0")
    else:
        digest.update(dataset.fingerprint().encode())
    return digest.hexdigest()


def _digest(features: Tensor, ids: Ids) -> str:
    digest = hashlib.sha256(features.contiguous().numpy().data)
    digest.update(np.ascontiguousarray(ids).data)
    return digest.hexdigest()
