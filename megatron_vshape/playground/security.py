"""Rejection of foreign requests before any handler, and security headers of all responses.

The server listens on this machine only, but any web page in the same browser can send it requests.
So the Host must be one of ours, which protects against DNS rebinding. A request that a browser
sends for another page is rejected by its Origin or Sec-Fetch-Site.
"""

from collections.abc import Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}

MAX_BODY = 40 * 2**20
_READS = ("GET", "HEAD")


class Guard:
    """Reject hosts other than the server's, foreign pages, other methods and large bodies."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app = app
        self.hosts = {host.lower() for host in hosts}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            status, text = refusal
            answer = JSONResponse({"field": "request", "text": text}, status)
            await answer(scope, receive, send_guarded)
            return
        await self.app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if headers.getlist("host") != [host] or host.lower() not in self.hosts:
            return 421, "this server accepts only its configured address"
        method = scope["method"]
        if method not in (*_READS, "POST"):
            return 405, "this server knows GET, HEAD and POST"
        if scope["path"].endswith("\n"):
            return 404, "there is no such path"  # a route's pattern would accept it
        return self._foreign(headers, scope) or _body_refusal(headers, method)

    def _foreign(self, headers: Headers, scope: Scope) -> tuple[int, str] | None:
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self.origins:
            return 403, "this request comes from another page"
        site = headers.get("sec-fetch-site")
        if site in (None, "same-origin", "none"):
            return None
        followed = headers.get("sec-fetch-mode") == "navigate" and scope["method"] in _READS
        if followed and headers.get("sec-fetch-dest") == "document" and scope["path"] == "/":
            return None  # a link to the playground, such as in a message
        return 403, "this request comes from another page"


def _body_refusal(headers: Headers, method: str) -> tuple[int, str] | None:
    length = headers.get("content-length")
    if length is not None and (not (length.isascii() and length.isdigit()) or len(length) > 15):
        return 400, "content-length is no number"
    if length is not None and int(length) > MAX_BODY:
        return 413, f"the request is larger than {MAX_BODY // 2**20} MiB"
    if method == "POST" and headers.get("content-type", "").partition(";")[0] != "application/json":
        return 415, "a request must be application/json"
    return None
