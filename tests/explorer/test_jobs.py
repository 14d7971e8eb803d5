"""Background jobs of the explorer."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from snclr.explorer.jobs import Jobs, Pending


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
@pytest.mark.parametrize("low_priority", [True, False])
def test_only_jobs_beside_a_server_have_a_lower_priority(low_priority: bool) -> None:
    """On a busy machine, a static page would otherwise wait for its jobs for minutes."""
    jobs = Jobs(low_priority=low_priority)
    with pytest.raises(Pending) as pending:
        jobs.get("a", "a", lambda job: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    priority = pending.value.job.result.result(20)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert (priority > own) == (low_priority and own < 10)
    jobs.close()
