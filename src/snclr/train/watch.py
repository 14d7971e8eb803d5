"""Watching over the processes of a job: a hang is not for ever, and no process outlives the one that started it.

Each process sends a sign of life every second, and the step it has come to, to a small store kept by process 0. Process
0 notices who has been silent, or behind the others, for too long and tells all; the others notice when the store itself
is silent. All end, and say who was missing. This does not depend on what the processes were doing when one stopped, nor
on the backend they talk through.

One thread talks to the store and another decides. A store's own timeout is no help where the network is cut: the client
gives up waiting, tells the store so, and then waits for the answer to that without any limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from snclr.distributed import barrier, open_store, rank_and_size
from snclr.errors import UserError

TIMEOUT_SECONDS = 600.0
"""How long a process may be silent where nothing else is set."""
BEAT_SECONDS = 1.0
ORPHAN_SECONDS = 8.0
"""How long an orphan may take to save and leave."""
LAUNCHER_SECONDS = 10
"""How long a launcher whose rendezvous cannot be reached may take to end by itself."""
_EXIT_CODE = 1
_ANSWER_SECONDS = 5.0


@dataclass
class _Seen:
    """What process 0 knows of one process; times by its own clock."""

    beat: bytes
    heard: float
    """When the beat last changed: later ones come from a living process, whatever its main thread does."""
    step: int
    waited_for: float
    """Since when the others have waited for it at this step; the last look, where they do not."""


class Watch:
    """Within the block, this process shows that it lives, and ends when another has been silent, or stuck while others
    went on, for `timeout` seconds.

    Alone it does nothing.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._rank, self._size = rank_and_size()
        self._store: Any = None
        self._stop = threading.Event()
        self._step = -1  # how far this process has come
        self._heard = True  # whether the store has answered since the last look
        self._threads: list[threading.Thread] = []
        self._parent = os.getppid() if _has_launcher() else None

    def __enter__(self) -> Watch:
        if self._size > 1:
            self._store = open_store(_ANSWER_SECONDS)
            self._store.set(f"beat/{self._rank}", "0 -1")
            self._store.set(f"host/{self._rank}", f"{socket.gethostname()} (pid {os.getpid()})")
            if self._rank == 0:
                self._store.set("verdict", "")
            barrier()  # every key is there before anyone asks for it
            self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._guard)]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            # One still inside torch when Python ends would abort the process: give its last call time to return.
            thread.join(timeout=_ANSWER_SECONDS + 2 * BEAT_SECONDS)
        if kind is None:
            barrier()  # the store ends with process 0: no one may be asking it any more
        self._store = None

    def reached(self, step: int) -> None:
        """This process has what it needs for `step`, and will now wait for the others there."""
        self._step = step

    def silent(self) -> list[int]:
        """The processes that show no life now: found in a few seconds, for an error that another's end may explain."""
        if self._store is None:
            return []
        found: list[list[int]] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # torch raises several kinds
                before = self._beats()
                time.sleep(3 * BEAT_SECONDS)
                now = self._beats()
                found.append([rank for rank in range(self._size) if before[rank] == now[rank] and rank != self._rank])

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(3 * BEAT_SECONDS + _ANSWER_SECONDS)
        return found[0] if found else [0]  # the store failed or did not answer, and process 0 keeps it

    def _beats(self) -> list[bytes]:
        return [self._store.get(f"beat/{rank}") for rank in range(self._size)]

    def _talk(self) -> None:
        """Show life and hear how the others are; a call may fail, or never come back."""
        count = 0
        seen: dict[int, _Seen] = {}
        while not self._stop.wait(BEAT_SECONDS):
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", f"{count} {self._step}")
                verdict = self._judge(seen) if self._rank == 0 else self._verdict()
            except Exception:  # torch raises several kinds; the other thread notices the silence
                continue
            self._heard = True
            self._end_by(verdict)

    def _guard(self) -> None:
        """End when the store has been silent for too long, or the launcher is gone.

        Time is counted in looks, not by the clock: a process that was itself stopped for an hour heard nothing then.
        """
        silence = 0.0
        while not self._stop.wait(BEAT_SECONDS):
            if self._parent is not None and os.getppid() != self._parent:
                self._leave_as_orphan()
                return
            silence = 0.0 if self._heard else silence + BEAT_SECONDS
            self._heard = False
            if silence > self._timeout:
                if self._parent is not None and not self._stop.is_set():
                    _see_off(self._parent)
                self._end_by(f"process 0 has not answered for {self._timeout:g} seconds")

    def _end_by(self, verdict: str | None) -> None:
        if verdict is not None and not self._stop.is_set():
            _end(f"{verdict}; this is process {self._rank} on {socket.gethostname()}, which ends too")

    def _judge(self, seen: dict[int, _Seen]) -> str | None:
        """On process 0: who has been silent, or behind, for too long? The others are told."""
        now, beats = time.monotonic(), self._beats()
        steps = [int(beat.split()[1]) for beat in beats]
        for rank, beat in enumerate(beats):
            known = seen.setdefault(rank, _Seen(beat, now, steps[rank], now))
            if beat != known.beat:
                known.beat, known.heard = beat, now
            # One that is behind may only have told its step a moment earlier: it is waited for where it does not move.
            if steps[rank] == max(steps) or steps[rank] != known.step:
                known.step, known.waited_for = steps[rank], now
        silent = [rank for rank, known in seen.items() if now - known.heard > self._timeout]
        alive = [rank for rank, known in seen.items() if now - known.heard < 5 * BEAT_SECONDS]
        stuck = [rank for rank in alive if now - seen[rank].waited_for > self._timeout]
        if not silent and not stuck:
            return None
        hosts = ", ".join(f"process {r} on {self._store.get(f'host/{r}').decode()}" for r in silent or stuck)
        what = (
            "has shown no sign of life" if silent else f"lives, but has not come to step {max(steps)} like the others"
        )
        verdict = f"{hosts} {what} for {self._timeout:g} seconds"
        self._store.set("verdict", verdict)
        time.sleep(2 * BEAT_SECONDS)  # the store ends with this process: let the others read it
        return verdict

    def _verdict(self) -> str | None:
        said = self._store.get("verdict").decode()
        return said or None

    def _leave_as_orphan(self) -> None:
        """The launcher is gone: stop in good order, by the signal it would have sent, or else without order."""
        print("the process that started this one is gone: saving and leaving", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stop.wait(ORPHAN_SECONDS):
            _end("no step ended in time to save; what was saved before is whole")


@contextlib.contextmanager
def watched(timeout: float) -> Iterator[Watch]:
    """Watch over the processes within the block; an error of torch's that a missing process explains names that."""
    with Watch(timeout) as watch:
        try:
            yield watch
        except RuntimeError as error:
            if missing := watch.silent():
                raise UserError(
                    f"process {', '.join(map(str, missing))} is gone or cannot be reached ({error})"
                ) from error
            raise


def _has_launcher() -> bool:
    """Whether a parent process looks after this one (a shell does not: a run may outlive its terminal)."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("LOCAL_RANK", "0")) > 0


def _see_off(launcher: int) -> None:
    """Leave something behind that ends torchrun where it cannot end itself; one that does in time is not touched.

    Its rendezvous may be behind the same cut link, and it waits for an answer from there in code that no signal but
    SIGKILL interrupts, until TCP gives up after a quarter of an hour.
    """
    env = os.environ
    if env.get("LOCAL_RANK") != "0" or env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
        return  # one process of a machine is enough; on a single machine there is no link to cut
    wait = f"for i in $(seq {LAUNCHER_SECONDS}); do sleep 1; kill -0 {launcher} || exit 0; done; kill -9 {launcher}"
    nowhere = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        subprocess.Popen(["sh", "-c", wait], stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def _end(text: str) -> None:
    """Say why and end at once: the main thread may be stuck where no exception reaches it. All files are crash-safe."""
    with contextlib.suppress(OSError):
        print(f"snclr: {text}", file=sys.stderr, flush=True)
    os._exit(_EXIT_CODE)
