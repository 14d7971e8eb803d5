"""Open shards by what the user typed: a tar, several by braces or `*`, a folder, a manifest, or a URL."""

import functools
import glob
import hashlib
import itertools
import logging
import os
import re
import urllib.parse
from pathlib import Path

import numpy as np
from braceexpand import braceexpand

from snclr.data.cache import RemoteShard, ShardCache
from snclr.data.remote import check_url, file_name, is_url, list_remote, map_in_threads, remote_state, sibling
from snclr.data.shards.dataset import PREFETCH, START, WINDOW, ShardDataset
from snclr.data.shards.index import ShardIndex, index_file, index_shard, merge_indexes
from snclr.data.shards.manifest import MANIFEST, read_manifest
from snclr.errors import UserError, snclr_command
from snclr.runtime.progress import Progress

_log = logging.getLogger(__name__)
_MAX_SHARDS = 100_000
_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)(?:\.\.([0-9]+))?\}")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def names_shards(text: str) -> bool:
    """Return whether the text means shards: a tar, several by braces or *, a manifest, or a URL.

    >>> names_shards("shards/{000..146}.tar"), names_shards("photos/"), names_shards("https://host/set/shards.json")
    (True, False, True)
    """
    lower = text.lower()
    braces = lower.endswith("}") and ".tar" in lower
    return is_url(text) or lower.endswith(_TAR_SUFFIXES) or os.path.basename(lower) == MANIFEST or braces


def is_shard_folder(folder: Path) -> bool:
    """Return whether a folder has a manifest of `snclr pack`, or tars and at most metadata files beside them."""
    if (folder / MANIFEST).is_file():
        return True
    has_tar = False
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.lower()
            if entry.is_dir() and name.startswith("."):
                continue
            if entry.is_dir() or not name.endswith((".tar", ".json", ".txt", ".md", ".idx", ".csv")):
                return False
            has_tar = has_tar or name.endswith(".tar")
    return has_tar


def expand_braces(text: str) -> list[str]:
    """Expand braces as in bash: a range of numbers, or alternatives separated by commas.

    >>> expand_braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    too_many = UserError(f"{text!r} names more than {_MAX_SHARDS:,} shards")
    for first, last, step in _RANGE.findall(text):  # before expanding: braceexpand holds each range in memory
        if abs(int(last) - int(first)) // max(int(step or 1), 1) >= _MAX_SHARDS:
            raise too_many
    try:
        names = list(itertools.islice(braceexpand(text, escape=False), _MAX_SHARDS + 1))
    except ValueError as error:
        raise UserError(f"{text!r} has unbalanced braces") from error
    if len(names) > _MAX_SHARDS:
        raise too_many
    if any("{" in name for name in names[:1]):
        raise UserError(f"{text!r}: braces must hold a range such as {{000..146}} or alternatives such as {{a,b}}")
    return names


def open_shards(spec: str | Path, *, name: str) -> ShardDataset:
    """Open the output of `snclr pack`, or tars by name, braces, `*` or URL; `name` is the dataset's name."""
    text = str(spec)
    if text.lower().startswith("file://"):
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    if is_url(text):
        check_url(text)
        text += MANIFEST if text.endswith("/") else ""
        return _open_manifest(text, name) if file_name(text) == MANIFEST else _open_urls(text, name)
    path = Path(text).expanduser()
    if path.name == MANIFEST or (path / MANIFEST).is_file():
        return _open_manifest(path if path.name == MANIFEST else path / MANIFEST, name)
    if path.is_dir():
        return _open_paths(sorted(path.glob("*.tar")), name)
    paths: list[str] = []
    for pattern in expand_braces(str(path)):
        is_glob = glob.has_magic(pattern) and not os.path.exists(pattern)
        paths += sorted(glob.glob(pattern)) if is_glob else [pattern]
    return _open_paths([Path(path) for path in paths], name)


def _open_paths(paths: list[Path], name: str) -> ShardDataset:
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        examples = f"missing shards: {len(missing)} of {len(paths)}, e.g. {', '.join(missing[:3])}"
        raise UserError(f"{name}: {examples if missing else 'no shard matches; check the path and the numbers'}")
    index = merge_indexes(list(map_in_threads(index_file, paths, threads=4)))
    return ShardDataset(name, paths, index, digest=_digest(index))


def _open_manifest(location: Path | str, name: str) -> ShardDataset:
    """Open the shards of a manifest at a path or a URL (str)."""
    manifest = read_manifest(location)
    if isinstance(location, Path):
        paths = [location.parent / entry.name for entry in manifest.shards]
        for path, entry in zip(paths, manifest.shards, strict=True):
            size = path.stat().st_size if path.is_file() else None
            if size != entry.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes, not the {entry.bytes:,} of the manifest"
                raise UserError(
                    f"{name}: the shard {path} {found}. Copy it again, or pack the folder again. "
                    f"`{snclr_command('pack', '--verify', path.parent)}` checks every shard."
                )
        return ShardDataset(name, paths, manifest.index, digest=manifest.digest(), unique_names=True)
    shards = [RemoteShard(sibling(location, e.name), e.bytes, e.sha256, hashed=True) for e in manifest.shards]
    cache = ShardCache.open(name)
    _check_cache_limit(cache, shards, name)
    digest = manifest.digest(*_order_id(shards))
    return ShardDataset(name, shards, manifest.index, digest=digest, cache=cache, unique_names=True)


def _open_urls(pattern: str, name: str) -> ShardDataset:
    """Open remote shards without a manifest: each is downloaded once to build its index, which is cached."""
    urls = list_remote(pattern) if "*" in pattern else expand_braces(pattern)
    if not urls:
        raise UserError(f"{name}: no shard matches")
    for url in urls:
        if not file_name(url).lower().endswith(".tar"):
            raise UserError(
                f"the URL {url!r} is not a shard. Give .tar files, the {MANIFEST} that `snclr pack` wrote, or its "
                "folder with a / at the end."
            )
    cache = ShardCache.open(name)  # before any request: remote shards cannot be read without it
    states = list(map_in_threads(remote_state, urls))
    shards = [RemoteShard(url, *state, hashed=False) for url, state in zip(urls, states, strict=True)]
    _check_cache_limit(cache, shards, name)
    indexes = []
    with Progress(f"indexing {name}", len(urls), unit="shards") as progress:
        for shard in shards:
            local_copy = functools.partial(cache.fetch, shard)
            indexes.append(index_shard(shard.url, f"{shard.size} {shard.version}", local_copy))
            progress.update(1)
    merged = merge_indexes(indexes)
    return ShardDataset(name, shards, merged, digest=_digest(merged, *_order_id(shards)), cache=cache)


def _order_id(shards: list[RemoteShard]) -> list[str]:
    """Return what remote shards add to the fingerprint: their order differs from that of the same shards on disk."""
    return [f"window {WINDOW} from {START}"] if len(shards) > WINDOW else []


def _check_cache_limit(cache: ShardCache, shards: list[RemoteShard], name: str) -> None:
    """Warn if the cache cannot hold the window: every shard would be downloaded repeatedly."""
    needed = sum(sorted((shard.size or 0 for shard in shards), reverse=True)[: WINDOW + 1 + PREFETCH])
    if needed > cache.limit:
        _log.warning(
            "%s: %s bytes of shards are in use at a time, but the cache holds %s (SNCLR_CACHE_SIZE); shards will be "
            "downloaded repeatedly. Increase the limit or use smaller shards.",
            name, f"{needed:,}", f"{cache.limit:,}",
        )  # fmt: skip


def _digest(index: ShardIndex, *extra: str) -> str:
    digest = hashlib.sha256("\0".join(extra).encode())
    for column in (index.shard, index.offset, index.size, index.names.ends, index.names.text):
        digest.update(np.ascontiguousarray(column).tobytes())
    digest.update("\0".join(index.classes).encode("utf-8", "surrogateescape") + index.label.tobytes())
    return digest.hexdigest()
