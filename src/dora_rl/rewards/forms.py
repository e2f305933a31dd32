"""The four ways the field writes a reward function, told apart by the names of the parameters.

    trl        f(prompts, completions, completion_ids, **columns) -> list[float | None]
    verl       compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float|dict
    verifiers  f(prompt, completion, answer, state, info) -> float, any subset, by name
    plain      f(completion, answer) -> float

`verifiers` functions read messages (`completion[-1]["content"]`), plain ones a string, and both
may be written `f(completion, answer)`. So that signature is taken as verifiers if the function is
asynchronous, annotates a list, or mentions "content"; otherwise it is plain. `form` in the config
overrides all of this. Nothing here calls a function; it only prepares the arguments.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType
from typing import Any, cast

from dora_rl.rewards.base import ScoreItem
from dora_rl.types import UserError

ANSWER_NAMES = ("answer", "ground_truth", "solution", "label")
TRL_NAMES = ("prompts", "completions", "completion_ids", "completions_ids")
VERIFIERS_NAMES = ("prompt", "completion", "answer", "state", "info", "task")
FORMS_HELP = (
    "write it as f(prompts, completions, completion_ids, **columns) [TRL], "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) [verl], "
    "f(prompt, completion, answer, state, info) with any of these names [verifiers], "
    "or f(completion, answer) [plain]"
)


class Form(StrEnum):
    TRL = "trl"
    VERL = "verl"
    VERIFIERS = "verifiers"
    PLAIN = "plain"


class MissingColumn(Exception):
    """The function asks for something that this row does not have."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes. `required` and `optional` can be given by name."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_any: bool  # has **kwargs
    asynchronous: bool

    @property
    def names(self) -> tuple[str, ...]:
        return self.required + self.optional


def read_signature(spec: str, function: Callable[..., Any]) -> Signature:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"reward: {spec} has no readable signature; {FORMS_HELP}") from error
    required, optional, takes_any = list[str](), list[str](), False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(
                f"reward: {spec} takes {parameter.name!r} by position only; {FORMS_HELP}"
            )
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            into = required if parameter.default is parameter.empty else optional
            into.append(parameter.name)
    # Of an instance, the method that a call runs; looked up on its class, as Python does.
    called = getattr(type(function), "__call__", function)  # noqa: B004
    asynchronous = any(map(inspect.iscoroutinefunction, (function, called)))
    return Signature(tuple(required), tuple(optional), takes_any, asynchronous)


def find_form(spec: str, function: Callable[..., Any], signature: Signature) -> Form:
    names = signature.names
    if any(name in names for name in TRL_NAMES):
        return Form.TRL
    if "solution_str" in names:
        return Form.VERL
    if not any(name in names for name in ("completion", "state")):
        raise UserError(
            f"reward: {spec} takes ({', '.join(names)}), which is none of the known forms; "
            f"{FORMS_HELP}"
        )
    if not set(signature.required) <= {"completion", "answer"} or "completion" not in names:
        return Form.VERIFIERS
    if any(name in names for name in ("prompt", "state", "info", "task")):
        return Form.VERIFIERS
    return Form.VERIFIERS if _reads_messages(function, signature) else Form.PLAIN


def _reads_messages(function: Callable[..., Any], signature: Signature) -> bool:
    annotation = getattr(function, "__annotations__", {}).get("completion")
    if annotation is not None:
        return annotation not in (str, "str")
    if signature.asynchronous:
        return True
    code = getattr(inspect.unwrap(function), "__code__", None)
    return isinstance(code, CodeType) and _mentions_content(code)


def _mentions_content(code: CodeType) -> bool:
    if "content" in code.co_names or "content" in code.co_consts:
        return True
    return any(_mentions_content(c) for c in code.co_consts if isinstance(c, CodeType))


def is_chat(item: ScoreItem) -> bool:
    return not isinstance(item.prompt, str)


def as_messages(item: ScoreItem) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": item.completion}]


def _pick(signature: Signature, known: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The known values a function can take; a required one that is not there is an error."""
    offered = {**known, **options}
    absent = [name for name in signature.required if name not in offered]
    if absent:
        raise MissingColumn(
            f"needs {', '.join(map(repr, absent))}, and this row has none "
            f"(it has: {', '.join(sorted(map(str, known))) or 'no columns'})"
        )
    if signature.takes_any:
        return offered
    return {name: offered[name] for name in signature.names if name in offered}


def _answers(item: ScoreItem, columns: Mapping[str, object]) -> dict[str, object]:
    """The gold answer under each of its usual names, unless a column has that name."""
    if item.answer is None:
        return {}
    return {name: item.answer for name in ANSWER_NAMES if name not in columns}


def trl_arguments(
    signature: Signature, items: Sequence[ScoreItem], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Lists over the batch. Messages where prompts are messages, otherwise strings."""
    known: dict[str, Any] = {
        "prompts": [item.prompt for item in items],
        "completions": [as_messages(i) if is_chat(i) else i.completion for i in items],
        "completion_ids": [list(item.completion_ids) for item in items],
    }
    if "completions_ids" in signature.names:
        known["completions_ids"] = known["completion_ids"]
    for name, value in _trainer_things().items():
        if name in signature.names:
            known[name] = value
    rows = [_answers(item, item.columns) | item.columns for item in items]
    named = set(signature.names)
    for name in dict.fromkeys(name for row in rows for name in row):
        aliased = name in ANSWER_NAMES and not any(name in item.columns for item in items)
        if name not in ("prompt", "completion", "completion_ids") and (
            name in named or not aliased
        ):
            known.setdefault(name, [row.get(name) for row in rows])
    return _pick(signature, known, options)


def _trainer_things() -> dict[str, Any]:
    """What TRL's trainer also hands over, for functions that name it: here it goes nowhere."""

    def ignore(*_: object, **__: object) -> None:
        return None

    return {"trainer_state": None, "log_extra": ignore, "log_metric": ignore}


def verl_arguments(
    signature: Signature, item: ScoreItem, options: Mapping[str, Any]
) -> dict[str, Any]:
    columns = item.columns
    nested = columns.get("reward_model")
    truth: object = item.answer
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        truth = cast(Mapping[str, object], nested)["ground_truth"]
    extra = columns.get("extra_info")
    known = {
        "data_source": columns.get("data_source", ""),
        "solution_str": item.completion,
        "ground_truth": truth,
        "extra_info": dict(cast(Mapping[str, object], extra)) if extra else {},
    }
    return _pick(signature, known, options)


def verifiers_arguments(
    signature: Signature, item: ScoreItem, options: Mapping[str, Any], *, text: bool
) -> dict[str, Any]:
    """`text`: the function's annotation asks for a string, as for verifiers' text completions."""
    prompt: object = item.prompt
    if not text and not is_chat(item):
        prompt = [{"role": "user", "content": item.prompt}]
    info = item.columns.get("info")
    # Datasets keep `info` as JSON text where its rows differ in shape.
    info = json.loads(info) if isinstance(info, str) and info else info or {}
    columns = {name: value for name, value in item.columns.items() if name != "prompt"}
    given: dict[str, Any] = {
        "prompt": prompt,
        "completion": item.completion if text else as_messages(item),
        "answer": item.answer if item.answer is not None else "",
        "info": info,
        "task": item.columns.get("task", "default"),
    }
    state = columns | given | {"finish": item.finish, "completion_ids": list(item.completion_ids)}
    if signature.takes_any:
        return _pick(signature, given | {"state": state}, options)
    return _pick(signature, columns | given | {"state": state}, options)


def plain_arguments(
    signature: Signature, item: ScoreItem, options: Mapping[str, Any]
) -> dict[str, Any]:
    known: dict[str, Any] = {"completion": item.completion}
    if item.answer is not None or "answer" not in signature.required:
        known["answer"] = item.answer
    return _pick(signature, known, options)
