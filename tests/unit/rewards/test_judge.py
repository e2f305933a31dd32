"""The judge against a real HTTP server: scores, retries, refusals, strange answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import ScoreError, ScoreItem, build
from dora_rl.rewards.judge import JudgeReward
from dora_rl.types import UserError

LIMITS = RewardConfig(timeout_s=60.0, retry_wait_s=0.0)


class Endpoint(ThreadingHTTPServer):
    """Answers with `replies` in turn, the last for ever: a text, or a status, or raw bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[str | int | bytes] = ["Score: 7"]
        self.seen: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append({**body, "path": self.path, "headers": dict(self.headers)})
            replies = self.server.replies
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(reply, int):
            self.send_response(reply)
            self.send_header("Retry-After", "0")
            data = b'{"error": "no"}'
        else:
            self.send_response(200)
            told = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
            data = reply if isinstance(reply, bytes) else json.dumps(told).encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def item(completion: str = "Paris", answer: str | None = "Paris") -> ScoreItem:
    return ScoreItem([{"role": "user", "content": "Capital?"}], "…", completion, (), answer)


def judge(endpoint: Endpoint, **options: Any) -> JudgeReward:
    return JudgeReward(LIMITS, url=endpoint.url, model="m", **options)


def test_asks_and_scales(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    reward = judge(endpoint, key_variable="MY_KEY")
    assert reward.score([item("say {answer} {prompt}")]) == [0.7]
    (seen,) = endpoint.seen
    assert seen["path"] == "/v1/chat/completions" and seen["model"] == "m"
    assert seen["headers"]["Authorization"] == "Bearer secret"
    question = seen["messages"][0]["content"]
    # What the completion writes is never filled in.
    assert "say {answer} {prompt}" in question and "[user] Capital?" in question


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Score: 10", 1.0),
        ("First I thought Score: 3, but\n**Score:** 9.5", 0.95),
        ("score = 0", 0.0),
        ("Score: 99", 1.0),
        ("Score: -3", 0.0),
    ],
)
def test_reads_verdicts(endpoint: Endpoint, text: str, expected: float) -> None:
    endpoint.replies = [text]
    assert judge(endpoint).score([item()]) == [expected]


@pytest.mark.parametrize("first", [429, 500, 503, "no verdict", b"not json", b"{}"])
def test_tries_again(endpoint: Endpoint, first: str | int | bytes) -> None:
    endpoint.replies = [first, "Score: 5"]
    assert judge(endpoint).score([item()]) == [0.5]
    assert len(endpoint.seen) == 2


def test_gives_up_after_its_tries(endpoint: Endpoint) -> None:
    endpoint.replies = [500]
    (score,) = judge(endpoint).score([item()])
    assert isinstance(score, ScoreError) and "500" in score.reason and "try 3 of 3" in score.reason
    assert len(endpoint.seen) == 3


def test_a_refusal_is_final(endpoint: Endpoint) -> None:
    endpoint.replies = [401]
    (score,) = judge(endpoint).score([item()])
    assert isinstance(score, ScoreError) and "401" in score.reason
    assert len(endpoint.seen) == 1


def test_nobody_listens() -> None:
    (score,) = JudgeReward(LIMITS, url="http://127.0.0.1:9", model="m").score([item()])
    assert isinstance(score, ScoreError) and "cannot reach the judge" in score.reason


def test_many_at_once_and_cached(endpoint: Endpoint) -> None:
    entry = {"name": "judge", "options": {"url": endpoint.url, "model": "m"}}
    reward = build(RewardConfig.model_validate({"functions": [entry]}))
    rows = [item(f"answer {n % 8}") for n in range(24)]
    assert reward.score(rows) == [0.7] * 24
    assert len(endpoint.seen) == 8


def test_wrong_template() -> None:
    with pytest.raises(UserError, match="completion"):
        JudgeReward(LIMITS, url="http://x", model="m", template="grade this")
