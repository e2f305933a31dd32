"""The endpoints, as a Starlette application over a `Service`.

Lets in who may ask, has bodies read and checked, writes answers or server-sent events, and gives up
a generation as soon as its client is gone. Generates nothing. Invariant: a generation that was
begun is closed, whatever happens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dora_rl.chat.access import SESSION_HEADER, Access, session_named
from dora_rl.chat.answers import OPEN, Choice, Frame
from dora_rl.chat.bounds import CHAT, COMPLETION, MESSAGES, OPEN_SESSION, RESPONSES, REWARD
from dora_rl.chat.http import Bodies
from dora_rl.chat.messages_api import MessagesAnswer, error_body
from dora_rl.chat.requests import (
    ApiError,
    Message,
    body_too_large,
    fields,
    model_not_found,
    parsed,
    server_error,
)
from dora_rl.chat.responses_api import ResponsesAnswer
from dora_rl.chat.service import Service

SMALL_BYTES_MAX = 64 << 10  # of a body without messages or prompts
PATH_CHARS = 200  # of what an error repeats
MESSAGES_PATH = "/v1/messages"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class Form(Protocol):
    """An answer of one choice in the form of an API, as its pieces come."""

    def whole(self) -> dict[str, Any]: ...
    def events(self) -> Iterable[dict[str, Any]]:
        """Those of the newest piece; `type` is the event's name."""
        ...

    def failed(self, error: ApiError) -> Iterable[dict[str, Any]]:
        """The events of an error, too late for a status code."""
        ...

    def reply(self) -> Message:
        """The message as it is when a client gives the answer back."""
        ...


def make_app(service: Service, access: Access, bodies: Bodies) -> Any:
    """`access` says who may ask, and `bodies` how much."""
    front = Front(service, bodies)
    routes = [
        ("/v1/models", front.models, "GET"),
        ("/v1/models/{model:path}", front.model, "GET"),
        ("/v1/chat/completions", front.chat, "POST"),
        ("/v1/completions", front.completions, "POST"),
        (MESSAGES_PATH, front.messages, "POST"),
        ("/v1/responses", front.responses, "POST"),
        ("/v1/sessions", front.open_session, "POST"),
        ("/v1/sessions/{session}", front.read_session, "GET"),
        ("/v1/sessions/{session}", front.end_session, "DELETE"),
        ("/v1/sessions/{session}/reward", front.reward, "POST"),
    ]
    app = Starlette(
        routes=[
            Route("/health", front.health, methods=["GET"]),
            *(Route(path, guarded(call, access), methods=[how]) for path, call, how in routes),
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _on_error),
    )
    app.router.redirect_slashes = False  # to an address made of what the client calls this host
    return for_this_host(app, access)


def for_this_host(app: Any, access: Access) -> Any:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            access.check_host(Headers(scope=scope))
        except ApiError as error:
            await _error_response(error, scope["path"])(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def guarded(
    call: Callable[[Request], Awaitable[Response]], access: Access
) -> Callable[[Request], Awaitable[Response]]:
    """Lets a request through, with its owner and the session that it is about."""

    async def answer(request: Request) -> Response:
        caller = access.any_of(keys_of(request.headers))
        named = request.path_params.get("session", request.headers.get(SESSION_HEADER))
        if named is not None:
            named = fields(OPEN_SESSION, {"session_id": named})["session_id"]
        request.state.owner = caller.owner
        request.state.session = session_named(caller, named)
        return await call(request)

    return answer


def keys_of(headers: Mapping[str, str]) -> list[str]:
    """What `Authorization` says, and the header that some clients of /v1/messages have instead."""
    key = headers.get("x-api-key")
    return [headers.get("authorization", ""), *([] if key is None else [f"Bearer {key}"])]


class Front:
    """One method per endpoint."""

    def __init__(self, service: Service, bodies: Bodies) -> None:
        self._service, self._bodies = service, bodies
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
        return _Answering(await self._chat(request, CHAT, "chatcmpl-"))

    async def messages(self, request: Request) -> Response:
        return _AnsweringOtherwise(await self._chat(request, MESSAGES, "msg_"), MessagesAnswer)

    async def responses(self, request: Request) -> Response:
        return _AnsweringOtherwise(await self._chat(request, RESPONSES, "resp_"), ResponsesAnswer)

    async def _chat(self, request: Request, endpoint: str, kind: str) -> Frame:
        """What a request for a chat begins, in whichever form it came."""
        async with self._bodies.hold(request) as body:
            ask = await self._service.texts.read(endpoint, body, request.state.session)
        generation = await self._service.chat(replace(ask, owner=request.state.owner))
        template = self._service.template
        tools = ask.tools if OPEN in template.text else ()
        name = self._id(kind)
        return Frame(name, int(time.time()), ask, generation, template.tokenizer, True, tools)

    async def completions(self, request: Request) -> Response:
        async with self._bodies.hold(request) as body:
            ask = await self._service.texts.read(COMPLETION, body, request.state.session)
        generation = await self._service.complete(replace(ask, owner=request.state.owner))
        tokenizer = self._service.template.tokenizer
        return _Answering(
            Frame(self._id("cmpl-"), int(time.time()), ask, generation, tokenizer, False)
        )

    async def open_session(self, request: Request) -> Response:
        known = fields(OPEN_SESSION, await self._small(request))
        given = known.get("session_id", known.get("id"))
        return JSONResponse(self._service.open_session(given, request.state.owner))

    async def read_session(self, request: Request) -> Response:
        state = request.state
        return JSONResponse(self._service.read_session(state.session, state.owner))

    async def end_session(self, request: Request) -> Response:
        state = request.state
        return JSONResponse(await self._service.end_session(state.session, state.owner, None))

    async def reward(self, request: Request) -> Response:
        reward = fields(REWARD, await self._small(request))["reward"]
        state = request.state
        return JSONResponse(await self._service.end_session(state.session, state.owner, reward))

    async def _small(self, request: Request) -> dict[str, Any]:
        """The object of a body that has a few short fields; nothing at all is an empty one."""
        async with self._bodies.hold(request) as body:
            if len(body) > SMALL_BYTES_MAX:
                raise body_too_large(SMALL_BYTES_MAX)
            return parsed(body) if body else {}

    def _id(self, kind: str) -> str:
        return f"{kind}{self._salt}{next(self._count):08x}"


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
            await _error_response(error, scope["path"])(scope, receive, send)
            return
        self._replied()
        body = self._frame.body([])
        if self._frame.ask.return_token_ids and self._frame.chat:
            body["prompt_token_ids"] = self._choices[0].prompt_ids
        body["usage"] = self._frame.usage(self._choices)
        del body["choices"]
        choices: list[str] = []
        for choice in self._choices:
            choices.append(choice.whole())
            await asyncio.sleep(0)  # others have their turn
        text = f'{json.dumps(body)[:-1]}, "choices": [{", ".join(choices)}]}}'
        await Response(text, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
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
            self._frame.generation.replied(self._reply())

    def _reply(self) -> Message:
        return self._choices[0].message()


class _AnsweringOtherwise(_Answering):
    """In the form of another API than the chat completions'."""

    def __init__(self, frame: Frame, form: Callable[[Choice], Form]) -> None:
        super().__init__(frame)
        self._form = form(self._choices[0])

    def _reply(self) -> Message:
        return self._form.reply()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for piece in self._frame.generation.pieces():
                self._choices[0].add(piece)
        except ApiError as error:
            await _error_response(error, scope["path"])(scope, receive, send)
            return
        self._replied()
        await JSONResponse(self._form.whole())(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for piece in self._frame.generation.pieces():
                self._choices[0].add(piece)
                if piece.finish is not None:
                    self._replied()
                for event in self._form.events():
                    await self._send_named(send, event)
        except ApiError as error:
            for event in self._form.failed(error):
                await self._send_named(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_named(self, send: Send, event: dict[str, Any]) -> None:
        await _send_event(send, json.dumps(event, ensure_ascii=False), event["type"])


async def _send_event(send: Send, data: str, name: str = "") -> None:
    head = f"event: {name}\n" if name else ""
    body = f"{head}data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await asyncio.sleep(0)  # others have their turn, and whether this client is gone is noticed


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_response(error: ApiError, path: str) -> Response:
    """In the form of the API that the path is of."""
    body = error_body(error) if path.startswith(MESSAGES_PATH) else error.body()
    return JSONResponse(body, error.status, headers=error.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    """Ours, Starlette's own (an unknown path, a wrong method), and what nobody foresaw."""
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.scope['path']}"[:PATH_CHARS]
        allow = dict(error.headers or {})
        doubled = request.scope["path"].startswith("/v1/v1/")  # Anthropic's client adds a /v1
        hint = "; give the client the address without /v1" * doubled
        error = ApiError(
            error.status_code, f"Invalid URL ({where}){hint}", code="not_found", headers=allow
        )
    elif not isinstance(error, ApiError):
        error = server_error(f"internal error ({type(error).__name__})")
    return _error_response(error, request.scope["path"])
