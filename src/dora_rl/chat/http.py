"""Carries an application over HTTP. Never touches signals: they are the caller's business."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn

BACKLOG = 1024  # connections that may wait to be accepted


class HttpServer(uvicorn.Server):
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
