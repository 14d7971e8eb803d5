"""Speed and memory of `snclr explore` on synthetic features: first screen, neighbors of a click, frames of the map.

    python benchmarks/explore.py --images 100000

It writes a folder of hard links to 200 tiny images and a run with an encoder and cached features. Then it starts the
command and measures it with a headless Chromium (pip install playwright).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from snclr.checkpoint.encoder_file import save_encoder
from snclr.data.datasets.base import open_dataset
from snclr.evaluation.features import BLOCK
from snclr.evaluation.state import EncodedBatch, FeatureStore
from snclr.io.hashing import weights_digest
from snclr.models.encoders import build_encoder, resolve_encoder

CLASSES, WIDTH = 20, 512
FLAGS = ["--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]


def write_images(folder: Path, count: int) -> None:
    """Write `count` images in 20 classes: hard links to 200 files."""
    generator = np.random.default_rng(0)
    sources = folder / "class00"
    sources.mkdir(parents=True)
    for number in range(200):
        color = generator.integers(0, 255, 3)
        pixels = np.clip(color + generator.integers(-40, 40, (24, 24, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(sources / f"{number:06d}.png")
    for number in range(200, count):
        target = folder / f"class{number % CLASSES:02d}" / f"{number:06d}.png"
        target.parent.mkdir(exist_ok=True)
        os.link(sources / f"{number % 200:06d}.png", target)


def write_run(run: Path, images: Path) -> None:
    """Write an untrained ResNet-18 and synthetic features of the images into its cache."""
    torch.manual_seed(0)
    spec = resolve_encoder("resnet18", image_size=32)
    save_encoder(build_encoder(spec), spec, run)
    from snclr.checkpoint.encoder_file import load_encoder

    encoder, spec = load_encoder(run)
    dataset = open_dataset(str(images))
    assert dataset.labels is not None
    centers = torch.randn(CLASSES, WIDTH)
    store = FeatureStore(run, "encoder", weights_digest(encoder.state_dict()), dataset, spec.image_size, "cpu")
    for number, start in enumerate(range(0, len(dataset), BLOCK)):
        ids = np.arange(start, min(start + BLOCK, len(dataset)), dtype=np.int64)
        features = centers[dataset.labels[ids]] + 1.5 * torch.randn(len(ids), WIDTH)
        store.write(number, ids, EncodedBatch(ids, features, []), print)


def memory_mb(pid: int) -> float:
    """Return the largest resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(address: str, pid: int) -> dict[str, Any]:
    """Measure the page in a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(600_000)
        start = time.perf_counter()
        page.goto(address)
        page.wait_for_selector(".browse-grid .tile")
        shell = time.perf_counter() - start
        page.locator(".browse-grid .tile").nth(3).click()
        page.wait_for_selector(".neighbor-grid .tile")
        first = time.perf_counter() - start
        clicks, searches = [], []
        for number in range(20):
            url = f"api/neighbors?set=images&gallery=images&space=encoder&k=60&run=a&id={997 * number + 5}"
            begin = time.perf_counter()
            answer = page.evaluate("async url => (await fetch(url)).json()", url)
            clicks.append(1000 * (time.perf_counter() - begin))
            searches.append(answer["milliseconds"])
        page.goto(address + "#/map")
        page.wait_for_selector(".legend .names button")
        page.wait_for_function("() => document.getElementById('screen').scatter.count > 0")
        page.wait_for_timeout(1000)
        frames = page.evaluate(
            """async () => { const s = document.getElementById('screen').scatter; const times = []; let last = null;
              for (let i = 0; i < 240; i++) {
                await new Promise(done => requestAnimationFrame(now => {
                  if (last !== null) times.push(now - last); last = now;
                  s.pan(Math.sin(i / 9) * 12, Math.cos(i / 7) * 8);
                  done(); }));
              } return times; }"""
        )
        browser.close()
    return {
        "page_seconds": round(shell, 2),
        "first_neighbors_seconds": round(first, 2),
        "click_ms_median": round(statistics.median(clicks), 1),
        "click_ms_max": round(max(clicks), 1),
        "search_ms_median": round(statistics.median(searches), 1),
        "frame_ms_median": round(statistics.median(frames), 1),
        "frame_ms_p95": round(sorted(frames)[int(0.95 * len(frames))], 1),
        "frames_per_second": round(1000 / statistics.mean(frames), 1),
        "server_peak_mb": round(memory_mb(pid)),
    }


def main() -> None:
    """Prepare the data, start the command, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="keep the data here and use it again (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        run, images = folder / "run", folder / "images"
        if not run.exists():
            write_images(images, arguments.images)
            write_run(run, images)
        start = time.perf_counter()
        command = [sys.executable, "-u", "-m", "snclr", "explore", str(run), "--data", str(images), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            ready = time.perf_counter() - start
            result = {"images": arguments.images, "features": WIDTH, "start_seconds": round(ready, 2)}
            print(json.dumps({**result, **measure(address, process.pid)}, indent=1))
        finally:
            process.send_signal(2)
            process.wait(30)


if __name__ == "__main__":
    main()
