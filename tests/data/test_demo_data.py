"""The demo images that come with the package, and the script that built them."""

import hashlib
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from snclr.data.datasets import builtin
from snclr.data.datasets.base import ArrayDataset, open_dataset
from snclr.data.decode import decode
from snclr.errors import UserError

CLASSES = ["airplane", "automobile", "frog", "horse", "ship"]
SCRIPT = Path(__file__).parents[2] / "scripts" / "build_demo_data.py"


@pytest.mark.parametrize(("split", "count"), [("train", 1200), ("test", 240)])
def test_counts_labels_and_class_order(split, count):
    dataset = open_dataset("demo", split=split)
    assert isinstance(dataset, ArrayDataset)
    assert dataset.images.shape == (5 * count, 32, 32, 3)
    assert dataset.classes == CLASSES
    assert dataset.labels.tolist() == [0, 1, 2, 3, 4] * count
    assert dataset.key(12) == f"demo/{split}/12"
    assert np.array_equal(dataset.load(12), dataset.images[12])


def test_images_are_distinct_and_splits_disjoint():
    digests = [
        {hashlib.sha256(image.tobytes()).digest() for image in open_dataset("demo", split=split).images}
        for split in ("train", "test")
    ]
    assert len(digests[0]) == 6000
    assert len(digests[1]) == 1200
    assert not digests[0] & digests[1]


def test_images_are_in_the_order_of_the_sheets():
    dataset = open_dataset("demo")
    sheet = decode(builtin.DEMO_FOLDER / "train-horse-1.webp")
    # Image 400 of the class is the first of its second sheet; 21 of the sheet is in its second row and column.
    assert np.array_equal(dataset.images[400 * 5 + 3], sheet[:32, :32])
    assert np.array_equal(dataset.images[421 * 5 + 3], sheet[32:64, 32:64])


def test_pixels_match_the_digest_in_origin_md():
    sheets = sorted(builtin.DEMO_FOLDER.glob("*.webp"))
    digest = hashlib.sha256(b"".join(decode(path).tobytes() for path in sheets)).hexdigest()
    text = (builtin.DEMO_FOLDER / "ORIGIN.md").read_text(encoding="utf-8")
    assert f"`{digest}`" in text
    assert re.search(r"states no license", text)
    assert "Krizhevsky" in text


def test_files_stay_small():
    sizes = [path.stat().st_size for path in builtin.DEMO_FOLDER.iterdir()]
    assert max(sizes) < 1_000_000
    assert sum(sizes) < 12.5e6


def test_without_the_images_the_error_says_how_to_build_them(monkeypatch, tmp_path):
    monkeypatch.setattr(builtin, "DEMO_FOLDER", tmp_path / "gone")
    with pytest.raises(UserError, match="build_demo_data"):
        open_dataset("demo")


def test_unknown_split():
    with pytest.raises(UserError, match="train and test, not 'val'"):
        open_dataset("demo", split="val")


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("build_demo_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sheets_round_trip(script):
    images = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3)).astype(np.uint8)
    sheet = script.as_sheet(images)
    assert sheet.shape == (96, 640, 3)
    assert np.array_equal(builtin._cut(sheet), images)


def test_a_wrong_archive_is_refused(script, tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.tgz"
    wrong.write_bytes(b"something else")
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["build", "--archive", str(wrong), "--out", str(out)])
    with pytest.raises(SystemExit, match="expected 141f061f"):
        script.main()
    assert not out.exists()


def test_an_unknown_class_is_refused(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["build", "--classes", "frog,unicorn"])
    with pytest.raises(SystemExit):
        script.main()
    assert "unicorn" in capsys.readouterr().err
