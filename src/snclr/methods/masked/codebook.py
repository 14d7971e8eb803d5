"""A tokenizer of patches that is data and no code: the token of a patch is the number of the nearest code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from snclr.errors import UserError

_HELP = "The documentation page All methods, section CAE, describes the file."


class PatchCodebook(nn.Module):
    """Codes (V, D) and an optional linear projection (p · p · 3, D) of the pixels; D is p · p · 3 without it.

    They are part of the checkpoint, so that a resumed run does not depend on the content of the file.
    """

    codebook: Tensor
    projection: Tensor | None

    def __init__(self, codebook: Tensor, projection: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("codebook", codebook)
        self.register_buffer("projection", projection)

    @torch.no_grad()
    def forward(self, patches: Tensor) -> Tensor:
        """Return the tokens (…) of patches (…, p · p · 3): the nearest code by Euclidean distance, the first of equals.

        >>> PatchCodebook(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))(torch.tensor([[0.2, 0.1], [0.9, 0.8]]))
        tensor([0, 1])
        """
        features = patches if self.projection is None else patches @ self.projection.to(patches.dtype)
        codes = self.codebook.to(features.dtype)
        return (codes.square().sum(dim=1) - 2 * features @ codes.T).argmin(dim=-1)


def read_codebook(path: str, width: int) -> PatchCodebook:
    """Read `codebook` and, if it is there, `projection` from a safetensors file for patches of `width` numbers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the tokenizer {path} cannot be read as safetensors ({error}). {_HELP}") from error
    codebook, projection = tensors.get("codebook"), tensors.get("projection")
    if codebook is None or not tensors.keys() <= {"codebook", "projection"}:
        raise UserError(
            f"the tokenizer {path} has the tensors {', '.join(sorted(tensors)) or 'none'}; it needs codebook and may"
            f" have projection. {_HELP}"
        )
    columns = width if projection is None else projection.shape[-1]
    fits = codebook.ndim == 2 and len(codebook) >= 2 and codebook.shape[1] == columns
    if not fits or (projection is not None and projection.shape != (width, columns)):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise UserError(
            f"the tokenizer {path} has {shapes}, which does not fit patches of {width} numbers: needed are projection"
            f" ({width}, D) and codebook (V, D), or codebook (V, {width}), with V of at least 2."
        )
    found = [tensor for tensor in (codebook, projection) if tensor is not None]
    if not all(tensor.is_floating_point() and bool(tensor.isfinite().all()) for tensor in found):
        raise UserError(f"the tokenizer {path} has values that are not finite numbers. {_HELP}")
    return PatchCodebook(codebook.float(), None if projection is None else projection.float())
