"""Locks between processes. That a lock ends with its process is tested in tests/checkpoint/test_run_dir.py."""

import os

import pytest

from snclr.errors import UserError
from snclr.io.locking import FileLock, lock_folder


def test_a_folder_is_locked_once(tmp_path):
    lock, other = FileLock(tmp_path / "a" / ".lock"), FileLock(tmp_path / "a" / ".lock")
    lock_folder(lock, "the task", "move it")
    with pytest.raises(UserError, match=rf"the task is already running \(process {os.getpid()} .*Wait until"):
        lock_folder(other, "the task", "move it")
    lock.release()
    lock_folder(other, "the task", "move it")
    other.release()


def test_a_folder_that_cannot_be_created_gives_the_advice(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write .*; move it"):
        lock_folder(FileLock(tmp_path / "file" / ".lock"), "the task", "move it")


def test_a_forked_child_does_not_hold_the_lock_of_its_parent(tmp_path):
    lock, other = FileLock(tmp_path / ".lock"), FileLock(tmp_path / ".lock")
    lock.release()  # without a lock it does nothing
    assert lock.acquire()
    pid = os.fork()
    if pid == 0:
        lock.release()  # must not release the lock of the parent
        os._exit(int(other.acquire()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not other.acquire()
    lock.release()
    assert other.acquire()
    other.release()
