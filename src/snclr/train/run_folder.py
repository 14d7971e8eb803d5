"""What a run leaves on disk: all the names in one place, and the lock against a second run."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from snclr.durable import FileLock, discard, is_partial, remove_partial, write_atomic
from snclr.errors import UserError

__all__ = ["RunFolder", "open_run", "write_atomic"]

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
ENCODER_WEIGHTS = "encoder.safetensors"
ENCODER_CONFIG = "config.json"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
LOG = "train.log"
SKIPPED = "skipped.jsonl"
RESULTS = "results.jsonl"
FIGURES = "figures"
REPORT = "report.html"
EXPORT = "export"
NONFINITE = "nonfinite.json"
EVALUATION = "evaluation"
LOCK = ".snclr-run.lock"
"""Also the mark of a run folder. Never deleted: two runs could otherwise lock two different files of one name."""

CONTENTS = (  # checkpoints first: a folder whose deletion was cut short must not be resumed from
    *(CHECKPOINTS, ENCODER_WEIGHTS, ENCODER_CONFIG, METRICS, TENSORBOARD, LOG, SKIPPED, RESULTS, FIGURES, REPORT),
    *(EXPORT, NONFINITE, EVALUATION, CONFIG),
)
"""Every name a run writes. `overwrite` deletes these, and what `OF_EVALUATIONS` match, and nothing else."""
OF_EVALUATIONS = ("finetune-*", "detect-*")
"""What fine-tuning and detection leave in the folder: lists of images, detectors, checkpoints of interrupted ones."""


class RunFolder:
    """One run's folder, as paths. `create` makes and locks one for writing; `open_run` checks one for reading.

    The bare constructor touches nothing: ranks other than the first use it to know the names.

    >>> RunFolder("runs/a").metrics.as_posix()
    'runs/a/metrics.jsonl'
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / CONFIG
        self.checkpoints = self.path / CHECKPOINTS
        self.encoder_weights = self.path / ENCODER_WEIGHTS
        self.encoder_config = self.path / ENCODER_CONFIG
        self.metrics = self.path / METRICS
        self.tensorboard = self.path / TENSORBOARD
        self.log = self.path / LOG
        self.skipped = self.path / SKIPPED
        self.results = self.path / RESULTS
        self.figures = self.path / FIGURES
        self.report = self.path / REPORT
        self.export = self.path / EXPORT
        self.nonfinite = self.path / NONFINITE
        self.evaluation = self.path / EVALUATION
        self.lock = FileLock(self.path / LOCK)

    def has_checkpoints(self) -> bool:
        """Whether anything was ever saved, readable or not."""
        return any(self.checkpoints.glob("step-*"))

    @classmethod
    def create(
        cls, path: Path | str, *, resume: bool = False, overwrite: bool = False, wait_seconds: float = 0.0
    ) -> RunFolder:
        """Make (or take over) the folder and lock it until `close`; `resume` on a missing or empty folder starts anew.

        `overwrite` deletes the files a run writes and leaves any other alone. `wait_seconds` is how long to wait for
        a run that is just ending.
        """
        if resume and overwrite:
            raise UserError(
                "--resume and --overwrite were both given; choose one: go on with the run, or start it anew"
            )
        run = cls(path)
        run._refuse_foreign()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            free = run.lock.acquire(wait_seconds)
        except OSError as error:
            raise UserError(f"cannot write in {run.path} ({error.strerror}); choose another --out folder") from error
        if not free:
            raise UserError(
                f"{run.path} is in use by a run that is still alive: {run.lock.holder()}."
                " Wait for it, stop it, or choose another --out folder."
            )
        try:
            if not (resume or overwrite) and run._entries():
                raise UserError(
                    f"{run.path} already holds a run. Go on with it by --resume, delete it and start anew by"
                    " --overwrite, or choose another --out folder."
                )
            run.lock.describe_holder()
            run._clear(everything=overwrite)
        except BaseException:
            run.close()
            raise
        return run

    def looks_like_run(self) -> bool:
        """Whether this is a folder that we wrote (its lock file is there, or a copy's config with training output)."""
        trained = self.checkpoints.is_dir() or self.metrics.is_file()
        return self.lock.path.is_file() or (self.config.is_file() and trained)

    def close(self) -> None:
        """Unlock; the files stay."""
        self.lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entries(self) -> list[str]:
        if not self.path.exists():
            return []
        return sorted(p.name for p in self.path.iterdir() if p.name != LOCK and not is_partial(p))

    def _refuse_foreign(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; --out needs a folder, which is made where it does not exist")
        entries = self._entries()
        if entries and not self.looks_like_run():
            raise UserError(
                f"{self.path} is not empty and not a run of snclr (it holds {', '.join(map(repr, entries[:3]))}"
                f"{' …' if len(entries) > 3 else ''}): nothing was touched. Choose a new or empty --out folder."
            )

    def _clear(self, *, everything: bool) -> None:
        for path in list(self.path.iterdir()):
            if is_partial(path):
                remove_partial(path)
        if everything:
            found = [path for pattern in OF_EVALUATIONS for path in self.path.glob(pattern)]
            for path in [*(self.path / name for name in CONTENTS), *found]:
                if os.path.lexists(path):
                    discard(path)


def open_run(path: Path | str) -> RunFolder:
    """The run at `path`, for reading (no lock taken); UserError where there is none."""
    run = RunFolder(path)
    if not run.path.is_dir():
        raise UserError(f"there is no run folder {run.path}: give the folder that was the --out of snclr pretrain")
    if not run.looks_like_run() and not (run.encoder_weights.is_file() and run.encoder_config.is_file()):
        raise UserError(
            f"{run.path} is not a run of snclr: it has neither {CONFIG} with {CHECKPOINTS}/ or {METRICS}, nor"
            f" {ENCODER_WEIGHTS} with {ENCODER_CONFIG}. Give the folder that was the --out of snclr pretrain."
        )
    return run
