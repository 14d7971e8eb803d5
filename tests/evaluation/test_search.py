from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import snclr
from snclr.checkpoint.encoder_file import load_encoder
from snclr.cli.main import main
from snclr.data.datasets.base import open_dataset
from snclr.errors import UserError
from snclr.evaluation.features import extract_features
from snclr.evaluation.results import NeighborRow
from snclr.evaluation.retrieval.index import FAISS_FROM, choose_index, find_similar, list_count
from tests.helpers import tiny_run


def expected(run: Path, images: Path, key: str, k: int) -> list[tuple[str, float]]:
    """Sort all cosines without the image itself."""
    encoder, spec = load_encoder(run)
    dataset = open_dataset(images)
    result = extract_features(encoder, dataset, image_size=spec.image_size, quiet=True)
    keys = [dataset.key(i) for i in result.ids.tolist()]
    query = result.features[keys.index(key)]
    pairs = zip(keys, result.features, strict=True)
    cosines = {other: torch.cosine_similarity(query, row, dim=0).item() for other, row in pairs}
    del cosines[key]
    return sorted(cosines.items(), key=lambda pair: -pair[1])[:k]


def neighbors(row: NeighborRow) -> list[tuple[str, float]]:
    return [(result.key, result.cosine) for result in row.neighbors]


def assert_same(result: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> None:
    assert [key for key, _ in result] == [key for key, _ in wanted]
    assert [cosine for _, cosine in result] == pytest.approx([cosine for _, cosine in wanted], abs=1e-5)


def test_an_image_of_the_collection_is_not_its_own_result(run, images):
    done = snclr.search(run, images / "red/red_3.png", data=str(images), k=6, quiet=True)
    (row,) = done.queries
    assert_same(neighbors(row), expected(run, images, "red/red_3.png", 6))
    assert row.neighbors[0].path == str(images / row.neighbors[0].key)
    assert row.label == "red"
    assert done.recall is None
    assert "exact over 48 images" in done.method
    assert [skip.key for skip in done.skipped] == ["red/broken.png"]


def test_a_link_counts_as_the_same_image_and_a_copy_does_not(run, images, tmp_path):
    os.symlink(images / "blue/blue_2.png", tmp_path / "link.png")
    (tmp_path / "copy.png").write_bytes((images / "blue/blue_2.png").read_bytes())
    link = snclr.search(run, tmp_path / "link.png", data=str(images), k=5, quiet=True).queries[0]
    copy = snclr.search(run, tmp_path / "copy.png", data=str(images), k=5, quiet=True).queries[0]
    assert "blue/blue_2.png" not in dict(neighbors(link))
    assert copy.neighbors[0].key == "blue/blue_2.png"
    assert copy.neighbors[0].cosine == pytest.approx(1, abs=1e-5)


def test_folder_key_and_embeddings_give_the_same_result(run, images, tmp_path):
    snclr.embed(run, out=tmp_path / "f.parquet", quiet=True)
    snclr.embed(run, out=tmp_path / "n.npy", normalize=True, quiet=True)
    folder = snclr.search(run, images / "green", k=4, quiet=True)
    assert [row.key for row in folder.queries] == sorted(f"green_{i}.png" for i in range(16))
    for file in (None, tmp_path / "f.parquet", tmp_path / "n.npy"):
        by_key = snclr.search(run, "green/green_5.png", k=4, embeddings=file, quiet=True).queries[0]
        by_folder = next(row for row in folder.queries if row.key == "green_5.png")
        assert_same(neighbors(by_key), neighbors(by_folder))
        assert_same(neighbors(by_key), expected(run, images, "green/green_5.png", 4))


def test_k_above_the_collection_size_returns_all_images(run, images):
    (row,) = snclr.search(run, images / "red/red_0.png", k=100, quiet=True).queries
    assert len(row.neighbors) == 47


def test_embeddings_of_other_weights_or_images_raise_user_error(run, images, tmp_path):
    other = tiny_run.train(images, tmp_path / "other", epochs=1, warmup_epochs=0, seed=5)
    snclr.embed(other, out=tmp_path / "f.npz", quiet=True)
    with pytest.raises(UserError, match="other weights"):
        snclr.search(run, images / "red/red_0.png", embeddings=tmp_path / "f.npz", quiet=True)
    more = tiny_run.write_images(tmp_path / "more", each=3, seed=9)
    snclr.embed(run, data=str(more), out=tmp_path / "d.npz", quiet=True)
    with pytest.raises(UserError, match="not those the embeddings were written for"):
        snclr.search(run, images / "red/red_0.png", data=str(images), embeddings=tmp_path / "d.npz", quiet=True)
    result = snclr.search(run, "red/red_2.png", embeddings=tmp_path / "d.npz", k=9, quiet=True)  # data: the file's own
    assert result.collection == str(more)
    assert len(neighbors(result.queries[0])) == 8


def test_out_writes_a_figure(run, images, tmp_path, capsys):
    argv = ["search", str(run), str(images / "red"), "--k", "3", "--out", str(tmp_path / "a/f.png")]
    assert main(argv) == 0
    assert f"wrote {tmp_path / 'a/f.png'}" in capsys.readouterr().out
    with Image.open(tmp_path / "a/f.png") as figure:
        assert figure.height > 12 * 160
    assert main(["search", str(run), str(images / "red/red_1.png"), "--k", "3", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["queries"][0]["neighbors"]) == 3
    assert captured.err == ""


@pytest.mark.parametrize(
    ("image", "flags", "message"),
    [
        ("nothing.png", [], "no file or folder"),
        ("{images}/red/broken.png", [], "not an image of"),
        ("{images}/red/red_1.png", ["--k", "0"], "k must be at least 1, not 0"),
        ("{images}/red/red_1.png", ["--out", "f.jpg"], ".png"),
        ("{images}/red/red_1.png", ["--embeddings", "none.npy"], "none.npy"),
        ("{images}/red/red_1.png", ["--data", "no-such-folder"], "no-such-folder"),
    ],
)
def test_bad_input_exits_with_code_2(run, images, image, flags, message, capsys):
    assert main(["search", str(run), image.format(images=images), *flags]) == 2
    err = capsys.readouterr().err
    assert "snclr search: " in err
    assert message in err


# ---- faiss


def clustered(n: int, d: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(40, d, generator=generator)
    return centers[torch.arange(n) % 40] + 0.4 * torch.randn(n, d, generator=generator)


def test_faiss_reaches_the_recall_and_excludes_the_query(monkeypatch):
    collection = clustered(3000, 24)
    ids = torch.arange(3000)
    rows = torch.arange(0, 3000, 7)
    queries = collection[rows]
    result = find_similar(queries, collection, 10, index="faiss", query_ids=rows, gallery_ids=ids)
    exact = find_similar(queries, collection, 10, index="exact", query_ids=rows, gallery_ids=ids)
    assert not bool((result.index == rows[:, None]).any())
    hits = [len(set(a) & set(b)) / 10 for a, b in zip(result.index.tolist(), exact.index.tolist(), strict=True)]
    assert result.recall is not None
    assert result.recall >= 0.95
    assert np.mean(hits) == pytest.approx(result.recall, abs=0.03)
    assert f"recall@10 {result.recall:.3f}" in result.method
    cosines = F.cosine_similarity(queries[:, None], collection[result.index], dim=2)
    torch.testing.assert_close(result.cosine, cosines, rtol=1e-4, atol=1e-5)
    assert bool((result.cosine[:, :-1] >= result.cosine[:, 1:]).all())


def test_the_measured_recall_is_correct(monkeypatch):
    monkeypatch.setattr("snclr.evaluation.retrieval.index.GOOD_RECALL", 0.0)  # take the first, poor setting
    generator = torch.Generator().manual_seed(1)
    collection, queries = torch.randn(4000, 16, generator=generator), torch.randn(200, 16, generator=generator)
    result = find_similar(queries, collection, 5, index="faiss")
    exact = find_similar(queries, collection, 5, index="exact")
    hits = [len(set(a) & set(b)) / 5 for a, b in zip(result.index.tolist(), exact.index.tolist(), strict=True)]
    assert result.recall == pytest.approx(np.mean(hits))
    assert result.recall < 0.9


def test_faiss_pads_rows_if_the_gallery_is_smaller_than_k():
    result = find_similar(
        torch.eye(3), torch.eye(3), 4, index="faiss", query_ids=torch.arange(3), gallery_ids=torch.arange(3)
    )
    assert result.index[:, 2:].tolist() == [[-1, -1]] * 3
    assert [sorted(row) for row in result.index[:, :2].tolist()] == [[1, 2], [0, 2], [0, 1]]


def test_auto_builds_an_index_only_if_it_saves_work(monkeypatch):
    lists = list_count(FAISS_FROM)
    assert choose_index("auto", lists + 1, FAISS_FROM) == "faiss"
    assert choose_index("auto", lists, FAISS_FROM) == "exact"
    assert choose_index("auto", 10**6, FAISS_FROM - 1) == "exact"
    assert choose_index("exact", 10**6, 10**6) == "exact"
    assert choose_index("faiss", 1, 10) == "faiss"
    with pytest.raises(UserError, match="auto, exact, faiss"):
        choose_index("fast", 1, 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_index("auto", lists + 1, FAISS_FROM) == "exact"
    with pytest.raises(UserError, match=r"snclr\[faiss\]"):
        choose_index("faiss", 1, 10)


def test_bad_input_is_rejected_before_features_are_computed(run, images, tmp_path, monkeypatch):
    monkeypatch.setattr("snclr.evaluation.session.extract_features", lambda *a, **k: pytest.fail("encoded"))
    image = images / "red/red_1.png"
    with pytest.raises(UserError, match="k must be at least 1, not 0"):
        snclr.search(run, image, k=0, quiet=True)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*--out"):
        snclr.search(run, image, out=tmp_path / "file" / "f.png", quiet=True)


def test_embeddings_determine_the_split(run, tmp_path):
    tiny_run.write_images(tmp_path / "set/train", each=3)
    tiny_run.write_images(tmp_path / "set/test", each=2, seed=1)
    file = tmp_path / "f.npz"
    snclr.embed(run, data=str(tmp_path / "set"), split="test", out=file, quiet=True)
    for split in (None, "test"):
        assert snclr.search(run, "red/red_1.png", embeddings=file, split=split, quiet=True).images == 6
    with pytest.raises(UserError, match=r"split 'test'.*not 'train'"):
        snclr.search(run, "red/red_1.png", embeddings=file, split="train", quiet=True)
    assert snclr.search(run, "red/red_1.png", data=str(tmp_path / "set"), quiet=True).images == 9
