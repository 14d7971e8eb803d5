"""Progress of a long job: a bar on a terminal, plain lines elsewhere, with the same content.

`StatusLine` covers the rest of a command, such as imports: no command is silent for long.
"""

import math
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TextIO, cast

_WINDOW_SECONDS = 60.0
_WINDOW_UPDATES = 8
_REFRESH_SECONDS = 0.2
_STATUS_SECONDS = 1.0
_FIRST_LINE_SECONDS = 0.2
_LOG_SECONDS = 30.0
_BRIEF_SECONDS = 2.0
_IDLE_SECONDS = 5.0
_MIN_BAR_WIDTH = 8


class _Sample(NamedTuple):
    """Totals of all updates at a time."""

    time: float
    items: int = 0
    wait: float = 0.0
    compute: float = 0.0


@dataclass
class Progress:
    """Progress of a job: percentage, rate, time left, share of the time that it waits for data, and given values.

    Rate, time left and wait share are those of the last minute, or of the last few updates if these are slow. The first
    update includes start-up, such as the start of data workers: it does not count once there is a second, and the time
    left is unknown until then. In a log file, a job of less than two seconds prints no lines.

    >>> with Progress("embedding", total=200, stream=sys.stdout) as progress:
    ...     progress.print("reading photos/")
    reading photos/
    """

    description: str
    total: int | None
    """Number of items, None if unknown."""
    _: KW_ONLY
    unit: str = "images"
    """What is counted; "" shows no rate."""
    done: int = 0
    """Finished items, including those of an interrupted run that is resumed."""
    interval: float = _LOG_SECONDS
    """Seconds between plain lines."""
    quiet: bool = False
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    values: dict[str, Any] = field(default_factory=dict, init=False)
    """The latest value of each name, such as the loss."""
    notice: str = field(default="", init=False)
    """A line below the bar."""

    def __post_init__(self) -> None:
        self.description = _prefix + self.description
        self._start = self.clock()
        self._samples = deque([_Sample(self._start)])
        self._updates = 0
        self._last_shown = float("-inf")
        self._on_screen = not self.quiet and self.stream.isatty()  # the stream may be closed later
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if not self.quiet and _is_terminal(self.stream):
            _show_bar_in_status(self)
            self._bar = _start_bar(self)
            _bars.append(self)
        elif not self.quiet and _status is not None:
            _status.expect_lines(self.description)
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        """End the bar. After an error or a stop, remove it from the screen."""
        if self._bar is not None:
            _bars.remove(self)
            _show_bar_in_status(None)
            self._bar.live.transient = error is not None
            self._attempt(self._refresh)
            self._attempt(self._bar.stop)
            self._bar = None

    def update(self, n_items: int, wait: float = 0.0, compute: float = 0.0, values: Mapping[str, Any] = {}) -> None:
        """Count `n_items` more, after `wait` seconds for data and `compute` seconds of computation; show `values`."""
        was_complete = self._percent() == 100
        self.done += n_items
        self.values.update(values)
        now, last = self.clock(), self._samples[-1]
        self._samples.append(_Sample(now, last.items + n_items, last.wait + wait, last.compute + compute))
        self._updates += 1
        if self._updates == 2:
            self._samples.popleft()
        while len(self._samples) > _WINDOW_UPDATES and now - self._samples[0].time > _WINDOW_SECONDS:
            self._samples.popleft()
        pause = self.interval if self._bar is None else _REFRESH_SECONDS
        due = now - self._last_shown >= pause or (self._percent() == 100 and not was_complete)
        is_brief = self._last_shown < 0 and now - self._start < _BRIEF_SECONDS and not self._on_screen
        if due and not is_brief:
            self._last_shown = now
            self._attempt(self._refresh)

    def print(self, text: str) -> None:
        """Print a separate line, above the bar if there is one."""
        self._attempt(lambda: self._print(text))

    @property
    def rate(self) -> float | None:
        """Items per second over the window, or None before the first update."""
        first, last = self._samples[0], self._samples[-1]
        return (last.items - first.items) / (last.time - first.time) if last.time > first.time else None

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at the current rate, or None if unknown."""
        if self.total is None or not self.rate or self._updates < 2:
            return None
        return max(self.total - self.done, 0) / self.rate

    @property
    def wait_share(self) -> float | None:
        """Share of the time spent waiting for data over the window, in [0, 1], or None if no time was reported."""
        first, last = self._samples[0], self._samples[-1]
        wait, compute = last.wait - first.wait, last.compute - first.compute
        return wait / (wait + compute) if wait + compute > 0 else None

    def facts(self) -> str:
        """Return everything in one line: percent, rate, time left, wait share, values. Unknown parts are omitted."""
        return " · ".join([*self._pace(), *self._state()])

    def _percent(self) -> int | None:
        """Return the percentage, rounded down so that 100 means done; None without a total."""
        return None if self.total is None else min(100 * self.done // self.total, 100) if self.total else 100

    def _pace(self) -> Iterable[str]:
        yield f"{self.done:,} {self.unit}" if self.total is None else f"{self._percent()}%"
        if self.unit and self.rate is not None and self._updates > 1:
            is_slow = 0 < self.rate < 1
            yield f"{1 / self.rate:.1f} s per {self.unit[:-1]}" if is_slow else f"{_short(self.rate)} {self.unit}/s"
        if self.seconds_left is not None and self._percent() != 100:
            yield f"{duration(self.seconds_left)} left"

    def _state(self) -> Iterable[str]:
        if self.wait_share is not None and self._updates > 1:
            yield f"data wait {self.wait_share:.0%}"
        yield from (f"{name} {_short(value)}" for name, value in list(self.values.items()) if value is not None)
        if self._bar is not None and self._percent() != 100:
            idle = self.clock() - self._samples[-1].time
            if idle < _IDLE_SECONDS:
                return
            yield f"last update {idle:.0f} s ago" if self._updates else f"started {idle:.0f} s ago"

    def _refresh(self) -> None:
        if self._bar is None:
            self._print(f"{self.description}: {self.facts()}")
        else:
            self._bar.update(0, total=self.total, completed=self.done)
            self._bar.refresh()

    def _print(self, text: str) -> None:
        if self._bar is None:
            print(text, file=self.stream, flush=True)
        else:
            console = self._bar.console
            console.print(wrap_words(text, console.width), markup=False, highlight=False, soft_wrap=True)

    def _attempt(self, show: Callable[[], None]) -> None:
        """Show something; after an error, e.g. of a closed terminal or pipe, show nothing more."""
        if not self.quiet:
            try:
                show()
            except (OSError, ValueError):
                self.quiet = True


_prefix = ""
_bars: list[Progress] = []


@contextmanager
def progress_of(name: str) -> Iterator[None]:
    """Within the block, put a name before the description of each progress.

    >>> with progress_of("raw pixels"):
    ...     Progress("kNN", 100).description
    'raw pixels: kNN'
    """
    global _prefix
    _prefix = f"{name}: "
    try:
        yield
    finally:
        _prefix = ""


def show_notice(text: str) -> bool:
    """Show a line below the current bar, also from a signal handler; return False if there is no bar."""
    if not _bars:
        return False
    progress = _bars[-1]
    progress.notice = text
    # Another thread waits for the lock of the bar, which this one may hold.
    threading.Thread(target=progress._attempt, args=(progress._refresh,), daemon=True).start()
    return True


def _start_bar(progress: Progress) -> Any:
    """Start a rich progress bar, with more lines for what does not fit beside the bar."""
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    console = Console(file=progress.stream)

    class WithValues(Bar):
        def get_renderables(self) -> Iterable[RenderableType]:
            pace, below = list(progress._pace()), list(progress._state())
            beside = len(" · ".join(pace)) + len(progress.description) + _MIN_BAR_WIDTH + 5  # spinner and spaces
            if beside > console.width:
                pace, below = [], pace + below
            for task in self.tasks:
                task.fields["pace"] = " · ".join(pace)
            yield from super().get_renderables()
            lines = _fill_lines(below, console.width - 2) + [progress.notice] * bool(progress.notice)
            yield from (Text(f"  {line}", no_wrap=True) for line in lines)

    columns = (
        SpinnerColumn("line", finished_text=" "), TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None), TextColumn("{task.fields[pace]}", markup=False),
    )  # fmt: skip
    to_stderr = progress.stream is sys.stderr  # results on stdout stay there
    bar = WithValues(
        *columns, console=console, expand=True, redirect_stdout=False, redirect_stderr=to_stderr,
        auto_refresh=False,  # `update` and the status line refresh it
    )  # fmt: skip
    bar.add_task(progress.description, total=progress.total, completed=progress.done, pace="")
    bar.start()
    return bar


def _fill_lines(parts: Iterable[str], width: int) -> list[str]:
    """Join parts to lines of at most `width` characters; no part is split.

    >>> _fill_lines(["loss 3.1", "purity 20%", "rank 5"], 24)
    ['loss 3.1 · purity 20%', 'rank 5']
    """
    text = " · ".join(part.replace(" ", "\xa0") for part in parts)  # lines do not end at a no-break space
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return [line.strip(" ·").replace("\xa0", " ") for line in lines]


def wrap_words(text: str, width: int) -> str:
    """Break lines longer than `width` between words; paths, quoted commands and indented lines are not broken.

    >>> print(wrap_words("2 images cannot be read. Remove them, or run `snclr plan`.", 25))
    2 images cannot be read.
      Remove them, or run
      `snclr plan`.
    """
    lines = []
    for line in text.split("\n"):
        whole = re.sub(r"`[^`]*`|(?<!\w)'[^']*'(?!\w)", lambda quoted: quoted.group().replace(" ", "\xa0"), line)
        parts = textwrap.wrap(
            whole, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
        lines += [part.replace("\xa0", " ") for part in parts] if len(line) > width and line[0] != " " else [line]
    return "\n".join(lines)


def print_wrapped(text: str, stream: TextIO | None = None, *, indent: str = "") -> None:
    """Print a message to stdout or another stream; on a terminal, its lines are broken between words."""
    stream = stream or sys.stdout
    lines = wrap_words(text, shutil.get_terminal_size().columns - len(indent)) if _is_terminal(stream) else text
    print(textwrap.indent(lines, indent), file=stream)


class StatusLine:
    """Within the block, show on a terminal what the command does, and for how long, if nothing else is shown.

    The line is replaced by any other output. While there is a bar, its spinner is kept moving instead. With `log` and
    without a terminal, each text that stays longer than a moment is one line, and without other output one more with
    the seconds after half a minute, a minute, two …
    """

    def __init__(self, name: str, *, quiet: bool = False, log: bool = False) -> None:
        self.name, self._text = name, "starting"
        self._stream = sys.stderr
        wanted = not quiet and is_first_rank()
        self._shown = wanted and _is_terminal(self._stream)
        self._logged = wanted and log and not self._shown
        self._since, self._due = time.monotonic(), _FIRST_LINE_SECONDS
        self._visible = False
        self._progress: Progress | None = None
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="snclr-status")
        self._streams = ExitStack()

    def __enter__(self) -> "StatusLine":
        global _status
        if self._shown or self._logged:
            _status = self
            self._streams.enter_context(redirect_stdout(cast(TextIO, _ClearFirst(self, sys.stdout))))
            self._streams.enter_context(redirect_stderr(cast(TextIO, _ClearFirst(self, sys.stderr))))
            self._show()
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Remove the line for good; may be called before the block ends."""
        global _status
        if _status is not self:
            return
        _status = None
        self._ended.set()
        self._thread.join()
        self.clear()
        self._streams.close()

    def set(self, text: str) -> None:
        """Show another text and count its seconds."""
        with self._lock:
            self._text, self._since, self._due = text, time.monotonic(), _FIRST_LINE_SECONDS
            self._show()

    def expect_lines(self, text: str) -> None:
        """Name the job that prints the next lines of a log, in case the first of them takes long."""
        with self._lock:
            self._text, self._since, self._due = text, time.monotonic(), _LOG_SECONDS

    def show_bar(self, progress: Progress | None) -> None:
        """Hide the line while the bar of `progress` is shown; show it again if it is None."""
        with self._lock:
            self.clear()
            self._progress = progress
            self._text, self._since = "working", time.monotonic()

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        with self._lock:
            self._due = math.inf
            if self._visible:
                self._write("\r\x1b[K")
                self._visible = False

    def _show(self) -> None:
        progress = self._progress
        if self._logged:
            self._log_if_due()
            return
        if progress is not None:  # without the lock: a bar has its own, and writes through `_ClearFirst`
            if (bar := progress._bar) is not None:
                progress._attempt(bar.refresh)
            return
        with self._lock:
            seconds = round(time.monotonic() - self._since)
            text = f"{self.name}: {self._text}"[: shutil.get_terminal_size().columns - 12]
            self._visible = True
            self._write(f"\r\x1b[K{text}" + (f" · {seconds} s" if seconds else ""))

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a closed terminal
            self._ended.set()

    def _repeat(self) -> None:
        while not self._ended.wait(_FIRST_LINE_SECONDS if self._logged else _STATUS_SECONDS):
            self._show()

    def _log_if_due(self) -> None:
        with self._lock:
            seconds = time.monotonic() - self._since
            if seconds >= self._due:
                again = self._due > _FIRST_LINE_SECONDS
                self._write(f"{self.name}: {self._text}" + (f" · {seconds:.0f} s\n" if again else "\n"))
                self._due = max(_LOG_SECONDS, 2 * self._due)


class _ClearFirst:
    """A standard stream that removes the status line before anything is written."""

    def __init__(self, status: StatusLine, stream: TextIO) -> None:
        self._status, self._wrapped = status, stream

    def write(self, text: str) -> int:
        self._status.clear()
        return self._wrapped.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


_status: StatusLine | None = None


def set_status(text: str) -> None:
    """Show what the command does next in its status line, if it has one."""
    if _status is not None:
        _status.set(text)


def set_torch_status() -> None:
    """Show in the status line that torch is loaded next, which takes seconds, unless it is loaded."""
    if "torch" not in sys.modules:
        set_status("loading torch")


def _show_bar_in_status(progress: Progress | None) -> None:
    if _status is not None:
        _status.show_bar(progress)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_first_rank() -> bool:
    """Return whether this is rank 0 by the launcher's environment, before there is a process group."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def _short(value: Any) -> str:
    """Format a number with four digits.

    >>> _short(3.14159), _short(12345.6), _short(7), _short("warm-up")
    ('3.142', '12,346', '7', 'warm-up')
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def duration(seconds: float) -> str:
    """Format seconds.

    >>> duration(75), duration(200_000)
    ('0:01:15', '2 days, 7:33:20')
    """
    return str(timedelta(seconds=round(seconds)))
