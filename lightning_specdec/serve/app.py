"""The HTTP layer: routes, keys, limits, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_specdec.serve.answers import Choice, Json, Usage
from lightning_specdec.serve.engine import (
    GRAMMAR_FAILED,
    NOT_FINITE,
    SHUTTING_DOWN,
    QueueFullError,
    ShuttingDownError,
    Update,
)
from lightning_specdec.serve.metrics import Metrics
from lightning_specdec.serve.protocol import (
    ApiError,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
)
from lightning_specdec.serve.service import Job, Service
from lightning_specdec.serve.settings import LOOPBACK_HOSTS, ServeSettings

log = logging.getLogger(__name__)

PAGE = "page.html"
OPEN_PATHS = ("/health",)
"""Paths that need no key."""
CLIENT_CLOSED = 499
"""Status of a response that nobody waits for any more."""
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
"""What the page may load: itself, and answers of this server."""


class Inbox:
    """The updates of a job's generations, carried from the engine's thread to the event loop."""

    def __init__(self, num_generations: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Update] | None] = asyncio.Queue()
        self._num_open = num_generations

    def listener(self, number: int) -> Callable[[Update], None]:
        """What the engine calls with the updates of a generation."""

        def listen(update: Update) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, update))

        return listen

    def close(self) -> None:
        """End `updates`: nobody reads them any more."""
        self._queue.put_nowait(None)

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Updates with the numbers of their generations, until all of these have ended.

        Raises:
            ClientDisconnect: `close` was called.
        """
        while self._num_open:
            item = await self._queue.get()
            if item is None:
                raise ClientDisconnect
            if item[1].is_last:
                self._num_open -= 1
            yield item


class Api:
    """The routes.

    Args:
        service: turns requests into jobs.
        metrics: counters.
        settings: limits.
    """

    def __init__(self, service: Service, metrics: Metrics, settings: ServeSettings) -> None:
        self.service = service
        self.engine = service.engine
        self.metrics = metrics
        self.max_body_bytes = settings.max_body_megabytes * 2**20
        self.created = int(time.time())
        self.page = resources.files(__package__).joinpath(PAGE).read_text()

    def routes(self) -> list[Route]:
        """All routes of the server."""
        return [
            Route("/", self.show_page),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def show_page(self, request: Request) -> Response:
        """The chat in the browser."""
        return HTMLResponse(self.page, headers={"content-security-policy": PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        """Whether requests are accepted."""
        if self.engine.is_running:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "shutting down"}, status_code=503)

    async def show_metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def models(self, request: Request) -> Response:
        """The list of models, which has one."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model, by its name."""
        name = request.path_params["model"]
        if name != self.service.model_name:
            raise ApiError(
                f"there is no model {name!r}", status=404, param="model", code="model_not_found"
            )
        return JSONResponse(self._model())

    def _model(self) -> Json:
        return {
            "id": self.service.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "lightning_specdec",
            "max_model_len": self.engine.max_length,
        }

    async def chat(self, request: Request) -> Response:
        """The next turn of a chat."""
        return await self._answer(request, ChatRequest, self.service.chat)

    async def completions(self, request: Request) -> Response:
        """The continuation of texts."""
        return await self._answer(request, CompletionRequest, self.service.completion)

    async def _answer(
        self,
        request: Request,
        kind: type[CommonRequest],
        make_job: Callable[[Any], Job],
    ) -> Response:
        """Read a request, submit its generations, and answer at once or as a stream."""
        body = await self._read_json(request)
        job = await run_in_threadpool(lambda: make_job(kind.read(body)))
        inbox = Inbox(len(job.generations))
        for number, generation in enumerate(job.generations):
            generation.listener = inbox.listener(number)
        try:
            self.engine.submit(job.generations)
        except QueueFullError as error:
            raise ApiError(
                f"the server is busy: {error}", status=429, code="queue_full", kind="rate_limit"
            ) from None
        except ShuttingDownError:
            raise _unavailable() from None

        watcher = asyncio.create_task(self._watch(request.receive, job, inbox))
        if job.request.stream:
            events = self._finally_cancel(job, watcher, self._events(job, inbox))
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        try:
            return JSONResponse(await self._whole(job, inbox))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        finally:
            watcher.cancel()
            self._cancel(job)

    async def _watch(self, receive: Receive, job: Job, inbox: Inbox) -> None:
        """Cancel a job once its client has gone, even if its answer has not begun."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self._cancel(job)
                inbox.close()
                return

    def _cancel(self, job: Job) -> None:
        """Cancel what has not ended."""
        for generation in job.generations:
            self.engine.cancel(generation)

    async def _finally_cancel(
        self,
        job: Job,
        watcher: asyncio.Task[None],
        events: AsyncIterator[bytes],
    ) -> AsyncIterator[bytes]:
        """The events of a stream. Whatever ends it, its generations are cancelled."""
        try:
            async for event in events:
                yield event
        except ClientDisconnect:
            return
        finally:
            watcher.cancel()
            self._cancel(job)

    async def _read_json(self, request: Request) -> object:
        """The body of a request.

        Raises:
            ApiError: it is too large, or no JSON.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            # A page of another site could send other types without asking the browser.
            raise ApiError("send the header content-type: application/json", status=415)

        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body_bytes:
                raise ApiError(
                    f"the body exceeds the limit of {self.max_body_bytes} bytes", status=413
                )
        try:
            return json.loads(bytes(body), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise ApiError("the body is not valid JSON") from None

    async def _whole(self, job: Job, inbox: Inbox) -> Json:
        """The answer that is not streamed."""
        choices = self._choices(job)
        async for number, update in inbox.updates():
            _raise_if_failed(update)
            choices[number].push(update)
        return job.format.whole(choices, self._usage(job, choices))

    async def _events(self, job: Job, inbox: Inbox) -> AsyncIterator[bytes]:
        """The events of a stream. An error after its beginning is an event, too."""
        request = job.request
        asks_usage = request.stream_option("include_usage")
        with_pieces = request.stream_option("include_pieces")

        def chunk(choice: Json, speculative: Json | None = None) -> bytes:
            content = job.format.chunk([choice], usage=None, asks_usage=asks_usage)
            if speculative is not None:
                content["speculative"] = speculative
            return _event(content)

        choices = self._choices(job)
        for choice in choices:
            first_choice = job.format.first_choice(choice)
            if first_choice is not None:
                yield chunk(first_choice)

        try:
            async for number, update in inbox.updates():
                _raise_if_failed(update)
                choice = choices[number]
                piece = choice.push(update)
                speculative = piece.speculative(with_pieces=with_pieces)
                yield chunk(job.format.piece_choice(choice, piece), speculative)
                if update.is_last:
                    yield chunk(job.format.last_choice(choice))
        except ApiError as error:
            yield _event(error.to_dict())
        else:
            if asks_usage:
                usage = self._usage(job, choices)
                yield _event(job.format.chunk([], usage=usage, asks_usage=True))
        yield b"data: [DONE]\n\n"

    def _choices(self, job: Job) -> list[Choice]:
        return [Choice(index, self.service.tokenizer) for index in range(len(job.generations))]

    def _usage(self, job: Job, choices: list[Choice]) -> Usage:
        return Usage(job.num_prompt_tokens, job.num_cached, choices)


def _unavailable() -> ApiError:
    return ApiError(SHUTTING_DOWN, status=503, kind="server_error", code="shutting_down")


def _raise_if_failed(update: Update) -> None:
    """Raise ApiError for a generation that ended without a result."""
    if update.error == SHUTTING_DOWN:
        raise _unavailable()
    if update.error:
        code = "not_finite" if update.error == NOT_FINITE else "internal_error"
        if update.error.startswith(GRAMMAR_FAILED):
            code = "grammar_failed"
        raise ApiError(update.error, status=500, kind="server_error", code=code)


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinity, which Python reads and JSON does not have."""
    raise ValueError(name)


def _event(content: Json) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class Guard:
    """Checks the host and the key of every request, and counts the answers.

    Args:
        app: what handles the requests that pass.
        metrics: counters.
        settings: where the server listens.
        api_key: the key that requests must send; None if they need none.
        paths: the paths that are counted by name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        settings: ServeSettings,
        api_key: str | None,
        paths: list[str],
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.settings = settings
        self.api_key = None if api_key is None else api_key.encode()
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        request = Request(scope)
        refusal = self._refusal(request)
        if refusal is None:
            await self.app(scope, receive, counted_send)
        else:
            await refusal(scope, receive, counted_send)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not pass; None for all others."""
        if not self.settings.is_public and request.url.hostname not in LOOPBACK_HOSTS:
            # A page of another site whose name leads to this machine must not read answers.
            error = ApiError("this server answers only to its local names", status=403)
            return JSONResponse(error.to_dict(), status_code=error.status)

        if request.url.path in OPEN_PATHS or self._has_key(request):
            return None
        error = ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
        # A browser asks for the key: as the password, with any name.
        headers = {"www-authenticate": "Basic"}
        return JSONResponse(error.to_dict(), status_code=error.status, headers=headers)

    def _has_key(self, request: Request) -> bool:
        """Whether the request sends the key, compared in constant time."""
        if self.api_key is None:
            return True
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        sent_key = value.strip().encode()
        if scheme.lower() == "basic":
            try:
                sent_key = base64.b64decode(sent_key, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(sent_key, self.api_key)


def make_app(
    service: Service,
    metrics: Metrics,
    settings: ServeSettings,
    api_key: str | None,
) -> Starlette:
    """The application.

    Args:
        service: turns requests into jobs.
        metrics: counters, which the engine reports to.
        settings: limits.
        api_key: the key that requests must send; None if they need none.
    """
    api = Api(service, metrics, settings)
    routes = api.routes()
    guard = Middleware(
        Guard,
        metrics=metrics,
        settings=settings,
        api_key=api_key,
        paths=[route.path for route in routes],
    )
    handlers: Any = {
        ApiError: _answer_error,
        ClientDisconnect: _answer_nobody,
        HTTPException: _answer_http_error,
        Exception: _answer_crash,
    }
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


async def _answer_error(request: Request, error: ApiError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.to_dict(), status_code=error.status, headers=headers)


async def _answer_nobody(request: Request, error: ClientDisconnect) -> Response:
    """The client left before it had sent its request."""
    return Response(status_code=CLIENT_CLOSED)


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods."""
    text = f"{request.method} {request.url.path}: {error.detail}"
    content = ApiError(text, code=str(error.status_code)).to_dict()
    return JSONResponse(content, status_code=error.status_code, headers=error.headers)


async def _answer_crash(request: Request, error: Exception) -> Response:
    """A fault of ours. Its traceback goes to the log only."""
    content = ApiError("internal error", kind="server_error", code="internal_error").to_dict()
    return JSONResponse(content, status_code=500)
