"""Values that are computed once, in background threads, with progress that the page shows."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from snclr.errors import UserError

_log = logging.getLogger("snclr")
_NICENESS = 10
_current = threading.local()  # `job`: the job that runs in this thread
THREADS = "snclr-explore"
"""Prefix of the names of the threads."""
Lane = Literal["main", "slow"]
"""Jobs of one lane run one after the other; a slow job (UMAP) does not delay the others."""


class Cancelled(BaseException):
    """Raised inside a job after `Jobs.close`."""


class Pending(Exception):
    """The value is not computed yet; `job` has its progress."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.title)
        self.job = job


@dataclass
class Job:
    """One value: what is computed (`title`) and its progress (`done` of `total`)."""

    key: str
    title: str
    compute: Callable[[Job], Any]
    jobs: Jobs
    done: int = 0
    total: int = 0
    state: Literal["queued", "running", "done", "failed"] = "queued"
    value: Any = None
    error: Exception | None = None
    started: float = 0.0
    waits_for: Job | None = None
    """A job whose value this one needs first; the page shows its progress instead."""
    finished: threading.Event = field(default_factory=threading.Event)

    def report(self, done: int, total: int) -> None:
        """Record the progress; raise Cancelled if the server is closing."""
        self.done, self.total = done, total
        if self.jobs.closed:
            raise Cancelled

    def status(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        if self.waits_for is not None:
            return self.waits_for.status()
        seconds = time.monotonic() - self.started if self.started else 0.0
        return {
            "key": self.key, "title": self.title, "state": self.state, "done": self.done, "total": self.total,
            "seconds": round(seconds, 1),
        }  # fmt: skip


class Jobs:
    """Compute each key once. A failed job is forgotten, so that the next request tries again.

    With `yields`, the threads have a lower priority: the browser and the requests come first.
    """

    def __init__(self, *, yields: bool = True) -> None:
        self._yields = yields
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._lanes: dict[Lane, queue.SimpleQueue[Job]] = {"main": queue.SimpleQueue(), "slow": queue.SimpleQueue()}
        self.closed = False
        # Daemon threads: UMAP cannot be cancelled and must not delay the end of the program.
        self._threads = [
            threading.Thread(target=self._work, args=(waiting,), name=f"{THREADS}-{lane}", daemon=True)
            for lane, waiting in self._lanes.items()
        ]
        for thread in self._threads:
            thread.start()

    def get(self, key: str, title: str, compute: Callable[[Job], Any], *, lane: Lane = "main") -> Any:
        """Return the value or raise the error of its job; if it is not computed, start its job and raise Pending.

        Inside another job, compute the value here if no thread has started it, else wait for it.
        """
        parent: Job | None = getattr(_current, "job", None)
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = Job(key, title, compute, self)
                if parent is None:
                    self._lanes[lane].put(job)
        if parent is not None:
            parent.waits_for = job
            self._run(job)
            job.finished.wait()
            parent.waits_for = None
        if job.state == "done":
            return job.value
        if job.error is not None:
            with self._lock:
                self._jobs.pop(key, None)
            raise job.error
        if parent is not None:  # not started, because the server is closing
            raise Cancelled
        raise Pending(job)

    def running(self) -> list[dict[str, Any]]:
        """Return the progress of all unfinished jobs."""
        with self._lock:
            return [job.status() for job in self._jobs.values() if job.state in ("queued", "running")]

    def close(self) -> None:
        """Cancel the jobs at their next report."""
        self.closed = True

    def join(self, seconds: float) -> None:
        """Wait for the threads after `close`; a job that cannot be cancelled may still run afterward."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, waiting: queue.SimpleQueue[Job]) -> None:
        if self._yields and sys.platform == "linux":  # threads of torch inherit it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self.closed:
            with contextlib.suppress(queue.Empty):
                self._run(waiting.get(timeout=0.25))

    def _run(self, job: Job) -> None:
        with self._lock:
            if job.state != "queued" or self.closed:
                if self.closed:
                    job.finished.set()
                return
            job.state, job.started = "running", time.monotonic()
        parent, _current.job = getattr(_current, "job", None), job
        try:
            job.value = job.compute(job)
            job.state = "done"
        except Cancelled:
            job.error, job.state = UserError("the server is closing"), "failed"
        except Exception as error:
            if not isinstance(error, UserError):
                _log.exception("explore: %s failed", job.title)
            job.error, job.state = error, "failed"
        finally:
            _current.job = parent
            job.finished.set()
