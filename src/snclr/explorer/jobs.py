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
from concurrent.futures import Future
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

    title: str
    compute: Callable[[Job], Any]
    jobs: Jobs
    done: int = 0
    total: int = 0
    started: float | None = None
    waits_for: Job | None = None
    """A job whose value this one needs first; the page shows its progress instead."""
    estimate: Callable[[], int] | None = None
    """The percentage of a job that does not report its progress."""
    result: Future[Any] = field(default_factory=Future)

    def report(self, done: int, total: int) -> None:
        """Record the progress; raise Cancelled if the server is closing."""
        self.done, self.total = done, total
        if self.jobs.closed:
            raise Cancelled

    def status(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        if self.waits_for is not None:
            return self.waits_for.status()
        if self.estimate is not None:
            self.done, self.total = self.estimate(), 100
        seconds = 0.0 if self.started is None else time.monotonic() - self.started
        state = "queued" if self.started is None else "running"
        progress = {"done": self.done, "total": self.total, "seconds": round(seconds, 1)}
        return {"title": self.title, "state": state, **progress}


class Jobs:
    """Compute each key once. A failed job is forgotten, so that the next request tries again.

    With `low_priority`, the browser and the requests come before the threads.
    """

    def __init__(self, *, low_priority: bool = True) -> None:
        self._low_priority = low_priority
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
                job = self._jobs[key] = Job(title, compute, self)
                if parent is None:
                    self._lanes[lane].put(job)
        if parent is not None:
            parent.waits_for = job
            self._run(job)
        elif not job.result.done():
            raise Pending(job)
        try:
            return job.result.result()
        except Exception:
            with self._lock:
                self._jobs.pop(key, None)
            raise
        finally:
            if parent is not None:
                parent.waits_for = None

    def close(self, *, seconds: float = 0.0) -> None:
        """Cancel the jobs at their next report and wait for the threads; a job without reports may still run."""
        self.closed = True
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, waiting: queue.SimpleQueue[Job]) -> None:
        if self._low_priority and sys.platform == "linux":  # threads of torch inherit it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self.closed:
            with contextlib.suppress(queue.Empty):
                self._run(waiting.get(timeout=0.25))

    def _run(self, job: Job) -> None:
        """Compute the value of a job unless a thread has started it."""
        with self._lock:
            if job.started is not None:
                return
            job.started = time.monotonic()
        parent, _current.job = getattr(_current, "job", None), job
        try:
            job.report(job.done, job.total)  # nothing is started after `close`
            job.result.set_result(job.compute(job))
        except Cancelled:
            job.result.set_exception(UserError("the server is closing"))
        except Exception as error:
            if not isinstance(error, UserError):
                _log.exception("explore: %s failed", job.title)
            job.result.set_exception(error)
        finally:
            _current.job = parent
