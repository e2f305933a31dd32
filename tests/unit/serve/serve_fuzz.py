"""A fuzz of `serve` that knows its table of bounds, beside a client that behaves.

    python -m tests.unit.serve.serve_fuzz --requests 20000 --seed 1

The server is a process of its own, so that its memory, threads and files can be told from ours. The
fuzz makes requests from `chat.bounds.FIELDS`: right, wrong in one place or more, mangled, left
half way. Invariants: no answer is a 5xx but 503 at a named limit; a field out of its bounds is a
400 that names it; the client beside it gets exactly what it got alone; at the end nothing has
grown beyond the allowances below.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.chat.bounds import (
    CHAT,
    COMPLETION,
    MESSAGES,
    OPEN_SESSION,
    RESPONSES,
    REWARD,
    Field,
    fields_of,
)
from dora_rl.chat.kinds import (
    Either,
    Flag,
    Json,
    Kind,
    ListOf,
    Number,
    OneOf,
    Record,
    Shaped,
    Text,
    TokenIds,
    Unfit,
    Whole,
)
from tests.kit.places import ROOT

KEYS = ("fuzz-key-1", "fuzz-key-2", "neighbours-key")
LIMITS_503 = {"connections_max", "bodies_bytes_max", "texts_waiting_max"}
WARM_SHARE = 0.3  # of the requests: then what is kept once is there
# What a server may have grown by from then to the end. Allocators keep arenas of the largest
# bodies; sessions, threads and files have no such excuse.
RSS_MIB_MAX, THREADS_MAX, FILES_MAX = 64, 0, 4
PATHS = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions", OPEN_SESSION: "/v1/sessions"}
PATHS |= {MESSAGES: "/v1/messages", RESPONSES: "/v1/responses"}
CHATS = (CHAT, MESSAGES, RESPONSES)
CONTEXT, VOCAB = 512, 16
ERRORS = (b'"error": {', b'"type": "error"')  # in streams, whose objects may say "error": null


# -- values ----------------------------------------------------------------------------------------

SURROGATE = json.loads('"\\ud800"')


def nested(levels: int) -> Any:
    value: Any = 0
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def junk(rng: random.Random) -> Any:
    """Anything that JSON can say, and Python's JSON besides."""
    makers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: rng.choice([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, -(10**400)]),
        lambda: rng.choice([float("nan"), float("inf"), -0.0, 1e-310, 1e308, 0.5, -1e-9]),
        lambda: rng.choice(["", "x", SURROGATE, "\x00", "é\u202e", "²", "{{ 7*7 }}", "x" * 5000]),
        lambda: [junk(rng) for _ in range(rng.choice([0, 1, 3]))],
        lambda: {rng.choice(["a", "type", "role", "__class__"]): junk(rng) for _ in range(2)},
        lambda: nested(rng.choice([3, 30, 300])),
        lambda: [None] * rng.choice([10, 5000]),
    ]
    return rng.choice(makers)()


def text(rng: random.Random, least: int, most: int) -> str:
    length = rng.randint(least, min(most, 40))
    if rng.random() < 0.02:
        length = min(most, 20_000)
    return "".join(rng.choice("0123456789:\n=é{<|日") for _ in range(length))


def inside(kind: Kind, rng: random.Random) -> Any:
    """A value that the table takes."""
    match kind:
        case Flag():
            return rng.choice([True, False])
        case Whole(least, most):
            near = rng.randint(max(least, 0), min(most, 12))
            return rng.choice([least, most, near, near, near])
        case Number(least, most):
            return rng.choice([least, most, rng.uniform(max(least, -9), min(most, 9))])
        case Text(least, most):
            return text(rng, least, most)
        case OneOf(values):
            return rng.choice(values)
        case TokenIds():
            return [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        case ListOf(entry, least, most):
            return [inside(entry, rng) for _ in range(rng.randint(least, min(most, 4)))]
        case Either(kinds):
            return inside(rng.choice(kinds), rng)
        case Record(entries, needed):
            chosen = [e for e in entries if e[0] in needed or rng.random() < 0.4]
            return {name: inside(entry, rng) for name, entry in chosen}
        case Json():
            return {text(rng, 1, 8): rng.choice([1, "x", None, [1], True]) for _ in range(2)}
        case Shaped(_, record):
            return inside(record, rng) | {"description": text(rng, 0, 40)}
    raise AssertionError(f"no values for {kind}")


def is_fit(one: Field, value: Any) -> bool:
    if value is None:
        return not one.needed
    try:
        one.kind.read(value)
    except Unfit:
        return False
    return True


# -- requests --------------------------------------------------------------------------------------


@dataclass
class Shot:
    """One request. `unfit`: fields that are out of their bounds; None: not known."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    unfit: set[str] | None = None
    manner: str = "whole"  # or leave, early, half
    stream: bool = False


def base(endpoint: str, rng: random.Random) -> dict[str, Any]:
    """A request that is right, and small."""
    body: dict[str, Any] = {"model": rng.choice(["tiny", "tiny", "tiny@0"])}
    said = [{"role": "user", "content": f"0{rng.randint(1, 4)}:271\n"}]
    what = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input", COMPLETION: "prompt"}
    body[what[endpoint]] = said if endpoint in CHATS else said[0]["content"]
    limit = "max_output_tokens" if endpoint == RESPONSES else "max_tokens"
    return body | {limit: rng.randint(1, 8)}


def shot(rng: random.Random) -> Shot:
    headers = {"Authorization": f"Bearer {rng.choice(KEYS[:2])}"}
    kinds = [CHAT, MESSAGES, RESPONSES, COMPLETION, COMPLETION, OPEN_SESSION, REWARD]
    endpoint = rng.choice(kinds)
    name = f"s{rng.randint(0, 9)}"
    if endpoint == REWARD:
        path, body = f"/v1/sessions/{name}/reward", {"reward": 1.0}
    elif endpoint == OPEN_SESSION:
        path, body = PATHS[endpoint], {"session_id": name}
    else:
        path, body = PATHS[endpoint], base(endpoint, rng)
    rows = fields_of(endpoint)
    num_changed = rng.choice([0, 1, 1, 1, 2, 4])
    for one in rng.sample(rows, min(num_changed, len(rows))):
        body[one.name] = junk(rng) if rng.random() < 0.5 else inside(one.kind, rng)
    unfit = {one.name for one in rows if one.name in body and not is_fit(one, body[one.name])}
    made = Shot("POST", path, json.dumps(body).encode(), headers, unfit)
    made.stream = body.get("stream") is True
    if endpoint in PATHS and rng.random() < 0.15:
        headers["X-Session-Id"] = name
    return rng.choice([same] * 12 + [mangled, odd, left, large])(made, rng)


def same(made: Shot, rng: random.Random) -> Shot:
    del rng
    return made


def mangled(made: Shot, rng: random.Random) -> Shot:
    """Some bytes of the body are others."""
    data = bytearray(made.body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        data = data or bytearray(b"{")
    made.body, made.unfit = bytes(data), None
    return made


def odd(made: Shot, rng: random.Random) -> Shot:
    """The envelope is not as it should be."""
    made.unfit = None
    change = rng.randrange(6)
    if change == 0:
        made.headers["Authorization"] = rng.choice(["", "Bearer", "Bearer x", "Basic \xff"])
        if rng.random() < 0.5:
            made.headers["X-Api-Key"] = rng.choice(["", KEYS[0], "x", "\xff"])
    elif change == 1:
        made.headers["Host"] = rng.choice(["evil.example", "", "[::1", "localhost:x"])
    elif change == 2:
        made.headers["Origin"] = rng.choice(["http://evil.example", "null"])
    elif change == 3:
        made.method = rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
    elif change == 4:
        made.path = "/" + rng.choice(["", "v1", "v1/models/%00", "v1/x?" + "y" * 3000, "health"])
    else:
        made.headers["X-Session-Id"] = rng.choice(["x" * 300, "\xff", "a b"])
    return made


def left(made: Shot, rng: random.Random) -> Shot:
    """Its client goes before the end."""
    made.manner = rng.choice(["leave", "early", "half"])
    return made


def large(made: Shot, rng: random.Random) -> Shot:
    made.unfit = None
    if rng.random() < 0.7:
        return made
    size = rng.choice([1 << 16, 1 << 20, 17 << 20])
    made.body = json.dumps({"model": "tiny", "prompt": "0" * size}).encode()
    made.path = PATHS[COMPLETION]
    return made


# -- clients ---------------------------------------------------------------------------------------


class Client:
    """A keep-alive connection to the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def send(self, made: Shot) -> tuple[int, bytes, dict[str, str]]:
        """Once more on a new connection, where the server had closed the old one."""
        fresh = self._connection is None
        try:
            return self._send(made)
        except (OSError, http.client.HTTPException):
            self.close()
            if fresh:
                raise
        return self._send(made)

    def _send(self, made: Shot) -> tuple[int, bytes, dict[str, str]]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        link = self._connection
        link.request(made.method, made.path, made.body, made.headers)
        answer = link.getresponse()
        return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def leave(self, made: Shot) -> None:
        """Send, and go: at once, after some of the answer, or in the middle of the body."""
        lines = [f"{made.method} {made.path} HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in made.headers.items()]
        lines += [f"Content-Length: {len(made.body)}", "", ""]
        data = "\r\n".join(lines).encode("latin-1") + made.body
        with socket.create_connection(("127.0.0.1", self._port), timeout=120) as link:
            link.sendall(data[: len(data) // 2] if made.manner == "half" else data)
            if made.manner == "early":
                link.recv(64)


@dataclass
class Findings:
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


def judge(made: Shot, status: int, data: bytes, headers: dict[str, str]) -> str:
    """What is wrong with an answer, or an empty string."""
    where = f"{made.method} {made.path} {made.body[:300]!r} -> {status} {data[:300]!r}"
    if status == 503:
        error = json.loads(data).get("error", {})
        named = error.get("code") in LIMITS_503 and "retry-after" in headers
        return "" if named else f"503 without a limit: {where}"
    if status >= 500:
        return f"5xx: {where}"
    if status == 200 and made.stream and any(mark in data for mark in ERRORS):
        return f"an error in a stream: {where}"
    if made.unfit and status != 400:
        return f"{made.unfit} should have been refused: {where}"
    if made.unfit:
        param = json.loads(data)["error"]["param"]
        return "" if param in made.unfit else f"{made.unfit} are wrong, not {param}: {where}"
    return ""


def fuzz(port: int, seed: int, numbers: range, findings: Findings) -> None:
    """The requests with these numbers: each depends on the seed and its number alone."""
    client = Client(port)
    for number in numbers:
        made = shot(random.Random(f"{seed}/{number}"))
        try:
            if made.manner != "whole":
                client.leave(made)
                continue
            status, data, headers = client.send(made)
        except (OSError, http.client.HTTPException) as error:
            if len(made.body) < 16 << 20:  # larger ones are answered before they are read
                findings.say(f"{number}: no answer ({error!r}): {made.path} {made.body[:300]!r}")
            client.close()
            continue
        with findings.lock:
            findings.statuses[status] += 1
        if wrong := judge(made, status, data, headers):
            findings.say(f"{number}: {wrong}")
    client.close()


def good_requests() -> list[tuple[str, dict[str, Any]]]:
    """What the client that behaves asks for, over and over."""
    common = {"model": "tiny", "max_tokens": 12, "return_token_ids": True}
    asked: list[tuple[str, dict[str, Any]]] = []
    for number in range(4):
        prompt = f"0{number + 1}:{271 + number}\n"
        chat = common | {"messages": [{"role": "user", "content": prompt}], "seed": number}
        asked.append((CHAT, chat | {"logprobs": True, "temperature": 0.8}))
        asked.append((COMPLETION, common | {"prompt": prompt, "temperature": 0, "n": 2}))
        asked.append((COMPLETION, common | {"prompt": prompt, "seed": 7, "stop": ["1", "="]}))
    return asked


def good_answer(client: Client, endpoint: str, body: dict[str, Any]) -> Any:
    """All that the seed decides."""
    headers = {"Authorization": f"Bearer {KEYS[2]}"}
    made = Shot("POST", PATHS[endpoint], json.dumps(body).encode(), headers)
    status, data, _ = client.send(made)
    if status != 200:
        return status, data
    answer = json.loads(data)
    kept = [
        (choice.get("text"), choice.get("message"), choice["token_ids"], choice["finish_reason"])
        for choice in answer["choices"]
    ]
    return kept, answer["usage"]


class Neighbour(threading.Thread):
    """Asks the same as before the fuzz, as long as the fuzz lasts."""

    def __init__(self, port: int, findings: Findings) -> None:
        super().__init__(daemon=True)
        self._client, self._findings = Client(port), findings
        self._alone = [good_answer(self._client, *one) for one in good_requests()]
        assert all(isinstance(answer[0], list) for answer in self._alone)
        self.stop, self.num_rounds = threading.Event(), 0

    def run(self) -> None:
        while not self.stop.is_set():
            for asked, alone in zip(good_requests(), self._alone, strict=True):
                try:
                    got = good_answer(self._client, *asked)
                except (OSError, http.client.HTTPException) as error:
                    got = repr(error)
                if got != alone:
                    self._findings.say(f"the neighbour got {got!r}, alone {alone!r}")
            self.num_rounds += 1


def streams_at_once(port: int, count: int, leave: bool, findings: Findings) -> None:
    """So many streams side by side; or so many clients that leave theirs after the first bytes."""
    body = {"model": "tiny", "prompt": "03:271\n", "max_tokens": 24, "stream": True, "seed": 3}
    body |= {"ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    whole: list[list[str]] = []

    def one() -> None:
        made = Shot("POST", PATHS[COMPLETION], json.dumps(body).encode(), headers)
        made.manner = "early" if leave else "whole"
        if leave:
            Client(port).leave(made)
            return
        client = Client(port)
        status, data, _ = client.send(made)
        client.close()
        events = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: {")]
        assert status == 200, data
        whole.append([json.loads(event)["choices"][0]["text"] for event in events])

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = {"".join(pieces) for pieces in whole}
    if not leave and (len(whole), len(texts)) != (count, 1):
        findings.say(f"{len(whole)} of {count} streams ended, with {len(texts)} texts")


# -- the server ------------------------------------------------------------------------------------


class ServerProcess:
    """`serving()` in a process of its own, which tells its figures when it is asked."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.unit.serve.serve_fuzz", "--serve"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.port = int(self._line()["port"])

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server has ended ({self._process.wait()})"
        return json.loads(line)

    def figures(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def settled(self) -> dict[str, Any]:
        """The figures once nothing runs any more; idle sessions end by themselves."""
        end = time.monotonic() + 120
        while True:
            found = self.figures()
            busy = {name: found[name] for name in ("running", "connections", "sessions", "bodies")}
            busy |= {"engine": found["engine"], "texts": found["texts"]}
            if not any(busy.values()):
                return found
            assert time.monotonic() < end, f"it does not come to rest: {busy}"
            time.sleep(0.1)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


def serve() -> None:
    from tests.unit.serve.serving import serving

    settings = {"api_keys": KEYS, "session_idle_s_max": 1.0, "requests_max": 1024}
    with serving(**settings) as running:
        print(json.dumps({"port": running.server.port}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(figures_of(running)), flush=True)


def figures_of(running: Any) -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()
    rss_kib = int(status.partition("VmRSS:")[2].split()[0])
    service, engine = running.service, running.engine
    lanes = (service.texts.small, service.texts.large)
    return {
        "rss_mib": rss_kib >> 10,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "running": service.num_running,
        "sessions": service.num_sessions_on(0),
        "connections": running.num_connections(),
        "bodies": running.server.num_body_bytes,
        "engine": int(engine.has_work()) + engine.stats().idle,
        "texts": sum(lane.num_waiting for lane in lanes),
        "starts": sum(lane.num_starts for lane in lanes),
        "healthy": service.healthy(),
    }


def grown(warm: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """What has grown beyond its allowance."""
    most = {"rss_mib": RSS_MIB_MAX, "threads": THREADS_MAX, "files": FILES_MAX}
    return [
        f"{name} grew from {warm[name]} to {end[name]}; {more} more are allowed"
        for name, more in most.items()
        if end[name] - warm[name] > more
    ]


def run(num_requests: int, seed: int, num_clients: int = 4, num_streams: int = 64) -> Findings:
    """The whole fuzz. What was found wrong is in `Findings.wrong`."""
    findings = Findings()
    server = ServerProcess()
    try:
        neighbour = Neighbour(server.port, findings)
        neighbour.start()
        warm_to = int(num_requests * WARM_SHARE)
        together(server.port, seed, range(warm_to), num_clients, findings)
        streams_at_once(server.port, num_streams, True, findings)
        pause(neighbour)
        warm = server.settled()
        neighbour = Neighbour(server.port, findings)
        neighbour.start()
        together(server.port, seed, range(warm_to, num_requests), num_clients, findings)
        streams_at_once(server.port, num_streams, False, findings)
        streams_at_once(server.port, num_streams, True, findings)
        pause(neighbour)
        end = server.settled()
        findings.wrong += grown(warm, end)
        if not end["healthy"] or not neighbour.num_rounds:
            findings.wrong.append(f"healthy {end['healthy']}, {neighbour.num_rounds} rounds beside")
        print(f"warm {warm}\nend  {end}\nneighbour: {neighbour.num_rounds} rounds of 12")
    finally:
        server.close()
    return findings


def together(port: int, seed: int, numbers: range, num_clients: int, findings: Findings) -> None:
    parts = [numbers[first::num_clients] for first in range(num_clients)]
    threads = [threading.Thread(target=fuzz, args=(port, seed, p, findings)) for p in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def pause(neighbour: Neighbour) -> None:
    neighbour.stop.set()
    neighbour.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help="be the server")
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    began = time.monotonic()
    findings = run(args.requests, args.seed)
    took = time.monotonic() - began
    print(f"{args.requests} requests in {took:.0f} s: {dict(sorted(findings.statuses.items()))}")
    for wrong in findings.wrong[:20]:
        print(wrong)
    print(f"{len(findings.wrong)} findings")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
