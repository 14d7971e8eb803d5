"""The `snclr` program: find the command, call its API function, print the result or the error, return the exit code."""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.errors import OtherRankError, UserError
from snclr.runtime.early_interrupt import end_quickly, is_snclr_program
from snclr.runtime.progress import StatusLine, print_wrapped
from snclr.runtime.stop import StopRequested, command_signals, rank_exit_code

if TYPE_CHECKING:
    import inspect

    from cyclopts import App

    from snclr.cli.flags import Command

COMMANDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("commands.json").read_bytes())
"""Of each command: its module in `snclr.cli`, its summary, and what to write `instead` of flags that other commands or
tools have. Only the module of the command in use is imported."""
_EXAMPLES = """Examples:
  snclr demo
  snclr pretrain --data my-photos/ --out runs/photos
  snclr neighbors runs/photos

`snclr COMMAND --help` explains each command.
"""
_SPIN_COUNT = "10000"
"""Iterations that an idle OpenMP thread spins, some microseconds. The default of milliseconds slows down other threads
when processes share the cores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 if compared runs or checks failed, 2 for bad input, or 130 or 143 after a stop."""
    argv = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # read when torch is imported
    try:
        with command_signals():
            code = _main(argv)
            end_quickly(code)
            return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return rank_exit_code(130)


def _main(argv: Sequence[str]) -> int:
    """Show a status line at once, since the parser takes a moment, then parse and run."""
    name = command_name(argv)
    quiet = name is None or bool({"--json", "--help", "-h"} & set(argv))
    log = is_snclr_program(sys.orig_argv) and name not in (None, "demo") and COMMANDS[str(name)]["module"] != "lists"
    with StatusLine(f"snclr {name}", quiet=quiet, log=log) as status:
        return _parse_and_run(argv, status)


def _parse_and_run(argv: Sequence[str], status: StatusLine) -> int:
    from cyclopts import CycloptsError

    from snclr.cli.flags import flag_names, normalize_spelling, usage
    from snclr.cli.parse_errors import reason

    argv = normalize_spelling(argv, COMMANDS)
    name = command_name(argv)
    command = load_command(name) if name else None
    try:
        arguments = parse(argv)
    except CycloptsError as error:
        flags = flag_names(command) if command else []
        instead = COMMANDS.get(str(name), {}).get("instead", {})
        print_wrapped(f"snclr{f' {name}' if name else ''}: {reason(error, name, argv, flags, instead)}", sys.stderr)
        print(usage(name, command), file=sys.stderr)
        return 2
    return 0 if command is None or arguments is None else _run(command, str(name), arguments, argv, status)


def command_name(argv: Sequence[str]) -> str | None:
    """Return the name of the command in `argv`, or None."""
    return argv[0] if argv and argv[0] in COMMANDS else None


def parse(argv: Sequence[str]) -> inspect.BoundArguments | None:
    """Bind the arguments that were given, or print help or version and return None. Raise CycloptsError."""
    function, arguments, _ = build_app(argv).parse_args(list(argv), exit_on_error=False, print_error=False)
    if command_name(argv) is None or function.__name__ != "target":  # cyclopts prints help or version
        function(*arguments.args, **arguments.kwargs)
        return None
    return arguments


def build_app(argv: Sequence[str]) -> App:
    """Build the parser: all commands by name, flags only for the one that is called."""
    from cyclopts import App, Parameter

    from snclr import __version__
    from snclr.cli.flags import add_command, usage_line

    app = App(
        name="snclr", version=f"snclr {__version__}", help_format="plaintext", help_epilogue=_EXAMPLES,
        default_parameter=Parameter(negative_iterable=()),
        help="Self-supervised pre-training of image encoders with soft neighbors (SNCLR, ICLR 2023).",
    )  # fmt: skip
    for position, (name, about) in enumerate(COMMANDS.items()):
        if name == command_name(argv):
            command = load_command(name)
            add_command(app, name, command, about["summary"], position)
            app[name].usage = usage_line(name, command)
        else:
            app.command(App(name=name, help=about["summary"], sort_key=position))
    return app


def load_command(name: str) -> Command:
    """Import a command from its module."""
    command: Command = importlib.import_module(f"snclr.cli.{COMMANDS[name]['module']}").COMMANDS[name]
    return command


def _run(
    command: Command, name: str, arguments: inspect.BoundArguments, argv: Sequence[str], status: StatusLine
) -> int:
    """Call the command. Print its result on rank 0, and a UserError on each rank that raises one."""
    from snclr.cli.flags import given_flags, with_flags

    as_json = bool(arguments.arguments.get("json"))
    if command.intro and not as_json:
        print(command.intro, file=sys.stderr)
    try:
        result = command.call(arguments)
        status.end()
        if _is_rank_0() and as_json:
            print(json.dumps(command.to_json(result), ensure_ascii=False))
        elif _is_rank_0():
            command.show(result)
        return rank_exit_code(command.exit_code(result))
    except StopRequested as stop:
        if _is_rank_0():
            _print_stop(stop, command.continue_with(arguments, argv), as_json)
        return rank_exit_code(stop.exit_code)
    except OtherRankError:  # the rank that failed prints the reason
        return 2
    except UserError as error:
        print_wrapped(f"snclr {name}: {with_flags(str(error), given_flags(command, argv))}", sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EACCES, errno.EROFS):
            raise
        if error.filename is None:  # stdout
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # e.g. `snclr encoders | head`
            return 0
        reason = f"cannot read or write {error.filename or 'the output'} ({error.strerror})"
        print(f"snclr {name}: {reason}; check permissions and free space", file=sys.stderr)
        return 2


def _print_stop(stop: StopRequested, continue_with: str, as_json: bool) -> None:
    """Print what stopped the command and how to continue."""
    if as_json:
        record = {"complete": False, "stopped_by": stop.signal.name, "exit_code": stop.exit_code}
        print(json.dumps({**record, "step": stop.step, "total_steps": stop.total_steps}))
    progress = "" if stop.step is None else f" after step {stop.step} of {stop.total_steps}"
    print(f"stopped by {stop.signal.name}{progress}; {continue_with}", file=sys.stderr)


def _is_rank_0() -> bool:
    """Return whether this is rank 0, without importing torch."""
    if "torch" not in sys.modules:
        return True
    from snclr.distributed.collectives import rank_and_size

    return rank_and_size()[0] == 0
