"""The endpoints, as a Starlette application over a `Service`, and the server that carries it.

Checks the key, reads and checks bodies, writes answers or server-sent events, and gives up a
generation as soon as its client is gone. Generates nothing. Invariant: a generation that was begun
is closed, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from math import isfinite
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dora_rl.chat.answers import OPEN, Choice, Frame
from dora_rl.chat.requests import (
    ApiError,
    ChatBody,
    CompletionBody,
    bad_request,
    model_not_found,
    read,
    server_error,
    session_not_found,
    unauthorized,
)
from dora_rl.chat.service import Service

BACKLOG = 1024  # connections that may wait to be accepted
BODY_BYTES_MAX = 16 << 20
SESSION_HEADER = "x-session-id"


def make_app(service: Service, api_key: str | None, keys: Mapping[str, str] | None = None) -> Any:
    """Without a key everybody may ask. `keys` (key -> session) gives each session its own."""
    front = Front(service)
    guard = _Guard(api_key, keys)
    routes = [
        ("/v1/models", front.models, "GET"),
        ("/v1/models/{model:path}", front.model, "GET"),
        ("/v1/chat/completions", front.chat, "POST"),
        ("/v1/completions", front.completions, "POST"),
        ("/v1/sessions", front.open_session, "POST"),
        ("/v1/sessions/{session}", front.read_session, "GET"),
        ("/v1/sessions/{session}", front.end_session, "DELETE"),
        ("/v1/sessions/{session}/reward", front.reward, "POST"),
    ]
    return Starlette(
        routes=[
            Route("/health", front.health, methods=["GET"]),
            *(Route(path, guard.over(call), methods=[how]) for path, call, how in routes),
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _on_error),
    )


class _Guard:
    """Lets a request through, with the session that its key stands for."""

    def __init__(self, api_key: str | None, keys: Mapping[str, str] | None) -> None:
        self._key = api_key.encode() if api_key is not None else None
        self._keys = keys

    def over(
        self, call: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            own = self._session(request.headers.get("authorization", ""))
            named = request.path_params.get("session", request.headers.get(SESSION_HEADER))
            if own is not None and named not in (None, own):
                raise session_not_found(named)
            request.state.session = named or own
            return await call(request)

        return guarded

    def _session(self, header: str) -> str | None:
        kind, _, given = header.partition(" ")
        given = given.strip() if kind.lower() == "bearer" else ""
        if self._keys is not None:
            if given not in self._keys:
                raise unauthorized(bool(header))
            return self._keys[given]
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key):
            raise unauthorized(bool(header))
        return None


class Front:
    """One method per endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._salt, self._count = secrets.token_hex(4), itertools.count(1)

    async def health(self, request: Request) -> Response:
        healthy = self._service.healthy()
        return JSONResponse({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._service.models()})

    async def model(self, request: Request) -> Response:
        wanted, cards = request.path_params["model"], self._service.models()
        for card in cards:
            if card["id"] == wanted:
                return JSONResponse(card)
        raise model_not_found(wanted, cards[0]["id"])

    async def chat(self, request: Request) -> Response:
        ask = read(ChatBody, await _json(request)).ask(request.state.session)
        generation = await self._service.chat(ask)
        template = self._service.template
        tools = ask.tools if OPEN in template.text else ()
        frame = Frame(
            self._id("chatcmpl"), int(time.time()), ask, generation, template.tokenizer, True, tools
        )
        return _Answering(frame)

    async def completions(self, request: Request) -> Response:
        body = read(CompletionBody, await _json(request))
        ask = body.ask(request.state.session)
        tokenizer = self._service.template.tokenizer
        prompts = [
            tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts()
        ]
        generation = await self._service.complete(ask, prompts)
        return _Answering(
            Frame(self._id("cmpl"), int(time.time()), ask, generation, tokenizer, False)
        )

    async def open_session(self, request: Request) -> Response:
        body = await _json(request, otherwise={})
        given = body.get("session_id", body.get("id")) if isinstance(body, dict) else None
        if given is not None and (not isinstance(given, str) or not 0 < len(given) <= 256):
            raise bad_request("'session_id' must be a string of 1 to 256 characters", "session_id")
        return JSONResponse(self._service.open_session(given))

    async def read_session(self, request: Request) -> Response:
        return JSONResponse(self._service.read_session(request.state.session))

    async def end_session(self, request: Request) -> Response:
        return JSONResponse(await self._service.end_session(request.state.session, None))

    async def reward(self, request: Request) -> Response:
        body = await _json(request)
        reward = read_reward(body.get("reward") if isinstance(body, dict) else None)
        return JSONResponse(await self._service.end_session(request.state.session, reward))

    def _id(self, kind: str) -> str:
        return f"{kind}-{self._salt}{next(self._count):08x}"


def read_reward(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise bad_request("'reward' must be a finite number", "reward")
    return float(value)


class _Answering(Response):
    """Runs a generation and answers with it, for as long as the client is there."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame
        count = len(frame.generation.prompts) * frame.ask.num_samples
        self._choices = [Choice(frame, index) for index in range(count)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._frame.ask.stream else self._whole(scope, receive, send)
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            self._frame.generation.close()
            for one in (task, gone):
                one.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for piece in self._frame.generation.pieces():
                self._choices[piece.choice].add(piece)
        except ApiError as error:
            await _error_response(error)(scope, receive, send)
            return
        self._replied()
        body = self._frame.body([choice.whole() for choice in self._choices])
        if self._frame.ask.return_token_ids and self._frame.chat:
            body["prompt_token_ids"] = self._choices[0].prompt_ids
        body["usage"] = self._frame.usage(self._choices)
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for event in self._events():
                await _send_event(send, json.dumps(event, ensure_ascii=False))
        except ApiError as error:  # too late for a status code
            await _send_event(send, json.dumps(error.body()))
        await _send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        frame, first = self._frame, True
        async for piece in frame.generation.pieces():
            choice = self._choices[piece.choice]
            choice.add(piece)
            if all(choice.finish is not None for choice in self._choices):
                self._replied()
            body = frame.body([choice.chunk(piece)], chunk=True)
            if first and frame.ask.return_token_ids and frame.chat:
                body["prompt_token_ids"] = choice.prompt_ids
            if frame.ask.include_usage:
                body["usage"] = None
            first = False
            yield body
        if frame.ask.include_usage:
            yield frame.body([], chunk=True) | {"usage": frame.usage(self._choices)}

    def _replied(self) -> None:
        """Before the client can see the end, so that its next request finds the session there."""
        if self._frame.chat and len(self._choices) == 1:
            self._frame.generation.replied(self._choices[0].message())


async def _send_event(send: Send, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json(request: Request, otherwise: Any = None) -> Any:
    """The body, read with a limit; `otherwise` stands for an empty one where it is given."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BODY_BYTES_MAX:
            message = f"the body is larger than {BODY_BYTES_MAX >> 20} MiB"
            raise ApiError(413, message, code="request_too_large")
        chunks.append(chunk)
    if not size and otherwise is not None:
        return otherwise
    try:
        return json.loads(b"".join(chunks))
    except ValueError:
        raise bad_request("the body is not valid JSON") from None


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    """Ours, Starlette's own (an unknown path, a wrong method), and what nobody foresaw."""
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.url.path}"
        error = ApiError(error.status_code, f"Invalid URL ({where})", code="not_found")
    elif not isinstance(error, ApiError):
        error = server_error(f"internal error ({type(error).__name__})")
    return _error_response(error)


class HttpServer(uvicorn.Server):
    """Carries an application over HTTP; signals are the caller's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: Any, grace_s: float = 1.0) -> HttpServer:
    """`await server.serve(sockets=[...])`; `grace_s` is for answers on their way at the end."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(grace_s),
    )
    return HttpServer(config)
