"""The bounds of everything a client may send: one table, read by the checks, the docs and the fuzz.

`FIELDS` has a row for each field of each request: its name, where it belongs, what it may be and
what stands for it when it is not there. A field that no row knows is passed over, as clients send
many. Never looks at a model: what depends on one (the vocabulary, the context) is checked where it
is known. Invariant: what `checked` returns is within the table, however wild the body was; a
refusal names the field and what it may be, and repeats no text of the client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dora_rl.chat.kinds import (
    INT32_MAX,
    INT64_MAX,
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
from dora_rl.types import REWARD_MAX

CHAT, COMPLETION = "chat", "completion"
MESSAGES, RESPONSES = "messages", "responses"
OPEN_SESSION, REWARD = "session", "reward"
BOTH = (CHAT, COMPLETION)
OTHERS = (MESSAGES, RESPONSES)

SAMPLES_MAX = 128
TOP_LOGPROBS_MAX = 20
TEMPERATURE_MIN = 1e-3  # logits divided by less are no longer finite
COMPLETION_TOKENS = 16  # what the API gives when a completion names no limit


# -- what messages and tools are made of -----------------------------------------------------------

NAME = Text(1, 256)
SESSION_ID = Text(1, 256)
IDS = TokenIds(1 << 22)
PART = Record(
    (("type", OneOf(("text",), '"text": no other part is supported')), ("text", Text(0))),
    ("type", "text"),
    "a part",
)
CALLED = Record((("name", NAME), ("arguments", Text(0, 1 << 20))), ("name", "arguments"))
CALL = Record((("id", Text(0, 256)), ("function", CALLED)), ("function",), "a tool call")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MESSAGE = Record(
    (
        ("role", OneOf(ROLES, f"one of {', '.join(ROLES)}")),
        ("content", Either((Text(0), ListOf(PART, 0, 4096, "parts")))),
        ("tool_calls", ListOf(CALL, 0, 128, "tool calls")),
        ("name", NAME),
        ("tool_call_id", Text(0, 256)),
    ),
    ("role",),
    "a message",
)
TOOL = Shaped(
    Json(16, 8192, 1 << 18),
    Record(
        (
            ("type", OneOf(("function",), '"function"')),
            ("function", Record((("name", NAME),), ("name",))),
        ),
        ("type", "function"),
        "a tool with type and function.name",
    ),
)
# -- of /v1/messages ------------------------------------------------------------------------------

BLOCKS = ("text", "tool_use", "tool_result")
RESULT = Either((Text(0), ListOf(PART, 0, 4096, "text blocks")))
INPUT = Json(16, 8192, 1 << 20)
BLOCK = Record(
    (
        ("type", OneOf(BLOCKS, f"one of {', '.join(BLOCKS)}: no other block is supported")),
        ("text", Text(0)),
        ("id", Text(0, 256)),
        ("name", NAME),
        ("input", INPUT),
        ("tool_use_id", Text(0, 256)),
        ("content", RESULT),
    ),
    ("type",),
    "a block",
)
TURN = Record(
    (
        ("role", OneOf(("user", "assistant"), "user or assistant")),
        ("content", Either((Text(0), ListOf(BLOCK, 0, 4096, "blocks")))),
    ),
    ("role", "content"),
    "a message",
)
CLAUDE_TOOL = Shaped(
    Json(16, 8192, 1 << 18),
    Record(
        (
            ("type", OneOf(("custom",), '"custom": no tool of the server is supported')),
            ("name", NAME),
            ("description", Text(0)),
            ("input_schema", Json(16, 8192, 1 << 18)),
        ),
        ("name", "input_schema"),
        "a tool with name and input_schema",
    ),
)
# -- of /v1/responses -----------------------------------------------------------------------------

ITEMS = ("message", "function_call", "function_call_output")
TEXTS = ("input_text", "output_text", "text")
ITEM_PART = Record(
    (("type", OneOf(TEXTS, f"one of {', '.join(TEXTS)}")), ("text", Text(0))),
    ("type", "text"),
    "a part",
)
ITEM_TEXT = Either((Text(0), ListOf(ITEM_PART, 0, 4096, "parts")))
ITEM_ROLES = ("system", "developer", "user", "assistant")
ITEM = Record(
    (
        ("type", OneOf(ITEMS, f"one of {', '.join(ITEMS)}: no other item is supported")),
        ("role", OneOf(ITEM_ROLES, f"one of {', '.join(ITEM_ROLES)}")),
        ("content", ITEM_TEXT),
        ("call_id", Text(0, 256)),
        ("name", NAME),
        ("arguments", Text(0, 1 << 20)),
        ("output", ITEM_TEXT),
    ),
    words="an item",
)
FLAT_TOOL = Shaped(
    Json(16, 8192, 1 << 18),
    Record(
        (
            ("type", OneOf(("function",), '"function": no tool of the server is supported')),
            ("name", NAME),
            ("description", Text(0)),
            ("parameters", Json(16, 8192, 1 << 18)),
        ),
        ("type", "name"),
        "a tool with type and name",
    ),
)
# What the renderer takes itself: not for clients, and no template of theirs among it.
RENDERER = frozenset(
    {
        "chat_template",
        "messages",
        "conversation",
        "conversations",
        "tools",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "self",
    }
)


@dataclass(frozen=True, slots=True)
class Field:
    """One row. `default` is what the documents say stands for it; `needed` must be there."""

    name: str
    of: tuple[str, ...]
    kind: Kind
    default: str = "none"
    needed: bool = False


def choice_of(*types: str) -> Record:
    """An object that says one of a few words."""
    words = " or ".join(f'"{word}"' for word in types)
    return Record((("type", OneOf(types, words)),), ("type",), f"an object with type {words}")


STOPS = "strings of 1 to 256 characters"
NO_ID = OneOf(("",), "an empty string: nothing is stored here, so give the whole input")
TEXT_FORMAT = Record(
    (("format", choice_of("text")),), words='an object with format.type "text", if any'
)
ZERO = OneOf((0, 0.0), "0: it is not supported here")
FIELDS = (
    Field("model", (*BOTH, *OTHERS), Text(1, 256), needed=True),
    Field("messages", (CHAT,), ListOf(MESSAGE, 1, 4096, "messages"), needed=True),
    Field(
        "prompt",
        (COMPLETION,),
        Either(
            (
                Text(1),
                IDS,
                ListOf(Text(1), 1, 1024, "strings"),
                ListOf(IDS, 1, 1024, "lists of token ids"),
            )
        ),
        needed=True,
    ),
    Field("n", BOTH, Whole(1, SAMPLES_MAX), "1"),
    Field("temperature", (*BOTH, *OTHERS), Number(TEMPERATURE_MIN, 2, or_zero=True), "1"),
    Field("top_p", (*BOTH, *OTHERS), Number(0, 1), "1"),
    Field("top_k", (*BOTH, MESSAGES), Whole(-1, INT32_MAX), "-1 (off; so is 0)"),
    Field("min_p", BOTH, Number(0, 1), "0"),
    Field("max_tokens", (CHAT,), Whole(1, INT32_MAX), "the rest of the context"),
    Field("max_tokens", (COMPLETION,), Whole(0, INT32_MAX), "16; 0 needs `echo`"),
    Field("max_completion_tokens", (CHAT,), Whole(1, INT32_MAX), "`max_tokens`"),
    Field(
        "stop",
        BOTH,
        Either((Text(1, 256), ListOf(Text(1, 256), 0, 16, STOPS))),
    ),
    Field("stop_token_ids", BOTH, ListOf(Whole(0, INT32_MAX), 0, 256, "token ids")),
    Field("ignore_eos", BOTH, Flag(), "false"),
    Field("seed", BOTH, Whole(-INT64_MAX - 1, INT64_MAX), "a new one"),
    Field("logprobs", (CHAT,), Flag(), "false"),
    Field("top_logprobs", (CHAT,), Whole(0, TOP_LOGPROBS_MAX), "0"),
    Field("logprobs", (COMPLETION,), Whole(0, TOP_LOGPROBS_MAX)),
    Field("stream", (*BOTH, *OTHERS), Flag(), "false"),
    Field(
        "stream_options",
        BOTH,
        Record((("include_usage", Flag()),), words="an object with include_usage, true or false"),
    ),
    Field("return_token_ids", BOTH, Flag(), "false"),
    Field("session_id", BOTH, SESSION_ID),
    Field("tools", (CHAT,), ListOf(TOOL, 0, 128, "tools")),
    Field("tool_choice", (CHAT,), OneOf(("auto", "none"), '"auto" or "none"'), "auto"),
    Field("chat_template_kwargs", (CHAT,), Json(4, 256, 1 << 14, RENDERER)),
    Field("chat_template", (CHAT,), Text(1, 1 << 16), "the model's"),
    Field(
        "response_format",
        (CHAT,),
        Record(
            (("type", OneOf(("text",), '"text"')),), ("type",), words='an object with type "text"'
        ),
    ),
    Field("presence_penalty", BOTH, ZERO, "0"),
    Field("frequency_penalty", BOTH, ZERO, "0"),
    Field("logit_bias", BOTH, OneOf(({},), "an empty object: it is not supported here")),
    Field("echo", (COMPLETION,), Flag(), "false"),
    Field("suffix", (COMPLETION,), OneOf(("",), "an empty string"), "none"),
    Field("best_of", (COMPLETION,), Whole(1, SAMPLES_MAX), "`n`, and nothing else"),
    Field("messages", (MESSAGES,), ListOf(TURN, 1, 4096, "messages"), needed=True),
    Field("max_tokens", (MESSAGES,), Whole(1, INT32_MAX), needed=True),
    Field("system", (MESSAGES,), RESULT),
    Field("stop_sequences", (MESSAGES,), ListOf(Text(1, 256), 0, 16, STOPS)),
    Field("tools", (MESSAGES,), ListOf(CLAUDE_TOOL, 0, 128, "tools")),
    Field("tool_choice", (MESSAGES,), choice_of("auto", "none"), "auto"),
    Field("thinking", (MESSAGES,), choice_of("disabled")),
    Field(
        "input",
        (RESPONSES,),
        Either((Text(1), ListOf(ITEM, 1, 4096, "items"))),
        needed=True,
    ),
    Field("instructions", (RESPONSES,), Text(0)),
    Field("max_output_tokens", (RESPONSES,), Whole(1, INT32_MAX), "the rest of the context"),
    Field("tools", (RESPONSES,), ListOf(FLAT_TOOL, 0, 128, "tools")),
    Field("tool_choice", (RESPONSES,), OneOf(("auto", "none"), '"auto" or "none"'), "auto"),
    Field("parallel_tool_calls", (RESPONSES,), Flag(), "true"),
    Field("store", (RESPONSES,), Flag(), "false: nothing is stored"),
    Field("previous_response_id", (RESPONSES,), NO_ID),
    Field("conversation", (RESPONSES,), NO_ID),
    Field("background", (RESPONSES,), OneOf((False,), "false"), "false"),
    Field("truncation", (RESPONSES,), OneOf(("disabled",), '"disabled"'), "disabled"),
    Field("include", (RESPONSES,), OneOf(([],), "an empty list"), "none"),
    Field("top_logprobs", (RESPONSES,), ZERO, "0"),
    Field("text", (RESPONSES,), TEXT_FORMAT),
    Field("session_id", (OPEN_SESSION,), SESSION_ID, "a new one"),
    Field("id", (OPEN_SESSION,), SESSION_ID, "`session_id`"),
    Field("reward", (REWARD,), Number(-REWARD_MAX, REWARD_MAX), needed=True),
)


def fields_of(endpoint: str) -> list[Field]:
    return [field for field in FIELDS if endpoint in field.of]


def checked(endpoint: str, body: Mapping[str, object]) -> dict[str, Any]:
    """The fields that are there and not null, within their bounds; raises `Unfit`, whose `where`
    begins with the name of the field."""
    known: dict[str, Any] = {}
    for field in fields_of(endpoint):
        value = body.get(field.name)
        if value is None and not field.needed:
            continue
        if field.name not in body:
            raise Unfit(field.kind.text, field.name, "missing")
        try:
            known[field.name] = field.kind.read(value)
        except Unfit as error:
            raise Unfit(error.text, field.name + error.where, error.found) from None
    return known
