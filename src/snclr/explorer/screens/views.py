"""The screen Views: the augmented views of an image in training, and a preview with other strengths."""

import base64
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F

from snclr.data.transforms.views import MEAN, STD, ViewSettings
from snclr.errors import UserError
from snclr.explorer.explorer import Explorer, ImageRef, encode_image
from snclr.explorer.opened_run import OpenedRun
from snclr.runtime.settings import describe

MAX_EPOCHS = 12
SLIDERS = {name: setting for name, setting in describe(ViewSettings).items() if setting.types == (float,)}
"""Settings of a view with a slider."""


def settings(run: OpenedRun) -> dict[str, Any]:
    """Return the settings of the run's two views, with the range and the meaning of each."""
    first, second = run.view_settings()
    return {
        "views": [asdict(first), asdict(second)],
        "sliders": [
            {"name": name, "limit": 0.5 if name == "hue" else 1.0, "help": one.help} for name, one in SLIDERS.items()
        ],
        "seed": run.seed,
        "epochs": None if run.config is None else run.config.epochs,
        "name": None if run.config is None else run.config.views,
        "crop_min": None if run.config is None else run.config.crop_min,
    }


def views(
    explorer: Explorer, run: OpenedRun, ref: ImageRef, seed: int | None = None, epoch: int = 0, count: int = 6,
    changes: tuple[dict[str, float], dict[str, float]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return both views of an image in `count` epochs from `epoch` on, as data URIs, with their cosines.

    Without `changes` these are exactly the views of training with this seed. By encoder features, the cosine of a view
    is that to the center crop, and the cosine of an epoch that of its two views.
    """
    seed = run.seed if seed is None else seed
    if ref.set == "queries":
        raise UserError("views belong to an image of the dataset: its id is part of their randomness")
    if not (1 <= count <= MAX_EPOCHS and epoch >= 0 and 0 <= seed < 2**32):
        raise UserError(f"seed {seed}, epoch {epoch}, count {count}: allowed are 0 … 2³²−1, 0 …, and 1 … {MAX_EPOCHS}")
    dataset = explorer.sets[ref.set].dataset
    chosen = run.view_settings()
    if changes is not None:  # all of them are numbers
        chosen = (replace(chosen[0], **changes[0]), replace(chosen[1], **changes[1]))  # type: ignore[arg-type]
    batch = [run.center_view(explorer.load(ref, 2 * run.image_size))]
    batch += [
        run.augment(dataset, ref.index, chosen[view], seed=seed, epoch=number, view=view)
        for number in range(epoch, epoch + count)
        for view in (0, 1)
    ]
    features = F.normalize(run.encode("encoder", torch.cat(batch)), dim=1)
    to_image = (features[1:] @ features[0]).tolist()
    pairs = (features[1::2] * features[2::2]).sum(dim=1).tolist()
    images = [_data_uri(view[0]) for view in batch]
    shown = [{"image": image, "cosine": cosine} for image, cosine in zip(images[1:], to_image, strict=True)]
    return {
        "query": explorer.describe(ref),
        "center": images[0],
        "epochs": [
            {"epoch": epoch + n, "views": shown[2 * n : 2 * n + 2], "cosine": cosine} for n, cosine in enumerate(pairs)
        ],
        "mean_pair": sum(pairs) / len(pairs),
        "mean_image": sum(to_image) / len(to_image),
        "exact": changes is None and seed == run.seed and run.config is not None and ref.set == explorer.trained_on,
    }


def parse_changes(values: Mapping[str, str]) -> tuple[dict[str, float], dict[str, float]] | None:
    """Read changed settings from query parameters such as `0.hue=0.2`; None if there are none."""
    changes: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for name, text in values.items():
        view, _, setting = name.partition(".")
        if view in ("0", "1") and setting in SLIDERS:
            changes[int(view)][setting] = SLIDERS[setting].parse(text)
    return changes if any(changes) else None


def _data_uri(view: torch.Tensor) -> str:
    """Undo the normalization of a view (3, S, S) and return the image as a data URI."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    pixels = (view.cpu() * std + mean).clamp(0, 1).mul(255).round().byte().permute(1, 2, 0)
    data, kind = encode_image(pixels.numpy(), 256)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
