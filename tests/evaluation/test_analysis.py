"""Neighbor graph, layouts and curation against naive loops."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import snclr
from snclr.data.datasets.base import ArrayDataset, FileDataset, open_dataset
from snclr.errors import UserError
from snclr.evaluation.analysis import curation, graph, layout
from snclr.evaluation.analysis.curation import format_list
from snclr.evaluation.subsets import read_list

N, K = 60, 5


@pytest.fixture
def features() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    centers = torch.randn(4, 12, generator=generator)
    return F.normalize(centers.repeat(15, 1) + 0.5 * torch.randn(N, 12, generator=generator), dim=1)


def nearest(features: torch.Tensor, row: int, k: int) -> list[int]:
    cosines = [(float(features[row] @ features[other]), other) for other in range(len(features)) if other != row]
    return [other for _, other in sorted(cosines, reverse=True)[:k]]


def test_the_graph_holds_the_k_most_similar_rows_of_each_row(features):
    found = graph.neighbor_graph(3 * features, K)
    assert found.index.tolist() == [nearest(features, row, K) for row in range(N)]
    assert torch.allclose(found.cosine[7], features[found.index[7]] @ features[7], atol=1e-6)


def test_a_graph_of_few_images_has_fewer_neighbors():
    assert graph.neighbor_graph(torch.eye(3), 10).index.shape == (3, 2)


def test_hubness_counts_in_how_many_lists_an_image_is(features):
    lists = [nearest(features, row, K) for row in range(N)]
    expected = [sum(row in other for other in lists) for row in range(N)]
    assert graph.hubness(graph.neighbor_graph(features, K).index).tolist() == expected


def test_purity_and_reciprocity_equal_their_definitions(features):
    labels = torch.arange(N) % 4
    labels[5] = -1
    lists = [nearest(features, row, K) for row in range(N)]
    found = graph.purity(graph.neighbor_graph(features, K).index, labels)
    mutual = graph.reciprocity(graph.neighbor_graph(features, K).index)
    for row, near in enumerate(lists):
        known = [other for other in near if labels[other] >= 0]
        if labels[row] < 0:
            assert math.isnan(found[row])
        else:
            assert found[row] == pytest.approx(sum(bool(labels[o] == labels[row]) for o in known) / len(known))
        assert mutual[row] == pytest.approx(sum(row in lists[other] for other in near) / K)


def test_overlap_is_the_share_of_common_neighbors(features):
    one = graph.neighbor_graph(features, K).index
    other = graph.neighbor_graph(features[:, :6], K).index
    expected = [len(set(a) & set(b)) / K for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    assert graph.overlap(one, other).tolist() == pytest.approx(expected)


def test_kept_neighbors_and_trustworthiness_equal_their_definitions(features):
    points = layout.pca(features).points
    near = graph.neighbor_graph(features, K).index
    kept = layout.kept_neighbors(near, points)
    trust = layout.trustworthiness(features, points, K, torch.arange(N))
    for row in range(N):
        distance = ((points - points[row]) ** 2).sum(axis=1)
        on_map = [i for i in np.argsort(distance, kind="stable").tolist() if i != row][:K]
        assert kept[row] == pytest.approx(len(set(near[row].tolist()) & set(on_map)) / K)
        ranks = {other: rank for rank, other in enumerate(nearest(features, row, N - 1), start=1)}
        penalty = sum(max(0, ranks[other] - K) for other in on_map)
        assert trust[row] == pytest.approx(1 - 2 / (K * (2 * N - 3 * K - 1)) * penalty, abs=1e-6)
    assert torch.equal(layout.trustworthiness(features, points, K, torch.tensor([9, 2])), trust[[9, 2]])


@given(st.integers(3, 40), st.integers(2, 12), st.integers(0, 9))
def test_pca_is_the_singular_value_decomposition(rows, width, seed):
    features = F.normalize(torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, width))), dim=1)
    found = layout.pca(features)
    left, values, right = torch.linalg.svd(features - features.mean(dim=0), full_matrices=False)
    signs = right[:2].gather(1, right[:2].abs().argmax(dim=1, keepdim=True)).sign()[:, 0]  # largest weights positive
    assert found.points == pytest.approx((left[:, :2] * values[:2] * signs).numpy(), abs=1e-5)
    assert found.explained == pytest.approx((values[:2] ** 2 / (values**2).sum()).tolist())


def test_pca_does_not_depend_on_the_order_of_the_images(features):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    assert layout.pca(features[order].double()).points == pytest.approx(
        layout.pca(features.double()).points[order], abs=1e-6
    )


@pytest.mark.parametrize("features", [torch.ones(5, 4), torch.arange(5.0)[:, None], torch.zeros(3, 1)])
def test_features_of_rank_below_two_have_a_layout(features):
    points, _, explained = layout.pca(features)
    assert points.shape == (len(features), 2)
    assert np.isfinite(points).all()
    assert all(0 <= share <= 1 + 1e-6 for share in explained)


def test_alignment_undoes_rotation_reflection_scale_and_shift(features):
    points = layout.pca(features).points
    angle = 0.7
    turn = np.array([[math.cos(angle), math.sin(angle)], [math.sin(angle), -math.cos(angle)]], np.float32)
    assert np.allclose(layout.align(4 * points @ turn + 3, points), points, atol=1e-5)


def test_umap_is_deterministic_and_keeps_more_neighbors_than_pca():
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(10, 30, generator=generator)
    features = F.normalize(centers.repeat_interleave(20, 0) + 0.3 * torch.randn(200, 30, generator=generator), dim=1)
    near = graph.neighbor_graph(features, 15)
    one, other = (layout.umap_layout(features, near).points for _ in range(2))
    assert np.array_equal(one, other)
    by_umap = layout.kept_neighbors(near.index, one).mean()
    assert by_umap > layout.kept_neighbors(near.index, layout.pca(features).points).mean()


def test_similar_pairs_and_groups_equal_a_search_over_all_pairs(features):
    threshold = 0.8
    pairs = curation.similar_pairs(features, threshold)
    expected = {
        (a, b) for a in range(N) for b in range(a + 1, N) if float(features[a] @ features[b]) >= threshold
    }  # fmt: skip
    assert len(pairs) == len(expected)
    assert set(map(tuple, pairs.tolist())) == expected
    groups: list[set[int]] = []
    for a, b in expected:
        joined = {a, b}.union(*(group for group in groups if group & {a, b}))
        groups = [group for group in groups if not group & joined] + [joined]
    found = curation.duplicate_groups(pairs, N)
    assert sorted(map(sorted, groups)) == sorted(found)
    assert [len(group) for group in found] == sorted((len(group) for group in found), reverse=True)


def test_too_many_pairs_are_refused(monkeypatch, features):
    monkeypatch.setattr(curation, "MAX_PAIRS", 10)
    with pytest.raises(UserError, match="higher threshold"):
        curation.similar_pairs(features, -1.0)


def test_leaks_name_the_nearest_training_image(features):
    train, test = features[:40], torch.cat([features[40:], features[3:4]])
    found = curation.leaks(train, test, 0.9)
    expected = {}
    for row, feature in enumerate(test):
        best = max(range(40), key=lambda other: float(train[other] @ feature))
        if float(train[best] @ feature) >= 0.9:
            expected[row] = best
    assert {row: nearest for row, nearest, _ in found} == expected
    assert found[0][:2] == (20, 3)


def test_the_image_unlike_all_others_has_the_largest_outlier_score(features):
    odd = torch.cat([features, -features.mean(dim=0, keepdim=True)])
    scores = curation.outlier_scores(graph.neighbor_graph(F.normalize(odd, dim=1), K))
    assert int(scores.argmax()) == N
    assert float(scores[0]) == pytest.approx(
        1 - float((features[nearest(features, 0, K)] @ features[0]).mean()), abs=1e-6
    )


def test_suspect_labels_are_those_outvoted_by_the_neighbors(features):
    labels = torch.arange(N) % 4
    labels[8] = 1  # its cluster is 0
    labels[9] = -1
    near = graph.neighbor_graph(features, K)
    found = curation.suspect_labels(near, labels)
    expected = {}
    for row in range(N):
        votes = torch.zeros(4, dtype=torch.float64)
        for other, cosine in zip(near.index[row].tolist(), near.cosine[row].tolist(), strict=True):
            if labels[other] >= 0:
                votes[labels[other]] += math.exp((cosine - 1) / 0.07)
        if labels[row] >= 0 and int(votes.argmax()) != labels[row]:
            expected[row] = (int(votes.argmax()), float(votes.max() / votes.sum()))
    assert {s.row: s.voted for s in found} == {row: voted for row, (voted, _) in expected.items()}
    assert all(s.share == pytest.approx(expected[s.row][1], rel=1e-5) for s in found)
    assert 8 in expected


def test_a_diverse_subset_always_adds_the_image_farthest_from_those_before(features):
    rows, cosines = curation.diverse_subset(features, 12)
    chosen = [int((features @ features.mean(dim=0)).argmax())]
    while len(chosen) < 12:
        largest = [max(float(features[i] @ features[c]) for c in chosen) for i in range(N)]
        chosen.append(min((i for i in range(N) if i not in chosen), key=lambda i: largest[i]))
    assert rows.tolist() == chosen
    assert curation.diverse_subset(features, 5)[0].tolist() == chosen[:5]
    assert float(cosines[3]) == pytest.approx(
        max(float(features[chosen[3]] @ features[c]) for c in chosen[:3]), abs=1e-6
    )


def test_a_subset_of_equal_images_repeats_none():
    assert sorted(curation.diverse_subset(F.normalize(torch.ones(6, 3), dim=1), 6)[0].tolist()) == list(range(6))


# Lists


def test_a_list_is_read_by_data_and_by_finetune_labels(images, tmp_path):
    dataset = open_dataset(str(images))
    reasons = {4: "near-duplicate of\nx", 20: "outlier"}
    (tmp_path / "list.txt").write_text(format_list(dataset, reasons, ["header\nwith a break"]))
    reopened = open_dataset(str(tmp_path / "list.txt"))
    assert [Path(reopened.key(i)).name for i in range(2)] == [Path(dataset.key(i)).name for i in (4, 20)]
    assert read_list(tmp_path / "list.txt", dataset).tolist() == [4, 20]
    assert "# near-duplicate of\\nx\n" in (tmp_path / "list.txt").read_text()


def test_names_that_no_list_can_hold_are_comments(tmp_path):
    names = ["good.png", "two\nlines.png", "tab\t.png", " space.png ", "bad\udcff.png", "#hash.png", "a\u2028b.png"]
    text = format_list(FileDataset("d", tmp_path, names), dict.fromkeys(range(len(names)), "why"), [])
    listed = [line for line in text.splitlines() if not line.startswith("#")]
    assert listed == [str(tmp_path / "good.png"), str(tmp_path / "#hash.png")]
    assert text.count("not listed") == 5


def test_images_without_files_are_listed_by_key():
    dataset = ArrayDataset("demo", np.zeros((3, 4, 4, 3), np.uint8))
    assert "demo/2\n" in format_list(dataset, {2: ""}, [])


@pytest.mark.parametrize("find", ["duplicates", "outliers", "labels", "diverse"])
def test_curate_writes_two_lists_that_cover_all_images(run, images, tmp_path, find):
    out, keep = tmp_path / "out.txt", tmp_path / "keep.txt"
    before = sorted(images.rglob("*"))
    result = snclr.curate(run, find=find, out=out, keep=keep, number=6, k=5, threshold=0.9999, quiet=True)
    listed, kept = (
        [line for line in path.read_text().splitlines() if not line.startswith("#")] for path in (out, keep)
    )
    assert len(listed) == result.found
    assert sorted([*listed, *kept]) == sorted(str(p) for p in images.rglob("*.png") if p.name != "broken.png")
    assert result.skipped == 1
    assert sorted(images.rglob("*")) == before
    if find == "diverse":
        assert len(listed) == 6


def test_curate_replaces_a_list_only_with_overwrite(run, tmp_path):
    out, keep = tmp_path / "out.txt", tmp_path / "keep.txt"
    settings = {"find": "diverse", "number": 3, "quiet": True}
    for existing in (out, keep):
        existing.write_text("mine\n")
        with pytest.raises(UserError, match=rf"{existing.name} exists.*--overwrite"):
            snclr.curate(run, out=out, keep=keep, **settings)
        assert existing.read_text() == "mine\n"
        assert [path.name for path in tmp_path.iterdir()] == [existing.name]
        existing.unlink()
    out.write_text("mine\n")
    snclr.curate(run, out=out, keep=keep, overwrite=True, **settings)
    assert "diverse subset" in out.read_text()
    with pytest.raises(UserError, match="two files"):
        snclr.curate(run, out=tmp_path / "a.txt", keep=tmp_path / "b" / ".." / "a.txt", **settings)


def test_curate_finds_a_copy_in_the_test_images(run, images, tmp_path):
    test = tmp_path / "test"
    test.mkdir()
    (test / "copy.png").write_bytes((images / "red" / "red_3.png").read_bytes())
    result = snclr.curate(run, find="leaks", test=str(test), out=tmp_path / "leaks.txt", threshold=0.9999, quiet=True)
    assert [entry["key"] for entry in result.entries] == ["copy.png"]
    assert "red/red_3.png" in result.entries[0]["reason"]
    with pytest.raises(UserError, match="give --test"):
        snclr.curate(run, find="leaks", out=tmp_path / "other.txt", quiet=True)
