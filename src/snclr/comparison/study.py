"""A study: entries × seeds, all equal but for what is compared. It is planned, run, and written down as one table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.comparison.plan import TUNE_SEED, Entry, Evaluation, Run, data_name, make_run
from snclr.comparison.runner import Outcome, Place, execute
from snclr.comparison.store import SCHEMA
from snclr.comparison.worker import VALIDATION
from snclr.errors import UserError
from snclr.methods import METHODS

if TYPE_CHECKING:
    from snclr.data.decode import Picture
    from snclr.data.sources import Source


@dataclass(frozen=True)
class Data:
    """What a study needs to know of its images before it starts."""

    name: str
    images: int
    fingerprint: str
    classes: int | None
    same_class: float | None
    """The chance that two random labelled images are of one class."""


@dataclass(frozen=True)
class Study:
    """What is compared. `common` are the settings of all rows; `grid` the overrides tried for each to tune it."""

    name: str
    title: str
    entries: list[Entry]
    seeds: list[int]
    common: dict[str, Any]
    evaluation: Evaluation
    data: Data
    command: str = ""
    rule: str = ""
    grid: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def images_of(self, run: Run) -> int:
        """The images a run trains on in all."""
        from snclr.data.order import steps_per_epoch

        if run.evaluation.kind == "cost":
            return run.evaluation.steps * int(run.settings["batch_size"])
        batch = int(run.settings["batch_size"])
        return int(run.settings["epochs"]) * steps_per_epoch(self.data.images, batch) * batch

    def trials(self) -> list[Run]:
        """The runs that choose a setting for each row: the same grid, a seed of their own, never the test images."""
        how = replace(self.evaluation, kind="validation")
        return [self._run(entry, TUNE_SEED, how, **choice) for entry in self.entries for choice in self.grid]

    def runs(self, chosen: Mapping[str, Mapping[str, Any]]) -> list[Run]:
        """The runs of the table, seed by seed, so that a study that is cut short has whole seeds."""
        known = [entry for entry in self.entries if not self.grid or entry.label in chosen]
        return [
            self._run(entry, seed, self.evaluation, **chosen.get(entry.label, {}))
            for seed in self.seeds
            for entry in known
        ]

    def _run(self, entry: Entry, seed: int, evaluation: Evaluation, **more: Any) -> Run:
        return make_run(entry, seed, self.common, data=self.data.fingerprint, evaluation=evaluation, **more)


def look_at_data(data: str) -> Data:
    """Open the training images once, for their number, classes and digest."""
    import numpy as np

    from snclr.data.sources import open_source

    if not data:
        raise UserError("data is missing: give --data (the images to train on)")
    source = open_source(data, split="train", download=True)
    labels = None if source.labels is None else source.labels[source.labels >= 0]
    if labels is None or not len(labels):
        return Data(data_name(data), len(source), source.fingerprint(), None, None)
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return Data(data_name(data), len(source), source.fingerprint(), len(shares), float((shares**2).sum()))


def look_at_test(evaluation: Evaluation, data: Data, given: str, entries: Sequence[Entry]) -> tuple[Evaluation, str]:
    """Check before hours of training that there is something to measure on; the evaluation, and a remark."""
    from snclr.data.splits import open_splits
    from snclr.evaluate.scoring import match_labels

    train, test, _ = open_splits(evaluation.data or given, evaluation.test)
    match_labels(train, test)
    prints = train.fingerprint() + test.fingerprint()
    remark = _seen(evaluation, data, given, train, test)
    taught = [m for m in (e.settings["method"] for e in entries) if m in METHODS and METHODS[m].needs_labels]
    if remark and taught:
        raise UserError(
            f"the method {taught[0]} would learn from the labels of the test images: {remark.partition(':')[0]}, and"
            f" {given} is trained on with all its labels. Give a set with train/ and test/ folders, or leave"
            f" {taught[0]} out."
        )
    return replace(evaluation, fingerprint=prints), remark


def _seen(evaluation: Evaluation, data: Data, given: str, train: Source, test: Source) -> str:
    """A remark where the test images, or some of them, are trained on; else nothing.

    Asked of the images themselves: --eval-data may name the very set that --data does, by another way or a copy.
    """
    from snclr.data.sources import open_source

    held_out = "the data has no test part of its own: the test images were seen in pre-training, without their labels"
    if evaluation.data is None and evaluation.test is None:
        return held_out if len(train) < data.images else ""
    trained_on = open_source(given, split="train", download=True)
    if evaluation.test is None:
        whole = open_source(evaluation.data or given, split="train", download=True)
        if len(train) < len(whole) and _is_copy(whole, trained_on):
            return held_out
    if _share_images(test, trained_on) or _is_copy(test, trained_on):
        return "the test images are among those of --data: they were seen in pre-training, without their labels"
    return ""


def _share_images(one: Source, other: Source) -> bool:
    """Whether any image of one is an image of the other: the same file, or a place in the same set."""
    from snclr.evaluate.queries import same_images

    ours, theirs = same_images(one, other)
    return bool(set(ours.tolist()) & set(theirs.tolist()))


def _is_copy(one: Source, other: Source, sample: int = 8) -> bool:
    """Whether two sources are one set: by their digests and, since a folder's is of names alone, by some images."""
    import numpy as np

    if len(one) != len(other) or one.fingerprint() != other.fingerprint():
        return False
    places = sorted({len(one) * i // sample for i in range(sample)})
    return all(np.array_equal(_pixels(one, i), _pixels(other, i)) for i in places)


def _pixels(source: Source, index: int) -> Picture:
    import numpy as np

    from snclr.data.decode import BadImage

    try:
        return source.load(index)
    except BadImage:
        return np.empty((0, 0, 3), np.uint8)


def conduct(study: Study, place: Place) -> tuple[dict[str, Any], Outcome]:
    """Tune where asked for, make the runs, and write the study down; what it says, and what became of the runs."""
    chosen: dict[str, dict[str, Any]] = {}
    if study.grid:
        trials = study.trials()
        tried = execute(trials, place, study.images_of)
        if tried.stopped:
            return {}, tried
        chosen = _choose(study, trials, tried)
    runs = study.runs(chosen)
    outcome = execute(runs, place, study.images_of)
    lost = [entry.label for entry in study.entries if study.grid and entry.label not in chosen]
    outcome.failed |= dict.fromkeys(lost, "no run of its grid succeeded")
    said = describe(study, runs, chosen)
    place.records.write_study(said)
    return said, outcome


def _choose(study: Study, trials: list[Run], tried: Outcome) -> dict[str, dict[str, Any]]:
    """For each row the overrides with the best kNN on the held-out part; the first of equals."""
    chosen: dict[str, dict[str, Any]] = {}
    best: dict[str, float] = {}
    for number, run in enumerate(trials):
        record = tried.records.get(run.key)
        if record is not None and record["numbers"]["knn"] > best.get(run.label, -1.0):
            best[run.label] = record["numbers"]["knn"]
            chosen[run.label] = study.grid[number % len(study.grid)]
    return chosen


def describe(study: Study, runs: Sequence[Run], chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The study as it is kept: which record belongs to which row and seed, and all the words of the table."""
    rows = []
    for entry in study.entries:
        own = {run.seed: run for run in runs if run.label == entry.label}
        rows.append(
            {
                "label": entry.label,
                "settings": entry.settings,
                "tuned": dict(chosen.get(entry.label, {})),
                "records": {str(seed): run.record for seed, run in own.items()},
            }
        )
    return {
        "schema": SCHEMA,
        "name": study.name,
        "title": study.title,
        "kind": study.evaluation.kind,
        "command": study.command,
        "rule": study.rule,
        "seeds": study.seeds,
        "rows": rows,
        "protocol": protocol(study, runs),
        "notes": study.notes,
    }


def protocol(study: Study, runs: Sequence[Run]) -> list[str]:
    """What is equal for all rows, in what they differ, and how much each was tuned."""
    if not runs:
        return []
    from snclr.data.order import steps_per_epoch

    s = runs[0].settings
    steps = steps_per_epoch(study.data.images, int(s["batch_size"]))
    trained = f"{study.evaluation.steps} steps" if study.evaluation.kind == "cost" else f"{s['epochs']} epochs"
    if study.evaluation.kind != "cost":
        trained += f" ({s['epochs'] * steps:,} steps)"
    lines = [
        f"equal for all rows: {s['encoder']} at {s['image_size']} px, {study.data.images:,} images of"
        f" {study.data.name}, views {s['views']}, batch {s['batch_size']}, {trained};"
        f" seeds {', '.join(map(str, study.seeds))}"
    ]
    if study.grid:
        lines.append(
            f"equal tuning effort: for each row the same {len(study.grid)} trials ({_words(study.grid)}), one run each"
            f" with seed {TUNE_SEED}, chosen by kNN on {VALIDATION:.0%} of each training class, held out; the test"
            " images took no part in it"
        )
    elif study.evaluation.kind == "test":
        lines.append("equal tuning effort: none for any row; each method at its stated defaults, with what is above")
    if varied := _differences(runs):
        lines.append("rows differ in: " + "; ".join(f"{label}: {text}" for label, text in varied.items()))
    else:
        same = ", ".join(f"{name} {s[name]:g}" if name != "optimizer" else s[name] for name in ("optimizer", "lr"))
        lines.append(f"optimiser and base learning rate of all: {same}")
    return lines


def _differences(runs: Sequence[Run]) -> dict[str, str]:
    """For each row the settings that are not the same in all rows; of a method's later rows, what is new in them."""
    rows = {run.label: run.settings for run in runs}
    known = dict.fromkeys(name for row in rows.values() for name in row if name not in ("seed", "method"))
    names = [name for name in known if len({repr(row.get(name)) for row in rows.values()}) > 1]
    found: dict[str, str] = {}
    first: dict[Any, str] = {}
    for label, row in rows.items():
        like = first.setdefault(row["method"], label)
        new = [n for n in names if n in row and (like == label or repr(row[n]) != repr(rows[like].get(n)))]
        words = ", ".join(f"{n}={row[n]}" for n in new)
        found[label] = words if like == label or not words else f"as {like}, but {words}"
    return {label: text for label, text in found.items() if text}


def _words(grid: Sequence[Mapping[str, Any]]) -> str:
    names = list(grid[0])
    return ", ".join(f"{n} in {{{', '.join(str(v) for v in dict.fromkeys(g[n] for g in grid))}}}" for n in names)


def estimate(study: Study, place: Place) -> dict[str, Any]:
    """What a study would take: its runs, which are finished, and the seconds of the others."""
    from snclr.comparison.cost import WARM_UP

    trials = study.trials()
    runs = trials + study.runs({entry.label: study.grid[0] if study.grid else {} for entry in study.entries})
    found = {run.key: place.records.find(run) for run in runs}
    pending = [run for run in runs if found[run.key] is None]
    rates = [r["cost"]["seconds"] / study.images_of(run) for run in runs if (r := found[run.key])]
    how = "from the finished runs"
    if not rates and pending:
        how = f"from {WARM_UP + 5} steps of {pending[0].label}; other rows may take more or less"
        rates = _measured_rate(pending[0], place)
    seconds = sum(map(study.images_of, pending)) * sum(rates) / len(rates) / place.jobs if rates else 0.0
    return {
        "runs": [{"run": r.title, "folder": r.folder, "finished": found[r.key] is not None} for r in runs],
        "pending": len(pending),
        "seconds": seconds if rates else None,
        "how": how if rates else "not known: the trial steps failed",
        "tuning": len(trials),
    }


def _measured_rate(run: Run, place: Place) -> list[float]:
    """Seconds an image, from a few steps in a process of their own."""
    import tempfile

    from snclr.comparison.store import Records

    scratch = Path(tempfile.mkdtemp(prefix="snclr-dry-run-"))
    try:
        trial = replace(run, evaluation=Evaluation(kind="cost", steps=5))
        aside = Place(out=scratch, records=Records(scratch), quiet=True)
        record = execute([trial], aside, lambda _: 1).records.get(trial.key)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [record["numbers"]["seconds_per_step"] / run.settings["batch_size"]] if record else []
