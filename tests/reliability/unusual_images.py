"""Promise 10: unusual images are decoded correctly, and bad images never stop a run or change its result."""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from snclr.data.datasets.base import open_dataset
from snclr.data.decode import BadImage, decode
from snclr.data.loader import ViewLoader
from snclr.data.transforms.views import VIEW_GROUPS
from snclr.errors import UserError
from tests.helpers.state_digest import digest
from tests.reliability.harness import SETTINGS, Sandbox, newest_checkpoint

HEIGHT, WIDTH = 24, 36
COLOR = (200, 120, 40)


def _plain(mode: str = "RGB") -> Image.Image:
    """Return an image that is dark in its left third, so that rotations and reflections are detected."""
    pixels = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
    pixels[:] = COLOR
    pixels[:, : WIDTH // 3] = 20
    return Image.fromarray(pixels).convert(mode)


def _saved(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image or _plain()).save(buffer, kind, **options)
    return buffer.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, *chunks: bytes) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + _chunk(b"IEND", b"")


def _turned(orientation: int, turn: Image.Transpose) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _saved("JPEG", _plain().transpose(turn), quality=95, exif=exif)


def _gray16() -> Image.Image:
    return Image.fromarray(np.asarray(_plain("L")).astype(np.uint16) * 257)


def good() -> dict[str, bytes]:
    """Return unusual but valid files; each decodes to the pixels of `_plain`, or its gray values."""
    other = Image.new("RGB", (WIDTH, HEIGHT), "blue")
    clear = _plain("RGBA")
    clear.putalpha(Image.fromarray(np.full((HEIGHT, WIDTH), 255, dtype=np.uint8)))
    return {
        "animated.gif": _saved("GIF", save_all=True, append_images=[other], duration=10),
        "animated.webp": _saved("WEBP", save_all=True, append_images=[other], lossless=True),
        "bilevel.png": _saved("PNG", _plain("L").point(lambda v: 255 * (v > 60), "1")),
        "bitmap.bmp": _saved("BMP"),
        "cmyk.jpg": _saved("JPEG", _plain("CMYK"), quality=98),
        "deep.png": _saved("PNG", _gray16()),
        "deep.tif": _saved("TIFF", _gray16()),
        "gray-alpha.png": _saved("PNG", _plain("L").convert("LA")),
        "gray.jpg": _saved("JPEG", _plain("L"), quality=98),
        "huge.jpg": _saved("JPEG", _plain().resize((WIDTH * 100, HEIGHT * 100), Image.Resampling.NEAREST), quality=90),
        "mirrored.jpg": _turned(2, Image.Transpose.FLIP_LEFT_RIGHT),
        "palette.png": _saved("PNG", _plain().quantize(8)),
        "progressive.jpg": _saved("JPEG", quality=98, progressive=True),
        "really a png.jpg": _saved("PNG"),
        "really a tiff.png": _saved("TIFF"),
        "tags.jpg": _saved("JPEG", quality=98).replace(b"\xff\xdb", b"\xff\xe1\0\x08Exif\0\0\xff\xdb", 1),
        "transparent.png": _saved("PNG", clear),
        "turned left.jpg": _turned(8, Image.Transpose.ROTATE_270),
        "turned right.jpg": _turned(6, Image.Transpose.ROTATE_90),
        "upside down.jpg": _turned(3, Image.Transpose.ROTATE_180),
    }


def bad() -> dict[str, tuple[bytes, str]]:
    """Return files that are not images or are damaged, each with the pattern of its error."""
    text = _chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"\0" * (PngImagePlugin.MAX_TEXT_CHUNK + 1)))
    pixels = _chunk(b"IDAT", zlib.compress(b"\0abc"))
    floats = Image.fromarray(np.full((4, 4), np.nan, dtype=np.float32))
    return {
        "empty.jpg": (b"", "empty file"),
        "cut.jpg": (_saved("JPEG")[:-80], "damaged"),
        "cut.png": (_saved("PNG")[:-40], "damaged"),
        "cut.bmp": (_saved("BMP")[:-500], "damaged"),
        "cut.tif": (_saved("TIFF")[:-500], "damaged"),
        "cut.webp": (_saved("WEBP", lossless=True)[:-20], "damaged|known format"),
        "header alone.jpg": (_saved("JPEG")[:20], "damaged|known format"),
        "text.jpg": (b"not an image", "known format"),
        "page.png": (b"<html><body>404 Not Found</body></html>", "known format"),
        "drawing.png": (b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>', "known format"),
        "postscript.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "known format"),
        "document.jpg": (b"%PDF-1.4\n%%EOF", "known format"),
        "archive.png": (b"PK\x03\x04" + bytes(60), "known format"),
        "layers.png": (b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 4, 4, 8, 3) + bytes(60), "known format"),
        "no data.png": (_png(4, 4), "damaged"),
        "text bomb.png": (_png(1, 1, text, pixels), "damaged"),
        "late text bomb.png": (_png(1, 1, pixels, text), "damaged"),
        "pixel bomb.png": (_png(10_001, 10_000, pixels), "more than 100000000 pixels"),
        "giant pixel bomb.png": (_png(60_000, 60_000), "too many pixels"),
        "gif bomb.gif": (_saved("GIF")[:6] + b"\xff" * 4 + _saved("GIF")[10:], "too many pixels"),
        "no pixels.ppm": (b"P6 0 0 255\n", "pixels|damaged|known format"),
        "not numbers.tif": (_saved("TIFF", floats), "not finite"),
    }


def write_images(folder: Path, plain: int) -> dict[str, str]:
    """Write `plain` random images, all unusual and bad files; return the bad keys with error patterns."""
    (folder / "unusual").mkdir(parents=True)
    (folder / "plain").mkdir()
    chance = np.random.default_rng(7)
    for i in range(plain):
        Image.fromarray(chance.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(folder / "plain" / f"{i:03d}.png")
    (folder / "unusual" / "one pixel.png").write_bytes(_saved("PNG", Image.new("RGB", (1, 1), COLOR)))
    for name, content in good().items():
        (folder / "unusual" / name).write_bytes(content)
    skipped = {}
    for name, (content, reason) in bad().items():
        (folder / "unusual" / name).write_bytes(content)
        skipped[f"unusual/{name}"] = reason
    if Path("/proc/self/mem").exists():  # root can open this file too, but not read it
        (folder / "unusual" / "unreadable.jpg").symlink_to("/proc/self/mem")
        skipped["unusual/unreadable.jpg"] = "cannot be read"
    return skipped


def decoded(sandbox: Sandbox, seed: int) -> None:
    """Decode every file: a valid one to its pixels, a bad one to an error with the reason."""
    folder = sandbox.new_path("unusual")
    skipped = write_images(folder, plain=0)
    for name in good():
        image = decode(folder / "unusual" / name, min_side=(None, 16)[seed % 2])
        shape, expected = image.shape, np.asarray(_plain())
        assert abs(shape[1] / shape[0] - WIDTH / HEIGHT) < 0.05, (name, shape)
        small = np.asarray(Image.fromarray(image).resize((WIDTH, HEIGHT), Image.Resampling.BOX)).astype(int)
        if name.startswith(("gray", "deep")):
            expected = np.asarray(_plain("L").convert("RGB"))
        if name.startswith("bilevel"):
            expected = np.where(np.asarray(_plain()) > 20, 255, 0)
        inner = np.abs(small - expected)[2:-2, [*range(2, WIDTH // 3 - 8), *range(WIDTH // 3 + 8, WIDTH - 2)]]
        assert inner.max() <= 12, (name, inner.max())
    for key, reason in skipped.items():
        with pytest.raises(BadImage, match=reason):
            decode(folder / key)
    shutil.rmtree(folder)


def loaded(sandbox: Sandbox, seed: int) -> None:
    """The dataloader replaces exactly the bad images, identically from any start, and stops above the allowed share."""
    folder = sandbox.new_path("unusual")
    skipped = write_images(folder, plain=0)
    count = len(open_dataset(folder))
    loader = _loader(folder, seed, 1.0)
    steps = 3 * loader.steps_per_epoch
    ids = [batch.ids.tolist() for batch in loader.batches(0, steps)]
    _check_list({skip.key: skip.reason for skip in loader.skipped}, skipped)
    assert len(loader.skipped) == len(skipped)
    bad_ids = {skip.index for skip in loader.skipped}
    assert not bad_ids & {i for batch in ids for i in batch}
    start = seed % steps
    assert [batch.ids.tolist() for batch in _loader(folder, seed, 1.0).batches(start, steps)] == ids[start:]
    share = len(skipped) / count
    list(_loader(folder, seed, share + 0.01).batches(0, steps))
    with pytest.raises(UserError, match="are bad; a share of at most"):
        list(_loader(folder, seed, share - 0.1).batches(0, steps))
    shutil.rmtree(folder)


def trained(sandbox: Sandbox, seed: int) -> None:
    """Runs with 0 and 2 workers have the same result and list the same bad images."""
    folder = sandbox.new_path("unusual")
    skipped = write_images(folder, plain=-len(good()) % 16 + 64)
    ends = []
    for workers in (0, 2):
        out = sandbox.new_path()
        flags = [f"--{k}={v}" for k, v in {**SETTINGS, "epochs": 3, "seed": seed, "max-bad-share": 0.4}.items()]
        run = sandbox.snclr("pretrain", f"--data={folder}", f"--out={out}", f"--workers={workers}", *flags, out=out)
        run.expect_exit(0)
        listed = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
        found = newest_checkpoint(out)
        assert found is not None
        ends.append((listed, digest(found.tensors, found.step)))
        shutil.rmtree(out)
    assert ends[0] == ends[1]
    reasons = {entry["key"]: entry["reason"] for entry in ends[0][0]}
    assert len(reasons) == len(ends[0][0])
    assert set(reasons) <= set(skipped)
    assert len(reasons) >= len(skipped) - 4  # the last incomplete batch of an epoch is dropped
    _check_list(reasons, {key: skipped[key] for key in reasons})
    shutil.rmtree(folder)


def _loader(folder: Path, seed: int, share: float) -> ViewLoader:
    dataset = open_dataset(folder)
    # One batch is the whole dataset, so that every epoch has every image.
    return ViewLoader(
        dataset, views=VIEW_GROUPS["cifar"], image_size=8, batch_size=len(dataset), seed=seed, max_bad_share=share
    )


def _check_list(reasons: dict[str, str], expected: dict[str, str]) -> None:
    assert reasons.keys() == expected.keys(), reasons.keys() ^ expected.keys()
    for key, pattern in expected.items():
        assert re.search(pattern, reasons[key]), (key, reasons[key])
