"""Print the results of the commands that evaluate a run, and of `snclr demo`."""

import sys
from pathlib import Path

from cyclopts import Parameter

from snclr.api.demo import DemoResult, demo
from snclr.api.evaluate import detect, fewshot, finetune, knn, linear
from snclr.cli.flags import Command, SettingGroups
from snclr.cli.output import print_table
from snclr.errors import count
from snclr.evaluation.results import TITLES, AccuracyResult, Baseline, DetectResult, FewShotResult, KnnResult
from snclr.runtime.progress import print_wrapped

_DEMO_EXAMPLES = """Examples:
  snclr demo
  snclr demo --seed 1 --out runs/demo-1
"""
_DEMO_INTRO = "Pre-training on 6,000 small photographs, without their labels. This takes a few minutes."
_KNN_EXAMPLES = """Examples:
  snclr knn runs/photos --data labeled-photos/
  snclr knn runs/cifar --data cifar10 --k 20 --json
  snclr knn runs/resnet50 --data imagenet/ --workers 8 --devices 4

Features are cached in RUN/evaluation/features and reused by the next evaluation. Repeat the command to continue a
stopped evaluation.
"""
_FEWSHOT_EXAMPLES = """Examples:
  snclr fewshot runs/photos --data labeled-photos/   # one label per class
  snclr fewshot runs/photos --data labeled-photos/ --labels-per-class 4

Each draw labels a few random training images of every class. Every test image gets the class of the nearest of them, by
cosine similarity. The accuracy is the mean over the draws, and s.e. its standard error over the draws. Use it for
datasets with many near-duplicates, such as views of one object, where kNN with all labels is close to 100 %.
"""
_LINEAR_EXAMPLES = """Examples:
  snclr linear runs/photos --data labeled-photos/           # takes seconds
  snclr linear runs/vit-s --data imagenet/ --protocol paper  # 90 epochs
  snclr linear runs/mae --data imagenet/ --protocol mae      # as in MAE

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
  snclr finetune runs/resnet50 --data imagenet/ --labels 1percent.txt
  snclr finetune runs/photos --data labeled-photos/ --from-scratch --epochs 200

The defaults are SimCLR's: SGD with Nesterov momentum 0.9, learning rate 0.05 × batch/256 for encoder and head, cosine
to 0, no weight decay, random resized crops and flips, 60 epochs up to 1% of the labels and 30 above. --from-scratch
starts from random weights, for the "supervised" row of a table; a fair comparison needs another learning rate and more
epochs. Repeat the command to continue a stopped training.
"""
_DETECT_EXAMPLES = """Examples:
  snclr detect runs/resnet50 --data coco/ --devices 8    # the paper's 1x
  snclr detect runs/resnet50 --data coco/ --init random  # the row "Rand Init"
  snclr detect runs/r50 --data coco/ --encoder resnet50 --init resnet50.pth
  snclr detect runs/photos --data people/ --recipe cpu     # takes minutes
  snclr detect runs/photos --data other/ --detector runs/photos/detect-run-1a2b

--data is a folder with images and COCO annotation files such as annotations/instances_train2017.json. Files with other
names are given by flags. A recipe sets the schedule and the detector; a flag overrides it. The defaults shown are those
of the recipe 1x. Repeat the command to continue a stopped training; a finished detector is evaluated again.
"""


_COLUMNS = {
    "AP_bb": "AP^bb", "AP50_bb": "AP^bb_50", "AP75_bb": "AP^bb_75",
    "AP_mk": "AP^mk", "AP50_mk": "AP^mk_50", "AP75_mk": "AP^mk_75",
}  # fmt: skip
_SHOWN_CLASSES = 20
_TOP5_CLASSES = 10
"""With fewer classes, top-5 accuracy is not printed: most guesses are right."""


def show_accuracy(result: AccuracyResult) -> None:
    """Print the accuracies of the run and the baselines, with what is needed to judge them."""
    how = f", mean over {count(result.draws, 'draw')}" if isinstance(result, FewShotResult) else ""
    if isinstance(result, KnnResult):
        how = f", k = {result.k}{' (auto)' if result.settings['k'] == 'auto' else ''}"
    title = TITLES.get(result.kind, result.kind)
    has_top5 = result.top5 is not None and result.classes >= _TOP5_CLASSES
    chance = describe_chance(result) + (f", of top-5 {_chance_of_top5(result)}" if has_top5 else "")
    print_wrapped(f"{title} top-1 ± s.e.{how}, {count(result.n, 'test image')}; {chance}")
    rows = {"this run": own_row(result), **result.baselines}.items()
    top5 = [f"top-5 {row.top5:.1%}" if has_top5 and row.top5 is not None else "" for _, row in rows]
    cells = [(f"  {name}", accuracy(row), five, row.note or "") for (name, row), five in zip(rows, top5, strict=True)]
    print_table([""] * 4, cells)
    reached = [f"the {name}" if "encoder" in name else name for name, row in rows if row.top1 >= result.top1][1:]
    if reached and result.kind != "finetune-scratch":
        above = f"This run is not above {' and '.join(reached)}"
        print_wrapped(f"{above}: train for more epochs, or try another method.", indent="  ")
    if result.kind == "finetune":
        print("  For the accuracy without pre-training, add --from-scratch.")
    if skipped := result.skipped if isinstance(result.skipped, int) else len(result.skipped):
        print(f"  unreadable images: {skipped:,}, left out")
    if result.unlabeled:
        print(f"  images without a label: {result.unlabeled:,}, left out")
    for warning in result.warnings:
        print_wrapped(f"warning: {warning}", sys.stderr)


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


def show_demo(result: DemoResult) -> None:
    """Print the accuracies, their protocols and where the files are."""
    from snclr.checkpoint.encoder_file import load_encoder, loading_snippet

    knn, linear = ({"trained (SNCLR)": own_row(part), **part.baselines} for part in (result.knn, result.linear))
    images = count(result.knn.n, "test image")
    print(f"\ntop-1 accuracy ± standard error on {images}; {describe_chance(result.knn)}")
    rows = [(name, accuracy(row), accuracy(linear[name])) for name, row in knn.items()]
    print_table(["features", f"kNN (k = {result.knn.k})", "linear"], rows)
    purity = ", ".join(f"{share:.0%}" for share in result.neighbor_purity)
    print(f"\nneighbor purity, 1st to {len(result.neighbor_purity)}th neighbor: {purity}")
    print(f"  {result.purity_description}")
    print(f"\nProtocols (labels are used only here)\n  {result.knn.protocol}\n  {result.linear.protocol}")
    print(f"\n{result.seconds / 60:.1f} minutes. Figure: {result.figure}   weights: {result.out}/encoder.safetensors")
    print(f"Report (open in a browser): {result.report}")
    snippet = loading_snippet(load_encoder(Path(result.out))[1], Path(result.out))
    print(f"\nLoad the encoder without snclr:\n\n{snippet}")
    print("Now your own images:  snclr pretrain --data my-photos/ --out runs/photos")


def show_detect(result: DetectResult) -> None:
    """Print the six columns of the paper's table in percent, the classes and the protocol."""
    print(f"{result.kind} (from {result.start}), in percent")
    print_table([*_COLUMNS.values()], [[_percent(result.numbers.get(name)) for name in _COLUMNS]], left=0)
    if len(result.classes) > 1:
        shown = result.classes[:_SHOWN_CLASSES]
        rows = [(str(c["name"]), str(c["objects"]), _percent(c["box"]), _percent(c["mask"])) for c in shown]
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
    "knn": Command(knn, show_accuracy, _KNN_EXAMPLES),
    "fewshot": Command(fewshot, show_accuracy, _FEWSHOT_EXAMPLES),
    "linear": Command(linear, show_accuracy, _LINEAR_EXAMPLES),
    "finetune": Command(finetune, show_accuracy, _FINETUNE_EXAMPLES),
    "detect": Command(
        detect, show_detect, _DETECT_EXAMPLES, settings=_detect_settings, without=("momentum",),
        types={"short_side": str},
        flags={"short_side": Parameter(show_default=lambda sides: f"{sides[0]}-{sides[1]}")},
    ),
    "demo": Command(
        demo, show_demo, _DEMO_EXAMPLES, intro=_DEMO_INTRO, without=("overwrite",),
        saved="a demo cannot be resumed and starts from the beginning",
    ),
}  # fmt: skip
