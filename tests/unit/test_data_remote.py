"""Shards behind addresses: web servers good and bad, object stores, the cache and its bounds."""

import http.server
import os
import threading

import fsspec
import pytest
from shard_data import jpeg, make_folder, make_shards

from snclr.commands.pack import pack
from snclr.data import remote
from snclr.data.remote import RemoteState, download, remote_state
from snclr.data.shard_cache import RemoteShard, ShardCache
from snclr.data.sources import open_source
from snclr.errors import UserError


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; it can do ranges, forbid HEAD, and break connections, as the test says."""

    def do_HEAD(self):
        self.answer(head=True)

    def do_GET(self):
        self.answer(head=False)

    def answer(self, head):
        site = self.server.site
        site.log.append((self.command, self.path.partition("?")[0], self.headers.get("Range")))
        if head and not site.head:
            return self.send_error(405)
        if self.path in site.redirects:
            self.send_response(302)
            self.send_header("Location", site.redirects[self.path])
            self.end_headers()
            return None
        path = site.folder / self.path.partition("?")[0].lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        if site.failures > 0 and not head:
            site.failures -= 1
            return self.send_error(503)
        data, start = path.read_bytes(), 0
        if site.ranges and (wanted := self.headers.get("Range")):
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        if not head:
            rest = data[start:]
            if site.breaks > 0:
                site.breaks -= 1
                rest = rest[: len(rest) // 2]
                self.close_connection = True
            self.wfile.write(rest)
        return None

    def log_message(self, *_):
        pass


class Site:
    def __init__(self, folder):
        self.folder, self.log, self.redirects = folder, [], {}
        self.ranges, self.head, self.breaks, self.failures = True, True, 0, 0
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.site = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def fetched(self, name):
        return sum(1 for command, path, _ in self.log if command == "GET" and path.endswith(name))


@pytest.fixture
def site(tmp_path):
    (tmp_path / "site").mkdir()
    site = Site(tmp_path / "site")
    thread = threading.Thread(target=site.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    site.server.shutdown()
    thread.join()
    site.server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
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
    site.failures = 100
    with pytest.raises(UserError, match=r"x\.tar could not be read in 5 attempts: .*503.*run the same command again"):
        download(f"{site.url}/x.tar", tmp_path / "x")
    with pytest.raises(UserError, match=r"missing\.tar cannot be read: the server answered 404"):
        open_source(f"{site.url}/missing.tar")
    assert list(tmp_path.glob("x*")) == []
    site.server.server_close()


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
        os.close(cache.open_file(shards[number]))
        os.utime(cache.place(shards[number]), ns=(number, number))
    fd = cache.open_file(shards[0])  # wanted again: now 1 is the oldest
    os.close(cache.open_file(shards[2]))
    assert [cache.place(shard).exists() for shard in shards] == [True, False, True, False]
    cache.place(shards[0]).unlink()
    assert os.pread(fd, 5, 0) == bytes(5)  # an open copy can be read on
    os.close(fd)


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
