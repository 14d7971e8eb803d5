from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from snclr.data.datasets.base import ArrayDataset, FileDataset
from snclr.data.splits import Subset
from snclr.evaluation.features import Features
from snclr.evaluation.results import Neighbor, NeighborRow
from snclr.evaluation.retrieval.gallery import (
    Gallery,
    Queries,
    neighbor_purity,
    neighbor_rows,
    same_images,
)
from snclr.evaluation.retrieval.neighbors import pick_queries
from snclr.evaluation.retrieval.space import EmbeddingSpace
from snclr.methods.snclr.loss import SoftNeighborLoss, positiveness


def dataset(n: int, *, prefix: str = "s", labels: list[int] | None = None, seed: int = 0) -> ArrayDataset:
    images = np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3), dtype=np.uint8)
    numbers = None if labels is None else np.array(labels, dtype=np.int64)
    return ArrayDataset("s", images, numbers, None if labels is None else ["cat", "dog"], prefix=prefix)


def make_queries(y2: Tensor, y1: Tensor | None = None, source: ArrayDataset | None = None) -> Queries:
    ids = torch.arange(len(y2))
    return Queries(source or dataset(len(y2), prefix="q"), Features(y2, None, ids), y2 if y1 is None else y1)


def make_gallery(features: Tensor, source: ArrayDataset | None = None) -> Gallery:
    ids = torch.arange(len(features))
    return Gallery.from_features(Features(features, None, ids), source or dataset(len(features), prefix="c"))


def test_neighbors_and_weights_match_a_naive_implementation() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, gallery = torch.randn(3, 6, generator=generator), torch.randn(20, 6, generator=generator)
    weigh = functools.partial(positiveness, gamma="max", temperature=0.5)
    rows, hits = neighbor_rows(make_queries(queries), make_gallery(gallery), 4, weigh=weigh)
    assert hits.recall is None
    for number, row in enumerate(rows):
        cosines = [torch.cosine_similarity(queries[number], c, dim=0).item() for c in gallery]
        nearest = sorted(range(20), key=lambda i: -cosines[i])[:4]
        assert (row.key, row.index, row.label) == (f"q/{number}", number, None)
        assert [neighbor.index for neighbor in row.neighbors] == nearest
        assert [neighbor.key for neighbor in row.neighbors] == [f"c/{i}" for i in nearest]
        assert [n.cosine for n in row.neighbors] == pytest.approx([cosines[i] for i in nearest], abs=1e-6)
        expected = [math.exp((cosines[i] - cosines[nearest[0]]) / 0.5) for i in nearest]
        assert [neighbor.w for neighbor in row.neighbors] == pytest.approx(expected, abs=1e-5)
        assert row.neighbors[0].w == 1.0
        assert all(neighbor.same_class is None and neighbor.path is None for neighbor in row.neighbors)


def test_the_search_uses_y2_and_the_ranking_y1() -> None:
    y2, y1 = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    gallery = torch.tensor([[1.0, 0.2], [0.6, 0.8], [-1.0, 0.0]])
    ((row,), hits) = neighbor_rows(make_queries(y2, y1), make_gallery(gallery), 2)
    assert hits.index.tolist() == [[0, 1]]
    assert [neighbor.index for neighbor in row.neighbors] == [1, 0]
    assert row.neighbors[0].w == 1.0
    assert row.neighbors[1].w == pytest.approx(math.exp(0.2 / math.hypot(1, 0.2) - 0.8))


def test_an_image_is_never_its_own_neighbor() -> None:
    features, source = torch.eye(4) + 0.1, dataset(4)
    rows, _ = neighbor_rows(make_queries(features, source=source), make_gallery(features, source), 9)
    for row in rows:
        assert sorted(neighbor.index for neighbor in row.neighbors) == [i for i in range(4) if i != row.index]
        assert all(math.isfinite(neighbor.cosine) and 0 < neighbor.w <= 1 for neighbor in row.neighbors)


def test_classes_are_compared_by_name() -> None:
    gallery = make_gallery(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), dataset(3, labels=[0, -1, 1]))
    query = make_queries(torch.tensor([[1.0, 0.0]]), source=dataset(1, prefix="q", labels=[0]))
    ((row,), _) = neighbor_rows(query, gallery, 3)
    assert [neighbor.same_class for neighbor in row.neighbors] == [True, None, False]
    assert [neighbor.label for neighbor in row.neighbors] == ["cat", None, "dog"]


def test_a_query_takes_its_label_from_the_same_image_in_the_gallery() -> None:
    source = dataset(3, labels=[0, 1, 1])
    unlabeled = ArrayDataset(source.name, source.images, prefix="s")
    features = torch.eye(3)
    rows, _ = neighbor_rows(make_queries(features, source=unlabeled), make_gallery(features, source), 1)
    assert [row.label for row in rows] == ["cat", "dog", "dog"]


def test_a_queue_without_its_images_gives_numbers() -> None:
    gallery = Gallery(torch.eye(2), torch.tensor([7, 9]), None, "the run's queue, 2 features")
    ((row,), _) = neighbor_rows(make_queries(torch.tensor([[0.0, 1.0]])), gallery, 1)
    assert [(neighbor.key, neighbor.index) for neighbor in row.neighbors] == [("image 9", 9)]


def test_images_of_different_datasets_are_different() -> None:
    query_ids, gallery_ids = same_images(dataset(6), dataset(6, prefix="t"))
    assert not set(query_ids.tolist()) & set(gallery_ids.tolist())


def test_a_dataset_opened_twice_has_the_same_images() -> None:
    query_ids, gallery_ids = same_images(dataset(6), dataset(6))
    assert query_ids.tolist() == gallery_ids.tolist() == list(range(6))
    picked = Subset(dataset(6), np.array([4, 1]))
    assert [ids.tolist() for ids in same_images(picked, dataset(6))] == [[4, 1], list(range(6))]


def test_folders_with_equal_names_differ_and_a_linked_folder_is_the_same(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.png").write_bytes(name.encode())
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    one, other, linked = (FileDataset(n, tmp_path / n, ["0.png", "1.png", "2.png"]) for n in ("a", "b", "linked"))
    assert one.fingerprint() == other.fingerprint()
    query_ids, gallery_ids = same_images(one, other)
    assert not set(query_ids.tolist()) & set(gallery_ids.tolist())
    assert [ids.tolist() for ids in same_images(one, linked)] == [[0, 1, 2], [0, 1, 2]]
    picked = Subset(one, np.array([2]))
    query_ids, gallery_ids = same_images(picked, other)
    assert not set(query_ids.tolist()) & set(gallery_ids.tolist())
    assert same_images(picked, linked)[0].tolist() == [2]


def test_neighbor_purity_counts_labeled_pairs_by_rank() -> None:
    def row(*same: bool | None) -> NeighborRow:
        return NeighborRow("q", 0, None, [Neighbor("c", 0, 1.0, 1.0, None, value) for value in same])

    assert neighbor_purity([row(True, False, None), row(True, None), row(False, True, None)]) == [2 / 3, 0.5, None]
    assert neighbor_purity([]) == []


def test_picked_queries_alternate_between_classes() -> None:
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 5 + [-1] * 3)
    features = Features(torch.zeros(63, 1), labels, torch.arange(63))
    assert sorted(labels[pick_queries(features, 6)].tolist()) == [0, 0, 1, 1, 2, 2]
    assert pick_queries(features, 6).tolist() == pick_queries(features, 6).tolist()
    assert pick_queries(features, 6).tolist() != pick_queries(features, 6, seed=1).tolist()
    every = pick_queries(features, 100)
    assert sorted(every.tolist()) == list(range(63))
    assert (labels[every[-3:]] == -1).all()


def test_picked_queries_without_labels_are_distinct() -> None:
    picked = pick_queries(Features(torch.zeros(20, 1), None, torch.arange(20)), 8).tolist()
    assert len(set(picked)) == 8


@pytest.mark.parametrize(("k", "words"), [(3, "the 5 nearest neighbors with"), (20, "the 20 nearest neighbors (5 in")])
def test_the_words_about_w_have_the_number_of_neighbors_that_share_it(k: int, words: str) -> None:
    space = EmbeddingSpace({}, "y2", 16, "", criterion=SoftNeighborLoss(dim=4, queue_length=8, neighbors=5))
    described = space.describe_weights(k)
    assert words in described
    assert f"Equal weights would be {1 / max(k, 5):.3f}" in described
