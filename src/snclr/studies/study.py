"""The design of a study: rows × seeds, with equal settings except for what is compared."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from snclr.data.info import DatasetInfo, dataset_name
from snclr.data.validation_split import FIT
from snclr.errors import UserError
from snclr.methods import METHODS
from snclr.studies import conditions
from snclr.studies.options import StudyOptions
from snclr.studies.runs import ASSIGNED, Evaluation, Row, Run, given_settings, make_run
from snclr.train.config import resolve, settings_for_method


@dataclass(frozen=True)
class Study:
    """What is compared. `settings` apply to all rows; with `axes`, each row is tuned over them."""

    options: StudyOptions
    name: str
    title: str
    rows: list[Row]
    settings: dict[str, Any]
    evaluation: Evaluation
    data: DatasetInfo
    command: str
    """Command line that repeats the study."""
    rule: str = ""
    """How the values of an ablation were scaled to the dataset."""
    axes: list[conditions.Axis] = field(default_factory=list)
    tune_seed: int = conditions.TUNE_SEED
    fit: DatasetInfo | None = None
    """The images that tuning runs train on: without the validation images. None: all of `data`."""
    budget: conditions.Budget = field(default_factory=conditions.Budget)
    notes: list[str] = field(default_factory=list)
    """Remarks for the protocol."""

    def __post_init__(self) -> None:
        name = self.name
        if not name.isprintable() or name[:1] in ("", ".") or set(name) & set("/\\") or len(name.encode()) > 150:
            raise UserError(f"--name {name!r} is not a valid file name. Use letters, digits, spaces and dashes.")
        used = range(self.tune_seed, self.tune_seed + max(1, conditions.count_trials(self.axes)))
        if both := [seed for seed in self.options.seed_list if seed in used]:
            raise UserError(f"seed {both[0]} is used for tuning. Give other --seeds or another --tune-seed.")
        if self.evaluation.kind == "cost" and self.budget != conditions.Budget():
            raise UserError(f"--budget {self.budget} is for trained rows; a study of costs has none. Leave it out.")

    def steps(self, run: Run) -> int:
        """Return the number of training steps of a run."""
        if run.evaluation.untrained:
            return 0
        if run.evaluation.kind == "cost":
            return run.evaluation.steps
        return int(run.settings["epochs"]) * self._steps_per_epoch(run)

    def _steps_per_epoch(self, run: Run) -> int:
        from snclr.data.sampler import steps_per_epoch

        images = self.fit.images if self.fit is not None and run.data == self.fit.fingerprint else self.data.images
        return steps_per_epoch(images, int(run.settings["batch_size"]))

    def images(self, run: Run) -> int:
        """Return the number of images in the batches of a run. Unlike `images seen`, it does not count views."""
        return self.steps(run) * int(run.settings["batch_size"])

    def calibration_runs(self) -> list[Run]:
        """Return the runs that measure the seconds per step of each trained row, if the budget is in seconds."""
        if self.budget.kind != "seconds":
            return []
        cost = Evaluation(kind="cost", steps=conditions.CALIBRATION_STEPS)
        return [self._run(row, self.tune_seed, cost) for row in self.rows if not row.untrained]

    def equal_epochs(self, seconds: Mapping[str, float]) -> dict[str, int]:
        """Return the epochs of each row that use up the budget; {} if all rows have the same epochs.

        `seconds` are those of a step by row. Without an amount, the budget is what `--epochs` amount to: in images with
        two full views, in seconds for the first row.
        """
        kind, amount = self.budget.kind, self.budget.amount
        runs = [self._run(row, self.tune_seed, self.evaluation) for row in self.rows if not row.untrained]
        if (kind == "steps" and amount is None) or not runs:
            return {}
        per_step = dict(seconds)
        if kind != "seconds":
            images = kind == "images"
            per_step = {run.label: conditions.images_seen_per_step(run.given) if images else 1.0 for run in runs}
        if amount is None:
            first = runs[0]
            if first.label not in per_step:
                return {}  # its calibration failed, so the budget is not known
            each = per_step[first.label] if kind == "seconds" else conditions.USUAL_VIEWS * first.settings["batch_size"]
            amount = each * self.steps(first)
        return {
            run.label: conditions.nearest_epochs(amount, per_step[run.label], self._steps_per_epoch(run))
            for run in runs
            if run.label in per_step
        }

    def own_epochs(self, row: Row) -> int:
        """Return the epochs of a row by its settings, regardless of the budget."""
        return int(self._run(row, self.tune_seed, self.evaluation).settings["epochs"])

    def tuning_runs(self, epochs: Mapping[str, int]) -> dict[str, list[tuple[dict[str, Any], Run]]]:
        """Return the runs that choose the settings of each row, by kNN on validation images, with what each tries."""
        evaluation = replace(self.evaluation, kind="validation", measures=Evaluation.measures)
        found = {}
        for row in self.rows:
            resolved = self._run(row, self.tune_seed, self.evaluation).settings
            trials = conditions.row_trials(row, self.axes, resolved, self.tune_seed)
            found[row.label] = [(tried, self._run(row, seed, evaluation, epochs, tried)) for tried, seed in trials]
        return found

    def runs(self, chosen: Mapping[str, Mapping[str, Any]], epochs: Mapping[str, int]) -> list[Run]:
        """Return the runs of the table, seed by seed, so that an interrupted study has complete seeds.

        A row that could not be tuned or calibrated has none.
        """

        def is_ready(row: Row) -> bool:
            return (not self.axes or row.label in chosen) and (self.budget.kind != "seconds" or row.label in epochs)

        rows = [row for row in self.rows if row.untrained or is_ready(row)]
        return [
            self._run(row, seed, self.evaluation, epochs, chosen.get(row.label, {}))
            for seed in self.options.seed_list
            for row in rows
        ]

    def _run(
        self, row: Row, seed: int, evaluation: Evaluation, epochs: Mapping[str, int] | None = None,
        tried: Mapping[str, Any] | None = None,
    ) -> Run:  # fmt: skip
        """Return a run of a row; one that is evaluated on validation images does not train on them."""
        settings, data = self.settings, self.data
        if self.fit is not None and evaluation.kind == "validation":
            settings, data = {**settings, "data": settings["data"] + FIT}, self.fit
        overrides = {"epochs": epochs[row.label]} if epochs and row.label in epochs else {}
        overrides |= tried or {}
        return make_run(row, seed, settings, data=data.fingerprint, evaluation=evaluation, **overrides)


def check_settings(
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    axes: Sequence[conditions.Axis] = (),
    *,
    holds_out_validation: bool = True,
) -> None:
    """Raise UserError for settings that are invalid, unused or assigned by the study, and rows that cannot be tuned.

    `holds_out_validation`: whether tuning runs do not train on the validation images.
    """
    for name, instead in ASSIGNED.items():
        if name in settings:
            raise UserError(f"--{name} cannot be set in a comparison: {instead}")
    methods = list(dict.fromkeys(row.settings["method"] for row in rows))
    used = used_settings(settings, rows)
    if unused := [name for name in settings if name not in used]:
        raise UserError(f"none of the methods ({', '.join(methods)}) uses {unused[0]}; leave the flag out")
    for row in rows:
        method = row.settings["method"]
        conditions.row_trials(row, axes, resolve(given_settings(row, settings)).to_dict(), 0)
        if axes and METHODS[method].needs_labels and not holds_out_validation:
            raise UserError(
                f"--tune cannot be used with the method {method} here: it would train on the labels of the validation"
                " images. Give data with its own test split and no --eval-data, or compare it in a separate command."
            )


def used_settings(settings: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Leave out the settings that none of the rows uses."""
    methods = {row.settings["method"] for row in rows}
    used = {name for method in methods for name in settings_for_method(method, settings)}
    return {name: value for name, value in settings.items() if name in used}


def command_line(command: str, given: Mapping[str, Any]) -> str:
    """Return the command that makes a study, to be stored with its results; paths are replaced by dataset names.

    >>> command_line("compare", {"methods": "snclr,byol", "seeds": 3, "data": "/somewhere/photos", "sincos": False})
    'snclr compare --methods snclr,byol --seeds 3 --data photos --no-sincos --out OUT'
    """
    arguments = ["snclr", command]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            arguments += [argument for item in value for argument in (flag, item)]
        elif isinstance(value, (list, tuple)):  # "4," is the list of one seed, "4" a number of seeds
            arguments += [flag, ",".join(map(str, value)) + "," * (len(value) == 1)] if value else []
        elif value is not None:
            is_path = name in ("data", "eval_data", "test", "init_from", "coco")
            arguments += [flag, dataset_name(str(value)) if is_path else str(value)]
    return shlex.join([*arguments, "--out", "OUT"])
