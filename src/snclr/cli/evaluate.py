"""Print the results of the commands that evaluate a run."""

from __future__ import annotations

import sys

from cyclopts import Parameter

from snclr.api.detect import DetectResult, detect
from snclr.api.evaluate import fewshot, finetune, knn, linear
from snclr.cli.flags import Command, SettingGroups
from snclr.cli.output import print_table
from snclr.errors import count
from snclr.evaluation.results import AccuracyResult, Baseline, FewShotResult, KnnResult

_KNN_EXAMPLES = """Examples:
  snclr knn runs/photos --data labeled-photos/
  snclr knn runs/cifar --data cifar10 --k 20 --json
  snclr knn runs/resnet50 --data imagenet/ --workers 8 --devices 4

Features are cached in RUN/evaluation/features and reused by the next evaluation. Repeat the command to continue a
stopped evaluation.
"""
_FEWSHOT_EXAMPLES = """Examples:
  snclr fewshot runs/photos --data labeled-photos/                        # one label per class
  snclr fewshot runs/photos --data labeled-photos/ --labels-per-class 4 --draws 100

Each draw labels a few random training images of every class. Every test image gets the class of the nearest of them, by
cosine similarity. The accuracy is the mean over the draws, and s.e. its standard error over the draws. Use it for
datasets with many near-duplicates, such as views of one object, where kNN with all labels is close to 100 %.
"""
_LINEAR_EXAMPLES = """Examples:
  snclr linear runs/photos --data labeled-photos/              # cached features: seconds
  snclr linear runs/vit-s --data imagenet/ --protocol paper     # 90 epochs of random crops, as in the paper
  snclr linear runs/mae --data imagenet/ --protocol mae         # as in MAE: a batch norm before the classifier

Protocols:
  cached   features of center crops, extracted once. The learning rate is the
           best of a grid on a held-out part of the training set
  paper    random resized crops and flips in every epoch. SGD, momentum 0.9,
           no weight decay, cosine; base learning rate × batch/256: 3 for ViTs
           (timm's VisionTransformer, Beit, Eva), else 0.1
  mae      the crops of paper, and a batch norm without parameters before the
           classifier. LARS, warm-up, cosine; base learning rate 0.1

Features are cached in RUN/evaluation/features. Repeat the command to continue a stopped evaluation.
"""
_FINETUNE_EXAMPLES = """Examples:
  snclr finetune runs/photos --data labeled-photos/ --labels 10%
  snclr finetune runs/resnet50 --data imagenet/ --labels 1percent.txt --workers 8   # a published list
  snclr finetune runs/photos --data labeled-photos/ --labels 10% --from-scratch --epochs 200 --lr 0.1

The defaults are SimCLR's: SGD with Nesterov momentum 0.9, learning rate 0.05 × batch/256 for encoder and head, cosine
to 0, no weight decay, random resized crops and flips, 60 epochs up to 1% of the labels and 30 above. --from-scratch
starts from random weights, for the "supervised" row of a table; a fair comparison needs another learning rate and more
epochs. Repeat the command to continue a stopped training.
"""
_DETECT_EXAMPLES = """Examples:
  snclr detect runs/resnet50 --data coco/ --devices 8 --workers 4           # the paper's 1x protocol
  snclr detect runs/resnet50 --data coco/ --init random                     # the "Rand Init" row
  snclr detect runs/supervised --data coco/ --encoder resnet50 --init resnet50-0676ba61.pth   # "Supervised"
  snclr detect runs/photos --data pedestrians/ --recipe cpu                 # minutes, for a narrow ResNet
  snclr detect runs/photos --data other/ --detector runs/photos/detect-run-1a2b3c4d5e6f       # evaluate only

--data is a folder with images and COCO annotation files such as annotations/instances_train2017.json. Files with other
names are given by flags. A recipe sets the schedule and the detector; a flag overrides it. The defaults shown are those
of the recipe 1x. Repeat the command to continue a stopped training; a finished detector is evaluated again.
"""


_TITLES = {
    "knn": "kNN", "linear-cached": "linear", "linear-paper": "linear (paper protocol)",
    "linear-mae": "linear (MAE's protocol)", "finetune": "fine-tuned", "finetune-scratch": "trained from scratch",
}  # fmt: skip

_COLUMNS = {
    "AP_bb": "AP^bb", "AP50_bb": "AP^bb_50", "AP75_bb": "AP^bb_75",
    "AP_mk": "AP^mk", "AP50_mk": "AP^mk_50", "AP75_mk": "AP^mk_75",
}  # fmt: skip
_SHOWN_CLASSES = 20
_TOP5_CLASSES = 10
"""With fewer classes, top-5 accuracy is not printed: most guesses are right."""


def show_accuracy(result: AccuracyResult) -> None:
    """Print the accuracies of the run and the baselines, with what is needed to judge them."""
    k = f", {_describe_k(result)}" if isinstance(result, KnnResult) else ""
    if isinstance(result, FewShotResult):
        k = f", mean over {count(result.draws, 'draw')}"
    title = _TITLES.get(result.kind, result.kind)
    has_top5 = result.top5 is not None and result.classes >= _TOP5_CLASSES
    chance = describe_chance(result) + (f", of top-5 {_chance_of_top5(result)}" if has_top5 else "")
    print(f"{title} top-1 ± s.e.{k}, {count(result.n, 'test image')}; {chance}")
    rows = {"this run": own_row(result), **result.baselines}.items()
    print_table(
        [""] * 4,
        [
            (
                f"  {name}",
                accuracy(row),
                "" if row.top5 is None or not has_top5 else f"top-5 {row.top5:.1%}",
                row.note or "",
            )
            for name, row in rows
        ],
    )
    reached = [f"the {name}" if "encoder" in name else name for name, row in rows if row.top1 >= result.top1][1:]
    if reached and result.kind != "finetune-scratch":
        print(f"  This run is not above {' and '.join(reached)}: train for more epochs, or try another method.")
    if result.kind == "finetune":
        print("  For the accuracy without pre-training, add --from-scratch.")
    if skipped := result.skipped if isinstance(result.skipped, int) else len(result.skipped):
        print(f"  unreadable images: {skipped:,}, left out")
    if result.unlabeled:
        print(f"  images without a label: {result.unlabeled:,}, left out")
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _describe_k(result: KnnResult) -> str:
    """Return the number of neighbors that voted, marked if it was chosen automatically.

    The protocol records it, e.g. "k = 40 (auto)".
    """
    k = f"k = {result.k}"
    return f"{k} (auto)" if f"{k} (auto)" in result.protocol else k


def own_row(result: AccuracyResult) -> Baseline:
    """Return the accuracy of the run itself as a row beside the baselines."""
    return Baseline(result.top1, result.top5, result.standard_error)


def accuracy(score: Baseline) -> str:
    """Format top-1 accuracy and standard error."""
    return f"{score.top1:.1%} ± {score.standard_error:.1%}"


def describe_chance(result: AccuracyResult) -> str:
    """Return the chance level and what it is: 1/classes for classes of equal size, else the share of the largest."""
    kind = f"1/{result.classes}" if _is_balanced(result) else "largest class"
    return f"chance {result.chance:.1%} ({kind})"


def _chance_of_top5(result: AccuracyResult) -> str:
    """Return 5/classes; with classes of other sizes the five largest are a better guess, of a share not recorded."""
    return f"{'' if _is_balanced(result) else 'at least '}{5 / result.classes:.1%} (5/{result.classes})"


def _is_balanced(result: AccuracyResult) -> bool:
    return abs(result.chance * result.classes - 1) < 1e-9


def show_detect(result: DetectResult) -> None:
    """Print the six columns of the paper's table in percent, the classes and the protocol."""
    print(f"{result.kind} (from {result.start}), in percent")
    print_table([*_COLUMNS.values()], [[_percent(result.numbers.get(name)) for name in _COLUMNS]], left=0)
    if len(result.classes) > 1:
        rows = [
            (str(entry["name"]), str(entry["objects"]), _percent(entry["box"]), _percent(entry["mask"]))
            for entry in result.classes[:_SHOWN_CLASSES]
        ]
        print_table(["class", "objects", "AP^bb", "AP^mk"], rows)
    if len(result.classes) > _SHOWN_CLASSES:
        print(f"… {len(result.classes) - _SHOWN_CLASSES} more classes in results.jsonl")
    print(result.protocol)
    if result.faults:
        print(f"faults in annotations and images: {result.faults}, listed in {result.faults_file}")
    if result.figure:
        print(f"predictions: {result.figure}")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _detect_settings() -> SettingGroups:
    from snclr.evaluation.detection.settings import DetectSettings
    from snclr.runtime.settings import describe

    return {"Schedule and detector": describe(DetectSettings)}


COMMANDS = {
    "knn": Command(function=knn, show=show_accuracy, examples=_KNN_EXAMPLES),
    "fewshot": Command(function=fewshot, show=show_accuracy, examples=_FEWSHOT_EXAMPLES),
    "linear": Command(function=linear, show=show_accuracy, examples=_LINEAR_EXAMPLES),
    "finetune": Command(function=finetune, show=show_accuracy, examples=_FINETUNE_EXAMPLES),
    "detect": Command(
        function=detect,
        show=show_detect,
        examples=_DETECT_EXAMPLES,
        settings=_detect_settings,
        types={"short_side": str},
        flags={"short_side": Parameter(show_default=lambda sides: f"{sides[0]}-{sides[1]}")},
        without=("momentum",),
    ),
}
