"""The run directory: the path of every file a run writes, and the lock against a second run."""

import contextlib
import os
from pathlib import Path

from snclr.errors import UserError, first_names
from snclr.io.atomic import discard, explain_unwritable, is_partial, remove_partial
from snclr.io.locking import FileLock

LOCK = ".snclr-run.lock"
"""Marks a run directory. It is never deleted: otherwise two runs could lock two files of the same name."""
EVALUATION_OUTPUTS = ("finetune-*", "detect-*")
"""Image lists, detectors and checkpoints of fine-tuning and detection."""


class RunDir(contextlib.AbstractContextManager["RunDir"]):
    """The paths of a run directory. `create` makes and locks one for writing; `open_run` checks one for reading.

    The constructor does not touch the disk.

    >>> RunDir("runs/a").metrics.as_posix()
    'runs/a/metrics.jsonl'
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.lock = FileLock(self.path / LOCK)
        self.checkpoints = self.path / "checkpoints"
        self.encoders = self.path / "encoders"
        self.encoder_weights = self.path / "encoder.safetensors"
        self.encoder_config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.log = self.path / "train.log"
        self.sessions = self.path / "sessions.jsonl"
        self.skipped = self.path / "skipped.jsonl"
        self.results = self.path / "results.jsonl"
        self.figures = self.path / "figures"
        self.report = self.path / "report.html"
        self.explore = self.path / "explore"
        self.runs_report = self.path / "report-runs.html"
        self.export = self.path / "export"
        self.nonfinite = self.path / "nonfinite.json"
        self.evaluation = self.path / "evaluation"
        self.config = self.path / "config.yaml"

    def outputs(self) -> list[Path]:
        """Return the existing outputs of the run, in the order in which to delete them.

        Checkpoints come first: a directory whose deletion was interrupted must not be resumed from.
        """
        files = [path for path in vars(self).values() if isinstance(path, Path) and path != self.path]
        files += [path for pattern in EVALUATION_OUTPUTS for path in self.path.glob(pattern)]
        return [path for path in files if os.path.lexists(path)]

    def has_checkpoints(self) -> bool:
        """Whether a checkpoint was saved, intact or damaged."""
        return any(self.checkpoints.glob("step-*"))

    @classmethod
    def create(cls, path: Path | str, *, resume: bool = False, overwrite: bool = False) -> "RunDir":
        """Make the directory, or take over an existing one, and lock it until `close`.

        `resume` allows an existing run, `overwrite` deletes the outputs of one and no other files.
        """
        run = cls(path)
        # First refuse what is not a run, before a lock file is written into it. Whether a run may be resumed or
        # replaced is checked below, once it is locked.
        run.check_free(resume=resume, overwrite=True)
        with explain_unwritable(run.path, "choose another --out"):
            run.path.mkdir(parents=True, exist_ok=True)
            free = run.lock.acquire()
        if not free:
            raise run.in_use()
        try:
            run.check_free(resume=resume, overwrite=overwrite)
            for folder in (run.path, run.tensorboard, run.encoders):  # `format` cleans the folder of the checkpoints
                for entry in [entry for entry in folder.glob(".*") if is_partial(entry)]:
                    remove_partial(entry)
            for output in run.outputs() if overwrite else []:
                discard(output)
        except BaseException:
            run.close()
            raise
        return run

    def looks_like_run(self) -> bool:
        """Whether snclr wrote the directory: it has the lock file, or (a copy) a config and training output."""
        trained = self.checkpoints.is_dir() or self.metrics.is_file()
        return self.lock.path.is_file() or (self.config.is_file() and trained)

    def close(self) -> None:
        """Release the lock."""
        self.lock.release()

    def __exit__(self, *error: object) -> None:
        self.close()

    def in_use(self) -> UserError:
        """Return the error for a run directory whose lock another process holds."""
        return UserError(
            f"{self.path} is in use by a running job: {self.lock.holder()}."
            " Wait for it, stop it, or choose another --out."
        )

    def check_free(self, *, resume: bool, overwrite: bool) -> None:
        """Raise a UserError for a file, for other content than a run, and for a run without `resume` or `overwrite`."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file. Choose a directory as --out; it is created if it does not exist.")
        paths = self.path.iterdir() if self.path.exists() else ()
        entries = sorted(path.name for path in paths if path.name != LOCK and not is_partial(path))
        if entries and not self.looks_like_run():
            raise UserError(
                f"{self.path} is not empty and not a run of snclr (it contains {first_names(map(repr, entries))})."
                " Nothing was changed. Choose a new or empty directory as --out."
            )
        if entries and not (resume or overwrite):
            raise UserError(
                f"{self.path} already contains a run. Continue it with --resume, replace it with --overwrite, or"
                " choose another --out."
            )


def no_run_to_resume(path: Path | str) -> UserError:
    """Return the error for a resume without a run and without data to start one."""
    return UserError(
        f"there is no run to resume in {path}{similar_run(path)}. Give the --out of a run, or add --data to start a new"
        " one."
    )


def similar_run(path: Path | str) -> str:
    """Return " (did you mean 'x'?)" for the closest run in the same folder, or in its `runs`; or ""."""
    import difflib

    path = Path(path)
    for folder in (path.parent, path.parent / "runs"):
        if close := difflib.get_close_matches(path.name, _runs_in(folder), n=1):
            return f" (did you mean {str(folder / close[0])!r}?)"
    return ""


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a folder."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else ()
    return [entry.name for entry in entries if RunDir(entry).looks_like_run()]


def open_run(path: Path | str) -> RunDir:
    """Return the run at `path` for reading, without a lock; raise a UserError if it is not a run."""
    run = RunDir(path)
    if run.path.is_file() and RunDir(run.path.parent).looks_like_run():
        raise UserError(f"{run.path} is a file of a run. Give the run directory: {run.path.parent}")
    if run.path.is_file():
        raise UserError(f"{run.path} is a file, not a run directory. Give the run directory (--out of snclr pretrain).")
    if not run.path.is_dir():
        raise UserError(f"there is no run directory {run.path}{similar_run(path)}. Give the --out of snclr pretrain.")
    if not run.looks_like_run() and (names := _runs_in(run.path)):
        raise UserError(f"{run.path} is a folder of runs. Give one of them: {first_names(names)}.")
    if not run.looks_like_run() and not (run.encoder_weights.is_file() and run.encoder_config.is_file()):
        raise UserError(
            f"{run.path} is not a run of snclr: it has neither a config with checkpoints or metrics, nor an encoder."
            " Give the --out of snclr pretrain."
        )
    return run
