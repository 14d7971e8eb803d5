"""Progress on a terminal and in a log file."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from snclr.runtime.progress import Progress, StatusLine, set_status
from snclr.runtime.stop import StopFlag, StopRequested


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def plain(total: int | None = 1000, **options: object) -> tuple[Progress, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    return Progress("pretrain", total, stream=stream, clock=clock, **options), clock, stream  # type: ignore[arg-type]


def test_a_plain_line_has_everything() -> None:
    progress, clock, stream = plain()
    with progress:
        clock.now += 60
        progress.update(10)
        stream.seek(0)
        stream.truncate()
        clock.now += 40
        progress.update(90, 10.0, 30.0, {"loss": 3.14159, "kNN": 61.2, "pending": None})
    assert stream.getvalue() == (
        "pretrain: 10% · 2.25 images/s · 0:06:40 left · data wait 25% · loss 3.142 · kNN 61.2\n"
    )


def test_the_first_estimate_does_not_include_the_start() -> None:
    progress, clock, stream = plain()
    with progress:
        clock.now += 50  # imports, data workers, the first batch
        progress.update(10, 49.0, 1.0)
        assert progress.seconds_left is None
        assert "left" not in stream.getvalue()
        clock.now += 1
        progress.update(10, 0.0, 1.0)
        assert (progress.rate, progress.seconds_left, progress.wait_share) == (10, 98, 0)


def test_a_short_job_prints_no_lines_in_a_log() -> None:
    for seconds, lines in ((1.2, 0), (2.1, 2)):
        progress, clock, stream = plain(total=30)
        with progress:
            for _ in range(3):
                clock.now += seconds / 2
                progress.update(10)
        assert len(stream.getvalue().splitlines()) == lines


def test_lines_are_printed_at_the_start_at_the_interval_and_at_the_end() -> None:
    progress, clock, stream = plain(interval=10)
    with progress:
        for _ in range(100):
            clock.now += 1
            progress.update(10)
        progress.update(0)
    shown = [int(line.split("%")[0].split()[-1]) for line in stream.getvalue().splitlines()]
    assert shown == [2, 12, 22, 32, 42, 52, 62, 72, 82, 92, 100]


def test_items_done_before_do_not_count_for_the_rate() -> None:
    progress, clock, _ = plain(done=900)
    with progress:
        progress.update(10)
        clock.now += 1
        progress.update(10)
        assert progress.rate == 10
        assert progress.seconds_left == 8
        assert progress.facts().startswith("92% · 10 images/s · 0:00:08 left")
        progress.done += 50  # e.g. read from a cache
        progress.update(10)
        assert progress.rate == 20


def test_rate_and_wait_share_are_those_of_the_last_minute() -> None:
    progress, clock, _ = plain(total=10**6)
    with progress:
        for _ in range(200):
            clock.now += 1
            progress.update(10, 0.9, 0.1)
        assert progress.rate == pytest.approx(10)
        assert progress.wait_share == pytest.approx(0.9)
        for _ in range(100):
            clock.now += 1
            progress.update(40, 0.1, 0.9)
        assert progress.rate == pytest.approx(40)
        assert progress.wait_share == pytest.approx(0.1)


def test_slow_updates_still_have_a_rate() -> None:
    progress, clock, _ = plain()
    with progress:
        for _ in range(20):
            clock.now += 300
            progress.update(3)
        assert progress.rate == pytest.approx(0.01)


def test_unknown_parts_are_omitted() -> None:
    progress, clock, _ = plain(total=None, unit="files")
    assert progress.facts() == "0 files"
    progress.update(3)
    assert progress.facts() == "3 files"
    clock.now += 1
    progress.update(1997, values={"step": 12345})
    assert progress.facts() == "2,000 files · 1,997 files/s · step 12,345"
    assert Progress("nothing", 0).facts() == "100%"


def test_percent_never_rounds_up_to_done() -> None:
    progress, _, _ = plain(total=1000)
    progress.update(999)
    assert progress.facts().startswith("99%")
    progress.update(5)
    assert progress.facts().startswith("100%")


def test_say_and_quiet() -> None:
    progress, _, stream = plain()
    with progress:
        progress.print("a [bold]line[/bold]")
    assert stream.getvalue() == "a [bold]line[/bold]\n"
    progress, _, stream = plain(quiet=True)
    with progress:
        progress.print("x")
        progress.update(1000)
    assert stream.getvalue() == ""


def test_a_closed_terminal_does_not_end_the_job() -> None:
    progress, _, stream = plain()
    stream.close()
    progress.update(10)
    progress.print("x")
    assert progress.done == 10


def test_rich_is_not_imported_for_plain_lines() -> None:
    script = (
        "import sys; from snclr.runtime.progress import Progress\n"
        "with Progress('x', 2, clock=iter([0.0, 5.0]).__next__) as p: p.update(2)\n"
        "assert 'rich' not in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("x: 100%")


ON_TERMINAL = """
import sys
from snclr.runtime.progress import Progress
import time
with Progress("pretrain", 1000, done=500) as progress:
    progress.update(50, 0.5, 1.5)
    time.sleep(0.25)  # longer than a refresh
    progress.update(200, 0.5, 1.5, {"loss": 3.14159})
    progress.print("checkpoint [saved]")
    print("a warning", file=sys.stderr)
    print("the result")
"""


def on_terminal(tmp_path: Path, **environment: str) -> tuple[str, str]:
    """Run with stderr on a terminal of 80 columns and stdout in a file; return the output of both."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "80", **environment}
    with open(tmp_path / "out", "wb") as out:
        child = subprocess.Popen([sys.executable, "-c", ON_TERMINAL], stdout=out, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux raises it when the other end is closed
        pass
    os.close(ours)
    assert child.wait(280) == 0, shown.decode()
    return shown.decode(), (tmp_path / "out").read_text()


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    shown, out = on_terminal(tmp_path)
    assert out == "the result\n"
    assert re.search(r"\x1b\[[0-9;]*3[0-9;]*m", shown)  # colored
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    lines = re.split(r"[\r\n]+", text)
    assert re.search(r"pretrain .*━.* 75% · [\d.,e+]+ images/s · 0:00:0\d left", text)
    assert "  data wait 25% · loss 3.142" in [line.rstrip() for line in lines]
    assert "checkpoint [saved]" in [line.rstrip() for line in lines]
    assert "a warning" in [line.rstrip() for line in lines]
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back


class Terminal(io.StringIO):
    """A terminal in memory."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return the lines that are visible after everything that was written."""
        lines, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\s\S]", self.getvalue()):
            if token == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif token == "\r":
                column = 0
            elif token.endswith("A"):
                row -= int(token[2:-1])
            elif token.endswith("K"):
                lines[row] = "" if token == "\x1b[2K" else lines[row][:column]
            elif not token.startswith("\x1b"):
                lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture(params=[80, 60])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, int]:
    stream = Terminal()
    for name, value in {"COLUMNS": str(request.param), "LINES": "24", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    return stream, request.param


def test_a_bar_is_neither_cut_off_nor_wrapped(terminal: tuple[Terminal, int]) -> None:
    stream, width = terminal
    clock = Clock()
    values = {"epoch": "100/200", "loss": "12.345", "spread": "0.87", "effective rank": "120", "neighbor purity": "23%"}
    with Progress("test features", 60_000, clock=clock, stream=stream) as progress:
        for _ in range(3):
            clock.now += 7
            progress.update(12_345, 1, 3, {**values, "queue kNN": "22%"})
    shown = stream.screen()
    assert all(len(line) <= width and "…" not in line for line in shown), shown
    assert "test features ━" in shown[0]
    parts = [part.strip() for line in shown for part in re.split(r" · |[━╸╺]+", line)]
    wanted = ["61%", "1,764 images/s", "0:00:13 left", "data wait 25%", *(f"{k} {v}" for k, v in values.items())]
    assert set(wanted) <= set(parts), parts
    assert len(shown) == {80: 3, 60: 4}[width]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), StopRequested(signal.SIGINT)])
def test_a_stop_removes_the_bar(terminal: tuple[Terminal, int], stop: BaseException) -> None:
    stream, _ = terminal
    with suppress(KeyboardInterrupt, StopRequested), Progress("pretrain", 100, stream=stream) as progress:
        progress.update(10, 1, 1, {"loss": 3.1})
        assert "━" in "".join(stream.screen())
        progress.print("checkpoint saved")
        raise stop
    assert stream.screen() == ["checkpoint saved"]


def test_long_lines_above_a_bar_are_broken_between_words(terminal: tuple[Terminal, int]) -> None:
    stream, width = terminal
    text = "epoch 1/4: loss 6.902 (mean), spread 0.81, effective rank 26, neighbor purity 22%, queue kNN 19%"
    with Progress("pretrain", 100, stream=stream) as progress:
        progress.print(text)
    shown = stream.screen()[:-1]
    assert " ".join(line.strip() for line in shown) == text
    assert 1 < len(shown) <= 3
    assert all(len(line) <= width for line in shown)


def test_a_slow_rate_is_seconds_per_item() -> None:
    progress, clock, _ = plain(10, unit="steps")
    for _ in range(3):
        clock.now += 26.8
        progress.update(1)
    assert "26.8 s per step" in progress.facts()


def test_a_bar_says_how_long_it_waits_for_an_update(terminal: tuple[Terminal, int]) -> None:
    stream, _ = terminal
    clock = Clock()
    with Progress("measuring", 2, unit="steps", stream=stream, clock=clock) as progress:
        clock.now += 34
        progress._refresh()
        assert stream.screen()[-1] == "  started 34 s ago"
        progress.update(1)
        assert "ago" not in "".join(stream.screen())
        clock.now += 40
        progress._refresh()
        assert stream.screen()[-1] == "  last update 40 s ago"
        progress.update(1)
        clock.now += 40
    assert "ago" not in "".join(stream.screen())


def test_a_log_names_the_job_whose_first_line_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    monkeypatch.setattr("snclr.runtime.progress._LOG_SECONDS", 1.0)
    with StatusLine("snclr plan", log=True):
        set_status("building resnet18")
        with Progress("measuring", 10, unit="steps"):
            time.sleep(1.5)
    assert log.getvalue() == "snclr plan: measuring · 1 s\n"


def test_ctrl_c_is_answered_below_the_bar(terminal: tuple[Terminal, int], monkeypatch: pytest.MonkeyPatch) -> None:
    stream, _ = terminal
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 2)
    monkeypatch.setattr(os, "write", lambda *_: pytest.fail("written into the bar"))
    with StopFlag() as stop, Progress("pretrain", 100, stream=stream) as progress:
        progress.update(10, 1, 1, {"loss": 3.1})
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == signal.SIGINT
        for _ in range(100):
            if "stopping" in stream.screen()[-1]:
                break
            time.sleep(0.05)
        assert stream.screen()[-1] == "  stopping: saving first; press Ctrl-C again to stop at once"


def test_a_status_line_fills_the_silence(terminal: tuple[Terminal, int], monkeypatch: pytest.MonkeyPatch) -> None:
    stream, _ = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with StatusLine("snclr knn"):
        assert stream.screen() == ["snclr knn: starting"]
        set_status("loading runs/demo")
        print("warning: x", file=sys.stderr)
        time.sleep(1.3)
        assert stream.screen() == ["warning: x", "snclr knn: loading runs/demo · 1 s"]
        with Progress("features", 100) as progress:
            progress.update(50)
            before = len(stream.getvalue())
            time.sleep(1.3)
            assert len(stream.getvalue()) > before  # the spinner moves
            assert "snclr knn" not in "".join(stream.screen())
        set_status("classifying")
        assert stream.screen()[-1] == "snclr knn: classifying"
    assert len(stream.screen()) == 2
    assert "features ━" in stream.screen()[1]
    assert sys.stderr is stream


def test_there_is_no_status_line_in_a_log_file_or_on_another_rank(
    terminal: tuple[Terminal, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, _ = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with StatusLine("snclr knn"):
        set_status("loading")
    assert stream.getvalue() == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with StatusLine("snclr knn"):
        set_status("loading")
    assert log.getvalue() == ""


@pytest.mark.parametrize(("seconds", "printed"), [(0.0, ""), (0.6, "snclr knn: starting\n")])
def test_a_log_has_a_first_line_unless_the_command_ends_at_once(
    seconds: float, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    for quiet in (False, True):
        with StatusLine("snclr knn", log=True, quiet=quiet):
            time.sleep(seconds)
    assert log.getvalue() == printed


def test_a_log_has_one_line_per_stage_and_seconds_at_widening_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    monkeypatch.setattr("snclr.runtime.progress._LOG_SECONDS", 1.0)
    with StatusLine("snclr knn", log=True):
        time.sleep(0.8)
        set_status("passed at once")
        set_status("loading")
        time.sleep(3.3)
        print("reading", file=sys.stderr)
        time.sleep(2.2)
        set_status("building the page")
        time.sleep(0.8)
    stages = ["starting", "loading", "loading · 1 s", "loading · 2 s", "building the page"]
    lines = [f"snclr knn: {stage}" for stage in stages]
    assert log.getvalue().splitlines() == [*lines[:4], "reading", lines[4]]


def test_no_color_is_respected(tmp_path: Path) -> None:
    shown, _ = on_terminal(tmp_path, NO_COLOR="1")
    assert "━" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-9;]*m", shown)


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    shown, _ = on_terminal(tmp_path, TERM="dumb")
    assert "\x1b" not in shown
    assert "pretrain: 55%" in shown
