"""What the commands say of a disk that cannot be written."""

import errno
import os

import pytest

from snclr.durable import FileLock, check_writable, explain_full_disk, lock_folder
from snclr.errors import UserError


def test_a_full_disk_names_a_way_on_that_every_command_has(tmp_path):
    with (
        pytest.raises(UserError, match=r"same command again \(snclr pretrain: with --resume\)"),
        explain_full_disk(tmp_path / "new" / "x", 10),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_place_is_tried_and_left_as_it_was(tmp_path):
    check_writable(tmp_path / "a" / "b" / "file", "move")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file", "move")
    assert (tmp_path / "file").read_text() == "old"
    for place in (tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        with pytest.raises(UserError, match=r"cannot write .*x.* \(.+\); move"):
            check_writable(place, "move")


def test_a_folder_is_locked_once(tmp_path):
    lock, other = FileLock(tmp_path / "a" / ".lock"), FileLock(tmp_path / "a" / ".lock")
    lock_folder(lock, "the work", "move")
    with pytest.raises(UserError, match=rf"the work is already under way \(process {os.getpid()} .*wait for it"):
        lock_folder(other, "the work", "move")
    lock.release()
    lock_folder(other, "the work", "move")
    other.release()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*; move"):
        lock_folder(FileLock(tmp_path / "file" / ".lock"), "the work", "move")
