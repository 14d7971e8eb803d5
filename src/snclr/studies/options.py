"""The options that `compare` and `ablate` share."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from snclr.data.info import dataset_name
from snclr.errors import UserError
from snclr.runtime.settings import current_name
from snclr.studies.records import Records
from snclr.studies.runs import ASSIGNED, Run
from snclr.train.config import REMOVED_SETTINGS, read_config


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Seeds, evaluation and output of a study.

    Args:
        seeds: A number of seeds, or a list such as 0,4,7.
        out: Directory for the runs, the table and the figures.
        results: Directory for the record of each run (default: OUT/results).
        eval_data: Labeled images to evaluate on (default: the training data).
        test: Separate test images (default: the dataset's test split, or a held-out fifth of the images).
        k: Neighbors that vote in the kNN evaluation; one number keeps tables comparable. auto: as in snclr knn, the
            size of the smallest class, at least 10 and at most 200.
        jobs: Number of runs in parallel; with more than one, timings are unreliable.
        keep_runs: Keep the checkpoints of finished runs, not only encoder and metrics.
        dry_run: Only list the runs and estimate their duration.
        config: File with settings, e.g. the config.yaml of a run; it overrides the recipe, flags override it.
        quiet: Print no progress.
    """

    seeds: int | str | Sequence[int] = 3
    out: str | Path
    results: str | Path | None = None
    eval_data: str | None = None
    test: str | None = None
    k: int | Literal["auto"] = 200
    jobs: int = 1
    keep_runs: bool = False
    dry_run: bool = False
    config: str | Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        parse_seeds(self.seeds)  # raises UserError
        if self.jobs < 1:
            raise UserError(f"--jobs must be at least 1, not {self.jobs}")
        if self.k != "auto" and self.k < 1:
            raise UserError(f"--k must be auto or at least 1, not {self.k}")

    @classmethod
    def split(cls, keywords: Mapping[str, Any]) -> "tuple[StudyOptions, dict[str, Any]]":
        """Separate the options from the settings of the runs, and add the settings of the file `config`."""
        names = {field.name for field in fields(cls)}
        keywords = {current_name(name): value for name, value in keywords.items()}
        options = cls(**{name: value for name, value in keywords.items() if name in names})
        saved = {} if options.config is None else read_config(Path(options.config))
        ignored = {*REMOVED_SETTINGS, *ASSIGNED, "out"}
        settings = {name: value for name, value in saved.items() if value is not None and name not in ignored}
        return options, {**settings, **{name: value for name, value in keywords.items() if name not in names}}

    @property
    def seed_list(self) -> list[int]:
        """The seeds as a list."""
        return parse_seeds(self.seeds)

    @property
    def records(self) -> Records:
        """The records of finished runs."""
        return Records(self.results or Path(self.out) / "results")

    def recorded(self) -> dict[str, Any]:
        """Return the command-line options that a result depends on; None for a default that is not repeated."""
        k = None if self.k == StudyOptions.k else self.k
        return {"seeds": self.seeds, "eval_data": self.eval_data, "test": self.test, "k": k}

    def run_dir(self, run: Run) -> Path:
        """Return the run directory, as `snclr pretrain` writes it."""
        return Path(self.out) / "runs" / run.folder

    def side_file(self, run: Run, suffix: str) -> Path:
        """Return the path of a file about a run, next to its run directory."""
        return Path(self.out) / "runs" / f"{Path(run.record_name).stem}.{suffix}"

    def job(self, run: Run) -> dict[str, Any]:
        """Return the input of the process that trains a run, as JSON values."""
        folder = str(self.run_dir(run))
        return {
            **asdict(run), "key": run.key, "data": {"name": dataset_name(run.given["data"]), "fingerprint": run.data},
            "folder": folder, "attempts": f"{folder}.attempts.jsonl", "keep_runs": self.keep_runs, "jobs": self.jobs,
            "record": str(self.records.runs / run.record_name),
        }  # fmt: skip


def parse_seeds(seeds: int | str | Sequence[int]) -> list[int]:
    """Parse seeds: `3` gives 0, 1, 2; `0,4,7` is a list; `4,` is seed 4 alone.

    >>> parse_seeds("3"), parse_seeds("4,"), parse_seeds([1, 2])
    ([0, 1, 2], [4], [1, 2])
    """
    try:
        if isinstance(seeds, str):
            seeds = [int(part) for part in seeds.split(",") if part.strip()] if "," in seeds else int(seeds)
        parsed = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    except ValueError:
        raise UserError(f"--seeds takes a number of seeds (3) or a list (0,4,7), not {seeds!r}") from None
    if not parsed:
        raise UserError(
            f"--seeds {seeds!r} gives no seed. Give a number of seeds (3) or a list (0,4,7; seed 0 alone is 0,)"
        )
    if min(parsed) < 0 or len(set(parsed)) < len(parsed):
        raise UserError(f"--seeds {seeds!r}: the seeds of a list must be different and not negative")
    return parsed
