"""The loader: deterministic batches, replacement of bad images, and the lifetime of workers."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from PIL import Image

from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset, open_dataset
from snclr.data.image_cache import ImageCache
from snclr.data.loader import Skip, ViewLoader
from snclr.data.sampler import ViewKey, batch_ids
from snclr.data.transforms.views import TRAIN_CROP, VIEW_GROUPS, color_views, crop_views
from snclr.errors import UserError

SIZE = 24


@pytest.fixture(scope="module")
def demo():
    return open_dataset("demo", split="test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, demo):
    """40 good images of several sizes in two classes, and 4 bad ones that sort among them."""
    path = tmp_path_factory.mktemp("images")
    for index in range(40):
        subfolder = path / ("even" if index % 2 == 0 else "odd")
        subfolder.mkdir(exist_ok=True)
        size = (32 + index, 64 - index)
        Image.fromarray(demo.images[index]).resize(size).save(subfolder / f"{index:02d}.png")
    for number, content in enumerate((b"", b"no image", b"\x89PNG\r\n\x1a\n", b"GIF89a")):
        (path / "odd" / f"1{number}-bad.png").write_bytes(content)
    return path


def loader(dataset, **changes):
    options = {"views": VIEW_GROUPS["byol"], "image_size": SIZE, "batch_size": 8, "seed": 3, "max_bad_share": 0.5}
    return ViewLoader(dataset, **{**options, **changes})


def collect(dataset, start, stop, **changes):
    return list(loader(dataset, **changes).batches(start, stop))


def assert_same(one, two):
    assert [batch.step for batch in one] == [batch.step for batch in two]
    for a, b in zip(one, two, strict=True):
        assert a.epoch == b.epoch
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.labels, b.labels)
        assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))


# Batches


def test_a_batch_in_memory_has_ids_labels_and_views(demo):
    (batch,) = collect(demo, 200, 201)
    epoch, ids = batch_ids(len(demo), 8, 3, 200)
    assert (batch.step, batch.epoch) == (200, epoch) == (200, 1)
    assert batch.ids.tolist() == ids.tolist()
    assert batch.ids.dtype == batch.labels.dtype == torch.int64
    assert batch.labels.tolist() == demo.labels[ids].tolist()
    assert len(batch.views) == 2
    for view in batch.views:
        assert view.shape == (8, 3, SIZE, SIZE)
        assert view.dtype == torch.float32
        assert view.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(*batch.views)


def test_a_batch_from_files_is_crop_then_color(folder):
    dataset = open_dataset(folder)
    (batch,) = collect(dataset, 0, 1)
    for view, how in enumerate(VIEW_GROUPS["byol"]):
        for row, index in enumerate(batch.ids.tolist()):
            key = ViewKey(seed=3, epoch=0, ids=np.array([index]), view=view)
            expected = color_views(crop_views([dataset.load(index)], how, SIZE, key), how, key)
            assert torch.equal(batch.views[view][row : row + 1], expected)
        assert batch.labels.tolist() == dataset.labels[batch.ids].tolist()


def test_an_epoch_sees_every_image(demo):
    dataset = ArrayDataset("x", demo.images[:40])
    batches = collect(dataset, 5, 10)
    assert sorted(torch.cat([batch.ids for batch in batches]).tolist()) == list(range(40))
    assert {batch.epoch for batch in batches} == {1}
    assert batches[0].labels is None
    assert loader(dataset).steps_per_epoch == 5


def test_any_number_of_views_is_supported(demo):
    (batch,) = collect(demo, 0, 1, views=(TRAIN_CROP,))
    assert len(batch.views) == 1
    (batch,) = collect(demo, 0, 1, views=(TRAIN_CROP, TRAIN_CROP, TRAIN_CROP))
    assert len(batch.views) == 3
    assert not torch.equal(batch.views[1], batch.views[2])


def test_large_jpegs_are_decoded_at_reduced_size(tmp_path, monkeypatch):
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (800, 800, 3)).astype(np.uint8)).save(tmp_path / "a.jpg")
    dataset = open_dataset(tmp_path)
    shapes = []
    load = dataset.load
    dataset.load = lambda index, min_side: shapes.append(load(index, min_side).shape) or load(index, min_side)
    collect(dataset, 0, 1, batch_size=1)
    assert shapes == [(100, 100, 3)]  # four times 24 is 96


# Determinism


def test_batches_do_not_depend_on_threads_or_the_first_step(demo):
    whole = collect(demo, 0, 6)
    assert_same(whole, collect(demo, 0, 6, workers=2))
    assert_same(whole[4:], collect(demo, 4, 6, workers=1))
    assert_same(whole[4:], collect(demo, 4, 6))
    again = loader(demo)
    assert_same(whole[:2], list(again.batches(0, 2)))
    assert_same(whole[2:], list(again.batches(2, 6)))


def test_ranks_share_the_global_batch(demo, folder):
    for dataset in (demo, open_dataset(folder)):
        (whole,) = collect(dataset, 3, 4)
        for count in (2, 4):
            parts = [collect(dataset, 3, 4, rank=rank, world_size=count)[0] for rank in range(count)]
            assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
            for view in range(2):
                assert torch.equal(torch.cat([part.views[view] for part in parts]), whole.views[view])


@pytest.mark.slow
def test_batches_do_not_depend_on_worker_processes(folder):
    dataset = open_dataset(folder)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    alone, other = loader(dataset), loader(dataset, workers=1)
    assert_same(list(alone.batches(0, 12)), list(other.batches(0, 12)))
    assert len(alone.skipped) == 4
    assert other.skipped == alone.skipped
    assert torch.equal(state, torch.get_rng_state())
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_workers_start_anywhere_ignore_signals_and_end_with_the_iterator(folder):
    dataset = open_dataset(folder)
    steps = loader(dataset, workers=3).batches(7, 40)
    first = next(steps)
    workers = multiprocessing.active_children()
    assert len(workers) == 3
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    rest = [next(steps) for _ in range(20)]
    assert all(worker.is_alive() for worker in workers)
    assert_same([first, *rest], collect(dataset, 7, 28))
    steps.close()
    assert not any(worker.is_alive() for worker in workers)


# Images in memory


class Counting(FileDataset):
    """A folder that writes one byte to a file for every image that is loaded, in any process."""

    def load(self, index, min_side=None):
        with open(self.log, "ab") as log:
            log.write(b".")
        return super().load(index, min_side)


def counting(folder, log):
    images = open_dataset(folder)
    dataset = Counting(images.name, images.folder, images.files, images.labels, images.classes)
    dataset.log = log
    log.write_bytes(b"")
    return dataset


@pytest.mark.parametrize("workers", [0, 2])
def test_a_small_dataset_is_decoded_once_with_the_same_views(folder, tmp_path, workers):
    plain = loader(open_dataset(folder))
    cached = loader(counting(folder, tmp_path / "log"), cache_bytes=10**6, workers=workers)
    assert_same(list(cached.batches(3, 20)), list(plain.batches(3, 20)))  # 4 epochs of 5 steps
    assert {skip.index: skip for skip in cached.skipped} == {skip.index: skip for skip in plain.skipped}
    assert len(cached.skipped) == 4
    loads, retries = (tmp_path / "log").stat().st_size, 4 * 4 * 2  # bad images are tried again
    assert 40 <= loads <= 40 + retries + (10 if workers else 0)  # two workers may decode an image at the same time
    if workers == 0:  # another iterator has the same cache
        assert_same(list(cached.batches(20, 25)), list(plain.batches(20, 25)))
        assert (tmp_path / "log").stat().st_size <= loads + retries


def test_a_dataset_above_the_limit_is_not_cached(folder, tmp_path):
    pixels = sum((32 + index) * (64 - index) * 3 for index in range(40))
    cached = loader(counting(folder, tmp_path / "log"), cache_bytes=pixels // 2)
    assert_same(list(cached.batches(0, 10)), collect(open_dataset(folder), 0, 10))
    before = (tmp_path / "log").stat().st_size
    list(cached.batches(10, 15))
    assert (tmp_path / "log").stat().st_size - before > 16


def test_cached_images_are_shared_and_read_only():
    cache = ImageCache(length=100, limit=10**6)
    image = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    cache.add(3, image)
    other = pickle.loads(pickle.dumps(cache))  # maps the same memory
    other.add(4, image[::-1])
    assert np.array_equal(other.get(3), image)
    assert np.array_equal(cache.get(4), image[::-1])
    assert cache.get(5) is None
    assert not cache.get(3).flags.writeable


def test_images_above_the_estimate_are_not_added():
    cache = ImageCache(length=100, limit=99 * 3000)
    image = np.zeros((10, 100, 3), np.uint8)
    for index in range(100):
        cache.add(index, image)
    assert sum(cache.get(index) is not None for index in range(100)) == 32


# Bad images


def test_bad_images_are_replaced_counted_once_and_listed(folder):
    dataset = open_dataset(folder)
    bad = {i for i in range(len(dataset)) if "bad" in dataset.key(i)}
    assert len(bad) == 4
    it = loader(dataset)
    used = {}
    for batch in it.batches(0, 3 * it.steps_per_epoch):  # three epochs of 5 steps: each bad image is drawn again
        _, wanted = batch_ids(len(dataset), 8, 3, batch.step)
        for want, got in zip(wanted.tolist(), batch.ids.tolist(), strict=True):
            assert got not in bad
            if want in bad:
                used[batch.epoch, want] = got
            else:
                assert got == want
        assert torch.isfinite(batch.views[0]).all()
    assert {skip.index for skip in it.skipped} == bad
    assert len(it.skipped) == 4
    assert all(skip.key == dataset.key(skip.index) for skip in it.skipped)
    assert {skip.reason.split()[0] for skip in it.skipped} >= {"empty", "not"}
    assert len(used) >= 6
    assert len(set(used.values())) > 2  # different replacements
    # The replacement depends on (seed, epoch, id) alone, not on the batch size or rank.
    other = {}
    for batch in loader(dataset, batch_size=4, rank=1, world_size=2).batches(0, 33):
        _, wanted = batch_ids(len(dataset), 4, 3, batch.step)
        other |= {
            (batch.epoch, want): got
            for want, got in zip(wanted[2:].tolist(), batch.ids.tolist(), strict=True)
            if want in bad
        }
    shared = used.keys() & other.keys()
    assert shared
    assert all(used[key] == other[key] for key in shared)


@pytest.mark.parametrize(("share", "stops"), [(0.05, True), (0.1, False)])
def test_too_many_bad_images_stop_the_run(folder, share, stops):
    it = loader(open_dataset(folder), max_bad_share=share)  # 4 of 44: 9 %
    if not stops:
        assert len(list(it.batches(0, 10))) == 10
        return
    with pytest.raises(UserError, match=r"are bad; a share of at most 0.05 .*odd/1\d-bad.png: ") as caught:
        list(it.batches(0, 10))
    assert len(it.skipped) >= 3  # more than 5 % of 44
    assert "For example" in str(caught.value)


class Broken(ImageDataset):
    """A dataset whose images with an index below `bad` cannot be read."""

    name, labels, classes = "broken", None, None

    def __init__(self, length, bad):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def key(self, index):
        return f"image {index}"

    def fingerprint(self):
        return "broken"

    def load(self, index, min_side=None):
        from snclr.data.decode import BadImage

        if index < self.bad:
            raise BadImage("broken on purpose")
        return np.zeros((4, 4, 3), np.uint8)


def test_few_bad_images_of_a_large_dataset_are_tolerated():
    # 8 % of a large set is bad, 10 % allowed: an excess by chance in the first batches must not stop the run.
    it = loader(Broken(20_000, 1_600), image_size=1, views=(TRAIN_CROP,), batch_size=50, max_bad_share=0.1)
    assert sum(1 for _ in it.batches(0, 100)) == 100
    assert 300 < len(it.skipped) < 700
    # After a resume the restored list counts relative to all images seen before.
    resumed = loader(Broken(20_000, 1_600), image_size=1, views=(TRAIN_CROP,), batch_size=50, max_bad_share=0.1)
    resumed.restore_skipped(it.skipped)
    assert sum(1 for _ in resumed.batches(100, 110)) == 10
    straight = loader(Broken(20_000, 1_600), image_size=1, views=(TRAIN_CROP,), batch_size=50, max_bad_share=0.1)
    list(straight.batches(0, 110))
    assert resumed.skipped == straight.skipped
    assert isinstance(resumed.skipped[0], Skip)


def test_a_clear_excess_stops_early():
    it = loader(Broken(20_000, 10_000), image_size=1, views=(TRAIN_CROP,), batch_size=50, max_bad_share=0.1)
    with pytest.raises(UserError, match="broken on purpose"):
        list(it.batches(0, 100))
    assert 10 <= len(it.skipped) < 200
    none = loader(Broken(20_000, 500), image_size=1, batch_size=50, max_bad_share=0.0)
    with pytest.raises(UserError, match="at most 0 is allowed"):
        list(none.batches(0, 100))


def test_a_dataset_of_bad_images_is_an_error():
    for share in (0.1, 1.0):
        with pytest.raises(UserError, match="broken on purpose"):
            next(loader(Broken(50, 50), max_bad_share=share).batches(0, 1))


def test_fewer_images_than_a_batch_are_rejected(demo):
    few = ArrayDataset("x", demo.images[:7])
    with pytest.raises(UserError, match=r"7 images, fewer than one batch of 8\. Use a batch_size of at most 7"):
        loader(few)


# Worker processes

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks at /proc")


SCRIPT = """
import multiprocessing, os, sys, time
from snclr.data.loader import ViewLoader
from snclr.data.datasets.base import open_dataset
from snclr.data.transforms.views import VIEW_GROUPS

if __name__ == "__main__":
    loader = ViewLoader(open_dataset(sys.argv[1]), views=VIEW_GROUPS["byol"], image_size=24, batch_size=8, seed=0,
                        workers=1, max_bad_share=0.5)
    steps = loader.batches(0, 1000)
    next(steps)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    if sys.argv[2] == "stay":
        time.sleep(600)
"""


def start(folder, tmp_path, mode):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-W", "error", str(tmp_path / "script.py"), str(folder), mode]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    (pid,) = process.stdout.readline().split()
    return process, int(pid)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid):
    for _ in range(300):
        if not alive(pid):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@needs_proc
def test_a_program_may_end_with_the_iterator_open(folder, tmp_path):
    process, pid = start(folder, tmp_path, "leave")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert wait_until_gone(pid)


@pytest.mark.slow
@needs_proc
def test_workers_end_when_the_parent_is_killed(folder, tmp_path):
    process, pid = start(folder, tmp_path, "stay")
    process.kill()
    process.communicate()
    assert wait_until_gone(pid)
