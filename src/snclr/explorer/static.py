"""`snclr explore --static`: the page as a folder of files that opens without a server.

A page opened from a file may not load ES modules or JSON, so the modules are joined into one script, and the data are
scripts that assign each value to the key of its request.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import wait
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
from snclr.explorer.server import ASSETS, ENDPOINTS, call
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
    if any(folder.iterdir()) and not ((folder / MARKER).is_file() and overwrite):
        advice = "add --overwrite to replace it" if (folder / MARKER).is_file() else "choose a new or empty folder"
        raise UserError(f"{folder} is not empty; {advice}")


def write_static(explorer: Explorer, folder: Path, *, images: int = 1_000, quiet: bool = False) -> ExploreResult:
    """Write the page with the data of all screens. Larger sets are sampled. Uploads and sliders need the server."""
    explorer.sets = {
        name: ImageSet(name, explorer.sets[name].title, sample(explorer.sets[name].dataset, images))
        for name in ("images", "test")
        if name in explorer.sets
    }
    sizes: dict[str, int] = {}

    def write(name: str, content: str | bytes) -> None:
        data = content.encode() if isinstance(content, str) else content
        write_atomic(folder / name, data)
        sizes[name] = len(data)

    write_atomic(folder / MARKER, "written by snclr explore --static\n")
    chunks: dict[str, str] = {}  # the file of each request
    with Progress("static page", total=None, unit="parts", quiet=quiet) as progress:
        read = partial(_read, explorer, progress)
        for chunk, requests in _requests(explorer, read):
            values = {}
            for name, params in requests:
                values[_key(name, params)] = read(name, params)
                progress.update(1)
            chunks |= dict.fromkeys(values, chunk)
            write(f"data/{chunk}.js", f"window.SNCLR_DATA[{json.dumps(chunk)}]={_json(values)};\n")
        for name, each in explorer.sets.items():
            for index in range(len(each.dataset)):
                write(f"images/{name}/{index}.jpg", _encode(explorer, ImageRef(name, index)))
    files = {file.name: file.read_text(encoding="utf-8") for file in ASSETS.iterdir() if file.is_file()}
    write("data/index.js", f"window.SNCLR_FILES={_json(chunks)};window.SNCLR_DATA={{}};\n")
    write("assets/app.js", bundle(files))
    write("assets/style.css", files["style.css"])
    write("index.html", _page(files["index.html"]))
    return ExploreResult(None, str(folder), len(sizes), sum(sizes.values()), len(explorer.images.dataset))


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script: a file name cannot end it."""
    return json.dumps(value, ensure_ascii=True).replace("<", "\\u003c")


Request = tuple[str, dict[str, Any]]
"""Name and parameters of an endpoint."""


def _read(explorer: Explorer, progress: Progress, name: str, params: dict[str, Any]) -> Any:
    """Return the value of a request when its jobs are done; an error is a value too, as the page shows it.

    `progress` names the job that it waits for. Raise StopRequested after a stop signal.
    """
    while True:
        raise_if_stop_requested(explorer.run.session.stop)
        try:
            value = call(_ENDPOINTS[name], explorer, {name: str(given) for name, given in params.items()})
        except Pending as pending:
            progress.update(0, values={"now": pending.job.status()["title"]})
            wait([pending.job.result], 0.5)
            continue
        except (UserError, BadImage) as error:
            return {"error": str(error)}
        if isinstance(value, np.ndarray):
            return {"base64": base64.b64encode(np.ascontiguousarray(value, np.float32).tobytes()).decode()}
        return value


def _key(name: str, params: dict[str, Any]) -> str:
    """Return the key of a request, as assets/api.js builds it."""
    used = sorted((k, v) for k, v in params.items() if v != "")
    unescaped = "!'()*"  # by encodeURIComponent
    return name + "?" + "&".join(f"{k}={quote(str(v), safe=unescaped)}" for k, v in used)


def _state(explorer: Explorer) -> dict[str, Any]:
    """Return what the page needs at first, without the galleries that the folder does not have."""
    state = browse.state(explorer)
    for run in state["runs"]:
        run["galleries"] = [gallery for gallery in run["galleries"] if gallery["name"] == "images"]
    return state


def _encoders(explorer: Explorer) -> list[dict[str, str]]:
    """Return the encoders to compare; of the earlier checkpoints only the last two."""
    known = compare.encoders(explorer)
    steps = [each for each in known if each["name"].startswith("step-")]
    return [*(each for each in known if each not in steps), *steps[-2:]]


_ENDPOINTS = {**ENDPOINTS, "state": _state, "compare/encoders": _encoders}


def _requests(explorer: Explorer, read: Callable[[str, dict[str, Any]], Any]) -> Iterator[tuple[str, list[Request]]]:
    """Yield the chunks: name, and the requests whose values it has."""
    ids, one = range(len(explorer.images.dataset)), {"run": "a"}
    yield "state", [("state", {})]
    yield "browse", list(_pages(explorer))
    for run in explorer.runs.values():
        for space in run.spaces:
            shown = {"run": run.name, "set": "images", "gallery": "images", "space": space, "k": NEIGHBORS}
            for start in range(0, len(ids), _CHUNK):
                chunk = [("neighbors", {**shown, "id": index}) for index in ids[start : start + _CHUNK]]
                yield f"neighbors-{run.name}-{space}-{start // _CHUNK}", chunk
        yield f"map-{run.name}", list(_map(run.name, read("map", {"run": run.name})))
        yield f"run-{run.name}", [("run", {"run": run.name}), ("run/spectrum", {"run": run.name})]
    histories = [("time/history", {**one, "id": index}) for index in ids]
    yield "time", [("time", one), ("time/ids", one), ("time/maps", one), *histories]
    compared: list[Request] = [("compare/encoders", {})]
    for other in [each["name"] for each in _encoders(explorer)[1:]]:
        compared.append(("compare", {"one": "a", "other": other, "limit": 60, "offset": 0}))
        compared += [("compare/pair", {"one": "a", "other": other, "id": index}) for index in ids]
    yield "compare", compared
    views = [("views", {**one, "set": "images", "id": index, "epoch": 0, "count": 6}) for index in ids[:_VIEWS]]
    yield "views", [("views/settings", one), *views]
    yield "curate", [(name, one) for name in ENDPOINTS if name.startswith("curate/")]


def _pages(explorer: Explorer) -> Iterator[Request]:
    """Yield the pages of the image browser: all images and each class, mixed and by name."""
    for label in ["", *(explorer.images.classes or [])]:
        total = browse.page(explorer, label=label)["total"]
        for shuffle in ("1", ""):
            for offset in range(0, max(1, total), browse.PAGE):
                page = {"set": "images", "offset": offset, "limit": browse.PAGE, "label": label, "shuffle": shuffle}
                yield "images", page


def _map(run: str, described: dict[str, Any]) -> Iterator[Request]:
    """Yield the requests of the screen Map."""
    yield "map", {"run": run}
    if "error" in described:
        return
    yield "map/ids", {"run": run}
    for layout in described["layouts"]:
        shown = {"layout": layout, "run": run}
        yield from [("map/points", shown), ("map/fidelity", shown), ("map/values", {"mode": "kept", **shown})]
    modes = [mode["name"] for mode in described["modes"] if mode["name"] != "kept"]
    yield from [("map/values", {"mode": mode, "run": run}) for mode in modes]
    yield from [("map/neighbors", {"row": row, "run": run}) for row in range(described["count"])]


def _encode(explorer: Explorer, ref: ImageRef) -> bytes:
    """Return an image at up to 192 pixels; one that cannot be read is gray."""
    pixels = load_or_none(explorer.load, ref, SIDE)
    return encode_image(np.full((16, 16, 3), 128, np.uint8) if pixels is None else pixels, SIDE, jpeg=True)[0]


_IMPORT = re.compile(r'^import (?:\* as )?(?P<names>\w+|\{[^}]*\}) from "\./(?P<file>[\w.]+)";$', re.M)
_EXPORT = re.compile(r"^export (?P<kind>async function|function|class|const|let) (?P<name>\w+)", re.M)


def bundle(files: dict[str, str]) -> str:
    """Join the ES modules to one script: each becomes a function that returns its exports, called in order of imports.

    The modules use only `import {a, b} from "./x.js"`, `import * as x from "./x.js"` and `export` of a declaration.
    """
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        done[name] = ""  # against cycles
        source = files[name]
        for found in _IMPORT.finditer(source):
            add(found["file"])
        source = _IMPORT.sub(lambda found: f'const {found["names"]} = modules["{found["file"]}"];', source)
        exports = ", ".join(found["name"] for found in _EXPORT.finditer(source))
        source = _EXPORT.sub(r"\g<kind> \g<name>", source)
        done.pop(name)
        done[name] = f'modules["{name}"] = (() => {{\n{source}\nreturn {{ {exports} }};\n}})();\n'

    add("app.js")
    return '"use strict";\nconst modules = {};\n' + "".join(done.values())


def _page(html: str) -> str:
    """Return index.html with classic scripts and a policy of its own."""
    html = html.replace('<script type="module" src="assets/app.js"></script>\n', "")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    html = html.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{policy}')
    scripts = '<script src="data/index.js"></script>\n<script src="assets/app.js"></script>\n'
    assert policy in html
    return html.replace("</body>", f"{scripts}</body>")
