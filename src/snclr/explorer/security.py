"""Who may use the server: this machine's browser with the token of the address, and no page of another site."""

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: only our own files, no inline scripts or styles, no frames."""
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # the token is part of the address
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}


class Guard:
    """Check Host, Origin and token of each request before the application, and add the security headers.

    The token is the first part of the path: unlike a cookie, no other server on 127.0.0.1 receives it. A Host of
    another name means DNS rebinding; a foreign Origin or Sec-Fetch-Site means that another page sent the request.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # no web sockets; the lifespan is off
            return
        problem = self._problem(scope)
        if problem is not None:
            refusal = PlainTextResponse(f"refused: {problem}\n", 403, headers=_HEADERS)
            await refusal(scope, receive, send)
            return
        rest = scope["path"].split("/", 2)
        inner = {**scope, "path": "/" + (rest[2] if len(rest) > 2 else ""), "raw_path": b"", "root_path": ""}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**_HEADERS, "cache-control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(inner, receive, send_with_headers)

    def _problem(self, scope: Scope) -> str | None:
        """Return why a request is refused, or None."""
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[host] for host in self._hosts]:
            return "this server answers only to 127.0.0.1"
        same_origin = self._origins.issuperset(headers.getlist("origin"))
        if not same_origin or not {"same-origin", "none"}.issuperset(headers.getlist("sec-fetch-site")):
            return "requests from other sites are refused"
        given = scope["path"].split("/", 2)[1].encode("utf-8", "surrogateescape") if "/" in scope["path"] else b""
        if not secrets.compare_digest(given, self._token):
            return "the token is missing or wrong; open the address that snclr explore printed"
        return None
