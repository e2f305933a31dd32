"""/v1/messages and /v1/responses with the official clients, over answers that are written down:
whole, in pieces of every size, with tools there and back, and refused in each API's own form."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

import anthropic
import openai
from pydantic import TypeAdapter

from dora_rl.chat.access import Access
from dora_rl.chat.app import make_app
from dora_rl.chat.conversation import ChatTemplate
from dora_rl.chat.http import Bodies, HttpLimits, http_server
from dora_rl.chat.requests import Ask, server_error
from dora_rl.chat.service import Piece
from dora_rl.chat.texts import PlainTexts
from dora_rl.types import Finish

KEY = "a-key"
WANTED = {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2.5]}}
CALL = f"<tool_call>\n{json.dumps(WANTED, ensure_ascii=False)}\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CLAUDE_TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
CALLED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
OPENAI_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}


class Bytes:
    """A tokenizer whose tokens are bytes; its template is JSON, and knows calls."""

    chat_template = "<tool_call>"

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, **_: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: Any, *, tools: Any = None, **_: Any) -> str:
        return json.dumps([messages, tools])


class Script:
    """Implements `chat.service.Service`: says what is next in `texts`, in pieces of `size` bytes.
    An empty text is an error in the middle."""

    def __init__(self) -> None:
        self.template = ChatTemplate(Bytes())  # type: ignore[arg-type]
        self.texts = PlainTexts(self.template)
        self.said: list[str] = []
        self.size, self.asked, self.replies = 4, [], []
        self.finish = Finish.STOP

    def healthy(self) -> bool:
        return True

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "m", "object": "model", "created": 0, "owned_by": "us"}]

    async def chat(self, ask: Ask) -> Saying:
        self.asked.append(ask)
        return Saying(self, ask)


class Saying:
    version, session = 5, None

    def __init__(self, script: Script, ask: Ask) -> None:
        self._script, self.prompts = script, ask.prompts
        self._text = script.said.pop(0)

    async def pieces(self) -> AsyncIterator[Piece]:
        ids = list(self._text.encode())
        if not ids:
            yield Piece(0, (120,), (-1.0,))
            raise server_error("it broke")
        for at in range(0, len(ids), self._script.size):
            part, last = ids[at : at + self._script.size], at + self._script.size >= len(ids)
            finish = self._script.finish if last else None
            yield Piece(0, tuple(part), (-1.0,) * len(part), finish=finish)

    def replied(self, reply: dict[str, Any]) -> None:
        self._script.replies.append(reply)

    def close(self) -> None:
        pass


@contextmanager
def listening(script: Script) -> Iterator[str]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(16)
    limits = HttpLimits()
    access = Access(keys=(KEY,), loopback=True)
    server = http_server(make_app(script, access, Bodies(limits)), limits)  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def where() -> Iterator[tuple[Script, str]]:
    script = Script()
    with listening(script) as url:
        yield script, url


@pytest.fixture
def script(where: tuple[Script, str]) -> Script:
    """As it was made; the server stays."""
    found = where[0]
    found.said, found.asked, found.replies = [], [], []
    found.size, found.finish = 4, Finish.STOP
    return found


@pytest.fixture(scope="module")
def claude(where: tuple[Script, str]) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=where[1], api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(where: tuple[Script, str]) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{where[1]}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask_claude(client: Any, messages: list[Any], **more: Any) -> Any:
    return client.messages.create(model="m", max_tokens=9, messages=messages, **more)


# -- /v1/messages ----------------------------------------------------------------------------------


def test_a_message(script: Script, claude: Any) -> None:
    script.said = ["Grüße"]
    more = {"system": [{"type": "text", "text": "be kind"}], "stop_sequences": ["e!"]}
    drawn = {"temperature": 0.5, "top_k": 3}
    message = ask_claude(claude, [user("hi")], extra_body=drawn, **more)
    assert message.content[0].text == "Grüße" and len(message.content) == 1
    assert (message.stop_reason, message.stop_sequence, message.role) == (
        "end_turn",
        None,
        "assistant",
    )
    assert message.usage.output_tokens == len("Grüße".encode()) and message.weight_version == 5
    (ask,) = script.asked
    assert list(ask.messages) == [{"role": "system", "content": "be kind"}, user("hi")]
    assert ask.params.stop_strings == ("e!",) and ask.params.top_k == 3 and ask.tokens_max == 9
    assert ask.params.temperature == 0.5 and message.usage.input_tokens == len(ask.prompts[0])


def test_why_a_message_ended(script: Script, claude: Any) -> None:
    script.said, script.finish = ["cut off"], Finish.LENGTH
    assert ask_claude(claude, [user("hi")]).stop_reason == "max_tokens"
    script.said, script.finish = ["one. two"], Finish.STOP
    message = ask_claude(claude, [user("hi")], stop_sequences=["x", ". "])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ". ")
    assert message.content[0].text == "one"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", ["héllo", f"I look. {CALL}{CALL}", CALL])
def test_the_events_add_up_to_the_message(
    script: Script, claude: Any, size: int, text: str
) -> None:
    script.said, script.size = [text, text], size
    whole = ask_claude(claude, [user("hi")], tools=[CLAUDE_TOOL])
    with claude.messages.stream(
        model="m", max_tokens=9, messages=[user("hi")], tools=[CLAUDE_TOOL]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    said = [block for block in final.content if block.type != "text" or block.text]
    assert [block.to_dict() for block in said] == [
        block.to_dict() | ({"id": said[at].id} if block.type == "tool_use" else {})
        for at, block in enumerate(whole.content)
    ]
    assert final.stop_reason == whole.stop_reason == ("tool_use" if CALL in text else "end_turn")
    assert final.usage.output_tokens == whole.usage.output_tokens == len(text.encode())


def events_of(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """As they stand in the stream."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    asked = {"model": "m", "stream": True} | body
    request = urllib.request.Request(f"{url}/v1/{path}", json.dumps(asked).encode(), headers)
    parts = urllib.request.urlopen(request).read().decode().strip().split("\n\n")
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("text", ["héllo", f"I look. {CALL}{CALL}", CALL])
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_every_event_is_of_the_clients_own_types(
    where: tuple[Script, str], script: Script, text: str, finish: Finish
) -> None:
    script.said, script.finish = [text] * 4, finish
    asked = {"max_tokens": 9, "messages": [user("hi")], "tools": [CLAUDE_TOOL]}
    own = TypeAdapter[Any](anthropic.types.RawMessageStreamEvent)
    events = events_of(where[1], "messages", asked)
    assert [own.validate_python(event).type for event in events] == [e["type"] for e in events]
    blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["text"] * (text != CALL) + ["tool_use"] * (
        text.count(CALL)
    )
    own = TypeAdapter[Any](openai.types.responses.ResponseStreamEvent)
    asked = {"input": "hi", "tools": [{"type": "function", "name": "weather"}]}
    events = events_of(where[1], "responses", asked)
    assert [own.validate_python(event).type for event in events] == [e["type"] for e in events]
    for event in events:
        if "response" in event:
            openai.types.responses.Response.model_validate(event["response"])


@pytest.mark.parametrize(
    "arguments",
    [
        '"{\\"city\\":\\"K\\"}"',
        "[1]",
        "null",
        '{"a":1,"b":1.0}',
        '"{\\"a\\": NaN}"',
        '"\\ud800"',
        '{"a": NaN}',
        '{"a": "\\ud800"}',
        '{"a": 1e999}',
        f'{{"a": {"9" * 30}}}',
        "[" * 5000 + "]" * 5000,
        "[" * 40 + "]" * 40,
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_whatever_arguments_the_model_writes(
    script: Script, claude: Any, gpt: Any, arguments: str, streamed: bool
) -> None:
    """The answer comes, and what the client gives back of it is the message that was replied."""
    block = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    script.said, script.size = [block, "so"] * 3, 1000
    more = {"model": "m", "max_tokens": 9, "messages": [user("?")], "tools": [CLAUDE_TOOL]}
    if streamed:
        with claude.messages.stream(**more) as stream:
            first = stream.get_final_message()
    else:
        first = claude.messages.create(**more)
    messages = [user("?"), {"role": "assistant", "content": first.content}, user("so?")]
    ask_claude(claude, messages, tools=[CLAUDE_TOOL])
    assert script.asked[1].messages[1] == script.replies[0]
    items = gpt.responses.create(model="m", input=[user("?")], tools=[OPENAI_TOOL]).output
    given = [user("?"), *(item.to_dict() for item in items), user("so?")]
    gpt.responses.create(model="m", input=given, tools=[OPENAI_TOOL])
    assert script.asked[3].messages[1] == script.replies[2]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    chat = {"model": "m", "tools": tools}
    said = gpt.chat.completions.create(messages=[user("?")], **chat).choices[0].message
    gpt.chat.completions.create(messages=[user("?"), said.to_dict(), user("so?")], **chat)
    assert script.asked[5].messages[1] == script.replies[4]


def test_a_call_whose_name_is_no_name_is_text(script: Script, claude: Any) -> None:
    script.said = [text := '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>']
    assert ask_claude(claude, [user("?")], tools=[CLAUDE_TOOL]).content[0].text == text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_there_and_back(script: Script, claude: Any, streamed: bool) -> None:
    """What comes back is the message that was replied, so a session or an episode goes on."""
    script.said = [f"I look.{CALL}", "Rain."]
    more = {"model": "m", "max_tokens": 9, "messages": [user("?")], "tools": [CLAUDE_TOOL]}
    if streamed:
        with claude.messages.stream(**more) as stream:
            first = stream.get_final_message()
    else:
        first = claude.messages.create(**more)
    text, call = first.content
    assert call.name == "weather" and call.input == {"city": "Köln", "days": [1, 2.5]}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "wet"}
    messages = [
        user("?"),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    second = ask_claude(claude, messages, tools=[CLAUDE_TOOL])
    assert second.content[0].text == "Rain."
    offered, asked = script.asked[1].tools, list(script.asked[1].messages)
    assert asked[1] == script.replies[0] and asked[1]["content"] == text.text == "I look."
    assert asked[2:] == [{"role": "tool", "content": "wet", "tool_call_id": call.id}, user("so?")]
    function = {"name": "weather", "parameters": SCHEMA, "description": "of a city"}
    assert offered == ({"type": "function", "function": function},)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [CALLED]}]}, "messages"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_refused_messages_name_the_field(claude: Any, body: dict[str, Any], field: str) -> None:
    request = {"model": "m", "max_tokens": 4, "messages": [user("hi")]} | body
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.post("/v1/messages", cast_to=dict[str, object], body=request)
    error = caught.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["error"]["param"] == field and field in error["error"]["message"]


def test_keys_and_hosts_of_messages(where: tuple[Script, str], script: Script) -> None:
    url = where[1]
    with anthropic.Anthropic(base_url=url, api_key="no", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask_claude(client, [user("hi")])
        assert caught.value.body["error"]["type"] == "authentication_error"
    script.said = ["yes"]
    body = json.dumps({"model": "m", "max_tokens": 4, "messages": [user("hi")]}).encode()
    by_header = urllib.request.Request(f"{url}/v1/messages", body, {"x-api-key": KEY})
    assert json.load(urllib.request.urlopen(by_header))["content"][0]["text"] == "yes"
    elsewhere = {"x-api-key": KEY, "Host": "evil.example"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/messages", body, elsewhere))
    assert refused.value.code == 421 and json.load(refused.value)["type"] == "error"


def test_either_header_may_have_the_key(where: tuple[Script, str], script: Script) -> None:
    """A client whose program knows a key of another server too sends both."""
    body = json.dumps({"model": "m", "max_tokens": 4, "messages": [user("hi")]}).encode()

    def status(**headers: str) -> int:
        script.said = ["yes"]
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = urllib.request.Request(f"{where[1]}/v1/messages", body, named)
        try:
            return urllib.request.urlopen(asked).status
        except urllib.error.HTTPError as error:
            return error.code

    assert status(x_api_key=KEY, authorization="Bearer another") == 200
    assert status(x_api_key="another", authorization=f"Bearer {KEY}") == 200
    assert status(x_api_key=KEY, authorization="") == 200
    assert status(x_api_key="another", authorization="Bearer another") == 401
    assert status(x_api_key=KEY, host="evil.example") == 421
    assert status(x_api_key=KEY, origin="http://evil.example") == 403
    assert status() == 401


def test_an_error_in_the_middle(script: Script, claude: Any, gpt: Any) -> None:
    script.said = ["", "", ""]
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask_claude(claude, [user("hi")])
    assert caught.value.body["error"]["type"] == "api_error"
    with (
        pytest.raises(anthropic.APIStatusError, match="it broke"),
        claude.messages.stream(model="m", max_tokens=4, messages=[user("hi")]) as stream,
    ):
        stream.until_done()
    *_, last = gpt.responses.create(model="m", input="hi", stream=True)
    assert (last.type, last.code, last.message) == ("error", "internal_error", "it broke")


def test_an_error_before_anything_else(
    script: Script, claude: Any, gpt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response is begun all the same: the client's helper takes no other event first."""

    async def broken(saying: Saying) -> AsyncIterator[Piece]:
        if saying.prompts:
            raise server_error("it broke")
        yield Piece(0, (), ())

    monkeypatch.setattr(Saying, "pieces", broken)
    script.said = ["never"] * 2
    with (
        pytest.raises(anthropic.APIStatusError, match="it broke"),
        claude.messages.stream(model="m", max_tokens=4, messages=[user("hi")]) as stream,
    ):
        stream.until_done()
    with gpt.responses.stream(model="m", input="hi") as stream:
        events = list(stream)
    kinds = ["response.created", "response.in_progress", "error"]
    assert [event.type for event in events] == kinds and events[-1].message == "it broke"
    assert [event.sequence_number for event in events] == [0, 1, 2]


# -- /v1/responses ---------------------------------------------------------------------------------


def test_a_response(script: Script, gpt: Any) -> None:
    script.said = ["Grüße"]
    limits = {"max_output_tokens": 9, "temperature": 0.5}
    response = gpt.responses.create(model="m", input="hi", instructions="be kind", **limits)
    assert response.output_text == "Grüße" and response.status == "completed"
    assert response.usage.output_tokens == len("Grüße".encode()) and response.weight_version == 5
    (ask,) = script.asked
    assert list(ask.messages) == [{"role": "system", "content": "be kind"}, user("hi")]
    assert ask.tokens_max == 9 and response.usage.input_tokens == len(ask.prompts[0])
    script.said, script.finish = ["cut off"], Finish.LENGTH
    response = gpt.responses.create(model="m", input="hi")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", ["héllo", f"I look. {CALL}{CALL}", CALL])
def test_the_events_add_up_to_the_response(script: Script, gpt: Any, size: int, text: str) -> None:
    script.said, script.size = [text, text], size
    whole = gpt.responses.create(model="m", input="hi", tools=[OPENAI_TOOL])
    with gpt.responses.stream(model="m", input="hi", tools=[OPENAI_TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    assert kinds.count("response.output_item.done") == len(final.output) == len(whole.output)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text == text.replace(CALL, "")
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Köln"] * text.count(CALL)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_function_there_and_back(script: Script, gpt: Any, streamed: bool) -> None:
    script.said = [f"I look.{CALL}", "Rain."]
    more = {"model": "m", "input": [user("?")], "tools": [OPENAI_TOOL]}
    if streamed:
        with gpt.responses.stream(**more) as stream:
            first = stream.get_final_response()
    else:
        first = gpt.responses.create(**more)
    call = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    # As the client's own loop does: all items of the answer go back as they are.
    given = [user("?"), *(item.to_dict() for item in first.output), result]
    for item in given:
        item.pop("parsed_arguments", None)
    second = gpt.responses.create(model="m", input=given, tools=[OPENAI_TOOL])
    assert second.output_text == "Rain."
    asked = list(script.asked[1].messages)
    assert asked[1] == script.replies[0] and asked[1]["content"] == "I look."
    assert asked[2:] == [{"role": "tool", "content": "wet", "tool_call_id": call.call_id}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_refused_responses_name_the_field(gpt: Any, body: dict[str, Any], field: str) -> None:
    request = {"model": "m", "input": "hi"} | body
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.post("/responses", cast_to=dict[str, object], body=request)
    assert caught.value.param == field and field in caught.value.message
