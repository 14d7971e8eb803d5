"""Trained encoders in the forms other software reads: one format a file.

The package is also the function `snclr.export(run, to=[...])`. The two share a name, and Python puts an imported
package in the place of the function; so the package itself can be called.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, run: str | Path, to: str | Sequence[str], out: str | Path | None = None) -> Any:
        """Write the encoder of a run in other formats; see `snclr.commands.export.export`."""
        from snclr.commands.export import export

        return export(run, to, out)


sys.modules[__name__].__class__ = _CallablePackage
