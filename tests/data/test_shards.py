"""Local shards: discovery, labels, index cache, order, and damaged or hostile content."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
import webdataset
from braceexpand import braceexpand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snclr.api.export import pack
from snclr.data.datasets.base import open_dataset
from snclr.data.decode import BadImage
from snclr.data.labels import sort_classes
from snclr.data.loader import ViewLoader
from snclr.data.sampler import epoch_order, windowed_order
from snclr.data.shards import dataset as shards_module
from snclr.data.shards.dataset import ShardDataset
from snclr.data.shards.manifest import MANIFEST, read_manifest
from snclr.data.shards.open import expand_braces
from snclr.data.splits import open_splits, take
from snclr.data.transforms.views import VIEW_GROUPS
from snclr.errors import UserError
from tests.helpers.shard_data import BAD, jpeg, make_folder, make_shards, make_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def batches(source, start, stop, **changes):
    options = {"views": VIEW_GROUPS["byol"], "image_size": 16, "batch_size": 4, "seed": 3, "max_bad_share": 0.9}
    return list(ViewLoader(source, **{**options, **changes}).batches(start, stop))


# Opening


def test_shards_are_opened_by_braces_glob_folder_and_name(tmp_path):
    make_shards(tmp_path / "s")
    specs = [
        f"{tmp_path}/s/{{00..02}}.tar",
        f"{tmp_path}/s/*.tar",
        str(tmp_path / "s"),
        f"file://{tmp_path}/s/{{00..02}}.tar",
    ]
    for spec in specs:
        source = open_dataset(spec)
        assert isinstance(source, ShardDataset)
        assert len(source) == 12
        assert source.classes == ["0", "1"]
        assert source.labels.tolist() == [0, 1] * 6
        assert source.key(5) == "01.tar/0001.jpg"
        assert source.read(5) == jpeg(101)
        assert source.load(5).shape == (20, 24, 3)
        assert source.name == spec
    assert len(open_dataset(tmp_path / "s" / "01.tar")) == 4


def test_shards_of_webdataset_are_read(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(5):
            writer.write({"__key__": f"deep/{number:06d}", "jpg": jpeg(number), "cls": number % 3, "txt": "a caption"})
    source = open_dataset(tmp_path / "a.tar")
    assert [source.read(i) for i in range(len(source))] == [jpeg(i) for i in range(5)]
    assert source.labels.tolist() == [0, 1, 2, 0, 1]
    assert source.classes == ["0", "1", "2"]
    assert source.key(4) == "a.tar/deep/000004.jpg"


def test_labels_are_read_from_cls_and_json_members(tmp_path):
    make_tar(
        tmp_path / "a.tar",
        [
            ("1.jpg", jpeg(1)), ("1.cls", b"10\n"),
            ("2.cls", b"9"), ("2.jpg", jpeg(2)), ("2.json", b'{"label": 10}'),
            ("3.json", b'{"label": 10, "caption": "x"}'), ("3.png", jpeg(3)),
            ("4.jpg", jpeg(4)), ("4.txt", b"a caption is no label"),
            ("5.jpg", jpeg(5)), ("5.json", b"not json"), ("6.jpg", jpeg(6)), ("6.cls", b"-1"),
            ("7.left.jpg", jpeg(7)), ("7.right.jpg", jpeg(8)), ("7.cls", b"09"),
        ],
    )  # fmt: skip
    source = open_dataset(tmp_path / "a.tar")
    names = [source.classes[label] if label >= 0 else None for label in source.labels]
    assert source.classes == ["9", "10"]
    assert names == ["10", "9", "10", None, None, None, "9", "9"]


def test_shards_without_labels_and_classes_over_several(tmp_path):
    assert open_dataset(make_shards(tmp_path / "s", labels=False)).labels is None
    for number, name in enumerate(("wolf", "ant", "wolf")):
        make_tar(tmp_path / "t" / f"{number}.tar", [("1.jpg", jpeg(number)), ("1.cls", name.encode())])
    source = open_dataset(tmp_path / "t")
    assert source.classes == ["ant", "wolf"]
    assert source.labels.tolist() == [1, 0, 1]


def test_hostile_members_are_never_used(tmp_path):
    import io
    import tarfile

    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("../../up.jpg", "/root.jpg", ".hidden.jpg", "good.jpg", "code.pyd", "good.pickle"):
            info = tarfile.TarInfo(name)
            info.size = len(jpeg(1))
            tar.addfile(info, io.BytesIO(jpeg(1)))
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.jpg")
        tar.addfile(link)
    (tmp_path / "secret.jpg").write_bytes(jpeg(9))
    source = open_dataset(path)
    assert [source.key(i) for i in range(len(source))] == ["a.tar/good.jpg"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "cache", "secret.jpg"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pipe:touch {0}/ran", "not accepted"),
        ("pipe:touch {0}/ran #.tar", "not accepted"),
        ("simplecache::file://{0}/a.tar", "not accepted"),
        ("ssh://host/a.tar", "not accepted"),
        ("{0}/no/*.tar", "no shard matches"),
        ("{0}/{{1..x}}.tar", "braces must hold a range"),
        ("{0}/{{0..999999999}}.tar", "more than 100,000"),
        ("{0}/bad.tar", "no valid tar header at byte 0"),
        ("{0}/packed.tar.gz", "compressed with gzip"),
        ("{0}/empty.tar", "no images in the shards of"),
    ],
)
def test_invalid_shards_are_rejected_and_nothing_is_executed(tmp_path, spec, message):
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 200)
    (tmp_path / "packed.tar.gz").write_bytes(b"\x1f\x8b" + bytes(600))
    make_tar(tmp_path / "empty.tar", [("readme.txt", b"hello")])
    with pytest.raises(UserError, match=message):
        open_dataset(spec.format(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["a{0..3}", "a{00..12}b{x,y}", "{5..2}", "{0..10..3}", "plain", "{08..10}/{a,b}.tar"])
def test_braces_expand_as_in_webdataset(text):
    assert expand_braces(text) == list(braceexpand(text))


# The cached index


def test_the_index_is_cached_until_the_shard_changes(tmp_path, cache, monkeypatch):
    make_shards(tmp_path / "s", shards=2)
    first = open_dataset(tmp_path / "s")
    assert len(list((cache / "shard-index").iterdir())) == 2
    monkeypatch.setattr("snclr.data.shards.index._scan", lambda *_: pytest.fail("scanned again"))
    again = open_dataset(tmp_path / "s")
    assert again.fingerprint() == first.fingerprint()
    monkeypatch.undo()
    monkeypatch.setenv("SNCLR_CACHE", str(cache))
    make_tar(tmp_path / "s" / "01.tar", [("x.jpg", jpeg(7))])
    changed = open_dataset(tmp_path / "s")
    assert len(changed) == 5
    assert changed.fingerprint() != first.fingerprint()


def test_a_damaged_index_is_rebuilt(tmp_path, cache, caplog):
    make_shards(tmp_path / "s", shards=1)
    digest = open_dataset(tmp_path / "s").fingerprint()
    (entry,) = (cache / "shard-index").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert open_dataset(tmp_path / "s").fingerprint() == digest
    assert "damaged" in caplog.text


# Order, views, workers


def test_packed_shards_give_the_batches_of_the_folder(tmp_path):
    make_folder(tmp_path / "f", count=14, bad=(5,))
    pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, quiet=True)
    folder, shards = open_dataset(tmp_path / "f"), open_dataset(tmp_path / "s")
    assert [shards.key(i) for i in range(14)] == [folder.key(i) for i in range(14)]
    assert shards.labels.tolist() == folder.labels.tolist()
    assert shards.classes == folder.classes
    for a, b in zip(batches(folder, 0, 7), batches(shards, 0, 7), strict=True):
        assert torch.equal(a.ids, b.ids)
        assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))


def test_ranks_and_resume_share_one_order(tmp_path, monkeypatch):
    source = open_dataset(make_shards(tmp_path / "s", shards=6))
    monkeypatch.setattr(shards_module, "WINDOW", 2)
    source.remote = True  # the order of remote shards
    whole = batches(source, 0, 12)
    assert not np.array_equal(np.concatenate([b.ids for b in whole[:6]]), epoch_order(24, 3, 0))
    resumed = batches(source, 4, 12)
    assert all(torch.equal(a.views[0], b.views[0]) for a, b in zip(whole[4:], resumed, strict=True))
    for rank in (0, 1):
        part = batches(source, 0, 3, rank=rank, world_size=2)
        assert [b.ids.tolist() for b in part] == [b.ids[2 * rank : 2 * rank + 2].tolist() for b in whole[:3]]


@pytest.mark.slow
def test_worker_processes_read_the_same(tmp_path):
    source = open_dataset(make_shards(tmp_path / "s"))
    source.load(0)  # state of this process must not be pickled
    for a, b in zip(batches(source, 0, 6), batches(source, 0, 6, workers=1), strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.views[1], b.views[1])


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 30), st.integers(0, 5), st.integers(1, 6))
def test_the_windowed_order_is_a_permutation_within_its_window(shards, window, images, epoch, start):
    shard = np.repeat(np.arange(shards), images)
    order, sequence = windowed_order(shard, shards, 7, epoch, window, start)
    again, _ = windowed_order(shard, shards, 7, epoch, window, start)
    assert np.array_equal(order, again)
    assert sorted(order.tolist()) == list(range(len(shard)))
    assert sorted(sequence.tolist()) == list(range(shards))
    position = np.argsort(sequence)[shard[order]]
    # After an image of shard p, no image of shard p - window or earlier follows.
    assert (np.maximum.accumulate(position) - position < window).all() or shards <= window


def test_the_window_mixes_from_the_first_to_the_last_batch():
    shard = np.repeat(np.arange(64), 100)
    order, _ = windowed_order(shard, 64, 0, 0, 16)
    for rows in (order[:200], order[3000:3200], order[-200:]):
        assert len(set(shard[rows])) >= 12
    other, _ = windowed_order(shard, 64, 0, 1, 16)
    assert not np.array_equal(order, other)
    order, _ = windowed_order(shard, 64, 0, 0, 16, 4)
    assert len(set(shard[order[:25]])) == 4
    for rows in (order[1000:1200], order[3000:3200], order[-200:]):
        assert len(set(shard[rows])) >= 12


def test_subsets_keep_the_order_of_their_dataset(tmp_path, monkeypatch):
    source = open_dataset(make_shards(tmp_path / "s", shards=6))
    monkeypatch.setattr(shards_module, "WINDOW", 2)
    source.remote = True
    chosen = np.array([1, 5, 9, 13, 17, 21])
    part = take(source, chosen)
    order = part.epoch_order(0, 0)
    assert sorted(order.tolist()) == list(range(6))
    whole = [i for i in source.epoch_order(0, 0).tolist() if i in set(chosen.tolist())]
    assert chosen[order].tolist() == whole


def test_a_dataset_can_be_pickled_and_keeps_no_file_open(tmp_path):
    source = open_dataset(make_shards(tmp_path / "s", shards=5))
    again = pickle.loads(pickle.dumps(source))
    for index in (*range(20), 0, 19):
        assert again.read(index) == jpeg(100 * (index // 4) + index % 4)
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        link = f"/proc/self/fd/{fd}"
        assert not os.path.exists(link) or not os.readlink(link).startswith(str(tmp_path))
    assert again.fingerprint() == source.fingerprint()


# Damaged content


def test_bad_members_are_skipped_listed_and_replaced(tmp_path):
    entries = [(f"{n}.jpg", BAD if n == 3 else b"" if n == 6 else jpeg(n)) for n in range(8)]
    path = make_tar(tmp_path / "a.tar", entries)
    with open(path, "r+b") as file:  # cut inside the last image
        source = open_dataset(path)
        file.truncate(int(source.index.offset[7]) + 40)
    source = open_dataset(path)
    assert len(source) == 8
    with pytest.raises(BadImage, match="ends inside"):
        source.load(7)
    loader = ViewLoader(source, views=VIEW_GROUPS["byol"], image_size=16, batch_size=4, seed=3, max_bad_share=0.9)
    seen = [batch.ids.tolist() for batch in loader.batches(0, 2)]
    assert {skip.key: skip.reason for skip in loader.skipped}.keys() == {"a.tar/3.jpg", "a.tar/6.jpg", "a.tar/7.jpg"}
    assert not {3, 6, 7} & {i for ids in seen for i in ids}


def test_a_packed_set_with_a_missing_or_short_shard_is_refused(tmp_path):
    make_folder(tmp_path / "f")
    pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, quiet=True)
    shard = tmp_path / "s" / "shard-00001.tar"
    data = shard.read_bytes()
    shard.write_bytes(data[:-512])
    with pytest.raises(UserError, match=r"shard-00001.tar has [\d,]+ bytes, not the .*--verify"):
        open_dataset(tmp_path / "s")
    shard.unlink()
    with pytest.raises(UserError, match="is missing"):
        open_dataset(tmp_path / "s")


def edited(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["shards"][0].update(name="../f/cat/000.jpg"),
        lambda m: m["shards"][0].update(name="/etc/passwd"),
        lambda m: m["shards"][0].update(name="http://host/x.tar"),
        lambda m: m["shards"][0].update(name="pipe:touch x"),
        lambda m: m["shards"][0].update(sha256="x"),
        lambda m: m["index"].update(name="../x"),
        lambda m: m["index"].update(sha256="0" * 64),
        lambda m: m.update(images=1),
        lambda m: m.update(shards=m["shards"][:1]),
        lambda m: m.update(shards=7),
        lambda m: m.update(schema="snclr-shards/99"),
        lambda m: m["shards"][0].update(bytes=10),
        lambda m: m.update(images=float("inf")),
        lambda m: m["shards"][0].update(bytes=float("inf")),
        lambda m: m["shards"][0].update(images=float("nan")),
        lambda m: m["shards"][0].update(images=True),
    ],
)
def test_hostile_manifests_are_refused(tmp_path, change):
    make_folder(tmp_path / "f")
    pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, quiet=True)
    edited(tmp_path / "s" / MANIFEST, change)
    with pytest.raises(UserError, match=r"manifest|schema"):
        open_dataset(tmp_path / "s")


KEYS = st.sampled_from(["shards", "index", "images", "schema", "name", "sha256", "bytes", "seed"])
JSON = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(KEYS, x))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON)
def test_any_json_is_a_manifest_or_an_error(tmp_path, content):
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError):
        read_manifest(tmp_path / MANIFEST)


# Splits


def test_splits_of_shards_are_used_for_evaluation(tmp_path):
    make_folder(tmp_path / "f" / "train", count=8)
    make_folder(tmp_path / "f" / "val", count=4)
    pack(tmp_path / "f", shards=tmp_path / "s", quiet=True)
    train, test, description = open_splits(str(tmp_path / "s"))
    assert (len(train), len(test)) == (8, 4)
    assert "its own train and test" in description
    assert train.classes == test.classes == ["cat", "dog"]
    train, test, _ = open_splits(f"{tmp_path}/s/train")
    assert (len(train), len(test)) == (6, 2)


def test_long_numeric_labels_are_sorted_as_numbers():
    longer = "1" + "0" * 5000
    assert sort_classes([longer, "9", "010", "10", "0"]) == ["0", "9", "010", "10", longer]


@pytest.mark.parametrize("size", [2**62, 2**70, 2**87])
def test_a_shard_with_an_impossible_file_size_is_rejected(tmp_path, size):
    path = tmp_path / "a.tar"
    make_tar(path, [("0.jpg", jpeg(0)), ("1.jpg", jpeg(1))])
    data = bytearray(path.read_bytes())
    at = data.index(b"1.jpg")
    data[at + 124 : at + 136] = b"\x80" + size.to_bytes(11, "big")
    header = data[at : at + 512]
    data[at + 148 : at + 156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"a\.tar claims a file of {size} bytes at byte {at}"):
        open_dataset(str(path))
