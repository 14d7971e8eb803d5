"""What is printed of a detection: its protocol, the table's columns, the classes, the faults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snclr.detection.annotation_check import Fault
from snclr.detection.coco_folder import CocoSet
from snclr.detection.schedule import DetectSettings
from snclr.durable import write_atomic
from snclr.encoders import EncoderSpec

_COLUMNS = {
    "AP_bb": "AP^bb", "AP50_bb": "AP^bb_50", "AP75_bb": "AP^bb_75",
    "AP_mk": "AP^mk", "AP50_mk": "AP^mk_50", "AP75_mk": "AP^mk_75",
}  # fmt: skip
_SHOWN_FAULTS = 10
_SHOWN_CLASSES = 20


def training_words(s: DetectSettings, spec: EncoderSpec, start: str, trained: str, processes: int) -> str:
    """How the detector was trained."""
    low, high = s.short_side
    norm = "synchronised over all processes" if processes > 1 else "of one process"
    stem = "" if spec.stem == "standard" else f", low-resolution stem {spec.stem!r} brought to stride 4 by pooling"
    return (
        f"Mask R-CNN {spec.name}-FPN from {start}: every stage trained{stem}, batch norm in backbone and FPN ({norm}), "
        f"{s.width} channels, anchors from {s.anchor} px; {s.iterations:,} iterations of {s.batch_size} images, SGD "
        f"(momentum {s.momentum:g}, weight decay {s.weight_decay:g}), learning rate {s.peak_lr:g} ({s.lr:g} × "
        f"batch/16), ÷10 after {s.milestones[0]:,} and {s.milestones[1]:,}, linear warm-up over {s.warmup:,}, short "
        f"side {low}–{high} px (long side ≤ {s.long_side}), flips, seed {s.seed}, on {trained}"
    )


def test_words(s: DetectSettings, val: CocoSet, unreadable: int) -> str:
    """How it was tested."""
    objects = sum(not found.crowd for number in range(len(val)) for found in val.objects[number])
    left_out = f", {unreadable} unreadable ones left out" if unreadable else ""
    return (
        f"tested once, after the last iteration, at short side {s.short_side[1]} px on {len(val):,} images "
        f"({objects:,} objects, {len(val.categories)} classes) of {val.file}{left_out}; AP by pycocotools: IoU 0.50 to "
        "0.95, at most 100 detections an image, scores from 0.05"
    )


def set_words(coco: CocoSet, of: int) -> str:
    """The training set in a few words."""
    empty = f" ({of - len(coco):,} without objects left out)" if of != len(coco) else ""
    return f"{len(coco):,} images{empty} of {coco.file}"


def table(record: dict[str, Any]) -> str:
    """The result as people read it: the six columns in percent, the classes, the protocol."""
    numbers = record["numbers"]
    cells = [(title, _percent(numbers.get(name))) for name, title in _COLUMNS.items()]
    widths = [max(len(title), len(value)) for title, value in cells]
    heads = "  ".join(title.rjust(width) for (title, _), width in zip(cells, widths, strict=True))
    values = "  ".join(value.rjust(width) for (_, value), width in zip(cells, widths, strict=True))
    lines = [f"{record['kind']} (from {record['start']}), in percent", f"  {heads}", f"  {values}"]
    classes = record["classes"]
    if len(classes) > 1:
        width = max(len(str(entry["name"])) for entry in classes[:_SHOWN_CLASSES])
        lines.append(f"  {'class'.ljust(width)}  objects  AP^bb  AP^mk")
        for entry in classes[:_SHOWN_CLASSES]:
            ap = f"{_percent(entry['box']):>5}  {_percent(entry['mask']):>5}"
            lines.append(f"  {str(entry['name']).ljust(width)}  {entry['objects']:>7}  {ap}")
        if len(classes) > _SHOWN_CLASSES:
            lines.append(f"  … {len(classes) - _SHOWN_CLASSES} classes more in results.jsonl")
    lines.append(f"  {record['protocol']}")
    if record["faults"]:
        lines.append(f"  {record['faults']} faults in annotations and images: {record['faults_file']}")
    if record.get("figure"):
        lines.append(f"  drawn predictions: {record['figure']}")
    return "\n".join(lines)


def fault_lines(faults: Sequence[Fault]) -> list[str]:
    """The first faults, a line each, and how many there are in all."""
    if not faults:
        return []
    lines = [f"warning: {len(faults)} faults in the annotations"]
    lines += [f"  {fault}" for fault in faults[:_SHOWN_FAULTS]]
    return lines + ([f"  … and {len(faults) - _SHOWN_FAULTS} more"] if len(faults) > _SHOWN_FAULTS else [])


def write_faults(path: Path, faults: Sequence[Fault]) -> None:
    """All faults, one JSON object a line; no file where there are none."""
    if faults:
        write_atomic(path, "".join(json.dumps(asdict(fault), ensure_ascii=False) + "\n" for fault in faults))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
