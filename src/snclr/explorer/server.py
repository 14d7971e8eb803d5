"""The local web server of `snclr explore`."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import resources
from typing import Any
from urllib.parse import unquote

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from snclr.data.decode import BadImage
from snclr.errors import UserError
from snclr.explorer.explorer import MAX_UPLOAD_BYTES, Explorer, ImageRef
from snclr.explorer.jobs import Pending
from snclr.explorer.opened_run import OpenedRun
from snclr.explorer.screens import browse, compare, curate, map, neighbors, timeline, training, views
from snclr.explorer.security import Guard

TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
SIDES = (48, 96, 192, 384, 1024)
"""Sizes of served images."""
_EVENT_SECONDS = 1.0
Read = Callable[[Mapping[str, str]], Any]
"""Computes the value of an endpoint from the parameters of a request."""


def asset_files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    folder = resources.files("snclr.explorer") / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir() if "." + file.name.rpartition(".")[2] in TYPES}


def build_app(explorer: Explorer, token: str, port: int) -> Guard:
    """Return the application, guarded by token, Host and Origin."""
    files = asset_files()

    def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return Response("not found\n", 404)
        return Response(files[name], media_type=TYPES["." + name.rpartition(".")[2]])

    def image(request: Request) -> Response:
        ref = explorer.ref(request.path_params["set"], request.path_params["id"])
        wanted = _int(request.query_params, "side", 96)
        side = next((side for side in SIDES if side >= wanted), SIDES[-1])
        data, kind = explorer.thumbnail(ref, side)
        caching = "no-store" if ref.set == "queries" else "private, max-age=3600"
        return Response(data, media_type=kind, headers={"cache-control": caching})

    async def upload(request: Request) -> Any:
        data = await _body(request, MAX_UPLOAD_BYTES)
        title = unquote(request.headers.get("x-file-name", ""))[:200] or "dropped image"
        ref = await run_in_threadpool(explorer.add_query, data, title)
        return explorer.describe(ref)

    async def box(request: Request) -> Any:
        body = _json(await _body(request, 10_000))
        try:
            ref = explorer.ref(str(body["set"]), body["id"])
            left, top, right, bottom = (float(value) for value in body["box"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the box cannot be read: {error}") from error
        return explorer.describe(await run_in_threadpool(explorer.add_box, ref, (left, top, right, bottom)))

    async def export(request: Request) -> Response:
        body = _json(await _body(request, MAX_UPLOAD_BYTES))
        text = await run_in_threadpool(curate.export, explorer, body)
        headers = {"content-disposition": 'attachment; filename="snclr-list.txt"'}
        return Response(text, media_type="text/plain; charset=utf-8", headers=headers)

    async def events(request: Request) -> Response:
        run = explorer.opened(request.query_params.get("run", "a"))

        async def stream() -> AsyncIterator[str]:
            known = -1
            while not explorer.jobs.closed and not await request.is_disconnected():
                size = run.dir.metrics.stat().st_size if run.dir.metrics.is_file() else 0
                if size != known:
                    known = size
                    yield f"data: {json.dumps(await run_in_threadpool(training.summary, run))}\n\n"
                else:
                    yield ": alive\n\n"
                await asyncio.sleep(_EVENT_SECONDS)

        return StreamingResponse(stream(), media_type="text/event-stream")

    def reader(read: Read) -> Callable[[Request], Any]:
        return lambda request: read(request.query_params)

    routes = [
        Route("/", asset),
        Route("/assets/{name}", asset),
        Route("/image/{set}/{id}", _endpoint(image)),
        Route("/api/query", _endpoint(upload), methods=["POST"]),
        Route("/api/box", _endpoint(box), methods=["POST"]),
        Route("/api/export", _endpoint(export), methods=["POST"]),
        Route("/api/events", _endpoint(events)),
        *(Route(f"/api/{name}", _endpoint(reader(read))) for name, read in readers(explorer).items()),
    ]
    return Guard(Starlette(routes=routes), token, port)


def readers(explorer: Explorer) -> dict[str, Read]:
    """Return the read-only endpoints by name: JSON values or arrays. The static folder has the same ones."""

    def opened(r: Mapping[str, str]) -> OpenedRun:
        return explorer.opened(r.get("run", "a"))

    def ref(r: Mapping[str, str]) -> ImageRef:
        return explorer.ref(r.get("set", "images"), r.get("id", ""))

    def layout(r: Mapping[str, str]) -> Any:
        return r.get("layout", "pca")

    def pair(r: Mapping[str, str]) -> tuple[str, str]:
        return r.get("one", "a"), r.get("other", compare.default_other(explorer))

    def read_neighbors(r: Mapping[str, str]) -> Any:
        run = opened(r)
        space: Any = r.get("space", run.spaces[0])
        gallery = r.get("gallery", "images")
        return neighbors.neighbors(explorer, run, ref(r), gallery=gallery, space=space, k=_int(r, "k", 24))

    def read_views(r: Mapping[str, str]) -> Any:
        run = opened(r)
        return views.views(
            explorer, run, ref(r), seed=_int(r, "seed", run.seed), epoch=_int(r, "epoch", 0),
            count=_int(r, "count", 6), changes=views.parse_changes(r),
        )  # fmt: skip

    return {
        "state": lambda r: browse.state(explorer),
        "jobs": lambda r: explorer.jobs.running(),
        "images": lambda r: browse.page(
            explorer, r.get("set", "images"), offset=_int(r, "offset", 0), limit=_int(r, "limit", browse.PAGE),
            label=r.get("label", ""), text=r.get("text", ""), shuffle=r.get("shuffle", "") == "1",
        ),
        "neighbors": read_neighbors,
        "map": lambda r: map.describe(explorer, opened(r)),
        "map/ids": lambda r: map.ids(explorer, opened(r)),
        "map/points": lambda r: map.layout(explorer, opened(r), layout(r)).points,
        "map/values": lambda r: map.values(explorer, opened(r), r.get("mode", "class"), layout(r)),
        "map/fidelity": lambda r: map.fidelity(explorer, opened(r), layout(r)),
        "map/neighbors": lambda r: map.true_neighbors(explorer, opened(r), _int(r, "row", -1)),
        "run": lambda r: training.summary(opened(r)),
        "run/spectrum": lambda r: training.spectrum(explorer, opened(r)),
        "time": lambda r: timeline.timeline(explorer, opened(r)),
        "time/ids": lambda r: timeline.ids(explorer, opened(r)),
        "time/maps": lambda r: timeline.maps(explorer, opened(r)),
        "time/history": lambda r: timeline.history(explorer, opened(r), _int(r, "id", -1)),
        "compare/encoders": lambda r: compare.encoders(explorer),
        "compare": lambda r: compare.compare(
            explorer, *pair(r), limit=_int(r, "limit", 60), offset=_int(r, "offset", 0)
        ),
        "compare/pair": lambda r: compare.pair(explorer, *pair(r), _int(r, "id", -1)),
        "views/settings": lambda r: views.settings(opened(r)),
        "views": read_views,
        "curate/duplicates": lambda r: curate.duplicates(explorer, opened(r)),
        "curate/leaks": lambda r: curate.leaking(explorer, opened(r)),
        "curate/outliers": lambda r: curate.outliers(explorer, opened(r)),
        "curate/labels": lambda r: curate.suspects(explorer, opened(r)),
        "curate/diverse": lambda r: curate.diverse(explorer, opened(r)),
    }  # fmt: skip


def _endpoint(function: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Turn results and errors of an endpoint into responses: 202 with the progress while a value is computed."""

    @functools.wraps(function)
    async def endpoint(request: Request) -> Response:
        try:
            if asyncio.iscoroutinefunction(function):
                result = await function(request)
            else:
                result = await run_in_threadpool(function, request)
        except Pending as pending:
            return JSONResponse({"pending": pending.job.status()}, 202)
        except UserError as error:
            return JSONResponse({"error": str(error)}, 400)
        except BadImage as error:
            return JSONResponse({"error": f"the image cannot be read: {error.reason}"}, 422)
        if isinstance(result, Response):
            return result
        if isinstance(result, np.ndarray):
            return Response(np.ascontiguousarray(result, np.float32).tobytes(), media_type="application/octet-stream")
        return JSONResponse(result)

    return endpoint


def _int(params: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(params.get(name, default))
    except ValueError:
        raise UserError(f"{name} is {params[name]!r}; give a whole number") from None


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


def serve(explorer: Explorer, listener: socket.socket, token: str) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    import uvicorn

    app = build_app(explorer, token, listener.getsockname()[1])
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", access_log=False, server_header=False, timeout_graceful_shutdown=1,
        ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    handle_exit = server.handle_exit

    def close_and_exit(*arguments: Any) -> None:
        explorer.close()  # ends event streams, for which uvicorn would wait
        handle_exit(*arguments)

    server.handle_exit = close_and_exit  # type: ignore[assignment,method-assign]
    server.run(sockets=[listener])
