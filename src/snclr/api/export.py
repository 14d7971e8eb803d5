"""`snclr.export`: write the encoder of a run in the formats of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from snclr.api.early_checks import check_run_and_data
from snclr.exporters.format import Exported, check_names


def export(run: str | Path, to: str | Sequence[str], out: str | Path | None = None) -> list[Exported]:
    """Export the encoder of a run. Each export is loaded by its library and compared before it is kept.

    If some formats cannot be written, the others are, and ExportError says which failed and why.

    Args:
        run: Run directory, the --out of snclr pretrain.
        to: One or more of torchvision, timm, detectron2, mmdet, onnx and safetensors, separated by commas.
        out: Folder to write to, with one sub-folder per format (default: RUN/export).
    """
    check_run_and_data(run)
    names = [name.strip() for name in (to.split(",") if isinstance(to, str) else to)]
    unique = list(dict.fromkeys(name for name in names if name))
    check_names(unique)
    from snclr.exporters.export import export_run

    return export_run(Path(run), unique, None if out is None else Path(out))
