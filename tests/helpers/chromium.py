"""A headless Chromium, driven by the DevTools protocol over two pipes; it needs no library and no open port."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_TIMEOUT_SECONDS = 120.0
# Chromium reads from file descriptor 3 and writes to 4; our pipes are moved there before it starts.
_START = """
import fcntl, os, sys
a, b = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """Return the path of the program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One tab; `events` are the events received so far."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out = into, out
        self._buffer = b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        id_ = next(self._ids)
        message = {"id": id_, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            response = self._read()
            if response.get("id") == id_:
                assert "error" not in response, response
                return dict(response["result"])
            self.events.append(response)

    def open(self, url: str, *, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def run(self, expression: str) -> Any:
        """Evaluate a JavaScript expression and return its JSON value."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def point_at(self, x: float, y: float, *, click: bool = False) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, x: float, y: float) -> None:
        """Touch with one finger, without moving it."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def events_of(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not respond"
            part = os.read(self._out, 1 << 20)
            assert part, "the browser has exited"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))


@contextlib.contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """Start the browser with an empty profile; it exits at the end of the block."""
    program = find_chromium()
    assert program is not None
    child_in, parent_in = os.pipe()
    parent_out, child_out = os.pipe()
    pipes, devnull = (child_in, child_out), subprocess.DEVNULL
    command = [sys.executable, "-c", _START, *map(str, pipes), program, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, pass_fds=pipes, stdin=devnull, stdout=devnull, stderr=devnull)
    os.close(child_in)
    os.close(child_out)
    try:
        yield Tab(parent_in, parent_out)
    finally:
        os.close(parent_in)  # Chromium exits when its pipe closes
        os.close(parent_out)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
