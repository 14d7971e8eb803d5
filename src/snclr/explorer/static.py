"""`snclr explore --static`: the page as a folder of files that opens without a server.

A page opened from a file may not load ES modules or JSON, so the modules are joined into one script, and the data are
scripts that assign each value to the key of its request.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from snclr.data.decode import BadImage, load_or_none
from snclr.data.splits import sample
from snclr.errors import UserError
from snclr.evaluation.state import raise_if_stop_requested
from snclr.explorer.explorer import Explorer, ImageRef, encode_image
from snclr.explorer.jobs import Pending
from snclr.explorer.opened_run import ImageSet
from snclr.explorer.results import ExploreResult
from snclr.explorer.screens import browse, compare
from snclr.explorer.server import Read, asset_files, readers
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
        explorer.sets[name] = ImageSet(name, each.title, sample(each.dataset, images))
    written = _Folder(folder)
    (folder / MARKER).write_text("written by snclr explore --static\n")
    with Progress("static page", total=None, unit="parts", quiet=quiet) as progress:
        read = {name: partial(_finished, explorer, progress, reader) for name, reader in _readers(explorer).items()}
        for chunk, requests in _requests(explorer, read):
            values = {}
            for name, params in requests:
                values[_key(name, params)] = read[name](params)
                progress.update(1)
            written.chunk(chunk, values)
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


def _finished(explorer: Explorer, progress: Progress, read: Read, params: dict[str, Any]) -> Any:
    """Return the value of a request when its jobs are done; an error is a value too, as the page shows it.

    `progress` names the job that it waits for.

    Raise StopRequested after a stop signal.
    """
    while True:
        raise_if_stop_requested(explorer.run.session.stop)
        try:
            value = read({name: str(given) for name, given in params.items()})
        except Pending as pending:
            progress.update(0, values={"now": pending.job.status()["title"]})
            pending.job.finished.wait(0.5)
            time.sleep(0.01)
            continue
        except (UserError, BadImage) as error:
            return {"error": str(error)}
        if isinstance(value, np.ndarray):
            return {"base64": base64.b64encode(np.ascontiguousarray(value, np.float32).tobytes()).decode()}
        return value


Request = tuple[str, dict[str, Any]]
"""Name and parameters of an endpoint."""


def _key(name: str, params: dict[str, Any]) -> str:
    """Return the key of a request, as assets/api.js builds it."""
    used = sorted((k, v) for k, v in params.items() if v != "")
    return name + "?" + "&".join(f"{k}={quote(str(v), safe='')}" for k, v in used)


def _readers(explorer: Explorer) -> dict[str, Read]:
    """Return the endpoints of the server; two of them offer only what the folder has."""
    known = compare.encoders(explorer)
    others = [each for each in known[1:] if not each["name"].startswith("step-")] + known[1:][-3:-1]
    encoders = list({each["name"]: each for each in [known[0], *others]}.values())

    def state(params: Mapping[str, str]) -> dict[str, Any]:
        state = browse.state(explorer)
        for run in state["runs"]:
            run["galleries"] = [gallery for gallery in run["galleries"] if gallery["name"] == "images"]
        return {**state, "static": True}

    return {**readers(explorer), "state": state, "compare/encoders": lambda params: encoders}


def _requests(
    explorer: Explorer, read: Mapping[str, Callable[[dict[str, Any]], Any]]
) -> Iterator[tuple[str, list[Request]]]:
    """Yield the chunks: name, and the requests whose values it has."""
    ids, one = range(len(explorer.images.dataset)), {"run": "a"}
    yield "state", [("state", {})]
    yield "browse", list(_pages(explorer))
    for run in [run for run in (explorer.run, explorer.other) if run is not None]:
        for space in run.spaces:
            shown = {"run": run.name, "set": "images", "gallery": "images", "space": space, "k": NEIGHBORS}
            for start in range(0, len(ids), _CHUNK):
                chunk = [("neighbors", {**shown, "id": index}) for index in ids[start : start + _CHUNK]]
                yield f"neighbors-{run.name}-{space}-{start // _CHUNK}", chunk
        yield f"map-{run.name}", list(_map(run.name, read["map"]({"run": run.name})))
        yield f"run-{run.name}", [("run", {"run": run.name}), ("run/spectrum", {"run": run.name})]
    histories = [("time/history", {**one, "id": index}) for index in ids]
    yield "time", [("time", one), ("time/ids", one), ("time/maps", one), *histories]
    compared: list[Request] = [("compare/encoders", {})]
    for other in [each["name"] for each in read["compare/encoders"]({})[1:]]:
        compared.append(("compare", {"one": "a", "other": other, "limit": 60, "offset": 0}))
        compared += [("compare/pair", {"one": "a", "other": other, "id": index}) for index in ids]
    yield "compare", compared
    views = [("views", {**one, "set": "images", "id": index, "epoch": 0, "count": 6}) for index in ids[:_VIEWS]]
    yield "views", [("views/settings", one), *views]
    yield "curate", [(f"curate/{name}", one) for name in ("duplicates", "leaks", "outliers", "labels", "diverse")]


def _pages(explorer: Explorer) -> Iterator[Request]:
    """Yield the pages of the image browser: all images and each class, mixed and by name."""
    for label in ["", *(explorer.images.classes or [])]:
        total = browse.page(explorer, "images", label=label)["total"]
        for shuffle in ("1", ""):
            for offset in range(0, max(1, total), browse.PAGE):
                page = {"set": "images", "offset": offset, "limit": browse.PAGE, "label": label, "shuffle": shuffle}
                yield "images", page


def _map(run: str, described: dict[str, Any]) -> Iterator[Request]:
    yield "map", {"run": run}
    if "error" in described:
        return
    yield "map/ids", {"run": run}
    for layout in described["layouts"]:
        yield "map/points", {"layout": layout, "run": run}
        yield "map/fidelity", {"layout": layout, "run": run}
        yield "map/values", {"mode": "kept", "layout": layout, "run": run}
    for mode in described["modes"]:
        if mode["name"] != "kept":
            yield "map/values", {"mode": mode["name"], "run": run}
    for row in range(described["count"]):
        yield "map/neighbors", {"row": row, "run": run}


def _write_images(explorer: Explorer, set_name: str, written: _Folder) -> None:
    """Write the images of a set at up to 192 pixels; one that cannot be read is gray."""
    for index in range(len(explorer.sets[set_name].dataset)):
        pixels = load_or_none(explorer.load, ImageRef(set_name, index), SIDE)
        if pixels is None:
            pixels = np.full((16, 16, 3), 128, np.uint8)
        written.write(f"images/{set_name}/{index}.jpg", encode_image(pixels, SIDE, jpeg=True)[0])


_IMPORT = re.compile(r'^import (?:\* as (?P<space>\w+)|\{(?P<names>[^}]*)\}) from "\./(?P<file>[\w.]+)";$', re.M)
_EXPORT = re.compile(r"^export (?P<kind>async function|function|class|const|let) (?P<name>\w+)", re.M)


def bundle(files: dict[str, bytes]) -> str:
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

    add("app.js")
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
