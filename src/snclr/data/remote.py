"""Files behind an address: http by the standard library, object stores by fsspec. Nothing here runs what it reads.

WebDataset's own opener runs `pipe:` addresses as shell commands, and fsspec joins protocols with `::`. Neither is
accepted: an address is one of `SCHEMES`, or an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from snclr.data.patience import Away, Passing, keep_trying
from snclr.durable import explain_full_disk
from snclr.errors import UserError

# scheme → the package that fsspec needs for it (None: nothing beyond what is installed).
SCHEMES: dict[str, str | None] = {
    "http": None, "https": None, "memory": None,
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "oss": "ossfs", "hf": "huggingface_hub",
}  # fmt: skip
_TIMEOUT_SECONDS = 30.0
_CHUNK = 2**20
_SMALL = 2**30  # a manifest or an index
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
# Each store's package has errors of its own; by these words in their names a network that is away is known.
_AWAY = re.compile(r"connect|timeout|transport|unavailable|incomplete|slowdown|throttl", re.IGNORECASE)


class RemoteState(NamedTuple):
    """What tells a changed file from the same one: its `size` (None: not said) and `version` (ETag or time)."""

    size: int | None
    version: str


def is_address(text: str) -> bool:
    """Whether something is meant as an address rather than a path: `scheme://…`, or one of the forms we refuse."""
    return "://" in text or text.lower().startswith("pipe:")


def check_address(url: str) -> str:
    """Return the address's scheme; UserError unless it is one that only reads."""
    scheme = url.partition("://")[0].lower()
    if url.lower().startswith("pipe:") or "::" in url or scheme not in SCHEMES:
        raise UserError(
            f"the address {url!r} is not accepted; it must start with one of {' '.join(f'{s}://' for s in SCHEMES)}. "
            "Addresses that run a command (pipe:) or join protocols (::) never are."
        )
    return scheme


def sibling(url: str, name: str) -> str:
    """The address of another file in the same folder; a query (a signature, a token) stays.

    >>> sibling("https://host/set/shards.json?key=a/b", "0.tar")
    'https://host/set/0.tar?key=a/b'
    """
    path, question, query = url.partition("?")
    return f"{path.rpartition('/')[0]}/{name}{question}{query}"


def remote_state(url: str) -> RemoteState:
    """Ask for a file's size and version without reading it."""
    if check_address(url) in ("http", "https"):
        return keep_trying(url, lambda: _http_state(url))
    filesystem, path = _filesystem(url)
    info: dict[str, Any] = keep_trying(url, lambda: _fsspec_call(filesystem.info, path))
    names = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created", "last_commit")
    version = next((str(info[name]) for name in names if info.get(name)), "")
    return RemoteState(info.get("size"), version)


def list_remote(pattern: str) -> list[str]:
    """The addresses that a pattern with `*` stands for, sorted; object stores alone can be listed."""
    scheme = check_address(pattern)
    if scheme in ("http", "https"):
        raise UserError(f"{pattern!r}: a web server cannot be asked for its files; write them as {{000..146}}")
    filesystem, path = _filesystem(pattern)
    found: list[str] = keep_trying(pattern, lambda: _fsspec_call(filesystem.glob, path))
    return sorted(str(filesystem.unstrip_protocol(name)) for name in found)


def read_remote(url: str) -> bytes:
    """Read a small file whole."""
    import tempfile

    check_address(url)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "file"
        download(url, place, limit=_SMALL)
        return place.read_bytes()


def download(
    url: str,
    path: Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    limit: int | None = None,
    patience: float | None = None,
) -> None:
    """Fetch a file to `path`: complete, with the right size and hash where they are known, or not there at all.

    A broken connection is taken up where it broke, where the server can; else from the start. `patience` is for how
    many seconds nothing may come.
    """
    scheme = check_address(url)
    partial = path.with_name(path.name + ".partial")
    most = 0

    def once() -> None:
        nonlocal most
        received = 0
        try:
            transfer = _http_transfer(url, partial) if scheme in ("http", "https") else _fsspec_transfer(url, partial)
            for received in transfer:
                if limit is not None and received > limit:
                    raise UserError(f"{url} is larger than {limit:,} bytes, which is no manifest or index")
        except Away as error:
            error.progressed = received > most
            raise
        finally:
            most = max(most, received)
        found = partial.stat().st_size
        if size is not None and found != size:
            raise Passing(f"{found:,} bytes came, {size:,} were expected")
        if sha256 is not None and _sha256(partial) != sha256:
            partial.unlink()  # nothing of it can be trusted
            raise Passing("its sha256 is not that of the manifest; the shard was changed or damaged on the way")

    partial.unlink(missing_ok=True)
    try:
        with explain_full_disk(path, size or 0):
            keep_trying(url, once, patience=patience)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# http


def _opener() -> urllib.request.OpenerDirector:
    """http and https alone: the default opener would also follow a redirection to ftp, and open file: and data:."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


@contextlib.contextmanager
def _http(url: str, method: str = "GET", **headers: str) -> Iterator[Any]:
    request = urllib.request.Request(url, method=method, headers={"User-Agent": "snclr", **headers})
    with _explained(url):
        response = _opener().open(request, timeout=_TIMEOUT_SECONDS)
    with response:
        yield response


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Faults of the connection, as what passes or what stays. For the network alone: a full disk is another matter."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        said = f"the server answered {error.code} {error.reason}"
        if error.code in _TRY_AGAIN:
            raise Away(said) from error
        raise UserError(f"{url} cannot be read: {said}") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        cause = getattr(error, "reason", "") or error
        said = str(cause) or type(cause).__name__
        # A certificate, an address that is none, or a redirection out of the web: asked again they are the same.
        if isinstance(cause, (str, ssl.SSLCertVerificationError)) or isinstance(error, http.client.InvalidURL):
            raise UserError(f"{url} cannot be read: {said}") from error
        raise Away(said) from error


def _http_state(url: str) -> RemoteState:
    try:
        with _http(url, "HEAD") as response:
            return _http_state_of(response)
    except UserError:  # some servers allow no HEAD; the headers of a GET say the same
        with _http(url) as response:
            return _http_state_of(response)


def _http_state_of(response: Any) -> RemoteState:
    headers = response.headers
    size = headers.get("Content-Length", "")
    return RemoteState(int(size) if size.isdigit() else None, headers.get("ETag") or headers.get("Last-Modified") or "")


def _http_transfer(url: str, partial: Path) -> Iterator[int]:
    """Write the rest of a file to `partial`; yields the number of bytes there are. A server may send all of it anew."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with _http(url, **headers) as response:
        resumed = have > 0 and response.status == 206
        length = response.headers.get("Content-Length", "")
        start = have if resumed else 0
        received = start
        with open(partial, "ab" if resumed else "wb") as file:
            while chunk := _read_http(response, url):
                file.write(chunk)
                received += len(chunk)
                yield received
        if length.isdigit() and received != start + int(length):
            raise Away(f"the connection broke after {received:,} of {start + int(length):,} bytes")


def _read_http(response: Any, url: str) -> bytes:
    with _explained(url):
        data: bytes = response.read(_CHUNK)
        return data


# Object stores


def _filesystem(url: str) -> tuple[Any, str]:
    scheme = check_address(url)
    try:
        filesystem, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        package = SCHEMES[scheme] or "fsspec"
        raise UserError(f"{url}: {scheme}:// addresses need a package: pip install {package}") from error
    return filesystem, path


def _fsspec_call(action: Any, *arguments: Any) -> Any:
    try:
        return action(*arguments)
    except FileNotFoundError as error:
        raise UserError(f"there is no {error.args[-1] if error.args else arguments[0]} in that store") from error
    except PermissionError as error:
        raise UserError(f"the store refuses {arguments[0]}: {error}; check the credentials and the name") from error
    except Exception as error:  # each store has errors of its own
        away = isinstance(error, OSError) or _AWAY.search(type(error).__name__)
        raise (Away if away else Passing)(f"{type(error).__name__}: {error}") from error


def _fsspec_transfer(url: str, partial: Path) -> Iterator[int]:
    filesystem, path = _filesystem(url)
    received = 0
    remote = _fsspec_call(filesystem.open, path, "rb")
    with contextlib.closing(remote), open(partial, "wb") as file:
        while chunk := _fsspec_call(remote.read, _CHUNK):
            file.write(chunk)
            received += len(chunk)
            yield received


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
