"""Figures and pages from what a run and its evaluations left.

The package is also the function `snclr.report(run)`. The two share a name, and Python puts an imported package in the
place of the function; so the package itself can be called.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, run: str | Path, **options: Any) -> Any:
        """Write one page about a run; see `snclr.commands.report.report`."""
        from snclr.commands.report import report

        return report(run, **options)


sys.modules[__name__].__class__ = _CallablePackage
