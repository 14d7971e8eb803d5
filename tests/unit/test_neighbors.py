from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from snclr.data.sources import ArraySource
from snclr.errors import UserError
from snclr.evaluate.features import Features, pixel_features
from snclr.evaluate.neighbors import (
    Neighbor,
    NeighborRow,
    class_names,
    find_neighbors,
    neighbor_table,
    pick_queries,
    same_class_share,
)


def keys(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def test_neighbours_and_weights_follow_the_equations() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, candidates = torch.randn(3, 6, generator=generator), torch.randn(20, 6, generator=generator)
    rows = neighbor_table(
        queries, candidates, query_keys=keys("q", 3), candidate_keys=keys("c", 20), k=4, temperature=0.5
    )
    for number, row in enumerate(rows):
        cosines = [torch.cosine_similarity(queries[number], c, dim=0).item() for c in candidates]
        nearest = sorted(range(20), key=lambda i: -cosines[i])[:4]
        assert (row.key, row.index, row.label) == (f"q{number}", number, None)
        assert [found.index for found in row.neighbors] == nearest
        assert [found.key for found in row.neighbors] == [f"c{i}" for i in nearest]
        assert [found.cosine for found in row.neighbors] == pytest.approx([cosines[i] for i in nearest], abs=1e-6)
        expected = [math.exp((cosines[i] - cosines[nearest[0]]) / 0.5) for i in nearest]
        assert [found.w for found in row.neighbors] == pytest.approx(expected, abs=1e-5)
        assert row.neighbors[0].w == 1.0
        assert all(found.same_class is None for found in row.neighbors)


def test_a_number_as_gamma_leaves_a_softmax() -> None:
    rows = neighbor_table(
        torch.randn(2, 4), torch.randn(9, 4), query_keys=keys("q", 2), candidate_keys=keys("c", 9), k=3, gamma=1.0
    )
    assert [sum(found.w for found in row.neighbors) for row in rows] == pytest.approx([1.0, 1.0])


def test_weights_come_from_y1_and_the_search_from_y2() -> None:
    y2 = torch.tensor([[1.0, 0.0]])
    y1 = torch.tensor([[0.0, 3.0]])
    candidates = torch.tensor([[1.0, 0.2], [0.6, 0.8], [-1.0, 0.0]])
    (row,) = neighbor_table(y2, candidates, query_keys=["q"], candidate_keys=keys("c", 3), attention_features=y1, k=2)
    assert [found.index for found in row.neighbors] == [0, 1]
    assert row.neighbors[1].w == 1.0
    assert row.neighbors[0].w == pytest.approx(math.exp(0.2 / math.hypot(1, 0.2) - 0.8))


def test_the_own_image_is_never_a_neighbour() -> None:
    features = torch.eye(4) + 0.1
    ids = torch.tensor([30, 10, 20, 40])
    rows = neighbor_table(
        features, features, query_keys=keys("i", 4), candidate_keys=keys("i", 4), query_ids=ids, candidate_ids=ids, k=9
    )
    for row in rows:
        assert sorted(found.index for found in row.neighbors) == [i for i in range(4) if i != row.index]
        assert all(math.isfinite(found.cosine) and 0 < found.w <= 1 for found in row.neighbors)


def test_classes_are_compared_by_name() -> None:
    (row,) = neighbor_table(
        torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), query_keys=["q"],
        candidate_keys=keys("c", 3), query_labels=["cat"], candidate_labels=["cat", None, "dog"], k=3,
    )  # fmt: skip
    assert [found.same_class for found in row.neighbors] == [True, None, False]
    assert [found.label for found in row.neighbors] == ["cat", None, "dog"]


def test_what_cannot_work_is_refused() -> None:
    names = {"query_keys": ["q"], "candidate_keys": ["c"]}
    with pytest.raises(UserError, match="same encoder"):
        neighbor_table(torch.ones(1, 3), torch.ones(1, 2), **names)
    with pytest.raises(UserError, match="k is 0"):
        neighbor_table(torch.ones(1, 3), torch.ones(1, 3), k=0, **names)
    with pytest.raises(UserError, match="temperature"):
        neighbor_table(torch.ones(1, 3), torch.ones(1, 3), temperature=0.0, **names)


def source(n: int, *, prefix: str = "s", seed: int = 0) -> ArraySource:
    images = np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3), dtype=np.uint8)
    labels = np.arange(n, dtype=np.int64) % 2
    labels[-1] = -1
    return ArraySource("s", images, labels, ["even", "odd"], prefix=prefix)


def test_in_one_source_the_query_is_left_out_and_indices_are_the_sources() -> None:
    images = source(12)
    features = pixel_features(images, 4)
    kept = features.take(torch.tensor([2, 5, 7, 8, 11]))  # as if the others could not be read
    rows = find_neighbors(images, kept.take(torch.tensor([1, 3])), images, kept, k=4)
    assert [(row.index, row.key, row.label) for row in rows] == [(5, "s/5", "odd"), (8, "s/8", "even")]
    for row in rows:
        assert {found.index for found in row.neighbors} == {2, 5, 7, 8, 11} - {row.index}
        for found in row.neighbors:
            assert found.key == f"s/{found.index}"
            known = None if found.index == 11 else (found.index - row.index) % 2 == 0
            assert found.same_class == known


def test_another_source_may_hold_the_same_index() -> None:
    one, other = source(6), source(6, prefix="t")
    other.images[:] = one.images
    rows = find_neighbors(one, pixel_features(one, 4), other, pixel_features(other, 4), k=1)
    assert [row.neighbors[0].index for row in rows] == list(range(6))
    assert all(row.neighbors[0].cosine == pytest.approx(1.0, abs=1e-5) for row in rows)


def test_an_equal_source_opened_twice_is_the_same_source() -> None:
    rows = find_neighbors(source(6), pixel_features(source(6), 4), source(6), pixel_features(source(6), 4), k=5)
    assert all(row.index not in {found.index for found in row.neighbors} for row in rows)


def test_shares_by_rank() -> None:
    def row(*same: bool | None) -> NeighborRow:
        return NeighborRow("q", 0, None, [Neighbor("c", 0, 1.0, 1.0, None, value) for value in same])

    assert same_class_share([row(True, False, None), row(True, None), row(False, True, None)]) == [2 / 3, 0.5, None]
    assert same_class_share([]) == []


def test_queries_take_turns_by_class() -> None:
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 5 + [-1] * 3)
    features = Features(torch.zeros(63, 1), labels, torch.arange(63))
    assert sorted(labels[pick_queries(features, 6)].tolist()) == [0, 0, 1, 1, 2, 2]
    assert pick_queries(features, 6).tolist() == pick_queries(features, 6).tolist()
    assert pick_queries(features, 6).tolist() != pick_queries(features, 6, seed=1).tolist()
    every = pick_queries(features, 100)
    assert sorted(every.tolist()) == list(range(63))
    assert (labels[every[-3:]] == -1).all()


def test_queries_without_labels_are_distinct() -> None:
    picked = pick_queries(Features(torch.zeros(20, 1), None, torch.arange(20)), 8).tolist()
    assert len(set(picked)) == 8


def test_class_names() -> None:
    images = source(4)
    assert class_names(images, torch.tensor([3, 0, 1])) == [None, "even", "odd"]
    images.classes = None
    assert class_names(images, torch.tensor([0, 1])) == ["0", "1"]
    images.labels = None
    assert class_names(images, torch.tensor([0])) is None
