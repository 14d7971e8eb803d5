"""Print the result of `snclr detect`."""

from __future__ import annotations

from cyclopts import Parameter

from snclr.api.detect import DetectResult, detect
from snclr.cli.flags import Command, SettingGroups
from snclr.cli.output import print_table

_EXAMPLES = """Examples:
  snclr detect runs/resnet50 --data coco/ --devices 8 --workers 4           # the paper's 1x protocol
  snclr detect runs/resnet50 --data coco/ --init random                     # the "Rand Init" row
  snclr detect runs/supervised --data coco/ --encoder resnet50 --init resnet50-0676ba61.pth   # "Supervised"
  snclr detect runs/photos --data pedestrians/ --recipe cpu                 # minutes, for a narrow ResNet
  snclr detect runs/photos --data other/ --detector runs/photos/detect-run-1a2b3c4d5e6f       # evaluate only

--data is a folder with images and COCO annotation files such as annotations/instances_train2017.json. Files with other
names are given by flags. A recipe sets the schedule and the detector; a flag overrides it. The defaults shown are those
of the recipe 1x. Repeat the command to continue a stopped training; a finished detector is evaluated again.
"""
_COLUMNS = {
    "AP_bb": "AP^bb", "AP50_bb": "AP^bb_50", "AP75_bb": "AP^bb_75",
    "AP_mk": "AP^mk", "AP50_mk": "AP^mk_50", "AP75_mk": "AP^mk_75",
}  # fmt: skip
_SHOWN_CLASSES = 20


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


def _settings() -> SettingGroups:
    from snclr.evaluation.detection.settings import DetectSettings
    from snclr.runtime.settings import describe

    return {"Schedule and detector": describe(DetectSettings)}


COMMANDS = {
    "detect": Command(
        function=detect, show=show_detect, examples=_EXAMPLES, settings=_settings, types={"short_side": str},
        flags={"short_side": Parameter(show_default=lambda sides: f"{sides[0]}-{sides[1]}")}, without=("momentum",),
    )
}  # fmt: skip
