from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snclr.data.datasets.base import ArrayDataset, FileDataset
from snclr.errors import UserError
from snclr.evaluation.subsets import balanced_subset, choose_subset, read_list


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    percent=st.sampled_from(["0.1", "1", "10", "33.3", "50", "99", "100"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150)
def test_a_subset_has_the_exact_count_and_equal_parts_per_class(sizes, percent, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)[np.random.default_rng(seed).permutation(sum(sizes))]
    share = Fraction(percent) / 100
    chosen = balanced_subset(labels, share, seed)
    assert len(set(chosen.tolist())) == len(chosen) == max(len(sizes), int(share * len(labels)))
    assert chosen.tolist() == sorted(chosen.tolist())
    parts = np.bincount(labels[chosen], minlength=len(sizes))
    assert parts.min() >= 1
    most = parts.max()
    for part, size in zip(parts, sizes, strict=True):
        assert part >= most - 1 or part == size  # fewer only if the class has no more images
    larger = balanced_subset(labels, min(Fraction(1), 3 * share), seed)
    assert set(chosen.tolist()) <= set(larger.tolist())


def test_counts_match_the_published_imagenet_subsets():
    labels = np.arange(1_281_167) % 1000
    for percent, expected in ((1, 12_811), (10, 128_116)):
        chosen = balanced_subset(labels, Fraction(percent, 100), seed=0)
        assert len(chosen) == expected
        assert set(np.bincount(labels[chosen]).tolist()) == {expected // 1000, expected // 1000 + 1}


def test_the_subset_depends_on_the_seed():
    labels = np.arange(100) % 4
    first, again, other = (balanced_subset(labels, Fraction(1, 5), seed).tolist() for seed in (0, 0, 1))
    assert first == again != other


def folder(*names: str, labels: list[int] | None = None) -> FileDataset:
    numbers = None if labels is None else np.array(labels, dtype=np.int64)
    return FileDataset("photos", Path("photos"), list(names), numbers, None if labels is None else ["a", "b"])


def test_a_share_refers_to_the_labeled_images():
    dataset = folder(*(f"{i}.png" for i in range(12)), labels=[0, 1, -1] * 4)
    subset = choose_subset(dataset, dataset.labels, "50%", seed=0)
    assert len(subset.index) == 4
    assert (dataset.labels[subset.index] >= 0).all()
    assert subset.text == "".join(f"{i}.png\n" for i in subset.index)
    assert subset.tag == "50pct"
    assert subset.share == Fraction(1, 2)
    assert subset.sha256 == hashlib.sha256(subset.text.encode()).hexdigest()
    assert "4 images, class-balanced, seed 0" in subset.description


@pytest.mark.parametrize("share", ["0%", "101%", "-1%", "10", "ten percent", "%"])
def test_invalid_shares_are_refused(share, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = folder("a.png", "b.png", labels=[0, 1])
    with pytest.raises(UserError, match="labels"):
        choose_subset(dataset, dataset.labels, share, seed=0)


IMAGENET = folder(
    "n01440764/n01440764_10026.JPEG",
    "n01440764/n01440764_10027.JPEG",
    "n01443537/n01443537_10007.JPEG",
    labels=[0, 0, 1],
)


@pytest.mark.parametrize(
    "lines",
    [
        "n01440764_10026.JPEG\nn01443537_10007.JPEG\n",
        "n01440764/n01440764_10026.JPEG\n\n# a comment\nn01443537_10007.JPEG",
        "train/n01440764/n01440764_10026.JPEG\r\n./n01443537/n01443537_10007.JPEG\r\n",
        "n01443537_10007.JPEG\nn01440764_10026.JPEG\nn01443537_10007.JPEG\n",
    ],
)
def test_lists_in_the_published_format_are_read(lines, tmp_path):
    path = tmp_path / "1percent.txt"
    path.write_text(lines, newline="")
    subset = choose_subset(IMAGENET, IMAGENET.labels, path, seed=0)
    assert subset.index.tolist() == [0, 2]
    assert subset.tag == "1percent"
    assert "1percent.txt" in subset.description


def test_a_written_list_is_read_back(tmp_path):
    dataset = ArrayDataset("demo", np.zeros((9, 4, 4, 3), np.uint8), np.arange(9) % 3, ["a", "b", "c"], prefix="demo/x")
    subset = choose_subset(dataset, dataset.labels, "50%", seed=3)
    (tmp_path / "list.txt").write_text(subset.text)
    again = choose_subset(dataset, dataset.labels, tmp_path / "list.txt", seed=0)
    assert again.index.tolist() == subset.index.tolist()
    assert again.sha256 == subset.sha256
    broken = folder("a/x\ny.png", "a/y.png")
    (tmp_path / "odd.txt").write_text(choose_subset(broken, np.array([0, 1]), "50%", seed=0).text)
    assert len(read_list(tmp_path / "odd.txt", broken)) == 2  # one of each class, one with a line break in its name


def test_unknown_names_are_reported(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("n01440764_10026.JPEG\nn9_1.JPEG\nother/n01440764_10027.JPEG\n")
    with pytest.raises(UserError, match=r"2 of the 3 names .* n9_1.JPEG, other/n01440764_10027.JPEG"):
        read_list(path, IMAGENET)


def test_an_ambiguous_name_is_refused_unless_its_folder_is_given(tmp_path):
    dataset = folder("cat/1.png", "dog/1.png", labels=[0, 1])
    path = tmp_path / "list.txt"
    path.write_text("1.png\n")
    with pytest.raises(UserError, match="with their folders"):
        read_list(path, dataset)
    path.write_text("dog/1.png\n")
    assert read_list(path, dataset).tolist() == [1]


def test_empty_unreadable_and_unlabeled_lists_are_refused(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# nothing\n\n")
    with pytest.raises(UserError, match="names no images"):
        read_list(path, IMAGENET)
    path.write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(UserError, match="text list"):
        read_list(path, IMAGENET)
    dataset = folder("a.png", "b.png", labels=[0, -1])
    path.write_text("b.png\n")
    with pytest.raises(UserError, match="1 image without a label"):
        choose_subset(dataset, dataset.labels, path, seed=0)
