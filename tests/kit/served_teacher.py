"""A teacher's endpoint for tests: a real HTTP server that gives what it is told to give."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dora_rl.config import RewardConfig

Answer = Callable[[list[int]], dict[str, Any]]


def right(ids: list[int]) -> dict[str, Any]:
    """Each log-prob says which token it is of, and in how long a text."""
    logprobs = [None, *(-float(token) - len(ids) / 100 for token in ids[1:])]
    told = {"token_logprobs": logprobs, "tokens": [f"<{token}>" for token in ids]}
    return {"logprobs": told, "prompt_token_ids": ids}


@contextmanager
def teacher(answer: Answer) -> Iterator[RewardConfig]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions" and body["echo"] and body["max_tokens"] == 0
            data = json.dumps({"choices": [answer(body["prompt"])]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield RewardConfig(
            teacher_url=f"http://127.0.0.1:{server.server_address[1]}/v1",
            teacher_name="t",
            timeout_s=60.0,
            retry_wait_s=0.0,
            attempts=2,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
