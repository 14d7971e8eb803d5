"""What a person sees of a long job: a bar on a terminal, plain lines anywhere else, with the same facts."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, TextIO

_WINDOW_SECONDS = 60.0
_WINDOW_UPDATES = 8
_REFRESH_SECONDS = 0.2


class _Mark(NamedTuple):
    time: float
    done: int
    wait: float
    compute: float


class Progress:
    """Progress of a job of `total` items (None: unknown), of which `initial` were done before (a resumed run).

    Rate, time left and data-wait share are those of the last minute, or of the last few updates where these are slow.

    >>> with Progress("embedding", total=200, stream=sys.stdout) as progress:
    ...     progress.say("reading photos/")
    reading photos/
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        *,
        unit: str = "images",
        initial: int = 0,
        interval: float = 30.0,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = initial
        self.values: dict[str, Any] = {}
        self._interval = interval
        self._stream = sys.stderr if stream is None else stream
        self._silent = quiet
        self._clock = clock
        self._marks = deque([_Mark(clock(), initial, 0.0, 0.0)])
        self._last_shown = float("-inf")
        self._finished = False
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self._marks = deque([_Mark(self._clock(), self.done, 0.0, 0.0)])
        if not self._silent and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = _start_bar(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._attempt(self._refresh)
            self._attempt(self._bar.stop)
            self._bar = None

    def update(
        self,
        n_items: int,
        wait_seconds: float = 0.0,
        compute_seconds: float = 0.0,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """`n_items` more are done, after so long a wait for data and so long a computation; `values` are shown."""
        self.done += n_items
        self.values.update(values or {})
        now, last = self._clock(), self._marks[-1]
        self._marks.append(_Mark(now, self.done, last.wait + wait_seconds, last.compute + compute_seconds))
        while len(self._marks) > _WINDOW_UPDATES and now - self._marks[0].time > _WINDOW_SECONDS:
            self._marks.popleft()
        complete = self.total is not None and self.done >= self.total and not self._finished
        self._finished |= complete
        pause = self._interval if self._bar is None else _REFRESH_SECONDS
        if complete or now - self._last_shown >= pause:
            self._last_shown = now
            self._attempt(self._refresh)

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        self._attempt(lambda: self._print(text))

    @property
    def rate(self) -> float | None:
        """Items a second over the window, or None before the first update."""
        first, last = self._marks[0], self._marks[-1]
        return (last.done - first.done) / (last.time - first.time) if last.time > first.time else None

    @property
    def seconds_left(self) -> float | None:
        """Time to go at the present rate, or None where that cannot be said."""
        if self.total is None or not self.rate:
            return None
        return max(self.total - self.done, 0) / self.rate

    @property
    def wait_share(self) -> float | None:
        """The share of time spent waiting for data over the window, in [0, 1], or None where none was reported."""
        first, last = self._marks[0], self._marks[-1]
        wait, spent = last.wait - first.wait, last.wait + last.compute - first.wait - first.compute
        return wait / spent if spent > 0 else None

    def facts(self) -> str:
        """All there is to say in one line: percent, rate, time left, wait share, values; the unknown is left out."""
        return " · ".join(part for part in (self._pace(), self._state()) if part)

    def _pace(self) -> str:
        parts = [f"{self.done:,} {self.unit}" if self.total is None else f"{_percent(self.done, self.total)}%"]
        if self.rate is not None:
            parts.append(f"{_short(self.rate)} {self.unit}/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return " · ".join(parts)

    def _state(self) -> str:
        parts = [] if self.wait_share is None else [f"data wait {self.wait_share:.0%}"]
        parts += [f"{name} {_short(value)}" for name, value in self.values.items() if value is not None]
        return " · ".join(parts)

    def _refresh(self) -> None:
        if self._bar is None:
            self._print(f"{self.description}: {self.facts()}")
        else:
            (task,) = self._bar.tasks
            self._bar.update(task.id, completed=self.done, description=self.description, pace=self._pace())
            self._bar.refresh()

    def _print(self, text: str) -> None:
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _attempt(self, show: Callable[[], None]) -> None:
        # A closed terminal or pipe must not end a run of days.
        if not self._silent:
            try:
                show()
            except (OSError, ValueError):
                self._silent = True


def _start_bar(progress: Progress) -> Any:
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class TwoLines(Bar):
        def get_renderables(self) -> Iterable[RenderableType]:
            # The values get a line of their own: in one line an ordinary terminal would cut them off.
            yield from super().get_renderables()
            if state := progress._state():
                yield Text(f"  {state}", no_wrap=True, overflow="ellipsis")

    bar = TwoLines(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[pace]}", markup=False),
        console=Console(file=progress._stream),
        expand=True,
        auto_refresh=False,  # its thread would be a hazard to forked data workers
        redirect_stdout=False,  # results on stdout stay there
        redirect_stderr=progress._stream is sys.stderr,
    )
    bar.add_task(progress.description, total=progress.total, completed=progress.done, pace=progress._pace())
    bar.start()
    return bar


def _percent(done: int, total: int) -> int:
    """Rounded down, so that 100 means done."""
    return min(100 * done // total, 100) if total > 0 else 100


def _short(value: Any) -> str:
    """Four digits are enough to watch a number.

    >>> _short(3.14159), _short(12345.6), _short(7), _short("warm-up")
    ('3.142', '12,346', '7', 'warm-up')
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, with days where there are any.

    >>> duration(75), duration(200_000)
    ('0:01:15', '2d 7:33:20')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d " * (days > 0) + f"{hour}:{minute:02d}:{second:02d}"
