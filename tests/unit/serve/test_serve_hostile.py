"""Clients that mean ill: what they send is refused, what they hold open is closed, others go on."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading

import pytest

from dora_rl.chat.http import READ_BYTES_MAX, HttpLimits, Patient
from tests.unit.serve.serving import serving, wait_until

FIRST = "03:271\n"
GREEDY = {"model": "tiny", "prompt": FIRST, "temperature": 0, "max_tokens": 8}
GREEDY_BYTES = json.dumps(GREEDY).encode()
USER = [{"role": "user", "content": FIRST}]
CHAT = {"model": "tiny", "messages": USER, "max_tokens": 4}
COMPLETIONS, CHATS, SESSIONS = "/v1/completions", "/v1/chat/completions", "/v1/sessions"


@pytest.fixture(scope="module")
def served():
    with serving() as running:
        yield running


def send(running, method, path, body=None, headers=None):
    """The status, the parsed body and the headers of one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", running.server.port, timeout=60)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null"), answer.headers
    finally:
        connection.close()


def text_of(running):
    status, answer, _ = send(running, "POST", COMPLETIONS, GREEDY)
    assert status == 200
    return answer["choices"][0]["text"]


def deep(levels):
    return b"[" * levels + b"]" * levels


TOOL = {"type": "function", "function": {"name": "f"}}
BAD = [
    (COMPLETIONS, {"top_k": 10**30}, "top_k"),
    (COMPLETIONS, {"temperature": float("nan")}, "temperature"),
    (COMPLETIONS, {"temperature": 1e-300}, "temperature"),
    (COMPLETIONS, {"max_tokens": -5}, "max_tokens"),
    (COMPLETIONS, {"logprobs": 10**400}, "logprobs"),
    (COMPLETIONS, {"prompt": [10**12]}, "prompt"),
    (COMPLETIONS, {"prompt": [15, 16, 17]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
    (COMPLETIONS, {"stop_token_ids": [5000]}, "stop_token_ids"),
    (COMPLETIONS, {"stop": ["x"] * 17}, "stop"),
    (COMPLETIONS, {"stop": "x" * 300}, "stop"),
    (COMPLETIONS, {"n": 129}, "n"),
    (COMPLETIONS, {"model": "\ud800"}, "model"),
    (CHATS, {"tools": [TOOL | {"function": "f"}]}, "tools"),
    (CHATS, {"tools": [TOOL | {"function": {"name": {}}}]}, "tools"),
    (CHATS, {"messages": [{"role": "user", "content": "x", "name": []}]}, "messages"),
    (CHATS, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": "\udfff"}]}, "messages"),
    (CHATS, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    (CHATS, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHATS, {"session_id": "x" * 300}, "session_id"),
]


@pytest.mark.parametrize(("path", "more", "param"), BAD)
def test_a_bad_field_is_a_bad_request_and_nothing_else(served, path, more, param):
    base = CHAT if path == CHATS else GREEDY
    status, answer, _ = send(served, "POST", path, base | more)
    assert status == 400 and answer["error"]["param"] == param
    assert f"'{param}" in answer["error"]["message"]
    assert text_of(served)


@pytest.mark.parametrize("version", ["²", "9" * 5000, "-0", "00", "0x0", ""])
def test_versions_that_are_no_numbers_are_unknown_models(served, version):
    model = f"tiny@{version}"[:256]
    assert send(served, "POST", COMPLETIONS, GREEDY | {"model": model})[0] == 404


def test_arguments_of_calls_may_be_anything_that_is_text(served):
    for arguments in ("[" * 100_000, "9" * 5000, "{", "NaN", '"\\ud800"'):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        messages = [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]
        assert send(served, "POST", CHATS, CHAT | {"messages": messages})[0] in (200, 400)


def test_bodies_and_rewards_that_are_no_such_thing(served):
    for body in (b"", b"{", b"[]", b"\xff", deep(100_000), b'{"a":' * 100_000, b"9" * 5000):
        for path in (COMPLETIONS, CHATS):
            assert send(served, "POST", path, body)[0] == 400
    assert send(served, "POST", SESSIONS, {"id": "r"})[0] == 200
    for reward in (10**400, float("inf"), "1", True, None, 1e19, [1]):
        status, answer, _ = send(served, "POST", f"{SESSIONS}/r/reward", {"reward": reward})
        assert status == 400 and answer["error"]["param"] == "reward"
    for name in (5, "", "x" * 300, {}):
        assert send(served, "POST", SESSIONS, {"id": name})[0] == 400
    assert send(served, "DELETE", f"{SESSIONS}/r")[0] == 200


def test_odd_paths_and_methods_are_unknown(served):
    for method, path in (
        ("GET", "/v1/models/"),
        ("GET", "/v1//models"),
        ("GET", "/%00%ff"),
        ("PUT", CHATS),
        ("OPTIONS", CHATS),
        ("POST", f"{SESSIONS}/" + "x" * 300 + "/reward"),
        ("GET", f"{SESSIONS}/nobody"),
    ):
        status, answer, headers = send(served, method, path)
        assert status in (400, 404, 405) and "error" in answer
        assert "location" not in headers


def test_a_body_over_the_limit_is_not_read(served):
    for headers, body in (
        ({"Content-Length": str(1 << 40)}, b"{"),
        ({"Content-Length": str(17 << 20)}, b"{"),
    ):
        assert send(served, "POST", CHATS, body, headers)[0] == 413


def test_a_prompt_of_15_mib_does_not_hold_up_others(served):
    """While it is read, small requests are answered one after the other."""
    body = json.dumps(GREEDY | {"prompt": "03:271\n" * (15 << 17)}).encode()
    assert len(body) > 15 << 20
    got: list[int] = []
    one = threading.Thread(target=lambda: got.append(send(served, "POST", COMPLETIONS, body)[0]))
    one.start()
    alone = text_of(served)
    while one.is_alive():
        assert text_of(served) == alone
    assert got == [400]


def test_many_prompts_in_one_body_are_within_the_room_of_the_server(served):
    for body in ({"prompt": ["1"] * 1024}, {"prompt": ["1"] * 200, "n": 128}):
        status, answer, headers = send(served, "POST", COMPLETIONS, GREEDY | body)
        assert status == 429 and answer["error"]["code"] == "rate_limit_exceeded"
        assert headers["retry-after"] == "1"
    assert send(served, "POST", COMPLETIONS, GREEDY | {"prompt": ["1"] * 1025})[0] == 400


# -- hosts, origins, keys --------------------------------------------------------------------------


def test_only_names_of_this_machine_are_answered(served):
    good = {"Host": f"localhost:{served.server.port}"}
    assert send(served, "GET", "/v1/models", headers=good)[0] == 200
    for path in ("/v1/models", "/health", "/nothing"):
        status, answer, _ = send(served, "GET", path, headers={"Host": "evil.example"})
        assert status == 421 and "--allowed-host" in answer["error"]["message"]
    page = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    assert send(served, "POST", COMPLETIONS, GREEDY, page)[0] == 403
    page = {"Origin": f"http://127.0.0.1:{served.server.port}"}
    assert send(served, "POST", COMPLETIONS, GREEDY, page)[0] == 200
    with serving(allowed_hosts=("Box.lan",)) as running:
        assert send(running, "GET", "/v1/models", headers={"Host": "box.lan:80"})[0] == 200
        assert send(running, "GET", "/v1/models", headers={"Host": "127.0.0.1"})[0] == 200
        assert send(running, "GET", "/v1/models", headers={"Host": "evil.example"})[0] == 421


def test_a_session_is_there_for_its_key_alone():
    with serving(api_keys=("first-key", "second-key"), sessions_max=3) as running:
        mine, yours = ({"Authorization": f"Bearer {k}-key"} for k in ("first", "second"))
        named = {"X-Session-Id": "s"}
        status, answer, _ = send(running, "POST", CHATS, CHAT, mine | named)
        assert status == 200 and answer["session"]["turn"] == 1
        for method, path, body in (
            ("GET", f"{SESSIONS}/s", None),
            ("POST", f"{SESSIONS}/s/reward", {"reward": 1}),
            ("DELETE", f"{SESSIONS}/s", None),
        ):
            assert send(running, method, path, body, yours)[0] == 404
            assert send(running, method, path, body)[0] == 401
        # The same name under another key is another session, and says nothing of the first.
        status, other, _ = send(running, "POST", CHATS, CHAT, yours | named)
        assert status == 200 and other["session"] == {"id": "s", "continued": False, "turn": 1}
        assert send(running, "DELETE", f"{SESSIONS}/s", headers=yours)[0] == 200
        assert len(send(running, "GET", f"{SESSIONS}/s", headers=mine)[1]["messages"]) == 2


def test_a_refused_first_turn_leaves_no_session(served):
    before = served.service.num_sessions_on(0)
    for number, more in enumerate(({"top_k": 10**30}, {"max_tokens": 10**6}, {"n": 2})):
        headers = {"X-Session-Id": f"never-{number}"}
        assert send(served, "POST", CHATS, CHAT | more, headers)[0] == 400
    assert served.service.num_sessions_on(0) == before


def test_a_session_whose_record_cannot_be_written_stays(tmp_path):
    with serving(record=tmp_path / "gone" / "file.jsonl", session_idle_s_max=0.0) as running:
        headers = {"X-Session-Id": "s"}
        assert send(running, "POST", CHATS, CHAT, headers)[0] == 200
        status, answer, sent = send(running, "POST", f"{SESSIONS}/s/reward", {"reward": 1})
        assert status == 503 and answer["error"]["code"] == "record" and "retry-after" in sent
        wait_until(lambda: any("idle sessions stay" in line for line in running.said), "it is said")
        assert send(running, "GET", f"{SESSIONS}/s")[0] == 200
        (tmp_path / "gone").mkdir()
        wait_until(lambda: running.service.num_sessions_on(0) == 0, "it has ended")
    assert len((tmp_path / "gone" / "file.jsonl").read_text().splitlines()) == 1


# -- connections -----------------------------------------------------------------------------------

QUICK = HttpLimits(connections_max=8, head_s_max=1.0, body_s_max=1.0, write_s_max=1.0)


def rest_of(connection):
    """Whatever comes until the other side closes."""
    got = b""
    with connection:
        try:
            while piece := connection.recv(1 << 16):
                got += piece
        except ConnectionResetError:
            pass
    return got


def answers(running):
    """Whether others are answered; on a busy machine a good client may be too slow for `QUICK`."""
    try:
        return bool(text_of(running))
    except (OSError, http.client.HTTPException):
        return False


def opened(running):
    return socket.create_connection(("127.0.0.1", running.server.port), timeout=60)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"


@pytest.mark.parametrize(
    "start", [b"", b"GET /v1", b"GET /health HTTP/1.1\r\nHost: local", HEAD, HEAD + b"\r\n{"]
)
def test_half_a_request_is_closed_in_the_end(start):
    with serving(http=QUICK) as running:
        connection = opened(running)
        connection.sendall(start)
        assert b" 200 " not in rest_of(connection)
        wait_until(lambda: answers(running), "others are answered")


def test_half_a_request_behind_a_whole_one_is_closed_too():
    with serving(http=QUICK) as running:
        connection = opened(running)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he")
        assert rest_of(connection).count(b" 200 ") == 1


def test_a_trickle_is_no_way_around_the_deadline():
    with serving(http=QUICK) as running:
        connection = opened(running)
        stop = threading.Event()

        def trickle():
            try:
                while not stop.wait(0.1):
                    connection.sendall(b"x")
            except OSError:
                return

        feeder = threading.Thread(target=trickle)
        feeder.start()
        try:
            rest_of(connection)
        finally:
            stop.set()
            feeder.join()


def test_a_header_has_a_size(served):
    start = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    for flood in (b"X: " + b"y" * (80 << 10), b"X: y\r\n" * (14 << 10)):
        connection = opened(served)
        with contextlib.suppress(ConnectionError):
            connection.sendall(start + flood + b"\r\n\r\n")
        assert b" 200 " not in rest_of(connection)
    fine = {"Cookie": "x" * (48 << 10)}
    assert send(served, "GET", "/v1/models", headers=fine)[0] == 200


def test_a_connection_has_its_turn_in_small_pieces(monkeypatch):
    """So that chunks of one byte, or heaps of requests in one piece, do not hold up the others."""
    sizes = []
    taken = Patient.data_received

    def counted(self, data):
        sizes.append(len(data))
        taken(self, data)

    monkeypatch.setattr(Patient, "data_received", counted)
    with serving() as running:
        body = json.dumps(GREEDY | {"user": "x" * (1 << 20)}).encode()
        assert send(running, "POST", COMPLETIONS, body)[0] == 200
        pieces = [GREEDY_BYTES[place : place + 1] for place in range(len(GREEDY_BYTES))]
        connection = http.client.HTTPConnection("127.0.0.1", running.server.port, timeout=60)
        connection.request("POST", COMPLETIONS, iter(pieces), encode_chunked=True)
        assert connection.getresponse().status == 200
        connection.close()
    assert sum(sizes) > 1 << 20 and max(sizes) <= READ_BYTES_MAX


def test_one_connection_too_many_is_told_so_and_later_ones_are_served():
    limits = HttpLimits(connections_max=4)
    with serving(http=limits) as running:
        held = [opened(running) for _ in range(4)]
        wait_until(lambda: running.num_connections() == 4, "they are there")
        status, answer, headers = send(running, "GET", "/v1/models")
        assert status == 503 and answer["error"]["code"] == "connections_max"
        assert headers["retry-after"] == "1"
        many = [opened(running) for _ in range(8)]
        assert not rest_of(many[-1])
        for connection in held + many:
            connection.close()
        wait_until(lambda: running.num_connections() == 0, "they are gone")
        assert text_of(running)


def test_bodies_held_at_once_have_a_limit():
    limits = HttpLimits(bodies_bytes_max=1 << 20, body_s_max=60)
    with serving(http=limits) as running:
        slow = opened(running)
        half = b"x" * (700 << 10)
        head = HEAD.replace(b"100", str(1 << 20).encode())
        slow.sendall(head + b"\r\n" + half)
        body = json.dumps(GREEDY | {"user": "x" * (700 << 10)}).encode()
        wait_until(lambda: running.server.num_body_bytes == len(half), "half of it is held")
        status, answer, headers = send(running, "POST", COMPLETIONS, body)
        assert status == 503 and answer["error"]["code"] == "bodies_bytes_max"
        assert headers["retry-after"] == "1"
        assert text_of(running), "small ones fit"
        slow.close()
        wait_until(lambda: running.server.num_body_bytes == 0, "its half is given back")
        assert send(running, "POST", COMPLETIONS, body)[0] == 200


def test_a_client_that_does_not_read_is_closed_and_its_requests_end():
    with serving(http=QUICK) as running:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", running.server.port))
        body = GREEDY | {"prompt": ["1"] * 60, "n": 8, "max_tokens": 400, "stream": True}
        data = json.dumps(body | {"ignore_eos": True, "logprobs": 5, "temperature": 1}).encode()
        head = HEAD.replace(b"100", str(len(data)).encode())
        connection.sendall(head + b"\r\n" + data)
        wait_until(lambda: running.service.num_running > 0, "it runs")
        wait_until(lambda: running.service.num_running == 0, "it has been given up")
        wait_until(lambda: running.num_connections() == 0, "its connection is closed")
        connection.close()
        wait_until(lambda: answers(running), "others are answered")
