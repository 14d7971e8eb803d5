"""Run the study "when do neighbors help": several methods, datasets and seeds, tuned with equal effort.

    python scripts/neighbor_study.py run --images DIR --work DIR     # several may run at once; each takes the next run
    python scripts/neighbor_study.py list                            # the runs and which of them are recorded

docs/results/neighbor-study.md states the protocol. A finished run is one line in results/neighbor-study.jsonl; a
stopped run starts again. The DIR of --images has the folders coil100, coil100-front, coil100-back, omniglot, digits,
mnist, fashion, cifar5-test, cifar5-small, cifar10/train and cifar10/test, and the file lite0.safetensors.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "neighbor-study.jsonl"

TUNING_SEED = 1_000_000
SEEDS = {"": range(8), "2": range(8, 16), "3": range(8, 16), "4": range(8, 16)}
"""Seeds of the tests of each round."""
SWEEP_SEEDS = range(3)
LEARNING_RATES = {"": (0.002, 0.006), "2": (0.006, 0.012), "3": (0.006, 0.012), "4": (0.003, 0.006, 0.012),
                  "5": (5e-4, 5e-5, 5e-6)}  # fmt: skip

COMMON: dict[str, Any] = {
    "recipe": "demo", "image_size": 32, "batch_size": 128, "weight_decay": 0.01, "warmup_epochs": 1,
    "queue_length": 4096, "neighbors": 30, "temperature": 0.1, "momentum": "auto", "workers": 0, "threads": 1,
    "keep_checkpoints": 1,
}  # fmt: skip

ROWS: dict[str, dict[str, Any]] = {
    "none": {"sides": "neither"},
    "soft": {},
    "soft-max": {"gamma": "max", "attention_temperature": 0.1},
    "hard": {"neighbor_weights": "hard"},
    "nnclr": {"method": "nnclr"},
    "simclr": {"method": "simclr"},
    "byol": {"method": "byol"},
}
UNTRAINED = "untrained"
"""Row of the weights that a run starts from."""
_SHARED: dict[str, Any] = {"momentum": 0, "predictor_layers": 0}
SHARED_ROWS = {f"{row}-shared": {**ROWS[row], **_SHARED} for row in ("none", "soft", "soft-max", "hard")}
"""Rows of round 3: one network for both views, without EMA and predictor."""
_MOMENTA = ({"momentum": "auto"}, {"momentum": 0.97}, {"momentum": 0.99})
_NEIGHBORS = ({"neighbors": 30}, {"neighbors": 5}, {"neighbors": 30, "momentum": 0.99})
_TEMPERATURES = ({"temperature": 0.1}, {"temperature": 0.05}, {"temperature": 0.2})
GRID: dict[str, tuple[dict[str, Any], ...]] = {
    "none": _MOMENTA, "soft": _NEIGHBORS, "soft-max": _NEIGHBORS, "hard": _NEIGHBORS, "nnclr": _TEMPERATURES,
    "simclr": _TEMPERATURES, "byol": _MOMENTA,
}  # fmt: skip
"""Second axis of the tuning grid: the same number of trials for every row."""
_COARSER = ({"temperature": 0.1}, {"temperature": 0.2}, {"temperature": 0.4})
GRID_2: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys([*ROWS, *SHARED_ROWS], _COARSER),
    "byol": ({"momentum": "auto"}, {"momentum": 0.9}, {"momentum": 0.8}),
}
"""The same for round 2, which starts from the settings chosen in round 1, and for rounds 3 and 4."""
ROUND_4: dict[str, Any] = {"neighbors": 10}
"""Settings from which the trials of round 4 start: K as in the sweep."""

UNTUNED: dict[str, Any] = {"lr": 0.006, "temperature": 0.2}
"""Settings of the runs without tuning."""


@dataclass(frozen=True)
class DataSet:
    """Images, views and metric of one dataset."""

    folder: str
    epochs: int
    settings: dict[str, Any]
    test: str | None = None
    """Folder of test images; None: few-label accuracy on the training images themselves."""
    labels: tuple[int, ...] = ()
    """Offsets of the labeled images in their class's series, for few-label accuracy with several labels."""
    held_out: str | None = None
    """Folder of the same classes that pre-training does not see; its images are the queries of few-label accuracy."""
    weights: str | None = None
    """File of the weights from which the encoder starts."""


_CROPS: dict[str, Any] = {"views": "crops", "crop_min": 0.5}
_CIFAR_VIEWS: dict[str, Any] = {"views": "cifar", "crop_min": 0.35}
_FROM_WEIGHTS: dict[str, Any] = {
    "views": "cifar", "crop_min": 0.35, "encoder": "tf_efficientnet_lite0", "stem": "auto", "image_size": 64,
    "batch_size": 64, "queue_length": 1024, "lr": 0.0005, "temperature": 0.2, "neighbors": 10,
}  # fmt: skip
DATA: dict[str, DataSet] = {
    "coil100": DataSet("coil100", 14, _CROPS, labels=(0, 90, 180, 270)),
    "coil100-sector": DataSet("coil100-front", 21, _CROPS, labels=(0, 60, 120, 180), held_out="coil100-back"),
    "omniglot": DataSet("omniglot", 20, _CROPS, labels=(0, 5, 10, 15)),
    "cifar5": DataSet("demo", 12, {"views": "cifar", "crop_min": 0.35}, test="cifar5-test"),
    "digits": DataSet("digits", 40, {**_CROPS, "queue_length": 1024}, labels=(0, 45, 90, 135)),
    "mnist": DataSet("mnist", 14, {**_CROPS, "queue_length": 2048}, labels=(0, 75, 150, 225)),
    "fashion": DataSet("fashion", 14, {**_CROPS, "queue_length": 2048}, labels=(0, 75, 150, 225)),
    "cifar5-imagenet": DataSet("cifar5-small", 4, _FROM_WEIGHTS, test="cifar5-test", weights="lite0.safetensors"),
    "cifar10": DataSet("cifar10/train", 20, {"views": "cifar", "crop_min": 0.35}, test="cifar10/test"),
}

EQUAL_CPU_EPOCHS = {
    "coil100": {"simclr": 21, "nnclr": 17, "byol": 17}, "cifar5": {"simclr": 17, "nnclr": 14, "byol": 14},
    "digits": {"simclr": 51},
}  # fmt: skip
"""Epochs that cost as many CPU seconds as `soft` has, by the first five seeds of round 1 (`digits`: by the sweep)."""


@dataclass(frozen=True)
class Run:
    """One training run and its evaluation."""

    stage: str
    """tune, test (tune2, test2 and so on: rounds 2 to 5), sweep, agreeing, ladder, cpu, sector, ablate, weights,
    gate or search."""
    data: str
    row: str
    seed: int
    epochs: int
    settings: dict[str, Any] = field(hash=False)

    @property
    def key(self) -> str:
        """Return the name of the run; equal settings have equal names."""
        own = ",".join(f"{name}={value}" for name, value in sorted(self.settings.items()))
        return f"{self.stage}/{self.data}/{self.row}/{own}/epochs={self.epochs}/seed={self.seed}"


# The runs.


def tuning_runs(
    data: str, row: str, round_: str = "", records: dict[str, dict[str, Any]] | None = None
) -> list[Run] | None:
    """Return the trials of a row: every learning rate with every value of the second axis, for half the epochs.

    None for round 2 while trials of round 1 are missing.
    """
    base = chosen_settings(data, row, records or {}) if round_ == "2" else dict(ROUND_4) if round_ == "4" else {}
    if base is None:
        return None
    grid, epochs = GRID_2 if round_ else GRID, DATA[data].epochs // 2
    return [
        Run(f"tune{round_}", data, row, TUNING_SEED, epochs, {**base, **second, "lr": lr})
        for lr in LEARNING_RATES[round_]
        for second in grid[row]
    ]


def chosen_settings(data: str, row: str, records: dict[str, dict[str, Any]], round_: str = "") -> dict[str, Any] | None:
    """Return the settings of the trial with the highest validation accuracy; None while trials are missing."""
    trials = tuning_runs(data, row, round_, records)
    if trials is None or any(run.key not in records for run in trials):
        return None
    return max(trials, key=lambda run: records[run.key]["validation"]).settings


def all_runs(records: dict[str, dict[str, Any]]) -> Iterator[Run]:
    """Yield the runs in the order in which they are needed; those that wait for trials are left out."""
    sweep = list(sweep_runs())
    yield from ladder_runs()
    for data in ("coil100", "cifar5", "omniglot"):
        yield from round_runs(data, "", records)
    yield from (run for run in [*sweep, *agreeing_runs()] if run.seed == 0)
    yield from ablation_runs(records)
    yield from sector_runs(records)
    for data in EQUAL_CPU_EPOCHS:
        yield from equal_cpu_runs(data, records)
    yield from weights_runs(records)
    yield from gate_runs()
    yield from search_runs()
    yield from [*sweep, *agreeing_runs()]
    for round_ in ("2", "3"):
        yield from round_runs("coil100", round_, records)
    yield from round_runs("digits", "4", records)
    yield from cifar10_runs()


def round_runs(data: str, round_: str, records: dict[str, dict[str, Any]]) -> Iterator[Run]:
    """Yield the trials of one round on one dataset, then its tests, seed by seed."""
    rows = SHARED_ROWS if round_ == "3" else ROWS
    for row in rows:
        yield from tuning_runs(data, row, round_, records) or ()
    for seed in SEEDS[round_]:
        for row in rows:
            if settings := chosen_settings(data, row, records, round_):
                yield Run(f"test{round_}", data, row, seed, DATA[data].epochs, settings)


def equal_cpu_runs(data: str, records: dict[str, dict[str, Any]]) -> Iterator[Run]:
    """Yield runs of the cheaper methods with as many epochs as `soft` has CPU seconds for."""
    round_ = "4" if data == "digits" else ""
    for seed in SEEDS[round_][:3]:
        for row, epochs in EQUAL_CPU_EPOCHS[data].items():
            if settings := chosen_settings(data, row, records, round_):
                yield Run(f"cpu{round_}", data, row, seed, epochs, settings)


def sector_runs(records: dict[str, dict[str, Any]]) -> Iterator[Run]:
    """Yield the runs without a sector of poses, with the settings and about the steps of `coil100`."""
    for seed in SEEDS[""][:3]:
        for row in ("none", "soft", "soft-max", "hard", "simclr"):
            if settings := chosen_settings("coil100", row, records):
                yield Run("sector", "coil100-sector", row, seed, DATA["coil100-sector"].epochs, settings)


def ablation_runs(records: dict[str, dict[str, Any]]) -> Iterator[Run]:
    """Yield the paper's ablations on `coil100`: one setting of the tuned `soft` row changed at a time."""
    base = chosen_settings("coil100", "soft", records)
    changes: list[dict[str, Any]] = [{"neighbors": k} for k in (5, 10, 50)]
    changes += [{"queue_length": q} for q in (512, 1024, 2048)]
    changes += [{"sides": sides} for sides in ("positives", "negatives")]
    changes += [{"gamma": "max"}]
    for seed in SEEDS[""][:3]:
        for change in changes if base is not None else ():
            yield Run("ablate", "coil100", "soft", seed, DATA["coil100"].epochs, {**(base or {}), **change})


def ladder_runs() -> Iterator[Run]:
    """Yield the steps from SNCLR without neighbors to SimCLR, and the last step with neighbors, not tuned."""
    same_network = {"momentum": 0, "predictor_layers": 0, "negatives": "both-views"}
    steps: dict[str, list[dict[str, Any]]] = {
        "none": [{"momentum": 0}, {"predictor_layers": 0}, {"momentum": 0, "predictor_layers": 0}, same_network],
        "simclr": [{}],
        "soft-max": [{**same_network, "neighbors": 10}],
    }
    for seed in SWEEP_SEEDS:
        for data in ("coil100", "cifar5"):
            yield Run("sweep", data, "none", seed, DATA[data].epochs, dict(UNTUNED))
            for row, changes in steps.items():
                for change in changes:
                    yield Run("ladder", data, row, seed, DATA[data].epochs, {**UNTUNED, **change})
        for data in ("digits", "omniglot"):  # only the two ends
            yield Run("ladder", data, "simclr", seed, DATA[data].epochs, dict(UNTUNED))
        yield Run("ladder", "digits", "simclr", seed, DATA["digits"].epochs, {**UNTUNED, **_CIFAR_VIEWS})


def sweep_runs() -> Iterator[Run]:
    """Yield the runs of the figure "gain against purity": K, views, data and epochs without neighbors, not tuned."""
    views: tuple[dict[str, Any], ...] = ({}, {"crop_min": 0.2}, _CIFAR_VIEWS)
    for seed in SWEEP_SEEDS:
        for data in ("coil100", "digits", "omniglot", "cifar5"):
            for view in views if data != "cifar5" else ({}, _CROPS):
                yield Run("sweep", data, "none", seed, DATA[data].epochs, {**UNTUNED, **view})
                for row in ("soft-max", "hard"):
                    for k in (2, 10, 30) if view == {} else (10,):
                        yield Run("sweep", data, row, seed, DATA[data].epochs, {**UNTUNED, **view, "neighbors": k})
                    if view == {}:
                        late = {"neighbors": 10, "neighbor_free_epochs": DATA[data].epochs // 2}
                        yield Run("sweep", data, row, seed, DATA[data].epochs, {**UNTUNED, **late})


def agreeing_runs() -> Iterator[Run]:
    """Yield the runs that use only the neighbors that both views find, with the settings of the sweep."""
    for seed in SWEEP_SEEDS:
        for data in ("coil100", "cifar5", "digits", "omniglot"):
            for row in ("soft-max", "hard"):
                for k in (10, 30):
                    settings = {**UNTUNED, "neighbors": k, "agreeing_neighbors": True}
                    yield Run("agreeing", data, row, seed, DATA[data].epochs, settings)


def weights_runs(records: dict[str, dict[str, Any]]) -> Iterator[Run]:
    """Yield the weights of ImageNet alone, the rows that start from them, and the same with tuned learning rates."""
    data = "cifar5-imagenet"
    epochs = DATA[data].epochs
    yield Run("weights", data, UNTRAINED, 0, 0, {})
    encoder = {"search_space": "encoder"}
    rows: tuple[tuple[str, dict[str, Any]], ...] = (("none", {}), ("soft", encoder), ("hard", encoder))
    for row, settings in (*rows, ("soft", {})):
        yield Run("weights", data, row, 0, epochs, settings)
    for row, settings in rows:
        trials = [
            Run("tune5", data, row, TUNING_SEED, epochs // 2, {**settings, "lr": lr}) for lr in LEARNING_RATES["5"]
        ]
        yield from trials
        if all(run.key in records for run in trials):
            best = max(trials, key=lambda run: records[run.key]["validation"])
            for seed in SWEEP_SEEDS:
                yield Run("test5", data, row, seed, epochs, best.settings)


def gate_runs() -> Iterator[Run]:
    """Yield the runs that test `min_agreement` on data without a part in its choice, and on the sweep's, not tuned."""
    changed: tuple[dict[str, Any], ...] = ({}, _CIFAR_VIEWS)
    rows: tuple[tuple[str, dict[str, Any]], ...] = (
        ("none", {}), ("soft-max", {}), ("soft-max", {"min_agreement": 0.5}), ("simclr", {}),
    )  # fmt: skip
    for seed in SWEEP_SEEDS:
        for data in ("mnist", "fashion"):
            for view in changed:
                for row, settings in rows if view == {} else rows[:3]:
                    k = {} if row == "simclr" else {"neighbors": 10}
                    yield Run("gate", data, row, seed, DATA[data].epochs, {**UNTUNED, **view, **k, **settings})
        for data, view in (("coil100", {}), ("digits", {}), ("cifar5", {}), ("coil100", changed[1])):
            settings = {**UNTUNED, **view, "neighbors": 10, "min_agreement": 0.5}
            yield Run("gate", data, "soft-max", seed, DATA[data].epochs, settings)
        for data, view in (("omniglot", {}), ("digits", _CIFAR_VIEWS)):
            settings = {**UNTUNED, **view, "neighbors": 10, "min_agreement": 0.5}
            yield Run("gate", data, "soft-max", seed, DATA[data].epochs, settings)
    for seed in range(len(SWEEP_SEEDS), 8):
        settings = {**UNTUNED, "neighbors": 10, "min_agreement": 0.5}
        yield Run("gate", "digits", "soft-max", seed, DATA["digits"].epochs, settings)


def search_runs() -> Iterator[Run]:
    """Yield the runs that search in other features, with the settings of the sweep and ten neighbors."""
    changes: tuple[dict[str, Any], ...] = (
        {"search_space": "encoder"}, {"search_view": "plain"}, {"unique_neighbors": True},
    )  # fmt: skip
    for data in ("digits", "mnist", "fashion", "coil100", "cifar5"):
        for change in changes if data == "digits" else changes[:1]:
            for seed in SWEEP_SEEDS:
                settings = {**UNTUNED, "neighbors": 10, **change}
                yield Run("search", data, "soft-max", seed, DATA[data].epochs, settings)


def cifar10_runs() -> Iterator[Run]:
    """Yield the runs on all of CIFAR-10, not tuned."""
    for row in ("none", "soft", "simclr", "hard", "soft-max", "nnclr", "byol"):
        settings = UNTUNED if row != "byol" else {"lr": UNTUNED["lr"]}
        yield Run("test", "cifar10", row, 0, DATA["cifar10"].epochs, dict(settings))


# One run.

HEALTH = ("loss", "neighbor_purity", "neighbor_agreement", "pulled_share", "spread", "queue_knn")
"""Logged metrics of a record: means over the last epoch."""


def execute(run: Run, images: Path, folder: Path) -> dict[str, Any]:
    """Train, evaluate and return the record of a run."""
    import snclr
    from snclr.io.jsonl import read_jsonl
    from snclr.methods.config import METHOD_SETTINGS, METHODS

    data = DATA[run.data]
    shutil.rmtree(folder, ignore_errors=True)
    if run.row == UNTRAINED:
        weights = images / str(data.weights)
        sizes = {"encoder": data.settings["encoder"], "image_size": data.settings["image_size"]}
        snclr.import_encoder(weights, out=folder, **sizes)
        scores = evaluate(run, folder, str(images / data.folder), images)
        shutil.rmtree(folder)
        return {**_described(run), **scores, **dict.fromkeys(HEALTH), "cpu_seconds": 0.0, "seconds": 0.0}
    settings = {**COMMON, **data.settings, **(ROWS | SHARED_ROWS)[run.row], **run.settings}
    foreign = METHOD_SETTINGS - METHODS[settings.get("method", "snclr")].setting_names()
    settings = {name: value for name, value in settings.items() if name not in foreign}
    source = data.folder if data.folder == "demo" else str(images / data.folder)
    if data.weights is not None:
        settings["init_from"] = str(images / data.weights)
    settings = {**settings, "data": source, "epochs": run.epochs, "seed": run.seed, "out": str(folder)}
    start, cpu = time.monotonic(), time.process_time()
    snclr.pretrain(quiet=True, **settings)
    cost = {"cpu_seconds": round(time.process_time() - cpu, 1), "seconds": round(time.monotonic() - start, 1)}
    logged = [line for line in read_jsonl(folder / "metrics.jsonl") if line["epoch"] > run.epochs - 1]
    health = {name: _mean([line[name] for line in logged if line.get(name) is not None]) for name in HEALTH}
    if "min_agreement" in run.settings:
        used = [line["neighbors_used"] for line in read_jsonl(folder / "metrics.jsonl") if "neighbors_used" in line]
        health["neighbors_used"] = _mean(used)  # over all epochs but the first
    scores = evaluate(run, folder, source, images)
    shutil.rmtree(folder, ignore_errors=True)
    return {**_described(run), **scores, **health, **cost}


def _described(run: Run) -> dict[str, Any]:
    names = ("key", "stage", "data", "row", "seed", "epochs", "settings")
    return {name: getattr(run, name) for name in names}


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def evaluate(run: Run, folder: Path, source: str, images: Path) -> dict[str, Any]:
    """Return the accuracies of a trained encoder in percent: on validation labels for a trial, else on test labels."""
    import torch

    import snclr
    from snclr.evaluation.features import extract_features
    from snclr.evaluation.knn import knn
    from snclr.evaluation.linear import linear_cached

    encoder, data = snclr.load_encoder(folder)[0], DATA[run.data]
    train_set = snclr.open_dataset(source)
    image_size = data.settings.get("image_size", COMMON["image_size"])
    train = extract_features(encoder, train_set, image_size=image_size, quiet=True)
    assert train.labels is not None
    if data.held_out is not None:
        back_set = snclr.open_dataset(str(images / data.held_out))
        back = extract_features(encoder, back_set, image_size=image_size, quiet=True)
        assert back.labels is not None
        features, labels = torch.cat([train.features, back.features]), torch.cat([train.labels, back.labels])
        series = [*_series(train_set, train.ids), *_series(back_set, back.ids)]
        is_back = torch.arange(len(labels)) >= len(train.labels)
        kept = labels % 5 != 4
        parts = (features[kept], labels[kept], _rows(series, kept))
        scores = [few_label_accuracy(*parts, offsets, is_back[kept]) for offsets in ((0,), data.labels)]
        return {"one_label": scores[0], "four_labels": scores[1]}
    if data.test is None:
        series, tuning = _series(train_set, train.ids), run.stage.startswith("tune")
        offsets = data.labels
        if run.stage.endswith("4"):  # every fifth image, numbered again without gaps
            validation = torch.tensor(series) % 5 == 4
            series = [n // 5 if n % 5 == 4 else n // 5 * 4 + n % 5 for n in series]
            offsets = tuple(offset // 5 * 4 for offset in offsets)
        else:  # every fifth class
            validation = train.labels % 5 == 4
        rows = validation if tuning else ~validation
        score = few_label_accuracy(train.features[rows], train.labels[rows], _rows(series, rows), (0,))
        if tuning:
            return {"validation": score}
        four = few_label_accuracy(train.features[rows], train.labels[rows], _rows(series, rows), offsets)
        return {"one_label": score, "four_labels": four}
    if run.stage.startswith("tune"):
        order = torch.randperm(len(train.ids), generator=torch.Generator().manual_seed(TUNING_SEED))
        held_out = torch.isin(train.ids, order[::10])
        known, queries = train.take(~held_out), train.take(held_out)
        result = knn(known.features, known.labels, queries.features, queries.labels)
        return {"validation": round(100 * result.top1, 2)}
    test = extract_features(encoder, snclr.open_dataset(str(images / data.test)), image_size=image_size, quiet=True)
    pairs = (train.features, train.labels, test.features, test.labels)
    return {"knn": round(100 * knn(*pairs).top1, 2), "linear": round(100 * linear_cached(*pairs).top1, 2)}


def _series(dataset: Any, ids: Any) -> list[int]:
    """Return the number of each image in its class's series, which is its file name."""
    return [int(Path(dataset.key(index)).stem) for index in ids.tolist()]


def _rows(series: list[int], keep: Any) -> list[int]:
    return [number for number, kept in zip(series, keep.tolist(), strict=True) if kept]


def few_label_accuracy(
    features: Any, labels: Any, series: list[int], offsets: tuple[int, ...], held_out: Any = None
) -> float:
    """Return the 1-NN accuracy in percent with a few labeled images per class, averaged over every choice of them.

    `series` numbers the images of a class (angle, writer). For each number s, the labeled images of a class are s plus
    each offset, modulo the range of the numbers; all others of the classes that have a labeled image are classified.
    With `held_out` (n,), only those images are classified, and only others are labeled.
    """
    import torch

    unit = torch.nn.functional.normalize(features, dim=1)
    number = torch.tensor(series)
    period = 360 if number.max() >= 355 else int(number.max())
    accuracies = []
    known = torch.ones_like(labels, dtype=torch.bool) if held_out is None else ~held_out
    for first in sorted(set(number[known].tolist())):
        labeled = torch.isin(number % period, torch.tensor([(first + offset) % period for offset in offsets])) & known
        queries = (~labeled if held_out is None else held_out) & torch.isin(labels, labels[labeled])
        nearest = (unit @ unit[labeled].T).argmax(dim=1)
        accuracies.append((labels[labeled][nearest] == labels)[queries].float().mean().item())
    return round(100 * sum(accuracies) / len(accuracies), 2)


# The queue of runs.


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the recorded runs by key."""
    if not path.exists():
        return {}
    return {record["key"]: record for record in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def run_all(images: Path, work: Path, only: list[str], seeds: list[int]) -> None:
    """Execute the runs that are not recorded, one after the other.

    `only` has starts of keys: just these runs, in its order; `seeds`: just these seeds. Empty: all.
    """
    work.mkdir(parents=True, exist_ok=True)
    while True:
        records = read_records(RECORDS)
        runs = [run for run in all_runs(records) if not seeds or run.seed in seeds]
        for run in [run for prefix in only for run in runs if run.key.startswith(prefix)] if only else runs:
            folder = work / run.key.replace("/", "+")
            lock = FileLock(f"{folder}.lock")
            if run.key in records or not _acquire(lock):
                continue
            try:
                if run.key in read_records(RECORDS):
                    continue
                record = execute(run, images, folder)
                with FileLock(work / "records.lock"), RECORDS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(json.dumps(record), flush=True)
            finally:
                lock.release()
            break
        else:
            return


def _acquire(lock: FileLock) -> bool:
    from filelock import Timeout

    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


def main() -> int:
    """Run or list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "list"))
    parser.add_argument("--images", type=Path, help="the folder of the datasets")
    parser.add_argument("--work", type=Path, help="a folder for the runs while they train")
    parser.add_argument(
        "--only", nargs="+", default=[], help="starts of keys, e.g. tune4/digits test/cifar10; in this order"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="only these seeds")
    a = parser.parse_args()
    if a.command == "list":
        records = read_records(RECORDS)
        for run in dict.fromkeys(all_runs(records)):
            print("done" if run.key in records else "    ", run.key)
        return 0
    if a.images is None or a.work is None:
        parser.error("run needs --images and --work")
    run_all(a.images, a.work, a.only, a.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
