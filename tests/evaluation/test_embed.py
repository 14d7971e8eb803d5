from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

import snclr
from snclr.checkpoint.encoder_file import load_encoder
from snclr.cli.main import main
from snclr.data.datasets.base import open_dataset
from snclr.errors import UserError
from snclr.evaluation.features import extract_features
from snclr.evaluation.retrieval.embeddings import Embeddings, keys_file, read_embeddings, write_embeddings
from tests.helpers import tiny_run


def read_labels(path: Path) -> list[str | None] | None:
    """Read the labels of a file as another program does."""
    if path.suffix == ".npy":
        return json.loads(keys_file(path).read_text())["labels"]
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        return table["label"].to_pylist() if "label" in table.column_names else None
    with np.load(path) as file:
        if "labels" not in file:
            return None
        pairs = zip(file["labels"].tolist(), file["labeled"].tolist(), strict=True)
        return [label if known else None for label, known in pairs]


@pytest.mark.parametrize("ending", [".npy", ".npz", ".parquet"])
def test_files_hold_the_encoder_features_of_every_readable_image(run, images, ending, tmp_path):
    done = snclr.embed(run, data=str(images), out=tmp_path / f"new/f{ending}", quiet=True)
    encoder, spec = load_encoder(run)
    dataset = open_dataset(images)
    expected = extract_features(encoder, dataset, image_size=spec.image_size, quiet=True)
    result = read_embeddings(tmp_path / f"new/f{ending}")
    assert result.features.dtype == np.float32
    assert torch.equal(torch.from_numpy(result.features), expected.features)
    assert result.keys == [dataset.key(i) for i in expected.ids.tolist()]
    assert read_labels(tmp_path / f"new/f{ending}") == [key.split("/")[0] for key in result.keys]
    assert done.images == len(result.keys) == 48
    assert [skip["key"] for skip in done.metadata["skipped"]] == ["red/broken.png"]
    meta = result.metadata
    assert meta["weights_sha256"] == json.loads((run / "config.json").read_text())["snclr"]["weights_sha256"]
    assert (meta["encoder"], meta["run"], meta["image_size"]) == ("resnet10-tiny", str(run), 16)
    assert (meta["normalize"], meta["data"], meta["split"]) == (False, str(images), "train")
    assert meta == done.metadata
    assert not list(tmp_path.rglob("*.partial"))


def test_files_are_readable_by_numpy_and_pyarrow(run, tmp_path):
    for ending in (".npy", ".npz", ".parquet"):
        snclr.embed(run, out=tmp_path / f"f{ending}", normalize=True, quiet=True)
    array = np.load(tmp_path / "f.npy")
    np.testing.assert_allclose(np.linalg.norm(array, axis=1), 1, rtol=1e-5)
    names = json.loads((tmp_path / "f.keys.json").read_text())
    assert len(names["keys"]) == len(array)
    with np.load(tmp_path / "f.npz") as file:
        assert file["keys"].tolist() == names["keys"]
        np.testing.assert_array_equal(file["features"], array)
    table = pyarrow.parquet.read_table(tmp_path / "f.parquet")
    assert table.column_names[:3] == ["key", "label", "feature"]
    assert str(table.schema.field("feature").type) == f"fixed_size_list<element: float>[{array.shape[1]}]"
    assert table["feature"][3].as_py() == array[3].tolist()
    assert json.loads(table.schema.metadata[b"snclr"])["normalize"] is True


def test_a_parquet_file_has_a_layout_and_the_nearest_images(run, images, tmp_path):
    snclr.embed(run, data=str(images), out=tmp_path / "a.parquet", neighbors=4, quiet=True)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    saved = read_embeddings(tmp_path / "a.parquet")
    unit = torch.nn.functional.normalize(torch.from_numpy(saved.features), dim=1)
    cosine = (unit @ unit.T).fill_diagonal_(-2)
    nearest = table["neighbors"].to_pylist()
    for row in range(len(unit)):
        best, index = cosine[row].topk(4)
        assert nearest[row]["ids"] == index.tolist()
        assert nearest[row]["distances"] == pytest.approx((1 - best).tolist(), abs=1e-5)
    x, y = (np.array(table[f"projection_{axis}"]) for axis in "xy")
    assert x.var() > y.var() > 0  # the first principal component, then the second
    assert saved.metadata["layout"].startswith("PCA")
    snclr.embed(run, data=str(images), out=tmp_path / "b.parquet", layout="none", neighbors=0, quiet=True)
    assert pyarrow.parquet.read_table(tmp_path / "b.parquet").column_names == ["key", "label", "feature"]
    with pytest.raises(UserError, match="one of none, pca, umap"):
        snclr.embed(run, data=str(images), out=tmp_path / "c.parquet", layout="other", quiet=True)


def test_labels_are_optional(tmp_path):
    plain = Embeddings(np.ones((2, 3), np.float32), ["a", "b"], None, {})
    some = Embeddings(np.ones((2, 3), np.float32), ["a", "b"], [None, "x"], {})
    for ending in (".npy", ".npz", ".parquet"):
        for embeddings in (plain, some):
            write_embeddings(tmp_path / f"f{ending}", embeddings)
            assert read_labels(tmp_path / f"f{ending}") == embeddings.labels
    write_embeddings(tmp_path / "f.parquet", plain)
    assert pyarrow.parquet.read_table(tmp_path / "f.parquet").column_names == ["key", "feature"]


def test_split_selects_the_images(run, tmp_path):
    tiny_run.write_images(tmp_path / "set/train", each=3)
    tiny_run.write_images(tmp_path / "set/test", each=2)
    for split, count in (("train", 9), ("test", 6), ("all", 15)):
        done = snclr.embed(run, data=str(tmp_path / "set"), split=split, out=tmp_path / f"{split}.npz", quiet=True)
        assert (done.images, done.metadata["split"]) == (count, split)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    old = Embeddings(np.zeros((1, 2), np.float32), ["old"], None, {})
    write_embeddings(tmp_path / "f.npy", old)

    def fail(file, array, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(UserError, match="no space"):
        write_embeddings(tmp_path / "f.npy", Embeddings(np.ones((1, 2), np.float32), ["new"], None, {}))
    assert read_embeddings(tmp_path / "f.npy").keys == ["old"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.keys.json", "f.npy"]


def test_bad_input_is_rejected_before_the_encoder_is_loaded(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("snclr.evaluation.session.load_encoder", lambda folder: pytest.fail("loaded"))
    for out, message in ((tmp_path / "f.csv", ".parquet"), (tmp_path / "f", ".npy"), (tmp_path, "has no suffix")):
        with pytest.raises(UserError, match=message):
            snclr.embed(run, out=out)
    (tmp_path / "d.npy").mkdir()
    with pytest.raises(UserError, match="folder"):
        snclr.embed(run, out=tmp_path / "d.npy")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"snclr\[parquet\]"):
        snclr.embed(run, out=tmp_path / "f.parquet")
    monkeypatch.undo()
    assert main(["embed", str(tmp_path), "--out", str(tmp_path / "f.npy")]) == 2
    assert "snclr embed: " in capsys.readouterr().err


def test_damaged_and_foreign_files_raise_user_error(tmp_path):
    good = Embeddings(np.eye(3, dtype=np.float32), ["a", "b", "c"], None, {})
    for ending in (".npy", ".npz", ".parquet"):
        path = tmp_path / f"f{ending}"
        write_embeddings(path, good)
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(UserError):
            read_embeddings(path)
    write_embeddings(tmp_path / "f.npy", good)
    np.save(tmp_path / "f.npy", np.zeros((3, 3), np.float32))
    with pytest.raises(UserError, match="do not match"):
        read_embeddings(tmp_path / "f.npy")
    np.save(tmp_path / "p.npy", np.array([object()]), allow_pickle=True)
    keys_file(tmp_path / "p.npy").write_text('{"features_sha256": "", "keys": [], "labels": null, "metadata": {}}')
    with pytest.raises(UserError):  # a pickle is never opened
        read_embeddings(tmp_path / "p.npy")
    np.save(tmp_path / "alone.npy", np.zeros((3, 3), np.float32))
    with pytest.raises(UserError, match=r"alone\.keys\.json"):
        read_embeddings(tmp_path / "alone.npy")
    with pytest.raises(UserError, match="no file"):
        read_embeddings(tmp_path / "none.npz")


def test_the_command_prints_the_file_and_the_skipped_images(run, tmp_path, capsys):
    assert main(["embed", str(run), "--out", str(tmp_path / "f.npy")]) == 0
    out = capsys.readouterr().out
    assert "48 images × 128 features" in out
    assert "red/broken.png" in out
    assert main(["embed", str(run), "--out", str(tmp_path / "f.npz"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["images"] == 48
    assert captured.err == ""


def test_an_existing_file_is_replaced_only_on_request(run, tmp_path, capsys):
    out = tmp_path / "f.npz"
    out.write_text("mine")
    argv = ["embed", str(run), "--out", str(out)]
    assert main(argv) == 2
    assert f"{out} exists. Choose another file, or replace it with --overwrite." in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main([*argv, "--overwrite"]) == 0
    assert len(read_embeddings(out).keys) == 48


def test_an_unwritable_path_is_rejected_before_features_are_computed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("snclr.evaluation.session.extract_features", lambda *a, **k: pytest.fail("computed"))
    (tmp_path / "file").write_text("a file")
    for out in ("/proc/nope/x.npz", f"{tmp_path}/file/x.npy"):
        assert main(["embed", str(run), "--out", out]) == 2
        err = capsys.readouterr().err
        assert f"snclr embed: cannot write {out} (" in err
        assert "--out" in err
    with pytest.raises(UserError, match="no-such"):
        snclr.embed(run, data="no-such", out=tmp_path / "a/b/x.npz")
    assert not (tmp_path / "a").exists()


def test_an_io_error_while_writing_is_reported(run, tmp_path, monkeypatch, capsys):
    def fail(file, *_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(np, "savez", fail)
    assert main(["embed", str(run), "--out", str(tmp_path / "x.npz")]) == 2
    assert "Input/output error" in capsys.readouterr().err
