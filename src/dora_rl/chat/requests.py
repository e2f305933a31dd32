"""What a client may ask for, as plain values checked once, and how it is refused.

Known fields of the OpenAI API that this server cannot honour are refused, never ignored silently;
fields nobody knows are passed over, as clients send many. Invariant: what leaves this module is
within its limits, and text parts of a message are one string. Whatever goes wrong, the client gets
the body of an `ApiError`, whose message says what to change: never a traceback or a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dora_rl.types import SamplingParams

STOPS_MAX = 16
TOP_LOGPROBS_MAX = 20
SAMPLES_MAX = 128
COMPLETION_TOKENS = 16  # what the API gives when a completion names no limit
Message: TypeAlias = dict[str, Any]
Ids: TypeAlias = list[Annotated[int, Field(ge=0)]]


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
    # Of the chat endpoint alone.
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict[str, Any])


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class Body(BaseModel):
    """The fields that both endpoints share."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    n: int | None = Field(default=None, ge=1, le=SAMPLES_MAX)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def shared(
        self, session_id: str | None, tokens_max: int | None, logprobs: bool, top_n: int | None
    ) -> Ask:
        """`session_id` is the one of the header or the key, which goes before the body's."""
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise bad_request(f"'{name}' is not supported here; leave it out", name)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > STOPS_MAX or not all(stops):
            raise bad_request(f"'stop' must be 1 to {STOPS_MAX} non-empty strings", "stop")
        params = SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            # The API allows 0, which leaves the most likely token alone.
            top_p=1.0 if self.top_p is None else max(self.top_p, 1e-6),
            min_p=self.min_p or 0.0,
            stop_ids=tuple(self.stop_token_ids or ()),
            stop_strings=tuple(stops),
            ignore_eos=bool(self.ignore_eos),
            logprobs_top_n=top_n or 0,
        )
        return Ask(
            model=self.model,
            params=params,
            tokens_max=tokens_max,
            seed=self.seed,
            num_samples=self.n or 1,
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            logprobs=logprobs,
            return_token_ids=bool(self.return_token_ids),
            session_id=session_id or self.session_id,
        )


B = TypeVar("B", bound=Body)


class ResponseFormat(BaseModel):
    type: str


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def ask(self, session_id: str | None) -> Ask:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        if self.response_format is not None and self.response_format.type != "text":
            raise bad_request("only 'response_format': {'type': 'text'} here", "response_format")
        if self.tool_choice not in (None, "auto", "none"):
            raise bad_request("'tool_choice' can be 'auto' or 'none' here", "tool_choice")
        limit = self.max_completion_tokens or self.max_tokens
        return replace(
            self.shared(session_id, limit, bool(self.logprobs), self.top_logprobs),
            messages=tuple(_message(entry, index) for index, entry in enumerate(self.messages)),
            tools=tuple(self.tools or ()) if self.tool_choice != "none" else (),
            template_options=self.chat_template_kwargs or {},
        )


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: str | Ids | list[str] | list[Ids]
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None

    def ask(self, session_id: str | None) -> Ask:
        if self.best_of not in (None, self.n or 1):
            raise bad_request("'best_of' must equal 'n' here", "best_of")
        limit = self.max_tokens or COMPLETION_TOKENS
        return self.shared(session_id, limit, self.logprobs is not None, self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt; a flat list of ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("'prompt' is empty", "prompt")
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [entry for entry in self.prompt if not isinstance(entry, int)]


def read(form: type[B], data: object) -> B:
    if not isinstance(data, Mapping):
        raise bad_request("the body must be a JSON object")
    try:
        return form.model_validate(data)
    except ValidationError as error:
        raise _first_line(error) from None


def _first_line(error: ValidationError) -> ApiError:
    """The first complaint, in the words of the API."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return bad_request(f"you must provide the parameter '{field}'", field)
    return bad_request(f"'{field}': {first['msg']}", field)


def _message(entry: Message, index: int) -> Message:
    """Role, content as one string, and what tools need; what is null or unknown is left out."""
    where = f"messages.[{index}]"
    if not isinstance(entry.get("role"), str):
        raise bad_request(f"{where}: 'role' is missing", "messages")
    message: Message = {"role": "system" if entry["role"] == "developer" else entry["role"]}
    content = entry.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, where) for part in content)
    if content is not None and not isinstance(content, str):
        raise bad_request(f"{where}: 'content' must be a string or a list of parts", "messages")
    calls = entry.get("tool_calls")
    if content is None and not calls:
        raise bad_request(f"{where}: 'content' is missing", "messages")
    message["content"] = content or ""
    if calls:
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    for name in ("name", "tool_call_id"):
        if entry.get(name) is not None:
            message[name] = entry[name]
    return message


def _text_part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise bad_request(f"{where}: only text parts are supported", "messages")


def _tool_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise bad_request(f"{where}: a tool call needs 'function'", "messages")
    named = {key: function.get(key) for key in ("name", "arguments")}
    if not all(isinstance(value, str) for value in named.values()):
        raise bad_request(f"{where}: a tool call needs 'name' and 'arguments' strings", "messages")
    return {"id": call.get("id"), "type": "function", "function": named}


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


def server_full(limit: int) -> ApiError:
    message = f"The server is full: {limit} responses are being generated; try again"
    return ApiError(
        429,
        message,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"Retry-After": "1"},
    )


def server_error(message: str) -> ApiError:
    return ApiError(500, message, code="internal_error", kind="server_error")


def context_too_long(num_prompt: int, num_wanted: int, context_max: int) -> ApiError:
    message = (
        f"This model's maximum context length is {context_max} tokens, but you asked for "
        f"{num_prompt + num_wanted} ({num_prompt} in the messages, {num_wanted} in the completion)"
    )
    return bad_request(message, "messages", "context_length_exceeded")
