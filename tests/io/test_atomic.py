"""Atomic writes, and the errors for disks that are full or not writable."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from snclr.errors import UserError
from snclr.io.atomic import check_writable, explain_full_disk, write_atomic


def test_the_message_for_a_full_disk_tells_how_to_continue(tmp_path):
    with (
        pytest.raises(UserError, match=r"run the same command again \(snclr pretrain: with --resume\)"),
        explain_full_disk(tmp_path / "new" / "x", 10),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_checking_that_a_path_is_writable_leaves_no_trace(tmp_path):
    check_writable(tmp_path / "a" / "b" / "file", "move")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file", "move")
    assert (tmp_path / "file").read_text() == "old"
    for path in (tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        with pytest.raises(UserError, match=r"cannot write .*x.* \(.+\); move"):
            check_writable(path, "move")


@pytest.mark.parametrize("content", ["grüße\n", b"\x00\xff", ""])
def test_write_atomic(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "a"
    write_atomic(path, "before")
    write_atomic(str(path), content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("function", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, UserError), (errno.EIO, OSError)])
def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, kind: type[Exception]
) -> None:
    write_atomic(tmp_path / "a", "before")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as context:
        context.setattr(os, function, fail)
        with pytest.raises(kind) as caught:
            write_atomic(tmp_path / "a", "x" * 1234)
    assert (tmp_path / "a").read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    if kind is UserError:
        assert str(tmp_path / "a") in str(caught.value)
        assert "1,234 bytes needed" in str(caught.value)
