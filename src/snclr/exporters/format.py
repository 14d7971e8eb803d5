"""The interface of an export format, and the result of an export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snclr.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

    from snclr.models.encoders import EncoderSpec


NAMES = ("torchvision", "timm", "detectron2", "mmdet", "onnx", "safetensors")
"""The formats of `snclr.exporters.export.FORMATS`."""


def check_names(names: Sequence[str]) -> None:
    """Raise UserError for a format that does not exist."""
    for name in names or [""]:
        if name not in NAMES:
            hint = did_you_mean(name, NAMES)
            raise UserError(f"there is no format {name!r}{hint}; choose one or more of {', '.join(NAMES)}")


@dataclass(frozen=True)
class Exported:
    """One exported file or folder. It was loaded again and compared with the encoder of the run."""

    format: str
    path: Path
    difference: float
    """The largest difference of a feature from the encoder's own."""
    snippet: str
    """Code that loads it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "path": str(self.path)}


class ExportError(UserError):
    """Some formats could not be written; `exports` are those that were."""

    def __init__(self, failed: dict[str, str], exports: list[Exported]) -> None:
        self.failed, self.exports = failed, exports
        written = f" Written: {', '.join(item.format for item in exports)}." if exports else " Nothing was written."
        super().__init__(" ".join(failed.values()) + written)


class Format(ABC):
    """An export format. `reload` loads it with the target library, those of detectron2 and mmdet with torchvision."""

    file: str = ""
    """Name of the file to load; "" if the folder is loaded."""
    tolerance: float = 1e-5
    """Largest allowed difference of a feature, relative to max(1, largest feature)."""
    template: str
    """Code that loads it, with fields for `str.format`."""
    takes: Literal["tensor", "array"] | None = "tensor"
    """Input of the loaded encoder; None if the code that loads it also defines the preprocessing."""

    def refusal(self, spec: EncoderSpec) -> str | None:
        """Return why an encoder cannot be written in this format, or None."""
        return None

    @abstractmethod
    def write(self, encoder: nn.Module, spec: EncoderSpec, folder: Path, extra: dict[str, Any]) -> None:
        """Write the encoder into an empty folder.

        `extra` is what the run's config.json states beside the encoder (epoch, method …), for formats that keep it.
        """

    @abstractmethod
    def reload(self, spec: EncoderSpec, folder: Path) -> Callable[[Tensor], Tensor]:
        """Load it; the result maps images (N, 3, S, S) to features (N, D)."""

    def snippet(self, spec: EncoderSpec, folder: Path, **fields: Any) -> str:
        """Return the code that loads it and prepares an image."""
        path = str(folder / self.file)
        code = self.template.format(spec=spec, path=path, local_dir=f"local-dir:{path}", **fields)
        if self.takes is None:
            return code
        from snclr.checkpoint.encoder_file import preprocessing_snippet

        return f"{code}\n{preprocessing_snippet(spec, numpy=self.takes == 'array')}"
