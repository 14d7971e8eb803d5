"""Print the result of `snclr doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snclr.api.doctor import doctor
from snclr.cli.flags import Command
from snclr.cli.output import print_table
from snclr.errors import count

if TYPE_CHECKING:
    from snclr.diagnostics.results import DoctorResult

_EXAMPLES = """Examples:
  snclr doctor
  snclr doctor --devices 8 --json > doctor.json
  snclr doctor --only kernels,methods,resume
  snclr doctor --recipe vit-small-imagenet --only memory,speed,compile

Compares the kernels and some steps of every method with the CPU in float64, a resumed run with an uninterrupted one,
and several ranks with one; counts the waits of the host; measures memory and speed of a recipe. The exit code is 1 if a
check failed. Groups: machine, kernels, methods, overflow, host waits, resume, ranks, memory, speed, compile.
"""


def show_doctor(result: DoctorResult) -> None:
    """Print one row per check, then what to do about those that failed."""
    print_table(
        ["check", "result", "measured", "limit"],
        [(f"{row.group}: {row.name}", row.outcome, row.value, row.limit) for row in result.rows],
        left=4,
    )
    for row in result.failed:
        print(f"\nFAILED {row.group}: {row.name}: {row.value}\n  {row.advice}")
        for detail in row.details:
            print(f"    {detail}")
    summary = ", ".join(f"{number} {outcome}" for outcome, number in result.counts.items())
    print(f"\n{result.device}: {count(len(result.rows), 'check')} in {result.seconds:.0f} s: {summary}")
    print("seconds: " + ", ".join(f"{group} {seconds:.0f}" for group, seconds in result.group_seconds.items()))


COMMANDS = {"doctor": Command(function=doctor, show=show_doctor, examples=_EXAMPLES)}
