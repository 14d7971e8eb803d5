"""Promise 13: hostile names of images, folders and runs have no effect on the report page."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.chromium import find_chromium, open_tab
from tests.helpers.visit import hostile, requests, use
from tests.reliability.harness import SETTINGS, Sandbox

_ADDRESS = "http://127.0.0.1:9"  # nothing listens there, and no request may be sent
_PIECES = "<>\"'`&;:=(){}[]$%#!\\\n\t\x1b\u202e\u2028é猫 "


def hostile_names(sandbox: Sandbox, seed: int) -> None:
    """Train on images in folders with hostile names, in a run directory with one, and open the report in a browser."""
    if find_chromium() is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    generator = random.Random(seed)
    names = hostile(_ADDRESS)
    generator.shuffle(names)
    images = _write(sandbox.new_path(f"data{_one_part(names[0])}"), names, generator)
    out = sandbox.new_path("named") / _one_part(names[1])
    settings: dict[str, Any] = {**SETTINGS, "epochs": 1, "warmup-epochs": 0}
    sandbox.snclr(
        "pretrain", f"--data={images}", f"--out={out}", *(f"--{k}={v}" for k, v in settings.items())
    ).expect_exit(0)
    sandbox.snclr("knn", out).expect_exit(0)  # the page shows results with their data
    sandbox.snclr("report", out).expect_exit(0)
    with tempfile.TemporaryDirectory() as profile, open_tab(Path(profile)) as tab:
        tab.open((out / "report.html").as_uri())
        use(tab)
        assert tab.run("document.querySelector('h1').textContent").strip(), "the page is empty"
        assert tab.run("document.querySelectorAll('.map circle').length") > 20, "the images are not shown"
        assert tab.run("typeof window.canary") == "undefined"
        assert tab.run("document.querySelectorAll('iframe,object,embed,base,video,link[rel=stylesheet]').length") == 0
        assert tab.run("document.querySelectorAll('script').length") == 3
        assert requests(tab) == []
        assert tab.events_of("Runtime.exceptionThrown") == []
        assert tab.events_of("Log.entryAdded") == []


def _write(folder: Path, names: list[str], generator: random.Random) -> Path:
    """Write two images per name in two classes, one with random characters in its name, and a file that is no image."""
    pixels = np.random.default_rng(0)
    for number, name in enumerate(names * 2):
        noise = "".join(generator.choices(_PIECES, k=12)) if number >= len(names) else ""
        # A slash in a name creates folders; the key of the image contains it again.
        path = (
            folder
            / _one_part(names[3 + number % 2])
            / f"{number}{name[: len(name) // 2]}{noise}{name[len(name) // 2 :]}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(path)
    (folder / f"{_one_part(names[2])}.png").write_bytes(b"not an image")
    return folder


def _one_part(name: str) -> str:
    """Return the name without slashes, shortened to a valid file name."""
    return name.replace("/", "\u2215")[:80]
