"""What each request of the SDK may hold, with its bounds; how it is refused.

Never looks at a model. Fields nobody knows are passed over, as a newer SDK may send more; those
that are known and not supported are refused. Invariant: what `read` returns is within the table.
"""

from __future__ import annotations

import json
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
    Text,
    TokenIds,
    Unfit,
    Whole,
)
from dora_rl.chat.requests import bad_request
from dora_rl.tinker import SDK_VERSION
from dora_rl.tinker.messages import Asked
from dora_rl.tinker.trainee import AdamStep
from dora_rl.types import SamplingParams, UserError

TOKENS_MAX = 1 << 22
SAMPLES_MAX = 1024
TOP_MAX = 64
HOUR_S, DECADE_S = 3600, 10 * 366 * 86400

NAME, SEQ = Text(1, 128), Whole(0, INT32_MAX)
METADATA = Json(4, 256, 16384)
IDS = Either((TokenIds(TOKENS_MAX), ListOf(Flag(), 0, 0, "token ids")))
ADAM = (("type", OneOf(("adamw",), '"adamw": there is no other optimizer here')),)
LORA = Record(
    (
        ("rank", Whole(1, 4096)),
        ("seed", Whole(-INT64_MAX, INT64_MAX)),
        ("train_unembed", Flag()),
        ("train_mlp", Flag()),
        ("train_attn", Flag()),
    ),
    ("rank",),
)
CHUNK = Record(
    (
        ("type", OneOf(("encoded_text",), '"encoded_text": this model reads no images')),
        ("tokens", IDS),
    ),
    ("type", "tokens"),
)
PROMPT = Record((("chunks", ListOf(CHUNK, 1, 4096, "chunks")),), ("chunks",))
SAMPLING = Record(
    (
        ("max_tokens", Whole(1, INT32_MAX)),
        ("seed", Whole(-INT64_MAX, (1 << 64) - 1)),
        (
            "stop",
            Either(
                (
                    Text(1, 256),
                    ListOf(Text(1, 256), 0, 64, "strings"),
                    ListOf(Whole(0, INT32_MAX), 0, 256, "token ids"),
                )
            ),
        ),
        ("temperature", Number(1e-3, 100, or_zero=True)),
        ("top_k", Whole(-1, INT32_MAX)),
        ("top_p", Number(0, 1)),
    )
)
# Without an epsilon that float32 can hold, a parameter without a gradient becomes 0/0.
ADAM_PARAMS = Record(
    (
        ("learning_rate", Number(0, 1e6)),
        ("beta1", Number(0, 1 - 1e-9)),
        ("beta2", Number(0, 1 - 1e-9)),
        ("eps", Number(1e-30, 1e6)),
        ("weight_decay", Number(0, 1e6)),
        ("grad_clip_norm", Number(-1e18, 1e18)),
    )
)
OF_MODEL: tuple[tuple[str, Kind], ...] = (("model_id", NAME), ("seq_id", SEQ))
TTL: tuple[tuple[str, Kind], ...] = (("ttl_seconds", Whole(HOUR_S, DECADE_S)),)

CONFIG = Record((("sdk_version", Text(0, 64)),))
SESSION = Record((("sdk_version", Text(0, 64)), ("user_metadata", METADATA)))
SESSION_NAMED = Record((("session_id", NAME),), ("session_id",))
CREATE = Record(
    (
        ("session_id", NAME),
        ("model_seq_id", SEQ),
        ("base_model", Text(1, 4096)),
        ("user_metadata", METADATA),
        ("lora_config", LORA),
        ("optimizer_config", Record(ADAM)),
    ),
    ("session_id", "model_seq_id", "base_model", "lora_config"),
)
INFO = Record((("model_id", NAME),), ("model_id",))
STEP = Record(
    (*OF_MODEL, ("adam_params", ADAM_PARAMS), ("optimizer_params", Record(ADAM, ("type",)))),
    ("model_id", "seq_id"),
)
SAVE = Record(
    (*OF_MODEL, *TTL, ("path", NAME), ("overwrite", Flag()), ("user_metadata", METADATA)),
    ("model_id", "seq_id"),
)
SAVE_SAMPLER = Record(
    (
        *OF_MODEL,
        *TTL,
        ("path", NAME),
        ("sampling_session_seq_id", SEQ),
        ("user_metadata", METADATA),
        ("kind", OneOf(("snapshot", "inflight"), '"snapshot" or "inflight"')),
    ),
    ("model_id", "seq_id"),
)
LOAD = Record(
    (
        *OF_MODEL,
        ("session_id", NAME),
        ("model_seq_id", SEQ),
        ("base_model", Text(1, 4096)),
        ("user_metadata", METADATA),
        ("path", Text(1, 1024)),
        ("optimizer", Flag()),
        ("optimizer_config", Record(ADAM)),
        ("weights_access_token", OneOf(("",), "absent: there are no access tokens here")),
    ),
    ("path", "optimizer"),
)
SAMPLER = Record(
    (
        ("session_id", NAME),
        ("sampling_session_seq_id", SEQ),
        ("base_model", Text(1, 4096)),
        ("model_path", Text(1, 1024)),
    ),
    ("session_id", "sampling_session_seq_id"),
)
SAMPLER_NAMED = Record((("sampling_session_id", NAME),), ("sampling_session_id",))
SAMPLE = Record(
    (
        ("sampling_session_id", NAME),
        ("seq_id", Whole(0, INT64_MAX)),
        ("num_samples", Whole(1, SAMPLES_MAX)),
        ("prompt", PROMPT),
        ("sampling_params", SAMPLING),
        ("prompt_logprobs", Flag()),
        ("topk_prompt_logprobs", Whole(0, TOP_MAX)),
        ("topk_sample_logprobs", Whole(0, TOP_MAX)),
        ("prompt_logprobs_last_n", Whole(1, INT32_MAX)),
        ("target_prompt_logprobs", OneOf((), "absent: it is not supported here")),
        ("prompt_alt_tokens_k", OneOf((0,), "0: it is not supported here")),
        ("record_stability_info", OneOf((False,), "false: it is not supported here")),
    ),
    ("sampling_session_id", "seq_id", "prompt", "sampling_params"),
)
RETRIEVE = Record((("request_id", NAME),), ("request_id",))
WEIGHTS = Record((("tinker_path", Text(1, 1024)),), ("tinker_path",))


def read(record: Record, body: bytes) -> dict[str, Any]:
    """The object of a body, within the bounds of its table; raises `ApiError`."""
    try:
        return record.read(json.loads(body))
    except Unfit as error:
        where = error.where.lstrip(".") or "the body"
        found = f", not {error.found}" if error.found else ""
        raise bad_request(f"'{where}' must be {error.text}{found}", where) from None
    except (ValueError, RecursionError):
        raise bad_request("the body is not valid JSON, or too deep, or has a huge number") from None


def adam_step(known: dict[str, Any]) -> AdamStep:
    """With the SDK's defaults."""
    if "optimizer_params" in known:
        raise UserError("this model has AdamW: give optim_step AdamParams")
    given = known.get("adam_params", {})
    return AdamStep(
        lr=given.get("learning_rate", 1e-4),
        betas=(given.get("beta1", 0.9), given.get("beta2", 0.95)),
        eps=given.get("eps", 1e-12),
        weight_decay=given.get("weight_decay", 0.0),
        clip=max(0.0, given.get("grad_clip_norm", 0.0)),
    )


def sampling_asked(known: dict[str, Any], context_max: int) -> Asked:
    """What a sample request wants of the engine; raises `UserError`."""
    prompt = tuple(token for chunk in known["prompt"]["chunks"] for token in chunk["tokens"])
    given, stop = known["sampling_params"], known["sampling_params"].get("stop")
    room = context_max - len(prompt)
    if not prompt or room < 1:
        raise UserError(f"the prompt has {len(prompt)} tokens; 1 to {context_max - 1} fit")
    if given.get("max_tokens", 1) > room:
        raise UserError(f"prompt and max_tokens are more than the context of {context_max} tokens")
    stops = [stop] if isinstance(stop, str) else stop or []
    last = known.get("prompt_logprobs_last_n")
    if last is not None and not (known.get("prompt_logprobs") and last < len(prompt)):
        raise UserError("prompt_logprobs_last_n needs prompt_logprobs, and a longer prompt")
    params = SamplingParams(
        tokens_max=given.get("max_tokens", room),
        temperature=given.get("temperature", 1.0),
        top_k=max(0, given.get("top_k", -1)),
        top_p=given.get("top_p", 1.0),
        stop_ids=tuple(one for one in stops if isinstance(one, int)),
        stop_strings=tuple(one for one in stops if isinstance(one, str)),
        ignore_eos=stop is not None,  # what is given is all that stops it
        logprobs_top_n=known.get("topk_sample_logprobs", 0),
    )
    top_k = known.get("topk_prompt_logprobs", 0)
    return Asked(
        prompt=prompt,
        params=params,
        num_samples=known.get("num_samples", 1),
        seed=given.get("seed"),
        scores_prompt=bool(known.get("prompt_logprobs") or top_k),
        top_prompt=top_k,
        last=len(prompt) if last is None else last,
    )


def sdk_fault(version: str) -> tuple[bool, str]:
    """Whether a client of that version is refused, and what it is told; empty: nothing."""
    ours = _numbers(SDK_VERSION)[:2]
    theirs = _numbers(version)[:2]
    advice = f"pip install tinker=={SDK_VERSION}"
    if theirs == ours:
        return False, ""
    if theirs and theirs < ours:
        return True, f"this server speaks with tinker {SDK_VERSION}, not {version[:32]}; {advice}"
    tested = f"this server was tested with tinker {SDK_VERSION}"
    return False, f"{tested}, not {version[:32] or 'this one'}; if in doubt {advice}"


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:3]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()
