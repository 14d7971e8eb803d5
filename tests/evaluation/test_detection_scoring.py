from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from snclr.evaluation.detection.coco import CocoSet, open_coco
from snclr.evaluation.detection.scoring import Detection, average_precision
from tests.helpers import tiny_coco


def rectangle(x: int, y: int, width: int, height: int, size: tuple[int, int] = (72, 64)) -> dict:
    mask = np.zeros((size[1], size[0]), np.uint8)
    mask[y : y + height, x : x + width] = 1
    rle = coco_mask.encode(np.asfortranarray(mask))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def detection(image: int, label: int, score: float, x: int, y: int, width: int, height: int) -> Detection:
    return Detection(image, label, score, (x, y, width, height), rectangle(x, y, width, height))


@pytest.fixture
def coco(tmp_path) -> CocoSet:
    """Two squares in two images of three; the annotation of the first has the id 0."""
    described, images = tiny_coco.content(3)
    described["annotations"] = [tiny_coco.square(1, 0, 10, 10, 20), tiny_coco.square(2, 5, 30, 20, 40)]
    tiny_coco.write_part(tmp_path / "instances_val.json", tmp_path / "images", described, images)
    tiny_coco.write_part(tmp_path / "instances_train.json", tmp_path / "images", described, images)
    return open_coco(tmp_path)[1]


PERFECT = (detection(0, 1, 0.9, 10, 10, 20, 20), detection(1, 1, 0.8, 30, 20, 40, 40))


def test_perfect_detections_have_ap_1(coco):
    score = average_precision(coco, PERFECT)
    assert score.numbers() == pytest.approx(
        dict.fromkeys(("AP_bb", "AP50_bb", "AP75_bb", "AP_mk", "AP50_mk", "AP75_mk"), 1.0)
    )
    assert score.classes == [
        {"name": "square", "objects": 2, "box": pytest.approx(1.0), "mask": pytest.approx(1.0)},
        {"name": "disc", "objects": 0, "box": None, "mask": None},
    ]


def test_one_of_two_objects_gives_51_of_101_recall_levels(coco):
    numbers = average_precision(coco, PERFECT[:1]).numbers()
    assert numbers["AP_bb"] == pytest.approx(51 / 101)
    assert numbers["AP_mk"] == pytest.approx(51 / 101)


def test_a_false_positive_with_a_higher_score_lowers_ap(coco):
    wrong = detection(2, 1, 0.95, 5, 5, 20, 20)  # in the image without objects
    numbers = average_precision(coco, [*PERFECT, wrong]).numbers()
    assert numbers["AP_bb"] == pytest.approx(2 / 3)  # two right of three, at every recall
    lower = average_precision(coco, [*PERFECT, replace(wrong, score=0.1)]).numbers()
    assert lower["AP_bb"] == pytest.approx(1.0)


def test_a_shifted_box_counts_up_to_its_iou(coco):
    shifted = [detection(0, 1, 0.9, 13, 10, 20, 20), detection(1, 1, 0.9, 36, 20, 40, 40)]
    # 20 wide, shifted by 3, and 40 by 6: IoU 17/23 = 0.739: five of the ten thresholds
    boxes = average_precision(coco, [replace(d, rle=p.rle) for d, p in zip(shifted, PERFECT, strict=True)])
    assert boxes.numbers()["AP_bb"] == pytest.approx(0.5)
    assert boxes.numbers()["AP50_bb"] == pytest.approx(1.0)
    assert boxes.numbers()["AP75_bb"] == pytest.approx(0.0)
    assert boxes.numbers()["AP_mk"] == pytest.approx(1.0)  # masks are scored separately


def test_boxes_and_masks_are_scored_separately(coco):
    halves = [replace(PERFECT[0], rle=rectangle(10, 10, 20, 12)), replace(PERFECT[1], rle=rectangle(30, 20, 40, 24))]
    numbers = average_precision(coco, halves).numbers()
    assert numbers["AP_bb"] == pytest.approx(1.0)
    assert numbers["AP_mk"] == pytest.approx(0.3)  # IoU 0.6: thresholds 0.50, 0.55, 0.60
    assert numbers["AP50_mk"] == pytest.approx(1.0)


def test_wrong_classes_and_no_detections_score_zero(coco):
    assert average_precision(coco, [replace(d, label=2) for d in PERFECT]).numbers()["AP_bb"] == 0.0
    nothing = average_precision(coco, [])
    assert nothing.numbers()["AP_bb"] == 0.0
    assert nothing.numbers()["AP50_mk"] == 0.0


def test_images_left_out_are_not_scored(coco):
    numbers = average_precision(coco, PERFECT[:1], leave_out={1}).numbers()
    assert numbers["AP_bb"] == pytest.approx(1.0)
    assert average_precision(coco, PERFECT, leave_out={0, 1}).numbers()["AP_bb"] is None


def test_detections_inside_a_crowd_are_ignored(tmp_path):
    described, images = tiny_coco.content(3)
    crowd = {**tiny_coco.square(1, 2, 40, 5, 30), "iscrowd": 1, "segmentation": rectangle(40, 5, 30, 30)}
    described["annotations"] = [tiny_coco.square(1, 1, 5, 30, 20), crowd]
    for name in ("train", "val"):
        tiny_coco.write_part(tmp_path / f"instances_{name}.json", tmp_path / "images", described, images)
    coco = open_coco(tmp_path)[1]
    both = [detection(0, 1, 0.9, 45, 8, 10, 10), detection(0, 1, 0.5, 5, 30, 20, 20)]
    score = average_precision(coco, both)
    assert score.numbers()["AP_bb"] == pytest.approx(1.0)
    assert score.classes[0]["objects"] == 1


def test_scores_match_pycocotools_on_files(tmp_path, capsys):
    """Random boxes and masks around the truth, through the files that pycocotools reads itself."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    folder = tiny_coco.write(tmp_path, val=8)
    coco = open_coco(folder)[1]
    rng = np.random.default_rng(3)
    classes = coco.classes()
    made = []
    for number in range(len(coco)):
        for one in coco.objects[number]:
            for _ in range(2):
                x, y, w, h = (int(v) for v in np.array(one.box) + rng.integers(-4, 5, 4))
                made.append(detection(number, classes[one.category], float(rng.random()), max(x, 0), max(y, 0), w, h))
    score = average_precision(coco, made)
    assert capsys.readouterr().out == ""  # its report is hidden
    ids = {number: key for key, number in classes.items()}
    file = Path(folder / "annotations" / "instances_val2017.json")
    expected = []
    for kind in ("bbox", "segm"):
        results = [
            {"image_id": coco.images[d.image].id, "category_id": ids[d.label], "score": d.score}
            | ({"bbox": list(d.box)} if kind == "bbox" else {"segmentation": d.rle})
            for d in made
        ]
        (tmp_path / f"{kind}.json").write_text(json.dumps(results))
        truth = COCO(str(file))
        evaluation = COCOeval(truth, truth.loadRes(str(tmp_path / f"{kind}.json")), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        expected += evaluation.stats[:3].tolist()
    assert list(score.numbers().values()) == pytest.approx(expected)
    assert 0.05 < expected[0] < 0.95
