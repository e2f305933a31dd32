"""`dora_rl.Engine`: the native engine of a model or of a run, to generate with.

    with dora_rl.Engine("model") as engine:
        for answers in engine.generate(["1+1=", "2+2="], num_samples=4, tokens_max=32):
            print([(answer.text, answer.logprob) for answer in answers])

The engine, its sampling and its log-probs are those of a run's instances, here in this process.
Invariant: what is generated depends on prompts, parameters and seed alone, not on what else is
asked for, nor on the thread. One call at a time; others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from dora_rl.api.words import in_words_of_python
from dora_rl.config import RolloutConfig
from dora_rl.engine.engine import Engine as NativeEngine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.setup.hub import local_model
from dora_rl.setup.prepare import choose_device
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import Finish, RequestId, SamplingParams, Trajectory, UserError
from dora_rl.user_code import require
from dora_rl.weights.run_models import find_model

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or messages, which go through the chat template."""
_NAMES = ("temperature", "top_k", "top_p", "min_p", "stop_ids", "stop_strings", "ignore_eos")


@dataclass(frozen=True, slots=True)
class Generation:
    """One response. `logprobs` are those of its tokens under the policy that sampled them: at the
    temperature and with the filters of the sampling."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish: str  # stop or length
    prompt_ids: list[int]

    @property
    def logprob(self) -> float:
        """Of the whole response."""
        return sum(self.logprobs)


class Engine:
    """`model`: a Hugging Face directory, an id of the hub, or the directory of a run, of which
    `step` chooses the weights ("last", "best" or steps trained). `options` are keys of [rollout],
    such as `kv_bytes_max`, `context_max` or `dtype`."""

    def __init__(
        self,
        model: str | Path,
        *,
        step: int | str = "last",
        device: str = "auto",
        threads: int = 0,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        import torch

        with in_words_of_python():
            place = Path(local_model(str(getattr(model, "directory", model))))
            found = find_model(place, str(step))
        self.tokenizer = open_tokenizer(found.directory, trust_remote_code)
        device = choose_device(device, "Engine: device")
        if "dtype" not in options:
            options["dtype"] = "float32" if device == "cpu" else "bfloat16"
        if threads:
            torch.set_num_threads(threads)
        known = EngineOptions(device=device, versions_max=1, **options)
        self._engine: NativeEngine | None = NativeEngine(
            read_spec(found.directory), known, decode=self.tokenizer.decode
        )
        self._engine.load(found.version, found.source)
        self.label, self.version = found.label, found.version
        self._groups, self._lock = count(), threading.Lock()

    def __repr__(self) -> str:
        return f"<Engine of {self.label}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give its memory back."""
        with self._lock:
            self._engine = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        num_samples: int = 1,
        tokens_max: int = 256,
        seed: int = 0,
        **sampling: Any,
    ) -> list[list[Generation]]:
        """`num_samples` responses to each prompt, in the order of the prompts. One prompt alone is
        a list of one. `sampling`: temperature (0 is greedy), top_k, top_p, min_p, stop_ids,
        stop_strings, ignore_eos."""
        unknown = next((name for name in sampling if name not in _NAMES), "")
        require(
            (not unknown, f"generate: unknown argument {unknown!r}; there are {', '.join(_NAMES)}"),
            (num_samples >= 1, f"generate: num_samples is {num_samples}; give 1 or more"),
        )
        params = RolloutConfig(tokens_max=tokens_max, **sampling).sampling_params()
        asked = [self._ids(prompt) for prompt in _listed(prompts)]
        with self._lock:
            require((self._engine is not None, "generate: this engine is closed"))
            return self._generate(asked, num_samples, params, seed)

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if all(isinstance(one, int) for one in prompt):
            return tuple(prompt)  # pyright: ignore[reportReturnType]
        require(
            (
                bool(getattr(self.tokenizer, "chat_template", None)),
                "generate: a prompt is a message list, and the tokenizer has no chat template",
            )
        )
        text = self.tokenizer.apply_chat_template(
            list(prompt), tokenize=False, add_generation_prompt=True
        )
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        num_samples: int,
        params: SamplingParams,
        seed: int,
    ) -> list[list[Generation]]:
        engine = self._engine
        assert engine is not None
        groups = [next(self._groups) for _ in prompts]
        ended: dict[RequestId, Trajectory] = {}
        try:
            for number, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
                for sample in range(num_samples):
                    # The draws depend on the place in this call, not on the calls before.
                    stream = RequestId(number, sample)
                    engine.submit(
                        Request(
                            RequestId(group, sample),
                            self.version,
                            prompt,
                            params,
                            seed,
                            stream=stream,
                        )
                    )
            while engine.has_work():
                ended |= {o.id: o.trajectory for o in engine.step() if o.trajectory is not None}
        except BaseException:
            engine.start_over()  # Ctrl-C in the middle leaves an engine that can be used
            raise
        return [
            [self._told(prompt, ended[RequestId(group, s)]) for s in range(num_samples)]
            for group, prompt in zip(groups, prompts, strict=True)
        ]

    def _told(self, prompt: tuple[int, ...], one: Trajectory) -> Generation:
        if one.finish not in (Finish.STOP, Finish.LENGTH):
            raise UserError(f"generate: {one.failure}")
        ids = one.token_ids.tolist()
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Generation(text, ids, one.logprobs.tolist(), one.finish.value, list(prompt))


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt, in any of its forms, is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    several = list(prompts)
    alone = several and isinstance(several[0], (int, Mapping))
    return [several] if alone else several
