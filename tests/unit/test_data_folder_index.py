"""The kept list of a large folder: the same list as reading it anew, whatever changed in between."""

import os
import pickle

import pytest
from PIL import Image

from snclr.data import folder_index
from snclr.data.cache import cache_folder, cache_limit, parse_bytes, seal, unseal
from snclr.data.folder_index import list_images
from snclr.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folder_index, "MIN_FILES", 3)
    return tmp_path / "cache"


@pytest.fixture
def tree(tmp_path):
    top = tmp_path / "images"
    for name in ("a/1.jpg", "a/2.jpg", "b/deep/3.png", "b/4.png"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).touch()
    settle(top)
    return top


def settle(top):
    """Make the folders look as if they had been left alone for a while: fresh times are not trusted."""
    for place, _, _ in os.walk(top):
        status = os.stat(place)
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns - 10**10))


def scans(monkeypatch):
    read = []
    original = os.scandir
    monkeypatch.setattr(
        folder_index.os, "scandir", lambda place: (read.append(os.path.basename(place)), original(place))[1]
    )
    return read


def test_a_second_opening_reads_no_folder(tree, cache, monkeypatch):
    names = list_images(tree)
    assert names == ["a/1.jpg", "a/2.jpg", "b/4.png", "b/deep/3.png"]
    read = scans(monkeypatch)
    assert list_images(tree) == names
    assert read == []


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda top: (top / "a" / "new.jpg").touch(), ["a"]),
        (lambda top: (top / "a" / "1.jpg").unlink(), ["a"]),
        (lambda top: (top / "b" / "4.png").rename(top / "b" / "5.png"), ["b"]),
        (lambda top: ((top / "c").mkdir(), (top / "c" / "x.png").touch()), ["images", "c"]),
        (lambda top: (top / "b" / "deep").rename(top / "b" / "other"), ["b", "other"]),
    ],
)
def test_a_change_is_seen_and_only_its_folder_read(tree, monkeypatch, change, again):
    list_images(tree)
    change(tree)
    with monkeypatch.context() as patch:
        read = scans(patch)
        found = list_images(tree)
        assert read == again
    monkeypatch.setenv("SNCLR_CACHE", "off")
    assert found == list_images(tree)


def test_a_folder_changed_just_now_is_not_trusted(tree):
    (tree / "a" / "3.jpg").touch()
    before = os.stat(tree / "a")
    list_images(tree)
    (tree / "a" / "4.jpg").touch()
    os.utime(tree / "a", ns=(before.st_atime_ns, before.st_mtime_ns))  # as if within one tick of the clock
    assert "a/4.jpg" in list_images(tree)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-5], lambda data: data[:100] + b"\1" + data[101:], lambda _: b""]
)
def test_a_damaged_cache_is_made_again_loudly(tree, cache, caplog, damage):
    names = list_images(tree)
    (kept,) = (cache / "folder-index").iterdir()
    good = kept.read_bytes()
    kept.write_bytes(damage(good))
    assert list_images(tree) == names
    assert "damaged" in caplog.text
    assert kept.read_bytes() == good


def test_a_kept_list_never_runs_code(tree, cache, tmp_path):
    names = list_images(tree)
    (kept,) = (cache / "folder-index").iterdir()

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    kept.write_bytes(pickle.dumps(Evil()))
    assert list_images(tree) == names
    assert not (tmp_path / "ran").exists()


def test_small_folders_and_switched_off_caches_leave_nothing(tree, cache, monkeypatch):
    monkeypatch.setattr(folder_index, "MIN_FILES", 100)
    list_images(tree)
    monkeypatch.setattr(folder_index, "MIN_FILES", 1)
    monkeypatch.setenv("SNCLR_CACHE", "off")
    assert cache_folder() is None
    list_images(tree)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_no_error(tree, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "file"))
    assert len(list_images(tree)) == 4
    assert "cannot be written" in caplog.text


def test_sizes():
    assert [parse_bytes(text, "x") for text in ("4096", "1K", "1.5GB", "2 MiB", "3t")] == [
        4096, 1000, 1_500_000_000, 2_000_000, 3 * 10**12,
    ]  # fmt: skip
    for text in ("", "GB", "-1", "0", "nan", "inf", "1e99", "5X"):
        with pytest.raises(UserError, match="number of bytes"):
            parse_bytes(text, "x")


def test_the_limit_comes_from_the_environment(monkeypatch):
    assert cache_limit() == 200 * 10**9
    monkeypatch.setenv("SNCLR_CACHE_SIZE", "5GB")
    assert cache_limit() == 5 * 10**9


def test_sealed_files(tmp_path):
    import numpy as np

    seal(tmp_path / "x", {"a": np.arange(3), "empty": np.empty(0, np.uint8)})
    found = unseal(tmp_path / "x")
    assert found["a"].tolist() == [0, 1, 2]
    assert found["empty"].shape == (0,)
    assert unseal(tmp_path / "missing") is None


def test_open_source_uses_it(tree, monkeypatch):
    from snclr.data.sources import open_source

    Image.new("RGB", (4, 4)).save(tree / "a" / "1.jpg")
    first = open_source(tree)
    settle(tree)
    open_source(tree)
    read = scans(monkeypatch)
    again = open_source(tree)
    assert "deep" not in read
    assert list(again.files) == list(first.files)
    assert again.classes == ["a", "b"]
