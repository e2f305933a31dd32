"""What a client may ask for, as plain values checked once, and how it is refused.

`bounds.py` has the bounds of every field. Known fields of the OpenAI API that this server cannot
honour are refused, never ignored silently; fields nobody knows are passed over, as clients send
many. Invariant: what leaves this module is within its limits, and text parts of a message are one
string. Whatever goes wrong, the client gets the body of an `ApiError`, whose message says what to
change: never a traceback or a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dora_rl.chat.bounds import CHAT, COMPLETION, COMPLETION_TOKENS, Unfit, checked
from dora_rl.types import SamplingParams

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """How to answer, the same for both endpoints. `tokens_max` None: as far as the context goes."""

    model: str
    params: SamplingParams
    tokens_max: int | None
    seed: int | None
    num_samples: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    session_id: str | None
    echo: bool = False  # the prompt is part of the answer, with its log-probs
    owner: str = ""  # whose key the request came with
    # Of the chat endpoint alone.
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict[str, Any])
    # What the model is to read, where that is known without a session.
    prompts: tuple[tuple[int, ...], ...] = ()


def parsed(body: bytes) -> dict[str, Any]:
    """The object that a body is."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request("the body is not valid JSON, or too deep, or has a huge number") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object")
    return data


def fields(endpoint: str, data: Mapping[str, object]) -> dict[str, Any]:
    """What the table knows of it, within its bounds."""
    try:
        return checked(endpoint, data)
    except Unfit as error:
        name = error.where.partition("[")[0].partition(".")[0]
        if error.found == "missing":
            raise bad_request(f"you must provide the parameter '{name}'", name) from None
        found = f", not {error.found}" if error.found else ""
        raise bad_request(f"'{error.where}' must be {error.text}{found}", name) from None


def read_chat(
    data: Mapping[str, object], session_id: str | None, client_templates: bool = False
) -> Ask:
    """`POST /v1/chat/completions`. `session_id` is the one of the header or the key, which goes
    before the body's."""
    known = fields(CHAT, data)
    if known.get("top_logprobs") and not known.get("logprobs"):
        raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    options = known.get("chat_template_kwargs", {})
    if "chat_template" in known:
        if not client_templates:
            raise bad_request(
                "'chat_template' must be absent here; the server takes templates from clients "
                "only when it is started with --client-templates",
                "chat_template",
            )
        options = {**options, "chat_template": known["chat_template"]}
    limit = known.get("max_completion_tokens", known.get("max_tokens"))
    top_n = known.get("top_logprobs", 0)
    tools = known.get("tools", []) if known.get("tool_choice") != "none" else []
    return ask_of(
        known,
        session_id,
        limit,
        known.get("logprobs", False),
        top_n,
        messages=tuple(_message(entry, index) for index, entry in enumerate(known["messages"])),
        tools=tuple(tools),
        template_options=options,
    )


def read_completion(
    data: Mapping[str, object], session_id: str | None
) -> tuple[Ask, list[str | tuple[int, ...]]]:
    """`POST /v1/completions`, and its prompts; a flat list of ids is one prompt."""
    known = fields(COMPLETION, data)
    if known.get("best_of") not in (None, known.get("n", 1)):
        raise bad_request("'best_of' must equal 'n' here", "best_of")
    limit, echo = known.get("max_tokens", COMPLETION_TOKENS), known.get("echo", False)
    if not limit and not echo:
        raise bad_request("'max_tokens' must be at least 1 without 'echo'", "max_tokens")
    for name in ("stream", "stop", "stop_token_ids"):
        if echo and known.get(name):
            raise bad_request(f"'echo' and '{name}' do not go together here", "echo")
    top_n = known.get("logprobs")
    ask = ask_of(known, session_id, limit, top_n is not None, top_n or 0, echo=echo)
    prompt = known["prompt"]
    if isinstance(prompt, str):
        return ask, [prompt]
    if isinstance(prompt[0], int):
        return ask, [tuple(prompt)]
    return ask, [entry if isinstance(entry, str) else tuple(entry) for entry in prompt]


def ask_of(
    known: dict[str, Any],
    session_id: str | None,
    tokens_max: int | None,
    logprobs: bool = False,
    top_n: int = 0,
    **more: Any,
) -> Ask:
    """From the checked fields of a request."""
    stop = known.get("stop", [])
    params = SamplingParams(
        temperature=known.get("temperature", 1.0),
        top_k=max(0, known.get("top_k", 0)),
        # The API allows 0, which leaves the most likely token alone.
        top_p=max(known.get("top_p", 1.0), 1e-6),
        min_p=known.get("min_p", 0.0),
        stop_ids=tuple(known.get("stop_token_ids", ())),
        stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=known.get("ignore_eos", False),
        logprobs_top_n=top_n,
    )
    return Ask(
        model=known["model"],
        params=params,
        tokens_max=tokens_max,
        seed=known.get("seed"),
        num_samples=known.get("n", 1),
        stream=known.get("stream", False),
        include_usage=known.get("stream_options", {}).get("include_usage", False),
        logprobs=logprobs,
        return_token_ids=known.get("return_token_ids", False),
        session_id=session_id or known.get("session_id"),
        **more,
    )


def _message(entry: Message, index: int) -> Message:
    """Role, content as one string, and what tools need."""
    calls = entry.get("tool_calls")
    content = entry.get("content")
    if content is None and not calls:
        missing = f"'messages[{index}].content' must be a string or a list of parts, not null"
        raise bad_request(missing, "messages")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    role = "system" if entry["role"] == "developer" else entry["role"]
    message: Message = {"role": role, "content": content or ""}
    if calls:
        message["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": call["function"]}
            for call in calls
        ]
    return message | {name: entry[name] for name in ("name", "tool_call_id") if name in entry}


# -- errors as the OpenAI API gives them: a status code and {"error": {...}} -----------------------

INVALID = "invalid_request_error"


class ApiError(Exception):
    """`ApiError(404, "the model 'x' does not exist", param="model", code="model_not_found")`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.kind = param, code, kind
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind}
        return {"error": error | {"param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorized(given: bool) -> ApiError:
    what = "Incorrect API key" if given else "No API key"
    message = f"{what} provided; send the header 'Authorization: Bearer KEY'"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def model_not_found(model: str, known: str) -> ApiError:
    message = f"The model {model!r} does not exist; this server has {known!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def session_not_found(session_id: str) -> ApiError:
    message = f"No session {session_id!r}; it ended, expired or never began"
    return ApiError(404, message, code="session_not_found")


def session_busy(session_id: str) -> ApiError:
    message = f"Session {session_id!r} is answering another request; a session has one at a time"
    return ApiError(409, message, code="session_busy", kind="conflict_error")


RETRY = {"Retry-After": "1"}


def server_full(limit: int) -> ApiError:
    message = f"The server is full: {limit} responses are being generated; try again"
    code, kind = "rate_limit_exceeded", "rate_limit_error"
    return ApiError(429, message, code=code, kind=kind, headers=RETRY)


def too_many_sessions(limit: int) -> ApiError:
    message = f"The server has {limit} open sessions; end one and try again"
    code, kind = "too_many_sessions", "rate_limit_error"
    return ApiError(429, message, code=code, kind=kind, headers=RETRY)


def overloaded(limit: str, most: int) -> ApiError:
    """503 is given for these limits alone, each by its name."""
    message = f"The server is at its limit {limit} = {most}; try again"
    return ApiError(503, message, code=limit, kind="overloaded_error", headers=RETRY)


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")


def text_too_costly(why: str) -> ApiError:
    """Its text cannot be rendered or tokenised within the limits."""
    return bad_request(f"the text of this request {why}", "messages", "text_too_costly")


def server_error(message: str) -> ApiError:
    return ApiError(500, message, code="internal_error", kind="server_error")


def context_too_long(num_prompt: int, num_wanted: int, context_max: int) -> ApiError:
    message = (
        f"This model's maximum context length is {context_max} tokens, but you asked for "
        f"{num_prompt + num_wanted} ({num_prompt} in the messages, {num_wanted} in the completion)"
    )
    return bad_request(message, "messages", "context_length_exceeded")
