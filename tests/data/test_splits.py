"""Training and test splits: those of the dataset, or a seeded hold-out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from snclr.data.datasets.base import ArrayDataset, open_dataset
from snclr.data.splits import Subset, has_own_test_split, hold_out, open_splits, take
from snclr.errors import UserError


def make_folder(folder, per_class=5, classes=("a", "b")):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / name / f"{i}.png")


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=60), st.integers(0, 9))
def test_hold_out_divides_every_class(labels, seed):
    labels = np.array(labels)
    kept, held = hold_out(labels, 0.2, seed)
    assert sorted([*kept, *held]) == np.flatnonzero(labels >= 0).tolist()
    for label in np.unique(labels[labels >= 0]):
        size = int((labels == label).sum())
        assert int((labels[held] == label).sum()) == (max(1, round(0.2 * size)) if size > 1 else 0)
    again = hold_out(labels, 0.2, seed)
    assert np.array_equal(again[1], held)


def test_a_name_has_its_own_test_part_even_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    make_folder(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    train, test, description = open_splits("demo")
    assert "its own" in description
    assert train.key(0) == "demo/train/0"
    assert test.key(0) == "demo/test/0"


def test_folders_with_and_without_parts(tmp_path):
    make_folder(tmp_path / "parted" / "train")
    make_folder(tmp_path / "parted" / "val", per_class=2)
    train, test, _ = open_splits(str(tmp_path / "parted"))
    assert (len(train), len(test)) == (10, 4)
    make_folder(tmp_path / "whole")
    train, test, description = open_splits(str(tmp_path / "whole"), seed=3)
    assert (len(train), len(test)) == (8, 2)
    assert "held out" in description
    assert "seed 3" in description
    keys = {train.key(i) for i in range(len(train))} | {test.key(i) for i in range(len(test))}
    assert len(keys) == 10
    train, test, _ = open_splits(str(tmp_path / "whole"), str(tmp_path / "parted" / "val"))
    assert (len(train), len(test)) == (10, 4)


def test_a_subset_is_the_same_images_under_the_same_keys(tmp_path):
    make_folder(tmp_path)
    dataset = open_dataset(tmp_path)
    part = take(dataset, np.array([7, 2]))
    assert isinstance(part, Subset)
    assert part.key(0) == dataset.key(7)
    assert np.array_equal(part.load(1), dataset.load(2))
    assert part.labels.tolist() == dataset.labels[[7, 2]].tolist()
    assert part.fingerprint() != take(dataset, np.array([2, 7])).fingerprint()
    array = ArrayDataset("x", np.zeros((4, 2, 2, 3), np.uint8), np.arange(4))
    assert take(array, np.array([3])).labels.tolist() == [3]


def test_a_dataset_without_labels_is_not_divided(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "only.png")
    train, test, _ = open_splits(str(tmp_path))
    assert train is test
    with pytest.raises(ValueError, match="no-such"):
        open_splits(str(tmp_path / "no-such"))


def test_classes_of_one_image_cannot_be_held_out(tmp_path):
    make_folder(tmp_path / "single", per_class=1)
    with pytest.raises(UserError, match=r"no class of .*single has two images.*--test"):
        open_splits(str(tmp_path / "single"))
    make_folder(tmp_path / "test", per_class=2)
    train, test, _ = open_splits(str(tmp_path / "single"), str(tmp_path / "test"))
    assert (len(train), len(test)) == (2, 4)


def test_the_validation_part_is_a_fixed_tenth_of_each_class_and_apart_from_the_rest():
    whole, fit, held = (open_dataset(f"demo{part}") for part in ("", "#fit", "#validation"))
    assert np.bincount(held.labels).tolist() == (np.bincount(whole.labels) // 10).tolist()
    assert len(fit) + len(held) == len(whole)
    pixels = {part: {dataset.load(i).tobytes() for i in range(len(dataset))} for part, dataset in
              (("whole", whole), ("fit", fit), ("held", held))}  # fmt: skip
    assert pixels["fit"] | pixels["held"] == pixels["whole"]
    assert len(pixels["fit"] & pixels["held"]) <= len(whole) - len(pixels["whole"])  # only duplicates in the data
    assert len({whole.fingerprint(), fit.fingerprint(), held.fingerprint()}) == 3
    assert open_dataset("demo#fit").fingerprint() == fit.fingerprint()
    assert open_dataset("demo#fit", split="test").fingerprint() == open_dataset("demo", split="test").fingerprint()
    assert has_own_test_split("demo#fit")


def test_a_part_of_unlabeled_images_is_rejected_and_a_folder_of_that_name_is_a_folder(tmp_path):
    for name in ("plain", "photos#fit/a", "photos#fit/b"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / name / "1.png")
    with pytest.raises(UserError, match="no validation images can be held out"):
        open_dataset(f"{tmp_path / 'plain'}#validation")
    assert len(open_dataset(str(tmp_path / "photos#fit"))) == 2
