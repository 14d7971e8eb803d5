from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from snclr.data.sources import ArraySource, FileSource
from snclr.data.splits import Subset
from snclr.errors import UserError
from snclr.evaluate.features import Features
from snclr.evaluate.neighbors import (
    Neighbor,
    NeighborRow,
    class_names,
    neighbor_table,
    pick_queries,
    same_class_share,
)
from snclr.evaluate.queries import same_images


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


def test_another_source_may_hold_the_same_index() -> None:
    ours, theirs = same_images(source(6), source(6, prefix="t"))
    assert not set(ours.tolist()) & set(theirs.tolist())


def test_an_equal_source_opened_twice_is_the_same_source() -> None:
    ours, theirs = same_images(source(6), source(6))
    assert ours.tolist() == theirs.tolist() == list(range(6))
    picked = Subset(source(6), np.array([4, 1]))
    assert [part.tolist() for part in same_images(picked, source(6))] == [[4, 1], list(range(6))]


def test_folders_with_the_same_names_are_two_sets_and_a_link_to_one_is_that_one(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.png").write_bytes(name.encode())
    (tmp_path / "again").symlink_to(tmp_path / "a")
    one, other, again = (FileSource(n, tmp_path / n, ["0.png", "1.png", "2.png"]) for n in ("a", "b", "again"))
    assert one.fingerprint() == other.fingerprint()
    ours, theirs = same_images(one, other)
    assert not set(ours.tolist()) & set(theirs.tolist())
    assert [part.tolist() for part in same_images(one, again)] == [[0, 1, 2], [0, 1, 2]]
    picked = Subset(one, np.array([2]))
    ours, theirs = same_images(picked, other)
    assert not set(ours.tolist()) & set(theirs.tolist())
    assert same_images(picked, again)[0].tolist() == [2]


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
