"""Shards behind addresses: web servers good and bad, object stores, the cache and its bounds."""

import contextlib
import os
import shutil
import signal
import threading
import time

import fsspec
import pytest
from shard_data import jpeg, make_folder, make_shards
from tests.web import serving

from snclr.commands.pack import pack
from snclr.data import patience
from snclr.data.loader import ViewLoader
from snclr.data.remote import RemoteState, download, remote_state
from snclr.data.shard_cache import RemoteShard, ShardCache
from snclr.data.shards import START
from snclr.data.sources import open_source
from snclr.data.views import VIEW_GROUPS
from snclr.durable import FileLock
from snclr.errors import UserError


@pytest.fixture
def site(tmp_path):
    with serving(tmp_path / "site") as site:
        yield site


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def settle(source):
    """Wait for what is fetched ahead, so that nothing runs on after the test."""
    if source._fetcher is not None:
        source._fetcher.join()


def all_bytes(source):
    found = [source.read(index) for index in range(len(source))]
    settle(source)
    return found


# Web servers


@pytest.mark.parametrize(("ranges", "head"), [(True, True), (False, True), (True, False)])
def test_plain_shards_from_a_server(site, tmp_path, ranges, head):
    site.ranges, site.head = ranges, head
    local = open_source(make_shards(site.folder / "s"))
    source = open_source(f"{site.url}/s/{{00..02}}.tar")
    assert all_bytes(source) == all_bytes(local)
    assert source.labels.tolist() == local.labels.tolist()
    assert source.key(4) == "01.tar/0000.jpg"
    assert site.fetched("01.tar") == (1 if head else 2)  # without HEAD, a GET asks for the state
    site.log.clear()
    again = open_source(f"{site.url}/s/{{00..02}}.tar")
    assert all_bytes(again) == all_bytes(local)
    assert again.fingerprint() == source.fingerprint()
    if head:
        assert not any(command == "GET" for command, _, _ in site.log)


def test_a_changed_shard_is_fetched_anew(site):
    make_shards(site.folder / "s", shards=2)
    first = open_source(f"{site.url}/s/{{00..01}}.tar")
    make_shards(site.folder / "s", shards=1, images=2)
    os.utime(site.folder / "s" / "00.tar", ns=(1, 1))
    second = open_source(f"{site.url}/s/{{00..01}}.tar")
    assert (len(first), len(second)) == (8, 6)
    assert first.fingerprint() != second.fingerprint()


@pytest.mark.parametrize("place", ["shards.json", "", "shards.json?token=a/b"])
def test_packed_shards_from_a_server(site, tmp_path, place):
    make_folder(tmp_path / "f", count=12)
    pack(tmp_path / "f", shards=site.folder / "s", images_per_shard=4, quiet=True)
    source, folder = open_source(f"{site.url}/s/{place}"), open_source(tmp_path / "f")
    assert site.fetched(".tar") == 0  # the manifest and its index are enough to open it
    assert [source.key(i) for i in range(12)] == [folder.key(i) for i in range(12)]
    assert all_bytes(source) == [(tmp_path / "f" / folder.key(i)).read_bytes() for i in range(12)]
    assert source.fingerprint() == open_source(site.folder / "s").fingerprint()


def test_a_damaged_shard_is_never_read(site, tmp_path, cache):
    make_folder(tmp_path / "f", count=4)
    pack(tmp_path / "f", shards=site.folder / "s", quiet=True)
    shard = site.folder / "s" / "shard-00000.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    source = open_source(f"{site.url}/s/")
    with pytest.raises(UserError, match=r"shard-00000\.tar.*sha256 is not that of the manifest"):
        source.load(0)
    assert [path.suffix for path in (cache / "shards").iterdir()] == [".lock"]


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_connections_are_taken_up(site, tmp_path, ranges):
    site.ranges, site.breaks, site.failures = ranges, 2, 1
    (site.folder / "x.tar").write_bytes(os.urandom(3 * 10**6))
    download(f"{site.url}/x.tar", tmp_path / "x", size=3 * 10**6)
    assert (tmp_path / "x").read_bytes() == (site.folder / "x.tar").read_bytes()
    assert any(wanted for _, _, wanted in site.log)
    assert not (tmp_path / "x.partial").exists()


def test_a_server_that_stays_broken_is_named(site, tmp_path):
    (site.folder / "x.tar").write_bytes(bytes(10**5))
    site.failures = 10**9
    with pytest.raises(UserError, match=r"x\.tar could not be read for 0.2 seconds .*503.*run the same command again"):
        download(f"{site.url}/x.tar", tmp_path / "x", patience=0.2)
    with pytest.raises(UserError, match=r"missing\.tar cannot be read: the server answered 404"):
        open_source(f"{site.url}/missing.tar")
    assert list(tmp_path.glob("x*")) == []


@pytest.mark.parametrize("breaks", [False, True])
def test_a_server_that_is_down_for_a_while_is_waited_for(site, tmp_path, monkeypatch, capsys, breaks):
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.1)
    monkeypatch.setenv("SNCLR_NETWORK_PATIENCE", "60")
    (site.folder / "x.tar").write_bytes(os.urandom(10**6))
    site.breaks = int(breaks)
    if not breaks:
        site.down()
    else:  # half of the file comes, then the server goes away
        threading.Timer(0.05, site.down).start()
    timer = threading.Timer(1.0, site.up)
    timer.start()
    began = time.monotonic()
    download(f"{site.url}/x.tar", tmp_path / "x", size=10**6)
    timer.join()
    assert breaks or time.monotonic() - began > 0.9
    assert (tmp_path / "x").read_bytes() == (site.folder / "x.tar").read_bytes()
    said = capsys.readouterr().err
    if not breaks:
        assert said.count("warning: ") == 1
        assert "x.tar cannot be read (" in said
        assert "waiting for it, at most 60 seconds (SNCLR_NETWORK_PATIENCE)" in said
        assert "can be read again" in said


def test_patience_ends_and_begins_anew_with_every_byte(site, tmp_path, monkeypatch):
    (site.folder / "x.tar").write_bytes(os.urandom(10**6))
    site.breaks = 8  # each attempt brings half of the rest: the patience is for those that bring nothing
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.05)
    download(f"{site.url}/x.tar", tmp_path / "x", size=10**6, patience=0.1)
    site.down()
    monkeypatch.setenv("SNCLR_NETWORK_PATIENCE", "0.5")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"could not be read for 0\.5 seconds \(SNCLR_NETWORK_PATIENCE\): .*refused"):
        download(f"{site.url}/x.tar", tmp_path / "y")
    assert 0.5 <= time.monotonic() - began < 5
    monkeypatch.setenv("SNCLR_NETWORK_PATIENCE", "long")
    with pytest.raises(UserError, match="SNCLR_NETWORK_PATIENCE is 'long'; give a number of seconds"):
        download(f"{site.url}/x.tar", tmp_path / "y")


def test_answers_that_will_not_change_are_not_waited_for(site, tmp_path):
    site.redirects["/r.tar"] = "ftp://127.0.0.1/x"
    began = time.monotonic()
    for place in ("missing.tar", "r.tar"):
        with pytest.raises(UserError, match="cannot be read: "):
            download(f"{site.url}/{place}", tmp_path / "x", patience=1000)
    with pytest.raises(UserError, match="cannot be read: "):
        download("http://127.0.0.1:port/x.tar", tmp_path / "x", patience=1000)
    with pytest.raises(UserError, match="is not accepted"):
        download("pipe:cat x", tmp_path / "x", patience=1000)
    assert time.monotonic() - began < 10
    assert site.fetched("missing.tar") == 1


def test_a_full_disk_is_no_absent_network(site, tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    (site.folder / "x.tar").write_bytes(bytes(10**6))
    real = open

    def full(path, *rest):
        return real("/dev/full" if str(path).endswith("x.partial") and rest[0] in ("wb", "ab") else path, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("snclr.data.remote.open", full, raising=False)
        with pytest.raises(UserError, match="no space to write"):
            download(f"{site.url}/x.tar", tmp_path / "x", patience=1000)


def test_one_refusal_ends_the_waits_of_all(site, monkeypatch):
    """The states of many shards are asked for in threads: none may go on waiting behind an error or Ctrl-C."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 100.0)

    def ask(number):
        if number == 3:
            time.sleep(0.2)
            raise UserError("no such shard")
        patience.keep_trying("x", lambda: (_ for _ in ()).throw(patience.Away("refused")))

    began = time.monotonic()
    with pytest.raises(UserError, match="no such shard"):
        patience.map_in_threads(ask, range(3, -1, -1))
    assert time.monotonic() - began < 20
    assert patience.map_in_threads(lambda number: number, range(3)) == [0, 1, 2]


def test_a_stop_ends_a_wait_at_once():
    """As in a run: a handler that only notes the signal. It is called, and the wait is left."""
    noted = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: noted.append(number))
    try:
        noting = signal.getsignal(signal.SIGUSR1)

        def items():
            yield 1
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            time.sleep(100)
            yield 2

        stoppable = patience.until_stopped(items())
        assert next(stoppable) == 1
        with pytest.raises(patience.Stopped):
            next(stoppable)
        assert noted == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is noting
        # One that came between two items ends the next wait before it begins.
        stoppable = patience.until_stopped(iter([1, 2]))
        assert next(stoppable) == 1
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(patience.Stopped):
            next(stoppable)
        assert list(patience.until_stopped(iter([1, 2]))) == [1, 2]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_redirection_leaves_the_web(site, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    for target in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/x"):
        site.redirects["/r.tar"] = target
        with pytest.raises(UserError):
            download(f"{site.url}/r.tar", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    site.redirects["/r.tar"] = f"{site.url}/real.tar"
    (site.folder / "real.tar").write_bytes(b"12345")
    assert remote_state(f"{site.url}/r.tar").size == 5


def test_a_web_server_cannot_be_listed_and_a_page_is_no_shard(site):
    with pytest.raises(UserError, match=r"cannot be asked for its files"):
        open_source(f"{site.url}/s/*.tar")
    with pytest.raises(UserError, match="is no shard"):
        open_source(f"{site.url}/index.html")


# The cache


def test_the_cache_is_needed(monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", "off")
    with pytest.raises(UserError, match="SNCLR_CACHE is off"):
        open_source("http://127.0.0.1:1/00.tar")


def test_the_oldest_copies_are_given_up(site, tmp_path):
    cache = ShardCache(tmp_path, limit=2500)
    shards = []
    for number in range(4):
        (site.folder / f"{number}.tar").write_bytes(bytes([number]) * 1000)
        shards.append(RemoteShard(f"{site.url}/{number}.tar", 1000, "v", hashed=False))
    for number in (0, 1):
        assert cache.read(shards[number], 2, 0) == bytes([number]) * 2
        os.utime(cache.place(shards[number]), ns=(number, number))
    cache.read(shards[0], 2, 0)  # wanted again: now 1 is the oldest
    cache.read(shards[2], 2, 0)
    assert [cache.place(shard).exists() for shard in shards] == [True, False, True, False]
    cache.place(shards[0]).unlink()
    assert cache.read(shards[0], 5, 998) == bytes(2)  # fetched again; it ends there


def held_and_deleted():
    """Bytes on the disk that belong to no name any more and are held by our descriptors."""
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
    """Bytes of the files with a name in `folder`; one that goes while we look no longer counts."""
    total = 0
    for path in folder.glob("*.tar*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc here")
def test_the_limit_holds_for_the_disk_and_not_for_the_names_alone(site, monkeypatch, caplog):
    make_shards(site.folder / "s", shards=40)
    size = (site.folder / "s" / "00.tar").stat().st_size
    monkeypatch.setenv("SNCLR_CACHE_SIZE", str(4 * size))
    source = open_source(f"{site.url}/s/{{00..39}}.tar")
    assert "shards will be fetched again and again" in caplog.text
    most = 0
    for index in range(len(source)):
        source.read(index)
        most = max(most, held_and_deleted() + named_on_disk(source._cache.folder))
    settle(source)
    assert held_and_deleted() == 0
    assert sum(path.stat().st_size for path in source._cache.folder.glob("*.tar*")) <= 4 * size
    # One more may come in by the thread that fetches ahead, between its look at the folder and the other's.
    assert most <= 6 * -(-size // 4096) * 4096


def test_what_a_killed_fetch_left_is_removed_and_a_living_one_counts(site, tmp_path):
    cache = ShardCache(tmp_path / "c", limit=2500)
    (site.folder / "x.tar").write_bytes(bytes(1000))
    shard = RemoteShard(f"{site.url}/x.tar", 1000, "v", hashed=False)
    cache.folder.mkdir()
    (cache.folder / "dead.tar.partial").write_bytes(bytes(2000))
    (cache.folder / "alive.tar.partial").write_bytes(bytes(1000))
    (cache.folder / "old.tar").write_bytes(bytes(1000))
    lock = FileLock(cache.folder / "alive.lock")
    assert lock.acquire()
    cache.fetch(shard)
    lock.release()
    assert sorted(path.name for path in cache.folder.glob("*.tar*")) == sorted(
        ["alive.tar.partial", cache.place(shard).name]
    )


def test_the_cache_may_be_deleted_while_it_is_used(site):
    make_shards(site.folder / "s", shards=2)
    source = open_source(f"{site.url}/s/{{00..01}}.tar")
    first = all_bytes(source)
    shutil.rmtree(source._cache.folder)
    assert all_bytes(source) == first


def test_an_epoch_starts_with_few_shards(site, tmp_path):
    """The first batch must not wait for the whole window; what it needs is fetched, and two more ahead."""
    make_folder(tmp_path / "f", count=240)
    pack(tmp_path / "f", shards=site.folder / "s", images_per_shard=12, quiet=True)
    source = open_source(f"{site.url}/s/")
    loader = ViewLoader(source, views=VIEW_GROUPS["byol"], image_size=16, batch_size=2, seed=3)
    next(loader.batches(0, 1))
    settle(source)
    assert site.fetched(".tar") <= START + 2
    needed = {int(source._index.shard[i]) for i in source.epoch_order(3, 0)[:2]}
    assert needed <= set(source._sequence[:START].tolist())


def test_what_follows_is_fetched_ahead(site):
    make_shards(site.folder / "s", shards=5)
    source = open_source(f"{site.url}/s/{{00..04}}.tar")
    for path in source._cache.folder.glob("*.tar"):
        path.unlink()
    source.load(0)
    settle(source)
    there = [source._cache.place(shard.remote).exists() for shard in source._shards]
    assert there == [True, True, True, False, False]


def test_two_processes_fetch_a_shard_once(site, tmp_path):
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


def test_shards_in_a_store(store, tmp_path):
    upload(store, make_shards(tmp_path / "s"), "bucket")
    local = open_source(tmp_path / "s")
    for spec in ("memory://bucket/{00..02}.tar", "memory://bucket/*.tar"):
        source = open_source(spec)
        assert all_bytes(source) == all_bytes(local)
    make_folder(tmp_path / "f", count=6)
    pack(tmp_path / "f", shards=tmp_path / "p", images_per_shard=2, quiet=True)
    upload(store, tmp_path / "p", "packed")
    source = open_source("memory://packed/shards.json")
    assert sorted(all_bytes(source)) == sorted(jpeg(n) for n in range(6))


def test_what_a_store_has_not_is_explained(store):
    with pytest.raises(UserError, match="there is no"):
        open_source("memory://bucket/none.tar")
    with pytest.raises(UserError, match="no shard has that name"):
        open_source("memory://bucket/*.tar")


def test_a_missing_package_is_named(monkeypatch):
    def fail(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(UserError, match="pip install s3fs"):
        remote_state("s3://bucket/a.tar")


def test_the_errors_of_a_store_are_told(store, monkeypatch, tmp_path):
    def denied(*_):
        raise PermissionError("Forbidden")

    store.pipe_file("/bucket/a.tar", b"x")
    assert remote_state("memory://bucket/a.tar") == RemoteState(1, remote_state("memory://bucket/a.tar").version)
    monkeypatch.setattr(type(store), "open", denied)
    with pytest.raises(UserError, match=r"refuses .*credentials"):
        download("memory://bucket/a.tar", tmp_path / "a")
    monkeypatch.setattr(type(store), "open", lambda *_: (_ for _ in ()).throw(RuntimeError("NoCredentials")))
    with pytest.raises(UserError, match="5 attempts: RuntimeError: NoCredentials"):
        download("memory://bucket/a.tar", tmp_path / "a")
