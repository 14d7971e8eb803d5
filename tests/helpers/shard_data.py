"""Small folders and shards for tests."""

import io
import tarfile

import numpy as np
from PIL import Image

BAD = b"\xff\xd8\xff no jpeg"


def jpeg(number, size=(24, 20)):
    """Return a JPEG that is unique to its number."""
    values = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def make_folder(top, count=12, classes=("cat", "dog"), bad=()):
    for number in range(count):
        path = top / classes[number % len(classes)] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(BAD if number in bad else jpeg(number))
    return top


def make_tar(path, entries):
    """Write a WebDataset shard of (member name, bytes) entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def make_shards(folder, shards=3, images=4, labels=True):
    """Write shards 00.tar, 01.tar … without a manifest; image n of shard s is jpeg(100 s + n), its class n % 2."""
    for shard in range(shards):
        entries = []
        for number in range(images):
            if labels:
                entries.append((f"{number:04d}.cls", str(number % 2).encode()))
            entries.append((f"{number:04d}.jpg", jpeg(100 * shard + number)))
        make_tar(folder / f"{shard:02d}.tar", entries)
    return folder
