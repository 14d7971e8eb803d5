"""A hand-made COCO-format set: red squares (polygons) and blue discs (RLE) on gray noise, a few images of 64 pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from snclr.checkpoint.encoder_file import save_encoder
from snclr.models.encoders import build_encoder, resolve_encoder

CATEGORIES = [{"id": 7, "name": "disc"}, {"id": 3, "name": "square"}]  # ids with gaps, not in order


def square(image: int, number: int, x: int, y: int, side: int) -> dict[str, Any]:
    """Return an annotation with a polygon."""
    points = [x, y, x + side, y, x + side, y + side, x, y + side]
    return {
        "id": number, "image_id": image, "category_id": 3, "bbox": [x, y, side, side], "area": side * side,
        "iscrowd": 0, "segmentation": [points],
    }  # fmt: skip


def disc(image: int, number: int, x: int, y: int, side: int, *, size: tuple[int, int]) -> dict[str, Any]:
    """Return an annotation with a compressed RLE."""
    rows, columns = np.mgrid[: size[1], : size[0]]
    inside = (rows + 0.5 - y - side / 2) ** 2 + (columns + 0.5 - x - side / 2) ** 2 <= (side / 2) ** 2
    rle = coco_mask.encode(np.asfortranarray(inside.astype(np.uint8)))
    return {
        "id": number, "image_id": image, "category_id": 7, "bbox": [x, y, side, side], "area": int(inside.sum()),
        "iscrowd": 0, "segmentation": {"size": [size[1], size[0]], "counts": rle["counts"].decode()},
    }  # fmt: skip


def content(count: int, *, seed: int = 0, size: tuple[int, int] = (72, 64)) -> tuple[dict[str, Any], list[Image.Image]]:
    """Return the content of an annotation file and its images; the last image has no objects."""
    rng = np.random.default_rng(seed)
    images, annotations, pixel_images = [], [], []
    for image in range(1, count + 1):
        pixels = rng.integers(90, 140, (size[1], size[0], 3)).astype(np.uint8)
        for kind in ("square", "disc")[: 0 if image == count else 1 + image % 2]:
            side = int(rng.integers(20, 32))
            x, y = int(rng.integers(0, size[0] - side)), int(rng.integers(0, size[1] - side))
            number = len(annotations) + 1
            made = square(image, number, x, y, side) if kind == "square" else disc(image, number, x, y, side, size=size)
            annotations.append(made)
            part = pixels[y : y + side, x : x + side]
            part[:] = (220, 30, 30) if kind == "square" else (30, 30, 220)
        images.append({"id": image, "file_name": f"{image:03d}.png", "width": size[0], "height": size[1]})
        pixel_images.append(Image.fromarray(pixels))
    return {"images": images, "annotations": annotations, "categories": CATEGORIES}, pixel_images


def write(folder: Path, *, train: int = 6, val: int = 4) -> Path:
    """Write the set in the standard layout of COCO."""
    for part, count, seed in (("train", train, 0), ("val", val, 1)):
        described, pixels = content(count, seed=seed)
        write_part(folder / "annotations" / f"instances_{part}2017.json", folder / f"{part}2017", described, pixels)
    return folder


def write_part(file: Path, folder: Path, described: dict[str, Any], pixels: list[Image.Image]) -> None:
    """Write one annotation file and its images."""
    file.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(described))
    for entry, image in zip(described["images"], pixels, strict=True):
        image.save(folder / entry["file_name"])


def write_run(folder: Path, encoder: str = "resnet10-tiny", *, stem: str = "half", image_size: int = 32) -> Path:
    """Write a run directory with only an encoder of new weights."""
    spec = resolve_encoder(encoder, image_size=image_size, stem=stem)
    torch.manual_seed(11)
    save_encoder(build_encoder(spec), spec, folder)
    return folder
