"""The routes of the endpoint, who may use them, and answers as they go out."""

import asyncio
import hmac
import ipaddress
import time
from collections.abc import AsyncIterator
from functools import partial
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moejax.errors import InputError
from moejax.serve.endpoint import chat, completions
from moejax.serve.endpoint.answers import Answer, Piece, joined, usage
from moejax.serve.endpoint.fields import RefusedError, parse_object, refused, to_json
from moejax.serve.endpoint.jobs import Job, ServedModel
from moejax.serve.endpoint.metrics import Metrics
from moejax.serve.endpoint.worker import RunningJob, Worker

BODY_BYTES = 4 * 2**20
BODY_SECONDS = 60  # for a body to arrive
JSON, METRICS = "application/json", "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """The routes.

    Attributes:
      app: of the ASGI protocol.
      closing: whether the server is about to stop, and takes no more requests.
    """

    def __init__(
        self,
        model: ServedModel,
        worker: Worker,
        metrics: Metrics,
        *,
        api_key: str | None,
        loopback_only: bool,
    ):
        """Describes the routes.

        Args:
          api_key: that requests must carry; None: none.
          loopback_only: whether requests must name the loopback address as their host, so that no
            other site that a browser has open can ask under a name of its own.
        """
        self.model, self.worker, self.metrics, self.closing = model, worker, metrics, False
        self._api_key, self._loopback_only = api_key, loopback_only
        self._started = int(time.time())
        post = ["POST"]
        routes = [
            Route("/v1/completions", partial(self._texts, completions), methods=post),
            Route("/v1/chat/completions", partial(self._texts, chat), methods=post),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        errors: dict[Any, Any] = {
            RefusedError: _refuse,
            HTTPException: _refuse_route,
            Exception: _fail,
        }
        self.app = Starlette(routes=routes, exception_handlers=errors)

    async def _texts(self, form: ModuleType, request: Request) -> Any:
        """Answers a request for texts, in one of both forms."""
        try:
            self._admit(request)
            job = await self._read(form, request)
            running = self.worker.submit(job.requests)
        except RefusedError as error:
            self.metrics.requests.labels(error.outcome).inc()
            raise
        except ClientDisconnect:
            self.metrics.requests.labels("cancelled").inc()
            return Response()
        self.metrics.prompt_tokens.inc(sum(len(prompt.ids) for prompt in job.prompts))
        return Reply(self, form, job, running)

    async def _read(self, form: ModuleType, request: Request) -> Job:
        if self.closing or not self.worker.ready:
            raise RefusedError(
                f"The server is {self._state()}. It takes requests when GET /health says `ready`. "
                f"Send it again later.",
                status=503,
                code="not_ready",
                headers={"Retry-After": "5"},
            )
        body = await _body(request)
        try:  # in another thread, as long texts take their time
            job = await run_in_threadpool(lambda: form.read(parse_object(body), self.model))
        except InputError as error:
            raise refused(error, None) from None
        if self.closing:  # meanwhile
            return await self._read(form, request)
        return job

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        model = {"id": self.model.name, "object": "model", "created": self._started}
        model |= {"owned_by": "moejax", "max_model_len": self.model.positions}
        return Response(to_json({"object": "list", "data": [model]}), media_type=JSON)

    async def _health(self, request: Request) -> Response:
        """Says whether texts are made: nothing that needs the API key."""
        status = 200 if self.worker.ready and not self.closing else 503
        return Response(to_json({"status": self._state()}), status, media_type=JSON)

    async def _metrics(self, request: Request) -> Response:
        self._admit(request)
        return Response(self.metrics.text(), headers={"content-type": METRICS})

    def _state(self) -> str:
        if self.closing:
            return "stopping"
        return "ready" if self.worker.ready else "compiling"

    def _admit(self, request: Request) -> None:
        """Checks who asks.

        Raises:
          RefusedError: if the API key is wrong, or a site of another name asks.
        """
        if self._api_key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            is_key = hmac.compare_digest(given.strip().encode(), self._api_key.encode())
            if scheme.lower() != "bearer" or not is_key:
                raise RefusedError(
                    "no valid API key. The header Authorization must be `Bearer KEY`. Send the "
                    "API key that the server was started with.",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif self._loopback_only:
            origin = request.headers.get("origin")
            hosts = [f"//{request.headers.get('host', '')}", *([] if origin is None else [origin])]
            for host in hosts:
                if not _is_loopback_url(host):
                    raise RefusedError(
                        f"request from elsewhere. Host and Origin are {hosts!a}. Both must name "
                        f"this machine's loopback address. Ask at 127.0.0.1.",
                        status=403,
                        code="wrong_host",
                    )


class Reply:
    """An answer, whole or as a stream of events. Frees its slots when the client goes away."""

    def __init__(self, endpoint: Endpoint, form: ModuleType, job: Job, running: RunningJob):
        self._endpoint, self._form, self._job, self._running = endpoint, form, job, running
        self._answers: list[Answer] = []
        self._texts = endpoint.model.token_texts
        self._id, self._created = f"{form.PREFIX}-{uuid4().hex}", int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request of ASGI."""
        answer = self._stream(send) if self._job.stream else self._whole(scope, receive, send)
        sending, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_gone(receive))
        outcome = "cancelled"
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                outcome = sending.result()
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._endpoint.worker.cancel(self._running)
            sending.cancel()
            gone.cancel()
            self._endpoint.metrics.requests.labels(outcome).inc()

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields what texts grow by, with their index, until all have ended."""
        self._answers = await run_in_threadpool(self._new_answers)
        going, worker = len(self._answers), self._endpoint.worker
        while going:
            news = await self._running.events.get()
            if isinstance(news, RefusedError):
                raise news
            index, event = news
            answer = self._answers[index]
            if answer.finished is not None:  # by a stop string, before this token
                continue
            piece = answer.take(event)
            if answer.finished is not None:
                going -= 1
                worker.cancel(self._running, self._running.first + index)
            if piece is not None:
                yield index, piece

    def _new_answers(self) -> list[Answer]:
        """Returns the answers; those with echo decode their prompts, which may take long."""
        model = self._endpoint.model
        return [Answer(self._job, index, model) for index in range(len(self._job.requests))]

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Sends a JSON object. Returns how the request is counted."""
        pieces: list[list[Piece]] = [[] for _ in self._job.requests]
        try:
            async for index, piece in self._pieces():
                pieces[index].append(piece)
        except RefusedError as error:
            await _error_response(error)(scope, receive, send)
            return error.outcome

        def body() -> bytes:
            choices = [
                self._form.choice(joined(found), index, self._job, self._texts)
                for index, found in enumerate(pieces)
            ]
            head = self._head(self._form.NAME)
            return to_json({**head, "choices": choices, "usage": self._usage()})

        # Of many log probabilities it takes long; others are answered meanwhile.
        content = await run_in_threadpool(body)
        await Response(content, media_type=JSON)(scope, receive, send)
        return "done"

    async def _stream(self, send: Send) -> str:
        """Sends events. Returns how the request is counted."""
        began, outcome, ends = False, "done", b"data: [DONE]\n\n"
        try:
            async for index, piece in self._pieces():
                if not began:
                    await _begin(send, 200, "text/event-stream; charset=utf-8")
                    began = True
                    opened = filter(None, map(self._form.opening, range(len(self._answers))))
                    await _send(send, b"".join(map(self._event, opened)))
                choice = self._form.chunk(piece, index, self._job, self._texts)
                await _send(send, self._event(choice))
            if self._job.usage:
                body = {**self._head(self._form.CHUNK), "choices": [], "usage": self._usage()}
                ends = _event(body) + ends
        except RefusedError as error:
            outcome = error.outcome
            if not began:
                await _begin(send, error.status, JSON)
            ends = _event(error.body()) if began else to_json(error.body())
        await send({"type": "http.response.body", "body": ends})
        return outcome

    def _event(self, choice: dict[str, Any]) -> bytes:
        none = {"usage": None} if self._job.usage else {}
        return _event({**self._head(self._form.CHUNK), "choices": [choice], **none})

    def _head(self, name: str) -> dict[str, Any]:
        model = self._endpoint.model.name
        return {"id": self._id, "object": name, "created": self._created, "model": model}

    def _usage(self) -> dict[str, int]:
        return usage(self._job, sum(answer.drawn for answer in self._answers))


def _event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


async def _begin(send: Send, status: int, media_type: str) -> None:
    headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send(send: Send, body: bytes) -> None:
    """Sends a part of a body; waits where the client reads slowly."""
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    """Returns when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """Returns the body of a request.

    Raises:
      RefusedError: if it is too large, or does not come.
    """
    too_large = RefusedError(
        f"body is too large. A request has at most {BODY_BYTES // 2**20} MiB. Send several "
        f"requests.",
        status=413,
        code="too_large",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > BODY_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise RefusedError(
            f"body did not come. {size} bytes came in {BODY_SECONDS} s. It must be there by then. "
            f"Send it again.",
            status=408,
        ) from None
    return b"".join(parts)


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address is this machine's loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_loopback_url(url: str) -> bool:
    try:
        return "@" not in url and is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _error_response(error: RefusedError) -> Response:
    return Response(to_json(error.body()), error.status, error.headers, media_type=JSON)


async def _refuse(request: Request, error: RefusedError) -> Response:
    return _error_response(error)


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    routes = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, /health, /metrics"
    return _error_response(
        RefusedError(
            f"no {request.method} {request.url.path[:100]!a} here. There are {routes}.",
            status=error.status_code,
            headers=dict(error.headers or {}),
        )
    )


async def _fail(request: Request, error: Exception) -> Response:
    # Starlette raises it again, and its traceback is shown.
    return _error_response(
        RefusedError("server failed. Its output says why. Send it again.", status=500)
    )
