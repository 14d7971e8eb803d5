"""Who may use the server: this machine's browser with the token of the address, and no page of another site."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: only our own files, no inline scripts or styles, no frames."""
_HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",  # the token is part of the address
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"x-frame-options": b"DENY",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def new_token() -> str:
    """Return a random token of 192 bits."""
    return secrets.token_urlsafe(24)


class Guard:
    """Check Host, Origin and token of each request before the application, and add the security headers.

    The token is the first part of the path: unlike a cookie, no other server on 127.0.0.1 receives it. A Host of
    another name means DNS rebinding; a foreign Origin or Sec-Fetch-Site means that another page sent the request.
    """

    def __init__(self, app: App, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"127.0.0.1:{port}".encode(), f"localhost:{port}".encode()}
        self._origins = {b"http://" + host for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # no web sockets; the lifespan is off
            return
        problem = self._problem(scope)
        if problem is not None:
            await _refuse(send, problem)
            return
        rest = scope["path"].split("/", 2)
        inner = {**scope, "path": "/" + (rest[2] if len(rest) > 2 else ""), "raw_path": b"", "root_path": ""}

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", [])}
                extra = [(name, value) for name, value in _HEADERS.items() if name not in names]
                if b"cache-control" not in names:
                    extra.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self._app(inner, receive, send_with_headers)

    def _problem(self, scope: Scope) -> str | None:
        """Return why a request is refused, or None."""
        headers = scope["headers"]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return "this server answers only to 127.0.0.1"
        origins = [value for name, value in headers if name == b"origin"]
        if any(origin not in self._origins for origin in origins):
            return "requests from other sites are refused"
        site = [value for name, value in headers if name == b"sec-fetch-site"]
        if any(value not in (b"same-origin", b"none") for value in site):
            return "requests from other sites are refused"
        given = scope["path"].split("/", 2)[1].encode("utf-8", "surrogateescape") if "/" in scope["path"] else b""
        if not secrets.compare_digest(given, self._token):
            return "the token is missing or wrong; open the address that snclr explore printed"
        return None


async def _refuse(send: Send, reason: str) -> None:
    body = f"refused: {reason}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": [*headers, *_HEADERS.items()]})
    await send({"type": "http.response.body", "body": body})
