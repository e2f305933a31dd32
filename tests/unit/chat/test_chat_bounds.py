"""The table of bounds: what is inside passes, what is outside is refused by its field's name."""

from __future__ import annotations

import json
from math import inf, nextafter

import pytest

from dora_rl.chat.bounds import (
    CHAT,
    COMPLETION,
    FIELDS,
    MESSAGES,
    RESPONSES,
    Field,
    checked,
    fields_of,
)
from dora_rl.chat.kinds import (
    Number,
    Text,
    Unfit,
    Whole,
)
from dora_rl.chat.requests import ApiError, fields, parsed, read_chat, read_completion

CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
BODY = {"model": "m", "prompt": "x"}
CLAUDE_BODY = CHAT_BODY | {"max_tokens": 5}
BASE = {CHAT: CHAT_BODY, COMPLETION: BODY, "session": {}, "reward": {"reward": 0}}
BASE |= {MESSAGES: CLAUDE_BODY, RESPONSES: {"model": "m", "input": "x"}}
DEEP: list[object] = []
for _ in range(50):
    DEEP = [DEEP]
SURROGATE = json.loads('"\\ud800"')
# No field of any request can be one of these.
JUNK = [float("nan"), float("inf"), -float("inf"), 10**30, -(10**400), 1.5e308, [[]], {"a": {}}]
JUNK += [DEEP, SURROGATE, "x" * (1 << 18), [None] * 5000, True]
TAKEN = {
    "prompt": ["x" * (1 << 18)],
    "chat_template_kwargs": [{"a": {}}],
    "stop": [[]],
    "stream_options": [{"a": {}}],
    "text": [{"a": {}}],
} | {key: ["x" * (1 << 18)] for key in ("system", "instructions", "input")}
FLAGS = {
    "echo",
    "ignore_eos",
    "stream",
    "return_token_ids",
    "logprobs",
    "parallel_tool_calls",
    "store",
}


def refused(endpoint: str, body: dict[str, object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        fields(endpoint, body)
    assert caught.value.status == 400
    return caught.value


def test_a_string_that_does_not_fit_is_not_called_no_string():
    block = {"role": "user", "content": [{"type": "image", "source": {}}]}
    said = str(refused(MESSAGES, CLAUDE_BODY | {"messages": [block]}))
    assert said.endswith("no other block is supported, not another string")
    said = str(refused(CHAT, CHAT_BODY | {"model": "x" * 300}))
    assert said.endswith("a string of 1 to 256 characters, not a string of 300 characters")
    assert str(refused(CHAT, CHAT_BODY | {"model": "x" * 300})).count("xxx") == 0


ROWS = [(field, endpoint) for field in FIELDS for endpoint in field.of]


@pytest.mark.parametrize(("field", "endpoint"), ROWS, ids=[f"{e}-{f.name}" for f, e in ROWS])
def test_junk_is_refused_with_the_name_and_the_range(field: Field, endpoint: str) -> None:
    for value in JUNK:
        if any(value is one or value == one for one in TAKEN.get(field.name, [])):
            continue
        if value is True and field.name in FLAGS:
            continue
        error = refused(endpoint, BASE[endpoint] | {field.name: value})
        assert error.param == field.name
        assert error.message.startswith(f"'{field.name}") and " must be " in error.message
        assert len(error.message) < 1000


def has_range(kind: object) -> bool:
    return isinstance(kind, (Whole, Number)) or (isinstance(kind, Text) and kind.most < 1 << 20)


RANGES = [(field, endpoint) for field, endpoint in ROWS if has_range(field.kind)]


@pytest.mark.parametrize(("field", "endpoint"), RANGES, ids=[f"{e}-{f.name}" for f, e in RANGES])
def test_the_ends_of_a_range_are_inside_and_the_next_values_outside(
    field: Field, endpoint: str
) -> None:
    kind, base = field.kind, BASE[endpoint]
    match kind:
        case Whole(least, most):
            inside, outside = [least, most], [least - 1, most + 1, float(least), str(least)]
        case Number(least, most):
            inside, outside = (
                [least, most],
                [nextafter(least, -inf), nextafter(most, inf), str(least)],
            )
        case Text(least, most):
            inside, outside = ["x" * least, "x" * most], ["x" * (least - 1), "x" * (most + 1), 5]
        case _:
            raise AssertionError(f"{kind} has no range")
    for value in inside:
        assert fields(endpoint, base | {field.name: value})[field.name] == value
    for value in outside:
        assert refused(endpoint, base | {field.name: value}).param == field.name


def test_every_field_has_one_row_for_each_endpoint() -> None:
    for endpoint in BASE:
        names = [field.name for field in fields_of(endpoint)]
        assert len(set(names)) == len(names)


def test_null_is_not_given_and_what_nobody_knows_is_passed_over() -> None:
    nulls = {field.name: None for field in fields_of(CHAT) if not field.needed}
    assert read_chat(CHAT_BODY | nulls | {"user": "me", "x": DEEP}, None) == read_chat(
        CHAT_BODY, None
    )
    for name in ("model", "messages"):
        assert refused(CHAT, CHAT_BODY | {name: None}).param == name
        rest = {key: value for key, value in CHAT_BODY.items() if key != name}
        assert "you must provide" in refused(CHAT, rest).message


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "wizard", "content": "x"}, "[0].role"),
        ({"content": "x"}, "[0].role"),
        ({"role": "user", "content": 5}, "[0].content"),
        ({"role": "user", "content": None}, "[0].content"),
        ({"role": "user", "content": SURROGATE}, "[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 5}, "[0].name"),
        ({"role": "tool", "content": "x", "tool_call_id": {}}, "[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "[0].tool_calls[0].function.arguments",
        ),
        ("x", "[0]"),
    ],
)
def test_messages_are_refused_where_they_are_wrong(message: object, where: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(CHAT_BODY | {"messages": [message]}, None)
    assert caught.value.param == "messages"
    assert f"'messages{where}' must be" in caught.value.message


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "tool",
    [
        5,
        {"type": "function"},
        {"type": "function", "function": "f"},
        {"type": "function", "function": {"name": {}}},
        {"type": "web_search", "function": {"name": "f"}},
        TOOL | {"deep": DEEP},
        TOOL | {"wide": [0] * 10_000},
        TOOL | {"long": "x" * (1 << 19)},
        TOOL | {"huge": 10**30},
        TOOL | {"endless": float("inf")},
        TOOL | {"text": SURROGATE},
        TOOL | {SURROGATE: 1},
    ],
)
def test_tools_are_refused_where_code_or_a_template_would_stumble(tool: object) -> None:
    assert refused(CHAT, CHAT_BODY | {"tools": [tool]}).param == "tools"


def test_a_tool_reaches_the_template_as_it_was_written() -> None:
    written = TOOL | {"strict": True, "x": [1, 2.5, None]}
    assert read_chat(CHAT_BODY | {"tools": [written]}, None).tools == (written,)


def test_a_refusal_repeats_no_text_of_the_client() -> None:
    secret = "the secret of my company"
    for body in ({"stop": [secret * 20]}, {"temperature": secret}, {"tool_choice": secret}):
        assert secret not in refused(CHAT, CHAT_BODY | body).message
    said = refused(CHAT, CHAT_BODY | {"top_k": 10**30}).message
    assert said == "'top_k' must be a whole number from -1 to 2147483647, not a number of 31 digits"


def test_templates_of_clients_need_leave() -> None:
    source = "{{ messages }}"
    for body in ({"chat_template": source}, {"chat_template_kwargs": {"chat_template": source}}):
        with pytest.raises(ApiError) as caught:
            read_chat(CHAT_BODY | body, None)
        assert caught.value.param == next(iter(body))
    ask = read_chat(CHAT_BODY | {"chat_template": source}, None, client_templates=True)
    assert ask.template_options == {"chat_template": source}
    for name in ("tokenize", "return_dict", "messages", "tokenizer_kwargs"):
        body = {"chat_template_kwargs": {name: True}}
        assert refused(CHAT, CHAT_BODY | body).param == "chat_template_kwargs"


def test_prompts_of_all_four_forms() -> None:
    for prompt, expected in (
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ):
        assert read_completion(BODY | {"prompt": prompt}, None)[1] == expected
    for prompt in ("", [], [""], [[]], [1, "a"], ["a", 1], [True], [1.0], [-1], {"a": 1}, [[1], 2]):
        with pytest.raises(ApiError) as caught:
            read_completion(BODY | {"prompt": prompt}, None)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b"[]", b'"x"'])
def test_bodies_that_are_no_object(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(body)
    assert caught.value.status == 400


def test_what_is_unfit_says_where() -> None:
    with pytest.raises(Unfit) as caught:
        checked(CHAT, CHAT_BODY | {"stop": ["a", 5]})
    assert caught.value.where == "stop[1]"
