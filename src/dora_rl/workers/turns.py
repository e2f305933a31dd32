"""What an environment's answer does to a session of the engine: the next turn, or the end.

Shared by the instances and the evaluator. Never tokenizes: ids come in and are appended. Invariant:
an answer is applied to an idle session only, once; a session that has no room for its next turn
ends there, with the reward it has, and is never refused for its length.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.config import RunConfig
from dora_rl.envs.base import Row, TurnText
from dora_rl.envs.host import Answer
from dora_rl.types import Finish, Prompt, RequestId, SamplingParams, Trajectory

if TYPE_CHECKING:
    from dora_rl.workers.engines import InstanceEngine

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15


def apply_answer(
    engine: InstanceEngine, request: RequestId, answer: Answer, params: SamplingParams
) -> Trajectory | None:
    """Begin the next turn; or, where the episode ends, close the session and return it whole."""
    seq = engine.find(request)
    assert seq is not None and not answer.error
    room = engine.length_max - len(seq.tokens) - len(answer.token_ids)
    if not answer.done and room > 0:
        limit = min(params.tokens_max, room)
        engine.extend(request, answer.token_ids, replace(params, tokens_max=limit))
        return None
    whole = answer.done and not answer.cut
    trajectory = replace(seq.trajectory(), finish=Finish.STOP if whole else Finish.LENGTH)
    engine.abort(request)
    return trajectory


def row_of(prompt: Prompt) -> Row:
    """A prompt's row for an environment."""
    wrote: Any = prompt.columns.get("prompt", prompt.text)
    return Row(wrote, prompt.text, prompt.answer, dict(prompt.columns), prompt.token_ids)


def episode_seed(run_seed: int, prompt_index: int) -> int:
    """The same for all samples of a group, so that they face the same episode."""
    x = (run_seed * _SPREAD + prompt_index + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return (x ^ (x >> 31)) & 0x7FFFFFFF


def turn_text(config: RunConfig) -> TurnText:
    """Decoder and encoder of the run's model."""
    from dora_rl.model.directory import read_spec
    from dora_rl.setup.tokenizer import open_tokenizer

    path, rollout = Path(config.model.path), config.rollout
    tokenizer = open_tokenizer(path, config.model.trust_remote_code)
    stop_ids = {*rollout.stop_ids, *read_spec(path).eos_ids}
    return TurnText(tokenizer, stop_ids, rollout.stop_strings, config.data.template_options)
