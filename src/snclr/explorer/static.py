"""`snclr explore --static`: the page as a folder of files that opens without a server.

A page opened from a file may not load ES modules or JSON, so the modules are joined into one script, and the data are
scripts that assign each value to the key of its request.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from snclr.data.decode import BadImage
from snclr.errors import UserError
from snclr.evaluation.state import raise_if_stop_requested
from snclr.explorer.jobs import Pending
from snclr.explorer.opened import Explorer, ImageRef, encode_image
from snclr.explorer.results import ExploreResult
from snclr.explorer.run_data import ImageSet, OpenedRun, sample_ids, subset
from snclr.explorer.screens import browse, compare, curate, map, neighbors, timeline, training, views
from snclr.explorer.server import asset_files
from snclr.io.atomic import write_atomic
from snclr.runtime.progress import Progress

MARKER = ".snclr-explore"
"""Marks a folder that may be replaced."""
POLICY = "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file: data: blob:"
SIDE = 192
NEIGHBORS = 60
"""Neighbors per image, as the page requests them."""
_CHUNK = 100
_VIEWS = 40


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise UserError unless the folder is new, empty, or an earlier static page that may be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder for --static")
    if any(folder.iterdir()) and not ((folder / MARKER).is_file() and overwrite):
        advice = "add --overwrite to replace it" if (folder / MARKER).is_file() else "choose a new or empty folder"
        raise UserError(f"{folder} is not empty; {advice}")


def write_static(explorer: Explorer, folder: Path, *, images: int = 1_000, quiet: bool = False) -> ExploreResult:
    """Write the page with the data of all screens. Larger sets are sampled. Uploads and sliders need the server."""
    if images < 3:
        raise UserError(f"images is {images}; give at least 3")
    for name in [name for name in explorer.sets if name not in ("images", "test")]:
        del explorer.sets[name]
    for name, each in explorer.sets.items():
        kept = sample_ids(len(each.dataset), images)
        explorer.sets[name] = ImageSet(name, each.title, subset(each.dataset, kept))
    written = _Folder(folder)
    (folder / MARKER).write_text("written by snclr explore --static\n")
    with Progress("static page", total=None, unit="parts", quiet=quiet) as progress:
        for name, entries in _values(explorer):
            values = {}
            for key, compute in entries:
                values[key] = _finished(explorer, compute)
                progress.update(1)
            written.chunk(name, values)
        for name in explorer.sets:
            _write_images(explorer, name, written)
    files = asset_files()
    index = f"window.SNCLR_FILES={_json(written.files)};window.SNCLR_DATA={{}};\n"
    written.write("data/index.js", index)
    written.write("assets/app.js", bundle(files))
    written.write("assets/style.css", files["style.css"].decode())
    written.write("index.html", _page(files["index.html"].decode()))
    return ExploreResult(None, str(folder), written.count, written.bytes, len(explorer.images.dataset))


class _Folder:
    """Files of the page, counted; `files` has the chunk of each key."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.bytes = folder, 0, 0
        self.files: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, content: str | bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        write_atomic(path, data)
        self.count += 1
        self.bytes += len(data)

    def chunk(self, name: str, values: dict[str, Any]) -> None:
        """Write values by key as a script that assigns them."""
        self.files.update(dict.fromkeys(values, name))
        self.write(f"data/{name}.js", f"window.SNCLR_DATA[{json.dumps(name)}]={_json(values)};\n")


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script: a file name cannot end it."""
    return json.dumps(value, ensure_ascii=True).replace("<", "\\u003c")


def _finished(explorer: Explorer, compute: Callable[[], Any]) -> Any:
    """Return a value when its background jobs are done; an error is a value too, as the page shows it.

    Raise StopRequested after a stop signal.
    """
    while True:
        raise_if_stop_requested(explorer.run.session.stop)
        try:
            value = compute()
        except Pending as pending:
            pending.job.finished.wait(0.5)
            time.sleep(0.01)
            continue
        except (UserError, BadImage) as error:
            return {"error": str(error)}
        if isinstance(value, np.ndarray):
            return {"base64": base64.b64encode(np.ascontiguousarray(value, np.float32).tobytes()).decode()}
        return value


Entries = list[tuple[str, Callable[[], Any]]]


def _key(name: str, **params: Any) -> str:
    """Return the key of a request, as assets/api.js builds it."""
    from urllib.parse import quote

    used = sorted((k, v) for k, v in params.items() if v is not None and v != "")
    return name + "?" + "&".join(f"{quote(str(k), safe='')}={quote(str(v), safe='')}" for k, v in used)


def _values(explorer: Explorer) -> Iterator[tuple[str, Entries]]:
    """Yield the chunks: name, and the key and computation of each value."""
    ids = range(len(explorer.images.dataset))
    yield "state", [(_key("state"), partial(_state, explorer))]
    yield "browse", list(_browse(explorer))
    for run in [run for run in (explorer.run, explorer.other) if run is not None]:
        for space in run.spaces:
            for start in range(0, len(ids), _CHUNK):
                name = f"neighbors-{run.name}-{space}-{start // _CHUNK}"
                yield name, [_neighbors(explorer, run, space, index) for index in ids[start : start + _CHUNK]]
        yield f"map-{run.name}", list(_map(explorer, run))
        curves = (_key("run", run=run.name), partial(training.summary, run))
        yield (
            f"run-{run.name}",
            [curves, (_key("run/spectrum", run=run.name), partial(training.spectrum, explorer, run))],
        )
    run = explorer.run
    histories = [(_key("time/history", run="a", id=i), partial(timeline.history, explorer, run, i)) for i in ids]
    parts = {"time": timeline.timeline, "time/ids": timeline.ids, "time/maps": timeline.maps}
    yield "time", [*((_key(name, run="a"), partial(part, explorer, run)) for name, part in parts.items()), *histories]
    yield "compare", list(_compare(explorer))
    shown: Entries = [(_key("views/settings", run="a"), partial(views.settings, run))]
    for index in ids[:_VIEWS]:
        key = _key("views", run="a", set="images", id=index, epoch=0, count=6)
        shown.append((key, partial(views.views, explorer, run, ImageRef("images", index), seed=run.seed, epoch=0)))
    yield "views", shown
    finders = {
        "duplicates": curate.duplicates, "leaks": curate.leaking, "outliers": curate.outliers,
        "labels": curate.suspects, "diverse": curate.diverse,
    }  # fmt: skip
    yield "curate", [(_key(f"curate/{name}", run="a"), partial(find, explorer, run)) for name, find in finders.items()]


def _state(explorer: Explorer) -> dict[str, Any]:
    state = browse.state(explorer)
    for run in state["runs"]:
        run["galleries"] = [gallery for gallery in run["galleries"] if gallery["name"] == "images"]
    return {**state, "static": True}


def _browse(explorer: Explorer) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the pages of the image browser: all images and each class, mixed and by name."""
    for label in ["", *(explorer.images.classes or [])]:
        for shuffle in ("1", ""):
            total = browse.page(explorer, "images", label=label)["total"]
            for offset in range(0, max(1, total), browse.PAGE):
                key = _key("images", set="images", offset=offset, limit=browse.PAGE, label=label, shuffle=shuffle)
                yield key, partial(browse.page, explorer, "images", offset=offset, label=label, shuffle=shuffle == "1")


def _neighbors(explorer: Explorer, run: OpenedRun, space: Any, index: int) -> tuple[str, Callable[[], Any]]:
    key = _key("neighbors", run=run.name, set="images", id=index, gallery="images", space=space, k=NEIGHBORS)
    ref = ImageRef("images", index)
    return key, partial(neighbors.neighbors, explorer, run, ref, space=space, k=NEIGHBORS)


def _map(explorer: Explorer, run: OpenedRun) -> Iterator[tuple[str, Callable[[], Any]]]:
    described = _finished(explorer, partial(map.describe, explorer, run))
    yield _key("map", run=run.name), lambda: described
    if "error" in described:
        return
    yield _key("map/ids", run=run.name), partial(map.ids, explorer, run)
    for layout in described["layouts"]:
        yield _key("map/points", layout=layout, run=run.name), partial(_points, explorer, run, layout)
        yield _key("map/fidelity", layout=layout, run=run.name), partial(map.fidelity, explorer, run, layout)
        yield (
            _key("map/values", mode="kept", layout=layout, run=run.name),
            partial(map.values, explorer, run, "kept", layout),
        )
    for mode in described["modes"]:
        if mode["name"] != "kept":
            yield _key("map/values", mode=mode["name"], run=run.name), partial(map.values, explorer, run, mode["name"])
    for row in range(described["count"]):
        yield _key("map/neighbors", row=row, run=run.name), partial(map.true_neighbors, explorer, run, row)


def _points(explorer: Explorer, run: OpenedRun, layout: Any) -> Any:
    return map.layout(explorer, run, layout).points


def _compare(explorer: Explorer) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the comparison of the run with each other encoder."""
    known = compare.encoders(explorer)
    shown = [known[0], *(each for each in known[1:] if not each["name"].startswith("step-")), *known[1:][-3:-1]]
    shown = list({each["name"]: each for each in shown}.values())
    yield _key("compare/encoders"), lambda: shown
    for other in [each["name"] for each in shown[1:]]:
        key = _key("compare", one="a", other=other, limit=60, offset=0)
        yield key, partial(compare.compare, explorer, "a", other)
        for index in range(len(explorer.images.dataset)):
            yield (
                _key("compare/pair", one="a", other=other, id=index),
                partial(compare.pair, explorer, "a", other, index),
            )


def _write_images(explorer: Explorer, set_name: str, written: _Folder) -> None:
    """Write the images of a set at up to 192 pixels; one that cannot be read is gray."""
    for index in range(len(explorer.sets[set_name].dataset)):
        try:
            pixels = explorer.load(ImageRef(set_name, index), SIDE)
        except BadImage:
            pixels = np.full((16, 16, 3), 128, np.uint8)
        written.write(f"images/{set_name}/{index}.jpg", encode_image(pixels, SIDE, jpeg=True)[0])


_IMPORT = re.compile(r'^import (?:\* as (?P<space>\w+)|\{(?P<names>[^}]*)\}) from "\./(?P<file>[\w.]+)";$', re.M)
_EXPORT = re.compile(r"^export (?P<kind>async function|function|class|const|let) (?P<name>\w+)", re.M)


def bundle(files: dict[str, bytes], entry: str = "app.js") -> str:
    """Join the ES modules to one script: each becomes a function that returns its exports, called in order of imports.

    The modules use only `import {a, b} from "./x.js"`, `import * as x from "./x.js"` and `export` of a declaration.
    """
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        done[name] = ""  # against cycles
        source = files[name].decode()
        for found in _IMPORT.finditer(source):
            add(found["file"])
        source = _IMPORT.sub(_constant, source)
        exports = [found["name"] for found in _EXPORT.finditer(source)]
        source = _EXPORT.sub(r"\g<kind> \g<name>", source)
        returned = ", ".join(exports)
        done.pop(name)
        done[name] = f'modules["{name}"] = (() => {{\n{source}\nreturn {{ {returned} }};\n}})();\n'

    add(entry)
    return '"use strict";\nconst modules = {};\n' + "".join(done.values())


def _constant(found: re.Match[str]) -> str:
    target = found["space"] or f"{{{found['names']}}}"
    return f'const {target} = modules["{found["file"]}"];'


def _page(html: str) -> str:
    """Return index.html with classic scripts and a policy of its own."""
    html = html.replace('<script type="module" src="assets/app.js"></script>\n', "")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    html = html.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{policy}')
    scripts = '<script src="data/index.js"></script>\n<script src="assets/app.js"></script>\n'
    assert policy in html
    return html.replace("</body>", f"{scripts}</body>")
