"""The cached file list of a large folder equals a fresh listing after any change."""

import os
import pickle

import pytest
from PIL import Image

from snclr.data.cache import ShardCache, cache_folder, load_cached, save_cached
from snclr.data.datasets import folder as folders
from snclr.data.datasets.folder import list_images


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "MIN_FILES", 3)
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
    """Set the modification times of all folders back: recent times are not trusted."""
    for folder, _, _ in os.walk(top):
        status = os.stat(folder)
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns - 10**10))


def scans(monkeypatch):
    read = []
    original = os.scandir
    monkeypatch.setattr(
        folders.os, "scandir", lambda folder: (read.append(os.path.basename(folder)), original(folder))[1]
    )
    return read


def test_a_second_opening_reads_no_directory(tree, cache, monkeypatch):
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
def test_only_changed_directories_are_read_again(tree, monkeypatch, change, again):
    list_images(tree)
    change(tree)
    with monkeypatch.context() as patch:
        read = scans(patch)
        found = list_images(tree)
        assert read == again
    monkeypatch.setenv("SNCLR_CACHE", "off")
    assert found == list_images(tree)


def test_recently_changed_directories_are_not_cached(tree):
    (tree / "a" / "3.jpg").touch()
    before = os.stat(tree / "a")
    list_images(tree)
    (tree / "a" / "4.jpg").touch()
    os.utime(tree / "a", ns=(before.st_atime_ns, before.st_mtime_ns))  # as if within one tick of the clock
    assert "a/4.jpg" in list_images(tree)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-5], lambda data: data[:100] + b"\1" + data[101:], lambda _: b""]
)
def test_a_damaged_cache_is_rebuilt_with_a_warning(tree, cache, caplog, damage):
    names = list_images(tree)
    (entry,) = (cache / "folder-index").iterdir()
    good = entry.read_bytes()
    entry.write_bytes(damage(good))
    assert list_images(tree) == names
    assert "damaged" in caplog.text
    assert entry.read_bytes() == good


def test_a_cached_list_never_runs_code(tree, cache, tmp_path):
    names = list_images(tree)
    (entry,) = (cache / "folder-index").iterdir()

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    entry.write_bytes(pickle.dumps(Evil()))
    assert list_images(tree) == names
    assert not (tmp_path / "ran").exists()


def test_small_folders_and_disabled_caches_write_nothing(tree, cache, monkeypatch):
    monkeypatch.setattr(folders, "MIN_FILES", 100)
    list_images(tree)
    monkeypatch.setattr(folders, "MIN_FILES", 1)
    monkeypatch.setenv("SNCLR_CACHE", "off")
    assert cache_folder() is None
    list_images(tree)
    assert not cache.exists()


def test_an_unwritable_cache_is_not_an_error(tree, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "file"))
    assert len(list_images(tree)) == 4
    assert "cannot be written" in caplog.text


def test_the_limit_comes_from_the_environment(monkeypatch):
    assert ShardCache.open("shards").limit == 200 * 10**9
    monkeypatch.setenv("SNCLR_CACHE_SIZE", "5GB")
    assert ShardCache.open("shards").limit == 5 * 10**9


def test_cache_entries_are_hashed(tmp_path, caplog):
    save_cached(tmp_path / "x", b"content")
    assert load_cached(tmp_path / "x", bytes.decode) == "content"
    assert load_cached(tmp_path / "missing", bytes.decode) is None
    assert not caplog.text
    save_cached(tmp_path / "x", b"\xff")
    assert load_cached(tmp_path / "x", bytes.decode) is None
    assert "damaged" in caplog.text


def test_open_dataset_uses_the_cached_list(tree, monkeypatch):
    from snclr.data.datasets.base import open_dataset

    Image.new("RGB", (4, 4)).save(tree / "a" / "1.jpg")
    first = open_dataset(tree)
    settle(tree)
    open_dataset(tree)
    read = scans(monkeypatch)
    again = open_dataset(tree)
    assert "deep" not in read
    assert list(again.files) == list(first.files)
    assert again.classes == ["a", "b"]
