"""The local web server of `snclr explore`."""

import asyncio
import inspect
import json
import signal
import threading
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from snclr.data.decode import BadImage
from snclr.errors import UserError
from snclr.evaluation.state import raise_if_stop_requested
from snclr.explorer.explorer import MAX_UPLOAD_BYTES, Explorer
from snclr.explorer.jobs import Pending
from snclr.explorer.screens import browse, compare, curate, map, neighbors, timeline, training, views
from snclr.explorer.security import Guard

ASSETS = Path(__file__).with_name("assets")
"""The files of the page."""
SIDES = (48, 96, 192, 384, 1024)
"""Sizes of served images."""
_EVENT_SECONDS = 1.0
ENDPOINTS: dict[str, Callable[..., Any]] = {
    "state": browse.state,
    "images": browse.page,
    "neighbors": neighbors.neighbors,
    "map": map.describe,
    "map/ids": map.ids,
    "map/points": map.points,
    "map/values": map.values,
    "map/fidelity": map.fidelity,
    "map/neighbors": map.true_neighbors,
    "run": training.summary,
    "run/spectrum": training.spectrum,
    "time": timeline.timeline,
    "time/ids": timeline.ids,
    "time/maps": timeline.maps,
    "time/history": timeline.history,
    "compare/encoders": compare.encoders,
    "compare": compare.compare,
    "compare/pair": compare.pair,
    "views/settings": views.settings,
    "views": views.views,
    "curate/duplicates": curate.duplicates,
    "curate/leaks": curate.leaking,
    "curate/outliers": curate.outliers,
    "curate/labels": curate.suspects,
    "curate/diverse": curate.diverse,
}
"""The read-only endpoints: functions that return JSON values or an array. The static folder has the same ones."""


def build_app(explorer: Explorer, token: str, port: int) -> Guard:
    """Return the application, guarded by token, Host and Origin."""
    routes = [
        Route("/", _asset),
        Route("/assets/{name}", _asset),
        Route("/image/{set}/{id}", partial(_image, explorer)),
        Route("/api/query", partial(_upload, explorer), methods=["POST"]),
        Route("/api/box", partial(_box, explorer), methods=["POST"]),
        Route("/api/export", partial(_export, explorer), methods=["POST"]),
        Route("/api/events", partial(_events, explorer)),
        *(Route(f"/api/{name}", partial(_value, explorer, function)) for name, function in ENDPOINTS.items()),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((Pending, UserError, BadImage), _failure)
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token, port)


def _asset(request: Request) -> Response:
    """Return a file of the page."""
    name = request.path_params.get("name", "index.html")
    is_known = name in {file.name for file in ASSETS.iterdir()}
    return FileResponse(ASSETS / name) if is_known else Response("not found\n", 404)


def _image(explorer: Explorer, request: Request) -> Response:
    """Return an image in the smallest of the sizes that is not below the requested one."""
    ref = explorer.ref(request.path_params["set"], request.path_params["id"])
    wanted = _whole_number("side", request.query_params.get("side", "96"))
    side = next((side for side in SIDES if side >= wanted), SIDES[-1])
    data, kind = explorer.thumbnail(ref, side)
    caching = "no-store" if ref.set == "queries" else "private, max-age=3600"
    return Response(data, media_type=kind, headers={"cache-control": caching})


async def _upload(explorer: Explorer, request: Request) -> Response:
    """Keep an uploaded image as a query."""
    data = await _body(request, MAX_UPLOAD_BYTES)
    title = unquote(request.headers.get("x-file-name", ""))[:200] or "dropped image"
    ref = await run_in_threadpool(explorer.add_query, data, title)
    return JSONResponse(explorer.describe(ref))


async def _box(explorer: Explorer, request: Request) -> Response:
    """Keep a box of an image as a query."""
    body = _json(await _body(request, 10_000))
    try:
        ref = explorer.ref(str(body["set"]), body["id"])
        left, top, right, bottom = (float(value) for value in body["box"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the box cannot be read: {error}") from error
    ref = await run_in_threadpool(explorer.add_box, ref, (left, top, right, bottom))
    return JSONResponse(explorer.describe(ref))


async def _export(explorer: Explorer, request: Request) -> Response:
    """Return the list file of a curation."""
    body = _json(await _body(request, MAX_UPLOAD_BYTES))
    text = await run_in_threadpool(curate.export, explorer, body)
    headers = {"content-disposition": 'attachment; filename="snclr-list.txt"'}
    return Response(text, media_type="text/plain; charset=utf-8", headers=headers)


async def _events(explorer: Explorer, request: Request) -> Response:
    """Send the data of the screen Run whenever a line is added to its metrics."""
    run = explorer.run_named(request.query_params.get("run", "a"))

    async def stream() -> AsyncIterator[str]:
        known = -1
        while not explorer.jobs.closed and not await request.is_disconnected():
            size = run.dir.metrics.stat().st_size if run.dir.metrics.is_file() else 0
            if size != known:
                known = size
                yield f"data: {json.dumps(await run_in_threadpool(training.summary, explorer, run))}\n\n"
            else:
                yield ": alive\n\n"
            await asyncio.sleep(_EVENT_SECONDS)

    return StreamingResponse(stream(), media_type="text/event-stream")


def _value(explorer: Explorer, function: Callable[..., Any], request: Request) -> Response:
    """Return the value of a read-only endpoint: an array as its bytes, others as JSON."""
    value = call(function, explorer, request.query_params)
    if isinstance(value, np.ndarray):
        return Response(np.ascontiguousarray(value, np.float32).tobytes(), media_type="application/octet-stream")
    return JSONResponse(value)


def call(function: Callable[..., Any], explorer: Explorer, given: Mapping[str, str]) -> Any:
    """Call the function of an endpoint with the parameters of a request that have the names of its own."""
    objects: dict[str, Callable[[], Any]] = {
        "explorer": lambda: explorer,
        "run": lambda: explorer.run_named(given.get("run", "a")),
        "ref": lambda: explorer.ref(given.get("set", "images"), given.get("id", "")),
        "changes": lambda: views.parse_changes(given),
    }
    arguments, hints = {}, typing.get_type_hints(function)
    for name in inspect.signature(function).parameters:
        if name in objects:
            arguments[name] = objects[name]()
        elif name in given:
            is_number = int in (hints[name], *typing.get_args(hints[name]))
            arguments[name] = _whole_number(name, given[name]) if is_number else given[name]
    return function(**arguments)


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} is {text!r}; give a whole number") from None


def _failure(request: Request, error: Any) -> Response:
    """Answer an error; 202 with the progress while a value is computed."""
    if isinstance(error, Pending):
        return JSONResponse({"pending": error.job.status()}, 202)
    if isinstance(error, BadImage):
        return JSONResponse({"error": f"the image cannot be read: {error}"}, 422)
    return JSONResponse({"error": str(error)}, 400)


async def _body(request: Request, limit: int) -> bytes:
    """Read a request body of at most `limit` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise UserError(f"the upload is larger than {limit // 2**20 or 1} MB; give a smaller image")
        parts.append(part)
    return b"".join(parts)


def _json(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError("the request is not JSON") from error
    if not isinstance(body, dict):
        raise UserError("the request is not a JSON object")
    return body


def make_server(explorer: Explorer, port: int, token: str) -> uvicorn.Server:
    """Return a server that Ctrl-C and SIGTERM end, also if they arrive before it runs."""
    config = uvicorn.Config(
        build_app(explorer, token, port), log_level="warning", lifespan="off", access_log=False, server_header=False,
        timeout_graceful_shutdown=1, ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    handle_exit = server.handle_exit

    def close_and_exit(*arguments: Any) -> None:
        explorer.jobs.close()  # ends event streams, for which uvicorn would wait
        handle_exit(*arguments)

    server.handle_exit = close_and_exit  # type: ignore[assignment,method-assign]
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # before uvicorn does, and when it raises them again at its end
            signal.signal(number, close_and_exit)
    raise_if_stop_requested(explorer.run.session.stop)
    return server
