from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from snclr.errors import UserError
from snclr.evaluation.detection.coco import open_coco, rle_runs
from tests.helpers import tiny_coco


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_coco.write(tmp_path / "set")


def change(folder: Path, edit, part: str = "train") -> None:
    file = folder / "annotations" / f"instances_{part}2017.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


# ---- layouts


def test_the_standard_layout_of_coco_is_found(folder):
    train, val, description = open_coco(folder)
    assert [len(train), len(val)] == [6, 4]
    assert train.folder == folder / "train2017"
    assert val.folder == folder / "val2017"
    assert list(train.categories.items()) == [(3, "square"), (7, "disc")]
    assert train.classes() == {3: 1, 7: 2}
    assert train.faults == []
    assert [len(train.objects[i]) for i in range(6)] == [2, 1, 2, 1, 2, 0]
    assert "instances_train2017.json" in description


@pytest.mark.parametrize(
    ("train", "val", "image_folder"),
    [
        ("instances_train.json", "instances_val.json", "images"),
        ("annotations/train.json", "annotations/val.json", "images/{part}"),
        ("train/_annotations.coco.json", "valid/_annotations.coco.json", "{part_folder}"),
        ("annotations/person_train.json", "annotations/person_validation.json", "JPEGImages"),
    ],
)
def test_other_common_layouts_are_found(tmp_path, train, val, image_folder):
    for part, name, seed in (("train", train, 0), ("val", val, 1)):
        described, images = tiny_coco.content(3, seed=seed)
        for entry in described["images"]:
            entry["file_name"] = part + entry["file_name"]
        folder = tmp_path / image_folder.format(part=part, part_folder=Path(name).parent)
        tiny_coco.write_part(tmp_path / name, folder, described, images)
    first, second, _ = open_coco(tmp_path)
    assert (first.file, second.file) == (tmp_path / train, tmp_path / val)
    assert len(first) == len(second) == 3
    assert first.path(0).is_file()


def test_a_single_file_is_split_by_the_seed(tmp_path):
    described, images = tiny_coco.content(10)
    tiny_coco.write_part(tmp_path / "annotations.json", tmp_path / "images", described, images)
    parts = {}
    for seed in (0, 1, 0):
        train, val, description = open_coco(tmp_path, seed=seed)
        assert len(train) == 8
        assert len(val) == 2
        assert {i.id for i in train.images} | {i.id for i in val.images} == set(range(1, 11))
        assert "held out" in description
        first = parts.setdefault(seed, [i.id for i in val.images])
        assert first == [i.id for i in val.images]
    assert parts[0] != parts[1]


def test_explicit_paths_override_the_search(folder, tmp_path):
    (folder / "annotations" / "instances_train2017.json").rename(tmp_path / "a.json")
    (folder / "train2017").rename(tmp_path / "elsewhere")
    train, _, _ = open_coco(
        folder, train_annotations=tmp_path / "a.json", images=tmp_path / "elsewhere", val_images="val2017"
    )
    assert len(train) == 6
    with pytest.raises(UserError, match=r"--train-annotations nope\.json does not exist"):
        open_coco(folder, train_annotations="nope.json")


def test_several_matching_files_and_no_file_are_errors(folder, tmp_path):
    file = folder / "annotations" / "instances_train2017.json"
    (folder / "annotations" / "instances_train2014.json").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"several files for train.*--train-annotations"):
        open_coco(folder)
    with pytest.raises(UserError, match="no COCO annotation files"):
        open_coco(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        open_coco(tmp_path / "nowhere")


def test_missing_image_folders_are_an_error(folder):
    with pytest.raises(UserError, match=r"--images or --val-images nowhere does not exist"):
        open_coco(folder, val_images="nowhere")
    (folder / "train2017").rename(folder / "moved")
    with pytest.raises(UserError, match="--images"):
        open_coco(folder)


# ---- faults


def bad_annotation(**changes):
    def edit(content):
        content["annotations"].append({**copy.deepcopy(content["annotations"][0]), "id": 99, **changes})

    return edit


def rle(**changes):
    mask = coco_mask.encode(np.asfortranarray(np.ones((64, 72), np.uint8)))
    return {"size": [64, 72], "counts": mask["counts"].decode(), **changes}


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (bad_annotation(category_id=5), "category id 5 is unknown"),
        (bad_annotation(image_id=1234), "image id 1234 is unknown"),
        (bad_annotation(image_id=[1]), "image_id is"),
        (bad_annotation(bbox=[100, 2, 10, 10]), "no area in the image of 72×64"),
        (bad_annotation(bbox=[1, 2, 0, 10]), "has no area"),
        (bad_annotation(bbox=[1, 2, 10]), "not four finite numbers"),
        (bad_annotation(bbox=[1, 2, float("nan"), 10]), "not four finite numbers"),
        (bad_annotation(bbox=[1, 2, 10**400, 10]), "not four finite numbers"),
        (bad_annotation(segmentation=[[1, 2, 3, 4, 5, 10**400]]), "not finite"),
        (bad_annotation(segmentation=rle(counts=[10**4298] * 50)), "do not fill the image of 72×64"),
        (bad_annotation(segmentation=[]), "segmentation is missing"),
        (bad_annotation(segmentation=[[]]), "three or more points"),
        (bad_annotation(segmentation=[[1, 2, 3, 4]]), "three or more points"),
        (bad_annotation(segmentation=[[1, 2, 3, 4, 5, None]]), "not finite"),
        (bad_annotation(segmentation=[[90, 2, 99, 4, 95, 9]]), "the polygons have no area in the image"),
        (bad_annotation(segmentation=[[9, 2, 9, 4, 9, 9]]), "the polygons have no area in the image"),
        (bad_annotation(segmentation=None), "segmentation is missing"),
        (bad_annotation(segmentation=rle(size=[72, 64])), r"RLE is of size \[72, 64\]; the image is \[64, 72\]"),
        (bad_annotation(segmentation=rle(counts=[5, 5])), "do not fill the image of 72×64"),
        (bad_annotation(segmentation=rle(counts=[4608])), "mask is empty"),
        (bad_annotation(segmentation=rle(counts=[-5, 4613])), "neither a list"),
        (bad_annotation(segmentation=rle(counts="~~~~~~~~~~~~~~~~")), "cannot be read"),
        (bad_annotation(segmentation=rle(counts="o")), "ends within a number"),
        (bad_annotation(iscrowd=2), "iscrowd is 2"),
        (bad_annotation(id=1), "the id is not unique"),
    ],
)
def test_a_bad_annotation_is_reported_and_left_out(folder, edit, reason):
    change(folder, edit)
    train, val, _ = open_coco(folder)
    (fault,) = train.faults
    assert (fault.kind, fault.action) == ("annotation", "left out")
    assert fault.id in (99, 1)
    assert fault.file == str(folder / "annotations" / "instances_train2017.json")
    assert re.search(reason, fault.reason)
    assert [len(train.objects[i]) for i in range(6)] == [2, 1, 2, 1, 2, 0]
    assert val.faults == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"file_name": "gone.png"}, "the file gone.png is missing"),
        ({"file_name": "../../../etc/hostname"}, "leads out of the image folder"),
        ({"file_name": "/etc/hostname"}, "leads out of the image folder"),
        ({"width": 0}, "width and height"),
        ({"height": "64"}, "width and height"),
        ({"width": 10**400}, "width and height"),
        ({"id": None}, "not a number"),
        ({"id": 2}, "not unique"),
    ],
)
def test_a_bad_image_is_left_out_with_its_objects(folder, changes, reason):
    change(folder, lambda content: content["images"].insert(2, {**content["images"].pop(0), **changes}))
    train, _, _ = open_coco(folder)
    faults = [fault for fault in train.faults if fault.kind == "image"]
    assert len(faults) == 1
    assert reason in faults[0].reason
    assert len(train) == 5
    assert 1 not in [image.id for image in train.images]
    with pytest.raises(UserError, match="--max-bad-share"):
        train.check_faults(0.1)
    if "id" not in changes:
        train.check_faults(0.5)


def test_an_infinite_area_is_replaced_by_the_area_of_the_box(folder):
    change(folder, lambda content: content["annotations"][0].update(area=10**400))
    (train, _, _), plain = open_coco(folder), tiny_coco.content(6, seed=0)[0]["annotations"][0]["bbox"]
    assert train.faults == []
    assert train.objects[0][0].area == plain[2] * plain[3]


def test_a_box_beyond_the_image_is_clipped(folder):
    change(folder, lambda content: content["annotations"][0].update(bbox=[60, -4, 30, 20]))
    train, _, _ = open_coco(folder)
    assert train.faults == []
    assert train.objects[0][0].box == (60, 0, 12, 16)


def test_files_that_are_not_annotations_are_refused(folder):
    file = folder / "annotations" / "instances_train2017.json"
    for text, reason in (("{", "JSON"), ("[]", "no list 'images'"), ('{"images": []}', "no list 'annotations'")):
        file.write_text(text)
        with pytest.raises(UserError, match=reason):
            open_coco(folder)


def test_splits_with_different_categories_are_refused(folder):
    change(folder, lambda content: content["categories"][0].update(name="ball"), part="val")
    with pytest.raises(UserError, match="different categories"):
        open_coco(folder)


def test_images_without_objects_are_left_out_of_training(folder):
    train, _, _ = open_coco(folder)
    assert len(train.for_training(keep_empty=True)) == 6
    chosen = train.for_training(keep_empty=False)
    assert [image.id for image in chosen.images] == [1, 2, 3, 4, 5]
    assert chosen.fingerprint() != train.fingerprint()
    change(folder, lambda content: [entry.update(iscrowd=1) for entry in content["annotations"][:2]])
    train, _, _ = open_coco(folder)
    chosen = train.for_training(keep_empty=False)
    assert [image.id for image in chosen.images] == [2, 3, 4, 5]  # image 1 has only crowds


def test_a_set_survives_pickling(folder):
    train, _, _ = open_coco(folder)
    copied = pickle.loads(pickle.dumps(train))
    assert copied.objects[0] == train.objects[0]
    assert copied.fingerprint() == train.fingerprint()
    with pytest.raises(IndexError):
        copied.objects[6]


@settings(max_examples=60)
@given(st.integers(1, 30), st.integers(1, 40), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_decoded_runs_match_pycocotools(height, width, share, seed):
    mask = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    runs = rle_runs(coco_mask.encode(np.asfortranarray(mask))["counts"].decode())
    flat = np.repeat(np.arange(len(runs)) % 2, runs)
    assert np.array_equal(flat.reshape(width, height).T, mask)


@settings(max_examples=100)
@given(st.text(max_size=12))
def test_any_string_is_decoded_or_rejected_with_value_error(text):
    try:
        runs = rle_runs(text)
    except ValueError:
        return
    assert all(isinstance(run, int) for run in runs)


@pytest.mark.parametrize(("most", "refused"), [(0.1, False), (0.03, True)])
def test_the_share_of_faults_refers_to_the_whole_file_after_a_split(tmp_path, most, refused):
    described, images = tiny_coco.content(100)
    tiny_coco.write_part(tmp_path / "annotations.json", tmp_path / "images", described, images)
    for entry in described["images"][:4]:
        (tmp_path / "images" / entry["file_name"]).unlink()
    train, val, _ = open_coco(tmp_path)
    assert [len(train), len(val)] == [77, 19]
    for part in (train, val, train.for_training(keep_empty=False)):
        if refused:
            with pytest.raises(UserError, match="4 of the 100 images"):
                part.check_faults(most)
        else:
            part.check_faults(most)
