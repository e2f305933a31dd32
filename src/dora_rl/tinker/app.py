"""The SDK's routes, as a Starlette application over a `TinkerService`.

Lets in who may ask, reads bodies within their limits, writes JSON or protocol buffers. Decides
nothing else. Invariant: whoever asks is an owner, known by its key; without keys every key that a
client has makes it one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dora_rl.chat.access import Access, owner_of
from dora_rl.chat.app import for_this_host, keys_of
from dora_rl.chat.http import Bodies
from dora_rl.chat.requests import ApiError, server_error
from dora_rl.tinker.book import Answer
from dora_rl.tinker.service import TinkerService
from dora_rl.tinker.views import Views

API = "/api/v1"
PROTO = "application/x-protobuf"
PATH_CHARS = 200
NOBODY = "nobody"  # who has no key, where none is needed


def make_app(service: TinkerService, views: Views, access: Access, bodies: Bodies) -> Any:
    front = Front(service, access, bodies)
    posts: dict[str, Callable[..., Any]] = {
        "client/config": service.config,
        "client/dynamic_config": service.dynamic_config,
        "create_session": service.create_session,
        "session_heartbeat": service.heartbeat,
        "create_model": service.create_model,
        "get_info": service.info,
        "forward_backward": service.training_pass,
        "optim_step": service.optim_step,
        "save_weights": service.save,
        "load_weights": service.load,
        "save_weights_for_sampler": service.save_for_sampler,
        "create_sampling_session": service.create_sampler,
        "join_sampling_session": service.join_sampler,
        "asample": service.sample,
        "cancel_future": service.cancel,
        "retrieve_future": service.retrieve,
        "weights_info": views.weights_info,
        "telemetry": lambda owner, body: {"status": "accepted"},
    }
    gets: dict[str, Callable[..., Any]] = {
        "get_server_capabilities": views.capabilities,
        "samplers/{one}": service.sampler_info,
        "training_runs/{one}": views.run,
        "training_runs/{one}/checkpoints": views.checkpoints,
    }
    run = "training_runs/{one}/checkpoints/{two:path}"
    routes = [
        Route(f"{API}/healthz", front.health, methods=["GET"]),
        *(
            Route(f"{API}/{path}", front.post(call), methods=["POST"])
            for path, call in posts.items()
        ),
        Route(f"{API}/training_runs", front.runs(views), methods=["GET"]),
        *(
            Route(f"{API}/{path}", front.named(call), methods=["GET"])
            for path, call in gets.items()
        ),
        Route(f"{API}/{run}", front.named(views.delete), methods=["DELETE"]),
        Route(f"{API}/sessions/{{one}}/finish", front.named(service.finish), methods=["POST"]),
    ]
    handlers = dict.fromkeys((ApiError, HTTPException, Exception), _on_error)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return for_this_host(app, access)


class Front:
    """Makes an endpoint of a method of the service."""

    def __init__(self, service: TinkerService, access: Access, bodies: Bodies) -> None:
        self._service, self._access, self._bodies = service, access, bodies

    def _owner(self, request: Request) -> str:
        owner = self._access.any_of(keys_of(request.headers)).owner
        given = request.headers.get("x-api-key")
        return owner or (NOBODY if given is None else owner_of(given))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def post(self, call: Callable[..., Any]) -> Callable[[Request], Any]:
        """Of a body."""

        async def answer(request: Request) -> Response:
            owner = self._owner(request)
            async with self._bodies.hold(request) as body:
                found = call(owner, body)
                if inspect.isawaitable(found):
                    return _retrieved(await found)
                return JSONResponse(found)

        return answer

    def named(self, call: Callable[..., Any]) -> Callable[[Request], Any]:
        """Of what the path names."""

        async def answer(request: Request) -> Response:
            return JSONResponse(call(self._owner(request), *request.path_params.values()))

        return answer

    def runs(self, views: Views) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            given = request.query_params
            numbers = [given.get("limit", "20"), given.get("offset", "0")]
            if not all(number.isdecimal() and len(number) < 10 for number in numbers):
                raise ApiError(400, "limit and offset must be whole numbers")
            return JSONResponse(views.runs(self._owner(request), *map(int, numbers)))

        return answer


def _retrieved(answer: Answer | None) -> Response:
    """408 with a state is the SDK's "ask again"."""
    if answer is None:
        return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
    return Response(answer.body, media_type=PROTO if answer.is_proto else "application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    """Ours, Starlette's own (an unknown path, a wrong method), and what nobody foresaw."""
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.scope['path']}"[:PATH_CHARS]
        line = f"this server does not have {where}; see docs/tinker.md"
        error = ApiError(error.status_code, line, code="not_found")
    elif not isinstance(error, ApiError):
        error = server_error(f"internal error ({type(error).__name__})")
    body = json.dumps(error.body()).encode()
    return Response(body, error.status, error.headers, media_type="application/json")
