"""Server of the playground: a few fixed files, the choices, and schedules on request."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_vshape.playground.estimate import EXAMPLE, Estimator, parse_estimate
from megatron_vshape.playground.html import offers, static_files
from megatron_vshape.playground.request import FieldError, parse_request
from megatron_vshape.playground.security import MAX_BODY, Guard
from megatron_vshape.playground.worker import Busy, Pool, error_frame

logger = logging.getLogger(__name__)

BODY_S = 10.0
"""Maximum seconds to receive a request."""


class _TooLarge(Exception):
    """The request body exceeds the limit."""


def loopback_hosts(port: int) -> tuple[str, ...]:
    """Return the Host headers of browsers on this machine; they omit port 80."""
    names = ("127.0.0.1", "localhost")
    return tuple(f"{name}:{port}" for name in names) + (names if port == 80 else ())


def make_app(hosts: Collection[str], gpus: Mapping[str, int] = MappingProxyType({})) -> Starlette:
    """Return the application.

    Args:
        hosts: accepted Host headers.
        gpus: memory in bytes of each GPU type that commands can be estimated for.
    """
    page = _Site(gpus)
    routes = [
        Route("/", page.index, methods=["GET"]),
        Route("/static/{name}", page.static, methods=["GET"]),
        Route("/api/offers", page.offers, methods=["GET"]),
        Route("/api/make", page.make, methods=["POST"]),
        Route("/api/estimate", page.estimate, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, hosts=hosts)],
        lifespan=page.lifespan,
        exception_handlers={404: _not_found},
    )
    app.router.redirect_slashes = False
    return app


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    return _refused(404, "there is nothing here")


def _refused(status: int, text: str) -> Response:
    return JSONResponse({"field": "request", "text": text}, status)


class _Site:
    """Request handlers and their shared state."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        self.static_files = static_files()
        self.pool = Pool()
        self.gpus = gpus
        self.estimator = Estimator()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.estimator.close()
            await self.pool.close()

    async def index(self, request: HttpRequest) -> Response:
        return self._file("index.html")

    async def static(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in self.static_files:
            return await _not_found(request, Exception())
        return self._file(name)

    def _file(self, name: str) -> Response:
        content, media_type = self.static_files[name]
        return Response(content, headers={"content-type": media_type})

    async def offers(self, request: HttpRequest) -> Response:
        return JSONResponse({**offers(), "gpus": dict(self.gpus), "example": EXAMPLE})

    async def make(self, request: HttpRequest) -> Response:
        return await _answered(request, lambda data: self.pool.answer(parse_request(data)))

    async def estimate(self, request: HttpRequest) -> Response:
        return await _answered(
            request, lambda data: self.estimator.answer(parse_estimate(data, self.gpus))
        )


async def _answered(
    request: HttpRequest, start: Callable[[object], AsyncIterator[bytes]]
) -> Response:
    """Read a request and stream the frames of its answer, which `start` checks and begins."""
    try:
        frames = start(_decode(await _body(request)))
    except _TooLarge:
        return _refused(413, f"the request is larger than {MAX_BODY // 2**20} MiB")
    except TimeoutError:
        return _refused(408, f"the request had not come within {BODY_S:g} s; send it again")
    except ClientDisconnect:
        logger.debug("a browser went away before its request had come")
        return Response(status_code=400)  # the client is gone
    except FieldError as error:
        return JSONResponse({"field": error.field, "text": str(error)}, 422)
    return StreamingResponse(_stream(frames), media_type="application/octet-stream")


async def _stream(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Forward the frames; if the browser disconnects, end the work."""
    try:
        async with aclosing(frames) as closing:  # type: ignore[type-var]
            async for frame in closing:
                yield frame
    except Busy:
        yield error_frame("request", "the playground is busy; try again in a moment")


async def _body(request: HttpRequest) -> bytes:
    parts, size = [], 0
    async with asyncio.timeout(BODY_S):
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY:
                raise _TooLarge
            parts.append(part)
    return b"".join(parts)


def _decode(body: bytes) -> object:
    try:
        return json.loads(body)
    except RecursionError:
        raise FieldError("request", "the request is nested too deep") from None
    except ValueError:  # not JSON, not UTF-8, or a number with too many digits
        raise FieldError("request", "the request is not valid JSON") from None
