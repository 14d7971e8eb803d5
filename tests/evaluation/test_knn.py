from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snclr.errors import UserError
from snclr.evaluation.knn import knn
from snclr.methods.common import kernels


def made_up(n: int, m: int, dim: int, classes: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n + m) % classes
    features = torch.randn(n + m, dim, generator=generator) + 1.5 * torch.eye(classes, dim)[labels]
    features *= torch.rand(n + m, 1, generator=generator) + 0.5  # lengths must not matter
    return features[:n], labels[:n], features[n:], labels[n:]


def naive_scores(train: Tensor, labels: Tensor, query: Tensor, k: int, t: float) -> dict[int, float]:
    """One image at a time, in plain Python."""

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    rows = [(cosine(row, query.tolist()), i) for i, row in enumerate(train.tolist())]
    scores: dict[int, float] = dict.fromkeys(labels.tolist(), 0.0)
    for similarity, i in sorted(rows, reverse=True)[:k]:
        scores[int(labels[i])] += math.exp(similarity / t)
    return scores


def best(scores: dict[int, float], count: int = 1) -> list[int]:
    return sorted(scores, key=lambda c: (-scores[c], c))[:count]


@settings(max_examples=25)
@given(st.integers(8, 40), st.integers(1, 12), st.integers(2, 7), st.integers(1, 60), st.integers(0, 10_000))
def test_predictions_match_a_naive_implementation(n: int, m: int, classes: int, k: int, seed: int) -> None:
    train, train_labels, test, test_labels = made_up(n, m, 7, classes, seed)
    result = knn(train, train_labels, test, test_labels, k=k, temperature=0.1)
    scores = [naive_scores(train, train_labels, query, min(k, n), 0.1) for query in test]
    assert result.predictions.tolist() == [best(score)[0] for score in scores]
    right = [truth == best(score)[0] for score, truth in zip(scores, test_labels.tolist(), strict=True)]
    assert result.top1 == pytest.approx(sum(right) / m)
    if classes > 5:
        right = [truth in best(score, 5) for score, truth in zip(scores, test_labels.tolist(), strict=True)]
        assert result.top5 == pytest.approx(sum(right) / m)
    else:
        assert result.top5 is None


def test_unlabeled_rows_are_left_out() -> None:
    train, labels, test, test_labels = made_up(30, 12, 5, 3, seed=2)
    holes, test_holes = labels.clone(), test_labels.clone()
    holes[::4] = test_holes[::4] = -1
    result = knn(train, holes, test, test_holes, k=3)
    same = knn(train[holes >= 0], labels[holes >= 0], test[test_holes >= 0], test_labels[test_holes >= 0], k=3)
    assert result.predictions.tolist() == same.predictions.tolist()
    assert "11 images without a label left out" in result.protocol


def test_block_sizes_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = made_up(300, 90, 8, 6, seed=3)
    whole = knn(*sets, k=20)
    monkeypatch.setattr(kernels, "_TOPK_BUFFER", 300 * 16)
    monkeypatch.setattr("snclr.evaluation.knn._VOTE_ROWS", 7)
    assert torch.equal(knn(*sets, k=20).predictions, whole.predictions)
    assert knn(*sets, k=20).top5 == whole.top5


def test_k_above_the_training_set_size_is_lowered() -> None:
    sets = made_up(12, 4, 5, 2, seed=4)
    result = knn(*sets)
    assert "k = 12 (200 requested, lowered to the number of training images)" in result.protocol
    assert torch.equal(result.predictions, knn(*sets, k=12).predictions)
    assert "lowered" not in knn(*sets, k=12).protocol


@pytest.mark.parametrize(("sizes", "k"), [([300, 250], 200), ([30, 300], 30), ([2, 30], 10), ([2, 3], 5), ([1, 9], 10)])
def test_k_auto_is_the_smallest_class_between_10_and_200(sizes, k) -> None:
    labels = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    train = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(1))
    test = (torch.randn(6, 4, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1] * 3))
    result = knn(train, labels, *test, k="auto")
    assert f"k = {k} (auto)" in result.protocol
    assert torch.equal(result.predictions, knn(train, labels, *test, k=k).predictions)


def test_ties_go_to_the_lower_class() -> None:
    train = torch.tensor([[1.0, 0.0]]).expand(4, 2)
    labels = torch.tensor([3, 1, 3, 1])
    result = knn(train, labels, torch.tensor([[1.0, 0.0]]).expand(2, 2), torch.tensor([1, 3]), k=4)
    assert result.predictions.tolist() == [1, 1]
    assert result.top1 == 0.5


def test_a_tiny_temperature_does_not_overflow() -> None:
    train, train_labels, test, test_labels = made_up(40, 10, 5, 3, seed=5)
    cold = knn(train, train_labels, test, test_labels, k=20, temperature=1e-4)
    assert torch.equal(cold.predictions, knn(train, train_labels, test, test_labels, k=1).predictions)


def test_the_protocol_states_all_settings() -> None:
    protocol = knn(*made_up(40, 10, 5, 3, seed=6), k=5, temperature=0.2, data="mine, train → test").protocol
    for part in ("kNN", "cosine", "k = 5", "0.2", "40 training", "10 test", "3 classes", "mine, train → test"):
        assert part in protocol


def test_a_class_without_training_images_counts_as_wrong() -> None:
    train, train_labels, test, test_labels = made_up(40, 10, 5, 3, seed=7)
    test_labels = test_labels.clone()
    test_labels[:4] = 9
    result = knn(train, train_labels, test, test_labels, k=5)
    right = (result.predictions == test_labels).double().mean().item()
    assert result.top1 == pytest.approx(right)
    assert "4 test images of a class without training images counted as wrong" in result.protocol


def test_a_class_without_training_images_is_not_in_the_top_5_by_a_tie() -> None:
    train, labels = torch.eye(7)[1:], torch.arange(1, 7)
    result = knn(train, labels, train[:2], torch.tensor([1, 0]), k=1)
    assert result.top5 == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"train_labels": None}, "training images have no labels.*subfolder"),
        (lambda s: {"test_labels": torch.full_like(s[3], -1)}, "test images have no labels"),
        (lambda s: {"train_labels": torch.zeros_like(s[1])}, "all of one class"),
        (lambda s: {"test_labels": s[3] + 10}, "no class of the test images"),
        (lambda s: {"test": s[2] * torch.nan}, "not all finite"),
    ],
)
def test_bad_input_raises_user_error(change: object, message: str) -> None:
    sets = made_up(12, 4, 5, 2, seed=8)
    arguments = dict(zip(("train", "train_labels", "test", "test_labels"), sets, strict=True))
    with pytest.raises(UserError, match=message):
        knn(**(arguments | change(sets)))  # type: ignore[operator]
