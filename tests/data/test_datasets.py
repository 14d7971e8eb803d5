"""`open_dataset`: every kind of dataset that --data accepts, and errors for invalid ones."""

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from snclr.data.datasets import builtin
from snclr.data.datasets.base import ArrayDataset, FileDataset, open_dataset
from snclr.data.decode import BadImage
from snclr.errors import UserError


def put(path, color=(10, 20, 30), size=(6, 5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


# Folders


def test_a_flat_folder_has_no_labels(tmp_path):
    for name in ("b.png", "a.JPG", "c.jpeg"):
        put(tmp_path / name)
    dataset = open_dataset(tmp_path)
    assert isinstance(dataset, FileDataset)
    assert [dataset.key(i) for i in range(len(dataset))] == ["a.JPG", "b.png", "c.jpeg"]
    assert dataset.labels is None
    assert dataset.classes is None
    assert dataset.name == str(tmp_path)
    assert dataset.load(1).shape == (5, 6, 3)


def test_first_level_folders_are_labels_at_any_depth(tmp_path):
    put(tmp_path / "dog" / "deep" / "er" / "1.png", (1, 1, 1))
    put(tmp_path / "dog" / "2.png", (2, 2, 2))
    put(tmp_path / "cat" / "3.png", (3, 3, 3))
    put(tmp_path / "loose.png", (4, 4, 4))
    dataset = open_dataset(str(tmp_path))
    assert dataset.classes == ["cat", "dog"]
    assert {dataset.key(i): int(dataset.labels[i]) for i in range(4)} == {
        "cat/3.png": 0,
        "dog/2.png": 1,
        "dog/deep/er/1.png": 1,
        "loose.png": -1,
    }
    assert {dataset.key(i): int(dataset.load(i)[0, 0, 0]) for i in range(4)} == {
        "cat/3.png": 3,
        "dog/2.png": 2,
        "dog/deep/er/1.png": 1,
        "loose.png": 4,
    }
    assert dataset.labels.dtype == np.int64


def test_a_single_subfolder_is_not_a_class(tmp_path):
    put(tmp_path / "images" / "1.png")
    assert open_dataset(tmp_path).labels is None


def test_hidden_and_other_files_are_ignored(tmp_path):
    put(tmp_path / "good.png")
    put(tmp_path / ".hidden.png")
    put(tmp_path / ".git" / "x.png")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "drawing.eps").write_text("%!PS")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    dataset = open_dataset(tmp_path)
    assert list(dataset.files) == ["good.png"]


def test_links_are_followed_and_loops_end(tmp_path):
    outside = tmp_path / "outside"
    put(outside / "x.png")
    data = tmp_path / "data"
    put(data / "a" / "1.png")
    (data / "b").symlink_to(outside)
    (data / "a" / "up").symlink_to(data)
    (data / "self").symlink_to(data / "self")
    (data / "link.png").symlink_to(data / "a" / "1.png")
    (data / "broken.png").symlink_to(data / "nothing.png")
    dataset = open_dataset(data)
    assert list(dataset.files) == ["a/1.png", "b/x.png", "link.png"]


def test_split_layout(tmp_path):
    for name in ("train/cat/1.png", "train/dog/2.png", "val/dog/3.png"):
        put(tmp_path / name)
    (tmp_path / "train" / ".cache").mkdir()
    train, test = open_dataset(tmp_path), open_dataset(tmp_path, split="test")
    assert list(train.files) == ["cat/1.png", "dog/2.png"]
    assert list(test.files) == ["dog/3.png"]
    # The same number for the same class, although the test part has no cats.
    assert train.classes == test.classes == ["cat", "dog"]
    assert test.labels.tolist() == [1]
    assert open_dataset(tmp_path, split="val").files == test.files
    everything = open_dataset(tmp_path, split="all")
    assert everything.classes == ["train", "val"]
    assert len(everything) == 3
    with pytest.raises(UserError, match=r"'middle'.*train, val, test or all"):
        open_dataset(tmp_path, split="middle")


def test_a_folder_without_splits_ignores_the_split(tmp_path):
    put(tmp_path / "a" / "1.png")
    put(tmp_path / "train" / "2.png")  # a class of that name, not a split: there is nothing beside it to test on
    assert len(open_dataset(tmp_path, split="test")) == len(open_dataset(tmp_path)) == 2


def test_an_empty_folder_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"no images found in .*\.jpg"):
        open_dataset(tmp_path)


def test_photographs_that_are_not_read_are_named(tmp_path):
    for name in ("a.HEIC", "deep/b.heic", "c.nef", ".d.heic"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"Not read: 2 \.heic files and 1 \.nef file; convert to JPEG"):
        open_dataset(str(tmp_path))


def test_a_name_that_is_not_utf8_is_escaped(tmp_path):
    put(tmp_path / "good.png")
    (tmp_path / "good.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    dataset = open_dataset(tmp_path)
    assert dataset.load(0).shape == (5, 6, 3)
    assert dataset.key(0).encode("utf-8") == b"\\udcff.png"
    assert len(dataset.fingerprint()) == 64


def test_bad_images_are_found_when_loaded(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(BadImage):
        open_dataset(tmp_path).load(0)


def test_min_side_reaches_the_decoder(tmp_path):
    put(tmp_path / "large.jpg", size=(640, 480))
    assert open_dataset(tmp_path).load(0, min_side=60).shape == (60, 80, 3)


def test_the_fingerprint_depends_on_names_not_on_the_location(tmp_path):
    for folder in ("one", "two"):
        put(tmp_path / folder / "a.png")
        put(tmp_path / folder / "b.png")
    one, two = open_dataset(tmp_path / "one").fingerprint(), open_dataset(tmp_path / "two").fingerprint()
    assert one == two
    put(tmp_path / "two" / "c.png")
    assert open_dataset(tmp_path / "two").fingerprint() != one


# Lists


def test_a_list_with_labels(tmp_path):
    put(tmp_path / "images" / "a b.png", (1, 0, 0))
    put(tmp_path / "#2.png", (2, 0, 0))
    other = put(tmp_path / "elsewhere" / "c.png", (3, 0, 0))
    listing = tmp_path / "list.txt"
    listing.write_text(f"# a comment\n\nimages/a b.png\tzebra\r\n./#2.png\t ape \n{other}\n", encoding="utf-8-sig")
    dataset = open_dataset(listing)
    assert [int(dataset.load(i)[0, 0, 0]) for i in range(3)] == [1, 2, 3]
    assert dataset.classes == ["ape", "zebra"]
    assert dataset.labels.tolist() == [1, 0, -1]
    assert dataset.key(0) == "images/a b.png"


def test_numeric_labels_are_numbered_as_numbers(tmp_path):
    put(tmp_path / "a.png")
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"a.png\t{label}\n" for label in (10, 9, 2)))
    dataset = open_dataset(str(listing))
    assert dataset.classes == ["2", "9", "10"]
    assert dataset.labels.tolist() == [2, 1, 0]


def test_a_list_without_labels(tmp_path):
    put(tmp_path / "a.png")
    (tmp_path / "list").write_text("a.png\na.png\t\n")
    dataset = open_dataset(tmp_path / "list")
    assert len(dataset) == 2
    assert dataset.labels is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a.png\nb.png\nc.png\n", "lists 2 missing files, e.g. b.png, c.png"),
        (b"a.png 3\n", "lists 1 missing file.*a label is separated by a TAB"),
        (b"a.png\tx\ty\n", "line 1: expected a path"),
        (b"# nothing\n\n", "lists no images"),
        (b"\xff\xfe\x00\x01\x80", "cannot be read as a text list"),
    ],
)
def test_invalid_lists_are_rejected(tmp_path, content, message):
    put(tmp_path / "a.png")
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_dataset(tmp_path / "list.txt")


def test_an_image_is_not_a_dataset(tmp_path):
    with pytest.raises(UserError, match="single image"):
        open_dataset(put(tmp_path / "a.png"))


# Names


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar11", "did you mean 'cifar10'?"),
        ("Demo1", "did you mean 'demo'?"),
        ("nothing/like/that", "folder of images, a text file.*demo, cifar10, .*oxfordiiitpet"),
        ("shards/{000..146}.tar", "missing shards: 147 of 147"),
        ("hf://datasets/x", "is not a shard"),
        ("pipe:touch /tmp/x", "not accepted"),
        ("hf:?", "there is no name"),
    ],
)
def test_unknown_names_are_rejected(spec, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        open_dataset(spec)


def test_a_name_takes_precedence_over_a_folder(tmp_path, monkeypatch):
    put(tmp_path / "demo" / "a.png")
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset("DEMO")) == 6000
    assert len(open_dataset("./demo")) == len(open_dataset(Path("demo"))) == 1


# torchvision's sets, in tiny trees of their own layout


def idx(values):
    """The file format of MNIST."""
    return struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def test_fashionmnist_is_gray_in_memory(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (12, 28, 28)).astype(np.uint8)
    for part, count in (("train", 12), ("t10k", 5)):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(images[:count]))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))
    dataset = open_dataset("FashionMNIST", root=tmp_path)
    assert isinstance(dataset, ArrayDataset)
    assert np.array_equal(dataset.images, np.repeat(images[..., None], 3, axis=3))
    assert dataset.labels.tolist() == [*range(10), 0, 1]
    assert dataset.classes[9] == "Ankle boot"
    assert len(open_dataset("fashionmnist", root=tmp_path, split="test")) == 5
    assert dataset.key(3) == "fashionmnist/train/3"
    assert dataset.fingerprint() != open_dataset("fashionmnist", root=tmp_path, split="test").fingerprint()


def test_cifar10_is_color_in_memory(tmp_path, monkeypatch):
    import torchvision.datasets.cifar

    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    data = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32)).astype(np.uint8)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": data.reshape(2, -1), "labels": [3, 8]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class{i}" for i in range(10)]}))
    dataset = open_dataset("cifar10", root=tmp_path)
    assert len(dataset) == 10
    assert np.array_equal(dataset.images[:2], data.transpose(0, 2, 3, 1))
    assert dataset.labels[:2].tolist() == [3, 8]
    assert dataset.classes[8] == "class8"


def test_stl10_without_labels_is_channels_first_in_memory(tmp_path, monkeypatch):
    import torchvision.datasets

    class STL10:
        classes = ("plane", "bird")

        def __init__(self, root, split, download):
            assert (root, download) == (str(tmp_path), False)
            self.data = np.arange(2 * 3 * 96 * 96, dtype=np.int64).reshape(2, 3, 96, 96).astype(np.uint8)
            self.labels = np.array([1, 0]) if split == "train" else np.array([-1, -1])

    monkeypatch.setattr(torchvision.datasets, "STL10", STL10)
    dataset = open_dataset("stl10", root=tmp_path, split="unlabeled")
    assert dataset.images.shape == (2, 96, 96, 3)
    assert np.array_equal(dataset.images[1, :, :, 2], STL10(str(tmp_path), "", False).data[1, 2])
    assert dataset.labels is None
    assert dataset.classes is None
    assert open_dataset("stl10", root=tmp_path).labels.tolist() == [1, 0]


def test_food101_is_files(tmp_path):
    for name in ("apple_pie/1", "waffles/2", "waffles/3"):
        put(tmp_path / "food-101" / "images" / f"{name}.jpg")
    meta = tmp_path / "food-101" / "meta"
    meta.mkdir()
    (meta / "train.json").write_text(json.dumps({"apple_pie": ["apple_pie/1"], "waffles": ["waffles/2"]}))
    (meta / "test.json").write_text(json.dumps({"apple_pie": [], "waffles": ["waffles/3"]}))
    dataset = open_dataset("food101", root=tmp_path)
    assert isinstance(dataset, FileDataset)
    assert list(dataset.files) == ["food-101/images/apple_pie/1.jpg", "food-101/images/waffles/2.jpg"]
    assert dataset.load(1).shape == (5, 6, 3)
    assert dataset.labels.tolist() == [0, 1]
    test = open_dataset("food101", root=tmp_path, split="test")
    assert test.labels.tolist() == [1]
    assert test.classes == dataset.classes


def test_oxfordiiitpet_and_eurosat_are_files(tmp_path):
    put(tmp_path / "oxford-iiit-pet" / "images" / "pug_1.jpg")
    notes = tmp_path / "oxford-iiit-pet" / "annotations"
    notes.mkdir()
    (notes / "trainval.txt").write_text("pug_1 1 2 1\n")
    pets = open_dataset("oxfordiiitpet", root=tmp_path)
    assert pets.classes == ["Pug"]
    assert pets.load(0).shape == (5, 6, 3)
    for name in ("Forest/f.jpg", "River/r.jpg"):
        put(tmp_path / "eurosat" / "2750" / name)
    land = open_dataset("eurosat", root=tmp_path)
    assert land.classes == ["Forest", "River"]
    assert land.labels.tolist() == [0, 1]
    assert land.load(1).shape == (5, 6, 3)


@pytest.mark.parametrize("name", builtin.BUILTIN)
def test_a_missing_dataset_is_reported_and_not_downloaded(tmp_path, name, monkeypatch):
    import torchvision.datasets.utils

    monkeypatch.setattr(torchvision.datasets.utils, "_urlretrieve", lambda *_: pytest.fail("downloaded"))
    advice = "download it or give" if builtin.BUILTIN[name].get("downloads", True) else "get it from its publisher"
    with pytest.raises(UserError, match=f"{name} .*cannot be opened in .*{advice}") as caught:
        open_dataset(name, root=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_split_must_exist_and_imagenet_cannot_be_downloaded(tmp_path):
    with pytest.raises(UserError, match="'val'; it has train, test"):
        open_dataset("cifar10", split="val", root=tmp_path)
    with pytest.raises(UserError, match="cannot be downloaded"):
        open_dataset("imagenet", download=True, root=tmp_path)


def test_every_name_is_a_class_of_torchvision():
    import torchvision.datasets

    assert all(hasattr(torchvision.datasets, entry["class"]) for entry in builtin.BUILTIN.values())
    assert all("train" in entry["splits"] for entry in builtin.BUILTIN.values())


# Arrays and labels


def test_the_fingerprint_of_arrays_changes_with_a_pixel():
    images = np.zeros((3, 4, 4, 3), np.uint8)
    dataset = ArrayDataset("x", images)
    changed = images.copy()
    changed[1, 2, 2, 0] = 1
    assert dataset.fingerprint() != ArrayDataset("x", changed).fingerprint()
    assert dataset.fingerprint() == ArrayDataset("x", images.copy()).fingerprint()
    assert dataset.key(2) == "x/2"


def test_class_names_fall_back_to_numbers() -> None:
    images = ArrayDataset("a", np.zeros((4, 2, 2, 3), np.uint8), np.array([0, 1, 0, -1]), ["cat", "dog"])
    assert [images.class_name(index) for index in (3, 0, 1)] == [None, "cat", "dog"]
    images.classes = None
    assert (images.class_name(1), images.class_names()) == ("1", ["0", "1"])
    images.labels = None
    assert (images.class_name(0), images.class_names()) == (None, [])
