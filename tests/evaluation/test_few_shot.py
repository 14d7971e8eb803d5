from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import snclr
from snclr.cli.main import main
from snclr.evaluation.knn import draw_labels, few_shot


def naive_accuracy(train, train_labels, test, test_labels, chosen) -> float:
    """The class of the most similar labeled image, one test image at a time."""
    right = 0
    for query, truth in zip(test.double().numpy(), test_labels.tolist(), strict=True):
        rows = [train[i].double().numpy() for i in chosen]
        cosine = [row @ query / (np.linalg.norm(row) * np.linalg.norm(query)) for row in rows]
        right += int(train_labels[chosen[int(np.argmax(cosine))]]) == truth
    return right / len(test)


@settings(max_examples=15)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_the_mean_matches_a_naive_implementation(classes: int, per_class: int, draws: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features, labels = torch.randn(classes * 9, 4, generator=generator), torch.arange(classes * 9) % classes
    sets = features[: classes * 6], labels[: classes * 6], features[classes * 6 :], labels[classes * 6 :]
    score = few_shot(*sets, labels_per_class=per_class, draws=draws, seed=seed)
    expected = [
        naive_accuracy(*sets, draw_labels(sets[1].numpy(), per_class, seed=seed, draw=draw)) for draw in range(draws)
    ]
    assert score.context["by_draw"] == pytest.approx(expected)
    assert score.top1 == pytest.approx(statistics.fmean(expected))
    if draws > 1:
        assert score.context["standard_error"] == pytest.approx(statistics.stdev(expected) / draws**0.5)


def test_every_image_of_a_class_is_drawn_equally_often() -> None:
    labels = np.repeat([0, 1, 2], [5, 8, 2])
    drawn = np.zeros(len(labels))
    for draw in range(2000):
        chosen = draw_labels(labels, 3, seed=1, draw=draw)
        assert np.bincount(labels[chosen]).tolist() == [3, 3, 2]  # a smaller class gives all of its images
        drawn[chosen] += 1
    share = drawn / 2000
    assert share[:5] == pytest.approx(3 / 5, abs=0.05)
    assert share[5:13] == pytest.approx(3 / 8, abs=0.05)
    assert (share[13:] == 1).all()


def test_unlabeled_images_are_neither_drawn_nor_classified() -> None:
    features, labels = torch.eye(6), torch.tensor([0, 1, -1, 0, 1, -1])
    score = few_shot(features, labels, features, labels, labels_per_class=9, draws=2)
    assert score.top1 == 1.0
    assert len(score.predictions) == 4
    assert "(the smallest class has 2)" in score.protocol
    assert "4 images without a label left out" in score.protocol


def test_more_labels_than_a_class_has_images_are_a_warning(run, images) -> None:
    enough, more = (
        snclr.fewshot(run, data=str(images), labels_per_class=labels, draws=2, quiet=True).warnings
        for labels in (1, 999)
    )
    assert not any("labels per class" in warning for warning in enough)
    assert any("999 labels per class are more than the" in warning for warning in more)


def test_the_command_records_the_mean_and_every_draw(run, images, capsys) -> None:
    result = snclr.fewshot(run, data=str(images), labels_per_class=2, draws=5, baselines=True, quiet=True)
    assert result.kind == "2-shot"
    assert len(result.by_draw) == 5
    assert result.top1 == pytest.approx(statistics.fmean(result.by_draw))
    assert result.standard_error == pytest.approx(statistics.stdev(result.by_draw) / 5**0.5)
    assert set(result.baselines) == {"untrained encoder", "raw pixels"}
    assert main(["fewshot", str(run), "--data", str(images), "--labels-per-class", "2", "--draws", "5"]) == 0
    text = capsys.readouterr().out
    assert "2-shot top-1 ± s.e., mean over 5 draws" in text
    assert f"{result.top1:.1%} ± {result.standard_error:.1%}" in text
