"""A teacher that is served: log-probs of the policy's samples, over an OpenAI-compatible endpoint.

Asks `/completions` to echo a text with log-probs, as `dora-rl serve` and vLLM do. Text goes out as
token ids alone, so that nothing is tokenised a second time. Never makes a number up: what the
endpoint does not give, or gives for other tokens, is a failure with its cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_rl.config import RewardConfig
from dora_rl.histories import rows_of
from dora_rl.rewards.endpoint import NUM_ATTEMPTS, Endpoint, EndpointFailed
from dora_rl.types import Branch

if TYPE_CHECKING:
    from dora_rl.types import Floats, Ints, Mask

_BYTES_PER_TOKEN = 1 << 10  # of an answer, at most
_BYTES_MIN = 1 << 20


class ServedTeacher:
    """Of `reward.teacher_url`. Safe in several threads."""

    def __init__(self, section: RewardConfig, tokens_max: int = 1 << 18) -> None:
        self._endpoint = Endpoint(
            "the teacher",
            section.teacher_url.rstrip("/") + "/completions",
            section.teacher_key_variable,
            section.timeout_s,
            section.attempts or NUM_ATTEMPTS,
            section.retry_wait_s,
            _BYTES_MIN + _BYTES_PER_TOKEN * tokens_max,
        )
        self._name, self._num_threads = section.teacher_name, section.concurrent_max

    def text_logprobs(self, token_ids: Sequence[int]) -> tuple[list[float], list[str]]:
        """Of each token after the first; and each token as the endpoint writes it."""
        ids = list(map(int, token_ids))
        body: dict[str, Any] = {
            "model": self._name,
            "prompt": ids,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
            "temperature": 1.0,
            "return_token_ids": True,
        }

        def read(told: Any) -> tuple[list[float], list[str]]:
            choice = told["choices"][0]
            found = choice["logprobs"]["token_logprobs"][1:]
            read_ids = choice.get("prompt_token_ids", ids)
            if read_ids != ids or len(found) != len(ids) - 1:
                raise EndpointFailed("the teacher read other tokens than it was given", None)
            if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in found):
                raise EndpointFailed("the teacher left log-probs of the text out", None)
            return list(map(float, found)), list(choice["logprobs"]["tokens"])

        return self._endpoint.ask(body, read)

    def sample_logprobs(
        self, prompt_ids: Ints, token_ids: Ints, loss_mask: Mask, branches: Sequence[Branch] = ()
    ) -> Floats:
        """Of each token of a response: NaN in what belongs to no row that is trained."""
        out = np.full(len(token_ids), np.nan, np.float32)
        for row in rows_of(prompt_ids, token_ids, loss_mask, branches):
            found, _ = self.text_logprobs(row.token_ids.tolist())
            out[row.own] = np.asarray(found, np.float32)[row.place - 1]
        return out

    def several(
        self, asked: Sequence[tuple[Ints, Ints, Mask, Sequence[Branch]]]
    ) -> list[Floats | EndpointFailed]:
        """At once; each has its log-probs, or why there are none."""

        def one(sample: tuple[Ints, Ints, Mask, Sequence[Branch]]) -> Floats | EndpointFailed:
            try:
                return self.sample_logprobs(*sample)
            except EndpointFailed as failed:
                return failed

        with ThreadPoolExecutor(self._num_threads) as pool:
            return list(pool.map(one, asked))
