"""The rows of `snclr doctor`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["passed", "failed", "measured", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One check: what was measured, the limit, and what to do if it fails."""

    group: str
    name: str
    outcome: Outcome
    value: str
    """The measured value with its unit; for "not applicable", the reason."""
    limit: str = ""
    """What the value must be; empty for a row that is only measured."""
    advice: str = ""
    """What to do if the check fails."""
    number: float | None = None
    """The measured value as a number."""
    details: tuple[str, ...] = ()
    """More lines, e.g. the tensors that differ; the command line prints them for a failed row only."""


@dataclass(frozen=True)
class DoctorResult:
    """All rows, in the order of the checks."""

    device: str
    rows: tuple[CheckRow, ...]
    group_seconds: dict[str, float]
    """Seconds that each group of checks took."""

    @property
    def seconds(self) -> float:
        """Seconds of all checks."""
        return sum(self.group_seconds.values())

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by outcome."""
        return dict(Counter(row.outcome for row in self.rows))

    @property
    def failed(self) -> list[CheckRow]:
        """The rows that failed."""
        return [row for row in self.rows if row.outcome == "failed"]

    @property
    def exit_code(self) -> int:
        """1 if a check failed, else 0."""
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "seconds": self.seconds, "counts": self.counts, "exit_code": self.exit_code}


def at_most(group: str, name: str, number: float, limit: float, *, advice: str, **more: Any) -> CheckRow:
    """Return a row that passes if `number` is at most `limit`; a number that is not finite fails.

    >>> at_most("kernels", "top-k", 2e-7, 1e-6, advice="").outcome
    'passed'
    """
    value, bound = f"{number:.2g}", f"≤ {limit:.2g}"
    return verdict(group, name, number <= limit, value=value, limit=bound, advice=advice, number=number, **more)


def verdict(group: str, name: str, passed: bool, *, value: str, limit: str, advice: str, **more: Any) -> CheckRow:
    """Return a row that passed or failed."""
    outcome: Outcome = "passed" if passed else "failed"
    return CheckRow(group=group, name=name, outcome=outcome, value=value, limit=limit, advice=advice, **more)


def measured(group: str, name: str, value: str, number: float | None = None, **more: Any) -> CheckRow:
    """Return a row without a limit."""
    return CheckRow(group=group, name=name, outcome="measured", value=value, number=number, **more)


def not_applicable(group: str, name: str, reason: str) -> CheckRow:
    """Return a row of a check that cannot run on this machine or with these flags."""
    return CheckRow(group=group, name=name, outcome="not applicable", value=reason)
