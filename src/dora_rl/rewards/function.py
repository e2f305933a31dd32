"""A user's function as a reward: form found by signature, time limit, retries, errors as values.

The four ways the field writes a reward function are told apart by the names of the parameters:

    trl        f(prompts, completions, completion_ids, **columns) -> list[float | None]
    verl       compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float|dict
    verifiers  f(prompt, completion, answer, state, info) -> float, any subset, by name
    plain      f(completion, answer) -> float

`verifiers` functions read messages (`completion[-1]["content"]`), plain ones a string, and both
may be written `f(completion, answer)`. So that signature is taken as verifiers if the function is
asynchronous, annotates a list, or mentions "content"; otherwise it is plain. `form` in the config
overrides all of this.

Never lets an exception of the user's code out of `score`. Invariant: a batch call that fails is
repeated sample by sample, so that one bad sample costs no other its score.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType
from typing import Any, TypeVar, cast

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import Reward, ScoreError, ScoreItem
from dora_rl.types import REWARD_MAX, UserError
from dora_rl.user_code import raised, require

NUM_ATTEMPTS_WAITING = 3
ANSWER_NAMES = ("answer", "ground_truth", "solution", "label")
TRL_NAMES = ("prompts", "completions", "completion_ids", "completions_ids")
FORMS_HELP = (
    "write it as f(prompts, completions, completion_ids, **columns) [TRL], "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) [verl], "
    "f(prompt, completion, answer, state, info) with any of these names [verifiers], "
    "or f(completion, answer) [plain]"
)


def _ignore(*_: object, **__: object) -> None:
    """Nobody reads it here."""


# What TRL's trainer also hands over, for functions that name it: here it goes nowhere.
TRAINER_THINGS = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}


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
    if nameless := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise UserError(f"reward: {spec} takes {nameless[0]!r} by position only; {FORMS_HELP}")
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    # Of an instance, the method that a call runs; looked up on its class, as Python does.
    called = getattr(type(function), "__call__", function)  # noqa: B004
    return Signature(
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
        asynchronous=any(map(inspect.iscoroutinefunction, (function, called))),
    )


def find_form(spec: str, function: Callable[..., Any], signature: Signature) -> Form:
    names = signature.names
    if any(name in names for name in TRL_NAMES):
        return Form.TRL
    if "solution_str" in names:
        return Form.VERL
    require(
        (
            "completion" in names or "state" in names,
            f"reward: {spec} takes ({', '.join(names)}), which is none of the known forms; "
            f"{FORMS_HELP}",
        )
    )
    others = (
        "completion" not in names
        or not set(signature.required) <= {"completion", "answer"}
        or any(name in names for name in ("prompt", "state", "info", "task"))
    )
    return Form.VERIFIERS if others or _reads_messages(function, signature) else Form.PLAIN


def _reads_messages(function: Callable[..., Any], signature: Signature) -> bool:
    annotation = getattr(function, "__annotations__", {}).get("completion")
    if annotation is not None:
        return annotation not in (str, "str")
    if signature.asynchronous:
        return True
    code = getattr(inspect.unwrap(function), "__code__", None)
    return isinstance(code, CodeType) and _mentions_content(code)


def _mentions_content(code: CodeType) -> bool:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return "content" in (*code.co_names, *code.co_consts) or any(map(_mentions_content, inner))


def is_chat(item: ScoreItem) -> bool:
    return not isinstance(item.prompt, str)


def as_messages(item: ScoreItem) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": item.completion}]


def _pick(signature: Signature, known: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The known values a function can take; a required one that is not there is an error."""
    offered = {**known, **options}
    if absent := [name for name in signature.required if name not in offered]:
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
    rarer = {"completions_ids": known["completion_ids"], **TRAINER_THINGS}
    known |= {name: value for name, value in rarer.items() if name in signature.names}
    rows = [_answers(item, item.columns) | item.columns for item in items]
    named = set(signature.names)
    for name in dict.fromkeys(name for row in rows for name in row):
        aliased = name in ANSWER_NAMES and not any(name in item.columns for item in items)
        if name not in ("prompt", "completion", "completion_ids") and (
            name in named or not aliased
        ):
            known.setdefault(name, [row.get(name) for row in rows])
    return _pick(signature, known, options)


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
    as_is = text or is_chat(item)
    info = item.columns.get("info")
    # Datasets keep `info` as JSON text where its rows differ in shape.
    info = json.loads(info) if isinstance(info, str) and info else info or {}
    columns = {name: value for name, value in item.columns.items() if name != "prompt"}
    given: dict[str, Any] = {
        "prompt": item.prompt if as_is else [{"role": "user", "content": item.prompt}],
        "completion": item.completion if text else as_messages(item),
        "answer": item.answer if item.answer is not None else "",
        "info": info,
        "task": item.columns.get("task", "default"),
    }
    state = columns | given | {"finish": item.finish, "completion_ids": list(item.completion_ids)}
    extra = {} if signature.takes_any else columns
    return _pick(signature, extra | given | {"state": state}, options)


def plain_arguments(
    signature: Signature, item: ScoreItem, options: Mapping[str, Any]
) -> dict[str, Any]:
    known: dict[str, Any] = {"completion": item.completion}
    if item.answer is not None or "answer" not in signature.required:
        known["answer"] = item.answer
    return _pick(signature, known, options)


# ---- calling with a time limit
#
# A synchronous call is interrupted by an exception: raised by a timer signal in the main thread
# (which also stops a runaway regular expression or a power with millions of digits), or injected
# into any other thread (which stops Python code only; so workers score in their main thread). What
# holds the interpreter in foreign code cannot be stopped from inside; the process that owns the
# worker is the outer guard. Asynchronous calls run on one event loop in a thread of its own, so
# that they work whether or not the caller is itself inside a loop. No call outlives its limit
# silently.

T = TypeVar("T")

# Code that swallows the interruption (`except: pass` in a loop) is interrupted again.
AGAIN_S = 0.25


class Expired(BaseException):
    """Not an `Exception`: the user's `except Exception` must not swallow it."""


def deadline(timeout_s: float) -> AbstractContextManager[None]:
    """Raise `Expired` in the body once `timeout_s` have passed."""
    in_main = threading.current_thread() is threading.main_thread()
    return _alarm(timeout_s) if in_main else _injected(timeout_s)


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    def expire(*_: object) -> None:
        raise Expired

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s, AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _injected(timeout_s: float) -> Iterator[None]:
    target = ctypes.c_ulong(threading.get_ident())
    inject = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock, done = threading.Lock(), threading.Event()

    def watch() -> None:
        wait_s = timeout_s
        while not done.wait(wait_s):
            wait_s = AGAIN_S
            with lock:
                if not done.is_set():
                    inject(target, ctypes.py_object(Expired))

    watcher = threading.Thread(target=watch, name="reward-deadline", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with lock:
            done.set()
            # An exception that is set but not yet raised would hit whatever runs next.
            inject(target, None)


# By process: a forked child gets its own.
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_loops_lock = threading.Lock()


def run_async(coroutine: Coroutine[Any, Any, T], guard_s: float) -> T:
    """Run to the end on the loop thread; `Expired` if the loop itself is blocked for `guard_s`."""
    pid = os.getpid()
    with _loops_lock:
        if pid not in _loops:
            _loops[pid] = asyncio.new_event_loop()
            threading.Thread(
                target=_loops[pid].run_forever, name="reward-loop", daemon=True
            ).start()
        loop = _loops[pid]
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(guard_s)
    except TimeoutError as error:
        future.cancel()
        with _loops_lock:
            # Blocking code holds this loop; the next call gets a new one.
            if _loops.get(pid) is loop:
                del _loops[pid]
        raise Expired from error


class FunctionReward(Reward):
    """`FunctionReward("my.py:f", f).score(items)`; see above for what `f` may look like."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        form: str = "auto",
        options: Mapping[str, Any] | None = None,
        limits: RewardConfig | None = None,
    ) -> None:
        self.name, self.limits = name, limits or RewardConfig()
        self._function, self._options = function, dict(options or {})
        require(
            (
                not inspect.isclass(function),
                f"reward: {name} is a class; give a function or an instance",
            )
        )
        self._signature = read_signature(name, function)
        unknown = sorted(set(self._options) - set(self._signature.names))
        require(
            (
                not unknown or self._signature.takes_any,
                f"reward: {name} takes no argument {(unknown or [''])[0]!r}; "
                f"its arguments are {', '.join(self._signature.names)}",
            )
        )
        self.form = find_form(name, function, self._signature) if form == "auto" else Form(form)
        found = "found by its parameters" if form == "auto" else "as configured"
        self.how = f"form {self.form.value}, {found} ({', '.join(self._signature.names)})"
        self.needs_answer = any(name in ANSWER_NAMES for name in self._signature.required)
        self._text = getattr(function, "__annotations__", {}).get("completion") in (str, "str")
        self.many = self._signature.asynchronous
        self._attempts = self.limits.attempts or (NUM_ATTEMPTS_WAITING if self.many else 1)

    def missing(self, columns: Collection[str]) -> list[str]:
        """Arguments without a default that neither the form, the options nor the data provide."""
        known = set(self._options) | set(columns) | set(ANSWER_NAMES)
        known |= {
            Form.TRL: {*TRL_NAMES, *TRAINER_THINGS},
            Form.VERL: {"data_source", "solution_str", "ground_truth", "extra_info"},
            Form.VERIFIERS: {"prompt", "completion", "answer", "state", "info", "task"},
            Form.PLAIN: {"completion"},
        }[self.form]
        return [name for name in self._signature.required if name not in known]

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        if self.form is Form.TRL:
            scores = self._calls([items]) if items else []
            if len(items) < 2 or not _is_failure(scores):
                return scores
        return self._calls([[item] for item in items])

    def _calls(self, batches: Sequence[Sequence[ScoreItem]]) -> list[float | ScoreError]:
        if self._signature.asynchronous:
            return self._run_together(batches)
        return [score for batch in batches for score in self._one_call(batch)]

    def _one_call(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        attempt = 1
        while _is_failure(outcome := self._try_sync(items)) and attempt < self._attempts:
            time.sleep(self.limits.retry_wait_s * attempt)
            attempt += 1
        return outcome

    def _try_sync(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        try:
            with deadline(self.limits.timeout_s):
                return self._read(self._function(**self._arguments(items)), len(items))
        except Expired as error:
            raised(f"reward {self.name}, interrupted after {self.limits.timeout_s:g} s", error)
            return self._expired(len(items))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            return self._raised(error, len(items))

    def _run_together(self, batches: Sequence[Sequence[ScoreItem]]) -> list[float | ScoreError]:
        """All batches at once, at most `concurrent_max` running."""
        rounds = math.ceil(len(batches) / self.limits.concurrent_max)
        one_s = self.limits.timeout_s + self.limits.retry_wait_s * self._attempts
        try:
            results = run_async(self._gather(batches), rounds * self._attempts * one_s + 5.0)
        except Expired:
            return self._expired(sum(map(len, batches)))
        return [score for batch in results for score in batch]

    async def _gather(
        self, batches: Sequence[Sequence[ScoreItem]]
    ) -> list[list[float | ScoreError]]:
        slots = asyncio.Semaphore(self.limits.concurrent_max)

        async def one(items: Sequence[ScoreItem]) -> list[float | ScoreError]:
            attempt = 1
            async with slots:
                while (
                    _is_failure(found := await self._try_async(items)) and attempt < self._attempts
                ):
                    await asyncio.sleep(self.limits.retry_wait_s * attempt)
                    attempt += 1
            return found

        return list(await asyncio.gather(*map(one, batches)))

    async def _try_async(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        limit = asyncio.timeout(self.limits.timeout_s)
        try:
            async with limit:
                call = cast(Coroutine[Any, Any, Any], self._function(**self._arguments(items)))
                return self._read(await call, len(items))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            if isinstance(error, TimeoutError) and limit.expired():
                return self._expired(len(items))
            return self._raised(error, len(items))

    def _arguments(self, items: Sequence[ScoreItem]) -> dict[str, Any]:
        if self.form is Form.TRL:
            return trl_arguments(self._signature, items, self._options)
        make = {
            Form.VERL: verl_arguments,
            Form.PLAIN: plain_arguments,
            Form.VERIFIERS: functools.partial(verifiers_arguments, text=self._text),
        }[self.form]
        return make(self._signature, items[0], self._options)

    def _read(self, result: Any, num_items: int) -> list[float | ScoreError]:
        if self.form is not Form.TRL:
            return [read_score(result)]
        if not hasattr(result, "__len__") or isinstance(result, (str, Mapping)):
            wrong = f"returned {type(result).__name__}, not a list of {num_items} scores"
        elif len(result) != num_items:
            wrong = f"returned {len(result)} scores for {num_items} completions"
        else:
            return [read_score(value) for value in result]
        return [ScoreError(wrong)] * num_items

    def _expired(self, num_items: int) -> list[float | ScoreError]:
        return [ScoreError(f"took longer than timeout_s = {self.limits.timeout_s:g}")] * num_items

    def _raised(self, error: Exception, num_items: int) -> list[float | ScoreError]:
        if isinstance(error, MissingColumn):
            return [ScoreError(str(error))] * num_items
        hint = ""
        if self.form is Form.PLAIN and "string indices must be integers" in str(error):
            hint = '; if it reads messages, set form = "verifiers"'
        told = raised(f"reward {self.name}", error)
        return [ScoreError(f"raised {told}{hint}")] * num_items


def _is_failure(outcome: Sequence[float | ScoreError]) -> bool:
    """Something that may go better next time: an exception or a time-out, not an abstention."""
    return all(isinstance(score, ScoreError) and not score.abstained for score in outcome)


def read_score(value: Any) -> float | ScoreError:
    """A finite number, a one-element array, or verl's dictionary with `score`."""
    if isinstance(value, Mapping):
        if "score" not in value:
            return ScoreError("returned a dictionary without 'score'")
        value = value["score"]
    if value is None:
        return ScoreError("returned None", abstained=True)
    try:
        number = float("text" if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):  # the last: an integer of hundreds of digits
        return ScoreError(f"returned {type(value).__name__}, not a number")
    if not abs(number) <= REWARD_MAX:
        beyond = f", beyond ±{REWARD_MAX:g}" if math.isfinite(number) else ""
        return ScoreError(f"returned {number}{beyond}")
    return number
