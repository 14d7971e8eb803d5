"""Read remote files through fsspec: an allow-list of URL schemes, interruptible retries, and atomic downloads.

WebDataset runs `pipe:` URLs as shell commands, and fsspec chains protocols with `::`. Neither is accepted.
"""

import contextlib
import errno
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from snclr.errors import UserError
from snclr.io.atomic import explain_full_disk, fsync_path
from snclr.io.hashing import sha256_file

ValueT = TypeVar("ValueT")

BACKOFF_SECONDS = 1.0  # before the second attempt, doubled for each further one
MAX_BACKOFF_SECONDS = 30.0
PROGRESS_SECONDS = 90.0  # a longer attempt has received data: connections without a byte end after 30 seconds
NETWORK_TIMEOUT_SECONDS = 540.0
"""Below the distributed timeout (600): the rank that cannot read reports its error before the others time out."""

_log = logging.getLogger(__name__)
_VARIABLE = "SNCLR_NETWORK_TIMEOUT"
_cancelled = threading.Event()

# scheme → the package that fsspec needs for it (None: already installed)
SCHEMES: dict[str, str | None] = {
    "http": None, "https": None, "memory": None,
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "oss": "ossfs", "hf": "huggingface_hub",
}  # fmt: skip
_TIMEOUT_SECONDS = 30.0  # without a connection, or without a byte
_MAX_SMALL_FILE = 2**30  # a manifest or an index
_RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)
_VERSION_FIELDS = (
    "ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created",
    "last_commit",
)  # fmt: skip
# Every store's package has its own exception types; these parts of their names mean a network failure.
_NETWORK_ERROR = re.compile(r"connect|timeout|transport|unavailable|incomplete|payload|slowdown|throttl", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Return whether the text is meant as a URL rather than a path: `scheme://…`, or the refused `pipe:`."""
    return "://" in text or text.lower().startswith("pipe:")


def check_url(url: str) -> str:
    """Return the URL's scheme; UserError unless it is on the allow-list."""
    scheme = url.partition("://")[0].lower()
    if url.lower().startswith("pipe:") or "::" in url or scheme not in SCHEMES:
        raise UserError(
            f"the URL {url!r} is not accepted; it must start with one of {' '.join(f'{s}://' for s in SCHEMES)}. "
            "URLs that run a command (pipe:) or chain protocols (::) are never accepted."
        )
    return scheme


def sibling(url: str, name: str) -> str:
    """Return the URL of another file in the same folder, with the same query (a signature, a token).

    >>> sibling("https://host/set/shards.json?key=a/b", "0.tar")
    'https://host/set/0.tar?key=a/b'
    """
    path, separator, query = url.partition("?")
    return f"{path.rpartition('/')[0]}/{name}{separator}{query}"


def file_name(url: str) -> str:
    """Return the file name in a URL."""
    return url.partition("?")[0].rpartition("/")[2]


def remote_state(url: str) -> tuple[int | None, str]:
    """Return a file's size in bytes (None: unknown) and version (ETag or modification time) without reading it."""
    info = dict(retry(url, lambda: _call(url, "info")))
    version = next((str(info[name]) for name in _VERSION_FIELDS if info.get(name)), "")
    return info.get("size"), version


def list_remote(pattern: str) -> list[str]:
    """Return the sorted URLs that match a pattern with `*`; only object stores can be listed."""
    if check_url(pattern) in ("http", "https"):
        raise UserError(f"{pattern!r}: a web server cannot list its files; give a range such as {{000..146}}")
    filesystem, _ = _filesystem(pattern)
    return sorted(str(filesystem.unstrip_protocol(name)) for name in retry(pattern, lambda: _call(pattern, "glob")))


def read_remote(url: str) -> bytes:
    """Read a small file such as a manifest or an index."""
    size, _ = remote_state(url)
    if size is not None and size > _MAX_SMALL_FILE:
        raise UserError(f"{url} has {size:,} bytes, too many for a manifest or an index")
    return bytes(retry(url, lambda: _call(url, "cat_file")))


def download(
    url: str, path: Path, *, size: int | None = None, sha256: str | None = None, timeout: float | None = None
) -> None:
    """Download to `path` atomically, checking size and hash if they are known; see `retry` for `timeout`."""
    partial = path.with_name(path.name + ".partial")  # one name: the caller holds a lock, and `ShardCache` counts it

    def attempt() -> None:
        _call(url, "get_file", str(partial))
        received = partial.stat().st_size
        if size is not None and received != size:
            raise TransientError(f"{received:,} bytes received, {size:,} expected")
        if sha256 is not None and sha256_file(partial) != sha256:
            raise UserError(f"{url}: its sha256 differs from the manifest; the shard was changed or damaged")

    try:
        with explain_full_disk(path, size or 0):
            retry(url, attempt, timeout=timeout)
            fsync_path(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _call(url: str, method: str, *arguments: str) -> Any:
    """Call a method of fsspec's file system with the path of a URL; its errors are transient ones or UserErrors."""
    filesystem, path = _filesystem(url)
    try:
        return getattr(filesystem, method)(path, *arguments)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # get_file writes to the local disk
        # fsspec reports every failed request for a file's state as FileNotFoundError, with the reason as its cause.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        name, status = type(cause).__name__, getattr(cause, "status", None)
        reason = f"the server answered {status} {getattr(cause, 'message', '')}" if status else f"{name}: {cause}"
        if isinstance(cause, FileNotFoundError):
            reason, transient = "it does not exist", False
        elif isinstance(cause, PermissionError) or status in (401, 403):
            reason, transient = f"access denied ({cause}); check the credentials", False
        elif isinstance(status, int):
            transient = status in _RETRY_STATUS
        else:  # an invalid URL, a bad certificate (a ValueError too) or a redirect to another scheme is permanent
            invalid = isinstance(cause, ValueError) or "Url" in name
            transient = not invalid and (isinstance(cause, OSError) or bool(_NETWORK_ERROR.search(name)))
        if transient:
            raise TransientError(reason) from error
        raise UserError(f"{url} cannot be read: {reason}") from error


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec.core

    scheme = check_url(url)
    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_SECONDS, sock_read=_TIMEOUT_SECONDS)
        client = {"timeout": timeout, "trust_env": True, "headers": {"User-Agent": "snclr"}}  # trust_env: use proxies
        options = {"client_kwargs": client, "encoded": True}
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = SCHEMES[scheme] or "fsspec"
        raise UserError(f"{url}: {scheme}:// URLs need a package: pip install {package}") from error
    return filesystem, path


class TransientError(Exception):
    """A failure of the network or the server, which is retried until the network timeout."""


def network_timeout() -> float:
    """Return the seconds a network may be unavailable: SNCLR_NETWORK_TIMEOUT, default 540."""
    value = os.environ.get(_VARIABLE) or NETWORK_TIMEOUT_SECONDS
    with contextlib.suppress(ValueError):
        if 0 <= float(value) < math.inf:
            return float(value)
    raise UserError(f"{_VARIABLE} is {value!r}; give a number of seconds of at least 0, such as 600")


def retry(url: str, action: Callable[[], ValueT], *, timeout: float | None = None) -> ValueT:
    """Call `action` until it succeeds; transient errors are retried for `timeout` seconds without progress."""
    timeout = network_timeout() if timeout is None else timeout
    failures, outage_start = 0, 0.0
    while True:
        attempt_start = time.monotonic()
        try:
            return action()
        except TransientError as error:
            now = time.monotonic()
            if failures == 0 or now - attempt_start > PROGRESS_SECONDS:
                failures, outage_start = 0, now
            left = outage_start + timeout - now
            if left <= 0:
                raise UserError(
                    f"{url} could not be read for {timeout:g} seconds ({_VARIABLE}): {error}. Check the connection and "
                    "the URL, then run the same command again (a run with --resume)."
                ) from error
            failures += 1
            if failures == 2:  # single failures are normal
                warning = f"{url} cannot be read ({error}); retrying for {timeout:g} seconds ({_VARIABLE})."
                warning = f"warning: {warning} If the address is wrong, press Ctrl-C"
                print(warning, file=sys.stderr, flush=True)
                _log.info(warning)  # to the run's log; worker processes have none
            if _cancelled.wait(min(BACKOFF_SECONDS * 2 ** min(failures - 1, 10), MAX_BACKOFF_SECONDS, left)):
                raise UserError("another request failed or was interrupted") from error


def map_in_threads(
    action: Callable[[Any], ValueT], items: Iterable[Any], threads: int = 16
) -> Generator[ValueT, None, None]:
    """Yield the results in order; the error of one item, Ctrl-C or `close` ends the others and their retries."""
    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            yield from pool.map(action, items)
        except BaseException:
            _cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            _cancelled.clear()
