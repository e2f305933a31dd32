"""A user's function as a reward: form found by signature, time limit, retries, errors as values.

Never lets an exception of the user's code out of `score`. Invariant: a batch call that fails is
repeated sample by sample, so that one bad sample costs no other its score.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, cast

from dora_rl.rewards import forms
from dora_rl.rewards.base import CallLimits, ScoreError, ScoreItem
from dora_rl.rewards.calls import Expired, deadline, run_async
from dora_rl.rewards.forms import Form, MissingColumn
from dora_rl.types import REWARD_MAX, UserError
from dora_rl.user_code import raised

NUM_ATTEMPTS_WAITING = 3


class FunctionReward:
    """`FunctionReward("my.py:f", f).score(items)`; see `forms` for what `f` may look like."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        form: str = "auto",
        options: Mapping[str, Any] | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        if inspect.isclass(function):
            raise UserError(f"reward: {name} is a class; give a function or an instance")
        self.name = name
        self.limits = limits or CallLimits()
        self._function = function
        self._signature = forms.read_signature(name, function)
        self._options = dict(options or {})
        self._check_options()
        found = forms.find_form if form == "auto" else lambda *_: Form(form)
        self.form = found(name, function, self._signature)
        annotation = getattr(function, "__annotations__", {}).get("completion")
        self._text = annotation in (str, "str")
        self.many = self._signature.asynchronous
        self._attempts = self.limits.attempts or (NUM_ATTEMPTS_WAITING if self.many else 1)

    def _check_options(self) -> None:
        unknown = set(self._options) - set(self._signature.names)
        if unknown and not self._signature.takes_any:
            raise UserError(
                f"reward: {self.name} takes no argument {sorted(unknown)[0]!r}; "
                f"its arguments are {', '.join(self._signature.names)}"
            )

    def missing(self, columns: Collection[str]) -> list[str]:
        """Arguments without a default that neither the form, the options nor the data provide."""
        known = set(self._options) | set(columns) | set(forms.ANSWER_NAMES)
        known |= {
            Form.TRL: {*forms.TRL_NAMES, "trainer_state", "log_extra", "log_metric"},
            Form.VERL: {"data_source", "solution_str", "ground_truth", "extra_info"},
            Form.VERIFIERS: set(forms.VERIFIERS_NAMES),
            Form.PLAIN: {"completion"},
        }[self.form]
        return [name for name in self._signature.required if name not in known]

    @property
    def needs_answer(self) -> bool:
        """Whether a row without an answer cannot be scored: an argument without a default is it."""
        return any(name in forms.ANSWER_NAMES for name in self._signature.required)

    @property
    def arguments(self) -> tuple[str, ...]:
        return self._signature.names

    def close(self) -> None:
        return None

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        if not items:
            return []
        if self.form is not Form.TRL:
            if self._signature.asynchronous:
                return self._run_together([[item] for item in items])
            return [self._one_call([item])[0] for item in items]
        scores = self._one_call(items)
        if len(items) > 1 and _is_failure(scores):
            if self._signature.asynchronous:
                return self._run_together([[item] for item in items])
            return [self._one_call([item])[0] for item in items]
        return scores

    def _one_call(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        if self._signature.asynchronous:
            return self._run_together([items])
        for attempt in range(1, self._attempts + 1):
            outcome = self._try_sync(items)
            if not _is_failure(outcome) or attempt == self._attempts:
                return outcome
            time.sleep(self.limits.retry_wait_s * attempt)
        raise AssertionError("attempts is at least 1")

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
            async with slots:
                for attempt in range(1, self._attempts + 1):
                    outcome = await self._try_async(items)
                    if not _is_failure(outcome) or attempt == self._attempts:
                        return outcome
                    await asyncio.sleep(self.limits.retry_wait_s * attempt)
            raise AssertionError("attempts is at least 1")

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
            return forms.trl_arguments(self._signature, items, self._options)
        make = {
            Form.VERL: forms.verl_arguments,
            Form.PLAIN: forms.plain_arguments,
            Form.VERIFIERS: functools.partial(forms.verifiers_arguments, text=self._text),
        }[self.form]
        return make(self._signature, items[0], self._options)

    def _read(self, result: Any, num_items: int) -> list[float | ScoreError]:
        if self.form is not Form.TRL:
            return [read_score(result)]
        if not hasattr(result, "__len__") or isinstance(result, (str, Mapping)):
            wrong = f"returned {type(result).__name__}, not a list of {num_items} scores"
            return [ScoreError(wrong)] * num_items
        if len(result) != num_items:
            wrong = f"returned {len(result)} scores for {num_items} completions"
            return [ScoreError(wrong)] * num_items
        return [read_score(value) for value in result]

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
    if isinstance(value, str):
        return ScoreError("returned str, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # the last: an integer of hundreds of digits
        return ScoreError(f"returned {type(value).__name__}, not a number")
    if not abs(number) <= REWARD_MAX:
        beyond = f", beyond ±{REWARD_MAX:g}" if math.isfinite(number) else ""
        return ScoreError(f"returned {number}{beyond}")
    return number
