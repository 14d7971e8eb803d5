"""Remote shards: faulty web servers, object stores, retries, and the bounded cache."""

import contextlib
import os
import shutil
import threading
import time

import fsspec
import pytest

from snclr.api.export import pack
from snclr.data import remote
from snclr.data.cache import RemoteShard, ShardCache
from snclr.data.datasets.base import open_dataset
from snclr.data.loader import ViewLoader
from snclr.data.remote import download, remote_state
from snclr.data.shards.dataset import START
from snclr.data.transforms.views import VIEW_GROUPS
from snclr.errors import UserError
from tests.helpers.shard_data import jpeg, make_folder, make_shards
from tests.helpers.web import serving


@pytest.fixture
def site(tmp_path):
    with serving(tmp_path / "site") as site:
        yield site


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def settle(source):
    """Wait for the prefetching thread."""
    if source._prefetcher is not None:
        source._prefetcher.join()


def all_bytes(source):
    found = [source.read(index) for index in range(len(source))]
    settle(source)
    return found


# Web servers


@pytest.mark.parametrize(("ranges", "head"), [(True, True), (False, True), (True, False)])
def test_shards_without_a_manifest_are_read_from_a_web_server(site, tmp_path, ranges, head):
    site.ranges, site.head = ranges, head
    local = open_dataset(make_shards(site.folder / "s"))
    source = open_dataset(f"{site.url}/s/{{00..02}}.tar")
    assert all_bytes(source) == all_bytes(local)
    assert source.labels.tolist() == local.labels.tolist()
    assert source.key(4) == "01.tar/0000.jpg"
    assert site.fetched("01.tar") == (1 if head else 2)  # without HEAD, the state needs a GET
    site.log.clear()
    again = open_dataset(f"{site.url}/s/{{00..02}}.tar")
    assert all_bytes(again) == all_bytes(local)
    assert again.fingerprint() == source.fingerprint()
    if head:
        assert not any(command == "GET" for command, _, _ in site.log)


def test_a_changed_shard_is_downloaded_again(site):
    make_shards(site.folder / "s", shards=2)
    first = open_dataset(f"{site.url}/s/{{00..01}}.tar")
    make_shards(site.folder / "s", shards=1, images=2)
    os.utime(site.folder / "s" / "00.tar", ns=(1, 1))
    second = open_dataset(f"{site.url}/s/{{00..01}}.tar")
    assert (len(first), len(second)) == (8, 6)
    assert first.fingerprint() != second.fingerprint()


@pytest.mark.parametrize("name", ["shards.json", "", "shards.json?token=a/b"])
def test_packed_shards_are_read_from_a_web_server(site, tmp_path, name):
    make_folder(tmp_path / "f", count=12)
    pack(tmp_path / "f", shards=site.folder / "s", images_per_shard=4, quiet=True)
    source, folder = open_dataset(f"{site.url}/s/{name}"), open_dataset(tmp_path / "f")
    assert site.fetched(".tar") == 0  # the manifest and its index are enough to open it
    assert [source.key(i) for i in range(12)] == [folder.key(i) for i in range(12)]
    assert all_bytes(source) == [(tmp_path / "f" / folder.key(i)).read_bytes() for i in range(12)]
    assert source.fingerprint() == open_dataset(site.folder / "s").fingerprint()


def test_a_shard_with_a_wrong_hash_is_rejected(site, tmp_path, cache):
    make_folder(tmp_path / "f", count=4)
    pack(tmp_path / "f", shards=site.folder / "s", quiet=True)
    shard = site.folder / "s" / "shard-00000.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    source = open_dataset(f"{site.url}/s/")
    with pytest.raises(UserError, match=r"shard-00000\.tar.*sha256 differs from the manifest"):
        source.load(0)
    assert [path.suffix for path in (cache / "shards").iterdir()] == [".lock"]


def test_a_broken_download_is_retried(site, tmp_path):
    site.breaks, site.failures = 2, 1
    (site.folder / "x.tar").write_bytes(os.urandom(3 * 10**6))
    download(f"{site.url}/x.tar", tmp_path / "x", size=3 * 10**6)
    assert (tmp_path / "x").read_bytes() == (site.folder / "x.tar").read_bytes()
    assert not (tmp_path / "x.partial").exists()


def test_a_failing_server_is_reported_after_the_timeout(site, tmp_path):
    (site.folder / "x.tar").write_bytes(bytes(10**5))
    site.failures = 10**9
    with pytest.raises(UserError, match=r"x\.tar could not be read for 0.2 seconds .*503.*run the same command again"):
        download(f"{site.url}/x.tar", tmp_path / "x", timeout=0.2)
    with pytest.raises(UserError, match=r"missing\.tar cannot be read: the server answered 404"):
        open_dataset(f"{site.url}/missing.tar")
    assert list(tmp_path.glob("x*")) == []


@pytest.mark.parametrize("breaks", [False, True])
def test_a_server_outage_is_retried(site, tmp_path, monkeypatch, capsys, breaks):
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.1)
    monkeypatch.setenv("SNCLR_NETWORK_TIMEOUT", "60")
    (site.folder / "x.tar").write_bytes(os.urandom(10**6))
    site.breaks = int(breaks)
    if not breaks:
        site.down()
    else:  # half of the file is sent, then the server goes down
        threading.Timer(0.05, site.down).start()
    timer = threading.Timer(1.0, site.up)
    timer.start()
    start = time.monotonic()
    download(f"{site.url}/x.tar", tmp_path / "x", size=10**6)
    timer.join()
    assert breaks or time.monotonic() - start > 0.9
    assert (tmp_path / "x").read_bytes() == (site.folder / "x.tar").read_bytes()
    printed = capsys.readouterr().err
    if not breaks:
        assert printed.count("warning: ") == 1
        assert "x.tar cannot be read (" in printed
        assert "retrying for 60 seconds (SNCLR_NETWORK_TIMEOUT)" in printed


def test_the_network_timeout_restarts_with_progress(site, tmp_path, monkeypatch):
    (site.folder / "x.tar").write_bytes(os.urandom(10**6))
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.2)
    site.breaks = 3
    with pytest.raises(UserError, match=r"could not be read for 0\.1 seconds"):
        download(f"{site.url}/x.tar", tmp_path / "x", size=10**6, timeout=0.1)
    site.breaks = 3
    with monkeypatch.context() as patch:
        patch.setattr(remote, "PROGRESS_SECONDS", 0.0)  # every attempt counts as progress
        download(f"{site.url}/x.tar", tmp_path / "x", size=10**6, timeout=0.1)
    site.down()
    monkeypatch.setenv("SNCLR_NETWORK_TIMEOUT", "0.5")
    start = time.monotonic()
    with pytest.raises(UserError, match=r"could not be read for 0\.5 seconds \(SNCLR_NETWORK_TIMEOUT\): .*Connect"):
        download(f"{site.url}/x.tar", tmp_path / "y")
    assert 0.5 <= time.monotonic() - start < 5
    monkeypatch.setenv("SNCLR_NETWORK_TIMEOUT", "long")
    with pytest.raises(UserError, match="SNCLR_NETWORK_TIMEOUT is 'long'; give a number of seconds"):
        download(f"{site.url}/x.tar", tmp_path / "y")


def test_permanent_errors_are_not_retried(site, tmp_path):
    site.redirects["/r.tar"] = "ftp://127.0.0.1/x"
    start = time.monotonic()
    for name in ("missing.tar", "r.tar"):
        with pytest.raises(UserError, match="cannot be read: "):
            download(f"{site.url}/{name}", tmp_path / "x", timeout=1000)
    with pytest.raises(UserError, match="cannot be read: "):
        download("http://127.0.0.1:port/x.tar", tmp_path / "x", timeout=1000)
    with pytest.raises(UserError, match="is not accepted"):
        download("pipe:cat x", tmp_path / "x", timeout=1000)
    assert time.monotonic() - start < 10
    assert site.fetched("missing.tar") == 1


def test_a_full_disk_is_not_retried_as_a_network_error(site, tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    (site.folder / "x.tar").write_bytes(bytes(10**6))
    (tmp_path / "x.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match="no space to write"):
        download(f"{site.url}/x.tar", tmp_path / "x", timeout=1000)


def test_the_error_of_one_thread_cancels_the_retries_of_all(site, monkeypatch):
    """The states of many shards are requested in threads; an error must not leave retries running."""
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 100.0)

    def request(number):
        if number == 3:
            time.sleep(0.2)
            raise UserError("no such shard")
        remote.retry("x", lambda: (_ for _ in ()).throw(remote.TransientError("refused")))

    start = time.monotonic()
    with pytest.raises(UserError, match="no such shard"):
        list(remote.map_in_threads(request, range(3, -1, -1)))
    assert time.monotonic() - start < 90
    assert list(remote.map_in_threads(lambda number: number, range(3))) == [0, 1, 2]


def test_redirects_to_other_schemes_are_refused(site, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    for target in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/x"):
        site.redirects["/r.tar"] = target
        with pytest.raises(UserError):
            download(f"{site.url}/r.tar", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    site.redirects["/r.tar"] = f"{site.url}/real.tar"
    (site.folder / "real.tar").write_bytes(b"12345")
    assert remote_state(f"{site.url}/r.tar")[0] == 5


def test_web_servers_are_not_listed_and_other_files_are_not_shards(site):
    with pytest.raises(UserError, match=r"cannot list its files"):
        open_dataset(f"{site.url}/s/*.tar")
    with pytest.raises(UserError, match="is not a shard"):
        open_dataset(f"{site.url}/index.html")


# The cache


def test_remote_shards_need_the_cache(monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", "off")
    with pytest.raises(UserError, match="SNCLR_CACHE is off"):
        open_dataset("http://127.0.0.1:1/00.tar")


def test_the_least_recently_used_shard_is_evicted(site, tmp_path):
    cache = ShardCache(tmp_path, limit=2500)
    shards = []
    for number in range(4):
        (site.folder / f"{number}.tar").write_bytes(bytes([number]) * 1000)
        shards.append(RemoteShard(f"{site.url}/{number}.tar", 1000, "v", hashed=False))
    for number in (0, 1):
        assert cache.read(shards[number], 2, 0) == bytes([number]) * 2
        os.utime(cache.path(shards[number]), ns=(number, number))
    cache.read(shards[0], 2, 0)  # used again: now 1 is the oldest
    cache.read(shards[2], 2, 0)
    assert [cache.path(shard).exists() for shard in shards] == [True, False, True, False]
    cache.path(shards[0]).unlink()
    assert cache.read(shards[0], 5, 998) == bytes(2)  # downloaded again; the file ends cached


def held_and_deleted():
    """Return the bytes of deleted files that this process still has open."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(number))
            if status.st_nlink == 0 and os.readlink(f"/proc/self/fd/{number}").split(" ")[0].endswith(".tar"):
                total += status.st_size
        except OSError:
            continue
    return total


def named_on_disk(folder):
    """Return the bytes of the files in `folder`."""
    total = 0
    for path in folder.glob("*.tar*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc here")
def test_the_cache_limit_includes_deleted_files_that_are_still_open(site, monkeypatch, caplog):
    make_shards(site.folder / "s", shards=40)
    size = (site.folder / "s" / "00.tar").stat().st_size
    monkeypatch.setenv("SNCLR_CACHE_SIZE", str(4 * size))
    source = open_dataset(f"{site.url}/s/{{00..39}}.tar")
    assert "shards will be downloaded repeatedly" in caplog.text
    most = 0
    for index in range(len(source)):
        source.read(index)
        most = max(most, held_and_deleted() + named_on_disk(source.cache.folder))
    settle(source)
    assert held_and_deleted() == 0
    assert sum(path.stat().st_size for path in source.cache.folder.glob("*.tar*")) <= 4 * size
    # The prefetching thread may add one more shard between the two checks.
    assert most <= 6 * -(-size // 4096) * 4096


def test_abandoned_partial_downloads_are_evicted_and_running_ones_are_not(site, tmp_path):
    cache = ShardCache(tmp_path / "c", limit=2500)
    (site.folder / "x.tar").write_bytes(bytes(1000))
    shard = RemoteShard(f"{site.url}/x.tar", 1000, "v", hashed=False)
    cache.folder.mkdir()
    (cache.folder / "dead.tar.partial").write_bytes(bytes(2000))
    os.utime(cache.folder / "dead.tar.partial", (1, 1))
    (cache.folder / "alive.tar.partial").write_bytes(bytes(1000))
    (cache.folder / "old.tar").write_bytes(bytes(1000))
    cache.fetch(shard)
    assert sorted(path.name for path in cache.folder.glob("*.tar*")) == sorted(
        ["alive.tar.partial", cache.path(shard).name]
    )


def test_the_cache_may_be_deleted_during_use(site):
    make_shards(site.folder / "s", shards=2)
    source = open_dataset(f"{site.url}/s/{{00..01}}.tar")
    first = all_bytes(source)
    shutil.rmtree(source.cache.folder)
    assert all_bytes(source) == first


def test_the_first_batch_downloads_few_shards(site, tmp_path):
    """The first batch must not wait for the whole window: only its shards and two more are downloaded."""
    make_folder(tmp_path / "f", count=240)
    pack(tmp_path / "f", shards=site.folder / "s", images_per_shard=12, quiet=True)
    source = open_dataset(f"{site.url}/s/")
    loader = ViewLoader(source, views=VIEW_GROUPS["byol"], image_size=16, batch_size=2, seed=3)
    next(loader.batches(0, 1))
    settle(source)
    assert site.fetched(".tar") <= START + 2
    needed = {int(source.index.shard[i]) for i in source.epoch_order(3, 0)[:2]}
    assert needed <= set(source._sequence[:START].tolist())


def test_the_next_shards_are_prefetched(site):
    make_shards(site.folder / "s", shards=5)
    source = open_dataset(f"{site.url}/s/{{00..04}}.tar")
    for path in source.cache.folder.glob("*.tar"):
        path.unlink()
    source.load(0)
    settle(source)
    cached = [source.cache.path(shard).exists() for shard in source.shards]
    assert cached == [True, True, True, False, False]


def test_concurrent_requests_download_a_shard_once(site, tmp_path):
    (site.folder / "x.tar").write_bytes(bytes(10**5))
    cache = ShardCache(tmp_path, limit=10**9)
    shard = RemoteShard(f"{site.url}/x.tar", 10**5, "v", hashed=False)
    threads = [threading.Thread(target=cache.fetch, args=(shard,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert site.fetched("x.tar") == 1


# Object stores


@pytest.fixture
def store():
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()


def upload(memory, folder, name):
    for path in folder.iterdir():
        memory.pipe_file(f"/{name}/{path.name}", path.read_bytes())


def test_shards_are_read_from_an_object_store(store, tmp_path):
    upload(store, make_shards(tmp_path / "s"), "bucket")
    local = open_dataset(tmp_path / "s")
    for spec in ("memory://bucket/{00..02}.tar", "memory://bucket/*.tar"):
        source = open_dataset(spec)
        assert all_bytes(source) == all_bytes(local)
    make_folder(tmp_path / "f", count=6)
    pack(tmp_path / "f", shards=tmp_path / "p", images_per_shard=2, quiet=True)
    upload(store, tmp_path / "p", "packed")
    source = open_dataset("memory://packed/shards.json")
    assert sorted(all_bytes(source)) == sorted(jpeg(n) for n in range(6))


def test_missing_objects_are_reported(store):
    with pytest.raises(UserError, match="does not exist"):
        open_dataset("memory://bucket/none.tar")
    with pytest.raises(UserError, match="no shard matches"):
        open_dataset("memory://bucket/*.tar")


def test_a_missing_fsspec_backend_is_reported(monkeypatch):
    def fail(url, **_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(UserError, match="pip install s3fs"):
        remote_state("s3://bucket/a.tar")


def test_errors_of_an_object_store_are_reported(store, monkeypatch, tmp_path):
    def denied(*_, **__):
        raise PermissionError("Forbidden")

    store.pipe_file("/bucket/a.tar", b"x")
    assert remote_state("memory://bucket/a.tar")[0] == 1
    monkeypatch.setattr(type(store), "open", denied)
    with pytest.raises(UserError, match=r"access denied.*credentials"):
        download("memory://bucket/a.tar", tmp_path / "a")
    monkeypatch.setattr(type(store), "open", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("NoCredentials")))
    with pytest.raises(UserError, match="cannot be read: RuntimeError: NoCredentials"):
        download("memory://bucket/a.tar", tmp_path / "a")
